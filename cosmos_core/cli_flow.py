"""Commands `cosmos run`, `resume` and `plan` for a Python flow `FILE.py:FLOW`, which calls the tasks of the package
`tasks`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_core.environment import MASK, mask_named_secrets
from cosmos_core.errors import ConfigError
from cosmos_core.registry import is_user_code, locate_code


def find_entrypoint(configs: Sequence[Path], *, is_toml_required: bool) -> str:
    """Return the entrypoint `FILE.py:FLOW` if a command names a flow, in this form or as `PACKAGE.MODULE:FLOW`; empty
    if it names a TOML file. `is_toml_required` is True if an option of the command supports only TOML files. Raises
    `ConfigError` if the command names a flow, but has options or several files, which only TOML files support."""
    entrypoint = str(configs[0])
    if entrypoint.endswith(".py"):
        raise ConfigError(f"{entrypoint} is no TOML file; name a flow of it as well, {entrypoint}:FLOW")
    if ".py:" not in entrypoint:
        if not is_user_code(entrypoint) or configs[0].exists():
            return ""
        entrypoint = f"{locate_code(entrypoint)}:{entrypoint.rpartition(':')[2]}"
    if is_toml_required or len(configs) > 1:
        reason = "--set, --from-stage, --verify, --estimate and further files are for TOML files"
        raise ConfigError(f"{entrypoint} is a flow in Python: {reason}; give its parameters with -p NAME=VALUE")
    return entrypoint


def parse_parameters(parameter_assignments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of `-p NAME=VALUE` options; a value is JSON or, otherwise, a string."""
    parameters: dict[str, Any] = {}
    for assignment in parameter_assignments:
        name, separator, parameter_json = assignment.partition("=")
        if not separator or not name.isidentifier():
            raise ConfigError(f"-p {assignment}: write NAME=VALUE")
        try:
            parameters[name] = json.loads(parameter_json)
        except ValueError:
            parameters[name] = parameter_json
    return parameters


def _format_option(parameter_name: str, value: Any) -> str:
    """Return the option `-p NAME=VALUE`, quoted for a shell, from which `parse_parameters` reads a parameter."""
    is_plain_text = isinstance(value, str) and parse_parameters([f"{parameter_name}={value}"])[parameter_name] == value
    return f"-p {shlex.quote(f'{parameter_name}={value if is_plain_text else json.dumps(value)}')}"


def refuse_flow_parameters(parameter_assignments: Sequence[str]) -> None:
    """Raise `ConfigError` if a command that names a TOML file has `-p` options, which set parameters of a flow."""
    if parameter_assignments:
        raise ConfigError("-p is for a flow, FILE.py:FLOW; settings of a TOML file are changed with --set KEY=VALUE")


def is_run_of_python_flow(run_path: Path) -> bool:
    """Return True if a run was created by a Python flow rather than from a TOML file."""
    from cosmos_core.run.directory import read_start_info

    start_info = read_start_info(run_path)
    return start_info is not None and bool(start_info.entrypoint)


def resume_flow(run_path: Path) -> int:
    """Run the flow of an existing run again, with its parameters; return the exit code. The current folder must be
    the one in which the run was started."""
    from cosmos_core.run.directory import RunStartInfo, read_start_info

    start_info, run_path = read_start_info(run_path) or RunStartInfo(), run_path.absolute()
    start_folder = start_info.working_directory  # empty for a run that an earlier version started
    secret_names = [name for name, value in start_info.parameters.items() if json.dumps(MASK) in json.dumps(value)]
    if secret_names:
        secret_options = {name: f"-p {name}=..." for name in secret_names}
        cli_args = {name: _format_option(name, value) for name, value in start_info.parameters.items()} | secret_options
        output_dir, entrypoint = shlex.quote(str(run_path.parent)), shlex.quote(start_info.entrypoint)
        run_command = f"COSMOS_OUTPUT_DIR={output_dir} cosmos run {entrypoint}"
        cd_command = f"cd {shlex.quote(start_folder)} && " if start_folder and start_folder != os.getcwd() else ""
        raise ConfigError(
            f"run {run_path.name}: run.json does not keep the secret {' '.join(secret_options.values())}; continue the "
            f"run with: {cd_command}{run_command} {' '.join(cli_args.values())} --run-id {shlex.quote(run_path.name)}"
        )
    os.environ["COSMOS_OUTPUT_DIR"] = str(run_path.parent)
    if start_folder and not os.access(start_folder, os.X_OK):
        folder_problem = f"was started in {start_folder}, to which relative paths of its flow refer"
        raise ConfigError(f"run {run_path.name} {folder_problem}; there is no such folder, so make it, or move it back")
    return run_flow(start_info.entrypoint, start_info.parameters, run_path.name, run_path.parent)


