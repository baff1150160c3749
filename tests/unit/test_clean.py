"""Retention: which runs may be removed, and that nothing goes that something that stays needs."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.launch.clean import decide_retention
from cosmos_core.run.directory import Run, claim_run, create_run, list_runs
from cosmos_core.run.files import read_json, write_json
from cosmos_core.run.liveness import PublicationApproval, save_approval
from cosmos_core.run.lock import FileLock
from cosmos_core.run.manifest import read_result
from cosmos_core.run.plan import get_reuse_folder
from cosmos_core.run.retrain_state import RetrainState, save_retrain_state
from cosmos_core.run.state import update_state
from cosmos_core.upload.base import open_target
from tests.unit.run_folder import counting_run, finish

DAY = 24 * 3600.0


def runs_of(folder: Path, *ages_days: float) -> list[Run]:
    """Finished runs that are so old."""
    found: list[Run] = []
    for number, age in enumerate(ages_days):
        run = create_run(found[0].pipeline, run_id=f"run-{number}") if found else counting_run(folder)
        then = time.time() - age * DAY
        write_json(run.path / "run.json", {**read_json(run.path / "run.json"), "started": then})
        for name in ("first", "second"):
            finish(run, name, f"made by {number}")
            update_state(run.stage_path(name), state="done", ended=then)
        found.append(run)
    return found


def fates(run: Run, keep: int = 1, older_than_days: float = 0.0) -> dict[str, str]:
    found = decide_retention(run.output_dir, num_kept_runs=keep, older_than_seconds=older_than_days * DAY)
    return {verdict.path.name: verdict.reason_to_keep for verdict in found}


def cosmos(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return done.output


def test_age_and_number_both_keep_and_old_runs_go_after_they_were_shown_and_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    runs = runs_of(tmp_path, 40, 30, 1)
    first, output_dir = runs[0], runs[0].output_dir
    assert fates(first, keep=2) == {first.id: "", "run-1": "one of the newest 2 of its pipeline",
                                    "run-2": "one of the newest 2 of its pipeline"}  # fmt: skip
    assert fates(first, keep=0, older_than_days=35) == {first.id: "", "run-1": "not old enough",
                                                        "run-2": "not old enough"}  # fmt: skip
    assert set(fates(first, keep=0).values()) == {""}
    with pytest.raises(ConfigError, match="--older-than '30 dys': write a number and a unit: 12h or 30d"):
        cosmos("clean", "--older-than", "30 dys", "--output-dir", str(output_dir))
    result = read_result(runs[0].stage_path("first"))
    assert result is not None
    own = [output_dir / ".cosmos" / "retraining" / "x" / f"{number}.json" for number in range(3)]
    for run, note in zip(runs, own, strict=True):
        save_retrain_state(note, RetrainState(digest="d", run_id=run.id))
    said = cosmos("clean", "--keep", "1", "--output-dir", str(output_dir))
    assert said.splitlines()[0].startswith(f"{runs[0].id}  ") and said.splitlines()[0].endswith("  goes")
    assert said.splitlines()[2].endswith("stays: the newest of its pipeline")
    assert "2 of 3 runs may be removed" in said and said.rstrip().endswith("remove them with --yes")
    assert all(run.path.is_dir() for run in runs)
    assert "removed 2 of 3 runs" in cosmos("clean", "--keep", "1", "--yes", "--output-dir", str(output_dir))
    assert [facts.run_id for facts in list_runs(output_dir)] == [runs[2].id]
    assert [entry["run_id"] for entry in read_json(output_dir / "runs.json") or []] == [runs[2].id]
    assert not list(get_reuse_folder(output_dir, result["fingerprint"]).glob(f"{runs[0].id}.*"))
    assert not list((output_dir / ".cosmos" / "removed").iterdir())
    assert [note.exists() for note in own] == [False, False, True]


def test_what_a_run_that_stays_refers_to_stays_and_so_on(tmp_path: Path) -> None:
    first, second, third, last = runs_of(tmp_path, 40, 30, 20, 1)
    for run, source in ((last, third), (third, first)):
        path = run.stage_path("first") / "result.json"
        path.write_text(path.read_text().replace('"reused_from": null', f'"reused_from": "{source.path}/stages/first"'))
    assert fates(last) == {
        first.id: f"run {third.id} refers to it", second.id: "", third.id: f"run {last.id} refers to it",
        last.id: "the newest of its pipeline",
    }  # fmt: skip


def test_a_run_that_runs_or_is_taken_up_meanwhile_stays(tmp_path: Path) -> None:
    first, second, _ = runs_of(tmp_path, 40, 30, 1)
    (second.stage_path("second") / "result.json").unlink()
    compiles = {"heartbeat": time.time() - 3000, "renewed": time.time() - 2}
    for elsewhere in ({"heartbeat": time.time() - 60}, compiles):
        update_state(second.stage_path("second"), state="running", **elsewhere)
        with claim_run(first):
            assert fates(first) == {first.id: "it is running", second.id: "it is running",
                                    "run-2": "the newest of its pipeline"}  # fmt: skip
    found = decide_retention(first.output_dir, num_kept_runs=1, older_than_seconds=0)
    assert [verdict.path for verdict in found if not verdict.reason_to_keep] == [first.path]


def test_what_is_published_and_what_a_rollback_would_bring_back_stays(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, 40, 30, 20, 1)
    target = str(tmp_path / "published")
    publish_runs(runs[:3], target)
    why = f"its model is published at {target}"
    assert list(fates(runs[0]).values()) == ["", why, why, "the newest of its pipeline"]
    (runs[2].stage_path("out") / "result.json").unlink()
    (runs[2].stage_path("out") / "publication.json").write_text("{}")
    assert list(fates(runs[0]).values()) == ["", why, why, "the newest of its pipeline"], "an upload that is made again"
    (runs[2].path / "superseded").mkdir()
    runs[2].stage_path("out").rename(runs[2].path / "superseded" / "out.1")
    assert list(fates(runs[0]).values()) == ["", why, why, "the newest of its pipeline"], "with --from-stage"
    (tmp_path / "published").rename(tmp_path / "away")
    assert [reason.partition(":")[0] for reason in fates(runs[0]).values()] == [
        *[f"{target} cannot be asked what is published"] * 3, "the newest of its pipeline",
    ], "a disk that is not mounted"  # fmt: skip
    (tmp_path / "away").rename(tmp_path / "published")
    (tmp_path / "published" / "latest" / "published.json").write_text("{")
    assert [reason.partition(":")[0] for reason in fates(runs[0]).values()] == [
        *[f"{target} cannot be asked what is published"] * 3, "the newest of its pipeline",
    ]  # fmt: skip


def test_of_a_target_that_keeps_no_records_the_published_model_stays(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(
        "class Shelf:\n"
        "    versions = []\n"
        "    def __init__(self, location): pass\n"
        "    def publish(self, folder, version, record): self.versions.append(record); return version\n"
        "    def published(self): return self.versions[-1]\n"
        "    def history(self): return [record['version'] for record in self.versions]\n"
    )
    runs = runs_of(tmp_path, 40, 30, 1)
    target = f"{tmp_path}/shelf.py:Shelf://"
    publish_runs(runs[:2], target)
    assert list(fates(runs[0]).values()) == ["", f"its model is published at {target}", "the newest of its pipeline"]


def publish_runs(runs: list[Run], target: str) -> None:
    """Let each of these runs have published its model at `target`."""
    folder = runs[0].output_dir.parent / "model"
    folder.mkdir()
    for run in runs:
        text = (run.path / "pipeline.toml").read_text()
        stage = f'\n[[pipeline.stages]]\nname = "out"\nkind = "upload"\nmodel = "stage:second"\ntarget = "{target}"\n'
        (run.path / "pipeline.toml").write_text(text + stage)
        record = {"version": f"{run.id}-v", "run_id": run.id, "metrics": {}, "files": {}}
        published = open_target(target).publish(folder, f"{run.id}-v", record)
        result = read_json(run.stage_path("first") / "result.json")
        assert isinstance(result, dict)
        result["info"] = {"published": published}
        run.stage_path("out").mkdir()
        (run.stage_path("out") / "result.json").write_text(json.dumps(result))


def test_a_run_stays_that_retraining_goes_on_with_or_whose_model_waits_for_approval(tmp_path: Path) -> None:
    first, *_ = runs_of(tmp_path, 40, 1)
    note = first.output_dir / ".cosmos" / "retraining" / "x.json"
    note.parent.mkdir(parents=True)
    for outcome, reason in (("", "the next retraining goes on with it"), ("published", "")):
        write_json(note, {"digest": "d", "run_id": first.id, "outcome": outcome})
        assert fates(first)[first.id] == reason
    claim_run(first).release()
    for seconds, is_declined, reason in (
        (3600, False, "its publication waits for approval"), (3600, True, ""), (-1, False, ""),
    ):  # fmt: skip
        save_approval(first.path, PublicationApproval(until=time.time() + seconds, is_declined=is_declined))
        assert fates(first)[first.id] == reason


def test_what_was_fetched_from_stores_goes_when_no_run_that_is_left_names_it(tmp_path: Path) -> None:
    old, new = runs_of(tmp_path, 40, 1)
    fetched = old.output_dir / ".cosmos" / "fetched"
    digests = {name: str(number) * 64 for number, name in enumerate(("old", "both", "new", "cut", "now"))}
    for name, digest in digests.items():
        (fetched / (f"{digest}.partial" if name == "cut" else digest)).mkdir(parents=True)
    for run, names in ((old, ("old", "both")), (new, ("both", "new"))):
        with open(run.path / "pipeline.toml", "a") as file:
            file.writelines(f"# s3://models/m#{digests[name]}\n" for name in names)
    with FileLock(fetched / f"{digests['now']}.lock") as fetching:
        assert fetching.try_acquire()
        cosmos("clean", "--keep", "1", "--yes", "--output-dir", str(old.output_dir))
    left = {path.name for path in fetched.iterdir() if path.is_dir()}
    assert left == {digests["both"], digests["new"], digests["now"]}


def test_a_run_of_another_user_stays_and_stops_neither_clean_nor_reap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be read, and not written, as with the usual umask."""
    mine, other = runs_of(tmp_path, 40, 30)
    for run in (mine, other):
        claim_run(run).release()
    update_state(mine.stage_path("first"), state="retrying", launcher_pid=2**22 + 1, launcher_started=1.0)
    open_file = os.open

    def open_own_file(path: Path, flags: int, *mode: int) -> int:
        if Path(path).is_relative_to(other.path) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_own_file)
    output_dir = ["--output-dir", str(mine.output_dir)]
    assert cosmos("reap", *output_dir) == f"{mine.id}/first: ended; it goes on with: cosmos resume {mine.path}\n"
    assert fates(mine, keep=0) == {mine.id: "", other.id: "no permission to write it"}
    cosmos("clean", "--yes", "--keep", "0", *output_dir)
    assert other.path.is_dir() and not mine.path.exists()
