"""Work pools that `cosmos bootstrap` makes, or refuses before it has made anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.exceptions import ObjectNotFound
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.launch.bootstrap import HEARTBEAT_SECONDS, WorkPool, _save_work_pool, bootstrap_server


class Server:
    """A server without work pools, which knows two types."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def read_work_pool(self, name: str) -> Any:
        raise ObjectNotFound(http_exc=Exception(name))

    def read_worker_metadata(self) -> dict[str, Any]:
        return {"prefect": {"process": {"type": "process"}}, "prefect-docker": {"docker": {"type": "docker"}}}

    def create_work_pool(self, wanted: Any) -> None:
        self.made.append(wanted)


def test_a_flow_of_a_user_sends_heartbeats_as_often_as_the_automation_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "")
    monkeypatch.delenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY")
    monkeypatch.setattr(os, "execv", lambda *_: None)
    assert CliRunner().invoke(app, ["worker", "--pool", "local"]).exit_code == 0
    assert os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)
    deployments = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())["deployments"]
    for each in deployments:
        variables = each["work_pool"]["job_variables"]["env"]
        assert "cosmos" in each["tags"], "the tag by which the automation knows them"
        assert variables["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)


@pytest.mark.parametrize("name", ["prefect-x", "Prefect", "y/z", "a&b", "", " "])
def test_a_name_that_prefect_does_not_take_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(bootstrap_server([WorkPool("good"), WorkPool(name)]))
    assert str(caught.value) == (
        f"work pool {name!r}: a name has no % & / < >, and those that begin with 'prefect' are Prefect's own; take "
        "another"
    )


def test_a_type_that_is_not_there_makes_no_pool(tmp_path: Path) -> None:
    server = Server()
    with pytest.raises(ConfigError) as caught:
        _save_work_pool(server, WorkPool("big", "nosuch"))
    assert str(caught.value) == (
        "work pool 'big': there is no type 'nosuch'; known: docker, process. Of another one give the --template"
    )
    assert server.made == []
    assert _save_work_pool(server, WorkPool("big", "docker", 2)) == "work pool big: made (docker, at most 2 at once)"
    (tmp_path / "template.json").write_text('{"variables": {}, "job_configuration": {}}')
    assert (
        _save_work_pool(server, WorkPool("own", "nosuch", None, tmp_path / "template.json"))
        == "work pool own: made (nosuch)"
    )
    assert [(pool.name, pool.type) for pool in server.made] == [("big", "docker"), ("own", "nosuch")]
