"""A flow that asks its server whether it was cancelled: what it does with each response."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from weakref import WeakSet

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import SyncClientContext
from prefect.exceptions import TerminationSignal
from prefect.settings import (
    PREFECT_API_SSL_CERT_FILE,
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED,
    temporary_settings,
)
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import Cancelled, Preempted
from cosmos_core.launch import worker
from cosmos_core.launch.prefect import _POLLING_LOOP_MODULES, keep_polling
from cosmos_core.launch.reap import find_cancelled_flow_run, reap
from cosmos_core.run.liveness import PublicationApproval, save_approval
from cosmos_core.run.lock import FileLock
from cosmos_core.run.process import identify_process, read_start_time
from cosmos_core.run.state import update_state
from cosmos_core.upload.file import FileTarget
from tasks.cancellation import (
    is_cancelled,
    make_publication_check,
    stop_on_signals,
    stop_stages,
    terminate_on_signals,
)
from tests.cells import full
from tests.conftest import one_certificate
from tests.unit.run_folder import counting_run

OWN, PARENT, TASK = (str(uuid.uuid4()) for _ in range(3))


class Server:
    """Says of each flow run what it is told, one word for each request, the last one again and again."""

    def __init__(self) -> None:
        self.words: dict[str, list[str]] = {}
        self.set: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                word, content = outer.response(self.path.rpartition("/")[2])
                self.send_response(int(word) if word.isdigit() else 200)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.set[self.path.split("/")[-2]] = content["state"]["type"]
                self.send_response(201)
                self.end_headers()
                done = {"status": "ACCEPT", "details": {"type": "accept_details"}, "state": content["state"]}
                self.wfile.write(json.dumps(done).encode())

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def response(self, name: str) -> tuple[str, dict[str, Any]]:
        if name == TASK:
            return "200", {"id": TASK, "task_key": "t", "dynamic_key": "0", "flow_run_id": PARENT}
        word = self.words[name].pop(0) if len(self.words[name]) > 1 else self.words[name][0]
        parent = {"parent_task_run_id": TASK} if name == OWN and PARENT in self.words else {}
        state = {"type": "PAUSED", "name": "Suspended"} if word == "SUSPENDED" else {"type": word, "name": word}
        run = {"id": name, "flow_id": TASK, "name": "n", "state": state, "state_type": state["type"]}
        return word, run | {"state_name": state["name"]} | parent


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server()
    [certificate] = one_certificate(tmp_path_factory.mktemp("certificate")).values()
    monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", certificate)
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", OWN)
    url = f"http://127.0.0.1:{found.http.server_address[1]}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    settings = {PREFECT_API_SSL_CERT_FILE: certificate, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
    with temporary_settings({PREFECT_API_URL: url, **settings}):
        yield found
    found.http.shutdown()


def test_it_is_cancelled_where_it_or_the_flow_run_that_began_it_is(server: Server) -> None:
    expected = {
        ("RUNNING", ""): False, ("CANCELLING", ""): True, ("CANCELLED", ""): True, ("CRASHED", ""): False,
        ("500", ""): None, ("404", ""): False, ("RUNNING", "RUNNING"): False, ("RUNNING", "CANCELLING"): True,
        ("RUNNING", "CANCELLED"): True, ("RUNNING", "404"): False, ("RUNNING", "500"): None, ("PAUSED", ""): False,
        ("SUSPENDED", ""): True, ("RUNNING", "SUSPENDED"): True,
    }  # fmt: skip
    found = {}
    for own, parent in expected:
        server.words = {OWN: [own]} | ({PARENT: [parent]} if parent else {})
        found[own, parent] = is_cancelled()
    assert found == expected


def test_a_busy_server_is_asked_again_at_the_next_look_and_not_after_minutes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's client waits twice as long after each response 503, and the flow would not see its cancellation."""
    pauses, sleep, thread = list[float](), time.sleep, threading.get_ident()
    # Other threads of this process go on sleeping.
    pause = lambda seconds: pauses.append(seconds) if threading.get_ident() == thread else sleep(seconds)  # noqa: E731
    monkeypatch.setattr(time, "sleep", pause)
    server.words = {OWN: ["503", "429", "CANCELLING"]}
    settings = {PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False, PREFECT_CLIENT_MAX_RETRIES: 8}
    with temporary_settings(settings), SyncClientContext.get_or_create():
        assert [is_cancelled() for _ in range(3)] == [None, None, True]
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 8
    assert sum(pauses) < 10.0


