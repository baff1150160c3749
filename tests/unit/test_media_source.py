"""Readers of images, clips and prompts: every layout gives the same items, and what is damaged is named."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data.embeddings import read_embedding
from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media, list_bucket_sizes
from cosmos_core.data.media_source import open_media_items
from cosmos_core.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(color=RED, size=(8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def write_clip(
    path: Path, num_frames: int = 12, size: int = 32, left: int | None = None, *, rate: int = 8, codec: str = "mpeg4"
) -> Path:
    """Write a video whose frame i has the grey value 10 i, with `left` in its left half another one."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for i in range(num_frames):
            pixels = np.full((size, size, 3), 10 * i % 256, np.uint8)
            pixels[:, : size // 2] = pixels[0, 0] if left is None else left
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def items_of(path, **dataset):
    return list(open_media_items(DatasetConfig(name=str(path), **dataset), "dataset")())


def write_pairs(folder: Path, count: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:04}.json").write_text(json.dumps({"prompt": f"number {i}", "label": i}))
        (folder / f"{i:04}.png").write_bytes(png((i, 0, 0)))
    return folder


def tar_of(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_pairs_metas_shards_and_rows_of_a_data_set_give_the_same_items(tmp_path):
    import datasets

    pairs = write_pairs(tmp_path / "pairs")
    contents = [png((i, 0, 0)) for i in range(2)]
    (tmp_path / "metas" / "metas").mkdir(parents=True)
    (tmp_path / "metas" / "images").mkdir()
    for i, content in enumerate(contents):
        (tmp_path / "metas" / "metas" / f"{i}.txt").write_text(f"number {i}\n")
        (tmp_path / "metas" / "images" / f"{i}.png").write_bytes(content)
    members = {}
    for i, content in enumerate(contents):
        members |= {f"a/{i}.json": json.dumps({"caption": f"number {i}"}).encode(), f"a/{i}.png": content}
    shards = tar_of(tmp_path / "0.tar", members)
    rows = {"text": ["number 0", "number 1"], "image": [{"bytes": content, "path": None} for content in contents]}
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")

    for path in (pairs, tmp_path / "metas", shards, tmp_path / "saved"):
        items = items_of(path)
        assert [item.prompt for item in items] == ["number 0", "number 1"], path
        assert [item.content.read() for item in items] == contents, path
        assert len({item.content.digest() for item in items}) == 2
    assert items_of(pairs)[1].metadata == {"label": 1}
    assert items_of(shards)[0].content.digest() == items_of(pairs)[0].content.digest()
    for folder in (pairs, tmp_path / "metas", tmp_path):
        with pytest.raises(DataError, match=f"split = 'test', but {folder} has no folder of that name"):
            items_of(folder, split=["test"])


def test_what_is_damaged_is_an_item_with_its_problem_and_the_others_are_read(tmp_path):
    folder = write_pairs(tmp_path / "pairs", 3)
    (folder / "0000.json").write_text("{")
    (folder / "0001.json").write_text('{"label": 1}')
    (folder / "lonely.png").write_bytes(png())
    problems = [item.problem for item in items_of(folder)]
    assert problems == [
        "0000.json: malformed JSON, Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "0001.json: it has no text prompt, caption, text",
        "",
        "lonely.png: there is no lonely.txt, .caption or .json with its prompt",
    ]
    cut = tar_of(tmp_path / "cut.tar", {"1.txt": b"one", "1.png": png(), "2.txt": b"two", "2.png": png(BLUE, (64, 64))})
    cut.write_bytes(cut.read_bytes()[:2100])
    with pytest.raises(DataError, match=r"cut\.tar: damaged tar file, .*; make it again, or remove it"):
        items_of(cut)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_an_imagefolder_has_its_captions_in_metadata_beside_the_media(tmp_path, suffix):
    import pandas

    folder = tmp_path / "train"
    (folder / "sub").mkdir(parents=True)
    (folder / "1.png").write_bytes(png())
    write_clip(folder / "sub" / "2.MP4", 3)
    rows = pandas.DataFrame({"file_name": ["1.png", "sub/2.MP4"], "text": ["one", "two"], "label": [7, 8]})
    if suffix == "jsonl":
        rows.to_json(folder / "metadata.jsonl", orient="records", lines=True)
    elif suffix == "csv":
        rows.to_csv(folder / "metadata.csv", index=False)
    else:
        rows.to_parquet(folder / "metadata.parquet")
    for path in (tmp_path, folder):
        items = items_of(path)
        assert [(item.prompt, item.content.is_video, item.problem) for item in items] == [
            ("one", False, ""), ("two", True, ""),
        ]  # fmt: skip
        assert items[0].content.read() == png()
        assert int(items[1].metadata["label"]) == 8 and "file_name" not in items[1].metadata


def test_a_row_without_a_column_of_media_or_with_a_url_is_told(tmp_path):
    lines = '{"photo": "1.png", "text": "one"}\n{"image": "https://host/1.png", "text": "one"}\n'
    (tmp_path / "rows.jsonl").write_text(lines)
    other, item = items_of(tmp_path / "rows.jsonl")
    assert other.content is None and other.problem == ""
    known = "image, img, jpg, png, webp, video, mp4, file_name"
    assert other.missing_media_reason == f"it has no column {known} with an image or a video, but photo, text"
    assert item.problem == (
        "rows.jsonl:2: image 'https://host/1.png' is a URL, and rows are read from this machine; download it"
    )


@pytest.mark.parametrize("column", ["image", "image_path", "img_path", "images", "video_path"])
def test_a_row_may_name_its_media_in_several_columns_or_a_list_of_one(tmp_path, column):
    rows = [{column: path, "text": "one"} for path in ("1.png", ["1.png"], ["1.png", "2.png"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *items, several = items_of(tmp_path / "rows.jsonl")
    for item in items:
        assert item.content.path == tmp_path / "1.png" and item.content.is_video == (column == "video_path")
        assert item.metadata == {}
    assert "is no image" in several.problem


def test_captions_that_are_missing_or_empty_are_told_and_an_empty_key_hides_no_other(tmp_path):
    for name in ("metas", "videos", "t5_xxl"):
        (tmp_path / name).mkdir()
    for stem, caption in {"a": "a cat", "b": None, "c": " ", "d": ""}.items():
        write_clip(tmp_path / "videos" / f"{stem}.mp4", 3)
        if caption is not None:
            (tmp_path / "metas" / f"{stem}.txt").write_text(caption)
    save_file({"embeds": torch.ones(2, 3)}, tmp_path / "t5_xxl" / "d.safetensors")
    assert [(item.prompt, item.problem) for item in items_of(tmp_path)] == [
        ("a cat", ""),
        ("", "metas/c.txt: it is empty; write its prompt there"),
        ("", ""),  # its embedding is what says it
        ("", "videos/b.mp4: there is no metas/b.txt with its prompt"),
    ]
    pair = {"1.png": png(), "1.json": b'{"prompt": "", "caption": "one"}', "2.png": png(), "2.json": b'{"text": " "}'}
    shard = tar_of(tmp_path / "1.tar", pair | {"2.txt": b"two", "3.png": png(), "3.json": b'{"prompt": ""}'})
    assert [(item.prompt, item.problem) for item in items_of(shard)] == [("one", ""), ("two", ""), ("", "")]


@pytest.mark.parametrize("layout", ["", "metas"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path, layout):
    folders = {"images": layout and "images", "t5_xxl": layout and "t5_xxl", "metas": layout}
    for folder in folders.values():
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folders["images"] / "A.JPG").write_bytes(png())
    save_file({"embeds": torch.ones(2, 3)}, tmp_path / folders["t5_xxl"] / "A.SAFETENSORS")
    (tmp_path / folders["metas"] / "A.TXT").write_text("a cat")
    [item] = items_of(tmp_path)
    assert (item.prompt, item.problem) == ("a cat", "") and item.embedding_path is not None
    assert read_embedding(item.embedding_path, ("embeds",))["embeds"].shape == (2, 3)


@pytest.mark.parametrize("suffix", [".txt", ".caption", ".TXT", ".Caption"])
def test_images_and_clips_with_a_caption_file_of_their_name_are_read(tmp_path, suffix):
    for name in ("a.png", "b.c.JPG", "train.png", "e.png", "f.png", "g.png"):
        (tmp_path / name).write_bytes(png())
    write_clip(tmp_path / "d.mp4", 3)
    captions = {"a": " a cat\n", "b.c": "\ufeffund ein Hund, größer", "train": "rails", "d": "a clip", "e": " "}
    for stem, text in {**captions, "g": "gee"}.items():
        (tmp_path / f"{stem}{suffix}").write_text(text, encoding="utf-8")
    (tmp_path / "g.json").write_text('{"label": 3}')
    (tmp_path / "readme.txt").write_text("of nothing")
    found = {item.location: (item.prompt, item.problem) for item in items_of(tmp_path)}
    assert found == {
        "g.json": ("gee", ""), "a.png": ("a cat", ""), "b.c.JPG": ("und ein Hund, größer", ""),
        "train.png": ("rails", ""), "d.mp4": ("a clip", ""),
        "e.png": ("", "e.png: its caption file is empty or not UTF-8; write its prompt there"),
        "f.png": ("", "f.png: there is no f.txt, .caption or .json with its prompt"),
    }  # fmt: skip
    (item,) = [item for item in items_of(tmp_path) if item.location == "g.json"]
    assert item.metadata == {"label": 3} and item.content.path == tmp_path / "g.png"


def test_each_file_of_a_name_is_read_and_formats_that_are_not_read_are_told(tmp_path):
    for name in ("a.png", "a.jpg", "b.png", "b.webp"):
        (tmp_path / name).write_bytes(png())
    (tmp_path / "a.txt").write_text("a cat")
    (tmp_path / "b.json").write_text('{"prompt": "a dog"}')
    for name in ("c.heic", "d.GIF", "e.jp2"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).with_suffix(".txt").write_text("more")
    items = items_of(tmp_path)
    found = [(item.location, item.prompt, item.problem, item.content and item.content.path.name) for item in items]
    remedy = "is not read; convert it to png or mp4"
    assert found == [
        *((name, "", f"{name}: .{name[2:]} {remedy}", None) for name in ("c.heic", "d.GIF", "e.jp2")),
        ("b.json", "a dog", "", "b.png"), ("b.json", "a dog", "", "b.webp"),
        ("a.jpg", "a cat", "", "a.jpg"), ("a.png", "a cat", "", "a.png"),
    ]  # fmt: skip
    for name in ("metas/a.txt", "videos/a.mp4", "images/a.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("a cat")
    assert [item.content.path.name for item in items_of(tmp_path)] == ["a.mp4", "a.png"]


@pytest.mark.parametrize("has_files", [True, False])
def test_pairs_in_sub_folders_are_read_and_those_of_held_out_splits_are_not(tmp_path, has_files):
    for name in ["a.jpg"] * has_files + ["sub/b.jpg", "sub/deep/c.png", "test/d.jpg", ".hidden/e.jpg"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(png())
        (tmp_path / name).with_suffix(".txt").write_text(f"of {name}")
    (tmp_path / "sub" / "f.png").write_bytes(png())
    names = ["a.jpg"] * has_files + ["sub/b.jpg", "sub/f.png", "sub/deep/c.png"]
    problem = "sub/f.png: there is no f.txt, .caption or .json with its prompt"
    assert [(item.location, item.prompt, item.problem) for item in items_of(tmp_path)] == [
        (name, "", problem) if name == "sub/f.png" else (name, f"of {name}", "") for name in names
    ]
    (tmp_path / "sub" / "b.txt").rename(tmp_path / "sub" / "b.json")
    (tmp_path / "sub" / "b.json").write_text('{"prompt": "of sub/b.jpg"}')
    assert "of sub/b.jpg" in [item.prompt for item in items_of(tmp_path)]
    assert [item.prompt for item in items_of(tmp_path, split=["test"])] == ["of test/d.jpg"]


@pytest.mark.parametrize("name", ["train/rows.csv", "metadata.jsonl", "train/captions.json"])
def test_a_file_of_rows_beside_images_is_named(tmp_path, name):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jpg").write_bytes(png())
    (tmp_path / name).write_text('["file_name"]' if name.endswith("json") else "file_name,text")
    first = items_of(tmp_path)[0].problem
    if name.endswith("json"):
        assert first == 'captions.json: it must be an object such as {"prompt": "..."}; name a file of rows itself'
    else:
        missing = "a.jpg: there is no a.txt, .caption or .json with its prompt"
        assert first == f"{missing}; if its prompt is in {tmp_path / name}, give that file in place of the folder"


def test_a_damaged_header_in_a_shard_does_not_hide_what_is_behind_it(tmp_path):
    shard = tar_of(tmp_path / "1.tar", dict.fromkeys(("1.txt", "2.txt", "3.txt"), b"one"))
    content = bytearray(shard.read_bytes())
    content[1024 + 148 : 1024 + 156] = b"damaged!"  # the checksum of the second header
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"1\.tar: damaged tar file, the header at byte 1024 is damaged"):
        items_of(shard)


def test_what_other_programs_leave_beside_prompts_does_no_harm(tmp_path):
    """Captions beside metadata, files of macOS, and byte order marks of Windows."""
    pair = {"1.json": b'{"key": 7}', "1.txt": b"\xef\xbb\xbfone", "1.png": png()}
    [item] = items_of(tar_of(tmp_path / "1.tar", {"._1.json": b"\0", "._1.png": b"\0", **pair}))
    assert (item.prompt, item.metadata, item.problem) == ("one", {"key": 7}, "")
    folder = write_pairs(tmp_path / "pairs", 1)
    (folder / "0000.json").write_text('{"prompt": "one"}', encoding="utf-8-sig")
    for name in ("._0000.json", "._0000.png"):
        (folder / name).write_bytes(b"\0")
    assert [(item.prompt, item.problem) for item in items_of(folder)] == [("one", "")]
    (tmp_path / "prompts.txt").write_text("one\ntwo\n", encoding="utf-8-sig")
    assert [item.prompt for item in items_of(tmp_path / "prompts.txt")] == ["one", "two"]
    (tmp_path / "prompts.txt").write_bytes("a café\n".encode("latin-1") + b"two\n")
    assert [(item.prompt, item.problem.partition(";")[0]) for item in items_of(tmp_path / "prompts.txt")] == [
        ("", "prompts.txt:1: it is not UTF-8"), ("two", "")
    ]  # fmt: skip


def test_public_prompt_sets_are_read_with_what_their_rewards_compare_with(test_data):
    ocr = items_of(test_data / "prompts" / "ocr", split=["test"])
    assert len(ocr) > 100
    assert ocr[0].metadata == {"text": "Spring Collection 2024"}
    geneval = items_of(test_data / "prompts" / "geneval", split=["test"])
    assert geneval[0].prompt == "a photo of two wine glasses"
    assert geneval[0].metadata["include"] == [{"class": "wine glass", "count": 2}]


def test_a_prompt_set_that_is_not_here_is_told_with_where_it_comes_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"pickscore.*not on this machine; download https://"):
        items_of("pickscore")
    (tmp_path / "data" / "prompts" / "pickscore").mkdir(parents=True)
    (tmp_path / "data" / "prompts" / "pickscore" / "train.txt").write_text("a dog\n\na cat\n")
    assert [item.prompt for item in items_of("pickscore")] == ["a dog", "a cat"]


@pytest.mark.parametrize("is_beside", [True, False])
def test_an_imagefolder_has_the_split_train_alone_and_slices_of_it(tmp_path, is_beside):
    names = ["1.png", "2.png"] if is_beside else ["images/1.png", "images/2.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png())
    (tmp_path / "metadata.jsonl").write_text("".join(f'{{"file_name": "{n}", "text": "{n}"}}\n' for n in names))
    for split, expected in (("train", names), ("train[:1]", names[:1])):
        dataset = DatasetConfig(name=str(tmp_path), split=(split,))
        assert [item.prompt for item in open_media_items(dataset, "dataset")()] == expected
    for split in ("validation", "validation[:1]"):
        with pytest.raises(DataError, match=r"split = 'validation.*has no folder of that name"):
            open_media_items(DatasetConfig(name=str(tmp_path), split=(split,)), "dataset")


@pytest.mark.parametrize(("matrix", "is_left_above"), [((0, 1, -1, 0), True), ((0, -1, 1, 0), False)])
def test_a_clip_that_was_taken_upright_is_shown_upright(tmp_path, matrix, is_left_above):
    """A telephone stores what it sees lying down, and in the head of the file how to turn it."""
    clip = write_clip(tmp_path / "1.mp4", num_frames=1, size=32, left=200)
    content = bytearray(clip.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # behind version, times, number, length, layer and volume
    a, b, c, d = (value << 16 for value in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip.write_bytes(content)
    [frame] = decode_media(MediaContent(True, clip), FrameSettings((32, 32), num_frames=1), 0.0)
    top, bottom = frame[:12].mean(), frame[-12:].mean()
    bright, dark = (top, bottom) if is_left_above else (bottom, top)
    assert bright > 150 and dark < 50


def test_buckets_keep_the_area_and_take_the_nearest_aspect_ratio():
    sizes = list_bucket_sizes((512, 512), 16)
    assert (512, 512) in sizes
    assert all(h % 16 == 0 and w % 16 == 0 and 0.9 < h * w / 512**2 < 1.1 for h, w in sizes)
    framing = FrameSettings((512, 512), buckets=True)
    assert framing.target_size(1000, 1000) == (512, 512)
    height, width = framing.target_size(1080, 1920)
    assert abs(height / width - 1080 / 1920) < 0.05
    assert FrameSettings((512, 512)).target_size(1080, 1920) == (512, 512)


def test_the_frames_of_a_clip_are_those_that_the_sampling_says(tmp_path):
    content = MediaContent(True, write_clip(tmp_path / "1.mp4"))

    def frames(sampling, draw=0.0):
        pixels = decode_media(content, FrameSettings((32, 32), num_frames=5, sampling=sampling), draw)
        assert pixels.shape == (5, 32, 32, 3)
        return (pixels.mean((1, 2, 3)) / 10).round().astype(int).tolist()

    assert frames("first") == [0, 1, 2, 3, 4]
    assert frames("middle") == [3, 4, 5, 6, 7]
    assert frames("random", 0.999) == [7, 8, 9, 10, 11]
    assert frames("uniform") == [0, 3, 6, 8, 11]
    held = MediaContent(True, content_bytes=(tmp_path / "1.mp4").read_bytes())
    first = FrameSettings((32, 32), num_frames=5, sampling="first")
    assert (decode_media(held, first, 0.0) == decode_media(content, first, 0.0)).all()
    with pytest.raises(DataError, match=r"it has 12 frames, and policy\.diffusers.train_frames = 13 are needed"):
        decode_media(content, FrameSettings((32, 32), num_frames=13), 0.0)
    with pytest.raises(DataError, match="it is a video"):
        decode_media(content, FrameSettings((32, 32)), 0.0)


def test_embeddings_are_read_from_safetensors_and_from_pickles_of_arrays_alone(tmp_path):
    save_file({"embeds": torch.ones(2, 3)}, tmp_path / "1.safetensors")
    assert read_embedding(tmp_path / "1.safetensors", ("embeds",))["embeds"].shape == (2, 3)
    with pytest.raises(DataError, match="the model needs pooled"):
        read_embedding(tmp_path / "1.safetensors", ("embeds", "pooled"))
    (tmp_path / "2.pickle").write_bytes(pickle.dumps([np.full((2, 3), 7, np.float16)]))
    assert read_embedding(tmp_path / "2.pickle", ("embeds",))["embeds"].tolist() == [[7, 7, 7], [7, 7, 7]]

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "called",))

    (tmp_path / "3.pickle").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match="a pickle may hold numpy arrays alone"):
        read_embedding(tmp_path / "3.pickle", ("embeds",))
    assert not (tmp_path / "called").exists()
    (tmp_path / "4.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"4\.safetensors: it is damaged: "):
        read_embedding(tmp_path / "4.safetensors", ("embeds",))