def run_flow(entrypoint: str, parameters: Mapping[str, Any], run_id: str, output_dir: Path) -> int:
    """Run a flow in this process, as `cosmos run` runs a pipeline; return the exit code.

    Args:
        entrypoint: `FILE.py:FLOW`.
        parameters: parameters of the flow, which converts them to the types of its signature.
        run_id: name of the run; empty: a name derived from the flow and its parameters.
        output_dir: folder of runs and their shared data; the recipe of the first stage can name another for the run.
    """
    from cosmos_core.run.directory import create_writable_folder
    from cosmos_core.session import open_session, run_python_flow

    _require_flow_file(entrypoint)
    if run_id:
        os.environ["COSMOS_RUN_ID"] = run_id
    with open_session(create_writable_folder(output_dir), run_python_flow) as run_session:
        return run_session(entrypoint, parameters)


def plan_flow(entrypoint: str, parameters: Mapping[str, Any]) -> None:
    """Print the plan of a Python flow: the stages of its last run with the same parameters, and which of them would be
    reused. Nothing is started. Raises `ConfigError` if there is no such flow, or it has no such parameters."""
    from typer import echo

    from cosmos_core.observe.console import make_console
    from cosmos_core.observe.plan_table import make_plan_table
    from cosmos_core.run.directory import open_run
    from cosmos_core.run.plan import plan_stages
    from cosmos_core.session import import_python_flow
    from cosmos_core.upload.artifact_store import make_result_lookup

    _require_flow_file(entrypoint)
    flow, _ = import_python_flow(entrypoint)
    from tasks.credentials import set_command_credentials
    from tasks.flow_identity import check_run_of_flow, derive_name_and_parameters, find_flow_source
    from tasks.kinds import all_kinds

    run_id, flow_parameters = derive_name_and_parameters(flow, parameters)
    run_path = Path(os.environ.get("COSMOS_OUTPUT_DIR") or "outputs").absolute() / run_id
    check_run_of_flow(run_path, ":".join(map(str, find_flow_source(flow))))
    masked_parameters = mask_named_secrets(flow_parameters)
    parameter_text = ", ".join(f"{name}={value!r}" for name, value in masked_parameters.items()) or "no parameters"
    if not is_run_of_python_flow(run_path):
        echo(f"{entrypoint} has no run {run_path} with {parameter_text}: its stages are known when it calls them")
        return
    run = open_run(run_path, all_kinds())
    set_command_credentials(run.pipeline)
    stage_kinds, find_stored_result = run.pipeline.stage_kinds, make_result_lookup(run.pipeline)
    reuse_decisions = plan_stages(run.pipeline, stage_kinds, run.output_dir, find_stored_result=find_stored_result)
    make_console().print(make_plan_table(run.pipeline, reuse_decisions))
    echo(f"These are the stages of run {run_id} ({parameter_text}); the flow decides on later calls when it runs.")


def _require_flow_file(entrypoint: str) -> None:
    flow_file = Path(entrypoint.rpartition(":")[0])
    if not flow_file.is_file():
        raise ConfigError(f"{entrypoint}: no such file: {flow_file}")
