"""The program of a `prepare` stage of a diffusion model: it encodes prompts, images and clips.

Text encoders and VAE run here, once for each text and each image, and never in training. Their outputs are cached by
content in a folder that runs share (`media_cache.py`), so that a stage that was killed, other runs and other algorithms
reuse them; the stage copies what it needs (`media_rows.py`). No encoder is loaded if everything is cached.

A row that cannot be read or decoded is left out, counted and reported; too many of them fail the stage.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from cosmos_core.data.embeddings import read_embedding
from cosmos_core.data.kinds.base import TRAIN
from cosmos_core.data.kinds.registry import row_kind
from cosmos_core.data.media_cache import Entry, Keyed, MediaCache, digest_of, shards_of
from cosmos_core.data.media_pixels import FrameSettings, bucket_sizes, frame_rate, is_upscaled, pixels_of
from cosmos_core.data.media_rows import NULL_TEXT, TENSORS
from cosmos_core.data.media_source import Content
from cosmos_core.data.media_splits import Row, Source, Split, frame_settings, map_in_threads, read_splits
from cosmos_core.data.prepared import STATISTICS, split_path
from cosmos_core.data.statistics import row_remedy
from cosmos_core.errors import DataError, Preempted
from cosmos_core.models.families import open_family
from cosmos_core.registry import code_digest
from cosmos_core.run.content import files_of_model
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.files import SHARED_FOLDER, copy_file, replaced_folder, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

CACHE = "media"
"""Name of the cache folder, in the folder that runs share."""
_TEXT_BATCH_SIZE = 32
_MAX_NAMED_ROWS = 5
_MAX_DECODED_MEDIA = 1000  # maximum number of images or clips of a split that `preview` decodes

T = TypeVar("T")
_Encoded = tuple[dict[str, str], list[int]] | str
"""Location (shard and entry) and shape of an encoded item, or the reason why it could not be encoded."""


def run(stage: Stage) -> Outcome:
    """Encode the rows of a stage with the encoders of its model; errors are those of `source_of` and `prepare`."""
    return prepare(stage, source_of(stage))


def preview(stage: Stage, source: Source | None = None) -> dict[str, tuple[str, int, list[JsonValue]]]:
    """Return a description, the number of rows and the first prompts of each split, for `cosmos check`; errors are
    those of `run`. Nothing is encoded. Images and clips to learn are decoded, or an evenly spaced sample of them if
    there are many."""
    source = source or source_of(stage)
    return {name: _preview_split(stage, source, name, split) for name, split in read_splits(stage, source).items()}


def _preview_split(stage: Stage, source: Source, name: str, split: Split) -> tuple[str, int, list[JsonValue]]:
    skip_reasons, rates, num_remaining = list(split.skipped), set[float](), len(split.kept_rows)
    details = ""
    if encodes_media(stage, name, split):
        frame_config = frame_settings(stage.recipe, split.config, source)
        stride = -(-num_remaining // _MAX_DECODED_MEDIA) or 1
        sampled_media = islice(((row, item.content) for row, item in split.rows_with_items()), 0, None, stride)
        num_enlarged = 0
        for row, rate, decode_error, is_image_enlarged in map_in_threads(
            stage, lambda each: _inspect_row(*each, frame_config), sampled_media
        ):
            stage.progress.beat()
            rates |= {rate} if rate else set()
            num_enlarged += is_image_enlarged
            skip_reasons += [f"{row.where}: {decode_error}"] if decode_error else []
        details = f" (of which {-(-num_remaining // stride):,} were decoded)" if stride > 1 else ""
        details += f", {num_enlarged:,} images smaller than inference_size, which are enlarged" * bool(num_enlarged)
    num_remaining -= len(skip_reasons) - len(split.skipped)
    _check_skipped(name, skip_reasons, split, num_remaining)
    if rates:
        details += f", clips of {min(rates):g}" + (f" to {max(rates):g}" if len(rates) > 1 else "") + " frames a second"
        details += ", which are learned frame by frame" if len(rates) > 1 else ""
    details += f", {len(skip_reasons):,} left out (first: {skip_reasons[0]})" if skip_reasons else ""
    prompts = [
        {"text": row.prompt, "reference": "", "metadata": json.loads(row.metadata)} for row in split.kept_rows[:2]
    ]
    return f"{name}: {num_remaining:,} rows{details}", num_remaining, list(prompts)


def _inspect_row(row: Row, content: Content | None, frame_config: FrameSettings) -> tuple[Row, float, str, bool]:
    """Return the row, the frame rate of its clip (0 if it has none), the reason why its media cannot be decoded (empty
    if they can be), and whether they are enlarged."""
    pixels_or_error = _decode_or_explain(row.media, content, frame_config)
    if isinstance(pixels_or_error, str) or content is None:
        return row, 0.0, str(pixels_or_error), False
    return row, frame_rate(content) if content.is_video else 0.0, "", is_upscaled(content, frame_config)


def encodes_media(stage: Stage, name: str, split: Split) -> bool:
    """Return whether the media of a split are encoded in addition to its prompts."""
    has_media = row_kind(stage.recipe.train.train_policy.rows).has_media
    return has_media and (name == TRAIN or all(row.media for row in split.kept_rows))


def source_of(stage: Stage) -> Source:
    """Return the encoders of a stage's model without their weights; raise ModelError if it is no supported pipeline."""
    stage.progress.phase("prepare")  # a download, and the digest of large weights, may take long
    policy = stage.recipe.policy
    family = open_family(stage.model, policy, "cuda" if torch.cuda.is_available() else "cpu")
    size, has_buckets = policy.diffusers.inference_size, stage.recipe.train.train_policy.dataset.aspect_ratio_buckets
    for image_size in [size, *(bucket_sizes(size, family.size_multiple) if has_buckets else ())]:
        family.latent_shape(*image_size)
    model_folder = family.folder.path
    weights_digest = shared_digest_cache(stage.run_path.parent).digest_files(
        model_folder, files_of_model(model_folder, policy.modality.encoder_files)
    )
    encoder_settings = (policy.diffusers.dtype, policy.diffusers.max_prompt_length, family.size_multiple)
    code_digests = [code_digest(policy.model_class)] if policy.model_class else []
    digest = digest_of(weights_digest, type(family).__name__, encoder_settings, *code_digests)
    return Source(family, digest, family.size_multiple, family.pixels_per_latent[0], family.is_video)


