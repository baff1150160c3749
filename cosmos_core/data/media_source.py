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

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cosmos_core.config.prompt_sets import find_prompt_set, prompt_files, prompt_metadata
from cosmos_core.config.schema.dataset import DatasetConfig, data_suffix
from cosmos_core.data.formats import LocatedRow
from cosmos_core.data.images import locate_image
from cosmos_core.data.rows import HELD_OUT_SPLITS, has_split_word, load_rows
from cosmos_core.errors import DataError, first_line
from cosmos_core.run.content import list_data_files
from cosmos_core.run.files import sha256
from cosmos_core.transient import is_machine_error

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".avif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v", ".mpg", ".mpeg")
_UNSUPPORTED_SUFFIXES = (".heic", ".heif", ".jxl", ".gif", ".svg", ".raw", ".dng", ".wmv", ".flv")
CAPTION_SUFFIXES = (".txt", ".caption", ".prompt")
EMBEDDING_SUFFIXES = (".safetensors", ".pickle", ".pkl")
PROMPT_KEYS = ("prompt", "caption", "text")
_MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
_KNOWN_SUFFIXES = (*_MEDIA_SUFFIXES, *CAPTION_SUFFIXES, *EMBEDDING_SUFFIXES, ".json", ".npz")
_MEDIA_KEYS = ("image", "img", "jpg", "png", "webp", "video", "mp4", "file_name")
_PATH_KEYS = ("image_path", "img_path", "images", "video_path")
"""Columns that contain the media of a row if it has no column of `_MEDIA_KEYS`; otherwise they are metadata."""
_VIDEO_COLUMNS = ("video", "mp4", "video_path")
_METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_EMBEDDING_FOLDERS = ("text_embeddings", "t5_xxl", "t5")


@dataclass(frozen=True, slots=True)
class MediaContent:
    """Location of the bytes of an image or a video: a file, a range of a file, or bytes of a row."""

    is_video: bool
    path: Path | None = None
    offset: int = 0
    size: int | None = None
    """Number of bytes of the content, from `offset` on; None: up to the end of the file."""
    content_bytes: bytes = field(default=b"", repr=False)

    def digest(self) -> str:
        """Return the SHA-256 digest of the content; raise OSError if the file cannot be read."""
        if self.path is not None and self.size is None:
            return sha256(self.path)
        return hashlib.sha256(self.read()).hexdigest()

    def read(self) -> bytes:
        """Return the bytes of the content; raise OSError if the file cannot be read."""
        if self.path is None:
            return self.content_bytes
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read() if self.size is None else file.read(self.size)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A prompt with the image or clip that it describes, or a prompt alone."""

    location: str
    """Location of the item, for error messages."""
    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """Values that the data set's row has in addition to the prompt, for reward functions."""
    content: MediaContent | None = None
    embedding_path: Path | None = None
    """File with the embedding of the prompt; None if the text encoder computes it."""
    missing_media_reason: str = ""
    """Reason why the item has no image or clip, for error messages; empty: the media file does not exist."""
    problem: str = ""
    """Reason, in one line, why the item (or, if it has a prompt, its media) cannot be used; empty if it can be used."""


def _make_error_item(location: str, problem: str) -> MediaItem:
    return MediaItem(location, "", problem=f"{location}: {problem}")


ReadItemsFn = Callable[[], Iterator[MediaItem]]
"""Function that reads the items of a data set from its beginning."""


def open_media_items(dataset: DatasetConfig, config_key: str, *, for_clips: bool = False) -> ReadItemsFn:
    """Return a function that iterates over the items of all splits of a data set, in order; `config_key` names the data
    set's table in messages, `for_clips` prefers videos to images. Raise DataError if it is missing or unsupported."""
    if not (dataset_name := dataset.local_dir or dataset.name).strip():
        raise DataError(f"{config_key}.local_dir and {config_key}.name are empty; give a folder of media, or prompts")
    path = Path(os.path.expanduser(dataset_name))
    if not os.path.exists(path):
        path = find_prompt_set(dataset_name, f"{config_key}.name") or path
    item_readers = [_make_item_reader(path, split, dataset, config_key, for_clips) for split in dataset.split]
    return lambda: (item for reader in item_readers for item in reader())


