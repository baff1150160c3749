"""Images of a row: their positions in a conversation, their sources and their pixels.

Supported are parts of a turn (`{"type": "image", "image": path}`, `image_url` with a path or a data: URI), and a column
such as `image` or `images` with paths, bytes, or both as in Hugging Face data sets. A user's own data set can have
images of Pillow. The images of a column replace <image> marks or parts without a source. If there are neither, they
precede the first user text. Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from cosmos_core.data.messages import IMAGE_MARK_REGEX, Message, Row
from cosmos_core.errors import DataError
from cosmos_core.types import ImageRef

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGE_SOURCE_KEYS = ("image", "image_url", "url", "path", "base64")
_IMAGE_COLUMNS = ("images", "image")
_IMAGE_PATH_COLUMNS = ("img", "image_path", "image_paths", "img_path")
"""Names of columns with images that are read only if no part of a turn names the source of its image."""
_IMAGE_SIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_IMAGE_PLACEHOLDER = {"type": "image"}
_BASE64_IMAGE_REGEX = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/\s]{40,}={0,2}\s*")
"""Pattern of a PNG, JPEG, GIF or WebP file in base64, without the prefix `data:`, as in data sets of Cosmos-RL."""
_MAX_PATH_LENGTH = 4095  # maximum length of a path on Linux (PATH_MAX), in bytes
_IMAGE_DECODER_ERRORS = (OSError, SyntaxError, ValueError, TypeError, RuntimeError, EOFError, LookupError, struct.error)
"""Exceptions of Pillow's decoders for damaged files."""


