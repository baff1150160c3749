"""Prefect's command line in less time: `python -m cosmos_core.launch.prefect server start` for that of Prefect.

With `--told-by FD` it imports what needs no settings, and reads from that descriptor what to do; see `launch.standby`.
The words before it are for those who look at the list of processes.
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
"""What the server imports beside Prefect; without one of them it only starts later."""


def _wait_for_orders(descriptor: int) -> None:
    """Take command line, environment and log from the descriptor; end where whoever holds its other end wants none."""
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    with open(descriptor, "rb") as reader:
        told = json.loads(reader.read() or sys.exit())
    os.environ.update(told["environment"])
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    sys.argv[1:] = told["arguments"]


_POLLING = ("prefect._internal.observers", "prefect.workers.base", "prefect.workers.process")
"""Modules in which a worker polls its server: for cancelled flow runs, for new ones, and to say that it lives."""


def keep_polling() -> None:
    """Let the loops of a worker outlast its server: Prefect ends the one for cancelled flow runs after three failures
    in a row, half a minute, while the worker goes on, and the others and the worker with them after twelve."""
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
