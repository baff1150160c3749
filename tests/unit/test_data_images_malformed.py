"""Files that are no images, or not whole ones: the stage ends with the row and the file in one line."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import features

from cosmos_core.errors import DataError
from tests.unit.test_data_images import ANSWER, CAT, SHOWN, prepare
from tests.unit.tiny_vlms import PARTS, picture, save_vlm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vlm("llava", tmp_path_factory.mktemp("model"), PARTS)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def empty_png(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def jpeg() -> bytes:
    buffer = io.BytesIO()
    picture(1, 200, 200).save(buffer, "JPEG")
    return buffer.getvalue()


def damaged_avif() -> bytes:
    """Whole to look at; its decoder raises an error of its own kind."""
    buffer = io.BytesIO()
    picture(1, 64, 48).save(buffer, "AVIF")
    head, mark, body = buffer.getvalue().partition(b"mdat")
    return head + mark + b"\xff" * len(body)


MALFORMED: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "there is no such file"),
    "truncated": (jpeg()[:-900], "is damaged"),
    "cut in its head": (jpeg()[:100], "is damaged|is no image"),
    "corrupt": (jpeg()[:300] + b"\xff\xd8\xff\x00" * 60 + jpeg()[540:600], "is damaged"),
    "another format": (damaged_avif() if features.check("avif") else b"", "is damaged|is no image"),
    "text": (b"<html>404</html>", "is no image"),
    "empty": (b"", r"is no image \(0 bytes"),
    "of no size": (empty_png(0, 0), "is damaged|is no image"),
    "a bomb": (empty_png(60_000, 60_000), "is too large"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_image_ends_the_stage_with_its_row_and_file(name, tmp_path, model):
    content, message = MALFORMED[name]
    good = {"messages": [SHOWN, ANSWER], "image": "cat.png"}
    (tmp_path / "cat.png").write_bytes(CAT)
    if content is not None:
        (tmp_path / "bad.jpg").write_bytes(content)
    with pytest.raises(DataError, match=rf"^a\.jsonl:2: image .*bad\.jpg.*({message})") as caught:
        prepare(tmp_path, model, [good, {**good, "image": "bad.jpg"}])
    assert "\n" not in str(caught.value)
