"""`[custom.dataset]` and `[custom.vision]`: where recipes of Cosmos-RL say what images a model is shown, and how large.

The tables are a user's own, so that keys which are not listed here are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError

MEDIA_PATHS = ("annotation_path", "media_path")
_PIXELS = ("min_pixels", "max_pixels")
_OF_VIDEOS = ("fps", "nframes", "min_frames", "max_frames", "total_pixels")


@dataclass(frozen=True)
class Media:
    """What a recipe says about images; empty where it says nothing."""

    annotation_path: str = ""
    """Rows in the format of LLaVA, in place of `train_policy.dataset.name`."""
    media_path: str = ""
    """Folder that paths of images are relative to; empty: the folder of the rows."""
    pixels: tuple[tuple[str, int], ...] = ()
    """`min_pixels` and `max_pixels` of the image processor, those that are set."""
    ignored: tuple[str, ...] = ()
    """Keys about videos, which are not read."""


def media_of(recipe: Recipe) -> Media:
    """Return what a recipe says about images.

    Raises:
        ConfigError: a value of a wrong type, or two sources of rows.
    """
    dataset, vision = recipe.custom.get("dataset"), recipe.custom.get("vision")
    dataset, vision = (table if isinstance(table, dict) else {} for table in (dataset, vision))
    paths = {key: dataset.get(key) or "" for key in MEDIA_PATHS}
    for key, path in paths.items():
        if not isinstance(path, str):
            raise ConfigError(f"custom.dataset.{key} = {path!r} must be a path")
    name = recipe.train.train_policy.dataset.name
    if paths["annotation_path"] and name:
        raise ConfigError(
            f"train.train_policy.dataset.name = {name!r} and custom.dataset.annotation_path = "
            f"{paths['annotation_path']!r} both name rows; leave one out"
        )
    return Media(
        **paths,
        pixels=tuple((key, _pixels(key, vision[key])) for key in _PIXELS if vision.get(key) is not None),
        ignored=tuple(f"custom.vision.{key}" for key in _OF_VIDEOS if key in vision),
    )


def located_media(custom: dict[str, Any], absolute: Callable[[str], str]) -> dict[str, Any]:
    """Return `[custom]` with the paths of `[custom.dataset]` as `absolute` gives them."""
    media = custom.get("dataset")
    if not isinstance(media, dict):
        return custom
    paths = {key: absolute(media[key]) for key in MEDIA_PATHS if isinstance(media.get(key), str) and media[key]}
    return custom | {"dataset": media | paths}


def _pixels(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"custom.vision.{key} = {value!r} must be a number of pixels, at least 1")
    return value
