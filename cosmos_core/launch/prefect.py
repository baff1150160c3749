"""Faster start of Prefect's command line: `python -m cosmos_core.launch.prefect server start` runs `prefect server
start`.

With `--told-by FD` it imports libraries that need no settings, then reads its command line from that descriptor; see
`launch.standby`. The arguments before it are only shown in process lists.
"""

import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from functools import partial

from cosmos_core.imports import without_collection

_LIBRARIES = (
    "pydantic_settings", "fastapi", "uvicorn", "sqlalchemy.ext.asyncio", "sqlalchemy.dialects.postgresql",
    "alembic.config", "docket", "httpx", "cyclopts", "dateparser", "apprise",
)  # fmt: skip
"""Libraries that the server imports in addition to Prefect; a missing one only makes the start slower."""


def _wait_for_orders(descriptor: int) -> None:
    """Import libraries, then read command line, environment and log path from the descriptor; exit if its other end is
    closed without data."""
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    with open(descriptor, "rb") as reader:
        orders = json.loads(reader.read() or sys.exit())
    os.environ.update(orders["environment"])
    log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    sys.argv[1:] = orders["arguments"]


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
        if "--told-by" in sys.argv:
            _wait_for_orders(int(sys.argv[-1]))
        if "worker" in sys.argv:
            keep_polling()
        else:
            importlib.import_module("prefect.server.api.server")
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
