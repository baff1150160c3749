"""`cosmos serve-reports`: who gets a report, what nobody gets, and who links to it."""

import base64
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.observe.record import read_run
from cosmos_core.observe.report_server import REPORTS_URL_VARIABLE, TOKEN_VARIABLE, ReportServer, report_url
from tasks.artifacts import _render_run_card
from tests.unit.observed_runs import finished_run

TOKEN = "right-right-right"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    for name in ("outputs/run-1/stages/sft", "outputs/private", "secret"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "report.html").write_text(f"content of {name}")
    (tmp_path / "outputs/report.html").write_text("above")
    (tmp_path / "outputs/private").chmod(0o700)
    (tmp_path / "outputs/linked").symlink_to(tmp_path / "secret")
    (tmp_path / "outputs/run-2").mkdir()
    (tmp_path / "outputs/run-2/report.html").symlink_to(tmp_path / "secret/report.html")
    (tmp_path / "outputs/run-1/stages/sft/logs").mkdir()
    (tmp_path / "outputs/run-1/stages/sft/logs/attempt_1.log").write_text("<b>step 1</b>")
    (tmp_path / "outputs/run-1/stages/sft/logs/attempt_2.log").symlink_to(tmp_path / "secret/report.html")
    for name in ("report.html", "run.json", "stages/sft/state.json", "stages/sft/logs/notes.txt"):
        (tmp_path / "outputs/run-1" / name).write_text(f"content of {name}")
    return tmp_path / "outputs"


@pytest.fixture
def port(outputs: Path) -> Iterator[int]:
    with ReportServer(outputs, TOKEN, ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_nobody_without_the_token_gets_a_report(port: int) -> None:
    url = f"http://127.0.0.1:{port}/run-1/report.html"
    for auth in (None, *(("ada", password) for password in ("", "wrong", f"{TOKEN}2", TOKEN[:-1], "ö"))):
        response = httpx.get(url, auth=auth)
        assert response.status_code == 401 and "Basic" in response.headers["WWW-Authenticate"], auth
    for header in ("Basic ???", "Basic", f"Bearer {TOKEN}", f"Basic {TOKEN}"):
        assert httpx.get(url, headers={"Authorization": header}).status_code == 401


def test_with_the_token_it_is_the_page_its_logs_and_nothing_else_of_the_folder(port: int) -> None:
    client = httpx.Client(auth=("anybody", TOKEN))
    url = f"http://127.0.0.1:{port}/run-1/report.html"
    response = client.get(url)
    assert (response.status_code, response.text) == (200, "content of report.html")
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert client.head(url).content == b""
    log = client.get(f"http://127.0.0.1:{port}/run-1/stages/sft/logs/attempt_1.log")
    assert (log.status_code, log.text) == (200, "<b>step 1</b>")
    assert log.headers["Content-Type"] == "text/plain; charset=utf-8"
    others = [
        "run-1/stages/sft/logs/attempt_2.log", "run-1/stages/sft/logs/notes.txt", "run-1/stages/sft/logs/",
        "run-1/stages/sft/state.json", "run-1/stages/../stages/sft/logs/attempt_1.log",
        "", "report.html", "../secret/report.html", "..%2fsecret/report.html", "run-1/run.json", "none/report.html",
        "run-1/stages/sft/report.html", "linked/report.html", "run-2/report.html", "private/report.html",
        "./report.html", "run-1/../run-1/report.html", "run-1/report.html?x", "run-1%00/report.html", "a" * 9000,
    ]  # fmt: skip
    token = base64.b64encode(f":{TOKEN}".encode()).decode()
    for path in others:  # with a client that sends a path as it is
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("GET", f"/{path}", headers={"Authorization": f"Basic {token}"})
        assert connection.getresponse().status == 404, path
        connection.close()
    assert {client.request(name, url).status_code for name in ("POST", "PUT", "DELETE", "PATCH")} == {501}


def test_a_client_that_sends_nothing_delays_no_other(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.send(b"GET /run-1")
        assert httpx.get(f"http://127.0.0.1:{port}/run-1/report.html", auth=("", TOKEN)).status_code == 200


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="COSMOS_REPORTS_TOKEN has 5 characters; at least 16"):
        ReportServer(tmp_path, "short", ("127.0.0.1", 0))


def test_a_token_that_is_empty_is_none_and_the_new_one_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the program fails that `COSMOS_REPORTS_TOKEN=$(...)` calls."""
    tokens: list[str] = []
    monkeypatch.setattr(ReportServer, "serve_forever", lambda server: tokens.append(server.token))
    arguments = ["serve-reports", "--port", "0", "--output-dir", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, env={TOKEN_VARIABLE: ""})
    assert f"password: {tokens[0]}\n" in done.output and len(tokens[0]) >= 32
    done = CliRunner().invoke(app, arguments, env={TOKEN_VARIABLE: TOKEN})
    assert tokens[1] == TOKEN and "password" not in done.output


def test_it_listens_on_ipv6(tmp_path: Path) -> None:
    if all(each.address != "::1" for found in psutil.net_if_addrs().values() for each in found):
        pytest.skip("this machine has no ::1")
    with ReportServer(tmp_path, TOKEN, ("::1", 0)) as server:
        assert server.server_address[0] == "::1"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with ReportServer(tmp_path, TOKEN, ("127.0.0.1", 0)) as server:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=rf"^port {port} of 127\.0\.0\.1: Address already in use; choose another"):
            ReportServer(tmp_path, TOKEN, ("127.0.0.1", port))


def test_the_card_of_a_run_links_to_the_server_unless_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path)
    monkeypatch.delenv(REPORTS_URL_VARIABLE, raising=False)
    assert report_url(run) == "" and "[report]" not in _render_run_card(read_run(run))
    monkeypatch.setenv(REPORTS_URL_VARIABLE, "https://reports.example/")
    assert f"[report](https://reports.example/{run.name}/report.html)" in _render_run_card(read_run(run))
    run.chmod(0o700)
    assert report_url(run) == "" and "[report]" not in _render_run_card(read_run(run))
