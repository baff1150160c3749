"""Keys that say what GPUs are like, and what `cosmos plan --estimate` makes of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.launch.cost import Cost, cost_table, costs, wall_seconds
from cosmos_core.run.plan import Decision
from tasks.kinds import all_kinds
from tests.effects.change import SFT, Change, changes, nested

GIB = 2**30
SIZES: dict[str, Any] = {
    "parameters": 10**9, "trainable": 10**9, "peak": 50 * GIB, "engine_weights": 0, "kv_cache": 0, "steps": 100,
    "tokens": 10**9, "memory": {"weights": 2 * GIB, "activations": 8 * GIB},
}  # fmt: skip
BASE = {**SFT, "policy.model_gradient_checkpointing": False, "train.ckpt.export_safetensors": False}
RUN = Decision("run", "never made before")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pipeline(settings: dict[str, Any], folder: Path) -> Pipeline:
    (folder / "p.toml").write_text(tomli_w.dumps(nested(settings)))
    return load_pipeline(folder / "p.toml", (), all_kinds())


def shown(found: Pipeline, folder: Path) -> dict[str, str]:
    """The row of the training, by column."""
    decisions = {"prepare": Decision("reuse", "done in this run"), "sft": RUN}
    table = cost_table(found, costs(found, decisions, {"sft": SIZES}, {"sft": 2}, folder / "outputs"))
    return {str(column.header): list(column.cells)[1] for column in table.columns}  # type: ignore[misc]


USUAL = {
    "stage": "sft", "GPUs": "2", "time": "2h05m", "GPU hours": "4.17", "fits 80 GiB": "yes",
    "known from": "never run; counted at 400 TFLOP/s per GPU",
}  # fmt: skip


@changes(
    (Change("pipeline.gpu_memory", 40.0, BASE), {"fits 40 GiB": "no: 50.0 GiB"}),
    (Change("pipeline.gpu_tflops", 200.0, BASE),
     {"time": "4h10m", "GPU hours": "8.33", "known from": "never run; counted at 200 TFLOP/s per GPU"}),
    (Change("pipeline.gpu_hour_price", 0.9, BASE), {"cost": "3.75"}),
)  # fmt: skip
def test_it_changes_what_a_plan_says_of_time_and_cost(change: Change, expected: dict[str, str], tmp_path: Path) -> None:
    base = dict(change.base)
    before = shown(pipeline(base, tmp_path), tmp_path)
    after = shown(pipeline({**base, change.key: change.value}, tmp_path), tmp_path)
    # 6 operations of 1e9 parameters and 1e9 tokens on 2 GPUs of 4e14 a second
    assert before == USUAL
    assert {name: after[name] for name in expected} == expected


def test_what_a_stage_took_in_the_newest_run_is_scaled_to_its_steps(tmp_path: Path) -> None:
    found = pipeline({**BASE, "pipeline.gpu_hour_price": 2.0}, tmp_path)
    run = tmp_path / "outputs" / "20260101000000"
    for name, seconds, total in (("prepare", 30.0, None), ("sft", 600.0, 50)):
        folder = run / "stages" / name
        folder.mkdir(parents=True)
        ended = time.time()
        state = {"state": "done", "spans": [[ended - seconds, ended]], "ended": ended, "total": total, "step": total}
        (folder / "state.json").write_text(json.dumps(state))
    (run / "pipeline.toml").write_text(tomli_w.dumps(found.as_toml()))
    (run / "run.json").write_text(json.dumps({"run_id": run.name, "pipeline": found.config.name}))
    [rows, training] = costs(found, {"prepare": RUN, "sft": RUN}, {"sft": SIZES}, {"sft": 3}, tmp_path / "outputs")
    assert (rows.seconds, rows.gpu_hours) == (pytest.approx(30), 0)
    assert (training.seconds, training.gpu_hours) == (pytest.approx(1200), pytest.approx(1))
    assert training.known_from == "run 20260101000000: 12 s per step"


def test_the_time_of_all_is_that_of_the_longest_chain_with_the_slots_of_a_sweep(tmp_path: Path) -> None:
    swept = {
        **BASE, "pipeline.stages": [
            {"name": "sft", "kind": "sft", "sweep": {
                "grid": {"train.optm_lr": [1e-5, 2e-5, 3e-5]}, "metric": "loss", "max_parallel": 2}},
            {"name": "beside", "kind": "sft"},
        ],
    }  # fmt: skip
    found = pipeline(swept, tmp_path)
    seconds = {"sft-data": 1.0, "beside": 7.0, "beside-data": 1.0}
    times = [Cost(stage.name, seconds.get(stage.name, 10.0), 1, "", "") for stage in found.stages]
    times = [Cost("sft", 0.5, 0, "", "") if cost.name == "sft" else cost for cost in times]
    assert wall_seconds(found, times) == 1 + 10 + 10 + 0.5
