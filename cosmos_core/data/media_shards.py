"""Tar files of images and clips in the webdataset format."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from cosmos_core.data.media_items import (
    CAPTION_SUFFIXES,
    MEDIA_SUFFIXES,
    VIDEO_SUFFIXES,
    MediaContent,
    MediaItem,
    describe_error,
    has_prompt,
    make_error_item,
    make_item,
)
from cosmos_core.data.rows import HELD_OUT_SPLITS, has_split_word
from cosmos_core.errors import DataError, first_line


def find_tar_files(path: Path, split: str = "") -> list[Path]:
    """Return the tar file `path`, or the tar files in the folder `path` whose names contain the split; all if `split`
    is empty. Files whose names contain no held-out split are of the split `train`."""
    if not path.is_dir():
        return [path] if path.suffix.lower() == ".tar" else []
    tar_files = sorted(f for f in path.iterdir() if f.suffix.lower() == ".tar" and f.is_file() and f.name[0] != ".")
    if split == "train":
        return [file for file in tar_files if not any(has_split_word(file, name) for name in HELD_OUT_SPLITS)]
    return [file for file in tar_files if not split or has_split_word(file, split)]


def iterate_tar_items(path: Path, for_clips: bool) -> Iterator[MediaItem]:
    """Yield the items of a webdataset shard: consecutive members whose names agree up to the first dot. A damaged file
    raises DataError, because the number of rows after the damage, which `max_skipped_fraction` limits, is unknown."""
    members_by_suffix: dict[str, tarfile.TarInfo] = {}
    item_folder_and_stem = "", ""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in filter(tarfile.TarInfo.isfile, archive):
                folder, _, file_name = member.name.rpartition("/")
                if file_name.startswith("."):  # skip hidden files: macOS adds a file ._NAME for each file
                    continue
                item_stem, _, member_suffix = file_name.partition(".")
                if members_by_suffix and (folder, item_stem) != item_folder_and_stem:
                    yield _make_item_from_members(path, members_by_suffix, for_clips)
                    members_by_suffix = {}
                item_folder_and_stem = folder, item_stem
                members_by_suffix[member_suffix.lower()] = member
            if members_by_suffix:
                yield _make_item_from_members(path, members_by_suffix, for_clips)
            _check_tar_end(path, archive.offset)
    except (tarfile.TarError, OSError) as error:
        reason = describe_error(error)
        raise DataError(f"{path}: damaged tar file, {reason}; make it again, or remove it from the folder") from error


def _check_tar_end(tar_path: Path, end_offset: int) -> None:
    """Raise tarfile.ReadError unless the block at `end_offset`, where reading a tar file stopped, is the block of zeros
    that follows the last member: `tarfile` also stops silently at a damaged header."""
    with open(tar_path, "rb") as file:
        file.seek(end_offset)
        header_block = file.read(tarfile.BLOCKSIZE)
    if len(header_block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("unexpected end of data")
    if any(header_block):
        raise tarfile.ReadError(f"the header at byte {end_offset} is damaged, and nothing behind it can be read")


def _make_item_from_members(path: Path, members_by_suffix: dict[str, tarfile.TarInfo], for_clips: bool) -> MediaItem:
    location = f"{path.name}:{next(iter(members_by_suffix.values())).name}"
    content_by_suffix = {
        f".{suffix}": MediaContent(f".{suffix}" in VIDEO_SUFFIXES, path, member.offset_data, member.size)
        for suffix, member in members_by_suffix.items()
    }
    contents = [content for suffix, content in content_by_suffix.items() if suffix in MEDIA_SUFFIXES]
    content = max(contents, key=lambda content: for_clips and content.is_video, default=None)
    try:
        json_value = json.loads(content_by_suffix[".json"].read()) if ".json" in content_by_suffix else {}
        caption_suffix = next((suffix for suffix in CAPTION_SUFFIXES if suffix in content_by_suffix), None)
        if caption_suffix is not None and isinstance(json_value, dict) and not has_prompt(json_value):
            json_value["prompt"] = content_by_suffix[caption_suffix].read().decode("utf-8-sig").strip()
    except (ValueError, RecursionError) as error:
        return make_error_item(location, first_line(error))
    return make_item(json_value, location, content, None)
