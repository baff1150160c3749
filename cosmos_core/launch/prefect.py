"""Prefect's command line in less time: `python -m cosmos_core.launch.prefect server start` for that of Prefect."""

import importlib
import runpy

from cosmos_core.imports import without_collection

if __name__ == "__main__":
    with without_collection():
        importlib.import_module("prefect.server.api.server")
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