def prepare(stage: Stage, source: Source) -> Outcome:
    """Encode the training rows, and the held-out rows if there are any. Raise DataError if a data set is missing, too
    many rows cannot be used or no row is left, and Preempted if a stop was requested; what is encoded stays in the
    cache."""
    splits = read_splits(stage, source)
    work = _SplitEncoder(stage, source)
    with replaced_folder(stage.path / "data") as folder:
        (folder / TENSORS).mkdir()
        null_text = work.encode_null_text(folder)
        metrics: dict[str, float] = {}
        notices: list[JsonValue] = []
        for name, split in splits.items():
            num_rows, skip_reasons = work.write(name, split, null_text, folder)
            metrics |= {f"data/{name}_rows": float(num_rows), f"data/{name}_skipped_rows": float(len(skip_reasons))}
            num_cut_prompts = work.count_cut_prompts(split)
            metrics[f"data/{name}_cut_prompts"] = float(num_cut_prompts)
            if num_cut_prompts:
                max_tokens = f"policy.diffusers.max_prompt_length = {stage.recipe.policy.diffusers.max_prompt_length}"
                notices.append(f"{name}: {num_cut_prompts} prompts have more tokens than {max_tokens}, and are cut")
                logger.warning("%s", notices[-1])
            if skip_reasons:
                num_others = len(skip_reasons) - _MAX_NAMED_ROWS
                named = "; ".join(skip_reasons[:_MAX_NAMED_ROWS]) + f" and {num_others} more" * (num_others > 0)
                notices.append(f"{name}: {len(skip_reasons)} of {split.total} rows skipped: {named}")
                logger.warning("%s", notices[-1])
        write_json(folder / STATISTICS, metrics)
    logger.info("%d texts and %d images or clips were encoded, the others were known", *work.num_encoded)
    info: dict[str, JsonValue] = {"data": "data", **({"notices": notices} if notices else {})}
    return Outcome(outputs=("data",), metrics=metrics, info=info)


