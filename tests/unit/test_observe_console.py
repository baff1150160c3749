"""Progress lines, character by character."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest

from cosmos_core.observe import formatting
from cosmos_core.observe.console import ProgressDisplay, draw_sparkline
from cosmos_core.run.process import identify_process
from cosmos_core.run.progress import ProgressRecord
from cosmos_core.run.state import update_state
from cosmos_core.session import _keep_display_updated
from tests.conftest import wait_until
from tests.unit.run_folder import counting_run


class Clock:
    """Seconds that only move when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress(step: int, total: int | None, at: float, phase: str = "step", **metrics: float) -> ProgressRecord:
    return ProgressRecord(pid=7, phase=phase, step=step, total=total, metrics=metrics, heartbeat=1000.0 + at)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_off_a_terminal_each_change_of_state_is_a_line_and_progress_comes_every_ten_seconds(
    clock: Clock, out: io.StringIO
) -> None:
    speed = {"throughput/tokens_per_second": 3200.0}
    with ProgressDisplay(["prepare", "grpo"], stream=out, get_time=clock) as display:
        display.update("prepare", "reused")
        display.update("grpo", "running", progress(0, None, 0, "load"))
        clock.now += 10
        display.update("grpo", "running", progress(0, None, 10, "load"))
        for step in range(1, 13):  # the first step at 20 s, then one every 1.5 s
            clock.now += 1.5
            at = 20 + 1.5 * (step - 1)
            display.update(
                "grpo", "running", progress(step, 80, at, "generate", loss=0.01, **{"reward/mean": 0.4314}, **speed)
            )
        clock.now += 100
        display.update("grpo", "running", progress(79, 80, 137, "validate", loss=0.01))
        display.update("grpo", "done", progress(80, 80, 140, "export", **{"reward/mean": 0.7}, **speed))
    assert out.getvalue().splitlines() == [
        "prepare  reused",
        "grpo     running",
        "grpo     load",
        "grpo     step 7/80  reward 0.431  3.2k tok/s  eta 1m50s",
        "grpo     validate  step 79/80  loss 0.010  eta 1.5s",
        "grpo     done  step 80/80  reward 0.700  2m08s",
    ]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a shell in Emacs, which would see nothing before the end."""
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with ProgressDisplay(["sft"], stream=out) as display:
        display.update("sft", "running")
        assert out.getvalue() == "sft  running\n"


def test_off_a_terminal_no_line_comes_twice_for_the_same_step(clock: Clock, out: io.StringIO) -> None:
    display = ProgressDisplay(["sft"], stream=out, get_time=clock)
    validating = {"phase": "validate", "count": 24}
    places = [
        progress(0, 4, 0, "load"), progress(0, 4, 0, "step"), progress(0, 4, 20, "compile"),
        progress(0, 4, 50, "step").model_copy(update={"compile_seconds": 34.0}),
        *(progress(1, 4, 60, phase, loss=2.0) for phase in ("step", "generate", "score")),
        *(progress(1, 4, 90, loss=2.0).model_copy(update={**validating, "done": done}) for done in (0, 8, 16)),
        progress(2, 4, 140, loss=1.5),
    ]  # fmt: skip
    display.update("sft", "running", progress(0, None, 0, "start"))
    for place in places:
        for _ in range(3):  # it stays there for half a minute
            clock.now += 10
            display.update("sft", "running", place)
    assert out.getvalue().splitlines() == [
        "sft  running",
        "sft  load  step 0/4",
        "sft  step",
        "sft  compile",
        "sft  step  compiled in 34s",
        "sft  step 1/4  loss 2.000",
        "sft  validate 0/24",
        "sft  validate 8/24",
        "sft  validate 16/24",
        "sft  step 2/4  loss 1.500  eta 2m40s",
    ]


def test_compiling_is_shown_with_its_time_and_is_no_part_of_the_pace(clock: Clock) -> None:
    out = io.StringIO()
    with ProgressDisplay(["sft"], is_terminal=True, stream=out, get_time=clock) as display:
        display.update("sft", "running", progress(1, 41, 0))
        display.update("sft", "running", progress(2, 41, 2, "compile"))
        clock.now += 34
    assert "compile 34s" in out.getvalue()
    out = io.StringIO()
    display = ProgressDisplay(["sft"], stream=out, get_time=clock)
    display.update("sft", "running", progress(1, 41, 0))
    clock.now += 40
    display.update("sft", "running", progress(21, 41, 74).model_copy(update={"compile_seconds": 34.0}))
    assert out.getvalue().splitlines()[-1] == "sft  step 21/41  compiled in 34s  eta 40s"


@pytest.mark.parametrize(
    ("memory", "text"),
    [({"memory/host_gib": 1.25}, "memory 1.2 GiB"), ({"memory/host_gib": 1.2, "memory/gpu_gib": 61.3}, "GPU 61.3 GiB")],
)
def test_a_terminal_shows_memory_the_times_of_a_step_and_the_course_of_the_reward(
    clock: Clock, out: io.StringIO, memory: dict[str, float], text: str
) -> None:
    times = {"time/generate": 12.0, "time/score": 0.5, "time/train": 3.0}
    with ProgressDisplay(["grpo"], is_terminal=True, stream=out, get_time=clock) as display:
        display._console.width = 160
        for step in (1, 2):
            display.update("grpo", "running", progress(step, 9, step, loss=0.0, reward=step, **times, **memory))
    shown = out.getvalue()
    assert f"reward 2.000  generate 12s score 0.5s train 3.0s  {text}" in shown and "▁█" in shown


def test_a_narrow_terminal_cuts_metrics_alone(clock: Clock, out: io.StringIO) -> None:
    with ProgressDisplay(["sft", "grpo-accuracy"], is_terminal=True, stream=out, get_time=clock) as display:
        display._console.width = 66
        metrics = {"reward/mean": 0.5, "throughput/tokens_per_second": 3200.0}
        display.update("grpo-accuracy", "running", progress(12, 80, 20, "validate", **metrics))
        clock.now += 100
    shown = out.getvalue()
    assert all(text in shown for text in ("▶ grpo-accuracy", "validate", "12/80", "reward 0.5…", "1m40s"))


def test_the_pace_starts_again_with_a_new_attempt(clock: Clock, out: io.StringIO) -> None:
    display = ProgressDisplay(["sft"], stream=out, get_time=clock)
    display.update("sft", "running", progress(1, 40, 5, loss=2.0))
    display.update("sft", "running", progress(21, 40, 25, loss=1.0))
    display.update("sft", "retrying")
    display.update("sft", "running", progress(20, 40, 100, loss=1.0).model_copy(update={"pid": 8}))
    clock.now += 10
    display.update("sft", "running", progress(21, 40, 104, loss=1.0).model_copy(update={"pid": 8}))
    assert out.getvalue().splitlines() == [
        "sft  running",
        "sft  retrying",
        "sft  running",
        "sft  step 21/40  loss 1.000  eta 1m16s",
    ]


def test_a_failed_stage_says_where_it_was(clock: Clock, out: io.StringIO) -> None:
    display = ProgressDisplay(["sft"], stream=out, get_time=clock)
    display.update("sft", "running", progress(3, 40, 1, loss=float("nan")))
    clock.now += 61
    display.update("sft", "failed")
    display.print_message("sft: [red]loss is nan")
    assert out.getvalue().splitlines()[1:] == ["sft  failed  step 3/40  loss nan  1m01s", "sft: [red]loss is nan"]


def test_branches_may_update_at_once_on_a_terminal_with_messages_between(out: io.StringIO) -> None:
    names = ["a", "b", "c"]
    with ProgressDisplay(names, is_terminal=True, stream=out) as display:

        def work(name: str) -> None:
            for step in range(20):
                display.update(name, "running", progress(step, 20, step, loss=1.0))
                display.print_message(f"{name} says {step}")
                time.sleep(0.005)
            display.update(name, "done")

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shown = out.getvalue()
    assert all(f"{name} says {step}" in shown for name in names for step in range(20))
    last = shown[shown.rindex("✓ a") :]
    assert last.count("19/20") == 3 and "✓ b" in last and "✓ c" in last


def test_durations_read_as_people_say_them_and_numbers_have_three_digits_that_matter() -> None:
    durations = [
        (0, "0.0s"), (3.14, "3.1s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"), (100, "1m40s"), (3599.7, "1h00m"),
        (7500, "2h05m"), (273600, "3d04h"), (None, "–"), (float("inf"), "–"), (-1, "0.0s"),
    ]  # fmt: skip
    assert [formatting.format_duration(seconds) for seconds, _ in durations] == [text for _, text in durations]
    numbers = [
        (0.4314, "0.431"), (0.0, "0.000"), (12, "12"), (1.23456e-5, "1.23e-05"), (54321.7, "54,322"), (1.0, "1.000"),
        (-0.002, "-0.002"), (20000.0, "20,000"), (200.0, "200"), (3.5e15, "3.5e+15"), (float("nan"), "nan"),
        (None, "–"), (True, "True"), ("published", "published"),
    ]  # fmt: skip
    assert [formatting.format_number(value) for value, _ in numbers] == [text for _, text in numbers]


def test_metrics_are_told_apart_by_what_they_are_about() -> None:
    keys = ("loss", "train/loss", "reward/mean", "validation/reward", "reward/std")
    assert [formatting.get_metric_family(key) for key in keys] == ["loss", "loss", "reward", "reward", "std"]
    assert formatting.find_headline_metric({"loss": 0.1, "kl": 0.0, "reward/mean": 0.5}) == ("reward", 0.5)
    assert formatting.find_headline_metric({"grad_norm": 1.0, "train/loss": 2.0}) == ("loss", 2.0)
    assert formatting.find_headline_metric({"grad_norm": 1.0}) is None
    metrics = {"time/step": 1.0, "kl": 0.1, "loss": 0.2, "validation/loss": 0.3, "reward/mean": 0.4}
    assert list(formatting.select_key_metrics(metrics)) == ["validation/loss", "reward/mean", "loss", "kl"]
    assert [formatting.format_count(value) for value in (850, 3200, 1_400_000)] == ["850", "3.2k", "1.4M"]


def test_a_line_of_the_summary_shows_few_figures_by_short_names() -> None:
    metrics = {"lr": 1e-3, "loss": 0.2, "nll": 0.2, "reward/mean": 0.6, "validation/reward": 0.8,
               "validation/accuracy": 0.75, "rollout/logprob_difference_p95": 4e-6}  # fmt: skip
    shown = {"accuracy": 0.75, "held-out reward": 0.8, "reward": 0.6, "loss": 0.2, "log-prob difference p95": 4e-6}
    assert formatting.select_table_metrics(metrics) == shown
    assert list(formatting.select_table_metrics(metrics)) == list(shown)
    assert formatting.select_table_metrics({"loss": 0.2, "validation/loss": 0.3}) == {"held-out loss": 0.3, "loss": 0.2}
    rows = {"data/train_rows": 7600.0, "data/train_tokens": 140000.0, "time/read": 1.0}
    assert formatting.select_table_metrics(rows) == {"train rows": 7600.0, "train tokens": 140000.0}


@pytest.mark.parametrize(
    ("metric", "rises", "falls"),
    [("validation/reward", "better", "worse"), ("validation/loss", "worse", "better"), ("lr", "", ""),
     ("validation/loss/code", "worse", "better"), ("evaluation/kl_free/accuracy", "better", "worse")],
)  # fmt: skip
def test_a_change_is_judged_by_what_a_metric_measures(metric: str, rises: str, falls: str) -> None:
    verdicts = [formatting.judge_change(metric, change) for change in (0.1, -0.1, 0.0, None, float("nan"))]
    assert verdicts == [rises, falls, "", "", ""]


def test_a_sparkline_has_the_first_the_last_the_lowest_and_the_highest_value() -> None:
    assert draw_sparkline([0.0, 7.0]) == "▁█" and draw_sparkline([2.0]) == "" and draw_sparkline([1.0, 1.0]) == "▁▁"
    assert draw_sparkline([float(i) for i in range(8)]) == "▁▂▃▄▅▆▇█"
    long = draw_sparkline([abs(i - 500.0) for i in range(1001)])
    assert len(long) == 12 and long[0] == long[-1] == "█" and long[5] == long[6] == "▁"


@pytest.mark.parametrize("terminal", [False, True])
def test_each_warning_of_a_stage_is_printed_once(clock: Clock, out: io.StringIO, terminal: bool) -> None:
    position = progress(1, 2, 0).model_copy(update={"warnings": ["12 of 24 rewards are invalid"]})
    with ProgressDisplay(["prepare", "rl"], is_terminal=terminal, stream=out, get_time=clock) as display:
        for _ in range(3):
            display.update("rl", "running", position)
        display.update("rl", "done", position.model_copy(update={"warnings": [*position.warnings, "the disk is slow"]}))
    assert out.getvalue().count("rl       warning: 12 of 24 rewards are invalid\n") == 1
    assert out.getvalue().count("rl       warning: the disk is slow\n") == 1


def test_a_stage_that_is_retried_is_not_shown_as_failed(tmp_path: Path, out: io.StringIO) -> None:
    run = counting_run(tmp_path)
    first, second = map(run.stage_path, ("first", "second"))
    update_state(first, **identify_process(), attempt=1, failures=1, state="failed", error="crashed (signal 9)")
    update_state(second, **identify_process(), attempt=2, failures=9, state="failed", error="crashed")
    with ProgressDisplay([], stream=out) as display, _keep_display_updated(lambda: run, display):
        wait_until(lambda: "second" in out.getvalue(), 60, "the state of the second stage")
        update_state(first, state="running", attempt=2)
        wait_until(lambda: "first   running" in out.getvalue(), 60, "the second attempt")
        update_state(first, state="retrying", error="crashed again")  # the state before was not seen
    lines = ["first  attempt 1 failed: crashed (signal 9)", "first  retrying", "second  failed", "first   running"]
    lines += ["first  attempt 2 failed: crashed again", "first   retrying"]
    assert out.getvalue().splitlines() == lines
