"""Following a file that grows: whole characters, whole lines, and no byte read twice."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.observe.tail import print_log
from cosmos_core.run.state import update_state
from cosmos_core.run.tail import FileTail

TEXT = "größer 🎉\n"


def append(file: Path, data: bytes) -> None:
    with open(file, "ab") as opened:
        opened.write(data)


def test_a_character_that_is_split_between_two_reads_is_one_character(tmp_path: Path) -> None:
    data = TEXT.encode()
    for cut in range(1, len(data)):
        file = tmp_path / f"{cut}.log"
        tail = FileTail(file)
        assert tail.read_text() == ""
        append(file, data[:cut])
        first = tail.read_text()
        append(file, data[cut:])
        assert first + tail.read_text() == TEXT


def test_bytes_that_are_no_text_become_marks_and_a_cut_character_at_the_end_too(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"a\xffb" + "ü".encode()[:1])
    tail = FileTail(file)
    assert tail.read_text() == "a\ufffdb"
    assert tail.read_text(is_last_read=True) == "\ufffd"


def test_lines_are_given_once_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("one\ntw")
    tail = FileTail(file)
    assert tail.read_lines() == ["one"]
    append(file, b"o\nthree")
    assert tail.read_lines() == ["two"]
    assert tail.read_lines(is_last_read=True) == ["three"]


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("1\n2\n3\n")
    tail = FileTail(file)
    assert tail.read_lines() == ["1", "2", "3"] and not tail.was_replaced
    shorter = tmp_path / "shorter"
    shorter.write_text("1\n")
    shorter.replace(file)
    append(file, b"4\n5\n")
    assert tail.read_lines() == ["1", "4", "5"] and tail.was_replaced
    assert tail.read_lines() == [] and not tail.was_replaced


def test_logs_of_a_run_that_another_version_made_are_shown_and_a_misspelt_stage_is_named(tmp_path: Path) -> None:
    log = tmp_path / "stages/sft/logs/attempt_1.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    (tmp_path / "pipeline.toml").write_text('[pipeline]\nname = "p"\ngone = 1\n[[pipeline.stages]]\nname = "sft"\n')
    show = partial(CliRunner().invoke, app, catch_exceptions=False)
    assert show(["logs", str(tmp_path), "sft"]).output == "first\n"
    for arguments, message in (
        (["logs", str(tmp_path), "stf"], "no stage 'stf' in this run; did you mean 'sft'"),
        (["resume", str(tmp_path)], "pipeline.gone: unknown key; if another version made the run, continue it with"),
    ):
        with pytest.raises(ConfigError, match=message):
            show(arguments)


@pytest.mark.parametrize("between", ["retrying", "running"])
def test_a_followed_log_shows_whole_characters_and_goes_on_with_the_next_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], between: Literal["retrying", "running"]
) -> None:
    stage, data = tmp_path / "stages" / "sft", TEXT.encode()
    logs = [stage / "logs" / f"attempt_{i}.log" for i in (1, 2)]
    logs[0].parent.mkdir(parents=True)
    logs[0].write_bytes(data[:3])
    update_state(stage, state=between)

    def go_on() -> None:
        append(logs[0], data[3:])
        logs[1].write_text("second\n")
        update_state(stage, state="done")

    timer = threading.Timer(0.3, go_on)
    timer.start()
    print_log(tmp_path, "sft", should_follow=True)
    timer.join()
    assert capsys.readouterr().out == f"{TEXT}second\n"