class _SplitEncoder:
    """Encoder of the texts and media that are not cached, and writer of splits from the cache."""

    def __init__(self, stage: Stage, source: Source) -> None:
        self._stage, self._source = stage, source
        self._cache = MediaCache(stage.run_path.parent / SHARED_FOLDER / CACHE, source.digest)
        self._batch_size = stage.recipe.train.train_policy.mini_batch
        self.num_encoded = [0, 0]

    def write(self, name: str, split: Split, null_text: dict[str, str], folder: Path) -> tuple[int, list[str]]:
        """Write a split and return its number of rows, and a reason for each row that was left out; raise DataError if
        too many rows cannot be used, or no row is left."""
        is_media = encodes_media(self._stage, name, split)
        with self._source.encoders.residency.keep_on_device():
            encoded_texts = self._encode_entries(split, is_media=False, folder=folder)
        with self._source.encoders.residency.keep_on_device():
            encoded_media = self._encode_entries(split, is_media=True, folder=folder) if is_media else {}
        skip_reasons = list(split.skipped)
        records = []
        for row in split.kept_rows:
            text = encoded_texts[row.text]
            media = encoded_media[row.media] if is_media else ()
            if isinstance(text, str) or isinstance(media, str):
                skip_reasons.append(f"{row.where}: {text if isinstance(text, str) else media}")
            else:
                records.append((row.prompt, row.metadata, text[0], *media, row.where))
        _check_skipped(name, skip_reasons, split, len(records))
        schema = row_kind("media" if is_media else "media_prompts").schema
        schema = schema.with_metadata({**schema.metadata, NULL_TEXT: json.dumps(null_text).encode()})
        columns = [pa.array([record[i] for record in records], field.type) for i, field in enumerate(schema)]
        with pa.ipc.new_file(split_path(folder, name), schema) as file:
            file.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return len(records), skip_reasons

    def count_cut_prompts(self, split: Split) -> int:
        """Return the number of prompts of a split whose end the text encoder ignores, because they are too long."""
        model_folder = self._source.encoders.folder
        tokenizer_name, num_added_tokens = self._source.encoders.prompt_tokenizer
        if tokenizer_name not in model_folder.components:  # a pipeline of Stable Diffusion 3 without its T5
            return 0
        tokenizer = model_folder.load(tokenizer_name)
        max_tokens = self._stage.recipe.policy.diffusers.max_prompt_length - num_added_tokens
        encoded_rows = (row for row in split.kept_rows if row.text == digest_of("text", row.prompt))
        return sum(len(tokenizer.encode(row.prompt)) > max_tokens for row in encoded_rows)

    def encode_null_text(self, folder: Path) -> dict[str, str]:
        """Encode the empty text, and return the shard and entry of its embedding."""
        key = digest_of("text", "")
        return {"shard": self._ensure_shard([Keyed(key, "")], self._encode_texts, folder, 0), "entry": key}

    def _encode_entries(self, split: Split, *, is_media: bool, folder: Path) -> dict[str, _Encoded]:
        """Encode the texts or the media of a split shard by shard, and return the outputs by the keys of the items."""
        encoded_entries: dict[str, _Encoded] = {}
        if is_media:
            frame_config = frame_settings(self._stage.recipe, split.config, self._source)
            encode_items: Any = partial(self._encode_media, frame_config=frame_config)
            items: Iterable[Any] = ((row.media, (row.media, item.content)) for row, item in split.rows_with_items())
        else:
            encode_items = self._encode_texts
            items = ((row.text, item.embedding or row.prompt) for row, item in split.rows_with_items())
        for shard in shards_of(Keyed(key, item) for key, item in items):
            shard_key = self._ensure_shard(shard, encode_items, folder, int(is_media))
            skip_reasons = self._cache.skip_reasons(shard_key)
            latent_shapes = self._cache.shapes(shard_key, "mean") if is_media else {}
            for key, _ in shard:
                location = {"shard": shard_key, "entry": key}
                encoded_entries[key] = skip_reasons.get(key) or (location, latent_shapes.get(key, []))
        return encoded_entries

    def _ensure_shard(
        self, shard: Sequence[Keyed[T]], encode: Callable[[Sequence[T]], list[Entry | str]], folder: Path, shard_id: int
    ) -> str:
        """Copy a shard to the folder of the stage, after encoding it if it is not cached; return its name."""
        if self._stage.stop_requested:
            raise Preempted(f"stopped after {sum(self.num_encoded)} texts and media were encoded; they stay encoded")
        item_keys = [keyed_item.key for keyed_item in shard]
        shard_key = self._cache.key_of(item_keys)
        # Refused media are decoded again, because a codec may have been installed since.
        refused_keys = self._cache.skip_reasons(shard_key) if shard_id else {}
        retried_items = [keyed_item.item for keyed_item in shard if keyed_item.key in refused_keys]
        is_outdated = any(not isinstance(entry, str) for entry in encode(retried_items))
        if is_outdated or not self._cache.has_shard(shard_key):
            entries = encode([keyed_item.item for keyed_item in shard])
            self._cache.write(shard_key, dict(zip(item_keys, entries, strict=True)))
            self.num_encoded[shard_id] += len(item_keys)
        if not (target_path := folder / TENSORS / f"{shard_key}.safetensors").exists():
            copy_file(self._cache.path(shard_key), target_path)
        self._stage.progress.beat()
        return shard_key

    def _encode_texts(self, texts: Sequence[str | Path]) -> list[Entry | str]:
        """Return the embedding of each text, or the reason why it is missing; a path names a file with an embedding."""
        prompts = [text for text in texts if isinstance(text, str)]
        entries: list[Entry] = []
        for start in range(0, len(prompts), _TEXT_BATCH_SIZE):
            prompt_batch = prompts[start : start + _TEXT_BATCH_SIZE]
            with torch.no_grad():
                batch_embeddings = self._source.encoders.text_embedding(prompt_batch)
            entries += [{name: batch[i] for name, batch in batch_embeddings.items()} for i in range(len(prompt_batch))]
        entry_iterator = iter(entries)
        return [next(entry_iterator) if isinstance(text, str) else self._read_given_embedding(text) for text in texts]

    def _read_given_embedding(self, path: Path) -> Entry | str:
        """Return the embedding in a file of the data set, or the reason why the embedding cannot be used."""
        try:
            embedding = read_embedding(path, tuple(self._reference_embedding))
        except DataError as error:
            return str(error)
        for name, reference_tensor in self._reference_embedding.items():
            shapes = embedding[name].shape, reference_tensor.shape
            if len(shapes[0]) != len(shapes[1]) or shapes[0][1:] != shapes[1][1:]:
                return (
                    f"{path.name}: {name} is {list(shapes[0])}, and the model's encoder gives {list(shapes[1])}; only "
                    "the number of tokens, the first of two, may be another"
                )
        return embedding

    @cached_property
    def _reference_embedding(self) -> Entry:
        """Embedding of the empty text, as a reference for the shapes that the encoder returns."""
        with torch.no_grad():
            return {name: values[0] for name, values in self._source.encoders.text_embedding([""]).items()}

    def _encode_media(
        self, items: Sequence[tuple[str, Content | None]], frame_config: FrameSettings
    ) -> list[Entry | str]:
        """Return the latent of each image or clip, or why it cannot be decoded; media of one shape share batches."""
        latents: dict[int, Entry | str] = {}
        batches_by_shape: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        decoded_media = map_in_threads(self._stage, lambda item: _decode_or_explain(*item, frame_config), items)
        for index, pixels in enumerate(decoded_media):
            self._stage.progress.beat()
            if isinstance(pixels, str):
                latents[index] = pixels
                continue
            batch = batches_by_shape.setdefault(pixels.shape, [])
            batch.append((index, pixels))
            if len(batch) == self._batch_size:
                latents |= self._encode_latents(batches_by_shape.pop(pixels.shape))
        for batch in batches_by_shape.values():
            latents |= self._encode_latents(batch)
        return [latents[i] for i in range(len(items))]

    def _encode_latents(self, batch: Sequence[tuple[int, np.ndarray]]) -> dict[int, Entry | str]:
        pixels = torch.from_numpy(np.stack([item_pixels for _, item_pixels in batch])).float().div_(127.5).sub_(1)
        with torch.no_grad():
            mean, logvar = self._source.encoders.visual_embedding(pixels.movedim(-1, 1).contiguous())
        moments = {"mean": mean} if logvar is None else {"mean": mean, "logvar": logvar}
        return {index: {name: moments[name][i] for name in moments} for i, (index, _) in enumerate(batch)}


def _decode_or_explain(content_key: str, content: Content | None, frame_config: FrameSettings) -> np.ndarray | str:
    assert content is not None
    try:
        return pixels_of(content, frame_config, int(content_key[:13], 16) / 16**13)
    except DataError as error:
        return str(error)


def _check_skipped(name: str, skip_reasons: Sequence[str], split: Split, num_remaining: int) -> None:
    max_fraction = split.config.max_skipped_fraction
    if len(skip_reasons) > max_fraction * split.total:
        raise DataError(
            f"{skip_reasons[0]}; {len(skip_reasons)} of {split.total} rows of {name} cannot be used, "
            + row_remedy(max_fraction, is_every_row=not num_remaining)
        )
    if not num_remaining:
        raise DataError(f"{name}: no row is left of {split.total}; give others")
