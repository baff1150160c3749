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
    logs = sorted(run_path.glob(f"stages/{stage or '*'}/logs/attempt_*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ConfigError(f"{run_path}: {f'stage {stage!r} has' if stage else 'no stage has'} logged anything yet")
    log_tail, is_last = FileTail(logs[-1]), False
    while not is_last:
        state = read_state(logs[-1].parent.parent)
        is_last = not (follow and state.state == "running" and not is_dead(state, time.time()))
        sys.stdout.write(log_tail.text(is_last=is_last))
        sys.stdout.flush()
        if not is_last:
            time.sleep(0.2)
