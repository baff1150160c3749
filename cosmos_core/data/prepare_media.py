"""The program of a `prepare` stage of a diffusion model: it encodes prompts, images and clips.

Text encoders and VAE run here, once for each text and each image, and never in training. Their outputs are cached by
content in a folder that runs share (`media_cache.py`), so that a stage that was killed, other runs and other algorithms
reuse them; the stage copies what it needs (`media_rows.py`). No encoder is loaded if everything is cached.

A row that cannot be read or decoded is left out, counted and reported; too many of them fail the stage.
"""

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from cosmos_core.data.embeddings import read_embedding
from cosmos_core.data.kinds.base import TRAIN_SPLIT
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.media_cache import EncoderOutput, MediaCache, compute_digest, group_into_shards
from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media, is_upscaled, list_bucket_sizes, read_frame_rate
from cosmos_core.data.media_rows import NULL_TEXT_KEY, TENSORS_FOLDER
from cosmos_core.data.media_splits import (
    Encoders,
    MediaItemRow,
    MediaSplit,
    make_frame_settings,
    map_in_threads,
    read_splits,
)
from cosmos_core.data.prepared import STATISTICS_FILE, get_split_path
from cosmos_core.data.statistics import make_unusable_rows_remedy
from cosmos_core.errors import DataError, Preempted
from cosmos_core.models.families import open_pipeline
from cosmos_core.registry import compute_code_digest
from cosmos_core.run.content import list_model_files
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.files import SHARED_FOLDER, copy_file, replace_folder, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

CACHE_FOLDER = "media"
"""Name of the folder with the cache of encoded texts and media, in the folder that runs share."""
_TEXT_BATCH_SIZE = 32
_MAX_LISTED_ROWS = 5
_MAX_DECODED_MEDIA = 1000  # maximum number of images or clips of a split that `preview` decodes

T = TypeVar("T")
_EncoderOutputs = list[EncoderOutput | str]
"""Encoder output for each text, image or clip, or the reason why it could not be encoded."""
_SplitPreview = tuple[str, int, list[JsonValue]]
_EncodedItem = tuple[dict[str, str], list[int]] | str
"""Location (shard and entry) of the encoder output for a text, image or clip, and the shape of a latent; or the reason
why the text, image or clip was not encoded."""


def preview(stage: Stage, encoders: Encoders | None = None) -> dict[str, _SplitPreview]:
    """Return a description, the number of rows and the first prompts of each split, for `cosmos check`; errors are
    those of `prepare`. Nothing is encoded. Images and clips to learn are decoded to check them, at most 1000 of them,
    evenly spaced."""
    encoders = encoders or open_encoders(stage)
    return {name: _preview_split(stage, encoders, name, split) for name, split in read_splits(stage, encoders).items()}


