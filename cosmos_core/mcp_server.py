"""An MCP server with which an agent reads runs, plans and checks recipes, and starts a run that a person confirms.

Each tool executes a `cosmos` command in the folder of the server and returns what the command prints, so that an agent
and a person read the same text. Source: the Model Context Protocol, package `mcp`.
"""

import asyncio
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Elicit, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from cosmos_core.imports import make_python_command

_READ_ONLY_ANNOTATIONS = ToolAnnotations(read_only_hint=True)
_RUN_START_ANNOTATIONS = ToolAnnotations(read_only_hint=False, destructive_hint=False)
_COMMAND_TIMEOUT_SECONDS, _RUN_START_TIMEOUT_SECONDS = 600, 120
_SERVER_INSTRUCTIONS = """Operate post-training pipelines. Recipes are TOML files; `explain_key` documents their keys.
`check` and `plan` take a recipe. Runs are named by their id; an empty id names the newest.
`start_run` asks the user first."""


class Confirmation(BaseModel):
    """Form, shown by the client of the MCP server, in which a person confirms the start of a run."""

    start: bool = Field(description="Start the run on this machine")


def open_server() -> MCPServer:
    """Return the MCP server with its tools; paths are relative to the working directory of the process."""
    server = MCPServer("cosmos", instructions=_SERVER_INSTRUCTIONS)
    _add_read_only_tools(server)

    @server.tool(annotations=_RUN_START_ANNOTATIONS)
    async def start_run(
        recipe: str, response: Annotated[ElicitationResult[Confirmation], Resolve(_ask_to_start_run)]
    ) -> str:
        """After the user confirms, start a run of a recipe in the background and return its first lines of output."""
        return await _run_if_confirmed(response, "run", recipe)

    @server.tool(annotations=_RUN_START_ANNOTATIONS)
    async def resume_run(
        run: str, response: Annotated[ElicitationResult[Confirmation], Resolve(_ask_to_resume_run)]
    ) -> str:
        """After the user confirms, continue a stopped run in the background and return its first lines of output."""
        return await _run_if_confirmed(response, "resume", run)

    return server


def _add_read_only_tools(server: MCPServer) -> None:

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def list_runs() -> str:
        """List the runs of the folder `outputs`, the newest last."""
        return await _run_cosmos("runs")

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def run_status(run: str = "") -> str:
        """Show the state, time and metrics of every stage of a run, and how a stopped run is continued."""
        return await _run_cosmos("status", run)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def stage_log(run: str = "", stage: str = "") -> str:
        """Show the log of the newest attempt of a stage."""
        return await _run_cosmos("logs", run, stage)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def run_samples(run: str = "") -> str:
        """Show completions or images of a run with their rewards."""
        return await _run_cosmos("samples", run)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def run_lineage(run: str = "") -> str:
        """Show from which data, models and settings the model of a run was made."""
        return await _run_cosmos("lineage", run)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def compare_runs(first: str, second: str) -> str:
        """Show how two runs differ in settings, metrics and times."""
        return await _run_cosmos("compare", first, second)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def explain_key(key: str) -> str:
        """Explain a configuration key, such as `train.optm_lr`: type, default, unit, meaning."""
        return await _run_cosmos("config", "explain", key)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def check(recipe: str) -> str:
        """Check a recipe: its schema, then its models, rows and rewards. Nothing is started."""
        return await _run_cosmos("check", recipe)

    @server.tool(annotations=_READ_ONLY_ANNOTATIONS)
    async def plan(recipe: str) -> str:
        """Show which stages of a recipe would run or be reused, and why. Nothing is started."""
        return await _run_cosmos("plan", recipe)


async def _ask_to_start_run(recipe: str) -> Elicit[Confirmation]:
    return Elicit(f"Start `cosmos run {recipe}`?\n\n{await _run_cosmos('plan', recipe)}", Confirmation)


async def _ask_to_resume_run(run: str) -> Elicit[Confirmation]:
    await _run_cosmos("status", run)  # check that the run exists: raises an error if it does not
    return Elicit(f"Start `cosmos resume {run}`?", Confirmation)


async def _run_if_confirmed(response: ElicitationResult[Confirmation], *command_words: str) -> str:
    """Start a `cosmos` command in the background if `response` confirms it. Return the output up to the start of the
    first stage, or of two minutes if none starts earlier. Raises `ToolError` with the output if the command failed."""
    if response.action != "accept" or not response.data.start:
        return "not started: the user declined"
    with tempfile.NamedTemporaryFile(prefix="cosmos-mcp-", suffix=".log", delete=False) as log_file:
        process = subprocess.Popen(
            _build_command(*command_words), stdin=subprocess.DEVNULL, stdout=log_file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    output_text, elapsed_seconds = "", 0
    while process.poll() is None and " running" not in output_text and elapsed_seconds < _RUN_START_TIMEOUT_SECONDS:
        await asyncio.sleep(1)
        output_text, elapsed_seconds = Path(log_file.name).read_text(errors="replace"), elapsed_seconds + 1
    output_text = Path(log_file.name).read_text(errors="replace")
    if process.poll():
        raise ToolError(output_text)
    process_state = "ended" if process.poll() == 0 else f"runs as process {process.pid}"
    return f"{process_state}; output in {log_file.name}:\n{output_text}"


def _build_command(*command_words: str) -> list[str]:
    """Return the command line of a `cosmos` command, without empty words at its end. Raise `ToolError` if a word begins
    with a hyphen, because the words are names and paths, not options."""
    if option_words := [word for word in command_words if word.startswith("-")]:
        raise ToolError(f"{option_words[0]!r} begins with a hyphen, as an option does; give a name or a path")
    num_command_words = max((i for i, word in enumerate(command_words, start=1) if word), default=0)
    return [*make_python_command(), "-m", "cosmos_core", *command_words[:num_command_words]]


async def _run_cosmos(*command_words: str) -> str:
    """Run a `cosmos` command and return its standard error, which has notes for the user, followed by its standard
    output. Raise `ToolError` with both if the command fails."""
    command = _build_command(*command_words)
    process = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if process.returncode:
        raise ToolError(f"exit code {process.returncode}: {process.stderr.strip() or process.stdout.strip()}")
    return f"{process.stderr}{process.stdout}".strip()
