"""Completions of training are on disk, a few of each step, and what goes wrong with them is warned of once."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.observe.completions import iter_completions
from cosmos_core.run.directory import PIPELINE_FILE
from cosmos_core.train.completions import CompletionLog
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Score, ScoredGroup, Segment, Turn


def completion(text: str, ids: Sequence[int], logprob: float = -1.0) -> Completion:
    return Completion((Segment(tuple(ids), True, (logprob,) * len(ids), 0),), "stop", text)


def group(prompt: int, rewards: Sequence[float | None], **rest: float) -> ScoredGroup:
    made = tuple(completion(f"{prompt}-{k}", range(20)) for k in range(len(rewards)))
    scores = tuple(Score(r, {} if r is None else {"right": r, **rest}, "" if r is not None else "bad") for r in rewards)
    return ScoredGroup(Group(Prompt(prompt, (1,), f"prompt {prompt}", "5"), made, 0), scores)


def opened(stage: Path, *, writes: bool = True) -> CompletionLog:
    stage.mkdir(parents=True, exist_ok=True)
    return CompletionLog(stage / "completions", should_write=writes)


def lines(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"completions/step_{step:06d}.jsonl").read_text().splitlines()]


def test_the_best_and_the_worst_of_a_few_groups_are_written(tmp_path: Path) -> None:
    groups = [group(i, [0.1 * i, 0.5]) for i in range(4)]
    groups += [group(9, [-3.0, 0.5]), group(8, [None, *(k / 20 for k in range(20)), 2.0])]
    opened(tmp_path)(3, groups)
    found = lines(tmp_path, 3)
    by_prompt: dict[str, list[float]] = {}
    for line in found:
        by_prompt.setdefault(line["prompt"], []).append(line["reward"])
    assert list(by_prompt) == ["prompt 8", "prompt 9", "prompt 0", "prompt 1"]
    assert len(by_prompt["prompt 8"]) == 8 and by_prompt["prompt 8"][0] == 2.0 and by_prompt["prompt 8"][-1] is None
    assert by_prompt["prompt 9"] == [0.5, -3.0]
    assert found[0] == {
        "step": 3, "prompt": "prompt 8", "reference": "5", "completion": "8-21", "reward": 2.0,
        "metrics": {"right": 2.0}, "tokens": 20, "finish_reason": "stop",
    }  # fmt: skip


def test_a_step_that_is_trained_again_replaces_what_came_after_it(tmp_path: Path) -> None:
    for step in (1, 2, 3, 2):
        opened(tmp_path)(step, [group(step, [0.0, 1.0])])
    names = sorted(file.name for file in (tmp_path / "completions").iterdir())
    assert names == ["step_000001.jsonl", "step_000002.jsonl"]
    opened(tmp_path / "off", writes=False)(1, [group(1, [0.0, 1.0])])
    assert not (tmp_path / "off" / "completions").exists()


def test_the_command_shows_a_step_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "grpo"
    stage.mkdir(parents=True)
    for step in (1, 2):
        opened(stage)(step, [group(step, [0.0, 1.0, None], brief=0.25)])
    newest = list(iter_completions(tmp_path, "", None, "", 10))
    assert newest[0] == "--- grpo, step 2, prompt (reference '5'):\nprompt 2" and len(newest) == 4
    assert newest[1] == "--- reward 1, right 1, brief 0.25, 20 tokens:\n2-1"
    assert newest[3] == "--- no reward (bad), 20 tokens:\n2-2"
    assert "1-1" in list(iter_completions(tmp_path, "grpo", 1, "best", 1))[1]
    assert "1-0" in list(iter_completions(tmp_path, "grpo", 1, "worst", 1))[1]
    lines = [json.dumps({"step": 1, "reward": r, "completion": str(r)}) for r in (0.5, math.nan, 2.0, 1.0, 10**400)]
    (stage / "completions/step_000001.jsonl").write_text("\n".join(lines) + "\n")
    orders = {"best": ["inf", "2", "1", "0.5", "nan"], "worst": ["0.5", "1", "2", "inf", "nan"]}
    for order, sorted_rewards in orders.items():
        shown = [text for text in iter_completions(tmp_path, "grpo", 1, order, 9) if text.startswith("--- reward")]
        assert [text.removeprefix("--- reward ").partition(":")[0] for text in shown] == sorted_rewards
    (tmp_path / PIPELINE_FILE).write_text("")
    done = CliRunner().invoke(app, ["samples", str(tmp_path), "--step", "2", "--worst", "--most", "1"])
    assert done.output.splitlines()[-2:] == ["--- reward 0, right 0, brief 0.25, 20 tokens:", "2-0"], done.output
    with pytest.raises(ConfigError, match="no completions of step 7"):
        list(iter_completions(tmp_path, "", 7, "", 1))
    with pytest.raises(ConfigError, match="no completions of a stage 'sft'; stages with some: grpo"):
        list(iter_completions(tmp_path, "sft", None, "", 1))


def drawn_group(prompt: int, count: int, frames: int) -> ScoredGroup:
    shape = (frames, 16, 16, 3) if frames else (16, 16, 3)
    drawn = [DiffusionSample(torch.full(shape, 10 * k, dtype=torch.uint8), None, (1.0, 0.0), 0) for k in range(count)]
    made = tuple(Completion((), "stop", "", diffusion_sample=d) for d in drawn)
    group = Group(Prompt(prompt, (), f"prompt {prompt}", ""), made, 0)
    return ScoredGroup(group, tuple(Score(prompt + k / 10) for k in range(count)))


@pytest.mark.parametrize(("frames", "suffix"), [(0, "png"), (4, "mp4")])
def test_what_a_diffusion_model_drew_in_training_is_on_disk_and_named(frames: int, suffix: str, tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "nft"
    log = opened(stage)
    for step in (1, 2, 3, 2):
        log(step, [drawn_group(i, 6, frames) for i in range(4)])
    written = lines(stage, 2)
    assert [line["prompt"] for line in written] == ["prompt 3"] * 4 + ["prompt 0"] * 4
    assert [line["reward"] for line in written[:4]] == [3.5, 3.3, 3.2, 3.0]
    files = [str(line["media"]) for line in written]
    assert files[5] == f"completions/step_000002/1-1.{suffix}" and all((stage / name).is_file() for name in files)
    if not frames:
        with Image.open(stage / files[0]) as image:
            assert (np.asarray(image) == 50).all()
    assert (stage / "completions/step_000002/grid.png").is_file()
    assert sorted(each.name for each in (stage / "completions").iterdir()) == [
        "step_000001", "step_000001.jsonl", "step_000002", "step_000002.jsonl",
    ]  # fmt: skip
    assert list(iter_completions(tmp_path, "nft", 2, "best", 1))[1] == f"--- reward 3.5:\n{stage / files[0]}"


def test_drawn_files_of_the_oldest_steps_make_room_for_new_ones(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log(1, [drawn_group(0, 2, 0)])
    size = sum(file.stat().st_size for file in (tmp_path / "completions/step_000001").iterdir())
    for most, kept in ((2.5, [3, 4]), (0, [5])):
        log = CompletionLog(tmp_path / "completions", should_write=True, max_image_bytes=int(most * size))
        for step in range(kept[0] - 1, kept[-1] + 1):
            log(step, [drawn_group(0, 2, 0)])
        names = sorted(file.name for file in (tmp_path / "completions").iterdir())
        assert names == [f"step_{step:06d}{suffix}" for step in kept for suffix in ("", ".jsonl")]


def test_groups_without_a_difference_are_warned_of_once_until_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path, writes=False)
    for step, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)], start=1):
        log(step, [group(1, rewards), group(2, (0.5, 0.5))])
    assert [message.partition(":")[0] for message in caplog.messages] == ["step 2", "step 5"]
    log(6, [ScoredGroup(group(1, [0.0, 0.0]).group, (Score(0.0),) * 2)])  # bypassed
    assert len(caplog.messages) == 2


def test_completions_that_all_end_at_the_maximum_length_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, whole = opened(tmp_path, writes=False), group(1, (0.0, 1.0))
    cut = tuple(replace(each, finish_reason="length") for each in whole.group.completions)
    log(1, [replace(whole, group=replace(whole.group, completions=(cut[0], whole.group.completions[1])))])
    assert not caplog.messages
    for step in (2, 3):
        log(step, [replace(whole, group=replace(whole.group, completions=cut))])
    [message] = caplog.messages
    assert message.startswith("step 2: all 2 completions end at the maximum length") and "max_response" in message
    talks = tuple(replace(each, turns=(Turn("assistant", each.text),)) for each in cut)
    opened(tmp_path, writes=False)(4, [replace(whole, group=replace(whole.group, completions=talks))])
    assert "max_assistant_turns" in caplog.messages[-1] and "max_assistant_turns" not in message


@pytest.mark.parametrize(
    ("right", "helper", "is_told"),
    [
        ([0.8 - 0.05 * i for i in range(8)], [0.1 * i for i in range(8)], True),
        ([0.8 + 0.05 * i for i in range(8)], [0.1 * i for i in range(8)], False),
        ([0.8, 0.2] * 4, [0.1 * i for i in range(8)], False),
        ([0.8] * 8, [0.1 * i for i in range(8)], False),
    ],
)
def test_a_reward_that_rises_while_another_falls_is_named(
    right: list[float], helper: list[float], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path, writes=False)
    for step, (one, other) in enumerate(zip(right, helper, strict=True), start=1):
        log(step, [group(1, (one - 0.1, one + 0.1), helper=other)])
    message = "reward 'helper' rose from 0.15 to 0.55 while 'right' fell from"
    assert any(message in each for each in caplog.messages) is is_told


@pytest.mark.parametrize(
    ("ids", "logprob", "said"),
    [
        (range(4), -1.0, "completions have 4 tokens, 20 at first"),
        ([1, 2] * 10, -1.0, "% of what completions say is repeated"),
        (range(20), -0.01, "the entropy per token is 0.01, 1 at first"),
        (range(12), -0.5, ""),
    ],
)
def test_completions_that_collapse_are_warned_of(
    ids: Sequence[int], logprob: float, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    log, sound = opened(tmp_path, writes=False), group(1, (0.0, 1.0))
    collapsed = ScoredGroup(Group(sound.group.prompt, (completion("x", ids, logprob),) * 2, 0), sound.scores)
    for step in range(1, 13):
        log(step, [sound if step <= 4 else collapsed])
    assert [said in each for each in caplog.messages] == ([True] if said else [])