def _make_item_reader(path: Path, split: str, dataset: DatasetConfig, config_key: str, for_clips: bool) -> ReadItemsFn:
    tar_split, subset = split, dataset.subset
    parents = [each for each in (path, path / split) if (each / subset).is_dir() or _list_metadata_files(each)]
    if not parents and subset != "default" and path.is_dir() and _is_media_folder(path):
        raise DataError(f"{config_key}.subset = {subset!r}, but {path} has no folder of that name")
    # Read the sub-folder `subset` by itself, unless a metadata file of its parent folder lists its media.
    if parents and (not _list_metadata_files(parents[0]) or _list_metadata_files(parents[0] / subset)):
        path, tar_split, dataset = parents[0] / subset, split * (parents[0] == path), dataset.copy_with(subset="")
    if path.is_dir() and (path / split).is_dir() and not (path / "dataset_dict.json").is_file():
        path, tar_split = path / split, ""
    tar_files = _find_tar_files(path, tar_split)
    metadata_file, text_files = next(iter(_list_metadata_files(path)), None), prompt_files(path, split)
    split_name = tar_split.partition("[")[0] if metadata_file else tar_split
    has_metadata = metadata_file is not None and not text_files
    if split_name not in {"", "train"} and not tar_files and path.is_dir() and (has_metadata or _is_media_folder(path)):
        missing_part = "rows to take a slice of; name the split alone" if "[" in split_name else "folder of that name"
        raise DataError(f"{config_key}.split = {split!r}, but {path} has no {missing_part}")
    has_captions = any(path.is_dir() and f.with_suffix(end).is_file() for f in text_files for end in _MEDIA_SUFFIXES)
    if "[" in split and (tar_files or (text_files and not has_captions)):
        raise DataError(f"{config_key}.split = {split!r}: {path} has no rows to take a slice of; name the split alone")
    if text_files and not has_captions:
        return lambda: _read_prompt_lines(text_files, path)
    if path.is_dir() and (path / "metas").is_dir():
        return lambda: _read_metas_folder(path)
    if tar_files:
        return lambda: (item for path in tar_files for item in _iterate_tar_items(path, for_clips))
    if metadata_file:
        path, split = metadata_file, "train" + split[split.find("[") :] if "[" in split else "train"
    elif path.is_dir() and _is_media_folder(path):
        return lambda: _read_media_folder(path)
    rows = load_rows(dataset.copy_with(name=str(path) if path.exists() else dataset.name, split=(split,)), config_key)
    return lambda: (_make_media_item(location_and_row, rows.folder, for_clips) for location_and_row in rows)


def _list_metadata_files(folder: Path) -> list[Path]:
    return [folder / name for name in _METADATA_FILES if (folder / name).is_file()]


def _is_media_folder(folder: Path) -> bool:
    """Return whether a folder has images or videos, or JSON files with one prompt each."""
    if (folder / "metas").is_dir() or _find_tar_files(folder):
        return True
    file_names = sorted(dir_entry.name for dir_entry in os.scandir(folder) if dir_entry.is_file())
    if any(name.lower().endswith(_MEDIA_SUFFIXES) for name in file_names):
        return True
    if not any(map(data_suffix, file_names)):
        stems = {file.with_suffix("") for file in _find_media(folder)}
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


def _find_media(folder: Path) -> list[Path]:
    """Return the images and videos in a folder and its sub-folders, except sub-folders of held-out splits."""
    files = [file for file in list_data_files(folder) if file.suffix.lower() in _MEDIA_SUFFIXES]
    return [file for file in files if not {*HELD_OUT_SPLITS} & {*file.relative_to(folder).parent.parts}]


def _read_media_folder(root_folder: Path) -> Iterator[MediaItem]:
    """Yield the pairs of a media file and its caption in a folder, and in its sub-folders with images or videos."""
    yield from _read_paired_files(root_folder)
    for folder in sorted({file.parent for file in _find_media(root_folder)} - {root_folder}):
        subfolder = f"{folder.relative_to(root_folder)}/"
        for item in _read_paired_files(folder):
            yield replace(item, location=subfolder + item.location, problem=item.problem and subfolder + item.problem)


