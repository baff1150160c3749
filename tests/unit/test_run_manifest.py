"""The commit mark of a stage: what it notices, how finished work is taken over, and what a plan says."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.errors import ConfigError, DataError, StageFailed
from cosmos_core.run.directory import create_run
from cosmos_core.run.manifest import Result, adopt_result, commit_manifest, find_output_damage, read_result
from cosmos_core.run.plan import decide_reuse, plan_stages
from cosmos_core.run.state import update_state
from cosmos_core.types import Outcome
from tasks.reuse import find_result
from tests.unit.run_folder import counting, counting_run, fingerprint_of, finish, load_recipe, make_inputs


def made(folder: Path) -> Path:
    """A stage directory with two outputs, committed."""
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "a.txt").write_text("one")
    (folder / "out" / ".b.txt.7.tmp").write_text("half")
    (folder / "c.txt").write_text("two")
    outcome = Outcome(outputs=("out", "c.txt"), metrics={"loss": 0.5}, info={"model": "out"})
    commit_manifest(folder, outcome, kind="sft", fingerprint="f" * 64, inputs={})
    return folder


def result_of(folder: Path) -> Result:
    result = read_result(folder)
    assert result is not None
    return result


def problem_of(folder: Path, *, thorough: bool = False) -> str | None:
    return find_output_damage(folder, result_of(folder), ignores_cache=thorough)


def test_a_manifest_names_every_file_with_size_and_digest(tmp_path: Path) -> None:
    assert [(r["path"], r["size"], r["sha256"]) for r in result_of(made(tmp_path / "s"))["outputs"]] == [
        ("out/a.txt", 3, hashlib.sha256(b"one").hexdigest()),
        ("c.txt", 3, hashlib.sha256(b"two").hexdigest()),
    ]
    assert problem_of(tmp_path / "s") is None


def digest(folder: Path, content: str, metrics: dict[str, float], info: dict[str, str]) -> str:
    folder.mkdir()
    (folder / "a").write_text(content)
    outcome = Outcome(outputs=("a",), metrics=metrics, info={**info})
    return str(commit_manifest(folder, outcome, kind="sft", fingerprint="", inputs={})["digest"])


def test_the_digest_is_over_what_a_stage_behind_may_read_but_not_over_how_long_it_took(tmp_path: Path) -> None:
    base = digest(tmp_path / "base", "x", {"loss": 1.0, "time/total": 3.0}, {"model": "a"})
    slower = {"loss": 1.0, "time/total": 9.0, "throughput/x": 1.0, "memory/host_gib": 2.0}
    assert digest(tmp_path / "again", "x", slower, {"model": "a"}) == base
    others = [
        digest(tmp_path / "file", "y", {"loss": 1.0}, {"model": "a"}),
        digest(tmp_path / "figure", "x", {"loss": 2.0}, {"model": "a"}),
        digest(tmp_path / "info", "x", {"loss": 1.0}, {"model": "b"}),
    ]
    assert len({base, *others}) == 4


def test_figures_are_numbers_info_is_what_toml_can_say_and_outputs_were_written(tmp_path: Path) -> None:
    for metrics, info, said in (
        ({"loss": "low"}, {}, "stage 's' returned the metric loss = 'low'; a metric is a number"),
        ({"ok": True}, {}, "stage 's' returned the metric ok = True; a metric is a number"),
        ({}, {"x": object}, "stage 's' returned info that cannot be kept: "),
        ({}, {"x": date(2026, 1, 2)}, "stage 's' returned info that cannot be kept: "),
    ):
        with pytest.raises(ConfigError) as caught:
            commit_manifest(tmp_path / "s", Outcome(metrics=metrics, info=info), kind="sft", fingerprint="", inputs={})  # type: ignore[arg-type]
        assert str(caught.value).startswith(said)
    with pytest.raises(StageFailed, match=r"^stage 's' named the output 'none' but did not write it$"):
        commit_manifest(tmp_path / "s", Outcome(outputs=("none",)), kind="sft", fingerprint="", inputs={})
    assert read_result(tmp_path) is None


@pytest.mark.parametrize("form", [str, Path, lambda path: (path,), lambda path: ("data",), lambda path: ()])
def test_outputs_and_data_of_a_users_stage_may_be_whole_paths_and_one_name(form: Any, tmp_path: Path) -> None:
    """`outputs=("data")` is a text, not a tuple."""
    stage = tmp_path / "s"
    (stage / "data").mkdir(parents=True)
    (stage / "data" / "a").write_text("x")
    outcome = Outcome(form(stage / "data"), {"n": np.int64(3), "x": np.float32(0.5)}, {"data": stage / "data"})  # type: ignore[dict-item]
    commit_manifest(stage, outcome, kind="custom", fingerprint="", inputs={})
    found = result_of(stage)
    assert [record["path"] for record in found["outputs"]] == ["data/a"]
    assert (found["info"], found["metrics"]) == ({"data": "data"}, {"n": 3, "x": 0.5})


@pytest.mark.parametrize("output", ["../other", ".", "{}/other"])
def test_an_output_that_is_not_below_the_stage_is_refused_and_stays_as_it_is(output: str, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a").write_text("x")
    for name in ("s", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(tmp_path / "far")
    outcome = Outcome(("link", output.format(tmp_path)))
    with pytest.raises(ConfigError, match=r"^stage 's' named the output '.*', which is not below .*/s$"):
        commit_manifest(tmp_path / "s", outcome, kind="custom", fingerprint="", inputs={})
    assert all((tmp_path / name / "link").is_symlink() for name in ("s", "other"))


def test_a_deleted_a_shortened_and_an_altered_output_are_noticed(tmp_path: Path) -> None:
    file = made(tmp_path / "s") / "out" / "a.txt"
    file.write_text("on")
    assert problem_of(tmp_path / "s") == "out/a.txt has 2 bytes instead of 3"
    file.write_text("won")
    assert problem_of(tmp_path / "s") == "out/a.txt was altered"
    file.unlink()
    assert problem_of(tmp_path / "s") == "out/a.txt is gone"
    shutil.rmtree(file.parent)
    file.parent.write_text("a file where the folder was")
    assert problem_of(tmp_path / "s") == "out/a.txt is gone"


def test_an_alteration_that_keeps_size_and_time_is_noticed_by_a_thorough_look(tmp_path: Path) -> None:
    file = made(tmp_path / "s") / "out" / "a.txt"
    status = file.stat()
    with open(file, "r+") as opened:
        opened.write("won")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert problem_of(tmp_path / "s") is None
    assert problem_of(tmp_path / "s", thorough=True) == "out/a.txt was altered"


def test_a_copied_or_touched_output_is_hashed_once_and_its_record_renewed(tmp_path: Path) -> None:
    copy = shutil.copytree(made(tmp_path / "s"), tmp_path / "copy")
    os.utime(copy / "c.txt", ns=(1, 1))
    assert problem_of(copy) is None
    first, second = result_of(copy)["outputs"]
    assert first["inode"] == (copy / "out" / "a.txt").stat().st_ino and second["mtime_ns"] == 1


def altered(result: dict, key: str, value: object) -> str:
    return json.dumps({**result, key: value})


def test_a_damaged_manifest_is_no_result_and_an_altered_one_is_noticed(tmp_path: Path) -> None:
    folder = made(tmp_path / "s")
    file = folder / "result.json"
    text = file.read_text()
    result = json.loads(text)
    records = result["outputs"]
    for damaged in (
        text[:-20], "", "[]", "3", "\x00", altered(result, "outputs", 3), altered(result, "outputs", [3]),
        altered(result, "outputs", [{"path": "c.txt"}]), json.dumps({k: v for k, v in result.items() if k != "info"}),
    ):  # fmt: skip
        file.write_text(damaged)
        assert read_result(folder) is None
    for key, value in (("metrics", {"loss": 0.1}), ("info", {"model": "c.txt"})):
        file.write_text(altered(result, key, value))
        assert problem_of(folder) == "result.json itself was altered"
    file.write_text(altered(result, "outputs", records[:1]))
    assert problem_of(folder) == "result.json itself was altered"
    file.write_text(altered(result, "outputs", [{**records[0], "sha256": "0" * 64}, records[1]]))
    assert problem_of(folder) == "result.json itself was altered"
    assert problem_of(folder, thorough=True) == "out/a.txt was altered"


def test_taking_over_a_result_copies_its_files_and_either_side_survives_the_other(tmp_path: Path) -> None:
    source, target = made(tmp_path / "s"), tmp_path / "t"
    target.mkdir()
    for folder, lines in ((source, "whole"), (target, "of an attempt that was killed")):
        (folder / "metrics.jsonl").write_text(lines)
    adopted = adopt_result(source, target, result_of(source))
    assert adopted["reused_from"] == str(source)
    assert (target / "metrics.jsonl").read_text() == "whole", "the report shows them"
    assert (target / "out" / "a.txt").read_text() == (source / "out" / "a.txt").read_text()
    assert problem_of(target, thorough=True) is None
    with open(source / "c.txt", "r+") as file:  # in place
        file.write("own")
    os.utime(source / "c.txt")
    assert (problem_of(source), problem_of(target, thorough=True)) == ("c.txt was altered", None)
    shutil.rmtree(source)
    assert problem_of(target, thorough=True) is None


def test_outputs_follow_the_umask_and_keep_what_else_their_program_allowed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, mode in (("model.safetensors", 0o600), ("run.sh", 0o700)):
        (tmp_path / "out" / name).write_text(name)
        (tmp_path / "out" / name).chmod(mode)
    before = os.umask(0o022)
    try:
        commit_manifest(tmp_path, Outcome(outputs=("out",)), kind="sft", fingerprint="f", inputs={})
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == {"model.safetensors": 0o644, "run.sh": 0o744}
    assert problem_of(tmp_path) is None


def test_a_linked_folder_is_part_of_an_output_and_stays_as_it_was(tmp_path: Path) -> None:
    """A stage that changes one part of a large model may link to the others."""
    base, stage = tmp_path / "base", tmp_path / "s"
    weights = base / "unet" / "part" / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_text("as it was")
    weights.chmod(0o400)
    (base / "unet" / "part" / "back").symlink_to(base)
    weights.parent.chmod(0o555)
    (stage / "model" / "step_10").mkdir(parents=True)
    (stage / "model" / "step_10" / "own").write_text("trained")
    (stage / "model" / "latest").symlink_to("step_10")
    (stage / "model" / "index").write_text("own")
    (stage / "model" / "unet").symlink_to(base / "unet")
    (stage / "model" / "circle").symlink_to(stage)
    (stage / "whole").symlink_to(base)
    outcome = Outcome(outputs=("model", "whole"))
    commit_manifest(stage, outcome, kind="custom", fingerprint="f", inputs={})
    paths = ["index", "latest/own", "step_10/own", "unet/part/weights"]
    assert [record["path"] for record in result_of(stage)["outputs"]] == [
        *[f"model/{path}" for path in paths], "whole/unet/part/weights",
    ]  # fmt: skip
    assert (stage / "model" / "unet" / "part").stat().st_mode & 0o200, "it can be removed"
    stage = stage.rename(tmp_path / "moved")
    assert (stage / "model" / "latest").readlink() == Path("step_10") and problem_of(stage) is None
    (tmp_path / "t" / "model").mkdir(parents=True)
    (tmp_path / "t" / "model" / "unet").symlink_to(base / "unet")
    adopt_result(stage, tmp_path / "t", result_of(stage))
    assert (tmp_path / "t" / "model" / "unet" / "part" / "weights").read_text() == "as it was"
    (tmp_path / "t" / "whole" / "unet" / "part" / "weights").chmod(0o600)
    (tmp_path / "t" / "whole" / "unet" / "part" / "weights").write_text("another")
    adopt_result(tmp_path / "t", stage, result_of(tmp_path / "t"))
    assert (weights.read_text(), weights.stat().st_mode & 0o777) == ("as it was", 0o400)


def planned(folder: Path, pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    decisions = plan_stages(pipeline, pipeline.stage_kinds, folder / "outputs")
    return {name: (decision.action, decision.reason) for name, decision in decisions.items()}


def test_a_plan_says_for_each_stage_what_would_happen_and_why(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    outputs, reused = tmp_path / "outputs", ("adopt", f"same fingerprint as run {run.id}")
    never = ("run", "never made before")
    assert planned(tmp_path, run.pipeline) == {"first": never, "second": ("depends", "after first")}
    finish(run, "first")
    assert planned(tmp_path, run.pipeline) == {"first": reused, "second": never}
    decision = decide_reuse(outputs, run.stage_path("first"), fingerprint_of(run.pipeline, "first"))
    assert (decision.action, decision.reason) == ("reuse", "done in this run")
    finish(run, "second")
    assert planned(tmp_path, run.pipeline) == {"first": reused, "second": reused}
    changed = counting(tmp_path, "second.arguments.steps=9")
    reason = f"changed since run {run.id}: entry.arguments.steps 4 -> 9"
    assert planned(tmp_path, changed)["second"] == ("run", reason)
    several = counting(tmp_path, "second.arguments={crash_at = 1, refuse = 2, steps = 3}")
    reason = "entry.arguments.crash_at nothing -> 1; entry.arguments.refuse nothing -> 2 and 1 more"
    assert planned(tmp_path, several)["second"][1].endswith(reason)


def test_a_plan_compares_with_the_same_stage_of_the_newest_run_of_the_same_pipeline_alone(tmp_path: Path) -> None:
    finish(counting_run(tmp_path, "first.arguments.steps=7"), "first")
    newest = counting_run(tmp_path, "first.arguments.steps=8")
    finish(newest, "first")
    finish(counting_run(tmp_path, "first.arguments.steps=9", "pipeline.name=stranger"), "first")
    current = counting_run(tmp_path)
    reason = f"changed since run {newest.id}: entry.arguments.steps 8 -> 3"
    assert planned(tmp_path, current.pipeline)["first"] == ("run", reason)
    finish(current, "first")
    found = planned(tmp_path, current.pipeline)["second"]
    assert found == ("run", "never made before"), "stages of the same kind there are, but none of its name"


def test_a_plan_compares_with_the_nearest_run_even_where_a_newer_one_differs_more(tmp_path: Path) -> None:
    near = counting_run(tmp_path, "first.arguments.steps=7")
    finish(near, "first")
    finish(counting_run(tmp_path, "first.arguments={crash_at = 1, refuse = 2, steps = 8}"), "first")
    reason = f"changed since run {near.id}: entry.arguments.steps 7 -> 3"
    assert planned(tmp_path, counting(tmp_path))["first"] == ("run", reason)


def test_a_result_whose_launcher_was_killed_before_it_was_registered_is_found_by_other_runs(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    path = finish(run, "first")
    shutil.rmtree(tmp_path / "outputs" / ".cosmos" / "fingerprints")
    update_state(path, state="stopped")
    assert planned(tmp_path, run.pipeline)["first"][0] == "run"
    assert find_result(run, run.pipeline.stage("first"), fingerprint_of(run.pipeline, "first")) is not None
    assert planned(tmp_path, run.pipeline)["first"] == ("adopt", f"same fingerprint as run {run.id}")


def test_a_plan_says_that_a_stage_was_begun(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (finish(run, "first") / "result.json").unlink()
    assert planned(tmp_path, run.pipeline)["first"] == ("run", f"unfinished in run {run.id}")


def test_another_learning_rate_makes_sft_again_and_what_is_behind_it_but_not_the_rows(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    run = create_run(load_recipe(tmp_path))
    for name in ("prepare", "sft", "validate", "export"):
        finish(run, name, name)
    (tmp_path / "README.md").write_text("changed")
    (tmp_path / "model" / "README.md").write_text("changed")
    assert {action for action, _ in planned(tmp_path, load_recipe(tmp_path)).values()} == {"adopt"}
    assert planned(tmp_path, load_recipe(tmp_path, "train.optm_lr=1e-3")) == {
        "prepare": ("adopt", f"same fingerprint as run {run.id}"),
        "sft": ("run", f"changed since run {run.id}: train.optm_lr 1e-06 -> 0.001"),
        "validate": ("depends", "after sft"),
        "export": ("depends", "after sft"),
    }


def test_a_plan_notices_damage_and_takes_the_result_of_another_run_where_that_is_whole(tmp_path: Path) -> None:
    first, second = (counting_run(tmp_path, f"train.timestamp='2001010100000{number}'") for number in (2, 1))
    outputs = tmp_path / "outputs"
    for run in (first, second):
        finish(run, "first")
    (second.stage_path("first") / "out" / "a.txt").unlink()
    expected = fingerprint_of(second.pipeline, "first")
    decision = decide_reuse(outputs, second.stage_path("first"), expected)
    assert (decision.action, decision.reason) == ("adopt", f"same fingerprint as run {first.id}")
    (first.stage_path("first") / "out" / "a.txt").write_text("altered")
    decision = decide_reuse(outputs, second.stage_path("first"), expected)
    assert (decision.action, decision.reason) == ("run", "made before, but out/a.txt is gone")
    reason = f"made before, but run {first.id}: out/a.txt has 7 bytes instead of 6"
    assert planned(tmp_path, second.pipeline)["first"] == ("run", reason)


def test_a_plan_survives_damaged_records_of_other_runs(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    path = finish(run, "first")
    other = counting(tmp_path, "first.arguments.steps=9")
    for damage in ("{", "[]", "{}", '{"ingredients": {"kind": "custom"}}', '{"ingredients": 3}'):
        (path / "fingerprint.json").write_text(damage)
        assert planned(tmp_path, other)["first"][0] == "run"
    for entry in (tmp_path / "outputs" / ".cosmos" / "fingerprints").rglob("*.json"):
        entry.write_text("[")
    assert planned(tmp_path, run.pipeline)["first"][0] == "run"


def test_a_plan_starts_nothing_that_looks_at_the_outside_world_from_memory(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    text = (tmp_path / "counting.toml").read_text()
    gate = '\n[[pipeline.stages]]\nname = "gate"\nkind = "gate"\nafter = "second"\nrequire = "count > 1"\n'
    (tmp_path / "counting.toml").write_text(text + gate)
    pipeline = load_pipeline(tmp_path / "counting.toml", (), run.pipeline.stage_kinds)
    finish(run, "first")
    finish(run, "second")
    assert planned(tmp_path, pipeline)["gate"] == ("run", "looks at the outside world, so it runs each time")


def test_a_plan_of_a_missing_input_is_one_line(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        planned(tmp_path, pipeline)
    assert str(caught.value) == f"train.train_policy.dataset.name = '{tmp_path}/rows.jsonl': no such file or folder"


def test_a_copy_of_a_run_on_a_read_only_disk_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, value: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    shutil.copytree(made(tmp_path / "s"), tmp_path / "copy")  # with other inodes
    monkeypatch.setattr("cosmos_core.run.manifest.write_json", refuse)
    assert problem_of(tmp_path / "copy") is None
    (tmp_path / "copy" / "c.txt").write_text("twO")
    assert problem_of(tmp_path / "copy") == "c.txt was altered"


def test_what_is_taken_over_is_on_the_disk_before_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), sync(file)))
    result = result_of(made(tmp_path / "s"))
    synced.clear()
    adopt_result(tmp_path / "s", tmp_path / "t", result)
    assert [Path(name).name.split(".")[1] for name in synced[:3]] == ["a", "c", "result"]


def test_outputs_may_come_from_a_generator_and_info_may_hold_a_summary_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a").write_text("1")
    outcome = Outcome(outputs=(name for name in ["model/a"]), info={"model": "model", "data": {"rows": "x" * 300}})  # type: ignore[arg-type]
    result = commit_manifest(tmp_path, outcome, kind="sft", fingerprint="f", inputs={})
    assert [record["path"] for record in result["outputs"]] == ["model/a"]
