"""Prompt sets of a diffusion model: samples are those of the pipeline of diffusers, and rewards become metrics."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.errors import ConfigError, DataError, Preempted, RewardError
from cosmos_core.evaluate import diffusion, program
from cosmos_core.evaluate.prompt_sets import read_prompt_sets
from cosmos_core.launch.gpus import count_reserved_gpus
from cosmos_core.rollout.base import request_seed
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tests.effects.change import recipe, stage_of
from tests.tiny_pipelines import CLIPS, FAMILIES, save
from tests.unit.run_folder import fingerprint_of

REWARDS = """
import numpy as np

def redness(to_be_evaluated, reference, *, media, **keywords):
    return float(np.asarray(media)[..., 0].mean()) / 255

def letters(to_be_evaluated, reference, *, prompt, media, **keywords):
    if prompt == "unknown":
        raise ValueError("no such prompt")
    return len(prompt) + len(reference)
"""
SETTINGS: dict[str, Any] = {
    "policy.is_diffusers": True, "policy.diffusers.inference_size": [32, 32], "policy.diffusers.inference_frames": 5,
    "policy.diffusers.sample.eval_num_steps": 2, "policy.diffusers.max_prompt_length": 16,
    "train.param_dtype": "float32", "evaluate.samples_per_prompt": 2, "evaluate.batch_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("sd3", tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(autouse=True, scope="module")
def one_core() -> Iterator[None]:
    """Rewards have one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})
        yield


@pytest.fixture(scope="module")
def whole(sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Outcome]:
    """A stage that has sampled the prompts, with its outcome."""
    stage = evaluation(tmp_path_factory.mktemp("whole"), sd3)
    assert "3 prompts" in str(program.check(stage).info["found"])
    return stage, program.run(stage)


def evaluation(folder: Path, model: Path, **settings: Any) -> Stage:
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "colours.txt").write_text("red\nblue sky\n\ngreen\n")
    (folder / "counts.jsonl").write_text(json.dumps({"prompt": "two", "answer": "2"}) + "\n")
    given = {
        **SETTINGS, "evaluate.prompts": [str(folder / "colours.txt"), str(folder / "counts.jsonl")],
        "evaluate.rewards": [f"{folder / 'rewards.py'}:{name}" for name in ("redness", "letters")], **settings,
    }  # fmt: skip
    name = f"evaluate-{len(list(folder.glob('stages/*')))}"
    return stage_of(folder / "stages" / name, recipe(given), kind="evaluate", model=model)


def plain_samples(pipeline: Any, prompt: str, index: int) -> np.ndarray:
    """Two samples of a prompt, of the pipeline as a user calls it, as bytes."""
    generators = [torch.Generator().manual_seed(request_seed(0, 0, index, k)) for k in range(2)]
    output = pipeline([prompt] * 2, height=32, width=32, num_inference_steps=2, guidance_scale=4.5,
                      generator=generators, max_sequence_length=16, output_type="np", return_dict=False)[0]  # fmt: skip
    return np.asarray(np.asarray(output) * 255).round().astype(np.uint8)


def test_metrics_are_rewards_of_the_samples_of_diffusers(sd3: Path, whole: tuple[Stage, Outcome]) -> None:
    (stage, outcome), prompts = whole, ("red", "blue sky", "green")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(sd3)
    pipeline.set_progress_bar_config(disable=True)
    redness = [plain_samples(pipeline, text, i)[..., 0].mean() / 255 for i, text in enumerate(prompts)]
    assert outcome.metrics["evaluation/colours/redness"] == pytest.approx(np.mean(redness), abs=1e-3)
    assert outcome.metrics["evaluation/colours/letters"] == (3 + 8 + 5) / 3
    assert outcome.metrics["evaluation/colours/letters_stderr"] == pytest.approx(np.std([3, 8, 5], ddof=1) / 3**0.5)
    assert outcome.metrics["evaluation/counts/letters"] == 4 and outcome.metrics["evaluation/counts/invalid"] == 0
    items = pq.read_table(stage.path / "items.parquet").to_pylist()
    assert [(each["task"], each["doc_id"], each["letters"]) for each in items] == [
        ("colours", 0, 3), ("colours", 1, 8), ("colours", 2, 5), ("counts", 0, 4)
    ]  # fmt: skip
    lines = [json.loads(line) for line in (stage.path / "samples.jsonl").read_text().splitlines()]
    assert [len(line["media"]) for line in lines] == [2] * 4
    assert (stage.path / "visual_output" / "step_0" / "grid.png").exists()
    assert not list(stage.path.glob("unfinished-*"))


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.full] * (n != "cosmos_predict")) for n in FAMILIES if n != "sd3"]
)
def test_every_family_is_sampled(family: str, tmp_path: Path) -> None:
    settings = {"evaluate.limit": 1, "evaluate.samples_per_prompt": 1}
    stage = evaluation(tmp_path, save(family, tmp_path / family), **settings)
    metrics = program.run(stage).metrics
    assert 0 < metrics["evaluation/colours/redness"] < 1
    suffix = "mp4" if family in CLIPS else "png"
    assert (stage.path / "visual_output" / "step_0" / f"0-0.{suffix}").exists()


