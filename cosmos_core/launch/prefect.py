"""Entry point of Prefect's command line with a faster start: `python -m cosmos_core.launch.prefect server start` runs
`prefect server start`. A worker that is started this way survives an outage of its server."""

import asyncio
import importlib
import runpy
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from cosmos_core.imports import without_garbage_collection
from cosmos_core.transient import is_network_error

_POLLING_LOOP_MODULES = ("prefect._internal.observers", "prefect.workers.base", "prefect.workers.process")
"""Modules with the loops in which a worker polls its server for cancelled flow runs, new flow runs and heartbeats."""


def keep_polling() -> None:
    """Let the polling loops of a worker continue after any number of failed requests to its server. Otherwise, Prefect
    ends the loop for cancelled flow runs after three failures in a row, and the other loops, with the worker, after
    twelve. A response with the status 429 (too many requests) ends any of the loops."""
    for name in _POLLING_LOOP_MODULES:
        loop_module = importlib.import_module(name)
        loop_module.critical_service_loop = partial(_poll_forever, loop_module.critical_service_loop)  # type: ignore[attr-defined]


async def _poll_forever(critical_service_loop: Callable[..., Awaitable[None]], **loop_settings: Any) -> None:
    """Run a polling loop of Prefect; after failed requests, run it again, until it returns or raises another error."""
    while True:
        try:
            return await critical_service_loop(**loop_settings)
        except Exception as error:
            if not (is_network_error(error) or "exceeded error threshold" in str(error)):
                raise
        await asyncio.sleep(loop_settings["interval"])


if __name__ == "__main__":
    with without_garbage_collection():
        if "worker" in sys.argv:
            keep_polling()
            if "--pool" in sys.argv[:-1]:
                from cosmos_core.launch.worker_report import start_machine_reports

                start_machine_reports(sys.argv[sys.argv.index("--pool") + 1])
        else:
            importlib.import_module("prefect.server.api.server")
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
