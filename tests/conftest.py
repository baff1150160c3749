"""What tests share: the real command in a folder of its own, and a way to see what it left running."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cosmos_core.run.files import read_json
from cosmos_core.run.state import read_state
from tests import schedule
from tests.pytest_speed import catch_logs_of_root, compile_tests
from tests.warm import spawner

Found = TypeVar("Found")
PROGRAMS = Path(__file__).parent / "programs"
DEMOS = Path(__file__).parents[1] / "configs" / "demo"
MOST_SECONDS = 800.0
"""Of any wait; a test has a little longer."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption("--fast", action="store_true", help="only files of unit/ and reference/ whose tests are short")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew")


@pytest.hookimpl(trylast=True)  # folders of tests have to be known
def pytest_configure(config: pytest.Config) -> None:
    """Let what the run leaves in the temporary folder go with it, however it ends. Folders of tests stay where pytest
    keeps those of the last runs, unless the run is killed.

    Behind `&` a script's shell has SIGINT ignored, which a worker of Prefect would inherit and then not end on SIGTERM.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ImmediateFailures(config))
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="cosmos-")
        # multiprocessing removes a folder of its own there with a priority of -100.
        Finalize(None, shutil.rmtree, args=(tempfile.tempdir,), kwargs={"ignore_errors": True}, exitpriority=-200)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would compile the project again
        sys.dont_write_bytecode = False
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by Ray's default: starved beside other test processes
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait for work would spin on busy cores
        if config.getoption("numprocesses", None):
            _start_reaper(config)
    catch_logs_of_root()
    if not config.getoption("--fast"):
        has_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
        spawner.install(partial(compile_tests, config) if has_workers else None)


class ImmediateFailures:
    """Prints the name and the error of a test as soon as it fails, because a run that is cut off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print one line if the test failed, or failed and is run again."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and report.outcome not in {"passed", "skipped"}:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0]
            reporter.write_line(f"\n{report.outcome} after {report.duration:.0f} s: {report.nodeid}: {error[:300]}")


