"""Which programs are forked, what is imported before, and how Prefect still reads its settings late."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PROGRAMS = (
    "cosmos_core", "cosmos_core.worker", "cosmos_core.launch.supervisor", "cosmos_core.launch.prefect", "prefect",
    "prefect.engine", "cosmos_core.machine_properties", "cosmos_core.models.check_model", "cosmos_core.rewards.service",
    "cosmos_core.train.propose", "cosmos_core.models.try_models", "tests.distributed.killed",
)  # fmt: skip
ADDRESS_VARIABLE = "COSMOS_TEST_FORK_SERVER"
"""Names the socket of the fork server to which Ray's workers connect (`ray_worker.py`)."""
RAY_WORKER = "ray/_private/workers/default_worker.py"
MULTIPROCESSING_FORK_SERVER = "from multiprocessing.forkserver"
_MULTIPROCESSING_SPAWN = "from multiprocessing.spawn"
_XDIST = "import sys;exec(eval(sys.stdin.readline()))"
_CODE = (
    _XDIST,
    "cosmos_core",
    "flows",
    "test_checkpoint",
    _MULTIPROCESSING_SPAWN,
    MULTIPROCESSING_FORK_SERVER,
    "from tests.",
)
"""Parts of code that a command line has."""
_STARTS_NONE = {
    "cosmos_core.launch.prefect",
    "cosmos_core.machine_properties",
    "cosmos_core.models.check_model",
    "cosmos_core.train.propose",
    "cosmos_core.models.try_models",
}
_ALONE = {"--help", "--version", "--schema-only", "config", "status", "runs", "logs", "lineage"}
"""Words of a command that starts no other."""
SUPERVISOR = "cosmos_core.launch.supervisor"
IMPORTED = (
    "cosmos_core.imports", "cosmos_core.worker.program", "cosmos_core.train.setup", "cosmos_core.train.validate",
    "cosmos_core.data.prepare", "transformers.models.qwen3", "cosmos_core.cluster.group", "cosmos_core.cli",
    "cosmos_core.cli_config", "cosmos_core.cli_models", "cosmos_core.cli_runs", "cosmos_core.cli_server",
    "cosmos_core.session", "cosmos_core.rollout.hf", "cosmos_core.rollout.flow_sampler",
    "diffusers", "torch.distributed.checkpoint", "pydantic_settings", "fastapi", "uvicorn", "sqlalchemy.ext.asyncio",
    "alembic.config", "docket", "httpx", "cyclopts", "dateparser", "apprise", "datasets",
    "cosmos_core.models.verify_export", "cosmos_core.models.verify_pipeline_export", "ray",
    "diffusers.models.transformers", "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "openai", "mcp.server", "boto3", "aiohttp", "trl",
)  # fmt: skip
LATER = ("prefect", "flows.post_train", "flows.retrain", "flows.stage", "prefect.server.api.server")
"""What reads Prefect's settings when it is imported, as a program does once it has chosen them."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0", "TORCH_LOGS": "-torch.utils._pytree",
    "VLLM_CONFIGURE_LOGGING": "0",
}  # fmt: skip
"""What workers are given: a program that is not given it is as well served with it."""
_READ_ON_IMPORT = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "PYTHONPATH", "PYTHONWARN", "LD_PRELOAD",
    "TORCH_LOGS",
)  # fmt: skip
READ: dict[str, str] = {}
"""The environment in which the libraries are imported."""
deferred: dict[str, ModuleType] = {}
"""Modules of `LATER`, and those that they have imported of ours and of Prefect's."""


def program_of(command: Sequence[Any]) -> str | None:
    """What a command line runs, if it is one of `PROGRAMS`, the file of a Ray worker, or code that imports the project;
    None: something else."""
    python, *words = (os.fsdecode(word) for word in command)
    while words[:1] in (["-u"], ["-B"]):
        words.pop(0)
    if python != sys.executable or len(words) < 2:
        return None
    if words[0].endswith(RAY_WORKER):
        return words[0]
    if words[0] == "-m":
        return words[1] if words[1] in PROGRAMS else None
    is_ours = any(each in words[1] for each in _CODE)
    return words[1] if words[0] == "-c" and is_ours else None


def starts_others(program: str, argv: Sequence[str]) -> bool:
    """Whether a program may start programs of `PROGRAMS`."""
    if program in _STARTS_NONE or program.startswith(_MULTIPROCESSING_SPAWN):
        return False
    return program != "cosmos_core" or _ALONE.isdisjoint(argv[3:])


def read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(_READ_ON_IMPORT) and name not in ENVIRONMENT)
    return {name: environment[name] for name in names}


class _DeferredImports(MetaPathFinder, Loader):
    """Gives back the modules that were deferred when the first of them is imported, with Prefect's settings read
    again."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in deferred else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = deferred[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        sys.modules.update(deferred)
        deferred.clear()
        sys.modules["prefect.context"].refresh_global_settings_context()
        sys.modules["prefect.logging.configuration"].setup_logging(incremental=False)


def import_all() -> None:
    """Import everything; defer what has Prefect's settings, and what of ours has it."""
    for name in IMPORTED:
        with suppress(ImportError):  # of what is installed on other machines only
            importlib.import_module(name)
    before = set(sys.modules)
    for name in LATER:
        importlib.import_module(name)
    ours = {name for name in set(sys.modules) - before if name.partition(".")[0] in {"flows", "tasks", "cosmos_core"}}
    aside, found = set[str](), {name for name in sys.modules if name.partition(".")[0] == "prefect"}
    while found:
        aside |= found
        found = {name for name in ours - aside if not aside.isdisjoint(_homes(sys.modules[name]))}
    for name in aside:
        deferred[name] = sys.modules.pop(name)
    for logger in (
        logging.root,
        *logging.Logger.manager.loggerDict.values(),
    ):  # a program that imports Prefect gets them
        for handler in getattr(logger, "handlers", [])[:]:
            if type(handler).__module__.startswith("prefect."):
                logger.removeHandler(handler)  # type: ignore[union-attr]
    sys.meta_path.insert(0, _DeferredImports())


def _homes(module: ModuleType) -> set[str]:
    """Names of the modules that things in a module come from, its own submodules left out."""
    found = set()
    for value in vars(module).values():
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        found |= {type(value).__module__, *([home] if isinstance(home, str) else [])}
    return {name for name in found if not name.startswith(f"{module.__name__}.")}
