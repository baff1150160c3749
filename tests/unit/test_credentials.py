"""Credentials of a Prefect block become variables of the flow's process, which no log shows."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.blocks import system

from cosmos_core import environment
from cosmos_core.cli import _check_pipeline
from cosmos_core.cli_models import promote
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.environment import mask_file, mask_text
from cosmos_core.errors import ConfigError
from cosmos_core.run.bucket import Bucket
from flows.post_train import open_run_to_execute
from tasks.credentials import SECRET_BLOCK, set_command_credentials, set_credentials
from tasks.kinds import all_kinds
from tests import store

STAGES = "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n" + (
    "[[pipeline.stages]]\nname = 'up'\nkind = 'upload'\nafter = 'm'\nmodel = 'stage:m'\ntarget = '{}'\n"
)


class Stored:
    """What a server has under the name of the block."""

    value: Any = None

    @classmethod
    def load(cls, name: str) -> Stored:
        assert name == SECRET_BLOCK
        if cls.value is None:
            raise ValueError("Unable to find block document")
        return cls()

    def get(self) -> Any:
        return self.value


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "Secret", Stored)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def pipeline(folder: Path, target: str) -> Pipeline:
    (folder / "p.toml").write_text(STAGES.format(target))
    return load_pipeline(folder / "p.toml", (), all_kinds())


@pytest.mark.parametrize("form", ["object", "text"])
def test_a_block_lends_what_the_environment_does_not_have(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of the environment")
    value = {"AWS_SECRET_ACCESS_KEY": "a-secret-of-the-block", "HF_TOKEN": "of the block", "PATH": "/nowhere"}
    monkeypatch.setattr(Stored, "value", value if form == "object" else str(value).replace("'", '"'))
    set_credentials(pipeline(tmp_path, "s3://models/x"))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "a-secret-of-the-block"
    assert os.environ["HF_TOKEN"] == "of the environment" and os.environ["PATH"] != "/nowhere"
    assert mask_text("it is a-secret-of-the-block") == "it is ***"


def test_a_block_lends_no_token_of_another_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    monkeypatch.setattr(Stored, "value", dict.fromkeys(names, "of the block"))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")  # so that it is restored
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    for name in names[:2]:
        monkeypatch.setenv(name, "of the environment")
    set_credentials(pipeline(tmp_path, "s3://models/x"))
    assert [os.environ.get(name) for name in names] == ["of the environment", "of the environment", None]
    for name in names[:2]:
        monkeypatch.delenv(name)
    set_credentials(pipeline(tmp_path, "s3://models/x"))
    assert [os.environ[name] for name in names] == ["of the block"] * 3


def test_no_block_is_asked_for_where_nothing_is_elsewhere_and_none_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(pipeline(tmp_path, "s3://models/x"))
    monkeypatch.setattr(Stored, "load", None)
    set_credentials(pipeline(tmp_path, str(tmp_path / "published")))
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


HUB = """
[policy]
model_name_or_path = "MODEL"
[train.train_policy]
type = "sft"
dataset.name = "ROWS"
"""


@pytest.mark.parametrize("elsewhere", [("MODEL",), ("ROWS",), ()])
def test_the_token_is_lent_for_what_lies_on_the_hub(
    elsewhere: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stored, "value", {"HF_TOKEN": "of the block"})
    text = HUB
    for name in ("MODEL", "ROWS"):
        (tmp_path / name).mkdir()
        text = text.replace(name, "team/private" if name in elsewhere else str(tmp_path / name))
    (tmp_path / "r.toml").write_text(text)
    set_credentials(load_pipeline(tmp_path / "r.toml", (), all_kinds()))
    assert os.environ.get("HF_TOKEN") == ("of the block" if elsewhere else None)


def test_a_block_that_is_no_json_is_a_warning_without_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Stored, "value", "AKIA:a-secret-of-the-block")
    set_credentials(pipeline(tmp_path, "s3://models/x"))
    assert caplog.messages == [
        "the Secret block cosmos-credentials is no object of variables and their values: it is not used"
    ]


@pytest.fixture
def lent(proxy: store.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store, with rows, whose credentials the block alone has."""
    store.use(proxy.url, monkeypatch)
    Bucket("models").write("lent/rows.jsonl", b"{}\n")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3", "AWS_REGION")
    monkeypatch.setattr(Stored, "value", {name: os.environ[name] for name in names})
    for name in names:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("lent")
def test_post_train_has_the_credentials_before_it_pins_what_the_run_reads(tmp_path: Path) -> None:
    stage = STAGES.partition("[[pipeline.stages]]\nname = 'up'")[0] + "data = 's3://models/lent/rows.jsonl'\n"
    (tmp_path / "p.toml").write_text(f"[pipeline]\noutput_dir = '{tmp_path}/outputs'\n{stage}")
    run = open_run_to_execute(str(tmp_path / "p.toml"), [], "")
    assert run.pipeline.stage("m").data.startswith("s3://models/lent/rows.jsonl#")


def test_commands_that_know_a_server_have_the_credentials_of_the_block(
    tmp_path: Path, lent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "s3://models/of-commands"
    loaded = pipeline(tmp_path, target)
    loaded = replace(loaded, config=loaded.config.model_copy(update={"output_dir": str(tmp_path / "outputs")}))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for command in (lambda: _check_pipeline(loaded), lambda: promote(target, "")):
        with pytest.raises(ConfigError, match=r"no credentials; set"):
            command()
    monkeypatch.setenv("PREFECT_API_URL", "http://server/api")
    with pytest.raises(ConfigError, match=r"^s3://models/of-commands: nothing was published"):
        promote(target, "")
    for name in Stored.value:
        monkeypatch.delenv(name)
    assert _check_pipeline(loaded) == tmp_path / "outputs"


def test_a_server_that_does_not_respond_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setenv("PREFECT_API_URL", "http://server/api")
    monkeypatch.setattr(Stored, "load", refuse)
    set_command_credentials(None)
    assert caplog.messages == [
        "the Prefect server does not respond, and the Secret block cosmos-credentials is not used: refused"
    ]


@pytest.mark.parametrize("wrong", ["target", "artifact_store"])
def test_a_flow_finds_a_target_or_a_store_that_cannot_be_written_before_it_makes_a_run(
    wrong: str, tmp_path: Path, lent: None
) -> None:
    (tmp_path / "file").write_text("")
    target, store_ = (tmp_path / "file" / "x", "") if wrong == "target" else (tmp_path / "x", "s3://no-such-bucket/x")
    head = f"[pipeline]\noutput_dir = '{tmp_path}/outputs'\nartifact_store = '{store_}'\n"
    (tmp_path / "p.toml").write_text(head + STAGES.format(target))
    said = "is no folder" if wrong == "target" else "there is no such bucket"
    with pytest.raises(ConfigError, match=said):
        open_run_to_execute(str(tmp_path / "p.toml"), [], "")
    assert not list(tmp_path.glob("outputs/2*"))


def test_a_log_is_masked_where_it_stands_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_READ_BLOCK_BYTES", 64)
    monkeypatch.setenv("SOME_TOKEN", "a-secret-token")
    log = tmp_path / "log"
    text = "".join(f"{'x' * gap}a-secret-token\n" for gap in range(70))
    log.write_text(text)
    inode = log.stat().st_ino
    mask_file(log)
    assert log.read_text() == text.replace("a-secret-token", "*" * 14)
    assert log.stat().st_ino == inode, "who follows it goes on where he is"