def _read_paired_files(folder: Path) -> Iterator[MediaItem]:
    """Yield an item for each NAME.json with its media file, and for each media file with a caption file."""
    visible_files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    media_by_stem: dict[str, list[Path]] = {}
    for file in visible_files:
        if file.suffix.lower() in _MEDIA_SUFFIXES:
            media_by_stem.setdefault(file.stem, []).append(file)
    embedding_by_stem = {file.stem: file for file in visible_files if file.suffix.lower() in EMBEDDING_SUFFIXES}
    # If a name has several caption files, the first suffix in `CAPTION_SUFFIXES` decides which file is read.
    caption_file_by_stem = {
        file.stem: file for end in reversed(CAPTION_SUFFIXES) for file in visible_files if file.suffix.lower() == end
    }
    stems_without_media = caption_file_by_stem.keys() - media_by_stem.keys()
    for file in visible_files:
        suffix = file.suffix.lower()
        is_unknown_media = file.stem in stems_without_media and suffix not in _KNOWN_SUFFIXES and file.is_file()
        if suffix in _UNSUPPORTED_SUFFIXES or is_unknown_media:
            yield _make_error_item(file.name, f"{file.suffix} is not read; convert it to png or mp4")
    table_files = [file for file in visible_files if data_suffix(file.name) and file.suffix.lower() != ".json"]
    table_files += _list_metadata_files(folder.parent)
    remedy = f"; if its prompt is in {table_files[0]}, give that file in place of the folder" if table_files else ""
    json_files = [file for file in visible_files if file.suffix.lower() == ".json"]
    for file in json_files:
        try:
            json_value = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            yield _make_error_item(file.name, f"malformed JSON, {describe_error(error)}")
            continue
        if isinstance(json_value, dict) and not _has_prompt(json_value) and file.stem in media_by_stem:
            json_value |= {"prompt": caption} if (caption := _read_caption(caption_file_by_stem.get(file.stem))) else {}
        for path in media_by_stem.get(file.stem, [None]):  # one JSON file may describe several media files
            yield _make_item(json_value, file.name, _make_file_content(path), embedding_by_stem.get(file.stem))
    for stem in sorted(media_by_stem.keys() - {file.stem for file in json_files}):
        caption, embedding_path = _read_caption(caption_file_by_stem.get(stem)), embedding_by_stem.get(stem)
        for path in media_by_stem[stem]:
            if caption is None:
                yield _make_error_item(path.name, f"there is no {stem}.txt, .caption or .json with its prompt{remedy}")
            elif not caption and embedding_path is None:
                yield _make_error_item(path.name, "its caption file is empty or not UTF-8; write its prompt there")
            else:
                yield _make_item({"prompt": caption}, path.name, _make_file_content(path), embedding_path)


def _read_caption(caption_file: Path | None) -> str | None:
    """Return the text of a caption file; empty if it cannot be read, None if `caption_file` is None."""
    try:
        return None if caption_file is None else caption_file.read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        describe_error(error)
        return ""


def describe_error(error: Exception) -> str:
    """Return the first line of an error that makes a row unusable; re-raise disk errors, since a retry may succeed."""
    if is_machine_error(error):
        raise error
    return first_line(error)


def _read_metas_folder(folder: Path) -> Iterator[MediaItem]:
    """Yield an item for each video or image NAME with a metas/NAME.txt, and for each metas/NAME.txt without media."""
    media_by_stem: dict[str, list[Path]] = {}
    for file in _list_files(folder, ("videos", "images"), _MEDIA_SUFFIXES):
        media_by_stem.setdefault(file.stem, []).append(file)
    embedding_by_stem = {file.stem: file for file in _list_files(folder, _EMBEDDING_FOLDERS, EMBEDDING_SUFFIXES)}
    text_files = _list_files(folder, ["metas"], [".txt"])
    for file in text_files:
        location = f"metas/{file.name}"
        try:
            prompt = file.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            yield _make_error_item(location, describe_error(error))
            continue
        embedding_path = embedding_by_stem.get(file.stem)
        if not prompt and embedding_path is None:
            yield _make_error_item(location, "it is empty; write its prompt there")
            continue
        for media_file in media_by_stem.get(file.stem, [None]):  # one text may describe several media files
            yield _make_item({"prompt": prompt}, location, _make_file_content(media_file), embedding_path)
    for stem in sorted(media_by_stem.keys() - {file.stem for file in text_files}):
        location = "/".join(media_by_stem[stem][0].parts[-2:])
        yield _make_error_item(location, f"there is no metas/{stem}.txt with its prompt")


def _list_files(folder: Path, subfolder_names: Iterable[str], suffixes: Sequence[str]) -> list[Path]:
    files = (file for name in subfolder_names if (folder / name).is_dir() for file in sorted((folder / name).iterdir()))
    return [file for file in files if file.suffix.lower() in suffixes and not file.name.startswith(".")]


def _make_file_content(path: Path | None) -> MediaContent | None:
    return None if path is None else MediaContent(path.suffix.lower() in VIDEO_SUFFIXES, path)


