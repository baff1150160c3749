"""`cosmos logs`: the log of a stage's newest attempt, once or until the stage ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cosmos_core.errors import ConfigError
from cosmos_core.run.state import read_state


def print_log(run_path: Path, stage: str, *, follow: bool) -> None:
    """Write the log to standard output.

    Raises:
        ConfigError: nothing has been logged yet.
    """
    log = _newest_log(run_path, stage)
    with open(log, encoding="utf-8", errors="replace") as file:
        while True:
            text = file.read()
            sys.stdout.write(text)
            sys.stdout.flush()
            is_running = read_state(log.parent.parent)["state"] == "running"
            if not text and not (follow and is_running):
                return
            if not text:
                time.sleep(0.2)


def _newest_log(run_path: Path, stage: str) -> Path:
    logs = sorted(run_path.glob(f"stages/{stage or '*'}/logs/attempt_*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise ConfigError(f"{run_path}: {f'stage {stage!r} has' if stage else 'no stage has'} logged anything yet")
    return logs[-1]
