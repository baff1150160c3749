"""A real Prefect server with a process worker on a free loopback port, and the command line of Prefect."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from cosmos_core.launch.server import _copy_database, _locate_empty_database
from cosmos_core.observe.logs import add_log_silencing_variables
from cosmos_core.run.lock import FileLock
from tests.conftest import one_certificate, processes_below, wait_until

ROOT = Path(__file__).parents[2]
_TRUST = httpx.create_ssl_context()
"""Made once: loading the certificates takes longer than a request."""


class Orchestra:
    """A server, a worker when one is asked for, and the command line of Prefect, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._file = folder / ":memory:" / "prefect.db"
        self.settings = {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_PROFILES_PATH": str(folder / "home" / "profiles.toml"),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            **one_certificate(folder),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "0.5",
            "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",  # sees a schedule that a deployment gets later
            "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "3",  # not a hundred, which takes seconds
            # On SQLite a server that reads its automations again while one is changed waits for itself for ever.
            "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1H",
            "OMP_NUM_THREADS": "1",
        }
        mine = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
        self.environment = add_log_silencing_variables(
            mine | self.settings | {"PREFECT_API_DATABASE_CONNECTION_URL": self._database()}
        )
        self.worker: subprocess.Popen[str] | None = None
        self.program = "prefect"

    def _database(self) -> str:
        """Return the URL of an SQLite that is used through one connection, as Prefect does with any that has this word
        in its URL: of two writers the second one waits for a minute, and keeps the interpreter from the first."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        return f"sqlite+aiosqlite:///{self._file}"

    def open(self) -> None:
        """Start the server, make the pool, deploy everything in `prefect.yaml`: once in a run of tests, whose other
        servers get a copy of what that one then knows."""
        kept = Path(tempfile.gettempdir()) / "orchestra.db"
        with FileLock(kept.with_suffix(".lock")) as lock:
            lock.acquire()
            is_kept = _copy_database(kept, self._file)
            self.start_server()
            if is_kept:
                return
            done = subprocess.run(
                [sys.executable, "-m", "cosmos_core", "bootstrap"], cwd=ROOT, env=self.environment, capture_output=True,
                text=True, timeout=180,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            self.prefect("deploy", "--all")
            assert _copy_database(self._file, kept)

    def start_server(self) -> subprocess.Popen[str]:
        """Start the server, with the database that there is, or a copy of the empty one that is kept."""
        is_made_here = not self._file.exists() and not _copy_database(_locate_empty_database(), self._file)
        found = self.start("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        wait_until(self._answers, 120, f"the server answers; its log: {self.folder}/server.log")
        if is_made_here:
            _copy_database(self._file, _locate_empty_database())
        return found

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2, verify=_TRUST).status_code == 200
        except httpx.TransportError:
            return False

    def start(self, name: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        with open(self.folder / f"{name}.log", "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.program, *arguments],
                cwd=ROOT, env=self.environment | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def ensure_worker(self) -> subprocess.Popen[str]:
        if self.worker is None or self.worker.poll() is not None:
            self.worker = self.start_worker("local")
        return self.worker

    def machine(self, pool: str) -> Path:
        """The folder of runs of the worker of a pool, for what comes to it from an artifact store."""
        return self.folder / f"machine-{pool}"

    def start_worker(self, pool: str) -> subprocess.Popen[str]:
        log = self.folder / f"worker-{pool}.log"
        before = log.read_text().count("started!") if log.exists() else 0
        found = self.start(
            f"worker-{pool}", "worker", "start", "--pool", pool, COSMOS_OUTPUT_DIR=str(self.machine(pool))
        )
        wait_until(lambda: log.read_text().count("started!") > before, 90, f"the worker is up; its log: {log}")
        return found

    def prefect(self, *arguments: str, code: int = 0, cwd: Path = ROOT) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def begin(self, deployment: str, **parameters: Any) -> str:
        """Let the server schedule a run of a deployment; its id."""
        self.ensure_worker()
        found = httpx.get(f"{self.url}/deployments/name/{deployment}", timeout=60, verify=_TRUST).json()["id"]
        wanted = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.post(f"deployments/{found}/create_flow_run", wanted)["id"])

    def run(self, deployment: str, *parameters: str) -> str:
        """Schedule a run of a deployment as a user does; its id."""
        self.ensure_worker()
        given = [word for parameter in parameters for word in ("-p", parameter)]
        said = self.prefect("deployment", "run", deployment, *given)
        return re.search(r"UUID: ([0-9a-f-]{36})", said)[1]  # type: ignore[index]

    def ask(self, what: str, **filters: Any) -> Any:
        """What a filter finds; a question may be put again, so a server that is slow to answer is asked once more."""
        try:
            return self.post(what, filters)
        except httpx.TimeoutException:
            return self.post(what, filters)

    def post(self, what: str, value: Any) -> Any:
        """Post JSON as Prefect's own client does: once more where a busy server says 503."""
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.post(f"{self.url}/{what}", json=value, timeout=60, verify=_TRUST)
            if answer.status_code != 503 or time.monotonic() > deadline:
                break
            time.sleep(1)
        assert answer.is_success, f"{answer.status_code}: {answer.text}"
        return answer.json()

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        [found] = self.ask("flow_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        return found

    def wait_for(self, flow_run: str, state: str, seconds: float) -> dict[str, Any]:
        """Wait for a state, failing at once when the run ends in another one."""
        ends = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

        def has_ended() -> bool:
            return self.flow_run(flow_run)["state_type"] in ends

        # Each question is work for the server that the run is waiting for.
        wait_until(has_ended, seconds, lambda: f"{state}: {self.flow_run(flow_run)}", pause=0.3)
        found = self.flow_run(flow_run)
        assert found["state_type"] == state, found["state"]["message"]
        return found

    def task_states(self, flow_run: str) -> dict[str, str]:
        tasks = self.ask("task_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        return {task["name"]: task["state_name"] for task in tasks}

    def artifacts(self, flow_run: str) -> dict[str, dict[str, Any]]:
        """The newest version of each, by key."""
        found = self.ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [flow_run]}})
        return {each["key"]: each for each in sorted(found, key=lambda each: each["created"])}

    def messages(self, flow_run: str) -> list[str]:
        return [log["message"] for log in self.ask("logs/filter", logs={"flow_run_id": {"any_": [flow_run]}})]

    def close(self) -> None:
        """Kill all that was started here; nothing of it is needed any more."""
        deadline = time.monotonic() + 20
        while (left := processes_below(self.folder)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
