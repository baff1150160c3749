"""Why a stage is made again: an event of the stage, a line of the flow's log, and a line of status and report."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_core.errors import Preempted
from cosmos_core.launch import worker
from cosmos_core.observe.console import print_status
from cosmos_core.observe.record import read_run
from cosmos_core.observe.report import build_report
from cosmos_core.run import lock
from cosmos_core.run.directory import Run
from cosmos_core.run.fingerprint import Fingerprint, compute_fingerprint
from cosmos_core.run.lock import open_stage_lock
from cosmos_core.run.retrain_state import compute_retrain_digest
from cosmos_core.run.state import update_state
from flows.post_train import supersede_stages
from tasks.layout import prepare_stage_folder
from tests.unit.run_folder import counting_run, fingerprint_of, finish, load_recipe, make_inputs


def lines_of(run: Run, name: str = "first") -> list[str]:
    """Lay a stage out as a new attempt does; return what the flow logs."""
    lines: list[str] = []
    stage = run.pipeline.stage(name)
    expected = compute_fingerprint(run.pipeline, stage, run.pipeline.stage_kind(stage), {}, run.digest_cache)
    prepare_stage_folder(run, stage, expected, lines.append)
    return lines


def test_a_stage_that_is_made_for_the_first_time_or_retried_is_not_remade(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    assert [lines_of(run), lines_of(run)] == [[], []]
    again = counting_run(tmp_path)
    assert lines_of(again) == [], "the other run never finished, and nothing changed"
    assert not (again.stage_path("first") / "events.jsonl").exists()


def test_settings_and_inputs_that_changed_since_an_earlier_run_are_named_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    first = counting_run(tmp_path, f"first.data={rows}")
    lines_of(first)
    rows.write_text("[]\n")
    run = counting_run(tmp_path, f"first.data={rows}", "first.arguments.steps=9")
    reason = f"entry.arguments.steps 3 -> 9; rows.jsonl changed (since run {first.id})"
    assert lines_of(run) == [f"remade: {reason}"]
    assert lines_of(run) == [], "a retry"
    events = (run.stage_path("first") / "events.jsonl").read_text().splitlines()
    assert [(event["event"], event["detail"]) for event in map(json.loads, events)] == [("remade", reason)]
    shown = io.StringIO()
    print_status(run.path, stream=shown)
    assert f"first: remade: {reason}" in " ".join(shown.getvalue().split())
    assert "rows.jsonl changed" in build_report(run.path)


def test_within_a_run_a_changed_input_moves_the_old_files_aside_and_says_why(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    run = counting_run(tmp_path, f"first.data={rows}")
    finish(run, "first")
    rows.write_text("[]\n")
    assert lines_of(run) == ["remade: rows.jsonl changed"]
    assert (run.path / "superseded" / "first.1" / "out").is_dir()
    assert read_run(run.path).stages[0].reason_for_rerun == "rows.jsonl changed"


def test_damage_and_a_request_are_reasons_too(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (finish(run, "first") / "out" / "a.txt").write_text("another content")
    [line] = lines_of(run)
    assert line.startswith("remade: made before, but out/a.txt ")
    other = counting_run(tmp_path)
    update_state(other.stage_path("first"), forced=True)
    assert lines_of(other) == ["remade: requested by the user"]


def test_rows_that_changed_or_were_replaced_are_named(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    old = fingerprint_of(load_recipe(tmp_path), "prepare")
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "same.jsonl")
    (tmp_path / "more.jsonl").write_text("{}\n{}\n")
    for name, said in (("same", []), ("more", ["train.train_policy.dataset.name rows.jsonl -> more.jsonl"])):
        changed = load_recipe(tmp_path, f"train.train_policy.dataset.name={tmp_path}/{name}.jsonl")
        new = fingerprint_of(changed, "prepare")
        assert new.describe_difference(old) == said
    (tmp_path / "rows.jsonl").write_text("{}\n{}\n")
    assert fingerprint_of(load_recipe(tmp_path), "prepare").describe_difference(old) == ["rows.jsonl changed"]
    without_inputs = Fingerprint(old.value, old.ingredients)  # as earlier versions saved it
    assert len(fingerprint_of(load_recipe(tmp_path), "prepare").describe_difference(without_inputs)) == 1


def test_a_stage_is_moved_aside_only_when_the_worker_of_a_killed_flow_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write its checkpoint into the new folder."""
    run = counting_run(tmp_path)
    worker_file = run.stage_path("second") / "checkpoint"
    worker_file.parent.mkdir(parents=True)
    worker_lock = open_stage_lock(run.path, "second")
    worker_lock.acquire()

    def end(path: Path) -> None:
        (path / "checkpoint").write_text("saved")
        worker_lock.release()

    with monkeypatch.context() as stopping, pytest.raises(Preempted):
        stopping.setattr(worker._child_registry, "stop_event", SimpleNamespace(wait=lambda seconds: True))
        supersede_stages(run, "second", "flow-run")
    monkeypatch.setattr(worker, "reap_attempt", end)
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.0)
    supersede_stages(run, "second", "flow-run")
    assert [file.name for file in worker_file.parent.iterdir()] == ["state.json"]
    assert (run.path / "superseded" / "second.1" / "checkpoint").is_file()


def test_a_changed_model_of_a_built_in_reward_is_named(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    settings = ("validation.reward_function=clip_score", f"custom.clip_score.model_path='{tmp_path}/scorer'")
    (tmp_path / "scorer").mkdir()
    found: list[dict[str, Fingerprint]] = []
    for weights in ("one", "two"):
        (tmp_path / "scorer" / "model.bin").write_text(weights)
        pipeline = load_recipe(tmp_path, *settings)
        found.append({name: fingerprint_of(pipeline, name) for name in ("prepare", "sft", "validate")})
    differences = {name: found[1][name].describe_difference(found[0][name]) for name in found[0]}
    assert differences == {"prepare": [], "sft": ["scorer changed"], "validate": ["scorer changed"]}


def test_a_changed_packer_or_reward_service_is_something_new_to_train_on(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    files = {"packer.py": ("Packer = 1\n", "Packer = 2\n"), "service.toml": ("", "port = 1\n")}
    for name, (text, _) in files.items():
        (tmp_path / name).write_text(text)
    packer, service = tmp_path / "packer.py:Packer", tmp_path / "service.toml"
    settings = (f"train.train_policy.data_packer='{packer}'", f"sft.reward_service='{service}'")
    digests = {compute_retrain_digest(load_recipe(tmp_path, *settings))}
    for name, (_, text) in files.items():
        (tmp_path / name).write_text(text)
        digests.add(compute_retrain_digest(load_recipe(tmp_path, *settings)))
    assert len(digests) == 3
