"""Splits of a diffusion model's `prepare` stage: each data set is read once, to compute the keys of its content.

Nothing is decoded or encoded here; `prepare_media.py` does that.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.base import TRAIN_SPLIT, VALIDATION_SPLIT
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.media_cache import compute_digest
from cosmos_core.data.media_items import MediaContent, MediaItem, describe_item_error
from cosmos_core.data.media_pixels import FrameSettings
from cosmos_core.data.media_source import ReadItemsFn, open_media_items
from cosmos_core.data.rows import sample_held_out_mask
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.run.stage import Stage

_NUM_DECODER_THREADS = 4  # number of decoding threads, which run in parallel since Pillow and PyAV release the GIL
_NO_MEDIA_REASON = "there is no image or video beside it"
_MAX_PATH_CHARACTERS = 300  # maximum length of a path in a message; the path may be an image in base64

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Encoders:
    """Text encoder and VAE of a diffusion model, whose weights are loaded on first use, and properties of these
    encoders that can be read without the weights."""

    model: DiffusionModel
    digest: str
    """Digest of the encoders' weights and of all settings that determine their output."""


class MediaItemRow(NamedTuple):
    """Prompt, metadata and cache keys of an image or clip with its prompt. A first pass over a data set computes these
    values; a second pass encodes only what the cache lacks."""

    location: str
    prompt: str
    metadata: str
    text_key: str
    """Key of the prompt's embedding in the media cache."""
    media_key: str
    """Key of the latent of the image or clip in the media cache; empty for a prompt without media."""


class MediaSplit(NamedTuple):
    """Split of a data set of media: its prompts, images and clips with their cache keys, after one pass over the data
    set."""

    read_items: ReadItemsFn
    rows: list[MediaItemRow | None]
    """Rows of the split, one element per item of the data set; None: the item is in another split or is left out."""
    skip_reasons: list[str]
    num_items: int
    dataset_config: DatasetConfig

    def read_rows(self) -> Iterator[tuple[MediaItemRow, MediaItem]]:
        """Read the data set again, and yield each row of this split with its `MediaItem`. Raise DataError if the data
        set has changed since the first pass."""
        items = self.read_items()
        for row in self.rows:
            item = next(items, None)
            if item is None or (row and row[:2] != (_replace_lone_surrogates(item.location), item.prompt)):
                dataset_id = self.dataset_config.local_dir or self.dataset_config.name
                raise DataError(f"{dataset_id} changed while it was prepared; run the stage again when it is complete")
            if row is not None:
                yield row, item

    @property
    def kept_rows(self) -> list[MediaItemRow]:
        """Return the rows of this split: the entries of `rows` that are not None."""
        return [row for row in self.rows if row is not None]


def make_frame_settings(recipe: Recipe, dataset: DatasetConfig, encoders: Encoders) -> FrameSettings:
    """Return the settings for decoding media to pixels; raise ConfigError for an unsupported number of frames."""
    model, config = encoders.model, recipe.policy.diffusers
    num_frames, frames_per_latent = config.train_frames if model.is_video else 0, model.pixels_per_latent[0]
    if model.is_video and (num_frames - 1) % frames_per_latent:
        problem = f"policy.diffusers.train_frames = {num_frames} must be 1 more than a multiple of {frames_per_latent}"
        raise ConfigError(problem)
    uses_buckets = dataset.aspect_ratio_buckets
    return FrameSettings(config.inference_size, num_frames, model.size_multiple, uses_buckets, dataset.frame_sampling)


def read_splits(stage: Stage, encoders: Encoders) -> dict[str, MediaSplit]:
    """Return the training split, and the held-out split if there is one; nothing is encoded."""
    splits, max_rows = _read_full_splits(stage, encoders), stage.recipe.validation.max_rows
    if VALIDATION_SPLIT in splits and max_rows is not None:
        held_out_rows, held_out_row_slots = splits[VALIDATION_SPLIT].rows, iter(range(max_rows))
        kept_rows = [row if row and next(held_out_row_slots, None) is not None else None for row in held_out_rows]
        splits[VALIDATION_SPLIT] = splits[VALIDATION_SPLIT]._replace(rows=kept_rows)
    return splits


def _read_full_splits(stage: Stage, encoders: Encoders) -> dict[str, MediaSplit]:
    algorithm, validation = stage.recipe.train.train_policy, stage.recipe.validation
    config_key = f"stage {stage.name!r}: data" if stage.data else "train.train_policy.dataset"
    dataset_fields = {"name": str(stage.data), "local_dir": "", "subset": ""} if stage.data else {}
    dataset_config = algorithm.dataset.copy_with(**dataset_fields)
    train_split = _read_split(stage, encoders, dataset_config, config_key, needs_media=True)
    held_out_config: DatasetConfig | None = None
    if validation.dataset.name or validation.dataset.local_dir:
        held_out_config, config_key = validation.dataset, "validation.dataset"
    elif (folder := stage.data) and ((folder / VALIDATION_SPLIT).is_dir() or any(folder.glob(f"{VALIDATION_SPLIT}.*"))):
        held_out_config = dataset_config.copy_with(split=(VALIDATION_SPLIT,))
    if held_out_config is not None:
        held_out_split = _read_split(stage, encoders, held_out_config, config_key, needs_media=False)
        return {TRAIN_SPLIT: train_split, VALIDATION_SPLIT: held_out_split}
    if algorithm.dataset.test_size is None:
        return {TRAIN_SPLIT: train_split}
    held_out_mask = sample_held_out_mask(len(train_split.rows), algorithm.dataset.test_size, stage.seed)
    held_out_rows = [row if held_out_mask[i] else None for i, row in enumerate(train_split.rows)]
    train_rows = [None if held_out_mask[i] else row for i, row in enumerate(train_split.rows)]
    held_out_split = train_split._replace(rows=held_out_rows, skip_reasons=[])
    return {TRAIN_SPLIT: train_split._replace(rows=train_rows), VALIDATION_SPLIT: held_out_split}


