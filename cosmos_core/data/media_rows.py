"""Reader of a diffusion model's prepared rows: latents to learn or prompts to sample from, with text embeddings.

    <stage>/data/train.arrow  validation.arrow      one row each, with the shard and name of its tensors
    <stage>/data/tensors/<key>.safetensors          text embeddings and latents, memory-mapped

No text encoder or VAE is needed here: they ran once, in `prepare`. `media_cache.py` writes the shards.

Shapes: C channels, F frames (videos alone), H height, W width, all of the latent.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.prepared import IndexedSequence, open_table
from cosmos_core.errors import DataError, first_line
from cosmos_core.types import Prompt

TENSORS_FOLDER = "tensors"
"""Name of the folder with the shards of tensors, in the folder of the prepared tables."""
NULL_TEXT_KEY = b"null text"
"""Key in the metadata of a prepared file's Arrow schema; the value names the shard (safetensors file) and the entry
with the embedding of the empty prompt."""
_MAX_CACHED_BYTES = 64 << 20
"""Maximum total size in bytes of the prepared rows that stay cached in memory after their first read."""
_MAX_OPEN_SHARDS = 128
_REFERENCE_METADATA_KEYS = ("reference", "answer", "label")


@dataclass(frozen=True, slots=True)
class MediaRow:
    """Encoded image or clip to learn, with the embedding of its prompt."""

    row: int
    """Number of the row in the prepared file, which refers to the same image in every process and epoch."""
    prompt: str
    text: dict[str, Tensor]
    """Embedding of the prompt, as the model adapter's `text_embedding` returns it, without a batch dimension."""
    mean: Tensor
    """Mean of the posterior of the normalised latent, or the latent of a deterministic VAE: (C, [F,] H, W)."""
    logvar: Tensor | None
    """Log-variance of the posterior of the latent, in the shape of `mean`; None: the latent is `mean`."""


RowT = TypeVar("RowT", MediaRow, Prompt)


class _MediaTable(IndexedSequence[RowT]):
    """Prepared rows of a diffusion model; their tensors are read from safetensors files (shards) on access."""

    def __init__(self, table: pa.Table, folder: Path) -> None:
        self._table, self._folder = table, folder

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @cached_property
    def null_text(self) -> dict[str, Tensor]:
        """Text embedding of the empty prompt, without a batch dimension, for guidance and for dropped prompts."""
        return self._read_tensors(json.loads(self._table.schema.metadata[NULL_TEXT_KEY]))

    def _read_cell(self, column: str, row_index: int) -> Any:
        return self._table[column][row_index].as_py()

    def _read_tensors(self, tensor_location: dict[str, str]) -> dict[str, Tensor]:
        """Return the tensors of one entry of a shard, by name; `tensor_location` has the names of shard and entry."""
        shard_key, entry_key = tensor_location["shard"], tensor_location["entry"]
        path = self._folder / TENSORS_FOLDER / f"{shard_key}.safetensors"
        try:
            shard_file, tensor_names = _open_shard(path)
            return {name: shard_file.get_tensor(f"{entry_key}.{name}") for name in tensor_names[entry_key]}
        except (OSError, KeyError, SafetensorError) as error:
            remedy = "delete its folder and run the prepare stage again"
            raise DataError(f"{path} is missing or damaged ({first_line(error)}); {remedy}") from error


class MediaRows(_MediaTable[MediaRow]):
    """Images or clips to learn, by row; callers must not modify the tensors of a row."""

    def __init__(self, table: pa.Table, folder: Path, max_cached_bytes: int = _MAX_CACHED_BYTES) -> None:
        super().__init__(table, folder)
        self._cached_rows: dict[int, MediaRow] = {}
        self._cache_bytes_left = max_cached_bytes

    @cached_property
    def latent_shapes(self) -> list[tuple[int, ...]]:
        """Shape of the latent of each row, by which rows are grouped: the latents of a micro-batch have one shape."""
        return [tuple(shape) for shape in self._table["shape"].to_pylist()]

    def read_item(self, index: int) -> MediaRow:
        """Return row number `index`. The row stays in memory if it fits into the rest of the memory budget for rows."""
        row = self._cached_rows.get(index)
        if row is None:
            latent = self._read_tensors(self._read_cell("media", index))
            text_tensors = self._read_tensors(self._read_cell("text", index))
            row = MediaRow(index, self._read_cell("prompt", index), text_tensors, latent["mean"], latent.get("logvar"))
            num_row_bytes = sum(tensor.nbytes for tensor in (*latent.values(), *text_tensors.values()))
            if num_row_bytes <= self._cache_bytes_left:
                self._cached_rows[index] = row
                self._cache_bytes_left -= num_row_bytes
        return row


class MediaPrompts(_MediaTable[Prompt]):
    """Prompts to sample images or clips from, by row, with their text embeddings."""

    def __init__(self, table: pa.Table, folder: Path, reference_key: str = "", clips: MediaRows | None = None) -> None:
        """Wrap a table of prompts; for `reference_key` see `find_reference_response`. `clips` are the clips of the same
        rows, for rollouts that are conditioned on first frames."""
        super().__init__(table, folder)
        self._reference_key, self._latent_clips = reference_key, clips

    def read_item(self, index: int) -> Prompt:
        metadata = json.loads(self._read_cell("metadata", index))
        return Prompt(
            index, (), self._read_cell("prompt", index), find_reference_response(metadata, self._reference_key),
            embedding=self._read_tensors(self._read_cell("text", index)), metadata=metadata,
            conditioning_clip=self._latent_clips[index].mean.float() if self._latent_clips is not None else None,
        )  # fmt: skip


def find_reference_response(metadata: Mapping[str, Any], reference_key: str) -> str:
    """Return the reference in the metadata of a prompt, with which reward functions compare samples: the value of
    `reference_key` or, if it is empty, of the first of `_REFERENCE_METADATA_KEYS`. Return "" if there is none."""
    reference_column_names = (reference_key,) if reference_key else _REFERENCE_METADATA_KEYS
    return next((str(metadata[name]) for name in reference_column_names if metadata.get(name) is not None), "")


def open_media(folder: Path, split: str) -> MediaRows:
    """Return the images or clips of a split of a prepare stage's data folder. Raise DataError if the file of the split
    is missing, is damaged or has no media."""
    return MediaRows(open_table(folder, split, load_row_kind("media")), folder)


def open_media_prompts(
    folder: Path, split: str, reference_key: str = "", clips: MediaRows | None = None
) -> MediaPrompts:
    """Return the prompts of a split of a prepare stage's data folder; the prepared rows can have media too. Raise
    DataError if the file of the split is missing, is damaged or has no prompts. For `reference_key` see
    `find_reference_response`. `clips` are the clips of the same rows, for rollouts that are conditioned on first
    frames."""
    table = open_table(folder, split, load_row_kind("media_prompts"), load_row_kind("media"))
    return MediaPrompts(table, folder, reference_key, clips)


@lru_cache(maxsize=_MAX_OPEN_SHARDS)
def _open_shard(shard_path: Path) -> tuple[Any, dict[str, list[str]]]:
    """Return an open shard (safetensors file), and the names of the tensors of each of its entries."""
    shard_file = safe_open(str(shard_path), framework="pt")
    tensor_names_by_entry: dict[str, list[str]] = {}
    for key in shard_file.keys():  # noqa: SIM118 - a safetensors file cannot be iterated
        entry_key, tensor_name = key.split(".", 1)
        tensor_names_by_entry.setdefault(entry_key, []).append(tensor_name)
    return shard_file, tensor_names_by_entry
