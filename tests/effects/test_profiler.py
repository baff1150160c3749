"""Keys of traces, of real trainings of four steps."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.observe.sections import read_slowest_operators
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import PROFILE_REQUEST_FILE
from tests.effects import test_training
from tests.effects.change import SMALL, Change, changes, recipe
from tests.effects.test_training import trained_once

PARTS = "profiler.sub_profiler_config"
ALLOWED = {**SMALL, "profiler.enable_profiler": True}
TRACED = {**ALLOWED, f"{PARTS}.do_profile": True}
ASKED = {**SMALL, f"{PARTS}.do_profile": True}
USUAL = "steps_3-3_rank_0"
CONTENT = {"record_shape": "Input Dims", "profile_memory": "Total Allocated", "with_stack": "Python parent id"}
STEPS = {"active_steps": 2, "warmup_steps": 0, "wait_steps": 2}
TOGETHER = [
    {**TRACED, f"{PARTS}.{content}": True, f"{PARTS}.{steps}": value}
    for content, (steps, value) in zip(CONTENT, STEPS.items(), strict=True)
]
"""Each training shows two keys: one by what a trace has, the other by the steps in its name."""


def traces(settings: Any, inputs: Path, path: Path) -> dict[str, Path]:
    """The traces that a training leaves, by name."""
    files = sorted((trained_once(settings, inputs, path)[0] / "profile").glob("*_rank_*.json.gz"))
    return {file.name.removesuffix(".json.gz"): file for file in files}


def has_key_or_name(trace: Path, beginning: str) -> bool:
    """Whether a key or the name of an event begins so; to parse a trace takes as long as a training."""
    return f'"{beginning}'.encode() in gzip.decompress(trace.read_bytes())


@changes(
    (Change("profiler.enable_profiler", True, ASKED), [USUAL]),
    (Change(f"{PARTS}.do_profile", True, ALLOWED), [USUAL]),
    (Change(f"{PARTS}.active_steps", 2, TRACED), ["steps_3-4_rank_0"]),
    (Change(f"{PARTS}.warmup_steps", 0, TRACED), ["steps_2-2_rank_0"]),
    (Change(f"{PARTS}.wait_steps", 2, TRACED), ["steps_4-4_rank_0"]),
    (Change(f"{PARTS}.rank_filter", [1], TRACED), []),
)
def test_it_changes_which_steps_are_traced(change: Change, expected: list[str], inputs: Path, tmp_path: Path) -> None:
    before = traces(change.before, inputs, tmp_path / "before")
    assert list(before) == ([USUAL] if change.base is TRACED else [])
    settings = [each for each in TOGETHER if change.key.rpartition(".")[2] in STEPS and change.key in each]
    after = traces(recipe(settings[0]) if settings else change.after, inputs, tmp_path / "after")
    assert list(after) == expected
    assert all(has_key_or_name(trace, "aten::") for trace in after.values())


@changes(*((Change(f"{PARTS}.{key}", True, TRACED), key) for key in CONTENT))
def test_it_changes_what_a_trace_has(change: Change, expected: str, inputs: Path, tmp_path: Path) -> None:
    def content(settings: Any, name: str) -> list[str]:
        [trace] = traces(settings, inputs, tmp_path / name).values()
        return [key for key, said in CONTENT.items() if has_key_or_name(trace, f'{said}":')]

    [together] = [each for each in TOGETHER if change.key in each]
    assert content(change.before, "before") == [] and content(recipe(together), "after") == [expected]


@changes(Change("logging.report_mfu", True, ALLOWED))
def test_it_changes_whether_the_share_of_the_devices_rate_is_reported(
    change: Change, inputs: Path, tmp_path: Path
) -> None:
    def shares(settings: Any, name: str) -> list[float]:
        lines = read_metrics(trained_once(settings, inputs, tmp_path / name)[0] / "metrics.jsonl")
        return [line["throughput/mfu"] for line in lines if "throughput/mfu" in line]

    assert shares(change.before, "before") == []
    found = shares(change.after, "after")
    assert len(found) == 4 and all(0 < share < 1 for share in found)


def test_a_training_that_runs_is_traced_when_it_is_asked(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(self: Any, step: int, total: int | None = None, **metrics: float) -> None:
        if step == 1:
            (tmp_path / "sft" / PROFILE_REQUEST_FILE).write_text("true")

    monkeypatch.setattr(test_training.Watch, "step", ask)
    settings = recipe({**ALLOWED, f"{PARTS}.wait_steps": 0, f"{PARTS}.warmup_steps": 1})
    assert list(traces(settings, inputs, tmp_path / "sft")) == ["steps_4-4_rank_0"]
    stage: Any = SimpleNamespace(path=tmp_path / "sft")
    longest = read_slowest_operators(stage)
    assert longest[0].ms > 0 and longest[0].share >= longest[1].share
