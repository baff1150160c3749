"""A command that is asked to stop, or that meets a busy server."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import uuid
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, Settings, temporary_settings
from sqlalchemy import create_engine, make_url, text
from typer.testing import CliRunner

from cosmos_core import __main__ as entry_point
from cosmos_core import session
from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.launch.server import (
    _claim_prefect_home,
    _copy_database,
    _ServerProcess,
    _wait_for_server,
    make_database_url,
)
from cosmos_core.run.lock import FileLock
from tests.command_line import InProcess


def test_a_termination_is_not_swallowed_by_a_library_that_logs_any_error_of_its_plugins() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:  # as prefect/__init__.py does around what it imports
                logging.getLogger("library").exception("plugins failed")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    command, environment = [sys.executable, "-m", "cosmos_core", "runs"], {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (75, "cosmos: interrupted\n")


def test_an_interrupt_of_a_command_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Newer versions of typer end with 130 and no word, also where SIGTERM comes while a run begins."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmos_core.run.directory.find_run", interrupt)
    ended = InProcess(tmp_path, monkeypatch, capsys).cosmos("runs", code=75)
    assert (ended.stdout, ended.stderr) == ("", "cosmos: interrupted\n")


def test_a_module_in_the_working_directory_hides_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an editable installation ours are found after all folders of the path."""
    (tmp_path / "tasks.py").touch()  # a file of the program `invoke`, say
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # as `python -m` does
    found: list[ModuleSpec | None] = []
    monkeypatch.setattr("cosmos_core.cli.main", lambda: found.append(PathFinder.find_spec("tasks")))
    runpy.run_path(entry_point.__file__, run_name="__main__")
    assert found == [None]


def test_a_command_whose_streams_are_closed_reads_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):  # as with `cosmos run FILE <&- >&- 2>&-`
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr("cosmos_core.cli.main", lambda: sys.stderr.write(sys.stdin.read()))
    entry_point.main()
    streams = (sys.stdin, sys.stdout, sys.stderr)
    assert all(os.get_inheritable(each.fileno()) and not each.isatty() for each in streams)
    for each in streams:
        each.close()


def test_a_home_that_cannot_be_written_gets_no_folder_of_plots_in_tmp_at_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends without the clean-up of Python, which would remove matplotlib's."""
    monkeypatch.setattr(session, "prefect_server", lambda folder: nullcontext())
    monkeypatch.setattr(session, "adopt_orphans", lambda: None)
    for home, expected in ((tmp_path, None), (tmp_path / "nowhere", str(tmp_path / "outputs/.cosmos/matplotlib"))):
        monkeypatch.setattr(os, "environ", {"HOME": str(home)})
        with session.open_session(tmp_path / "outputs"):
            assert os.environ.get("MPLCONFIGDIR") == expected


def test_a_server_of_its_own_has_the_path_that_is_asked_whatever_settings_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefect.toml").write_text('[server.api]\nbase_path = "/prefect"\n')
    monkeypatch.chdir(tmp_path)
    for name, value in _ServerProcess(tmp_path).environment.items():
        monkeypatch.setenv(name, value)
    assert not Settings().server.api.base_path, "then it is /api"


@pytest.mark.parametrize("name", ["plain", "why?", "50% of #1?", "a b"])
def test_a_database_lies_in_its_folder_whatever_characters_the_name_of_that_has(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / ":memory:" / "prefect.db"
    path.parent.mkdir(parents=True)
    engine = create_engine(make_url(make_database_url(path)).set(drivername="sqlite"))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE named (x)"))
    engine.dispose()
    assert path.is_file() and ":memory:" in make_database_url(path), "by which Prefect opens one connection"
    assert _copy_database(path, tmp_path / "copy.db")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([name, "copy.db"])


def test_a_server_whose_certificate_only_prefect_trusts_is_there() -> None:
    """Prefect reads PREFECT_API_SSL_CERT_FILE and others; here is no TLS at all, which is an error of TLS too."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _wait_for_server(f"https://127.0.0.1:{server.server_port}/api")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("response", [None, b"-ERR this is no HTTP\r\n"])
def test_an_address_that_is_no_server_of_prefect_is_one_line(response: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(response or b"")

        if response:
            threading.Thread(target=respond, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1] if response else 'PORT'}/api"
        with pytest.raises(ConfigError, match=rf"^PREFECT_API_URL = '{url}': no server answers there"):
            _wait_for_server(url)


def test_an_error_of_the_flow_of_a_user_is_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    session._print_message("Flow run encountered an exception: ValueError:\npassword=correcthorse")
    assert capsys.readouterr().err == "cosmos: Flow run encountered an exception: ValueError: password=***\n"


def test_a_server_that_does_not_respond_is_one_line_of_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, run = "http://127.0.0.1:1/api", InProcess(tmp_path, monkeypatch, capsys)
    monkeypatch.setenv("PREFECT_API_URL", url)
    (tmp_path / "outputs" / ".cosmos" / "flow_runs").mkdir(parents=True)
    (tmp_path / "outputs" / ".cosmos" / "flow_runs" / str(uuid.UUID(int=1))).write_text("r1")
    with temporary_settings({PREFECT_API_URL: url}):
        assert run.cosmos("reap", code=1).stderr.startswith(f"cosmos: the Prefect server {url}: ")


def test_a_server_beside_that_of_another_user_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def open_own_file(path: Path, flags: int, *mode: int) -> int:
        if Path(path) == tmp_path / "server-1" / "lock":  # the folder has mode 0700
            raise PermissionError
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_own_file)
    home, lock = _claim_prefect_home(tmp_path)
    lock.release()
    assert home == tmp_path / "server-2"


def test_a_server_beside_others_has_a_folder_of_its_own_and_keeps_no_file_of_theirs_open(tmp_path: Path) -> None:
    with FileLock(tmp_path / "server-1" / "lock") as first, FileLock(tmp_path / "server-2" / "lock") as second:
        assert first.try_acquire() and second.try_acquire()
        num_open_files = len(os.listdir("/proc/self/fd"))
        home, lock = _claim_prefect_home(tmp_path)
        with lock:
            assert (home.name, len(os.listdir("/proc/self/fd"))) == ("server-3", num_open_files + 1)


@pytest.mark.parametrize(("command", "expected"), [("run", "8"), ("doctor", None)])
def test_a_busy_server_is_asked_longer_whatever_imports_prefect_first(
    monkeypatch: pytest.MonkeyPatch, command: str, expected: str | None
) -> None:
    """Credentials need Prefect before the run begins; `cosmos doctor` must say at once what a server responds."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "")
    monkeypatch.delenv("PREFECT_CLIENT_MAX_RETRIES")
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    assert os.environ.get("PREFECT_CLIENT_MAX_RETRIES") == expected
