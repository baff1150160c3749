"""Time for which attempts held GPUs: killed attempts count until their last sign of life, and nothing counts twice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.observe.costs import compute_run_cost, make_cost_table
from cosmos_core.run.directory import claim_run, create_run, open_or_create_run, open_run
from cosmos_core.run.gpu_time import (
    add_gpu_time_to_result,
    compute_run_gpu_seconds,
    read_gpu_intervals,
    read_run_gpu_intervals,
    record_gpu_time,
    save_estimate,
    sum_gpu_seconds,
)
from cosmos_core.run.lineage import collect_lineage
from cosmos_core.run.state import GpuInterval, update_state
from tasks.kinds import all_kinds
from tests.unit.run_folder import counting_run, finish

PRICE = ("pipeline.price_per_gpu_hour=36", "pipeline.budget=5")


def hold(attempt: int, gpus: int, begin: float, end: float | None) -> GpuInterval:
    return GpuInterval(attempt=attempt, gpus=gpus, begin=begin, end=end)


def test_an_attempt_whose_launcher_was_killed_counts_until_the_last_sign_of_launcher_or_worker(tmp_path: Path) -> None:
    path = tmp_path / "stages" / "sft"
    update_state(path, attempt=1, holds=[hold(1, 4, 1000.0, None)], renewed=1010.0, heartbeat=1007.0)
    assert sum_gpu_seconds(read_gpu_intervals(path)) == 4 * 10
    (path / "progress.json").write_text(json.dumps({"heartbeat": 1012.5}))  # it saved a checkpoint before it ended
    assert sum_gpu_seconds(read_gpu_intervals(path)) == 4 * 12.5
    with record_gpu_time(path, 2):
        (path / "progress.json").unlink()
        update_state(path, attempt=2, renewed=time.time() + 100)
        killed, current = read_gpu_intervals(path)
        assert (killed.end, current.attempt, current.gpus) == (1012.5, 2, 2)
        assert current.end is not None and current.end <= time.time(), "no clock of another machine adds time"
    assert [each.end is not None for each in read_gpu_intervals(path)] == [True, True]
    with record_gpu_time(path, 0):
        assert len(read_gpu_intervals(path)) == 2, "a stage without GPUs holds none"


def test_a_run_counts_what_was_thrown_away_and_not_what_it_took_over(tmp_path: Path) -> None:
    run = counting_run(tmp_path, *PRICE)
    update_state(run.stage_path("first"), holds=[hold(1, 2, 100.0, 200.0)])
    update_state(run.path / "superseded" / "first.1", holds=[hold(1, 2, 10.0, 60.0), hold(2, 2, 70.0, 80.0)])
    finish(run, "first")
    assert compute_run_gpu_seconds(run.path) == 2 * (100 + 50 + 10)
    assert [len(holds) for holds in read_run_gpu_intervals(run.path).values()] == [3]
    assert str(compute_run_cost(run.path)) == "3.200 for 0.089 GPU hours, budget 5.000"
    columns = {column.header: [*column.cells] for column in make_cost_table(run.output_dir, 9).columns}
    assert columns["cost"][-1] == "3.200"


def test_a_result_has_its_gpu_seconds_by_attempt_and_its_lineage_shows_them(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    path = finish(run, "first")
    digest = collect_lineage(path)[0].digest
    update_state(path, holds=[hold(1, 2, 100.0, 130.0), hold(2, 2, 140.0, 150.0), hold(2, 2, 160.0, 165.0)])
    result = add_gpu_time_to_result(path)
    assert result["attempts"] == [
        {"attempt": attempt, "gpus": 2, "gpu_seconds": seconds} for attempt, seconds in ((1, 60.0), (2, 30.0))
    ]
    assert result["gpu_seconds"] == 90.0
    [link] = collect_lineage(path)
    assert (link.digest, link.status, link.gpu_seconds) == (digest, "verified", 90.0)


def test_a_run_shows_its_cost_beside_the_estimate_of_the_same_settings(tmp_path: Path) -> None:
    first = counting_run(tmp_path)
    pipeline = load_pipeline(tmp_path / "counting.toml", (), all_kinds())
    save_estimate(pipeline, first.output_dir, {"first": 3600.0, "second": 0.0})
    priced = load_pipeline(tmp_path / "counting.toml", PRICE, all_kinds())
    run = create_run(priced)
    update_state(run.stage_path("first"), holds=[hold(1, 1, 0.0, 1800.0)])
    assert str(compute_run_cost(run.path)) == "18 for 0.500 GPU hours, estimated 36, budget 5.000"
    assert compute_run_cost(first.path).estimated_gpu_hours is None
    text = (run.path / "pipeline.toml").read_text()
    (run.path / "pipeline.toml").write_text(text.replace("per_gpu_hour = 36", f"per_gpu_hour = 1{'0' * 400}"))
    assert str(compute_run_cost(run.path)).startswith("inf for 0.500 GPU hours"), "a price that was edited by hand"
    save_estimate(pipeline, first.output_dir, {"first": None, "second": 0.0})
    assert compute_run_cost(create_run(priced).path).estimated_gpu_hours is None


def test_budget_and_price_may_change_in_a_run_and_other_settings_may_not(tmp_path: Path) -> None:
    counting_run(tmp_path)
    file, kinds = tmp_path / "counting.toml", all_kinds()
    run = open_or_create_run(load_pipeline(file, PRICE, kinds), run_id="mine")
    raised = open_or_create_run(load_pipeline(file, (*PRICE, "pipeline.budget=9"), kinds), run_id="mine")
    assert (run.path, raised.pipeline.config.budget) == (raised.path, 9)
    assert raised.pipeline.config.price_per_gpu_hour == 36
    with pytest.raises(ConfigError, match=r"made with other settings \(pipeline.threads\)"):
        open_or_create_run(load_pipeline(file, (*PRICE, "pipeline.threads=2"), kinds), run_id="mine")


def test_a_budget_of_a_run_that_another_process_executes_is_not_changed(tmp_path: Path) -> None:
    counting_run(tmp_path)
    file, kinds = tmp_path / "counting.toml", all_kinds()
    run = open_or_create_run(load_pipeline(file, PRICE, kinds), run_id="mine")
    raised = open_or_create_run(load_pipeline(file, (*PRICE, "pipeline.budget=9"), kinds), run_id="mine")
    with claim_run(run), pytest.raises(ConfigError, match="another process"):
        claim_run(raised)
    assert open_run(run.path, kinds).pipeline.config.budget == run.pipeline.config.budget
    claim_run(raised).release()
    assert open_run(run.path, kinds).pipeline.config.budget == 9
    claim_run(run).release()  # opened before the budget was raised
    assert open_run(run.path, kinds).pipeline.config.budget == 9


def test_a_budget_needs_a_price_and_the_older_name_of_the_price_is_read(tmp_path: Path) -> None:
    counting_run(tmp_path)
    with pytest.raises(ConfigError, match=r"budget = 5 needs price_per_gpu_hour"):
        load_pipeline(tmp_path / "counting.toml", ("pipeline.budget=5",), all_kinds())
    text = (tmp_path / "counting.toml").read_text().replace("threads = 1", "threads = 1\ngpu_hour_price = 2.5")
    (tmp_path / "older.toml").write_text(text)
    older = load_pipeline(tmp_path / "older.toml", (), all_kinds())
    assert older.config.price_per_gpu_hour == 2.5