def test_polling_leaves_no_client_behind_and_uses_that_of_the_flow(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # not `gc.get_objects`, which breaks a tuple that another thread of this process is about to make
    made, clients, initialise = [], WeakSet[SyncPrefectClient](), SyncPrefectClient.__init__

    def noted(client: SyncPrefectClient, *given: Any, **named: Any) -> None:
        made.append(id(client))
        clients.add(client)
        initialise(client, *given, **named)

    monkeypatch.setattr(SyncPrefectClient, "__init__", noted)
    server.words = {OWN: ["RUNNING"], PARENT: ["RUNNING"]}
    assert {is_cancelled() for _ in range(5)} == {False}
    gc.collect()
    assert made and not clients
    with temporary_settings({PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED: False}), SyncClientContext() as context:
        context.client._client.close()
        with pytest.raises(RuntimeError, match="closed"):
            is_cancelled()


def publish(folder: Path) -> FileTarget:
    (folder / "model").mkdir()
    target, check = FileTarget(str(folder / "published")), make_publication_check()
    target.prepare_upload(folder, check)
    check()
    target.publish(folder / "model", "v1", {"version": "v1", "metrics": {}, "files": {}})
    return target


@pytest.mark.parametrize("said", [["RUNNING", "500", "500", "CANCELLED"], *full(["CANCELLING"])])
def test_nothing_is_published_after_a_cancel_though_the_server_was_away_meanwhile(
    server: Server, tmp_path: Path, said: list[str]
) -> None:
    server.words = {OWN: said}
    with pytest.raises(Cancelled, match="its flow run was cancelled, so nothing is published"):
        publish(tmp_path)
    assert FileTarget(str(tmp_path / "published")).published() is None


def test_a_publication_waits_for_a_server_that_is_away_and_ends_where_the_process_is_to_stop(
    server: Server, tmp_path: Path
) -> None:
    server.words = {OWN: ["RUNNING", "500", "RUNNING"]}
    assert publish(tmp_path).published() is not None
    server.words = {OWN: ["500"]}
    with worker.register_active_run():
        threading.Timer(0.2, worker.stop_all).start()
        with pytest.raises(Preempted, match="asked to stop"):
            make_publication_check()()


def test_a_signal_while_a_run_is_registered_stops_the_workers() -> None:
    """The handler runs in the main thread, which may hold the lock of the registry at that moment."""
    lock = worker._child_registry._registry_lock
    with worker.register_active_run(), lock:
        assert lock.acquire(blocking=False)
        lock.release()
        worker.stop_all()
        assert worker.is_stopping()


def begun(outputs: Path, name: str, *flow_runs: str) -> Path:
    """A run on which flow runs have worked, the last one now."""
    (outputs / name / "locks").mkdir(parents=True)
    (outputs / name / "pipeline.toml").write_text("")
    notes = outputs / ".cosmos" / "flow_runs"
    notes.mkdir(parents=True, exist_ok=True)
    for age, flow_run in enumerate(reversed(flow_runs)):
        (notes / flow_run).write_text(name)
        os.utime(notes / flow_run, (1e9 - age, 1e9 - age))
    return outputs / name


@pytest.mark.parametrize(
    ("said", "corrected"),
    [("CANCELLING", "CANCELLED"), ("RUNNING", "CRASHED"), ("COMPLETED", ""), ("CANCELLED", ""), ("404", "")],
)
def test_reap_corrects_a_flow_run_whose_process_is_gone(
    server: Server, tmp_path: Path, said: str, corrected: str
) -> None:
    begun(tmp_path, "dead", OWN)
    server.words = {OWN: [said]}
    assert len(list(reap(tmp_path))) == bool(corrected)
    assert server.set == ({OWN: corrected} if corrected else {})


@pytest.mark.parametrize(
    ("said", "confirmed"), [("CANCELLING", "CANCELLED"), ("RUNNING", ""), *full(("CANCELLED", ""))]
)
def test_a_process_that_ends_confirms_its_cancellation_because_its_worker_may_be_gone(
    server: Server, said: str, confirmed: str
) -> None:
    server.words = {OWN: [said]}
    code = "import cosmos_core; from tasks.cancellation import confirm_cancellation_at_exit; "
    code += "confirm_cancellation_at_exit(); raise OSError"
    settings = {"PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "0", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "0"}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.rstrip().endswith("OSError"), ended.stderr
    assert server.set == ({OWN: confirmed} if confirmed else {})


@pytest.mark.parametrize("heartbeat_age", [0.0, 3000.0])
def test_reap_leaves_a_flow_run_alone_whose_flow_runs_elsewhere_on_a_file_system_without_shared_locks(
    server: Server, tmp_path: Path, heartbeat_age: float
) -> None:
    """A worker that compiles may have no heartbeat for an hour; its launcher renews the state all the same."""
    run = begun(tmp_path, "theirs", OWN)
    server.words = {OWN: ["RUNNING"]}
    there = identify_process() | {"launcher_host": "node-3", "launcher_machine": "node-3/boot/pids", "launcher_pid": 1}
    (run / "locks" / "holder.json").write_text(json.dumps(there))
    times = {"heartbeat": time.time() - heartbeat_age, "renewed": time.time()}
    update_state(run / "stages" / "sft", **there, state="running", **times)
    assert list(reap(tmp_path)) == ["theirs/sft: runs on node-3; reap there what is left of it"]
    assert server.set == {}


def test_status_says_that_nobody_is_asked_for_an_approval_once_the_flow_run_was_cancelled(
    server: Server, tmp_path: Path
) -> None:
    run = begun(tmp_path, "asked", PARENT, OWN)
    save_approval(run, PublicationApproval(until=time.time() + 3600))
    server.words = {OWN: ["CANCELLED"]}
    said = CliRunner().invoke(app, ["status", str(run)]).output
    assert "waits for approval" in said and "flow run n was cancelled, and waits no more" in said


@pytest.mark.parametrize(
    ("newest", "is_stopped"), [("CANCELLED", True), *full(("CANCELLING", True)), ("RUNNING", False)]
)
def test_reap_stops_a_process_that_goes_on_after_a_cancel_but_not_one_that_resumed_the_run(
    server: Server, tmp_path: Path, newest: str, is_stopped: bool
) -> None:
    run = begun(tmp_path, "live", PARENT, OWN)
    server.words = {OWN: [newest], PARENT: ["CANCELLED"]}
    process = subprocess.Popen(["sleep", "600"])
    holder = identify_process() | {"launcher_pid": process.pid, "launcher_started": read_start_time(process.pid)}
    (run / "locks" / "holder.json").write_text(json.dumps(holder))
    try:
        with FileLock(run / "locks" / ".run") as lock:
            assert lock.try_acquire()
            assert bool(find_cancelled_flow_run(tmp_path, "live")) is is_stopped
            assert len(list(reap(tmp_path))) == is_stopped
        assert process.wait(30) == -signal.SIGTERM if is_stopped else process.poll() is None
        assert server.set == {}
    finally:
        process.kill()
        process.wait()


def test_the_polling_of_a_worker_outlasts_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _POLLING_LOOP_MODULES:
        module: Any = importlib.import_module(name)
        monkeypatch.setattr(module, "critical_service_loop", module.critical_service_loop)  # put back afterwards
    calls: list[int] = []

    busy = httpx.Response(429, request=httpx.Request("GET", "http://server"))
    outages = [httpx.ConnectError("away"), httpx.HTTPStatusError("busy", request=busy.request, response=busy)]

    async def ask() -> None:
        calls.append(len(calls))
        raise outages[len(calls) // 20] if len(calls) < 40 else KeyError("it was still asked")

    async def poll(name: str) -> None:
        """Call the loop as Prefect's worker does, with a limit of its own."""
        loop = importlib.import_module(name).critical_service_loop
        await loop(workload=ask, interval=1e-4, jitter_range=0.3, backoff=4, printer=lambda *_: None)

    with pytest.raises(RuntimeError, match="Service exceeded error threshold"):
        asyncio.run(poll(_POLLING_LOOP_MODULES[0]))
    keep_polling()
    for name in _POLLING_LOOP_MODULES:
        calls.clear()
        with pytest.raises(KeyError, match="it was still asked"):
            asyncio.run(poll(name))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_flow_in_python_stops_its_workers_on_the_signals_of_a_scheduler(number: signal.Signals) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {each: signal.getsignal(each) for each in numbers}
    stops: list[int] = []
    try:
        stop_on_signals(lambda: {number.name} - {"SIGTERM"}, lambda: stops.append(0))
        with worker.register_active_run(), pytest.raises(TerminationSignal):
            os.kill(os.getpid(), number)
            time.sleep(5)
        assert worker.is_stopping() and stops == [0]
        os.kill(os.getpid(), number)  # a scheduler may repeat it: the save goes on
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        with worker.register_active_run():
            assert not worker.is_stopping(), "the next run begins without the request"


def test_a_repeated_signal_does_not_cut_the_stop_of_a_pipeline_short(tmp_path: Path) -> None:
    run = counting_run(tmp_path, 'train.signal_to_handle=["SIGUSR1", "SIGHUP"]')
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = {each: signal.getsignal(each) for each in numbers}
    try:
        terminate_on_signals(run)
        with pytest.raises(TerminationSignal):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(5)
        with worker.register_active_run():
            stop_stages(run, [])
        for number in numbers:
            os.kill(os.getpid(), number)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        with worker.register_active_run():
            assert not worker.is_stopping(), "the next run begins without the request"


def test_a_signal_that_no_recipe_names_ends_a_flow_in_python_as_it_ends_any_process() -> None:
    program = "import cosmos_core, os, signal; from tasks.cancellation import stop_on_signals; "
    program += "stop_on_signals(lambda: {'SIGUSR2'}); os.kill(os.getpid(), signal.SIGUSR1); print('it goes on')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "")
