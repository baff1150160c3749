"""Reading what the `prepare` stage wrote for diffusion: latents to learn, or prompts to draw from, with their text.

    <stage>/data/train.arrow  validation.arrow      one line per row; which tensors it has, by shard and name
    <stage>/data/tensors/<key>.safetensors          text embeddings and latents, memory-mapped

Nothing here needs a text encoder or a VAE: they ran once, in `prepare`. Making these files is `media_cache.py`.

Shapes: C channels, F frames (videos alone), H height, W width, all of the latent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cosmos_core.data.lazy import LazySequence
from cosmos_core.data.prepared import open_table
from cosmos_core.errors import DataError, first_line

TENSORS = "tensors"
"""The folder of the shards, beside the tables."""
NULL_TEXT = b"null text"
"""Key of the schema's metadata: where the embedding of the empty prompt lies."""
_KEPT_BYTES = 64 << 20
"""Of rows in memory, which are read from their shards only once."""
_OPEN_SHARDS = 128


@dataclass(frozen=True, slots=True)
class MediaRow:
    """An image or a clip to learn, encoded."""

    row: int
    """Row number in the prepared file: the same image in every process and epoch."""
    prompt: str
    text: dict[str, Tensor]
    """What `text_embedding` gave for the prompt, without the dimension of the batch."""
    mean: Tensor
    """Mean of the posterior of the normalised latent, or the latent where the VAE draws nothing: (C, [F,] H, W)."""
    logvar: Tensor | None
    """Log-variance of that posterior, of the same shape; None: the latent is `mean`."""


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt to draw images or clips from."""

    row: int
    """Row number in the prepared file: the same prompt in every process and epoch."""
    prompt: str
    text: dict[str, Tensor]
    """What `text_embedding` gave for the prompt, without the dimension of the batch."""
    metadata: dict[str, Any]
    """What a reward may compare with: the other keys of the prompt's line."""


RowT = TypeVar("RowT", MediaRow, MediaPrompt)


class _Media(LazySequence[RowT]):
    """Rows of a table whose tensors lie in shards; nothing of them is held."""

    def __init__(self, table: pa.Table, folder: Path) -> None:
        self._table, self._folder = table, folder

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @cached_property
    def null_text(self) -> dict[str, Tensor]:
        """The text embedding of the empty prompt, without the dimension of the batch: the condition that guidance and
        its dropout put in place of a prompt."""
        return self._tensors(json.loads(self._table.schema.metadata[NULL_TEXT]))

    def _value(self, name: str, index: int) -> Any:
        return self._table[name][index].as_py()

    def _tensors(self, at: dict[str, str]) -> dict[str, Tensor]:
        """Return the tensors of one entry of a shard, by the name of each."""
        path = self._folder / TENSORS / f"{at['shard']}.safetensors"
        try:
            shard, names = _shard(path)
            return {name: shard.get_tensor(f"{at['entry']}.{name}") for name in names[at["entry"]]}
        except (OSError, KeyError, SafetensorError) as error:
            raise DataError(
                f"{path} is missing or damaged ({first_line(error)}); delete its folder and run the prepare stage again"
            ) from error


class MediaRows(_Media[MediaRow]):
    """Images or clips to learn, by row; nobody changes the tensors of a row."""

    def __init__(self, table: pa.Table, folder: Path, kept_bytes: int = _KEPT_BYTES) -> None:
        super().__init__(table, folder)
        self._kept: dict[int, MediaRow] = {}
        self._bytes_left = kept_bytes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each row's latent: micro-batches hold latents of one shape."""
        return [tuple(shape) for shape in self._table["shape"].to_pylist()]

    def item(self, index: int) -> MediaRow:
        """See `LazySequence.item`; rows of little data are kept, as many as there is room for."""
        row = self._kept.get(index)
        if row is None:
            latent = self._tensors(self._value("media", index))
            text = self._tensors(self._value("text", index))
            row = MediaRow(index, self._value("prompt", index), text, latent["mean"], latent.get("logvar"))
            num_bytes = sum(tensor.nbytes for tensor in (*latent.values(), *text.values()))
            if num_bytes <= self._bytes_left:
                self._kept[index] = row
                self._bytes_left -= num_bytes
        return row


class MediaPrompts(_Media[MediaPrompt]):
    """Prompts to draw from, by row."""

    def item(self, index: int) -> MediaPrompt:
        """See `LazySequence.item`."""
        metadata = json.loads(self._value("metadata", index))
        return MediaPrompt(index, self._value("prompt", index), self._tensors(self._value("text", index)), metadata)


def open_media(folder: Path, split: str) -> MediaRows:
    """Return the images or clips of a split of a prepare stage's data folder.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds other rows.
    """
    return MediaRows(open_table(folder, split, "media"), folder)


def open_media_prompts(folder: Path, split: str) -> MediaPrompts:
    """Return the prompts of a split of a prepare stage's data folder: of prompt sets, or of images and clips, whose
    prompts can be drawn from as well.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds other rows.
    """
    kinds: tuple[Literal["media", "media_prompts"], ...] = ("media_prompts", "media")
    return MediaPrompts(open_table(folder, split, *kinds), folder)


@lru_cache(maxsize=_OPEN_SHARDS)
def _shard(path: Path) -> tuple[Any, dict[str, list[str]]]:
    """Return an open shard, and the names of the tensors of each of its entries."""
    shard = safe_open(str(path), framework="pt")
    names: dict[str, list[str]] = {}
    for key in shard.keys():  # noqa: SIM118 - not a mapping
        entry, name = key.split(".", 1)
        names.setdefault(entry, []).append(name)
    return shard, names
