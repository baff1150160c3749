"""Limit how many stages of the branches of a sweep run at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cosmos_core.config.compose import Pipeline
from cosmos_core.launch.worker import sleep_unless_stopping

_POLL_SECONDS = 0.2


def make_branch_semaphores(pipeline: Pipeline) -> dict[str, threading.Semaphore]:
    """Return the semaphore of each stage in a branch of a sweep, by stage name. A stage holds its semaphore while it
    runs; stages whose concurrency is not limited have none."""
    semaphore_by_stage: dict[str, threading.Semaphore] = {}
    for sweep_stage in pipeline.stages:
        if sweep_stage.sweep is None:
            continue
        stage_names = [name for sweep_branch in sweep_stage.sweep.branches for name in sweep_branch.stages]
        if sweep_stage.sweep.max_parallel is None:
            # By default, stages on this machine run one at a time; the work pool limits the stages that run on it.
            stage_names = [name for name in stage_names if not pipeline.stage(name).work_pool]
        semaphore_by_stage |= dict.fromkeys(stage_names, threading.Semaphore(sweep_stage.sweep.max_parallel or 1))
    return semaphore_by_stage


@contextmanager
def hold_semaphore(semaphore: threading.Semaphore | None) -> Iterator[None]:
    """Hold a semaphore during the `with` block; None sets no limit. Raises `Preempted` if the run is stopped during the
    wait."""
    if semaphore is None:
        yield
        return
    while not semaphore.acquire(timeout=_POLL_SECONDS):
        sleep_unless_stopping(0)
    try:
        yield
    finally:
        semaphore.release()
