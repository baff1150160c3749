"""Images and clips with their prompts in folders of files, or in tar files in the webdataset format."""

import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cosmos_core.config.schema.dataset import data_suffix
from cosmos_core.data.media_items import (
    CAPTION_SUFFIXES,
    MEDIA_SUFFIXES,
    VIDEO_SUFFIXES,
    MediaContent,
    MediaItem,
    describe_item_error,
    has_prompt,
    make_error_item,
    make_item,
)
from cosmos_core.data.rows import HELD_OUT_SPLITS, has_split_word
from cosmos_core.errors import DataError, first_line
from cosmos_core.run.content import list_data_files

EMBEDDING_SUFFIXES = (".safetensors", ".pickle", ".pkl")
_UNSUPPORTED_SUFFIXES = (".heic", ".heif", ".jxl", ".gif", ".svg", ".raw", ".dng", ".wmv", ".flv")
_SUPPORTED_SUFFIXES = (*MEDIA_SUFFIXES, *CAPTION_SUFFIXES, *EMBEDDING_SUFFIXES, ".json", ".npz")
_METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_EMBEDDING_FOLDERS = ("text_embeddings", "t5_xxl", "t5")


def list_metadata_files(folder: Path) -> list[Path]:
    """Return the metadata files of a folder in the imagefolder format of `datasets`, which list the images or videos of
    the folder with their columns."""
    return [folder / name for name in _METADATA_FILES if (folder / name).is_file()]


