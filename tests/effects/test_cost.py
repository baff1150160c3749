"""Keys that say what GPUs are like, and what `cosmos plan --estimate` makes of them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, OverBudget
from cosmos_core.launch.cost import (
    StageCost,
    _estimate_from_history,
    _has_used_gpu_type,
    estimate_costs,
    estimate_wall_seconds,
    render_cost_table,
)
from cosmos_core.launch.machine import _GPU_SPECS, find_machine_spec
from cosmos_core.run.directory import Run, open_or_create_run
from cosmos_core.run.gpu_time import compute_run_gpu_seconds
from cosmos_core.run.plan import StageDecision
from cosmos_core.run.progress import ProgressRecord
from cosmos_core.run.state import GpuInterval, read_state, update_state
from cosmos_core.session import derive_exit_code
from tasks.kinds import all_kinds
from tasks.stage import run_stage, should_retry
from tests.conftest import PROGRAMS
from tests.effects.change import SFT, Change, changes, nested

pytestmark = pytest.mark.usefixtures("here")

GIB = 2**30
SIZES: dict[str, Any] = {
    "parameters": 10**9, "trainable": 10**9, "peak": 50 * GIB, "engine_weights": 0, "kv_cache": 0, "steps": 100,
    "tokens": 10**9, "memory": {"weights": 2 * GIB, "activations": 8 * GIB}, "disk": 14 * 10**9,
    "machine": {"device": "cpu, 2 threads", "is_cpu": True, "flops": 1e11, "memory": 64 * GIB},
}  # fmt: skip
BASE = {
    **SFT, "pipeline.gpu_tflops": 400.0, "pipeline.gpu_memory": 80.0, "policy.model_gradient_checkpointing": False,
    "train.ckpt.export_safetensors": False,
}  # fmt: skip
RUN = StageDecision("run", "never made before")


def pipeline(settings: dict[str, Any], folder: Path) -> Pipeline:
    (folder / "p.toml").write_text(tomli_w.dumps(nested(settings)))
    return load_pipeline(folder / "p.toml", (), all_kinds())


def shown(found: Pipeline, folder: Path, on: str = "") -> dict[str, str]:
    """The row of the training, by column."""
    machine = find_machine_spec(found.config, on, [SIZES])
    decisions = {"prepare": StageDecision("reuse", "done in this run"), "sft": RUN}
    each = estimate_costs(found, decisions, {"sft": SIZES}, {"sft": 2}, folder / "outputs", machine)
    table = render_cost_table(found, each, machine)
    return {str(column.header): list(column.cells)[1] for column in table.columns}  # type: ignore[misc]


USUAL = {
    "stage": "sft", "GPUs": "2", "time": "2h05m", "GPU hours": "4.17", "disk": "14.0 GB", "fits 80 GiB": "yes",
    "known from": "never run; counted at 400 TFLOP/s per GPU",
}  # fmt: skip


@changes(
    (Change("pipeline.gpu_memory", 40.0, BASE), {"fits 40 GiB": "no: 50.0 GiB"}),
    (Change("pipeline.gpu_tflops", 200.0, BASE),
     {"time": "4h10m", "GPU hours": "8.33", "known from": "never run; counted at 200 TFLOP/s per GPU"}),
    (Change("pipeline.price_per_gpu_hour", 0.9, BASE), {"cost": "3.75"}),
)  # fmt: skip
def test_it_changes_what_a_plan_says_of_time_and_cost(change: Change, expected: dict[str, str], tmp_path: Path) -> None:
    base = dict(change.base)
    before = shown(pipeline(base, tmp_path), tmp_path)
    after = shown(pipeline({**base, change.key: change.value}, tmp_path), tmp_path)
    # 6 operations of 1e9 parameters and 1e9 tokens on 2 GPUs of 4e14 a second
    assert before == USUAL
    assert {name: after[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("on", "time", "memory_fit", "rate"),
    [
        # 6e18 operations at half of 1e11 a second: both ranks share the CPU
        ("", "1388d21h", {"fits 64 GiB": "yes"}, "0.05 TFLOP/s on this machine (cpu, 2 threads)"),
        ("H100", "2h06m", {"fits 80 GiB": "yes"}, "396 TFLOP/s per GPU on H100"),
        ("l40s", "5h45m", {"fits 45 GiB": "no: 50.0 GiB"}, "145 TFLOP/s per GPU on l40s"),
    ],
)
def test_what_was_never_run_is_counted_for_this_machine_or_the_one_that_is_named(
    on: str, time: str, memory_fit: dict[str, str], rate: str, tmp_path: Path
) -> None:
    unsaid = {key: value for key, value in BASE.items() if key not in {"pipeline.gpu_tflops", "pipeline.gpu_memory"}}
    expected = {**memory_fit, "time": time, "known from": f"never run; counted at {rate}"}
    found = shown(pipeline(unsaid, tmp_path), tmp_path, on)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(("mode", "memory_fit"), [("colocated_separated", "no: 81.0 GiB"), ("disaggregated", "yes")])
def test_an_engine_with_gpus_of_its_own_shares_them_with_no_training(
    mode: str, memory_fit: str, tmp_path: Path
) -> None:
    found = pipeline(BASE, tmp_path)
    found = replace(found, recipes={name: recipe.copy_with(mode=mode) for name, recipe in found.recipes.items()})
    machine, sizes = (
        find_machine_spec(found.config, "", [SIZES]),
        {**SIZES, "engine_weights": 2 * GIB, "kv_cache": 77 * GIB},
    )
    decisions = {"prepare": StageDecision("reuse", "done in this run"), "sft": RUN}
    assert (
        estimate_costs(found, decisions, {"sft": sizes}, {"sft": 2}, tmp_path / "outputs", machine)[1].memory_fit
        == memory_fit
    )


def test_a_machine_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--on h1000: known are a100, .*h100, .*set pipeline.gpu_tflops"):
        find_machine_spec(pipeline(BASE, tmp_path).config, "h1000", [])


def write_run(found: Pipeline, run: Path, state: dict[str, Any], lines: list[dict[str, float]], gpu: str = "") -> None:
    """A run whose training took ten minutes, of which 300 s were steps and 100 s validations."""
    ended = time.time()
    for name, seconds, known in (("prepare", 30.0, {"state": "done"}), ("sft", 600.0, state)):
        folder = run / "stages" / name
        folder.mkdir(parents=True)
        known = {"spans": [[ended - seconds, ended]], "ended": ended, **known}
        (folder / "state.json").write_text(json.dumps(known))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "facts.json").write_text(json.dumps([{"host": "here", "gpus": [gpu] * bool(gpu), "threads": 2}]))
    (run / "pipeline.toml").write_text(tomli_w.dumps(found.as_toml()))
    facts = {"run_id": run.name, "pipeline": found.config.name, "kinds": {n: asdict(k) for n, k in all_kinds().items()}}
    (run / "run.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_steps_of_the_newest_run_are_scaled_and_what_is_no_step_is_not(tmp_path: Path, state: str) -> None:
    found = pipeline({**BASE, "pipeline.price_per_gpu_hour": 2.0}, tmp_path)
    # The first of 25 steps pays for compiling; 600 s = 25 steps of 12 s + 2 validations of 50 s + 200 s of the rest.
    lines: list[dict[str, float]] = [{"step": i + 1, "time/step": 12.0 if i else 60.0} for i in range(25)]
    lines[9]["time/validate"] = lines[19]["time/validate"] = 50.0
    write_run(
        found, tmp_path / "outputs" / "20260101000000", {"state": state, "total": 50, "step": 25}, lines, "A H100"
    )
    sizes, decisions = {"sft": SIZES}, {"prepare": RUN, "sft": RUN}
    machine = find_machine_spec(found.config, "h100", [])
    [rows, training] = estimate_costs(found, decisions, sizes, {"sft": 3}, tmp_path / "outputs", machine)
    assert (rows.seconds, rows.gpu_hours) == (pytest.approx(30), 0)
    assert training.seconds == pytest.approx(100 * 12 + 8 * 50 + 200)
    assert training.time_source == "run 20260101000000: 12 s per step, 3m20s beside them"
    elsewhere = find_machine_spec(pipeline(SFT, tmp_path).config, "h200", [])
    [_, training] = estimate_costs(found, decisions, sizes, {"sft": 3}, tmp_path / "outputs", elsewhere)
    assert training.time_source == "never run; counted at 396 TFLOP/s per GPU on h200"


@pytest.mark.parametrize(("name", "kind"), [("other", "sft"), ("sft", "custom")])
def test_a_stage_of_another_name_or_kind_says_nothing_of_this_one(name: str, kind: str) -> None:
    def record(name: str, kind: str, seconds: float) -> Any:
        stage_kind = SimpleNamespace(name=kind, trains_model=False)
        return SimpleNamespace(name=name, kind=stage_kind, seconds=seconds, status="done", metric_lines=[])

    run: Any = SimpleNamespace(path=Path("r1"), stages=[record(name, kind, 70.0), record("sft", "sft", 7.0)])
    assert _estimate_from_history(StageConfig(name="sft", kind="sft"), None, [run], "") == (7.0, "run r1")


@pytest.mark.parametrize(
    ("gpu", "kinds"),
    [("NVIDIA H200", "h200"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA L40S", "l40s"), ("NVIDIA H20-3e", "h20"),
     ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090")],
)  # fmt: skip
def test_a_gpu_is_of_one_kind(gpu: str, kinds: str) -> None:
    record: Any = SimpleNamespace(ranks=[SimpleNamespace(gpus=[gpu])])
    assert [kind for kind in _GPU_SPECS if _has_used_gpu_type(record, kind)] == [kinds]


def test_engines_with_gpus_of_their_own_do_not_train(tmp_path: Path) -> None:
    settings = {
        **BASE, "train.train_policy.type": "grpo", "mode": "disaggregated", "rollout.parallelism.n_init_replicas": 3,
        "train.train_policy.reward_function": "exact_match",
    }  # fmt: skip
    found = pipeline(settings, tmp_path)
    machine = find_machine_spec(found.config, "", [SIZES])
    decisions = dict.fromkeys(("prepare", "rl"), RUN)
    [_, training] = estimate_costs(found, decisions, {"rl": SIZES}, {"rl": 4}, tmp_path / "outputs", machine)
    assert training.seconds == pytest.approx(6e18 / 400e12)


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
    times = [StageCost(stage.name, seconds.get(stage.name, 10.0), 1, "", "") for stage in found.stages]
    times = [StageCost("sft", 0.5, 0, "", "") if cost.name == "sft" else cost for cost in times]
    assert estimate_wall_seconds(found, times) == 1 + 10 + 10 + 0.5


def counting(folder: Path, budget: str) -> Run:
    """A run of one stage that counts to 120 and holds one rank, of which a second costs 1."""
    kinds = {**all_kinds(), "custom": replace(all_kinds()["custom"], has_mesh=True)}
    settings = {
        "pipeline.output_dir": str(folder / "outputs"), "pipeline.threads": 1, "pipeline.price_per_gpu_hour": 3600.0,
        "pipeline.stages": [{"name": "count", "kind": "custom", "entry": f"{PROGRAMS / 'counting.py'}:count",
                             "arguments": {"steps": 120}}],
    }  # fmt: skip
    (folder / "p.toml").write_text(tomli_w.dumps(nested(settings)))
    return open_or_create_run(load_pipeline(folder / "p.toml", [f"pipeline.budget={budget}"], kinds), run_id="paid")


@changes(Change("pipeline.budget", 5000.0))
def test_a_budget_stops_a_run_with_a_checkpoint_until_it_is_raised(change: Change, tmp_path: Path) -> None:
    run = counting(tmp_path, str(change.value))
    path, other = run.stage_path("count"), run.path / "superseded" / "count.1"

    def spend(position: ProgressRecord) -> None:
        if position.step > 3:  # an attempt that was thrown away cost 5000
            update_state(other, holds=[GpuInterval(attempt=1, gpus=50, begin=0.0, end=100.0)])

    with pytest.raises(OverBudget, match=r"^run paid: budget = 5000 is spent: .* GPU hours at 3600 cost 50") as caught:
        run_stage(run, "count", on_progress=spend)
    assert str(caught.value).endswith("to continue: cosmos resume outputs/paid --budget AMOUNT")
    state, step = read_state(path), json.loads((path / "checkpoint.json").read_text())["step"]
    assert state.is_over_budget and 3 < step < 120 and state.checkpoint_step == step
    assert caught.value.exit_code == derive_exit_code(run) == 75 and not should_retry(run, "count", caught.value)
    with pytest.raises(OverBudget):
        run_stage(run, "count")
    assert (read_state(path).attempt, len(read_state(path).holds)) == (1, 1), "no attempt begins, and no GPU is held"
    result, was_reused = run_stage(counting(tmp_path, "9000"), "count")
    assert (path / "visits.txt").read_text().splitlines() == ["start 0", f"start {step}"]
    attempts = [(each["attempt"], each["gpus"]) for each in result["attempts"]]
    assert (attempts, was_reused, result["metrics"]) == ([(1, 1), (2, 1)], False, {"count": 120.0})
    spans = sum(end - begin for begin, end in read_state(path).list_attempt_times(time.time()))
    assert spans <= result["gpu_seconds"] == pytest.approx(compute_run_gpu_seconds(run.path) - 5000)
