"""Why a stage is made again: an event of the stage, a line of the flow's log, and a line of status and report."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from cosmos_core.observe.console import print_status
from cosmos_core.observe.record import read_run
from cosmos_core.observe.report import build
from cosmos_core.run.directory import Run
from cosmos_core.run.fingerprint import Fingerprint, fingerprint
from cosmos_core.run.state import update_state
from tasks.layout import prepare_stage_folder
from tests.unit.run_folder import counting_run, fingerprint_of, finish, load_recipe, make_inputs


def lines_of(run: Run, name: str = "first") -> list[str]:
    """Lay a stage out as a new attempt does; return what the flow logs."""
    lines: list[str] = []
    stage = run.pipeline.stage(name)
    expected = fingerprint(run.pipeline, stage, run.pipeline.kind_of(stage), {}, run.digests)
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
    assert "rows.jsonl changed" in build(run.path)


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
        new = fingerprint_of(
            load_recipe(tmp_path, f"train.train_policy.dataset.name={tmp_path}/{name}.jsonl"), "prepare"
        )
        assert new.describe_difference(old) == said
    (tmp_path / "rows.jsonl").write_text("{}\n{}\n")
    assert fingerprint_of(load_recipe(tmp_path), "prepare").describe_difference(old) == ["rows.jsonl changed"]
    without_inputs = Fingerprint(old.value, old.ingredients)  # as earlier versions saved it
    assert len(fingerprint_of(load_recipe(tmp_path), "prepare").describe_difference(without_inputs)) == 1
