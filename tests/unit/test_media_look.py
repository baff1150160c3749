"""What a check sees in media before anything is encoded: damaged, cut off, of several rates, or of a refused size;
and the cells and shards that rows are read from."""

from __future__ import annotations

import base64
import json

import av
import numpy as np
import pytest

from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media
from cosmos_core.data.media_splits import read_splits
from cosmos_core.data.prepare import run as run_stage
from cosmos_core.data.prepare_media import Encoders, preview
from cosmos_core.errors import ConfigError, DataError, ModelError
from cosmos_core.evaluate import diffusion
from cosmos_core.run.progress import read_progress
from cosmos_core.train import check
from tests import tiny_pipelines
from tests.unit.test_media_source import items_of, png, tar_of, write_clip, write_pairs
from tests.unit.test_prepare_media import FakeEncoders, make_stage, runs, stage_path

__all__ = ["runs"]


def fake_source(**given) -> Encoders:
    return Encoders(FakeEncoders(**given), "encoders")


@pytest.mark.parametrize("is_video", [False, True])
@pytest.mark.parametrize(
    ("layout", "columns"),
    [
        ("rows.jsonl", {"image": "1.png", "video": "1.mp4"}), ("rows.jsonl", {"image": "1.png", "video_path": "1.mp4"}),
        ("metadata.jsonl", {"file_name": "1.mp4", "image": "1.png"}), ("1.tar", {}),
    ],
)  # fmt: skip
def test_a_row_with_its_first_frame_and_its_clip_gives_a_video_model_the_clip(
    tmp_path, runs, layout, columns, is_video
):
    (tmp_path / "1.png").write_bytes(png(size=(16, 16)))
    write_clip(tmp_path / "1.mp4")
    (tmp_path / layout).write_text(json.dumps({**columns, "prompt": "one"}) + "\n")
    if layout == "1.tar":
        tar_of(
            tmp_path / layout, {name: (tmp_path / name).read_bytes() for name in ("1.png", "1.mp4")} | {"1.txt": b"one"}
        )
    source, path = fake_source(is_video=is_video), tmp_path if layout == "metadata.jsonl" else tmp_path / layout
    [item] = read_splits(make_stage(stage_path(runs), path), source)["train"].read_items()
    assert item.content.is_video == is_video


def test_a_video_model_learns_the_clip_that_a_list_of_media_names_and_not_where_it_came_from(tmp_path, runs):
    write_clip(tmp_path / "1.mp4")
    row = {"file_name": "1.mp4", "video_path": "s3://raw/77.mp4", "prompt": "one"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    [item] = read_splits(make_stage(stage_path(runs), tmp_path), fake_source(is_video=True))["train"].read_items()
    assert item.content.path == tmp_path / "1.mp4" and item.metadata == {"video_path": row["video_path"]}


def test_a_look_refuses_what_preparing_would_refuse_and_says_how_many_rows_are_left(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 4)
    said, count, prompts = preview(make_stage(stage_path(runs), source), fake_source())["train"]
    assert (said, count) == ("train: 4 rows", 4) and [each["text"][-1] for each in prompts] == [*"0123"]
    (source / "0001.png").write_bytes(png()[:40])
    with pytest.raises(DataError, match=r"0001\.json: it cannot be decoded.*; 1 of 4 rows of train cannot be used"):
        preview(make_stage(stage_path(runs), source), fake_source())
    stage = make_stage(stage_path(runs), source, dataset={"max_skipped_fraction": 0.5})
    line, num_rows, _ = preview(stage, fake_source())["train"]
    assert num_rows == 3 and line.startswith("train: 3 rows, 1 left out (first: 0001.json: it cannot be decoded")
    for file in source.glob("*.json"):
        file.unlink()
    with pytest.raises(DataError, match=r"there is no 0000\.txt, \.caption or \.json with its prompt; 4 of 4 rows"):
        preview(make_stage(stage_path(runs), source), fake_source())
    prompts = make_stage(stage_path(runs), write_pairs(tmp_path / "other", 2), rows="media_prompts")
    assert preview(prompts, fake_source())["train"][1] == 2


def test_a_file_that_is_no_image_is_told_with_its_first_bytes(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 4)
    (source / "0001.png").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match=r"0001\.json: .*no image \(22 bytes that begin with b'<html>no'\); replace it"):
        preview(make_stage(stage_path(runs), source), fake_source())


def test_a_look_counts_images_that_are_enlarged(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 4)
    (source / "0001.png").write_bytes(png(size=(2, 40)))
    [line, num_rows, _] = preview(make_stage(stage_path(runs), source), fake_source())["train"]
    assert (line, num_rows) == ("train: 4 rows, 1 images smaller than inference_size, which are enlarged", 4)


