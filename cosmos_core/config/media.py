"""Tables `[custom.dataset]` and `[custom.vision]`, in which recipes of Cosmos-RL name image files and set image sizes.

Other keys of these tables belong to the user and are not read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError

MEDIA_PATH_NAMES = ("annotation_path", "media_path")
PIXEL_LIMIT_KEYS = ("min_pixels", "max_pixels")
_UNREAD_VISION_KEYS = {
    **dict.fromkeys(("fps", "nframes", "min_frames", "max_frames", "total_pixels"), "videos are not read"),
    **dict.fromkeys(("resized_height", "resized_width"), "min_pixels and max_pixels bound the size of images"),
}


@dataclass(frozen=True)
class ImageSettings:
    """Settings of the images in rows; a field is empty if the recipe does not set it."""

    annotation_path: str = ""
    """File with rows in the format of LLaVA, in place of `train_policy.dataset.name`."""
    media_path: str = ""
    """Folder to which image paths in the rows are relative; if empty, the folder of the rows."""
    pixels: tuple[tuple[str, int], ...] = ()
    """Bounds of the image size in pixels, set by the recipe, as pairs of `min_pixels` or `max_pixels` and a number."""
    ignored_keys: tuple[tuple[str, str], ...] = ()
    """Keys of `[custom.vision]` that the recipe sets without effect, each with the reason."""


def image_settings(recipe: Recipe) -> ImageSettings:
    """Return the settings of the images in the rows of a recipe. Raises `ConfigError` if a value has the wrong type, or
    if the recipe names two sources of rows."""
    dataset_table, vision_table = recipe.custom.get("dataset"), recipe.custom.get("vision")
    dataset_table, vision_table = (table if isinstance(table, dict) else {} for table in (dataset_table, vision_table))
    paths = {key: dataset_table.get(key) or "" for key in MEDIA_PATH_NAMES}
    for key, path in paths.items():
        if not isinstance(path, str):
            raise ConfigError(f"custom.dataset.{key} = {path!r} must be a path")
    dataset_name = next(iter(recipe.train.train_policy.tables_by_dataset.values())).dataset.name
    if paths["annotation_path"] and dataset_name:
        raise ConfigError(
            f"train.train_policy.dataset.name = {dataset_name!r} and custom.dataset.annotation_path = "
            f"{paths['annotation_path']!r} both name rows; leave one out"
        )
    pixel_limits = {key: vision_table[key] for key in PIXEL_LIMIT_KEYS if vision_table.get(key) is not None}
    for key, pixel_limit in pixel_limits.items():
        if isinstance(pixel_limit, bool) or not isinstance(pixel_limit, int) or pixel_limit < 1:
            raise ConfigError(f"custom.vision.{key} = {pixel_limit!r} must be a number of pixels, at least 1")
    reason_by_unread_key = {key: reason for key, reason in _UNREAD_VISION_KEYS.items() if key in vision_table}
    ignored_keys = tuple((f"custom.vision.{key}", reason) for key, reason in reason_by_unread_key.items())
    return ImageSettings(**paths, pixels=tuple(pixel_limits.items()), ignored_keys=ignored_keys)


def with_absolute_media_paths(custom_table: dict[str, Any], make_absolute: Callable[[str], str]) -> dict[str, Any]:
    """Return the table `[custom]` with the paths in `[custom.dataset]` converted by `make_absolute`."""
    table = custom_table.get("dataset")
    if not isinstance(table, dict):
        return custom_table
    paths = {key: table[key] for key in MEDIA_PATH_NAMES if isinstance(table.get(key), str) and table[key]}
    return custom_table | {"dataset": table | {key: make_absolute(path) for key, path in paths.items()}}