def _start_reaper(config: pytest.Config) -> None:
    reader, writer = os.pipe()
    folders = [tempfile.gettempdir(), str(config._tmp_path_factory.getbasetemp())]
    subprocess.Popen(
        [sys.executable, "-S", "-E", str(Path(__file__).with_name("reaper.py")), str(reader)], pass_fds=[reader],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(reader)
    os.write(writer, "\n".join([*folders, ""]).encode())
    config.add_cleanup(lambda: (os.write(writer, b"done\n"), os.close(writer)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal tests by the time they take."""
    return schedule.Longest(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast` leave out the files that take long, unread."""
    root = Path(__file__).parents[1]
    is_ours = collection_path.is_relative_to(root) and collection_path.name.startswith("test_")
    if not config.getoption("--fast") or not is_ours:
        return None
    return None if schedule.is_fast(collection_path.relative_to(root).as_posix()) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what takes longest first."""
    items.sort(key=lambda item: schedule.sort_key(item.nodeid))


_measured: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test took."""
    _measured[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down what tests took, if that is asked for."""
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        schedule.record(_measured)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add to the report of a failure what the runs in the test's folder last said of themselves."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        report.sections += [(str(file.relative_to(folder)), _last_lines(file)) for file in _tales(folder)]
    return report


def _tales(folder: Path) -> list[Path]:
    """Files in which commands, servers and stages say what they do."""
    patterns = ("*.log", "outputs/*/stages/*/state.json", "outputs/*/stages/*/logs/*.log", "**/log", "**/error.json")
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})[:20]


def _last_lines(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-30:])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the random numbers of a test and its fixtures by its name, so that it is the same in every run."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    # A test that uses neither library does not wait for their import.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):  # `torch.manual_seed` notes the stack for each device that is not there
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of a file, restore the variables that libraries read when they are imported. Some libraries
    set such a variable themselves (lm_eval: HF_XET_HIGH_PERFORMANCE); programs with another value are never forked."""
    yield
    if nextitem is None or nextitem.path != item.path:
        spawner.restore_environment()


def pytest_collection() -> None:
    """Import all tests without garbage collection: see `cosmos_core.imports`."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, and forget the variables that the imports of test files have set."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries report objects that were not collected at exit
    gc.set_threshold(20_000)  # the default of 700 new objects costs a test of a model 4 % of its time
    gc.enable()
    spawner.restore_environment()


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


def wait_until(
    condition: Callable[[], Found], seconds: float, what: str | Callable[[], str], pause: float = 0.05
) -> Found:
    """Ask every `pause` seconds until there is something, and return it; fail with `what`, as it is by then, after ten
    times the `seconds` that it takes on a quiet machine."""
    deadline = time.monotonic() + min(10 * seconds, MOST_SECONDS)
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what if isinstance(what, str) else what()}")
        time.sleep(pause)
    return found


def next_second() -> None:
    """Wait until clocks that know seconds alone have gone on."""
    now = int(time.time())
    wait_until(lambda: int(time.time()) > now, 1, "the next second")


class Workspace:
    """A folder in which `cosmos` is run as a user runs it."""

    def __init__(self, path: Path, server: Callable[[], Mapping[str, str]] = dict) -> None:
        self.path = path
        self._server = server
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

    def cosmos(
        self, *arguments: str, timeout: float = MOST_SECONDS, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, in the workspace's folder or in `cwd`, and check its exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "cosmos_core", *arguments],
            cwd=cwd or self.path, env=self._variables(*arguments), capture_output=True, text=True, timeout=timeout,
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
                cwd=self.path, env=self._variables(*arguments), stdout=log, stderr=log, text=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def _variables(self, command: str = "", *_: str) -> Mapping[str, str]:
        """The environment of a command; one that runs a flow is told of the server that there is."""
        is_flow = command in {"run", "resume", "sweep"} and "PREFECT_API_URL" not in self.environment
        return {**self.environment, **(self._server() if is_flow else {})}

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


@pytest.fixture(autouse=True)
def no_stop_is_left() -> Iterator[None]:
    """A test may ask the workers of its process to stop: those behind it in this process are not meant."""
    yield
    if worker := sys.modules.get("cosmos_core.launch.worker"):
        with worker.register_active_run():  # a run that begins clears it
            pass


def one_certificate(folder: Path) -> dict[str, str]:
    """A setting for clients of a Prefect server without TLS: each of them, of which a stage makes ten, loads one
    certificate in a millisecond, and not all in forty."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    file = folder / "certificate.pem"
    file.write_text(certifi.contents().partition(end)[0] + end)
    return {"PREFECT_API_SSL_CERT_FILE": str(file)}


class SharedServer:
    """A server that stands still between the tests that need it: its loops take processor time from others."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self._folder, self._variables, self._is_paused = folder, variables, False

    def wake(self) -> Mapping[str, str]:
        """Let it go on; the variables of its clients."""
        if self._is_paused:
            self._send(signal.SIGCONT)
        return self._variables

    def pause(self) -> None:
        """Let it stand still."""
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for pid, command in processes_below(self._folder).items():
            if " server start " in command and "launch.supervisor" not in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self._is_paused = number == signal.SIGSTOP


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """One server of Prefect, such as `cosmos run` starts, for all the commands of a test process."""
    from cosmos_core.launch.server import prefect_server

    before, folder = dict(os.environ), tmp_path_factory.mktemp("server")
    with prefect_server(folder) as wait:
        wait()
        added = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in added:
            del os.environ[name]  # nothing in this process talks to it
        found = SharedServer(folder, added | one_certificate(folder))
        yield found
        found.wake()


@pytest.fixture
def own_server() -> None:
    """For a test whose commands start their servers themselves, as a user's do."""


@pytest.fixture
def workspace(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workspace]:
    """A workspace; whatever a failed test left running in it is ended by pid."""
    used: list[SharedServer] = []

    def wake() -> Mapping[str, str]:
        used[:] = [request.getfixturevalue("server")]
        return used[0].wake()

    yield Workspace(tmp_path, dict if "own_server" in request.fixturenames else wake)
    for pid in processes_below(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for shared in used:
        shared.pause()


@pytest.fixture
def executed() -> Iterator[None]:
    """For a test whose programs are executed, not forked from one that has imported everything."""
    with spawner.off():
        yield


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of small real data sets."""
    folder = Path(os.environ.get("COSMOS_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}; set COSMOS_TEST_DATA")
    return folder