def test_a_stopped_stage_continues_with_the_next_batch(
    sd3: Path, whole: tuple[Stage, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, expected = evaluation(tmp_path, sd3), whole[1].metrics
    stage.stop_requested = True
    with pytest.raises(Preempted, match="the scores of 2 prompts are kept"):
        program.run(stage)
    stage.stop_requested = False
    [scores] = stage.path.glob("unfinished-*/scores.jsonl")
    scores.write_text(scores.read_text() + '{"set_name": "colours", "i')  # killed while it wrote
    sampled: list[str] = []
    sample = diffusion._sample_media

    def record(pipeline: Any, call_settings: Any, prompts: Any, settings: Any) -> Any:
        sampled.extend(prompt.text for prompt in prompts)
        return sample(pipeline, call_settings, prompts, settings)

    monkeypatch.setattr(diffusion, "_sample_media", record)
    assert program.run(stage).metrics == expected and sampled == ["green", "two"]


def test_an_invalid_reward_is_counted_and_never_zero(sd3: Path, tmp_path: Path) -> None:
    stage = evaluation(tmp_path, sd3)
    (tmp_path / "colours.txt").write_text("red\nunknown\n")
    metrics = program.run(stage).metrics
    assert metrics["evaluation/colours/letters"] == 3 and metrics["evaluation/colours/invalid"] == 2
    items = pq.read_table(stage.path / "items.parquet").to_pylist()
    assert [each["letters"] for each in items] == [3, None, 4]
    failing = evaluation(tmp_path, sd3, **{"evaluate.batch_size": 1})
    (tmp_path / "colours.txt").write_text("unknown\n")
    (tmp_path / "rewards.py").write_text(REWARDS.replace("/ 255", "/ missing"))
    with pytest.raises(RewardError, match="no reward of the first batch is valid; the first: redness: NameError"):
        program.run(failing)
    assert not list(failing.path.glob("unfinished-*"))


def refused(folder: Path, evaluate: str, policy: str = "is_diffusers = true") -> str:
    (folder / "pipeline.toml").write_text(
        f'[pipeline]\nname = "p"\n[[pipeline.stages]]\nname = "e"\nkind = "evaluate"\nmodel = "model"\n'
        f"[policy]\n{policy}\n[evaluate]\n{evaluate}\n"
    )
    with pytest.raises(ConfigError) as error:
        check_capabilities(load_pipeline(folder / "pipeline.toml", [], all_kinds()))
    return str(error.value)


def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "evaluate.prompts is empty" in refused(tmp_path, 'rewards = ["clip_score"]')
    assert "evaluate.rewards is empty" in refused(tmp_path, 'prompts = ["a.txt"]')
    assert "same name" in refused(tmp_path, 'prompts = ["a.txt", "b/a.jsonl"]\nrewards = ["clip_score"]')
    assert "evaluate.tasks is for language models" in refused(tmp_path, 'tasks = ["gsm8k"]')
    assert "evaluate.prompts is for diffusion models" in refused(tmp_path, 'prompts = ["a.txt"]', "")


def test_a_prompt_set_that_cannot_be_read_is_refused(sd3: Path, tmp_path: Path) -> None:
    stage = evaluation(tmp_path, sd3)
    empty = "counts.jsonl: file holds no rows; evaluate.prompts needs at least one"
    several = r"caption, text, but its caption is \['a', 'b'\]; write one string, or a row for each"
    for content, message in (("\n\n", empty), ('{"caption": ["a", "b"]}\n', several)):
        (tmp_path / "counts.jsonl").write_text(content)
        with pytest.raises(DataError, match=message):
            program.check(stage)


def test_a_prompt_set_without_a_split_names_only_keys_that_exist(tmp_path: Path) -> None:
    settings = EvaluateConfig(prompts=(str(tmp_path / "set"),), rewards=("clip_score",))
    with pytest.raises(DataError, match=r"^evaluate.prompts: \S+/set does not exist; give a file, a folder"):
        read_prompt_sets(settings)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train-00000-of-00001.jsonl").write_text('{"prompt": "red"}\n')
    no_split = r"^evaluate.prompts: \S+/set has no file for the split 'test'; it holds [\w.-]+$"
    with pytest.raises(DataError, match=no_split):
        read_prompt_sets(settings)
    (tmp_path / "set" / "a.png").touch()
    with pytest.raises(DataError, match=r"^evaluate.prompts: the split is 'test', but \S+ has no folder of that name$"):
        read_prompt_sets(settings)


def test_content_of_prompts_and_rewards_and_settings_of_sampling_count(
    sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sd3, tmp_path / "model")
    (tmp_path / "colours.txt").write_text("red\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    text = (
        '[pipeline]\nname = "p"\n[[pipeline.stages]]\nname = "e"\nkind = "evaluate"\nmodel = "model"\n'
        "[policy]\nis_diffusers = true\n[policy.diffusers.sample]\neval_num_steps = 4\n"
        '[custom.redness]\nscale = 1\n[evaluate]\nprompts = ["colours.txt"]\nrewards = ["rewards.py:redness"]\n'
    )

    def mark(changed: str = "") -> str:
        (tmp_path / "p.toml").write_text(changed or text)
        return fingerprint_of(load_pipeline(tmp_path / "p.toml", [], all_kinds()), "e").value

    marks = [mark(), mark(text.replace("eval_num_steps = 4", "eval_num_steps = 5")), mark(text.replace("= 1", "= 2"))]
    marks += [mark(text + "samples_per_prompt = 2\n"), mark(text + "seed = 3\n")]
    (tmp_path / "colours.txt").write_text("green\n")
    marks.append(mark())
    (tmp_path / "colours.txt").rename(tmp_path / "tints.txt")
    marks.append(mark(text := text.replace("colours.txt", "tints.txt")))
    (tmp_path / "rewards.py").write_text(REWARDS + "\n# changed\nX = 1\n")
    marks.append(mark())
    assert len(set(marks)) == len(marks)
    unread = "eval_num_steps = 4\nnum_steps = 7\n[rollout.parallelism]\ntp_size = 2"
    assert mark(text.replace("eval_num_steps = 4", unread)) == marks[-1]


def test_a_reward_of_texts_is_refused_and_the_stage_takes_one_gpu(sd3: Path, tmp_path: Path) -> None:
    settings = {"evaluate.rewards": ["overlong"], "rollout.parallelism.tp_size": 4}
    stage = evaluation(tmp_path, sd3, **settings)
    for program_of in (program.check, program.run):
        with pytest.raises(RewardError, match="'overlong' scores texts, and samples are images or videos"):
            program_of(stage)
    assert count_reserved_gpus(stage.kind, stage.recipe) == 1


def test_a_clip_of_one_frame_is_an_image_and_each_pass_of_the_denoiser_is_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"policy.diffusers.inference_frames": 1, "evaluate.limit": 1, "evaluate.samples_per_prompt": 1}
    stage = evaluation(tmp_path, save("sana_video", tmp_path / "frame"), **settings)
    (tmp_path / "rewards.py").write_text(REWARDS.replace("return float(", "media.size and 0; return float("))
    beats: list[str] = []
    monkeypatch.setattr(type(stage.progress), "beat", lambda progress: beats.append("beat"))
    program.run(stage)
    assert (stage.path / "visual_output" / "step_0" / "0-0.png").exists()
    assert len(beats) >= 4, "two batches of two steps"