@pytest.mark.parametrize(("suffix", "kept", "told"), [
    (".mp4", 0.5, "it cannot be decoded"), (".mkv", 0.5, "it is cut off: its head says"),
    (".mkv", 0.1, "it is damaged or cut off"), (".webm", 0.1, "it is damaged or cut off"),
    (".avi", 0.75, "it is cut off: its head says"), (".webm", 0.75, "it is cut off: its head says"),
])  # fmt: skip
def test_a_video_that_is_cut_off_is_refused_and_a_whole_one_is_not(tmp_path, runs, suffix, kept, told):
    source = tmp_path / "clips"
    source.mkdir()
    clip = write_clip(source / f"a{suffix}", 48, codec="libvpx" if suffix == ".webm" else "mpeg4")
    (source / "a.txt").write_text("a clip")
    diffusers = {"is_video": True, "train_frames": 5}
    stage = make_stage(stage_path(runs), source, diffusers=diffusers, dataset={"frame_sampling": "first"})
    assert preview(stage, fake_source(is_video=True))["train"][:2] == ("train: 1 rows, clips of 8 frames a second", 1)
    clip.write_bytes(clip.read_bytes()[: int(kept * clip.stat().st_size)])
    with pytest.raises(DataError, match=told) as caught:
        preview(stage, fake_source(is_video=True))
    assert "tuple index" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".mkv", ".webm", ".mp4", ".mov"])
@pytest.mark.parametrize("num_frames", [4, 8, 17])
def test_a_quarter_that_is_missing_is_seen_in_a_short_clip(tmp_path, suffix, num_frames):
    file, draw = tmp_path / f"a{suffix}", np.random.default_rng(0)
    with av.open(str(file), "w", options={"movflags": "faststart"} if suffix in {".mp4", ".mov"} else {}) as container:
        stream = container.add_stream("libvpx" if suffix == ".webm" else "mpeg4", rate=8)
        stream.width = stream.height = 64
        for _ in range(num_frames):
            pixels = draw.integers(0, 255, (64, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    framing = FrameSettings((64, 64), num_frames=2, sampling="first")
    assert decode_media(MediaContent(True, file), framing, 0.0).shape == (2, 64, 64, 3)
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])
    with pytest.raises(DataError, match="it is cut off: its head says"):
        decode_media(MediaContent(True, file), framing, 0.0)


def test_clips_of_several_rates_are_told(tmp_path, runs):
    source = tmp_path / "clips"
    source.mkdir()
    for name, rate in {"a": 8, "b": 24}.items():
        write_clip(source / f"{name}.mp4", 12, rate=rate)
        (source / f"{name}.caption").write_text(name)
    stage = make_stage(stage_path(runs), source, diffusers={"is_video": True, "train_frames": 5})
    line = preview(stage, fake_source(is_video=True))["train"][0]
    assert line == "train: 2 rows, clips of 8 to 24 frames a second, which are learned frame by frame"


def test_a_size_beyond_the_position_embeddings_is_refused_by_the_first_stage(tmp_path, runs):
    model = tiny_pipelines.save("sd3", tmp_path / "model")
    stage = make_stage(stage_path(runs), write_pairs(tmp_path / "pairs", 2), diffusers={"inference_size": [512, 64]})
    stage.model = str(model)
    for program in (run_stage, preview):
        with pytest.raises(ConfigError, match=r"inference_size = \[512, 64\]: the model has position embeddings"):
            program(stage)


def test_the_first_rows_can_be_shown_with_their_prompts(tmp_path, runs):
    stage = make_stage(stage_path(runs), write_pairs(tmp_path / "pairs", 7), diffusers={"inference_size": [64, 64]})
    stage.model = str(tiny_pipelines.save("sana", tmp_path / "model"))
    found = check._check_diffusion(stage)
    assert found["shown"] == [f"000{i}.json: 'number {i}'" for i in range(5)]
    assert [each["text"] for each in found["prompts"]["train"]] == ["number 0", "number 1"]


@pytest.mark.parametrize("name", ["sd3", "sana", "cosmos_predict"])
def test_a_pipeline_without_a_text_encoder_is_refused_before_rows_are_read(tmp_path, runs, name):
    index = tiny_pipelines.save(name, tmp_path / "model") / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"text_encoder": [None, None]}))
    stage = make_stage(stage_path(runs), tmp_path, diffusers={"inference_size": [32, 32]})
    stage.model = str(index.parent)
    with pytest.raises(ModelError, match=r"model_index\.json names no 'text_encoder'"):
        preview(stage)


