"""Tables `[custom.dataset]` and `[custom.vision]`, in which recipes of Cosmos-RL name image files and set image sizes.

Other keys of these tables belong to the user and are not read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError

MEDIA_PATHS = ("annotation_path", "media_path")
PIXEL_KEYS = ("min_pixels", "max_pixels")
_VIDEO_KEYS = ("fps", "nframes", "min_frames", "max_frames", "total_pixels")


@dataclass(frozen=True)
class Media:
    """Settings of a recipe about images; a field is empty if the recipe does not set it."""

    annotation_path: str = ""
    """File with rows in the format of LLaVA, in place of `train_policy.dataset.name`."""
    media_path: str = ""
    """Folder to which image paths in the rows are relative; if empty, the folder of the rows."""
    pixels: tuple[tuple[str, int], ...] = ()
    """Bounds of the image size that the recipe sets, as pairs of `min_pixels` or `max_pixels` and a number."""
    ignored_keys: tuple[str, ...] = ()
    """Dotted keys about videos that the recipe sets and that have no effect."""


def media_settings(recipe: Recipe) -> Media:
    """Return the settings of a recipe about images.

    Raises:
        ConfigError: a value has the wrong type, or the recipe names two sources of rows.
    """
    dataset_table, vision_table = recipe.custom.get("dataset"), recipe.custom.get("vision")
    dataset_table, vision_table = (table if isinstance(table, dict) else {} for table in (dataset_table, vision_table))
    paths = {key: dataset_table.get(key) or "" for key in MEDIA_PATHS}
    for key, path in paths.items():
        if not isinstance(path, str):
            raise ConfigError(f"custom.dataset.{key} = {path!r} must be a path")
    name = next(iter(recipe.train.train_policy.sources.values())).dataset.name
    if paths["annotation_path"] and name:
        raise ConfigError(
            f"train.train_policy.dataset.name = {name!r} and custom.dataset.annotation_path = "
            f"{paths['annotation_path']!r} both name rows; leave one out"
        )
    return Media(
        **paths,
        pixels=tuple(
            (key, _check_pixel_count(key, vision_table[key])) for key in PIXEL_KEYS if vision_table.get(key) is not None
        ),
        ignored_keys=tuple(f"custom.vision.{key}" for key in _VIDEO_KEYS if key in vision_table),
    )


def with_absolute_media(custom: dict[str, Any], to_absolute: Callable[[str], str]) -> dict[str, Any]:
    """Return the table `[custom]` with the paths in `[custom.dataset]` converted by `to_absolute`."""
    media = custom.get("dataset")
    if not isinstance(media, dict):
        return custom
    paths = {key: to_absolute(media[key]) for key in MEDIA_PATHS if isinstance(media.get(key), str) and media[key]}
    return custom | {"dataset": media | paths}


def _check_pixel_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"custom.vision.{key} = {value!r} must be a number of pixels, at least 1")
    return value
