"""Name of the run of a Python flow, and the parameters of the flow as JSON values."""

import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.exceptions import ParameterBindError, ParameterTypeError
from prefect.utilities.callables import get_call_parameters
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cosmos_core.config.schema.pipeline import STAGE_NAME_PATTERN
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggest_names
from cosmos_core.run.directory import read_start_info

RUN_ID_VARIABLE = "COSMOS_RUN_ID"
"""Environment variable with the name of the run; unset: it is derived from the flow and its parameters."""


def derive_name_and_parameters(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the run of a flow that is called with `arguments`, and all parameters of this call, including
    defaults; raise ConfigError if an argument is invalid."""
    try:
        return derive_run_identity(flow, flow.validate_parameters(get_call_parameters(flow.fn, (), dict(arguments))))
    except (ParameterBindError, ParameterTypeError) as error:
        names = list(inspect.signature(flow.fn).parameters)
        for name in arguments.keys() - names:
            problem_text = f"no parameter {name!r}{suggest_names(name, names)}; it has {', '.join(names) or 'none'}"
            raise ConfigError(f"flow {flow.name!r}: {problem_text}") from error
        raise ConfigError(f"flow {flow.name!r}: {error}") from error


def derive_run_identity(
    flow: Flow[..., Any], parameters: Mapping[str, Any], *, is_subflow: bool = False
) -> tuple[str, dict[str, Any]]:
    """Return the run name of a flow, and its parameters as JSON values. The name is derived from the flow's file,
    name and parameters, unless its parameter `run_id` or, if no flow has called it, COSMOS_RUN_ID sets the name."""
    json_parameters = to_json_values(parameters)
    flow_file, function_name = find_flow_source(flow)
    identifying_json = json.dumps([flow_file.name, function_name, json_parameters], sort_keys=True)
    identity_hash = hashlib.sha256(identifying_json.encode()).hexdigest()[:8]
    sanitized_name = "".join(letter if STAGE_NAME_PATTERN.fullmatch(f"a{letter}") else "-" for letter in flow.name)
    derived_run_name = f"{(sanitized_name.strip('-_') or 'flow')[:80]}-{identity_hash}"
    run_id = (not is_subflow and os.environ.get(RUN_ID_VARIABLE)) or json_parameters.get("run_id")
    return str(run_id or derived_run_name), json_parameters


def to_json_values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON values, from which pydantic restores the parameters with their types."""
    json_parameters: dict[str, Any] = json.loads(json.dumps(parameters, default=_to_jsonable))
    return json_parameters


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, set | frozenset):  # sorted, because the order of a set differs between processes
        return sorted(value, key=repr)
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    if callable(convert_to_list := getattr(value, "tolist", None)):  # convert a scalar or array of NumPy or torch
        return convert_to_list()
    return to_jsonable_python(value, fallback=str)


def find_flow_source(flow: Flow[..., Any]) -> tuple[Path, str]:
    """Return the file and the qualified name of the function of a flow."""
    function = inspect.unwrap(flow.fn)
    return Path(inspect.getsourcefile(function) or "flow.py").absolute(), function.__qualname__


def check_run_of_flow(run_path: Path, entrypoint: str) -> None:
    """Raise ConfigError if an existing run was made from a TOML file, or by another flow than `entrypoint`."""
    start_info = read_start_info(run_path)
    if start_info is not None and not start_info.entrypoint:
        raise ConfigError(f"run {run_path.name} was made from a file, not by a flow; give the flow another run_id")
    # Compare without the folder, because a deployment can clone the flow into another folder for each flow run.
    if start_info is not None and Path(start_info.entrypoint).name != Path(entrypoint).name:
        owner = start_info.entrypoint
        raise ConfigError(f"run {run_path.name} is one of the flow {owner}; give this flow another run_id")
