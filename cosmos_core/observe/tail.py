"""Print the log of a stage's newest attempt, for `cosmos logs`."""

import sys
import time
from pathlib import Path

from cosmos_core.errors import ConfigError
from cosmos_core.observe.record import read_run
from cosmos_core.registry import suggest_names
from cosmos_core.run.liveness import is_stage_dead
from cosmos_core.run.state import ACTIVE_STATES, read_state
from cosmos_core.run.tail import FileTail


def print_log(run_path: Path, stage: str, *, should_follow: bool) -> None:
    """Write the log of a stage's newest attempt to standard output; an empty `stage` means the stage that logged last.
    With `should_follow`, continue with the logs of further attempts until the stage ends. Raise ConfigError if the
    stage has no log yet."""
    logs = sorted(run_path.glob(f"stages/{stage or '*'}/logs/attempt_*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        if stage and stage not in (stage_names := [each.name for each in read_run(run_path).stages]):
            raise ConfigError(f"{run_path}: no stage {stage!r} in this run{suggest_names(stage, stage_names)}")
        raise ConfigError(f"{run_path}: {f'stage {stage!r} has' if stage else 'no stage has'} logged anything yet")
    log_folder, printed_files, log_tail, has_stage_ended = logs[-1].parent, set(logs), FileTail(logs[-1]), False
    while not has_stage_ended:
        state = read_state(log_folder.parent)
        has_stage_ended = not (should_follow and state.state in ACTIVE_STATES and not is_stage_dead(state, time.time()))
        for log in sorted(set(log_folder.glob("attempt_*.log")) - printed_files, key=lambda path: path.stat().st_mtime):
            sys.stdout.write(log_tail.read_text(is_last_read=True))
            printed_files.add(log)
            log_tail = FileTail(log)
        sys.stdout.write(log_tail.read_text(is_last_read=has_stage_ended))
        sys.stdout.flush()
        if not has_stage_ended:
            time.sleep(0.2)
