"""`cosmos mcp`: tools return what commands print, a run starts after a person has confirmed, options are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")
from mcp.types import ElicitResult  # noqa: E402

from cosmos_core.mcp_server import open_server  # noqa: E402
from tests.conftest import SharedServer  # noqa: E402

STAGE = """
from cosmos_core.types import Outcome

def write(stage):
    (stage.path / "text").write_text("made")
    return Outcome(("text",), {}, {})
"""
RECIPE = """
[pipeline]
name = "small"

[[pipeline.stages]]
name = "only"
kind = "custom"
entry = "stage.py:write"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    (tmp_path / "r.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(tool: str, arguments: dict[str, str], response: ElicitResult | None = None) -> tuple[str, bool]:
    """Return the text of a tool's result, and if it is an error; `response` is what the person says."""

    async def ask(*_: Any) -> ElicitResult:
        assert response is not None
        return response

    async def work() -> tuple[str, bool]:
        async with mcp.Client(open_server(), elicitation_callback=ask if response else None) as client:
            result = await client.call_tool(tool, arguments)
            return result.content[0].text, bool(result.is_error)

    return asyncio.run(work())


def test_a_tool_returns_what_its_command_prints() -> None:
    text, is_error = call("explain_key", {"key": "train.optm_lr"})
    assert text == CliRunner().invoke(app, ["config", "explain", "train.optm_lr"]).output.strip() and not is_error
    text, is_error = call("run_status", {"run": "no-such-run"})
    assert is_error and "exit code 64" in text and "no-such-run" in text


def test_a_value_is_never_an_option(folder: Path) -> None:
    text, is_error = call("plan", {"recipe": "--verify"})
    assert is_error and "'--verify' begins with a hyphen" in text


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(ElicitResult(action="decline"), marks=pytest.mark.full),
        ElicitResult(action="accept", content={"start": False}),
    ],
)
def test_nothing_starts_without_a_confirmation(response: ElicitResult, folder: Path) -> None:
    text, _ = call("start_run", {"recipe": "r.toml"}, response)
    assert "not started" in text
    assert not (folder / "outputs").exists() or not [*(folder / "outputs").glob("*/stages/*")]


def test_a_client_that_cannot_ask_a_person_starts_nothing(folder: Path) -> None:
    with pytest.raises(ExceptionGroup) as info:
        call("start_run", {"recipe": "r.toml"})
    assert info.group_contains(mcp.MCPError, match="elicitation")
    assert not (folder / "outputs").exists() or not [*(folder / "outputs").glob("*/stages/*")]


def test_a_confirmed_run_starts_and_its_state_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, server: SharedServer
) -> None:
    for name, value in server.wake().items():
        monkeypatch.setenv(name, value)
    text, is_error = call("start_run", {"recipe": "r.toml"}, ElicitResult(action="accept", content={"start": True}))
    assert not is_error and "only" in text
    [stage] = folder.glob("outputs/*/stages/only")

    async def wait() -> None:
        while not (stage / "result.json").exists():
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(wait(), 300))
    text, is_error = call("run_status", {})
    assert not is_error and "only" in text
    text, is_error = call("run_lineage", {"run": stage.parents[1].name})
    assert is_error and "no stage of this run has made a model yet" in text
    text, is_error = call("stage_log", {"stage": "only"})
    assert not is_error, text
    server.pause()


def test_the_page_for_agents_has_every_command_and_key() -> None:
    result = CliRunner().invoke(app, ["agent-docs"])
    assert result.exit_code == 0, result.output
    assert all(
        f"## cosmos {name}" in result.output for name in ("run", "resume", "mcp", "sft", "doctor", "config explain")
    )
    assert "--run-id" in result.output and "optm_lr" in result.output
