"""Images, clips and prompts of a data set as items with their location; media are not decoded here.

    NAME.json + NAME.jpg | png | webp | mp4 ...     a folder of pairs; the JSON object has `prompt`, or NAME.txt or
                                                    NAME.caption holds it; also in sub-folders
    metas/NAME.txt + videos/NAME.mp4                optionally with t5_xxl/NAME.safetensors, the text embedding
    SHARD.tar                                       webdataset: members of one name, media with `json` or `txt`
    metadata.jsonl | csv | parquet                  an imagefolder: rows with `file_name`, media in the folder
    rows with a column of images                    a `save_to_disk` folder, parquet, or a data set on the Hub
    prompts alone                                   one per line (.txt), or rows with `prompt`

`media_pixels.py` decodes media; `media_splits.py` divides items into training rows and held-out rows.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from cosmos_core.config.prompt_sets import find_prompt_set, prompt_files, prompt_metadata
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data.formats import LocatedRow
from cosmos_core.data.images import locate_image
from cosmos_core.data.media_files import (
    find_tar_files,
    is_media_folder,
    iterate_tar_items,
    list_metadata_files,
    read_media_folder,
    read_metas_folder,
)
from cosmos_core.data.media_items import (
    MEDIA_SUFFIXES,
    VIDEO_SUFFIXES,
    MediaContent,
    MediaItem,
    make_error_item,
    make_item,
)
from cosmos_core.data.rows import load_rows
from cosmos_core.errors import DataError, first_line

_MEDIA_KEYS = ("image", "img", "jpg", "png", "webp", "video", "mp4", "file_name")
_FALLBACK_MEDIA_COLUMNS = ("image_path", "img_path", "images", "video_path")
"""Names of columns that contain the image or video of a row without a column of `_MEDIA_KEYS`. In other rows these
columns are metadata."""
_VIDEO_COLUMNS = ("video", "mp4", "video_path")


ReadItemsFn = Callable[[], Iterator[MediaItem]]
"""Function that iterates over the items of a data set, prompts with or without image or clip, from the beginning."""


def open_media_items(dataset: DatasetConfig, config_key: str, *, for_clips: bool = False) -> ReadItemsFn:
    """Return a function that iterates over the items of all splits of a data set of media, in order. `config_key` names
    the data set's table in messages. With `for_clips`, videos are preferred to images. Raise DataError if the data set
    is missing or unsupported."""
    if not (dataset_name := dataset.local_dir or dataset.name).strip():
        raise DataError(f"{config_key}.local_dir and {config_key}.name are empty; give a folder of media, or prompts")
    path = Path(os.path.expanduser(dataset_name))
    if not os.path.exists(path):
        path = find_prompt_set(dataset_name, f"{config_key}.name") or path
    item_readers = [_make_item_reader(path, split, dataset, config_key, for_clips) for split in dataset.split]
    return lambda: (item for reader in item_readers for item in reader())


def _make_item_reader(path: Path, split: str, dataset: DatasetConfig, config_key: str, for_clips: bool) -> ReadItemsFn:
    tar_split, subset = split, dataset.subset
    parents = [each for each in (path, path / split) if (each / subset).is_dir() or list_metadata_files(each)]
    if not parents and subset != "default" and path.is_dir() and is_media_folder(path):
        raise DataError(f"{config_key}.subset = {subset!r}, but {path} has no folder of that name")
    # Read the sub-folder `subset` by itself, unless a metadata file of its parent folder lists its media.
    if parents and (not list_metadata_files(parents[0]) or list_metadata_files(parents[0] / subset)):
        path, tar_split, dataset = parents[0] / subset, split * (parents[0] == path), dataset.copy_with(subset="")
    if path.is_dir() and (path / split).is_dir() and not (path / "dataset_dict.json").is_file():
        path, tar_split = path / split, ""
    tar_files = find_tar_files(path, tar_split)
    metadata_file, text_files = next(iter(list_metadata_files(path)), None), prompt_files(path, split)
    split_name = tar_split.partition("[")[0] if metadata_file else tar_split
    has_metadata = metadata_file is not None and not text_files
    if split_name not in {"", "train"} and not tar_files and path.is_dir() and (has_metadata or is_media_folder(path)):
        missing_text = "rows to take a slice of; name the split alone" if "[" in split_name else "folder of that name"
        raise DataError(f"{config_key}.split = {split!r}, but {path} has no {missing_text}")
    has_captions = any(path.is_dir() and f.with_suffix(end).is_file() for f in text_files for end in MEDIA_SUFFIXES)
    if "[" in split and (tar_files or (text_files and not has_captions)):
        raise DataError(f"{config_key}.split = {split!r}: {path} has no rows to take a slice of; name the split alone")
    if text_files and not has_captions:
        return lambda: _read_prompt_lines(text_files, path)
    if path.is_dir() and (path / "metas").is_dir():
        return lambda: read_metas_folder(path)
    if tar_files:
        return lambda: (item for path in tar_files for item in iterate_tar_items(path, for_clips))
    if metadata_file:
        path, split = metadata_file, "train" + split[split.find("[") :] if "[" in split else "train"
    elif path.is_dir() and is_media_folder(path):
        return lambda: read_media_folder(path)
    rows = load_rows(dataset.copy_with(name=str(path) if path.exists() else dataset.name, split=(split,)), config_key)
    return lambda: (_make_media_item(location_and_row, rows.folder, for_clips) for location_and_row in rows)


def _read_prompt_lines(text_files: Iterable[Path], dataset_path: Path) -> Iterator[MediaItem]:
    for file in text_files:
        is_text = file.suffix.lower() == ".txt"
        with open(file, encoding="utf-8-sig", errors="surrogateescape") as prompt_lines:
            for line_number, line in enumerate(map(str.strip, prompt_lines), start=1):
                if not line:
                    continue
                location = f"{file.name}:{line_number}"
                try:
                    line.encode()
                    json_value = dict(prompt_metadata(line, dataset_path), prompt=line) if is_text else json.loads(line)
                except UnicodeEncodeError:
                    yield make_error_item(location, "it is not UTF-8; save the file as UTF-8")
                except (ValueError, RecursionError) as error:
                    yield make_error_item(location, f"malformed JSON, {first_line(error)}")
                else:
                    yield make_item(json_value, location, None, None)


def _make_media_item(location_and_row: LocatedRow, folder: Path, for_clips: bool) -> MediaItem:
    location, row = location_and_row
    columns = [name for name in (*_MEDIA_KEYS, *_FALLBACK_MEDIA_COLUMNS) if row.get(name) not in (None, "", [])]
    clip_files = [n for n in columns if isinstance(row[n], str) and row[n][-9:].lower().endswith(VIDEO_SUFFIXES)]
    media_column = max(columns, key=lambda name: for_clips and name in (*_VIDEO_COLUMNS, *clip_files), default=None)
    if media_column is None:
        no_media_reason = f"it has no column {', '.join(_MEDIA_KEYS)} with an image or a video, but {', '.join(row)}"
        return replace(make_item(row, location, None, None), missing_media_reason=no_media_reason)
    [media_source] = value if isinstance(value := row[media_column], list) and len(value) == 1 else [value]
    content, media_error_text = None, ""
    try:
        media_file_path, content_bytes = locate_image(media_source, location)
        is_video = media_column in _VIDEO_COLUMNS or str(media_file_path).lower().endswith(VIDEO_SUFFIXES)
        media_path = None if media_file_path is None else folder / os.path.expanduser(media_file_path)
        content = MediaContent(is_video, media_path, content_bytes=content_bytes or b"")
    except DataError as error:
        media_error_text = str(error)
    item = make_item({k: v for k, v in row.items() if k not in (*_MEDIA_KEYS, media_column)}, location, content, None)
    return replace(item, problem=media_error_text or item.problem)
