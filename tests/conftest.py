"""What tests share: the real command in a folder of its own, and a way to see what it left running."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar

import pytest

from cosmos_core.run.files import read_json
from cosmos_core.run.state import read_state

Found = TypeVar("Found")
PROGRAMS = Path(__file__).parent / "programs"


def pytest_configure(config: pytest.Config) -> None:
    """Let what libraries leave in the temporary folder (sockets of vLLM, sessions of Ray) go with the run. Folders of
    tests stay where pytest keeps those of the last runs.

    Behind `&` a script's shell has SIGINT ignored, which a worker of Prefect would inherit and then not end on SIGTERM.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="cosmos-")
        # multiprocessing removes a folder of its own there with a priority of -100.
        Finalize(None, shutil.rmtree, args=(tempfile.tempdir,), kwargs={"ignore_errors": True}, exitpriority=-200)


def pytest_collection() -> None:
    """Import all tests without garbage collection: see `cosmos_core.imports`."""
    gc.disable()


def pytest_runtestloop() -> None:
    """Collect garbage from now on."""
    gc.enable()


def processes_below(folder: Path) -> dict[int, str]:
    """Live processes, this one excepted, whose command line or environment names the folder."""
    wanted, found = str(folder).encode(), {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            text = command + Path(f"/proc/{entry}/environ").read_bytes()
            state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if int(entry) != os.getpid() and state not in "ZX" and wanted in text:
            found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def wait_until(condition: Callable[[], Found], seconds: float, what: str | Callable[[], str]) -> Found:
    """Poll until there is something, and return it; fail with `what`, as it is by then, when the time is over."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
    return found


class Workspace:
    """A folder in which `cosmos` is run as a user runs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The marker is what `processes_below` finds; the rest keeps the tests from talking to a server of the
        # developer's.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT")} | {
            "COSMOS_WORKSPACE": str(path)
        }

    def write(self, name: str, text: str) -> Path:
        """Write a file in the folder."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("PROGRAMS", str(PROGRAMS)))
        return file

    def cosmos(self, *arguments: str, timeout: float = 300, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run the command to its end and check its exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "cosmos_core", *arguments],
            cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command and leave it running; its output is in `command.log`."""
        with open(self.path / "command.log", "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cosmos_core", *arguments],
                cwd=self.path, env=self.environment, stdout=log, stderr=log, text=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def run(self) -> Path:
        """The newest run."""
        return sorted((self.path / "outputs").glob("2*"))[-1]

    def stage(self, name: str) -> Path:
        """A stage of the newest run."""
        return self.run / "stages" / name

    def is_past(self, name: str, step: int) -> bool:
        """Whether a stage of the newest run has reached a step."""
        if not list((self.path / "outputs").glob("2*")):
            return False
        progress = read_json(self.stage(name) / "progress.json")
        return isinstance(progress, dict) and progress["step"] >= step

    def state(self, name: str) -> str:
        """The state of a stage of the newest run."""
        return read_state(self.stage(name)).state

    def expect_quiet(self, seconds: float = 15) -> None:
        """Nothing that was started here is running any more."""

        def running() -> dict[int, str]:
            return processes_below(self.path)

        wait_until(lambda: not running(), seconds, lambda: f"still running: {running()}")


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace; whatever a failed test left running in it is ended by pid."""
    yield Workspace(tmp_path)
    for pid in processes_below(tmp_path):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of small real data sets."""
    folder = Path(os.environ.get("COSMOS_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}; set COSMOS_TEST_DATA")
    return folder
