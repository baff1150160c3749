"""Preparing for diffusion: what is encoded, once, by content; resumed after a kill; and read back without encoders."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cosmos_core.data.media_cache import MediaCache, compute_digest, group_into_shards
from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media
from cosmos_core.data.media_rows import MediaRows, open_media, open_media_prompts
from cosmos_core.data.media_splits import make_frame_settings
from cosmos_core.data.prepare import run as run_stage
from cosmos_core.data.prepare_media import CACHE_FOLDER, Encoders, _SplitEncoder, open_encoders, prepare
from cosmos_core.data.prepared import open_held_out
from cosmos_core.errors import ConfigError, DataError, Preempted, StageFailed
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.families import open_pipeline
from cosmos_core.run.files import SHARED_FOLDER, list_files_below, sha256
from tests import tiny_pipelines
from tests.unit.media_stage import FakeEncoders, make_stage, prepared, stage_path
from tests.unit.test_media_source import png, write_clip, write_pairs


@pytest.fixture
def runs(tmp_path) -> Path:
    return tmp_path / "outputs"


def test_each_row_has_the_embedding_of_its_prompt_and_the_latent_of_its_image(tmp_path, runs):
    outcome, _ = prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 5))
    rows = open_media(stage_path(runs) / "data", "train")
    assert outcome.metrics == {"data/train_rows": 5.0, "data/train_skipped_rows": 0.0, "data/train_cut_prompts": 0.0}
    assert [rows[i].prompt for i in range(5)] == [f"number {i}" for i in range(5)]
    row = rows[3]
    assert row.row == 3
    assert row.text["embeds"].tolist() == [[8.0, float(ord("n"))]]
    assert row.mean.shape == (3, 2, 2) == rows.latent_shapes[3]
    assert row.mean[0, 0, 0].item() == pytest.approx(3 / 127.5 - 1)
    assert row.logvar is not None and row.logvar.abs().sum() == 0
    assert rows.null_text["embeds"].tolist() == [[0.0, float(ord(" "))]]
    assert open_media_prompts(stage_path(runs) / "data", "train")[2].metadata == {"label": 2}


def test_the_bytes_of_a_second_image_of_a_row_are_no_metadata(tmp_path, runs):
    image = {"bytes": png((9, 9, 9), (8, 8)), "path": "a.png"}
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "image": [image], "mask": [image]}), tmp_path / "rows/train.parquet")
    prepared(stage_path(runs), tmp_path / "rows")
    [prompt] = open_media_prompts(stage_path(runs) / "data", "train")
    assert prompt.metadata == {"mask": {"bytes": None, "path": "a.png"}}


def test_rows_are_read_once_as_far_as_there_is_room_and_are_the_same_without(tmp_path, runs):
    prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 3))
    folder = stage_path(runs) / "data"
    rows = open_media(folder, "train")
    row = rows[0]
    num_bytes = row.mean.nbytes + row.logvar.nbytes + sum(tensor.nbytes for tensor in row.text.values())
    assert rows[0] is row, "read once"
    tight = MediaRows(rows._table, folder, max_cached_bytes=2 * num_bytes)
    again = [(tight[i], tight[i]) for i in range(3)]
    assert [one is other for one, other in again] == [True, True, False], "two rows have room"
    for i, (one, other) in enumerate(again):
        assert torch.equal(one.mean, other.mean) and torch.equal(one.mean, rows[i].mean)


def test_with_a_complete_cache_no_encoder_is_opened_and_the_files_are_the_same(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 40)
    made, _ = prepared(stage_path(runs, 1), source)
    outcome, encoders = prepared(stage_path(runs, 2), source)
    assert (encoders.texts, encoders.media) == ([], 0)
    assert outcome == made, "or a training on the same rows would be made again"
    folders = [stage_path(runs, i) / "data" for i in (1, 2)]
    digests = [{file.relative_to(folder): sha256(file) for file in list_files_below(folder)} for folder in folders]
    assert digests[0] == digests[1] and Path("statistics.json") in digests[0]


def test_another_caption_encodes_one_text_and_another_decoder_encodes_images_alone(tmp_path, runs, monkeypatch):
    source = write_pairs(tmp_path / "pairs", 3)
    prepared(stage_path(runs, 1), source)
    (source / "0001.json").write_text('{"prompt": "another"}')
    _, encoders = prepared(stage_path(runs, 2), source)
    assert encoders.media == 0
    assert "another" in encoders.texts
    monkeypatch.setattr("cosmos_core.data.media_cache._MEDIA_CACHE_VERSION", 0)
    _, encoders = prepared(stage_path(runs, 3), source)
    assert (encoders.texts, encoders.media) == ([], 3)


def test_a_row_in_the_middle_changes_one_shard_or_two():
    keys = [(compute_digest(i), i) for i in range(1000)]
    before = {tuple(shard) for shard in group_into_shards(keys)}
    changed = [*keys[:500], (compute_digest("x"), -1), *keys[500:]]
    after = {tuple(shard) for shard in group_into_shards(changed)}
    assert 10 < len(before) < 100
    assert len(after - before) <= 2
    assert sum(map(len, group_into_shards([*keys, *keys]))) == 1000


def test_a_killed_stage_goes_on_from_the_shards_that_it_had_written(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 120)
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            prepared(stage_path(runs), source, FakeEncoders(die_at=100))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (stage_path(runs) / "data").exists()
    outcome, encoders = prepared(stage_path(runs), source)
    assert 0 < encoders.media < 120
    assert outcome.metrics["data/train_rows"] == 120
    prepared(stage_path(tmp_path / "elsewhere"), source)
    one, other = (stage_path(folder) / "data" / "train.arrow" for folder in (runs, tmp_path / "elsewhere"))
    assert sha256(one) == sha256(other)


def test_a_stop_request_ends_between_shards(tmp_path, runs):
    stage = make_stage(stage_path(runs), write_pairs(tmp_path / "pairs", 3))
    stage.stop_requested = True
    with pytest.raises(Preempted, match="they stay encoded"):
        prepare(stage, Encoders(FakeEncoders(), "encoders"))


def test_a_disk_that_fails_ends_the_stage_and_is_not_remembered_as_a_damaged_image(tmp_path, runs, monkeypatch):
    source = write_pairs(tmp_path / "pairs", 3)

    def failing(content):
        raise OSError(errno.EIO, "Input/output error")

    def full(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    parts = ("data.media_pixels._decode_image", "data.media_items.sha256", "data.media_files.Path.read_text")
    for part in parts:
        with monkeypatch.context() as patch:
            patch.setattr(f"cosmos_core.{part}", lambda *args, **settings: failing(args))
            with pytest.raises(OSError, match="Input/output error"):
                prepared(stage_path(runs), source)
    with monkeypatch.context() as patch:
        patch.setattr("cosmos_core.data.media_cache.save_file", full)
        with pytest.raises(StageFailed, match="what was encoded before it stays encoded"):
            prepared(stage_path(runs), source)
    assert prepared(stage_path(runs, 2), source)[0].metrics["data/train_rows"] == 3


def test_frames_that_the_vae_would_leave_out_are_refused(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 3)
    for frames, refused in ((5, False), (8, True)):
        stage = make_stage(stage_path(runs, frames), source, diffusers={"is_video": True, "train_frames": frames})
        found = Encoders(FakeEncoders(is_video=True, frame_multiple=4), "encoders")
        match = r"policy\.diffusers\.train_frames = 8 must be 1 more than a multiple of 4"
        with pytest.raises(ConfigError, match=match) if refused else nullcontext():
            make_frame_settings(stage.recipe, stage.recipe.train.train_policy.dataset, found)


def test_a_damaged_shard_is_told_of_and_encoded_again(tmp_path, runs, caplog):
    source = write_pairs(tmp_path / "pairs", 3)
    prepared(stage_path(runs, 1), source)
    shards = (runs / SHARED_FOLDER / CACHE_FOLDER / "encoders").glob("*.safetensors")
    shard = next(file for file in shards if "mean" in str(load_file(file).keys()))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    _, encoders = prepared(stage_path(runs, 2), source)
    assert encoders.media == 3
    assert "is damaged; its rows are encoded again" in caplog.text
    rows = [open_media(stage_path(runs, i) / "data", "train") for i in (1, 2)]
    assert all(torch.equal(rows[0][i].mean, rows[1][i].mean) for i in range(3))


def test_media_that_cannot_be_decoded_are_named_counted_and_skipped_up_to_a_share(tmp_path, runs, caplog):
    source = write_pairs(tmp_path / "pairs", 4)
    (source / "0001.png").write_bytes(png()[:40])
    (source / "0002.png").unlink()
    message = r"2 of 4 rows of train cannot be used, more than dataset\.max_skipped_fraction"
    with pytest.raises(DataError, match=message):
        prepared(stage_path(runs), source)
    outcome, _ = prepared(stage_path(runs), source, dataset={"max_skipped_fraction": 0.5})
    assert outcome.metrics["data/train_skipped_rows"] == outcome.metrics["data/train_rows"] == 2
    assert "0001.json: it cannot be decoded" in outcome.info["notices"][0]
    assert "0002.json: there is no image or video beside it" in outcome.info["notices"][0]
    rows = open_media(stage_path(runs) / "data", "train")
    assert [rows[i].prompt for i in range(len(rows))] == ["number 0", "number 3"]


def test_media_that_were_refused_are_encoded_once_they_can_be_decoded(tmp_path, runs, monkeypatch):
    source, dataset = write_pairs(tmp_path / "pairs", 4), {"max_skipped_fraction": 1.0}
    (source / "0001.png").write_bytes(png()[:40])

    def encoded_media(run_id):
        outcome, encoders = prepared(stage_path(runs, run_id), source, dataset=dataset)
        return outcome.metrics["data/train_rows"], encoders.media

    with monkeypatch.context() as patch:
        patch.setattr("cosmos_core.data.prepare_media.decode_media", fail_without_codec)
        with pytest.raises(DataError, match="no row is left"):
            encoded_media(1)
    assert encoded_media(2)[0] == 3
    assert encoded_media(3) == (3, 0), "what is damaged stays refused, and nothing else is encoded again"


def fail_without_codec(*args):
    raise DataError("it cannot be decoded: no codec")


def test_a_data_set_that_changes_while_it_is_prepared_is_refused(tmp_path, runs, monkeypatch):
    source = write_pairs(tmp_path / "pairs", 4)
    encode_null_text = _SplitEncoder.encode_null_text

    def remove_row(self, folder):
        (source / "0001.json").unlink()
        (source / "0001.png").unlink()
        return encode_null_text(self, folder)

    monkeypatch.setattr(_SplitEncoder, "encode_null_text", remove_row)
    with pytest.raises(DataError, match="pairs changed while it was prepared; run the stage again"):
        prepared(stage_path(runs), source)


def test_temporary_files_of_other_machines_stay_in_the_cache_for_an_hour(tmp_path):
    files = [tmp_path / "encoders" / f".{name}.safetensors.999999999.tmp" for name in ("new", "old")]
    files[0].parent.mkdir()
    for file, age in zip(files, (60, 7200), strict=True):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    MediaCache(tmp_path, "encoders")
    assert [file.exists() for file in files] == [True, False]


def test_prompts_that_are_too_long_are_counted(tmp_path, runs, caplog):
    (tmp_path / "prompts.txt").write_text("a b c d\na b c\na b c d e\n")
    diffusers = {"max_prompt_length": 5}
    outcome, _ = prepared(stage_path(runs), tmp_path / "prompts.txt", rows="media_prompts", diffusers=diffusers)
    assert outcome.metrics["data/train_cut_prompts"] == 2
    notice = "train: 2 prompts have more tokens than policy.diffusers.max_prompt_length = 5, and are cut"
    assert outcome.info["notices"] == [notice] and caplog.text.count(notice) == 1
    encoders, tokenizer = FakeEncoders(), SimpleNamespace(encode=str.split, model_max_length=6)
    encoders.folder = SimpleNamespace(components=("tokenizer",), load=lambda name: tokenizer)  # as SD3 without its T5
    outcome, _ = prepared(stage_path(runs, 2), tmp_path / "prompts.txt", encoders, rows="media_prompts")
    assert outcome.info["notices"] == [
        "train: 1 prompts have more tokens than the 6 of the pipeline's text encoders, and are cut"
    ]


def test_images_are_refused_where_rollouts_start_from_frames_of_clips(tmp_path, runs):
    source, encoders = write_pairs(tmp_path / "pairs", 3), FakeEncoders()
    encoders.max_conditioning_frames = 2
    policy = {"type": "grpo", "trainer_type": "diffusion_nft", "dataset": {"local_dir": str(source)}}
    diffusers = {"is_video": True, "train_frames": 5, "inference_frames": 5, "flow_rl": {"max_conditional_frames": 1}}
    with pytest.raises(DataError, match=r"it is an image, and rollouts start from frames of clips; leave images out"):
        prepared(stage_path(runs), source, encoders, train={"train_policy": policy}, diffusers=diffusers)


@pytest.mark.parametrize("media", ["https://host/1.png", 7, "missing.png"])
def test_bad_media_of_rows_from_which_prompts_alone_are_read_do_no_harm(tmp_path, runs, media):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a dog", "image": media, "count": 2}) + "\n")
    prepared(stage_path(runs), tmp_path / "rows.jsonl", rows="media_prompts")
    prompt = open_media_prompts(stage_path(runs) / "data", "train")[0]
    assert (prompt.text, prompt.metadata) == ("a dog", {"count": 2})
    with pytest.raises(DataError, match=r"1 of 1 rows of train cannot be used"):
        prepared(stage_path(runs), tmp_path / "rows.jsonl")


def test_names_that_are_no_utf_8_and_half_characters_are_told_as_text(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 2)
    for suffix in (".json", ".png"):
        (source / f"0000{suffix}").rename(os.fsdecode(os.fsencode(source) + b"/caf\xe9" + suffix.encode()))
    (source / "0001.json").write_text(r'{"prompt": "half \ud83d"}')
    outcome, _ = prepared(stage_path(runs), source, dataset={"max_skipped_fraction": 0.5})
    assert outcome.metrics["data/train_rows"] == 1
    assert "0001.json: it has half a character (a lone surrogate)" in outcome.info["notices"][0]


def test_an_embedding_of_another_form_than_the_encoders_is_named_before_it_is_learned(tmp_path, runs):
    source = write_pairs(tmp_path / "pairs", 4)
    for i, (shape, num_masked) in enumerate((((5, 2), 5), ((1, 5, 2), 5), ((5, 3), 5), ((5, 2), 4))):
        save_file({"embeds": torch.ones(shape), "mask": torch.ones(num_masked)}, source / f"000{i}.safetensors")
    outcome, _ = prepared(stage_path(runs), source, dataset={"max_skipped_fraction": 0.8})
    [notice] = outcome.info["notices"]
    assert "0001.safetensors: embeds is [1, 5, 2], and the model's encoder gives [1, 2]" in notice
    assert "0002.safetensors: embeds is [5, 3]" in notice
    assert "0003.safetensors: mask is [4]" in notice
    assert open_media(stage_path(runs) / "data", "train")[0].text["embeds"].shape == (5, 2)


def test_code_of_a_users_family_is_a_part_of_what_encodes(tmp_path, runs):
    model, code = tiny_pipelines.save("sd3", tmp_path / "model"), tmp_path / "mine.py"
    digests = set()
    for text in ("", "# another\n"):
        code.write_text(f"from cosmos_core.models.sd3 import SD3 as Mine\n{text}")
        policy = {"is_diffusers": True, "model_class": f"{code}:Mine", "diffusers": {"inference_size": [32, 32]}}
        stage = make_stage(stage_path(runs), tmp_path, policy=policy)
        stage.model = str(model)
        digests.add(open_encoders(stage).digest)
    assert len(digests) == 2


def test_prompts_alone_and_held_out_prompts(tmp_path, runs):
    (tmp_path / "prompts.txt").write_text("a dog\na cat\n")
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "a cow", "count": 2}) + "\n")
    _, encoders = prepared(
        stage_path(runs), tmp_path / "prompts.txt", rows="media_prompts",
        validation={"dataset": {"name": str(tmp_path / "held.jsonl")}},
    )  # fmt: skip
    assert encoders.media == 0
    prompts = open_media_prompts(stage_path(runs) / "data", "train")
    assert [prompts[i].text for i in range(2)] == ["a dog", "a cat"]
    held_out = open_media_prompts(stage_path(runs) / "data", "validation")[0]
    assert (held_out.text, held_out.metadata) == ("a cow", {"count": 2})
    policy: Any = SimpleNamespace(response_column_name="count")
    asked = open_held_out(stage_path(runs) / "data", policy, policy).prompts
    assert asked is not None and asked[0].reference == "2"
    with pytest.raises(DataError, match="holds media_prompts, but media to learn"):
        open_media(stage_path(runs) / "data", "train")


def test_of_held_out_rows_a_training_on_images_needs_prompts_alone(tmp_path, runs):
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "a cow"}) + "\n")
    validation = {"dataset": {"name": str(tmp_path / "held.jsonl")}}
    prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 2), validation=validation)
    assert open_media_prompts(stage_path(runs) / "data", "validation")[0].text == "a cow"


def test_of_held_out_images_a_row_without_one_is_left_out_and_not_all_images(tmp_path, runs, caplog):
    held_out = write_pairs(tmp_path / "held", 3)
    (held_out / "0001.png").unlink()
    dataset = {"name": str(held_out), "max_skipped_fraction": 0.4}
    prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 2), validation={"dataset": dataset})
    rows = open_media(stage_path(runs) / "data", "validation")
    assert [rows[i].prompt for i in range(len(rows))] == ["number 0", "number 2"]
    assert "validation: 1 of 3 rows skipped: 0001.json: there is no image or video beside it" in caplog.text


def test_of_held_out_images_a_row_without_one_is_a_prompt_to_complete(tmp_path, runs):
    held_out = write_pairs(tmp_path / "held", 3)
    (held_out / "0001.png").unlink()
    validation = {"dataset": {"name": str(held_out)}, "reward_function": {"jpeg": 1.0}}
    prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 2), validation=validation)
    rows = open_media_prompts(stage_path(runs) / "data", "validation")
    assert [rows[i].text for i in range(len(rows))] == ["number 0", "number 1", "number 2"]


def test_rows_are_split_off_where_test_size_says(tmp_path, runs):
    prepared(stage_path(runs), write_pairs(tmp_path / "pairs", 5), dataset={"test_size": 2})
    train, held_out = (open_media(stage_path(runs) / "data", split) for split in ("train", "validation"))
    prompts = [[rows[i].prompt for i in range(len(rows))] for rows in (train, held_out)]
    assert [len(each) for each in prompts] == [3, 2]
    assert sorted(prompts[0] + prompts[1]) == [f"number {i}" for i in range(5)]


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.full] * (n == "sana")) for n in tiny_pipelines.FAMILIES]
)
def test_a_real_pipeline_is_encoded_as_its_family_does_and_not_loaded_again(tmp_path, runs, family, monkeypatch):
    model = tiny_pipelines.save(family, tmp_path / "model")
    (tmp_path / "clips").mkdir()
    file = tmp_path / "clips" / ("1.mp4" if is_video(family) else "1.png")
    write_clip(file) if is_video(family) else file.write_bytes(png())
    (tmp_path / "clips" / "1.json").write_text('{"prompt": "red"}')
    diffusers = {"inference_size": [32, 32], "train_frames": 9, "max_prompt_length": 32}
    stage = make_stage(stage_path(runs), tmp_path / "clips", diffusers=diffusers)
    stage.model = str(model)
    made = run_stage(stage)
    encoders = open_pipeline(str(model), stage.recipe.policy)
    row = open_media(stage.path / "data", "train")[0]
    text = encoders.text_embedding(["red"])
    assert row.text.keys() == text.keys()
    assert all(torch.equal(row.text[name], text[name][0]) for name in text)
    frame_config = FrameSettings((32, 32), num_frames=9 if is_video(family) else 0, sampling="first")
    pixels = decode_media(MediaContent(is_video(family), file), frame_config, 0.0)
    assert row.mean.shape == encoders.latent_shape(32, 32, 9)
    assert (row.logvar is not None) == (family == "sd3")
    if not is_video(family):
        mean, _ = encoders.visual_embedding(torch.from_numpy(pixels.copy())[None].movedim(-1, 1) / 127.5 - 1)
        assert torch.allclose(row.mean, mean[0], atol=1e-4)
    again = make_stage(stage_path(runs, 2), tmp_path / "clips", diffusers=diffusers)
    again.model = str(model)
    monkeypatch.setattr(DiffusionModel, "pipeline", property(lambda self: pytest.fail("an encoder was loaded")))
    assert run_stage(again) == made


def is_video(family: str) -> bool:
    return family in {"sana_video", "cosmos_predict"}