def _preview_split(stage: Stage, encoders: Encoders, split_name: str, split: MediaSplit) -> _SplitPreview:
    skip_reasons, clip_fps, num_usable_rows = list(split.skip_reasons), set[float](), len(split.kept_rows)
    row_details = ""
    if encodes_media(stage, split_name, split):
        frame_settings = make_frame_settings(stage.recipe, split.dataset_config, encoders)
        row_stride = -(-num_usable_rows // _MAX_DECODED_MEDIA) or 1
        decoded_rows = islice(((row, item.content) for row, item in split.read_rows()), 0, None, row_stride)
        num_upscaled = 0
        for row, frame_rate, decode_error, is_image_enlarged in map_in_threads(
            stage, lambda row_and_content: _try_to_decode(*row_and_content, frame_settings), decoded_rows
        ):
            stage.progress.beat()
            clip_fps |= {frame_rate} if frame_rate else set()
            num_upscaled += is_image_enlarged
            skip_reasons += [f"{row.location}: {decode_error}"] if decode_error else []
        num_decoded_rows = -(-num_usable_rows // row_stride)
        row_details = f" (of which {num_decoded_rows:,} were decoded)" if row_stride > 1 else ""
        row_details += f", {num_upscaled:,} images smaller than inference_size, which are enlarged" * bool(num_upscaled)
    num_usable_rows -= len(skip_reasons) - len(split.skip_reasons)
    _check_skip_reasons(split_name, skip_reasons, split, num_usable_rows)
    if clip_fps:
        frame_rate_text = f"{min(clip_fps):g}" + (f" to {max(clip_fps):g}" if len(clip_fps) > 1 else "")
        row_details += f", clips of {frame_rate_text} frames a second"
        row_details += ", which are learned frame by frame" if len(clip_fps) > 1 else ""
    row_details += f", {len(skip_reasons):,} left out (first: {skip_reasons[0]})" if skip_reasons else ""
    prompts = [
        {"location": row.location, "text": row.prompt, "reference": "", "metadata": json.loads(row.metadata)}
        for row in split.kept_rows[:_MAX_LISTED_ROWS]
    ]
    return f"{split_name}: {num_usable_rows:,} rows{row_details}", num_usable_rows, list(prompts)


def _try_to_decode(
    row: MediaItemRow, content: MediaContent | None, frame_settings: FrameSettings
) -> tuple[MediaItemRow, float, str, bool]:
    """Decode the image or clip of a row; return the row, the frame rate of a clip in Hz (0 for an image), the decoding
    error (empty if there is none), and whether an image is smaller than its target size."""
    pixels_or_error = _decode_pixels(row.media_key, content, frame_settings)
    if isinstance(pixels_or_error, str) or content is None:
        return row, 0.0, str(pixels_or_error), False
    return row, read_frame_rate(content) if content.is_video else 0.0, "", is_upscaled(content, frame_settings)


def encodes_media(stage: Stage, split_name: str, split: MediaSplit) -> bool:
    """Return whether the media of a split are encoded in addition to its prompts."""
    has_media = load_row_kind(stage.recipe.train.train_policy.rows).has_media
    return has_media and (split_name == TRAIN_SPLIT or all(row.media_key for row in split.kept_rows))


def open_encoders(stage: Stage) -> Encoders:
    """Return the encoders of a stage's model without loading weights; raise ModelError for an unsupported model."""
    stage.progress.phase("prepare")  # set the phase first: downloading a model and computing its digest may take long
    policy = stage.recipe.policy
    model = open_pipeline(stage.model, policy, "cuda" if torch.cuda.is_available() else "cpu")
    size, has_buckets = policy.diffusers.inference_size, stage.recipe.train.train_policy.dataset.aspect_ratio_buckets
    for image_size in [size, *(list_bucket_sizes(size, model.size_multiple) if has_buckets else ())]:
        model.latent_shape(*image_size)
    for component_name in model.text_components:
        # Check that the pipeline has the component: `component_class` raises ModelError if it is missing.
        model.folder.component_class(component_name)
    model_folder = model.folder.path
    weights_digest = shared_digest_cache(stage.run_path.parent).digest_files(
        model_folder, list_model_files(model_folder, policy.modality.encoder_files)
    )
    encoder_settings = (policy.diffusers.dtype, policy.diffusers.max_prompt_length, model.size_multiple)
    model_code_digests = [compute_code_digest(policy.model_class)] if policy.model_class else []
    encoders_digest = compute_digest(weights_digest, type(model).__name__, encoder_settings, *model_code_digests)
    return Encoders(model, encoders_digest)


def prepare(stage: Stage, encoders: Encoders | None = None) -> Outcome:
    """Encode the training rows and any held-out rows. Raise DataError if a data set is missing, too many rows cannot be
    used or no row is left, and Preempted if a stop was requested; encoded rows stay in the cache."""
    encoders = encoders or open_encoders(stage)
    splits = read_splits(stage, encoders)
    split_encoder = _SplitEncoder(stage, encoders)
    with replace_folder(stage.path / "data") as data_folder:
        (data_folder / TENSORS_FOLDER).mkdir()
        null_text = split_encoder.encode_null_text(data_folder)
        metrics: dict[str, float] = {}
        notices: list[JsonValue] = []
        for name, split in splits.items():
            num_rows, skip_reasons = split_encoder.write_rows(name, split, null_text, data_folder)
            metrics |= {f"data/{name}_rows": float(num_rows), f"data/{name}_skipped_rows": float(len(skip_reasons))}
            num_cut_prompts, max_tokens = split_encoder.count_cut_prompts(split)
            metrics[f"data/{name}_cut_prompts"] = float(num_cut_prompts)
            if num_cut_prompts:
                notices.append(f"{name}: {num_cut_prompts} prompts have more tokens than {max_tokens}, and are cut")
                logger.warning("%s", notices[-1])
            if skip_reasons:
                num_unlisted_reasons = len(skip_reasons) - _MAX_LISTED_ROWS
                skip_reasons_text = "; ".join(skip_reasons[:_MAX_LISTED_ROWS])
                skip_reasons_text += f" and {num_unlisted_reasons} more" if num_unlisted_reasons > 0 else ""
                notices.append(f"{name}: {len(skip_reasons)} of {split.num_items} rows skipped: {skip_reasons_text}")
                logger.warning("%s", notices[-1])
        write_json(data_folder / STATISTICS_FILE, metrics)
    logger.info("%d texts and %d images or clips were encoded, the others were known", *split_encoder.encoded_counts)
    outcome_info: dict[str, JsonValue] = {"data": "data", **({"notices": notices} if notices else {})}
    return Outcome(outputs=("data",), metrics=metrics, info=outcome_info)


class _SplitEncoder:
    """Encoder of the texts, images and clips that are not in the cache, and writer of the prepared files of splits."""

    def __init__(self, stage: Stage, encoders: Encoders) -> None:
        self._stage, self._encoders = stage, encoders
        self._cache = MediaCache(stage.run_path.parent / SHARED_FOLDER / CACHE_FOLDER, encoders.digest)
        self._batch_size = stage.recipe.train.rows_per_pass
        self.encoded_counts = [0, 0]

    def write_rows(
        self, split_name: str, split: MediaSplit, null_text: dict[str, str], data_folder: Path
    ) -> tuple[int, list[str]]:
        """Encode a split and write its prepared file. Return the number of written rows, and a reason for each row that
        is left out. Raise DataError if too many rows are left out, and Preempted if a stop was requested."""
        has_latents = encodes_media(self._stage, split_name, split)
        with self._encoders.model.component_offload.keep_on_device():
            encoded_texts = self._encode_items(split, is_media=False, data_folder=data_folder)
        with self._encoders.model.component_offload.keep_on_device():
            encoded_media = self._encode_items(split, is_media=True, data_folder=data_folder) if has_latents else {}
        skip_reasons = list(split.skip_reasons)
        records = []
        for row in split.kept_rows:
            encoded_text = encoded_texts[row.text_key]
            media_entry = encoded_media[row.media_key] if has_latents else ()
            if isinstance(encoded_text, str) or isinstance(media_entry, str):
                skip_reasons.append(f"{row.location}: {encoded_text if isinstance(encoded_text, str) else media_entry}")
            else:
                records.append((row.prompt, row.metadata, encoded_text[0], *media_entry, row.location))
        _check_skip_reasons(split_name, skip_reasons, split, len(records))
        schema = load_row_kind("media" if has_latents else "media_prompts").schema
        schema = schema.with_metadata({**schema.metadata, NULL_TEXT_KEY: json.dumps(null_text).encode()})
        columns = [pa.array([row_values[i] for row_values in records], field.type) for i, field in enumerate(schema)]
        with pa.ipc.new_file(get_split_path(data_folder, split_name), schema) as file:
            file.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return len(records), skip_reasons

    def count_cut_prompts(self, split: MediaSplit) -> tuple[int, str]:
        """Return the number of prompts of a split whose end the text encoder ignores, because they are too long, and
        a description of the maximum length for messages."""
        model_folder = self._encoders.model.folder
        tokenizer_name, num_added_tokens = self._encoders.model.prompt_tokenizer
        max_length = self._stage.recipe.policy.diffusers.max_prompt_length
        prompt_limit_text = f"policy.diffusers.max_prompt_length = {max_length}"
        if tokenizer_name in model_folder.components:
            tokenizer = model_folder.load(tokenizer_name)
        else:  # Stable Diffusion 3 without T5 has only CLIP encoders, whose maximum length is fixed
            tokenizer = model_folder.load("tokenizer")
            max_length = tokenizer.model_max_length
            prompt_limit_text = f"the {max_length} of the pipeline's text encoders"
        max_tokens = max_length - num_added_tokens
        rows_to_encode = (row for row in split.kept_rows if row.text_key == compute_digest("text", row.prompt))
        return sum(len(tokenizer.encode(row.prompt)) > max_tokens for row in rows_to_encode), prompt_limit_text

    def encode_null_text(self, data_folder: Path) -> dict[str, str]:
        """Encode the empty prompt to a shard in `data_folder`; return the names of the shard and of the entry with the
        embedding."""
        key = compute_digest("text", "")
        return {"shard": self._copy_shard({key: ""}, self._encode_texts, data_folder, False), "entry": key}

    def _encode_items(self, split: MediaSplit, *, is_media: bool, data_folder: Path) -> dict[str, _EncodedItem]:
        """Encode the texts, or with `is_media` the images and clips, of a split, one shard after the other. Return the
        location of each encoder output, or the reason why there is none, by cache key."""
        encoded_items_by_key: dict[str, _EncodedItem] = {}
        encode_fn: Any = self._encode_texts
        keyed_items: Any = ((row.text_key, item.embedding_path or row.prompt) for row, item in split.read_rows())
        if is_media:
            frame_settings = make_frame_settings(self._stage.recipe, split.dataset_config, self._encoders)
            encode_fn = partial(self._encode_media, frame_settings=frame_settings)
            keyed_items = ((row.media_key, (row.media_key, item.content)) for row, item in split.read_rows())
        for shard in group_into_shards(keyed_items):
            shard_key = self._copy_shard(shard, encode_fn, data_folder, is_media)
            skip_reasons = self._cache.read_skip_reasons(shard_key)
            latent_shapes = self._cache.read_tensor_shapes(shard_key, "mean") if is_media else {}
            for key in shard:
                tensor_location = {"shard": shard_key, "entry": key}
                encoded_items_by_key[key] = skip_reasons.get(key) or (tensor_location, latent_shapes.get(key, []))
        return encoded_items_by_key

    def _copy_shard(
        self, shard: dict[str, T], encode_fn: Callable[[list[T]], _EncoderOutputs], data_folder: Path, is_media: bool
    ) -> str:
        """Copy the file (shard) with the encoder outputs for `shard`, texts or media by cache key, from the cache to
        the stage's `data_folder`. If the cache lacks the file, encode the texts or media first. Return its key."""
        if self._stage.stop_requested:
            raise Preempted(f"stopped after {sum(self.encoded_counts)} texts and media were encoded; they stay encoded")
        shard_key = self._cache.compute_shard_key(list(shard), is_media=is_media)
        # Retry media that could not be decoded, because a codec may have been installed since.
        undecodable_keys = self._cache.read_skip_reasons(shard_key) if is_media else {}
        undecodable_items = [item for key, item in shard.items() if key in undecodable_keys]
        has_new_output = any(not isinstance(encoder_output, str) for encoder_output in encode_fn(undecodable_items))
        if has_new_output or not self._cache.has_shard(shard_key):
            encoder_outputs = encode_fn(list(shard.values()))
            self._cache.write_shard(shard_key, dict(zip(shard, encoder_outputs, strict=True)))
            self.encoded_counts[is_media] += len(shard)
        if not (target_path := data_folder / TENSORS_FOLDER / f"{shard_key}.safetensors").exists():
            copy_file(self._cache.get_shard_path(shard_key), target_path)
        self._stage.progress.beat()
        return shard_key

    def _encode_texts(self, texts: Sequence[str | Path]) -> _EncoderOutputs:
        """Return the embedding of each text, or why it cannot be read; a `Path` is a file with an embedding."""
        prompts = [text for text in texts if isinstance(text, str)]
        encoder_outputs: list[EncoderOutput] = []
        for batch_start in range(0, len(prompts), _TEXT_BATCH_SIZE):
            prompt_batch = prompts[batch_start : batch_start + _TEXT_BATCH_SIZE]
            with torch.no_grad():
                batch_embeddings = self._encoders.model.text_embedding(prompt_batch)
            encoder_outputs += [{name: x[i] for name, x in batch_embeddings.items()} for i in range(len(prompt_batch))]
        next_outputs = iter(encoder_outputs)
        return [next(next_outputs) if isinstance(text, str) else self._read_embedding_file(text) for text in texts]

    def _read_embedding_file(self, embedding_path: Path) -> EncoderOutput | str:
        """Return the text embedding in a file of the data set, or the reason why it does not fit the text encoder."""
        try:
            embedding = read_embedding(embedding_path, tuple(self._reference_embedding))
        except DataError as error:
            return str(error)
        reference_tensors = self._reference_embedding
        num_tokens = {
            each.shape[:1]: embedding[name].shape[:1] for name, each in reference_tensors.items() if each.ndim > 1
        }
        for name, reference in reference_tensors.items():
            if embedding[name].shape != num_tokens.get(reference.shape[:1], reference.shape[:1]) + reference.shape[1:]:
                return (
                    f"{embedding_path.name}: {name} is {list(embedding[name].shape)}, and the model's encoder gives "
                    f"{list(reference.shape)}; only the number of tokens, the first of two, may be another; remove the "
                    f"file to have its prompt encoded"
                )
        return embedding

    @cached_property
    def _reference_embedding(self) -> EncoderOutput:
        """Embedding of the empty text, with whose shapes embeddings in files of the data set are compared."""
        with torch.no_grad():
            return {name: values[0] for name, values in self._encoders.model.text_embedding([""]).items()}

    def _encode_media(
        self, items: Sequence[tuple[str, MediaContent | None]], frame_settings: FrameSettings
    ) -> _EncoderOutputs:
        """Return the latent of each image or clip in `items`, or the reason why it cannot be decoded. Only media of one
        shape are encoded together."""
        latent_by_index: dict[int, EncoderOutput | str] = {}
        batches_by_shape: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        decoded_media = map_in_threads(self._stage, lambda item: _decode_pixels(*item, frame_settings), items)
        for item_index, pixels in enumerate(decoded_media):
            self._stage.progress.beat()
            if isinstance(pixels, str):
                latent_by_index[item_index] = pixels
                continue
            same_shape_batch = batches_by_shape.setdefault(pixels.shape, [])
            same_shape_batch.append((item_index, pixels))
            if len(same_shape_batch) == self._batch_size:
                latent_by_index |= self._encode_latents(batches_by_shape.pop(pixels.shape))
        for same_shape_batch in batches_by_shape.values():
            latent_by_index |= self._encode_latents(same_shape_batch)
        return [latent_by_index[i] for i in range(len(items))]

    def _encode_latents(self, batch: Sequence[tuple[int, np.ndarray]]) -> dict[int, EncoderOutput | str]:
        pixels = torch.from_numpy(np.stack([item_pixels for _, item_pixels in batch])).float().div_(127.5).sub_(1)
        with torch.no_grad():
            mean, logvar = self._encoders.model.visual_embedding(pixels.movedim(-1, 1).contiguous())
        latent_moments = {"mean": mean} if logvar is None else {"mean": mean, "logvar": logvar}
        return {index: {name: latent_moments[name][i] for name in latent_moments} for i, (index, _) in enumerate(batch)}


def _decode_pixels(content_key: str, content: MediaContent | None, frame_settings: FrameSettings) -> np.ndarray | str:
    assert content is not None
    try:
        return decode_media(content, frame_settings, int(content_key[:13], 16) / 16**13)
    except DataError as error:
        return str(error)


def _check_skip_reasons(split_name: str, skip_reasons: Sequence[str], split: MediaSplit, num_usable_rows: int) -> None:
    max_skipped_fraction = split.dataset_config.max_skipped_fraction
    if len(skip_reasons) > max_skipped_fraction * split.num_items:
        raise DataError(
            f"{skip_reasons[0]}; {len(skip_reasons)} of {split.num_items} rows of {split_name} cannot be used, "
            + make_unusable_rows_remedy(max_skipped_fraction, is_every_row_unusable=not num_usable_rows)
        )
    if not num_usable_rows:
        raise DataError(f"{split_name}: no row is left of {split.num_items}; give others")
