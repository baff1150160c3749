"""`pipeline.private`: who may read the folder of a run, on every machine that works on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cosmos_core.run.directory import create_run, find_differing_keys, open_run
from tasks.stage import run_stage
from tests.cells import full
from tests.effects.change import Change, changes
from tests.effects.test_pipeline import ALONE, pipeline, sides


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@changes(
    (Change("pipeline.private", True, ALONE), (0o700, 0)), (Change("pipeline.private", False, ALONE), (0o755, 0o44))
)
def test_it_changes_who_may_read_the_folder_of_a_run(change: Change, expected: tuple[int, int], tmp_path: Path) -> None:
    """Also where another machine made its copy of the folder, and in the files that a public run takes over."""
    old = os.umask(0o022)
    try:
        without, with_it = sides(change, tmp_path)
        run = create_run(with_it)
        run.path.chmod(0o755)
        run = open_run(run.path, run.pipeline.stage_kinds)
        assert run.path.stat().st_mode & 0o777 == expected[0]
        run_stage(run, "second")
        assert (run.stage_path("second") / "result.json").stat().st_mode & 0o77 == expected[1]
        assert create_run(without).path.stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(old)


@pytest.mark.parametrize(
    ("umask", "private", "mode"), [*full((0o077, None, 0o700)), (0o027, None, 0o750), (0o002, True, 0o700)]
)
def test_the_umask_of_the_user_is_kept_and_goes_with_the_run(
    umask: int, private: bool | None, mode: int, tmp_path: Path
) -> None:
    given = pipeline({**ALONE, **({"pipeline.private": private} if private else {})}, tmp_path)
    old = os.umask(umask)
    try:
        run = create_run(given)
    finally:
        os.umask(old)
    assert run.path.stat().st_mode & 0o777 == mode
    run.path.chmod(0o755)
    assert bool(open_run(run.path, run.pipeline.stage_kinds).pipeline.config.private) is (mode == 0o700)
    assert (run.path.stat().st_mode & 0o777 == 0o700) is (mode == 0o700)
    assert not find_differing_keys(run.path, given), "the same settings go on with it"