def _find_tar_files(path: Path, split: str = "") -> list[Path]:
    """Return the tar file `path`, or the tar files in the folder `path` whose names contain the split; all if `split`
    is empty. Files whose names contain no held-out split are of the split `train`."""
    if not path.is_dir():
        return [path] if path.suffix.lower() == ".tar" else []
    tar_files = sorted(f for f in path.iterdir() if f.suffix.lower() == ".tar" and f.is_file() and f.name[0] != ".")
    if split == "train":
        return [file for file in tar_files if not any(has_split_word(file, name) for name in HELD_OUT_SPLITS)]
    return [file for file in tar_files if not split or has_split_word(file, split)]


def _iterate_tar_items(path: Path, for_clips: bool) -> Iterator[MediaItem]:
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
    contents = [content for suffix, content in content_by_suffix.items() if suffix in _MEDIA_SUFFIXES]
    content = max(contents, key=lambda content: for_clips and content.is_video, default=None)
    try:
        json_value = json.loads(content_by_suffix[".json"].read()) if ".json" in content_by_suffix else {}
        caption_suffix = next((suffix for suffix in CAPTION_SUFFIXES if suffix in content_by_suffix), None)
        if caption_suffix is not None and isinstance(json_value, dict) and not _has_prompt(json_value):
            json_value["prompt"] = content_by_suffix[caption_suffix].read().decode("utf-8-sig").strip()
    except (ValueError, RecursionError) as error:
        return _make_error_item(location, first_line(error))
    return _make_item(json_value, location, content, None)


def _read_prompt_lines(prompt_paths: Iterable[Path], dataset_path: Path) -> Iterator[MediaItem]:
    for file in prompt_paths:
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
                    yield _make_error_item(location, "it is not UTF-8; save the file as UTF-8")
                except (ValueError, RecursionError) as error:
                    yield _make_error_item(location, f"malformed JSON, {first_line(error)}")
                else:
                    yield _make_item(json_value, location, None, None)


def _make_media_item(location_and_row: LocatedRow, folder: Path, for_clips: bool) -> MediaItem:
    location, row = location_and_row
    columns = [name for name in (*_MEDIA_KEYS, *_PATH_KEYS) if row.get(name) not in (None, "", [])]
    clip_files = [n for n in columns if isinstance(row[n], str) and row[n][-9:].lower().endswith(VIDEO_SUFFIXES)]
    media_column = max(columns, key=lambda name: for_clips and name in (*_VIDEO_COLUMNS, *clip_files), default=None)
    if media_column is None:
        no_media_reason = f"it has no column {', '.join(_MEDIA_KEYS)} with an image or a video, but {', '.join(row)}"
        return replace(_make_item(row, location, None, None), missing_media_reason=no_media_reason)
    [media_source] = value if isinstance(value := row[media_column], list) and len(value) == 1 else [value]
    content, media_problem = None, ""
    try:
        local_path, content_bytes = locate_image(media_source, location)
        is_video = media_column in _VIDEO_COLUMNS or str(local_path).lower().endswith(VIDEO_SUFFIXES)
        media_path = None if local_path is None else folder / os.path.expanduser(local_path)
        content = MediaContent(is_video, media_path, content_bytes=content_bytes or b"")
    except DataError as error:
        media_problem = str(error)
    item = _make_item({k: v for k, v in row.items() if k not in (*_MEDIA_KEYS, media_column)}, location, content, None)
    return replace(item, problem=media_problem or item.problem)


def _make_item(json_object: Any, location: str, content: MediaContent | None, embedding_path: Path | None) -> MediaItem:
    if not isinstance(json_object, dict):
        return _make_error_item(location, 'it must be an object such as {"prompt": "..."}; name a file of rows itself')
    # The prompt is the first non-empty text of `PROMPT_KEYS`, or the first text if all are empty.
    if not (present_prompt_keys := [name for name in PROMPT_KEYS if isinstance(json_object.get(name), str)]):
        return _make_error_item(location, f"it has no text {', '.join(PROMPT_KEYS)}")
    prompt_key = next((name for name in present_prompt_keys if json_object[name].strip()), present_prompt_keys[0])
    metadata = {name: field_value for name, field_value in json_object.items() if name != prompt_key}
    return MediaItem(location, json_object[prompt_key].strip(), metadata, content, embedding_path)


def _has_prompt(json_object: dict[str, Any]) -> bool:
    return any(isinstance(text := json_object.get(name), str) and text.strip() for name in PROMPT_KEYS)
