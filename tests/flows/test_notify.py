"""`cosmos bootstrap`: work pools, what a Prefect server sends when a stage fails, what a second bootstrap changes; and
the block of a reward service."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed
from pydantic import SecretStr
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError, GateFailed, ProgramError, StageFailed
from cosmos_core.launch.blocks import RewardService, load_service_variables
from cosmos_core.launch.bootstrap import CRASH_AUTOMATION_NAME, WorkPool, bootstrap_server
from cosmos_core.launch.managed_service import managed_reward_service
from cosmos_core.launch.notify import EVENT_BY_SUBJECT, _create_action, _create_block, parse_notification_channels
from flows.post_train import post_train
from tasks import events
from tests.conftest import wait_until
from tests.unit.run_folder import counting_run


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a webhook, and the messages that arrived there."""
    messages: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", messages
    server.shutdown()
    server.server_close()


def notifications() -> list[dict[str, Any]]:
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/automations/filter", json={}).json()
    return [each for each in found if " message when " in each["name"]]


@pytest.mark.full
@pytest.mark.usefixtures("harness")
def test_a_second_bootstrap_updates_and_the_server_sends_what_failed_with_the_report(
    receiver: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, messages = receiver
    channels = parse_notification_channels(
        ["email=mailto://ada:secret@127.0.0.1:1?to=ada@localhost", "webhook=http://127.0.0.1:1/old"]
    )
    lines = list(bootstrap_server([], channels))
    assert sum(line.endswith(": made") and " message when " in line for line in lines) == 2 * len(EVENT_BY_SUBJECT)
    lines = list(bootstrap_server([], {**channels, "webhook": url}))
    assert sum(line.endswith(": there") and " message when " in line for line in lines) == 2 * len(EVENT_BY_SUBJECT)
    assert len(notifications()) == 2 * len(EVENT_BY_SUBJECT)
    saved: Any = Webhook.load("cosmos-notify-webhook")
    assert saved.url.get_secret_value() == url
    run = counting_run(tmp_path)
    events.emit_stage_failed(run, "first", ProgramError('it said "no"\nand <ended>'))
    events.emit_stage_failed(run, "second", GateFailed("accuracy 0.1"))
    EventsWorker.drain_all(timeout=5)
    wait_until(lambda: len(messages) == 2, 120, "the server calls the webhook for both")
    failed, refused = sorted(messages, key=lambda message: str(message["what"]))
    report = str(run.path / "report.html")
    assert (failed["what"], refused["what"]) == ("failed", "refused by a gate")
    assert failed["payload"]["error"] == 'it said "no"\nand <ended>'
    assert failed["text"].startswith(f'counting, run {run.id}, stage first: failed: it said "no"')
    assert report in failed["text"] and f"/artifacts/key/{events.make_run_card_key('counting')}" in failed["text"]
    assert refused["payload"]["report"] == report
    with get_client(sync_client=True) as client:  # a stage on a work pool, and a schedule whose machine was lost
        for tags in (["cosmos", "stage"], ["cosmos", "pipeline"]):
            lost = client.create_flow_run(post_train, parameters={"config": "a.toml"}, name="a.toml", tags=tags)
            client.set_flow_run_state(lost.id, Crashed(message=f"no heartbeat of {tags[1]}"), force=True)
    wait_until(lambda: len(messages) == 3, 120, "the server calls the webhook for the flow run")
    assert messages[2]["text"] == "a.toml: the flow run crashed: no heartbeat of pipeline"


@pytest.mark.usefixtures("harness")
def test_bootstrap_makes_what_is_missing_once() -> None:
    made = list(bootstrap_server([WorkPool("cpu"), WorkPool("big", concurrency_limit=2)]))
    assert made[:2] == ["work pool cpu: made (process)", "work pool big: made (process, at most 2 at once)"]
    assert made[2].startswith(f"automation {CRASH_AUTOMATION_NAME!r}: ")
    assert made[-1] == "block type cosmos-reward-service: registered"
    command = ["bootstrap", "--pool", "big"]
    again = CliRunner().invoke(app, [*command, "--pool", "cpu"]).stdout.splitlines()
    assert again[:2] == ["work pool big: there (process, at most 2 at once)", "work pool cpu: there (process)"]
    assert again[2] == f"automation {CRASH_AUTOMATION_NAME!r}: there"
    changed = CliRunner().invoke(app, [*command, "--limit", "4"]).stdout
    assert changed.startswith("work pool big: changed (concurrency_limit)\n")
    refused = CliRunner().invoke(app, [*command, "--type", "docker"]).exception
    assert isinstance(refused, ConfigError) and "work pool 'big' is of type process, not docker" in str(refused)


@pytest.mark.usefixtures("harness")
def test_a_block_names_a_reward_service_and_its_token_is_written_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = "a very secret token"
    RewardService(url="http://127.0.0.1:1, http://127.0.0.1:2/", token=SecretStr(token)).save("rewards")
    assert "secret" not in repr(RewardService.load("rewards"))
    with managed_reward_service("block:rewards", tmp_path) as found:
        assert found == {
            "REMOTE_REWARD_ENQUEUE_URL": "http://127.0.0.1:1/api/reward/enqueue,http://127.0.0.1:2/api/reward/enqueue",
            "REMOTE_REWARD_FETCH_URL": "http://127.0.0.1:1/api/reward/pull,http://127.0.0.1:2/api/reward/pull",
            "REMOTE_REWARD_TOKEN": token,
        }
    noted = json.loads((tmp_path / "reward_service.json").read_text())
    assert [each["status"] for each in noted["services"]] == ["does not respond"] * 2
    assert token not in (tmp_path / "reward_service.json").read_text() + caplog.text
    with pytest.raises(ConfigError, match="the server has no block cosmos-reward-service/other"):
        load_service_variables("block:other")
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(StageFailed, match="reward_service = 'block:rewards': the Prefect server does not tell: "),
    ):
        load_service_variables("block:rewards")


def test_an_address_of_mail_is_one_that_apprise_knows() -> None:
    address = parse_notification_channels(["email=mailtos://ada:secret@smtp.example.com?to=team@example.com"])["email"]
    [plugin] = _create_block("email", address)._apprise_client
    assert (type(plugin).__name__, plugin.smtp_host) == ("NotifyEmail", "smtp.example.com")


@pytest.mark.parametrize(("channel", "action"), [("webhook", "call-webhook"), ("slack", "send-notification")])
def test_a_webhook_is_called_with_the_event_and_a_person_is_sent_a_text(channel: str, action: str) -> None:
    assert _create_action(channel, UUID(int=1), "failed").type == action


@pytest.mark.parametrize(
    "option",
    [
        "pager=https://SECRET",
        "https://host/SECRET",
        "slack",
        "slack=SECRET",
        "email=team@example.com",
        "webhook=ftp://x",
    ],
)
def test_another_form_is_one_line(option: str) -> None:
    with pytest.raises(ConfigError, match=r"^--notify [\w=]+: write slack=https://hooks\.slack\.com/") as info:
        parse_notification_channels([option])
    assert "SECRET" not in str(info.value)
