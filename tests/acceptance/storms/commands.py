"""The commands of a storm: started, followed to their end under a watchdog, and what they said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from cosmos_core.run.progress import read_progress
from cosmos_core.run.state import read_state
from tests.conftest import Workspace

STUCK_SECONDS = 120.0


class Stuck(AssertionError):
    """Nothing was gained for too long."""


class Watchdog:
    """Ends a storm that gains nothing: no stage another state, step or checkpoint, no command another line."""

    def __init__(self, workspace: Workspace, outputs: Path, seconds: float = STUCK_SECONDS) -> None:
        self._stages = workspace.path / "outputs"
        self._outputs = outputs
        self._seconds = seconds
        self._seen: object = None
        self._since = self._looked = time.monotonic()

    def feel(self) -> None:
        """Look whether something was gained; at most twice a second.

        Raises:
            Stuck: nothing for two minutes.
        """
        now = time.monotonic()
        if now - self._looked < 0.5:
            return
        self._looked = now
        found = [self._position(path) for path in sorted(self._stages.glob("*/stages/*"))]
        gained = (found, sorted((path.name, path.stat().st_size) for path in self._outputs.iterdir()))
        if gained != self._seen:
            self._seen, self._since = gained, now
        if now - self._since > self._seconds:
            raise Stuck(f"nothing was gained for {self._seconds:.0f} s")

    @staticmethod
    def _position(path: Path) -> tuple[object, ...]:
        state, progress = read_state(path), read_progress(path)
        return path.name, state.state, state.attempt, progress and (progress.step, progress.checkpoint_step)


class Command:
    """One `cosmos` command that was started."""

    def __init__(self, words: tuple[str, ...], process: subprocess.Popen[bytes], output: Path) -> None:
        self.words, self.process, self.output = words, process, output

    @property
    def said(self) -> str:
        """Return all that it has shown."""
        return self.output.read_text(encoding="utf-8", errors="replace")


class Commands:
    """Every command of a storm, on the run `storm` of a workspace; outputs are in a folder that no fault reaches."""

    def __init__(self, workspace: Workspace, outputs: Path, environment: dict[str, str]) -> None:
        self._workspace = workspace
        self._outputs = outputs
        self._environment = workspace.environment | environment
        self.watchdog = Watchdog(workspace, outputs)
        self.all: list[Command] = []

    @property
    def has_run(self) -> bool:
        """Return whether there is a run to go on with."""
        return bool(self.run_name)

    @property
    def run_name(self) -> tuple[str, ...]:
        """Return the id of the newest run that was begun with the id `storm`; nothing: none is whole."""
        names = sorted(path.parent.name for path in self._workspace.path.glob("outputs/storm*/run.json"))
        return tuple(names[-1:])

    @property
    def pids(self) -> list[int]:
        """Return those of the commands that run."""
        return [command.process.pid for command in self.all if command.process.poll() is None]

    def start(self, *words: str) -> Command:
        """Start a command and leave it running."""
        output = self._outputs / f"{len(self.all)}.log"
        with open(output, "wb") as log:
            log.write(f"$ cosmos {' '.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "cosmos_core", *words],
                cwd=self._workspace.path, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.all.append(Command(words, process, output))
        return self.all[-1]

    def next(self) -> Command:
        """Start the run, or go on with it."""
        name = self.run_name
        return self.start("resume", *name) if name else self.start("run", "p.toml", "--run-id", "storm")

    def follow(self, command: Command) -> int:
        """Wait for the end of a command; its exit code."""
        while command.process.poll() is None:
            self.watchdog.feel()
            time.sleep(0.05)
        return int(command.process.returncode)
