"""How the stages of a run are performed: once, again where something changed, and not where it cannot help."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.load import read_toml
from cosmos_core.errors import ConfigError, GateFailed, StageFailed
from cosmos_core.observe.record import read_run
from cosmos_core.run.directory import Run, open_run
from cosmos_core.run.liveness import PublicationApproval, save_approval
from cosmos_core.run.manifest import read_result
from cosmos_core.run.process import identify_process
from cosmos_core.run.state import read_state, update_state
from cosmos_core.upload.file import FileTarget
from tasks import stage
from tasks.kinds import all_kinds
from tasks.publication import compute_models_digest
from tasks.stage import run_stage, should_retry
from tests import attempts
from tests.conftest import processes_below, wait_until
from tests.unit.run_folder import counting_run, finish


def visits(run_path: Path, stage: str = "first") -> list[str]:
    file = run_path / "stages" / stage / "visits.txt"
    return file.read_text().splitlines() if file.exists() else []


def performing(run_path: Path) -> subprocess.Popen[str]:
    program = (
        "import sys\nfrom pathlib import Path\nfrom cosmos_core.run.directory import open_run\n"
        "from tasks.kinds import all_kinds\nfrom tasks.stage import run_stage\n"
        "for name in ('first', 'second'):\n"
        "    print(run_stage(open_run(Path(sys.argv[1]), all_kinds()), name)[1])\n"
    )
    environment = {**os.environ, "COSMOS_WORKSPACE": str(run_path)}
    command = [sys.executable, "-c", program, str(run_path)]
    here = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def _stages_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts.use(monkeypatch)


def test_two_launchers_of_a_run_and_another_run_that_wants_the_same_result_make_it_once(tmp_path: Path) -> None:
    run, other = (counting_run(tmp_path, "first.arguments={steps = 10, seconds = 0.1}") for _ in range(2))
    processes = [performing(path) for path in (run.path, run.path, other.path)]
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [sorted(each) for each in zip(*answers, strict=True)] == [["False", "True", "True"]] * 2, "each stage, once"
    for name in ("first", "second"):
        assert sorted(visits(path, name) for path in (run.path, other.path)) == [[], ["start 0"]]
    chains = {(each.stage_path("first") / "out.txt").read_text() for each in (run, other)}
    assert len(chains) == 1
    wait_until(lambda: not processes_below(tmp_path), 15, "nothing is left running")


def test_a_result_is_reused_across_runs_and_made_again_when_it_was_damaged(tmp_path: Path) -> None:
    first = counting_run(tmp_path)
    assert run_stage(first, "first")[1] is False
    second = counting_run(tmp_path)
    result, was_reused = run_stage(second, "first")
    assert was_reused
    assert result["reused_from"] == str(first.stage_path("first"))
    assert visits(second.path) == []
    out = second.stage_path("first") / "out.txt"
    right = out.read_text()
    out.write_text("altered")  # its own copy, so the other run is whole
    assert run_stage(second, "first")[1] is True
    assert out.read_text() == right == (first.stage_path("first") / "out.txt").read_text()
    out.unlink()
    assert run_stage(second, "first")[1] is True, "the other run still has it"
    assert out.read_text() == right


def test_a_stage_works_on_the_run_that_its_flow_opened(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (run.path / "pipeline.toml").unlink()  # reading it again in each stage made a run quadratic in its stages
    assert run_stage(run, "first")[1] is False
    assert should_retry(run, "first", StageFailed("crashed"))
    assert not should_retry(run, "first", GateFailed("no"))


def gated(folder: Path, least: int) -> Run:
    """A run whose counting stages are done, with a gate behind them."""
    run = counting_run(folder)
    for name in ("first", "second"):
        finish(run, name, count=1.0)
    gate = f'\n[[pipeline.stages]]\nname = "gate"\nkind = "gate"\nafter = "second"\nrequire = "count > {least}"\n'
    with open(run.path / "pipeline.toml", "a") as file:
        file.write(gate)
    return open_run(run.path, all_kinds())


def test_the_time_of_a_gate_ends_with_its_refusal(tmp_path: Path) -> None:
    run = gated(tmp_path, 1)
    with pytest.raises(GateFailed):
        run_stage(run, "gate")
    assert read_state(run.stage_path("gate")).total_seconds(time.time() + 3600) < 60


def test_a_stage_that_was_killed_in_the_process_of_its_flow_takes_no_more_time(tmp_path: Path) -> None:
    run = gated(tmp_path, 0)
    hour_ago = time.time() - 3600
    dead = identify_process() | {"launcher_started": 0.5}
    update_state(run.stage_path("gate"), state="running", attempt=1, spans=[(hour_ago, None)], **dead)
    [gate_record] = [stage for stage in read_run(run.path).stages if stage.name == "gate"]
    assert (gate_record.status, gate_record.seconds) == ("died", 0.0)
    run_stage(run, "gate")
    assert read_state(run.stage_path("gate")).total_seconds(time.time()) < 60, "a pause before a resume does not count"


def test_what_is_verified_may_have_kept_size_time_and_inode(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    run_stage(run, "first")
    out = run.stage_path("first") / "out.txt"
    right, status = out.read_text(), out.stat()
    with open(out, "r+") as file:
        file.write("?")
    os.utime(out, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run_stage(run, "first")[1] is True
    assert run_stage(replace(run, should_verify_files=True), "first")[1] is False
    assert out.read_text() == right


def test_another_setting_moves_the_old_content_aside_instead_of_going_on_in_it(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    finish(run, "first", count=3.0)
    saved = copy.deepcopy(read_toml(run.path / "pipeline.toml"))
    saved["pipeline"]["stages"][0]["arguments"]["steps"] = 5
    (run.path / "pipeline.toml").write_text(tomli_w.dumps(saved))
    result, was_reused = run_stage(open_run(run.path, all_kinds()), "first")
    assert not was_reused
    assert result["metrics"] == {"count": 5.0}
    assert visits(run.path) == ["start 0"]
    older = read_result(run.path / "superseded" / "first.1")
    assert older is not None
    assert older["metrics"] == {"count": 3.0}


def test_only_the_models_that_a_person_has_approved_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a flow for one stage, nor by a run that is resumed with other rows, nor by the machine of a work pool,
    which does not have the approval."""
    run = counting_run(tmp_path)
    with open(run.path / "pipeline.toml", "a") as file:
        file.write(
            '\n[[pipeline.stages]]\nname = "publish"\nkind = "upload"\nafter = "second"\nmodel = "stage:second"\n'
            f'target = "{tmp_path}/published"\n'
        )
    run = open_run(run.path, all_kinds())
    finish(run, "first", count=1.0)
    finish(run, "second", count=1.0)
    digest = compute_models_digest(run)
    (run.path / "locks").mkdir(exist_ok=True)
    for approved in ("", digest):
        save_approval(run.path, PublicationApproval(approved_models=approved))
        with nullcontext() if approved else pytest.raises(ConfigError, match="only models that a person has approved"):
            run_stage(run, "publish")
    assert len(FileTarget(str(tmp_path / "published")).history()) == 1
    finish(run, "second", content="others", count=1.0)
    with pytest.raises(ConfigError, match=r"only models that a person has approved .*, not these: approve or retry"):
        run_stage(run, "publish")
    save_approval(run.path, None)
    run_stage(run, "publish")
    assert len(FileTarget(str(tmp_path / "published")).history()) == 2
    remote = Run(run.path, run.pipeline.with_stages(
        each.model_copy(update={"work_pool": "gpu"}) if each.name == "publish" else each for each in run.pipeline.stages
    ))  # fmt: skip
    monkeypatch.setattr(stage, "run_remote_stage", lambda *_: ({"made": "there"}, False))
    monkeypatch.setattr(stage.events, "emit_stage_failed", lambda *_: None)
    save_approval(run.path, PublicationApproval(approved_models=digest))
    refused: Any = stage.produce_result(remote, "publish")
    assert refused.is_failed() and read_state(run.stage_path("publish")).exit_code == 64
    save_approval(run.path, PublicationApproval(approved_models=compute_models_digest(run)))
    assert stage.produce_result(remote, "publish") == {"made": "there"}
