"""A metric sink in a user's own file: it is told what ours are told, and its trouble costs a line in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.run.inputs import check_inputs
from cosmos_core.train import check
from tasks.kinds import all_kinds
from tests.unit.run_folder import load_recipe, make_inputs
from tests.unit.test_sinks import make_stage, steps_on_disk, train

USERS_SINK = """
import json

class Lines:
    starting_step = 0

    def __init__(self, stage, first_step):
        self.file = open(stage.path / "mine.txt", "a")
        self.starting_step = first_step

    def log(self, line):
        self.file.write(f"{line['step']} {line['loss']:.3f}\\n")

    def close(self, exit_code):
        self.file.write(f"end {exit_code}\\n")
        self.file.close()
"""


def test_a_users_class_is_a_sink(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS_SINK)
    for first, last in ((1, 3), (3, 4)):
        train(make_stage(tmp_path / "r1", f"{tmp_path}/mine.py:Lines"), first, last)
    written = (tmp_path / "r1" / "stages" / "sft" / "mine.txt").read_text().splitlines()
    assert written == ["1 0.500", "2 0.333", "3 0.250", "end 0", "3 0.250", "4 0.200", "end 0"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise OSError('no\\ndisk')", "cannot be imported: OSError: no disk"),
        ("class Lines:\n    pass", "TypeError: Lines() takes no arguments"),
        ("", "has no 'Lines'"),
    ],
)
def test_a_users_sink_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    stage = make_stage(tmp_path / "r1", f"{tmp_path}/mine.py:Lines")
    train(stage, 1, 3)
    assert steps_on_disk(stage) == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said in warning and warning.endswith("training does not need it, metrics.jsonl is complete")


def test_a_users_sink_is_found_from_any_folder_and_missed_before_anything_runs(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "Mine.py").write_text(USERS_SINK)
    found = load_recipe(tmp_path, f"logging.logger=['Console', '{tmp_path}/Mine.py:Lines']")
    assert found.recipes["sft"].logging.logger == ("console", f"{tmp_path}/Mine.py:Lines")
    check_inputs(found)
    with pytest.raises(ConfigError, match=r"logging\.logger: '.*gone\.py:Lines': file .*gone\.py does not exist"):
        check_inputs(load_recipe(tmp_path, f"logging.logger=['{tmp_path}/gone.py:Lines']"))


def test_a_users_sink_that_cannot_be_imported_is_found_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise OSError('no disk')")
    stage = make_stage(tmp_path / "r1", f"{tmp_path}/mine.py:Lines")
    stage.kind = all_kinds()["prepare"]
    with pytest.raises(ConfigError, match=r"mine\.py:Lines' cannot be imported: OSError: no disk"):
        check.run(stage)
