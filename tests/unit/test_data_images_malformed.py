"""Files that are no images, or not whole ones: the stage ends with the row and the file in one line."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import features

from cosmos_core.data.images import read_image
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.messages import read_conversation
from cosmos_core.data.prepare import run
from cosmos_core.errors import DataError
from cosmos_core.models.hf import load_tokenizer
from tests.unit.data_tokenizers import learned
from tests.unit.test_data_images import ANSWER, CAT, SHOWN, prepare, stage_with
from tests.unit.tiny_vlms import MIXED, PARTS, picture, save_vlm


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
def test_a_malformed_image_is_named_with_its_row_and_file(name, tmp_path):
    content, message = MALFORMED[name]
    if content is not None:
        (tmp_path / "bad.jpg").write_bytes(content)
    with pytest.raises(DataError, match=rf"^a\.jsonl:2: image .*bad\.jpg.*({message})") as caught:
        read_image("bad.jpg", tmp_path, "a.jsonl:2")
    assert "\n" not in str(caught.value)


def test_a_malformed_image_ends_the_stage(tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    rows = [{"messages": [SHOWN, ANSWER], "image": name} for name in ("cat.png", "bad.jpg")]
    with pytest.raises(DataError, match=r"^a\.jsonl:2: image 'bad\.jpg': there is no such file"):
        prepare(tmp_path, model, rows)


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, None], ids=["a list", "an object", "null"])
def test_a_part_of_no_known_type_is_an_error_that_names_it(kind):
    turn = {"role": "user", "content": [{"type": "image"}, {"type": kind}]}
    with pytest.raises(DataError, match=r"^a\.jsonl:1, turn 1 of 'messages': the part .* is neither text nor an image"):
        read_conversation({"messages": [turn, ANSWER]}, "a.jsonl:1", with_images=True)


NO_PATHS = {
    "a NUL": ("a\0b.png", r"image 'a\\x00b\.png' is no path"),
    "half a character": ("\ud800.png", r"image '\\ud800\.png' is no path"),
    "two lines": ("a\nb.png", r"image 'a\\nb\.png' is no path"),
    "a NUL in a URI": ("file:///a%00", r"image '/a\\x00' is no path"),
    "a host that is none": ("file://[a/b", "image '/b': there is no such file"),
    "a user that is not there": ("~no-such-user/b.png", r"image '~no-such-user/b\.png': there is no such file"),
    "a device": ("/dev/zero", "image '/dev/zero': /dev/zero is no regular file, .* may be read without end"),
    "base64 of a TIFF": ("SUkqAAgA" * 1000, "image 'SUkq.*' is no path; base64 needs 'data:image/png;base64,' before"),
    "base64 that is cut": (f"iVBORw0KGgo{'A' * 91}", "the image .* cannot be decoded: Incorrect padding"),
}


@pytest.mark.parametrize("name", NO_PATHS)
def test_a_string_that_is_no_path_is_an_error_that_names_the_row(name, tmp_path):
    path, message = NO_PATHS[name]
    with pytest.raises(DataError, match=rf"^a\.jsonl:1: {message}") as caught:
        read_image(path, tmp_path, "a.jsonl:1")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_pairs_whose_images_differ_are_refused_and_not_learned_with_one_of_them(tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    turns = {"messages": [SHOWN, ANSWER], "rejected_messages": [SHOWN, {"role": "assistant", "content": "A dog."}]}
    rows = {name: {**turns, "images": ["cat.png"], "rejected_images": [f"{name}.png"]} for name in ("cat", "dog")}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    policies = {name: {"trainer_type": "dpo", "dataset": {"name": str(tmp_path / f"{name}.jsonl")}} for name in rows}
    assert len(open_pairs(prepare(tmp_path / "a", model, [], train_policy=policies["cat"]), "train")) == 1
    with pytest.raises(DataError, match=r"^dog\.jsonl:1: column 'rejected_images' differs from the images"):
        prepare(tmp_path / "b", model, [], train_policy=policies["dog"])


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_size_of_one_image_that_has_no_effect_is_told(tmp_path, model, method):
    (tmp_path / "cat.png").write_bytes(CAT)
    shown = [{"type": "image", "image": "cat.png", **size} for size in ({"max_pixels": 64}, {"max_pixels": None})]
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]} for part in shown]
    rows = [{"messages": [turn, ANSWER]} for turn in turns]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = {"type": method, "dataset": {"name": str(tmp_path / "b.jsonl")}}
    assert run(stage_with(tmp_path / "s", model, [], train_policy=policy)).info["notices"] == [
        "train: 1 of 2 rows give the size of an image (max_pixels or another key of its part), which has no effect: "
        "custom.vision.min_pixels and max_pixels are those of all images"
    ]


def test_a_file_uri_may_name_the_host_and_escape_characters(tmp_path):
    (tmp_path / "a cat.png").write_bytes(CAT)
    ref, _ = read_image(f"file://localhost{tmp_path}/a%20cat.png", tmp_path, "row")
    assert ref.path == "a cat.png"


def test_a_conversation_that_the_assistant_begins_learns_its_answers(tmp_path):
    model = save_vlm("llava", tmp_path / "model", MIXED)
    (tmp_path / "cat.png").write_bytes(CAT)
    row = {"messages": [ANSWER, SHOWN, ANSWER], "image": "cat.png"}
    rows = open_sequences(prepare(tmp_path, model, [row]), "train")
    assert learned(load_tokenizer(str(model)), *map(list, rows[0])) == ["A cat.<|im_end|>"] * 2
