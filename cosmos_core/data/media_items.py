"""An image or clip with its prompt: an item of a data set of media."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_core.errors import first_line
from cosmos_core.run.files import sha256
from cosmos_core.transient import is_machine_error

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".avif", ".tif", ".tiff")
VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v", ".mpg", ".mpeg")
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
CAPTION_SUFFIXES = (".txt", ".caption", ".prompt")
PROMPT_KEYS = ("prompt", "caption", "text")


@dataclass(frozen=True, slots=True)
class MediaContent:
    """Location of the bytes of an image or a video: a file, a range of a file, or bytes of a row."""

    is_video: bool
    path: Path | None = None
    offset: int = 0
    size: int | None = None
    """Number of bytes of the image or video in the file, from `offset` on; None: up to the end of the file."""
    content_bytes: bytes = field(default=b"", repr=False)

    def digest(self) -> str:
        """Return the SHA-256 digest of the bytes of the image or video; raise OSError if the file cannot be read."""
        if self.path is not None and self.size is None:
            return sha256(self.path)
        return hashlib.sha256(self.read()).hexdigest()

    def read(self) -> bytes:
        """Return the bytes of the image or video; raise OSError if the file cannot be read."""
        if self.path is None:
            return self.content_bytes
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read() if self.size is None else file.read(self.size)


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Item of a data set of media: a prompt with the image or clip that it describes, or a prompt alone."""

    location: str
    """Where the data set has the prompt or its image or clip, such as file and line, for error messages."""
    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """Values of other columns than the prompt in the row of the data set, by column, for reward functions."""
    content: MediaContent | None = None
    embedding_path: Path | None = None
    """File with the embedding of the prompt; None if the text encoder computes it."""
    missing_media_reason: str = ""
    """Reason why the item has no image or clip, for error messages; empty: the media file does not exist."""
    problem: str = ""
    """Reason, in one line, why the item (or, if it has a prompt, its media) cannot be used; empty if it can be used."""


def make_error_item(location: str, problem: str) -> MediaItem:
    """Return a `MediaItem` for a part of a data set, such as a row or a file, that cannot be used because of
    `problem`."""
    return MediaItem(location, "", problem=f"{location}: {problem}")


def make_item(json_object: Any, location: str, content: MediaContent | None, embedding_path: Path | None) -> MediaItem:
    """Return a `MediaItem` with the prompt and the metadata in a JSON object, and with the image or clip `content`. If
    the JSON value is no object or has no prompt, the item's `problem` says so."""
    if not isinstance(json_object, dict):
        return make_error_item(location, 'it must be an object such as {"prompt": "..."}; name a file of rows itself')
    # The prompt is the first non-empty text of `PROMPT_KEYS`, or the first text if all are empty.
    if not (present_prompt_keys := [name for name in PROMPT_KEYS if isinstance(json_object.get(name), str)]):
        other_values = [f"{name} is {json_object[name]}" for name in PROMPT_KEYS if json_object.get(name) is not None]
        remedy = f", but its {other_values[0][:60]}; write one string, or a row for each" if other_values else ""
        return make_error_item(location, f"it has no text {', '.join(PROMPT_KEYS)}{remedy}")
    prompt_key = next((name for name in present_prompt_keys if json_object[name].strip()), present_prompt_keys[0])
    metadata = {name: field_value for name, field_value in json_object.items() if name != prompt_key}
    return MediaItem(location, json_object[prompt_key].strip(), metadata, content, embedding_path)


def has_prompt(json_object: dict[str, Any]) -> bool:
    """Return whether a JSON object has a prompt that is not empty."""
    return any(isinstance(text := json_object.get(name), str) and text.strip() for name in PROMPT_KEYS)


def describe_item_error(error: Exception) -> str:
    """Return the first line of an error that makes a row unusable; re-raise disk errors, since a retry can succeed."""
    if is_machine_error(error):
        raise error
    return first_line(error)
