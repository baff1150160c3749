"""Print the log of a stage's newest attempt, for `cosmos logs`."""

import sys
import time
from pathlib import Path

from cosmos_core.errors import ConfigError
from cosmos_core.run.liveness import is_dead
from cosmos_core.run.state import read_state
from cosmos_core.run.tail import FileTail


def print_log(run_path: Path, stage: str, *, follow: bool) -> None:
    """Write the log of a stage's newest attempt to standard output: once, or until the stage ends if `follow`.

    Raises:
        ConfigError: the stage has no log yet.
    """
    log = _find_newest_log(run_path, stage)
    log_tail = FileTail(log)
    is_last = False
    while not is_last:
        is_last = not (follow and _is_running(log.parent.parent))
        sys.stdout.write(log_tail.text(is_last=is_last))
        sys.stdout.flush()
        if not is_last:
            time.sleep(0.2)


def _is_running(stage_path: Path) -> bool:
    state = read_state(stage_path)
    return state.state == "running" and not is_dead(state, time.time())


def _find_newest_log(run_path: Path, stage: str) -> Path:
    logs = sorted(run_path.glob(f"stages/{stage or '*'}/logs/attempt_*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ConfigError(f"{run_path}: {f'stage {stage!r} has' if stage else 'no stage has'} logged anything yet")
    return logs[-1]