@pytest.mark.parametrize("program", [run_stage, preview, check.run, diffusion.check])
def test_a_pipeline_is_downloaded_in_a_phase_that_may_be_silent_for_an_hour(tmp_path, runs, monkeypatch, program):
    """A worker in the phase `start` counts as hung after five minutes; the weights may be tens of gigabytes."""

    def download(*_):
        raise DataError(f"phase {read_progress(stage.path).phase}")

    monkeypatch.setattr("cosmos_core.models.pipeline_folder.locate_model", download)
    stage = make_stage(stage_path(runs), tmp_path)
    stage.progress.phase("start")
    with pytest.raises(DataError, match=r"phase (load|prepare)$"):
        program(stage)


def test_media_of_a_row_are_a_path_bytes_or_a_data_uri_and_an_empty_cell_is_none(tmp_path):
    (tmp_path / "1.png").write_bytes(png())
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    cells = {"image": ["1.png", f"file://{tmp_path}/1.png", uri, "", "a\0.png"], "video": ["", "", "", "2.mp4", ""]}
    rows = [{"text": "one", "image": image, "video": video} for image, video in zip(*cells.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    *images, clip, damaged = items_of(tmp_path / "rows.jsonl")
    assert [item.content.read() for item in images] == [png()] * 3
    assert clip.content.is_video and clip.content.path == tmp_path / "2.mp4"
    assert damaged.problem.startswith("rows.jsonl:5: image 'a\\x00.png' is no path")


def test_a_subset_is_a_sub_folder_of_media_and_no_other_is_learned(tmp_path):
    for name in ("cats", "dogs"):
        write_pairs(tmp_path / name, 1)
        (tmp_path / name / "0000.json").write_text(json.dumps({"prompt": name}))
    assert [item.prompt for item in items_of(tmp_path, subset="cats")] == ["cats"]
    with pytest.raises(DataError, match=r"dataset\.subset = 'birds', but .* has no folder of that name"):
        items_of(tmp_path, subset="birds")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_subset_may_lie_in_the_folder_of_a_split(tmp_path, split):
    for name in ("cats", "dogs"):
        write_pairs(tmp_path / split / name, 1)
        (tmp_path / split / name / "0000.json").write_text(json.dumps({"prompt": name}))
    assert [item.prompt for item in items_of(tmp_path, split=[split], subset="cats")] == ["cats"]


@pytest.mark.parametrize(("subset", "image"), [("a", "1.png"), ("images", "images/1.png")])
def test_a_folder_that_lists_its_media_is_read_as_listed_whatever_the_subset(tmp_path, subset, image):
    (tmp_path / image).parent.mkdir(exist_ok=True)
    (tmp_path / image).write_bytes(png())
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: a}]\n---\n")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": image, "text": "a cat"}) + "\n")
    [item] = items_of(tmp_path, subset=subset)
    assert (item.prompt, item.problem, item.content.path) == ("a cat", "", tmp_path / image)


def test_a_subset_with_a_list_of_its_own_is_read_by_it(tmp_path):
    for folder, caption in ((tmp_path, "all"), (tmp_path / "cats", "a cat")):
        folder.mkdir(exist_ok=True)
        (folder / "1.png").write_bytes(png())
        (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "1.png", "text": caption}) + "\n")
    assert [item.prompt for item in items_of(tmp_path, subset="cats")] == ["a cat"]


def test_an_image_column_that_names_a_clip_is_a_clip(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"image": "1.png", "text": "a"}\n{"image": "2.MP4", "text": "b"}\n')
    assert [item.content.is_video for item in items_of(tmp_path / "rows.jsonl")] == [False, True]


def test_shards_that_are_named_for_a_held_out_split_are_not_learned(tmp_path):
    for name in ("train-0", "more", "test-0", "x_val_0"):
        tar_of(tmp_path / f"{name}.tar", {"1.txt": name.encode(), "1.png": png()})
    assert [item.prompt for item in items_of(tmp_path)] == ["more", "train-0"]
    assert [item.prompt for item in items_of(tmp_path, split=["test"])] == ["test-0"]
    (tmp_path / "val").mkdir()
    tar_of(tmp_path / "val" / "0.tar", {"1.txt": b"held", "1.png": png()})
    assert [item.prompt for item in items_of(tmp_path, split=["val"])] == ["held"]
    with pytest.raises(DataError, match=r"split = 'train\[:1\]': .* has no rows to take a slice of"):
        items_of(tmp_path / "more.tar", split=["train[:1]"])


def test_a_slice_of_a_folder_of_pairs_is_refused_as_one(tmp_path):
    (tmp_path / "1.png").write_bytes(png())
    (tmp_path / "1.txt").write_text("a cat")
    with pytest.raises(DataError, match=r"split = 'train\[:1\]', but .* has no rows to take a slice of; name"):
        items_of(tmp_path, split="train[:1]")
    with pytest.raises(DataError, match=r"split = 'test', but .* has no folder of that name"):
        items_of(tmp_path, split="test")