def align_images(turns: list[Message], row: Row, location: str) -> tuple[list[Message], list[Any]]:
    """Return the turns with a placeholder part for each image of the row, and the sources of the images (paths, bytes
    or Pillow images) in the same order. Raise DataError if the turns show more or fewer images than the row has, or the
    row has a video."""
    if get_column_images(row, ("videos", "video")):
        raise DataError(f"{location}: the row has a video, and this version reads images and text; leave such rows out")
    content_parts = [part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    have_parts_sources = any(part.get(key) is not None for part in content_parts for key in _IMAGE_SOURCE_KEYS)
    if column_images := get_column_images(row, _IMAGE_COLUMNS + (() if have_parts_sources else _IMAGE_PATH_COLUMNS)):
        turns = [{**turn, "content": _split_at_image_marks(turn["content"])} for turn in turns]
    parts_of_turns = [turn["content"] for turn in turns if isinstance(turn["content"], list)]
    if column_images and not any(part["type"] == "image" for content in parts_of_turns for part in content):
        turns = _insert_images(turns, len(column_images), location)
    unused_images: Iterator[Any] = iter(column_images)
    image_sources: list[Any] = []
    turns_with_placeholders = []
    for turn in turns:
        content = turn["content"]
        if isinstance(content, list):
            image_sources += [_take_image_source(part, unused_images) for part in content if part["type"] == "image"]
            content = [_IMAGE_PLACEHOLDER if part["type"] == "image" else part for part in content]
        turns_with_placeholders.append({**turn, "content": content})
    num_missing_images, unshown_images = sum(source is None for source in image_sources), list(unused_images)
    repeats_images = all(isinstance(each, str | dict) for each in unshown_images) and unshown_images == image_sources
    # Images of the column that no turn shows are an error, unless the column only repeats the images in the turns.
    if num_missing_images or (unshown_images and not repeats_images):
        num_images_in_row = len(image_sources) - num_missing_images + len(unshown_images)
        problem = f"the turns show {len(image_sources)} images and the row has {num_images_in_row}"
        raise DataError(f"{location}: {problem}; write <image> once for each image")
    texts_of_turns = [turn["content"] for turn in turns if isinstance(turn["content"], str)]
    if marked_text := next(filter(re.compile(r"\A\s*<image>|<image>\s*\Z").search, texts_of_turns), None):
        problem = f"the turn {marked_text[:40]!r} shows an image, and the row names none"
        raise DataError(f"{location}: {problem}; give it a column `image` or `images`")
    return turns_with_placeholders, image_sources


def has_image_sizes(turns: list[Message]) -> bool:
    """Return whether an image part of the turns specifies a size for its image, as some data sets for Qwen's models
    do."""
    parts_of_turns = [part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    return any(part.get(key) is not None for part in parts_of_turns for key in _IMAGE_SIZE_KEYS)


def read_image(source: Any, image_root: Path, location: str, stored_root: Path | None = None) -> tuple[ImageRef, Image]:
    """Read the image that the value `source` of a row names or contains; return an `ImageRef` to store in the prepared
    row, and the image. A path in `source` is relative to `image_root`, and the path in the `ImageRef` to `stored_root`
    (by default `image_root`). Raise DataError if the image is damaged."""
    source_path, content_bytes = locate_image(source, location)
    if content_bytes is not None:
        image_ref = ImageRef(None, content_bytes, hashlib.sha256(content_bytes).hexdigest())
        return image_ref, _decode_image(content_bytes, f"{location}: the image in the row")
    assert source_path is not None
    # Use os.path, because Path.expanduser raises an error for the name of an unknown user.
    image_path = Path(os.path.expanduser(source_path))
    image_path = image_path if image_path.is_absolute() else image_root / image_path
    file_bytes = _read_image_file(image_path, f"{location}: image {source_path!r}")
    stored_root = stored_root or image_root
    ref_path = image_path.relative_to(stored_root) if image_path.is_relative_to(stored_root) else image_path.absolute()
    image_ref = ImageRef(str(ref_path), None, hashlib.sha256(file_bytes).hexdigest())
    return image_ref, _decode_image(file_bytes, f"{location}: image {image_path}")


def open_image(image_ref: ImageRef) -> Image:
    """Return the image to which an `ImageRef` of a prepared row refers, by its bytes or its absolute path; raise
    DataError if the file of the image is missing, or has changed since it was prepared."""
    if image_ref.content is not None:
        return _decode_image(image_ref.content, "the image of a prepared row")
    assert image_ref.path is not None
    image_bytes = _read_image_file(Path(image_ref.path), f"image {image_ref.path} of the prepared rows")
    if hashlib.sha256(image_bytes).hexdigest() != image_ref.sha256:
        remedy = "run the prepare stage again (cosmos resume --from-stage NAME)"
        raise DataError(f"image {image_ref.path} is not the one that was prepared; {remedy}")
    return _decode_image(image_bytes, f"image {image_ref.path}")


def get_column_images(row: Row, columns: tuple[str, ...] = _IMAGE_COLUMNS + _IMAGE_PATH_COLUMNS) -> list[Any]:
    """Return the images in the first of `columns` that holds an image; empty if there is no such column."""
    for column_value in map(row.get, columns):
        images = list(column_value) if isinstance(column_value, (list, tuple)) else [column_value]
        if not all(map(_is_null_image, images)):
            return images
    return []


def _is_null_image(image_value: Any) -> bool:
    """Return whether the value of an image column stands for no image: null, or an object of nulls, which columnar
    formats store instead."""
    if isinstance(image_value, dict):
        return all(value is None or (isinstance(value, str | bytes) and not value) for value in image_value.values())
    return image_value is None or (isinstance(image_value, str) and not image_value)


def _split_at_image_marks(content: Any) -> Any:
    """Split a text with <image> marks into parts; return any other content unchanged."""
    if not isinstance(content, str) or not IMAGE_MARK_REGEX.search(content):
        return content
    content_parts: list[dict[str, Any]] = []
    for text_index, text in enumerate(IMAGE_MARK_REGEX.split(content)):
        content_parts += [dict(_IMAGE_PLACEHOLDER)] if text_index else []
        content_parts += [{"type": "text", "text": text}] if text else []
    return content_parts


def _insert_images(turns: list[Message], num_images: int, location: str) -> list[Message]:
    first_user_index = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first_user_index is None:
        problem = f"the row has {num_images} images and no user turn to show them"
        raise DataError(f"{location}: {problem}; write <image> in one")
    turn_content = turns[first_user_index]["content"]
    user_content_parts = [{"type": "text", "text": turn_content}] if isinstance(turn_content, str) else turn_content
    image_placeholders = [dict(_IMAGE_PLACEHOLDER) for _ in range(num_images)]
    turn_with_images = {**turns[first_user_index], "content": image_placeholders + user_content_parts}
    return [*turns[:first_user_index], turn_with_images, *turns[first_user_index + 1 :]]


def _take_image_source(content_part: dict[str, Any], unused_images: Iterator[Any]) -> Any:
    """Return the image source that a part of a turn names; if it names none, the next of `unused_images`, the images in
    a column of the row; None if no image is left."""
    source_in_part = next((content_part[key] for key in _IMAGE_SOURCE_KEYS if content_part.get(key) is not None), None)
    return next(unused_images, None) if source_in_part is None else source_in_part


def locate_image(source: Any, location: str) -> tuple[str | None, bytes | None]:
    """Return the path or the bytes of the image that the value `source` of a row names or contains; raise DataError if
    `source` has neither a local path nor bytes."""
    if isinstance(source, dict):  # read the keys of OpenAI (`url`), verl (`image`) or Hugging Face (`bytes`, `path`)
        image_bytes = source.get("bytes")
        path_or_url = source.get("url") or source.get("path") or source.get("image")
        source = path_or_url if image_bytes is None else image_bytes
    if isinstance(source, (bytes, bytearray)):
        return None, bytes(source)
    if is_pillow_image(source):
        return None, _encode_image(source, location)
    if not isinstance(source, str) or not source:
        raise DataError(f"{location}: {str(source)[:40]!r} is no image; give a path, bytes or a data: URI")
    if _BASE64_IMAGE_REGEX.fullmatch(source):
        source = f"data:;base64,{source}"
    if source.startswith("data:"):
        return None, _decode_data_uri(source, location)
    if source.startswith("file://"):
        source = unquote(re.sub(r"\Afile://[^/]*", "", source))
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", source):
        raise DataError(f"{location}: image {source[:80]!r} is a URL, and rows are read from this machine; download it")
    if len(source) > _MAX_PATH_LENGTH or re.search("[\0-\x1f\ud800-\udfff]", source):
        remedy = "base64 needs 'data:image/png;base64,' before it"
        raise DataError(f"{location}: image {source[:40]!r} is no path; {remedy}")
    return source, None


def is_pillow_image(image_value: Any) -> bool:
    """Return whether a value is an image of Pillow, without importing Pillow."""
    return hasattr(image_value, "getexif")


def _encode_image(image: Image, location: str) -> bytes:
    """Return an image of Pillow as a PNG file; raise DataError if the image is damaged."""
    from PIL import ImageOps

    try:
        convert_to_rgb(ImageOps.exif_transpose(image)).save(buffer := BytesIO(), "PNG")
    except _IMAGE_DECODER_ERRORS as error:
        raise DataError(f"{location}: the image in the row is damaged ({error}); replace it") from error
    return buffer.getvalue()


def _decode_data_uri(data_uri: str, location: str) -> bytes:
    uri_header, _, base64_text = data_uri.partition(",")
    try:
        if not uri_header.endswith(";base64"):
            raise ValueError("it is not ;base64")
        return base64.b64decode("".join(base64_text.split()), validate=True)  # remove line breaks in base64 data
    except ValueError as error:
        raise DataError(f"{location}: the image {data_uri[:30]!r}... cannot be decoded: {error}") from error


def _read_image_file(path: Path, image_label: str) -> bytes:
    try:
        if not S_ISREG(path.stat().st_mode):
            raise DataError(f"{image_label}: {path} is no regular file, and a device or a pipe may be read without end")
        return path.read_bytes()
    except OSError as error:
        reading_problem = "there is no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        remedy = "check the path, or set custom.dataset.media_path"
        raise DataError(f"{image_label}: {reading_problem} ({path}); {remedy}") from error


def convert_to_rgb(image: Image) -> Image:
    """Convert an image to RGB; of 16-bit greyscale, use the upper 8 bits, since Pillow would clip values to white."""
    from PIL import Image as pillow

    if image.mode == "F":
        raise DataError("it has pixels of 32-bit floating point, whose range is not known; save it with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey_values = np.asarray(image).astype(np.int64)
        is_16_bit = image.mode != "I" or grey_values.max(initial=0) > np.iinfo(np.uint8).max
        image = pillow.fromarray((grey_values >> 8 * is_16_bit).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def _decode_image(content: bytes, image_label: str) -> Image:
    """Decode an image as the processors of transformers do, in RGB and rotated by its EXIF orientation; raise DataError
    if it is no image, is truncated, or exceeds the size limit of Pillow."""
    from PIL import Image as pillow  # imported only for images, since rows of text do not need Pillow
    from PIL import ImageOps

    try:
        with pillow.open(BytesIO(content)) as image:
            return convert_to_rgb(ImageOps.exif_transpose(image))
    except pillow.DecompressionBombError as error:
        raise DataError(f"{image_label} is too large ({error}); make it smaller") from error
    except pillow.UnidentifiedImageError as error:
        raise DataError(f"{image_label} is no image ({len(content)} bytes that begin with {content[:8]!r})") from error
    except _IMAGE_DECODER_ERRORS as error:
        raise DataError(f"{image_label} is damaged ({error}); replace it") from error
