"""What the program of a worker makes of the ways in which a user's function may end."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.cluster import group
from cosmos_core.cluster.group import RankRaised
from cosmos_core.cluster.rank import RankMessages, Rendezvous
from cosmos_core.errors import Preempted, ProgramError
from cosmos_core.registry import import_user_code
from cosmos_core.run import stage as stage_module
from cosmos_core.train import generation
from cosmos_core.types import Outcome
from cosmos_core.worker import program
from tests.effects.change import GRPO, recipe


def test_secrets_in_tables_of_custom_and_arguments_are_masked_also_in_processes_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(env=("JUDGE",), arguments={"judge": {"model": "m", "password": "two words"}})
    stage = SimpleNamespace(config=config, recipe=SimpleNamespace(custom={"judge": {"password": "battery staple"}}))
    masked: list[str] = []
    monkeypatch.setattr(stage_module, "mask_secrets", lambda names, values: masked.extend((*names, *values)))
    monkeypatch.setattr(generation, "configure_logging", lambda level: None)
    monkeypatch.setattr(generation, "load_stage", lambda folder: stage)
    monkeypatch.setattr(generation, "open_engine", lambda stage, beat: stage)
    generation._open_separate_engine(tmp_path, lambda: None)
    assert masked == ["JUDGE", "battery staple", "two words"]


def test_what_every_rank_would_warn_of_is_said_by_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr(program, "configure_logging", levels.append)
    alike = logging.getLogger("cosmos_core.train.weight_sets")
    own = [logging.getLogger(f"cosmos_core.{name}") for name in ("tools.runner", "models.kernels", "rollout.registry")]
    try:
        for is_first in (True, False):
            program._configure_rank_logging(is_first_rank=is_first)
            assert alike.isEnabledFor(logging.WARNING) is is_first and alike.isEnabledFor(logging.ERROR)
            assert all(each.isEnabledFor(logging.WARNING) for each in own), "of its own tools, and of its machine"
    finally:
        for name in (*program._PACKAGES_THAT_WARN_ON_EACH_RANK, *program._MODULES_THAT_WARN_OF_THE_MACHINE):
            logging.getLogger(name).setLevel(logging.NOTSET)
    assert levels == ["INFO", "WARNING"]


def test_of_what_is_logged_the_progress_has_warnings_and_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cosmos_core")
    monkeypatch.setattr(program, "send_to_sinks", nullcontext)
    told: list[str] = []
    stage: Any = SimpleNamespace(
        name="mine",
        config=SimpleNamespace(entry="mine.py:main", arguments={}),
        kind=SimpleNamespace(makes=""),
        metrics=SimpleNamespace(line_callbacks=[]),
        progress=SimpleNamespace(warn=told.append),
    )

    def log(_: Any) -> Outcome:
        for level in ("info", "warning", "error"):
            getattr(logging.getLogger("cosmos_core.train.loop"), level)("told with %s", level)
        return Outcome()

    program._run_with_metrics(stage, log)
    log(stage)  # by another stage in this process
    assert told == ["told with warning", "told with error"]
    assert [each.levelname for each in caplog.records] == ["INFO", "WARNING", "ERROR"] * 2


def test_a_function_that_exits_as_a_script_does_is_one_line() -> None:
    """Otherwise the log alone tells why the stage has crashed, or that it wrote no result."""
    stage: Any = SimpleNamespace(name="mine", config=SimpleNamespace(entry="mine.py:main", arguments={}))
    for code in (0, "no rows left"):
        with pytest.raises(ProgramError, match=f"^stage 'mine': mine.py:main exited with {code!r} instead of"):
            program._call_program(lambda _, code=code: sys.exit(code), stage)
    with pytest.raises(Preempted):
        program._call_program(lambda _: sys.exit(75), stage)  # it has saved, and goes on when the run is resumed


@pytest.mark.parametrize("key", ["train.train_policy.trainer_type", "rollout.backend", "policy.model_class"])
def test_an_error_in_a_users_algorithm_engine_or_family_names_key_file_and_line(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def step(self, call):\n        return call()\n")
    stage: Any = SimpleNamespace(
        name="rl",
        config=SimpleNamespace(entry="", arguments={}),
        recipe=recipe({**GRPO, key: f"{tmp_path}/mine.py:Mine"}),
    )
    mine = import_user_code(f"{tmp_path}/mine.py:Mine")()

    def divide() -> float:
        return 1 / 0

    message = rf"^{key} = '.*mine\.py:Mine': ZeroDivisionError: division by zero \(.*mine\.py:3\)$"
    with pytest.raises(ProgramError, match=message):
        program._call_program(lambda _: mine.step(divide), stage)
    with pytest.raises(ZeroDivisionError):
        program._call_program(lambda _: divide(), stage)  # not of the user
    monkeypatch.setattr(group, "open_process_group", lambda rendezvous: nullcontext())
    rank_program = lambda _: program._call_program(lambda _: mine.step(divide), stage)  # noqa: E731
    is_done, error = group.run_as_rank(rank_program, RankMessages(), Rendezvous(1, 2, "127.0.0.1", 1, 0))
    assert not is_done and isinstance(error, RankRaised) and re.match(message.replace("^", "rank 1: "), str(error))
    assert "Traceback" in (log := capfd.readouterr().err) and "return 1 / 0" in log

    def lose_connection() -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        program._call_program(lambda _: mine.step(lose_connection), stage)  # is tried again