def is_media_folder(folder: Path) -> bool:
    """Return whether a folder is to be read as a data set of media: it has images, videos, tar files, a sub-folder
    `metas`, or JSON files with one prompt each."""
    if (folder / "metas").is_dir() or find_tar_files(folder):
        return True
    file_names = sorted(dir_entry.name for dir_entry in os.scandir(folder) if dir_entry.is_file())
    if any(name.lower().endswith(MEDIA_SUFFIXES) for name in file_names):
        return True
    if not any(map(data_suffix, file_names)):
        stems = {file.with_suffix("") for file in _find_media_files(folder)}
        if stems and all(file.with_suffix("") in stems for file in list_data_files(folder) if data_suffix(file.name)):
            return True
        return any(name.lower().endswith(_UNSUPPORTED_SUFFIXES) for name in file_names)
    json_file_names = [name for name in file_names if name.lower().endswith(".json") and not name.startswith(".")]
    if not json_file_names or json_file_names[0] in {"dataset_dict.json", "state.json", "dataset_info.json"}:
        return False
    try:
        return isinstance(json.loads((folder / json_file_names[0]).read_text(encoding="utf-8-sig")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _find_media_files(folder: Path) -> list[Path]:
    """Return the images and videos in a folder and its sub-folders, except sub-folders of held-out splits."""
    files = [file for file in list_data_files(folder) if file.suffix.lower() in MEDIA_SUFFIXES]
    return [file for file in files if not {*HELD_OUT_SPLITS} & {*file.relative_to(folder).parent.parts}]


def read_media_folder(root_folder: Path) -> Iterator[MediaItem]:
    """Yield an item for each image or video with its caption in a folder, and in its sub-folders with such files."""
    yield from _read_paired_files(root_folder)
    for folder in sorted({file.parent for file in _find_media_files(root_folder)} - {root_folder}):
        subfolder = f"{folder.relative_to(root_folder)}/"
        for item in _read_paired_files(folder):
            yield replace(item, location=subfolder + item.location, problem=item.problem and subfolder + item.problem)


def _read_paired_files(folder: Path) -> Iterator[MediaItem]:
    """Yield an item for each NAME.json in the folder, with the image or video NAME, and for each other image or video,
    with the text of its caption file as prompt. A file without prompt gives an item with a `problem`."""
    visible_files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    media_by_stem: dict[str, list[Path]] = {}
    for file in visible_files:
        if file.suffix.lower() in MEDIA_SUFFIXES:
            media_by_stem.setdefault(file.stem, []).append(file)
    embedding_by_stem = {file.stem: file for file in visible_files if file.suffix.lower() in EMBEDDING_SUFFIXES}
    # If a name has several caption files, the first suffix in `CAPTION_SUFFIXES` decides which file is read.
    caption_file_by_stem = {
        file.stem: file for end in reversed(CAPTION_SUFFIXES) for file in visible_files if file.suffix.lower() == end
    }
    stems_without_media = caption_file_by_stem.keys() - media_by_stem.keys()
    for file in visible_files:
        suffix = file.suffix.lower()
        is_unknown_media = file.stem in stems_without_media and suffix not in _SUPPORTED_SUFFIXES and file.is_file()
        if suffix in _UNSUPPORTED_SUFFIXES or is_unknown_media:
            yield make_error_item(file.name, f"{file.suffix} is not read; convert it to png or mp4")
    row_files = [file for file in visible_files if data_suffix(file.name) and file.suffix.lower() != ".json"]
    row_files += list_metadata_files(folder.parent)
    remedy = f"; if its prompt is in {row_files[0]}, give that file in place of the folder" if row_files else ""
    media_json_files = [file for file in visible_files if file.suffix.lower() == ".json"]
    for file in media_json_files:
        try:
            json_value = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            yield make_error_item(file.name, f"malformed JSON, {describe_item_error(error)}")
            continue
        if isinstance(json_value, dict) and not has_prompt(json_value) and file.stem in media_by_stem:
            json_value |= {"prompt": caption} if (caption := _read_caption(caption_file_by_stem.get(file.stem))) else {}
        for path in media_by_stem.get(file.stem, [None]):  # one JSON file may describe several media files
            yield make_item(json_value, file.name, _make_file_content(path), embedding_by_stem.get(file.stem))
    for stem in sorted(media_by_stem.keys() - {file.stem for file in media_json_files}):
        caption, embedding_path = _read_caption(caption_file_by_stem.get(stem)), embedding_by_stem.get(stem)
        for path in media_by_stem[stem]:
            if caption is None:
                yield make_error_item(path.name, f"there is no {stem}.txt, .caption or .json with its prompt{remedy}")
            elif not caption and embedding_path is None:
                yield make_error_item(path.name, "its caption file is empty or not UTF-8; write its prompt there")
            else:
                yield make_item({"prompt": caption}, path.name, _make_file_content(path), embedding_path)


def _read_caption(caption_file: Path | None) -> str | None:
    """Return the text of a caption file; empty if it cannot be read, None if `caption_file` is None."""
    try:
        return None if caption_file is None else caption_file.read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        describe_item_error(error)
        return ""


def read_metas_folder(folder: Path) -> Iterator[MediaItem]:
    """Yield an item for each video or image NAME with a metas/NAME.txt, and for each metas/NAME.txt without media."""
    media_by_stem: dict[str, list[Path]] = {}
    for file in _list_files(folder, ("videos", "images"), MEDIA_SUFFIXES):
        media_by_stem.setdefault(file.stem, []).append(file)
    embedding_by_stem = {file.stem: file for file in _list_files(folder, _EMBEDDING_FOLDERS, EMBEDDING_SUFFIXES)}
    prompt_files = _list_files(folder, ["metas"], [".txt"])
    for file in prompt_files:
        location = f"metas/{file.name}"
        try:
            prompt = file.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            yield make_error_item(location, describe_item_error(error))
            continue
        embedding_path = embedding_by_stem.get(file.stem)
        if not prompt and embedding_path is None:
            yield make_error_item(location, "it is empty; write its prompt there")
            continue
        for media_file in media_by_stem.get(file.stem, [None]):  # one text may describe several media files
            yield make_item({"prompt": prompt}, location, _make_file_content(media_file), embedding_path)
    for stem in sorted(media_by_stem.keys() - {file.stem for file in prompt_files}):
        location = "/".join(media_by_stem[stem][0].parts[-2:])
        yield make_error_item(location, f"there is no metas/{stem}.txt with its prompt")


def _list_files(folder: Path, subfolder_names: Iterable[str], file_suffixes: Sequence[str]) -> list[Path]:
    files = (file for name in subfolder_names if (folder / name).is_dir() for file in sorted((folder / name).iterdir()))
    return [file for file in files if file.suffix.lower() in file_suffixes and not file.name.startswith(".")]


def _make_file_content(path: Path | None) -> MediaContent | None:
    return None if path is None else MediaContent(path.suffix.lower() in VIDEO_SUFFIXES, path)


def find_tar_files(path: Path, split: str = "") -> list[Path]:
    """Return the tar file `path`, or the tar files in the folder `path` whose names contain the name `split`; all if
    `split` is empty. Files whose names contain the name of no held-out split belong to the split `train`."""
    if not path.is_dir():
        return [path] if path.suffix.lower() == ".tar" else []
    tar_files = sorted(f for f in path.iterdir() if f.suffix.lower() == ".tar" and f.is_file() and f.name[0] != ".")
    if split == "train":
        return [file for file in tar_files if not any(has_split_word(file, name) for name in HELD_OUT_SPLITS)]
    return [file for file in tar_files if not split or has_split_word(file, split)]


def iterate_tar_items(path: Path, for_clips: bool) -> Iterator[MediaItem]:
    """Yield the items of the webdataset shard `path`. An item consists of consecutive members whose names agree up to
    the first dot; with `for_clips`, its video is preferred to its images. Raise DataError for a damaged file: the
    number of rows after the damage is unknown, so they cannot be compared with `max_skipped_fraction`."""
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
        reason = describe_item_error(error)
        raise DataError(f"{path}: damaged tar file, {reason}; make it again, or remove it from the folder") from error


def _check_tar_end(tar_path: Path, end_byte: int) -> None:
    """Raise tarfile.ReadError unless the block at `end_byte`, where reading a tar file stopped, is the block of zeros
    that follows the last member: `tarfile` also stops silently at a damaged header."""
    with open(tar_path, "rb") as file:
        file.seek(end_byte)
        tar_header_block = file.read(tarfile.BLOCKSIZE)
    if len(tar_header_block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("unexpected end of data")
    if any(tar_header_block):
        raise tarfile.ReadError(f"the header at byte {end_byte} is damaged, and nothing behind it can be read")


def _make_item_from_members(path: Path, members_by_suffix: dict[str, tarfile.TarInfo], for_clips: bool) -> MediaItem:
    location = f"{path.name}:{next(iter(members_by_suffix.values())).name}"
    content_by_suffix = {
        f".{suffix}": MediaContent(f".{suffix}" in VIDEO_SUFFIXES, path, member.offset_data, member.size)
        for suffix, member in members_by_suffix.items()
    }
    media_contents = [content for suffix, content in content_by_suffix.items() if suffix in MEDIA_SUFFIXES]
    content = max(media_contents, key=lambda content: for_clips and content.is_video, default=None)
    try:
        json_value = json.loads(content_by_suffix[".json"].read()) if ".json" in content_by_suffix else {}
        caption_suffix = next((suffix for suffix in CAPTION_SUFFIXES if suffix in content_by_suffix), None)
        if caption_suffix is not None and isinstance(json_value, dict) and not has_prompt(json_value):
            json_value["prompt"] = content_by_suffix[caption_suffix].read().decode("utf-8-sig").strip()
    except (ValueError, RecursionError) as error:
        return make_error_item(location, first_line(error))
    return make_item(json_value, location, content, None)