def _read_split(
    stage: Stage, encoders: Encoders, config: DatasetConfig, config_key: str, *, needs_media: bool
) -> MediaSplit:
    """Read a data set once; return a split with the cache keys of its texts and, if the algorithm learns from media, of
    its media. In the latter case, items without media are left out if `needs_media` is set; otherwise they can stay in
    the split, as prompts to complete."""
    read_items = open_media_items(config, config_key, for_clips=encoders.model.is_video)
    has_media = load_row_kind(stage.recipe.train.train_policy.rows).has_media
    frame_settings = make_frame_settings(stage.recipe, config, encoders) if has_media else None
    has_rollouts = stage.recipe.train.train_policy.has_rollouts
    max_conditional_frames = stage.recipe.policy.diffusers.flow_rl.max_conditional_frames
    can_start_from_frames = has_rollouts and has_media and encoders.model.is_video and max_conditional_frames
    starts_from_frames = bool(can_start_from_frames and encoders.model.max_conditioning_frames)
    rows: list[MediaItemRow | None] = []
    skip_reasons: list[str] = []
    for item, row_or_reason in map_in_threads(
        stage,
        lambda item: (item, _make_media_item_row(item, frame_settings, needs_media, starts_from_frames)),
        read_items(),
    ):
        stage.progress.beat()
        rows.append(None if isinstance(row_or_reason, str) else row_or_reason)
        if isinstance(row_or_reason, str):
            starts_with_location = row_or_reason.startswith(item.location)
            skip_reasons.append(
                _replace_lone_surrogates(row_or_reason if starts_with_location else f"{item.location}: {row_or_reason}")
            )
    if not rows:
        raise DataError(f"{config_key}: {config.local_dir or config.name} holds no rows; at least one is needed")
    rows_without_media = [f"{row.location}: {_NO_MEDIA_REASON}" for row in rows if row and not row.media_key]
    # If few rows have no media, leave these rows out, because the validation loss needs media in all rows. If many have
    # none and validation completes prompts, keep them as prompts. RL keeps all rows.
    may_skip_rows_without_media = len(rows_without_media) <= config.max_skipped_fraction * len(rows)
    keeps_lone_prompts = has_rollouts or (stage.recipe.has_validation_completions and not may_skip_rows_without_media)
    if not keeps_lone_prompts and any(row and row.media_key for row in rows):
        skip_reasons += rows_without_media
        rows = [row if row and row.media_key else None for row in rows]
    return MediaSplit(read_items, rows, skip_reasons, len(rows), config)


def _make_media_item_row(
    item: MediaItem, frame_settings: FrameSettings | None, needs_media: bool, starts_from_frames: bool
) -> MediaItemRow | str:
    """Return the `MediaItemRow` of an item, or the reason why the item is left out. Images and clips are ignored if
    `frame_settings` is None. With `starts_from_frames`, rollouts start from frames of clips, so items with images are
    left out."""
    if item.problem and (frame_settings or not item.prompt):
        return item.problem
    if needs_media and frame_settings and item.content is None:
        return item.missing_media_reason or _NO_MEDIA_REASON
    if starts_from_frames and item.content is not None and not item.content.is_video:
        config_key = "policy.diffusers.flow_rl.max_conditional_frames"
        return f"it is an image, and rollouts start from frames of clips; leave images out, or set {config_key} to 0"
    try:
        text_key = compute_digest("text", item.prompt)
        if item.embedding_path is not None:
            text_key = compute_digest("embedding", MediaContent(False, item.embedding_path).digest())
        media_key = ""
        if frame_settings and item.content is not None:
            media_key = compute_digest("media", item.content.digest(), item.content.is_video, repr(frame_settings))
    except OSError as error:
        describe_item_error(error)
        return f"{error.strerror}: {str(error.filename)[:_MAX_PATH_CHARACTERS]}"
    # Write null for bytes, such as those of a second image, and other values that JSON lacks as text.
    metadata = json.dumps(item.metadata, ensure_ascii=False, default=lambda v: None if isinstance(v, bytes) else str(v))
    try:
        (item.prompt + metadata).encode()
    except UnicodeEncodeError:
        return "it has half a character (a lone surrogate)"
    return MediaItemRow(_replace_lone_surrogates(item.location), item.prompt, metadata, text_key, media_key)


def _replace_lone_surrogates(text: str) -> str:
    return text.encode(errors="replace").decode()


def map_in_threads(stage: Stage, process_item: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Call `process_item` with each of `items` in a pool of threads, as many as `stage` configures. Yield the results
    in the order of the items; only a few items per thread are read in advance."""
    item_iterator = iter(items)
    num_threads = stage.recipe.train.train_policy.dataloader_num_workers or _NUM_DECODER_THREADS
    with ThreadPoolExecutor(num_threads) as pool:
        prefetched_items = islice(item_iterator, 2 * num_threads)
        pending_results: deque[Future[R]] = deque(pool.submit(process_item, item) for item in prefetched_items)
        while pending_results:
            yield pending_results.popleft().result()
            pending_results.extend(pool.submit(process_item, item) for item in islice(item_iterator, 1))
