"""Calls of tools in worker processes that can be killed, so that no tool can hang, crash or end a run.

If a tool raises, ends its process or misses the deadline, the policy receives the text of the error. The call is never
retried, because it can have had side effects. The worker processes are like those of rewards (`rewards/process.py`):
spawned, without torch, each in its own process group, with an environment without secrets.
"""

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from typing import Any

from pebble import ProcessExpired, ProcessPool

from cosmos_core.environment import mask_text
from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.rewards.base import error_on_one_line, wait_for_result
from cosmos_core.rewards.process import WORKER_START_TIMEOUT, WorkerPool, describe_exit, init_worker, wait_for_futures
from cosmos_core.tools.base import TOOLS_KEY, ToolCall, ToolResult, load_tool, tool_paths_by_name

logger = logging.getLogger(__name__)

_MAX_RESULT_CHARACTERS = 1 << 16  # maximum number of characters of a tool's result that the policy receives
# Mask secrets also in this number of characters beyond the limit, because a secret may cross the limit.
_MAX_SECRET_CHARACTERS = 4096
_MAX_PROCESSES = 16
_MAX_BROKEN_POOLS = 3  # maximum number of process pools for a list of calls; a process that dies breaks its pool


class ToolRunner(WorkerPool):
    """Pool of worker processes that call tools by the names of their functions. `timeout_seconds` is the deadline of
    each call. The processes see standard environment variables and those in `variable_names`. Only one thread can use
    the runner at a time. Entering the runner raises `ConfigError` if a tool cannot be imported or is not marked with
    `@tool`, and `StageFailed` if a process ended while it loaded the tools."""

    def __init__(
        self,
        tool_paths: Sequence[str],
        *,
        timeout_seconds: float,
        variable_names: Sequence[str] = (),
        num_workers: int | None = None,
        send_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up the runner for the tools at the import paths `tool_paths`. `send_heartbeat` is called while the runner
        waits for results; `num_workers` None: one worker process per core, up to 16."""
        self._tool_paths = tool_paths_by_name(tool_paths)
        self._timeout_seconds, self._env_variable_names = timeout_seconds, tuple(variable_names)
        self._send_heartbeat = send_heartbeat
        self._num_workers = min(num_workers or count_usable_cores(), _MAX_PROCESSES)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schema of each tool, which the chat template renders into the prompt. Raise `ConfigError` if
        the signature of a tool lacks types, or its docstring lacks descriptions."""
        return self._call_in_pool(_make_tool_schemas) if self._tool_paths else []

    def run_tool_calls(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Make tool calls concurrently, and return the results in the order of the calls."""
        tool_results = [self._make_invalid_call_result(call) for call in calls]
        for _ in range(_MAX_BROKEN_POOLS):
            if not (pending_indices := [i for i, result in enumerate(tool_results) if result is None]):
                break
            pool = self._get_working_pool()
            futures = [
                pool.schedule(
                    _call_tool,
                    args=(self._tool_paths[calls[i].name], calls[i].arguments),
                    timeout=self._timeout_seconds,
                )
                for i in pending_indices
            ]
            if not wait_for_futures(futures, self._timeout_seconds + WORKER_START_TIMEOUT, self._send_heartbeat):
                self.close()  # close a pool in which a process was lost, or none has started
            for i, future in zip(pending_indices, futures, strict=True):
                tool_results[i] = self._collect_call_result(calls[i].name, future)
        return [result or _make_error_result("its process ended") for result in tool_results]

    def _make_invalid_call_result(self, call: ToolCall) -> ToolResult | None:
        """Return an error as the result of a call that is malformed or names an unknown tool; None: a valid call."""
        if call.error:
            return _make_error_result(call.error)
        if call.name not in self._tool_paths:
            tool_names = ", ".join(self._tool_paths) or "none"
            return _make_error_result(f"there is no tool {call.name!r}; there are: {tool_names}")
        return None

    def _collect_call_result(self, tool_name: str, call_future: Future[ToolResult]) -> ToolResult | None:
        """Return the result of a tool call that has ended; None: the process pool broke before the call began."""
        try:
            return call_future.result(timeout=0)
        except BrokenProcessPool:
            return None
        except (ProcessExpired, TimeoutError) as error:
            reason = (
                f"not done in {self._timeout_seconds:g} s" if isinstance(error, TimeoutError) else describe_exit(error)
            )
            logger.warning("tool %s: %s", tool_name, reason)
            return _make_error_result(reason)
        except Exception as error:  # noqa: BLE001 - any error, such as of unpicklable arguments, goes to the policy
            return _make_error_result(error_on_one_line(error))

    def _start_pool(self) -> ProcessPool:
        process_pool = self._replace_pool(_start_worker, list(self._tool_paths.values()))
        self._call_in_pool(_load_tools)
        return process_pool

    def _call_in_pool(self, pool_function: Callable[[list[str]], Any]) -> Any:
        process_pool = self._pool or self._start_pool()
        try:
            with cleanup_on_error(self.close):
                future = process_pool.schedule(pool_function, args=(list(self._tool_paths.values()),))
                if not wait_for_futures([future], WORKER_START_TIMEOUT, self._send_heartbeat):
                    raise StageFailed(f"{TOOLS_KEY}: the tools were not loaded in {WORKER_START_TIMEOUT:g} s")
                return future.result()
        except (BrokenProcessPool, ProcessExpired) as error:
            raise StageFailed(f"{TOOLS_KEY}: a process ended while it loaded the tools") from error


def _make_error_result(error_text: str) -> ToolResult:
    return ToolResult(f"Error: {error_text}", is_error=True)


# The code below runs in the worker processes.


def _start_worker(tool_paths: Sequence[str], variable_names: Sequence[str], parent_pid: int) -> None:
    """Initialise a worker process and import the user's tools. Errors are ignored here, because the tools are imported
    again before the first call, which reports the errors."""
    init_worker(variable_names, parent_pid)
    with suppress(ConfigError):
        _load_tools(tool_paths)


def _load_tools(tool_paths: Sequence[str]) -> None:
    for tool_path in tool_paths:
        _load_cached_tool(tool_path)


_load_cached_tool = cache(load_tool)


def _make_tool_schemas(tool_paths: Sequence[str]) -> list[dict[str, Any]]:
    # transformers is imported here, because the import takes half a second and only one worker process needs it.
    from transformers.utils import chat_template_utils

    # transformers would import torch to recognise tensor parameters; a tool with tensors has imported torch already.
    chat_template_utils.is_torch_available = lambda: "torch" in sys.modules
    tool_schemas = []
    for tool_path in tool_paths:
        try:
            tool_schemas.append(chat_template_utils.get_json_schema(_load_cached_tool(tool_path)))
            # Calls use the name in the recipe; `__name__` may be the name of a decorator or another name.
            tool_schemas[-1]["function"]["name"] = tool_path.rpartition(":")[2]
        except Exception as error:  # raised if a tool lacks a type hint or a description
            raise ConfigError(f"{TOOLS_KEY}: {tool_path!r} cannot be described: {error_on_one_line(error)}") from error
    return tool_schemas


def _encode_object(value: object) -> str:
    """Return the text of an object in a tool's result that JSON does not support. Raise `TypeError` if this text
    contains only the type and the memory address of the object, as for an image."""
    if re.fullmatch("<.* at 0x[0-9a-fA-F]+>+", text := str(value), re.DOTALL):
        raise TypeError(f"it returned an object of type {type(value).__name__}, which is neither text nor JSON")
    return text


def _call_tool(tool_path: str, arguments: dict[str, Any]) -> ToolResult:
    try:
        result = _load_cached_tool(tool_path)(**arguments)
        if inspect.iscoroutine(result):
            result = wait_for_result(result)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_encode_object)
        is_error = False
    except BaseException as error:  # noqa: BLE001 - the user's tool may raise any error; the policy receives its text
        text, is_error = f"Error: {error_on_one_line(error)}", True
    is_truncated = len(text) > _MAX_RESULT_CHARACTERS
    text = mask_text(text[: _MAX_RESULT_CHARACTERS + _MAX_SECRET_CHARACTERS]) if is_truncated else mask_text(text)
    text = text.encode(errors="replace").decode()  # replace lone surrogates, which tokenizers refuse
    return ToolResult(text[:_MAX_RESULT_CHARACTERS] + "..." * is_truncated, is_error)
