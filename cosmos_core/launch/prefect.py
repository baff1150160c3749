"""Faster start of Prefect's command line: `python -m cosmos_core.launch.prefect server start` runs `prefect server
start`. A worker that it starts outlasts its server."""

import importlib
import runpy
import sys
from functools import partial

from cosmos_core.imports import without_collection

_POLLING = ("prefect._internal.observers", "prefect.workers.base", "prefect.workers.process")
"""Modules in which a worker polls its server: for cancelled flow runs, for new flow runs, and for heartbeats."""


def keep_polling() -> None:
    """Let the polling loops of a worker outlast a failure of its server. Prefect ends the loop for cancelled flow runs
    after three consecutive failures, while the worker continues, and the other loops and the worker after twelve."""
    for name in _POLLING:
        module = importlib.import_module(name)
        module.critical_service_loop = partial(module.critical_service_loop, backoff=sys.maxsize)  # type: ignore[attr-defined]


if __name__ == "__main__":
    with without_collection():
        if "worker" in sys.argv:
            keep_polling()
            if "--pool" in sys.argv[:-1]:
                from cosmos_core.launch.worker_report import start_reporting

                start_reporting(sys.argv[sys.argv.index("--pool") + 1])
        else:
            importlib.import_module("prefect.server.api.server")
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
