"""Attempts of stages in this process, for tests of what is around them: a worker under its supervisor takes half a
second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prefect.logging.handlers import APILogHandler

from cosmos_core.errors import CosmosError, StageFailed
from cosmos_core.launch import worker
from cosmos_core.launch.worker import AttemptSettings
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.process import identify_process
from cosmos_core.run.stage import load_stage
from cosmos_core.run.state import read_state, record_event, update_state
from cosmos_core.worker.program import run_program


def run_here(settings: AttemptSettings) -> Result:
    """Make and note what `run_attempt` does with a user's function that ends by itself, and logs nothing."""
    worker.sleep_unless_stopping(0)
    path, before, began = settings.stage_path, read_state(settings.stage_path), time.time()
    number, earlier = before.attempt + 1, before.list_attempt_times(began)
    update_state(
        path, state="running", attempt=number, **identify_process(), spans=[*earlier, (began, None)], renewed=began,
        ended=None, error="", error_type="",
    )  # fmt: skip
    record_event(path, "started", f"attempt {number}")
    try:
        run_program(load_stage(path))
    except CosmosError:
        raise
    except Exception as error:
        raise StageFailed(f"{type(error).__name__}: {error}") from error
    finally:
        update_state(path, spans=[*earlier, (began, time.time())], ended=time.time())
    result = read_result(path)
    assert result is not None
    return result


@pytest.fixture
def workers() -> None:
    """For a test of how a worker ends or what it leaves, in a file whose stages run in this process."""


def use(patch: pytest.MonkeyPatch) -> None:
    """Let stages run in this process."""
    patch.setattr(worker, "run_attempt", run_here)


@contextmanager
def unshown() -> Iterator[None]:
    """Let stages and runs give the server no cards, curves, tables and logs, which are half of what a flow costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(APILogHandler, "emit", lambda handler, record: None)
        for kind in ("image", "markdown", "progress", "table"):
            patch.setattr(f"tasks.artifacts.create_{kind}_artifact", lambda **_: None)
        yield
