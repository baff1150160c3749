"""Benchmark tasks of lm-eval that a recipe names; the tasks and their rows are loaded before the model is loaded."""

import os
from dataclasses import dataclass
from typing import Any

import httpx
from datasets.exceptions import DatasetsError
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind

from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.errors import ConfigError, DataError, first_line
from cosmos_core.registry import suggest_names
from cosmos_core.rewards.base import error_on_one_line

_DATASET_ERRORS = (OSError, ValueError, httpx.HTTPError, DatasetsError)
"""Exceptions that `datasets` raises if the rows of an lm-eval task can neither be read nor be downloaded."""
_MISSING_ROWS_HINT = (
    "download them where there is a network and set HF_HOME to that cache, or name a task of local files in "
    "evaluate.include_path"
)


@dataclass(frozen=True)
class Benchmarks:
    """Tasks of lm-eval that are loaded and ready to run."""

    task_manager: TaskManager
    task_names: list[str]
    """Names of the lm-eval tasks, groups and tags that match the recipe's patterns."""
    num_items_by_task: dict[str, int]


def open_benchmarks(config: EvaluateConfig) -> Benchmarks:
    """Load the lm-eval tasks that a recipe names, with their rows. Raise `ConfigError` if a task does not exist, cannot
    be loaded, has images, or executes code that the recipe does not allow, and `DataError` if the rows of a task cannot
    be read."""
    if config.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    task_manager = _open_task_manager(config)
    task_names = list(dict.fromkeys(name for pattern in config.tasks for name in match_tasks(task_manager, pattern)))
    loaded_tasks_by_name = {name: _load_tasks(task_manager, name) for name in task_names}
    tasks = {name: task for each in loaded_tasks_by_name.values() for name, task in each["tasks"].items()}
    # Leave out what a group contains that is named as well, because lm-eval refuses to run a task twice.
    task_groups = {name: each for name, each in loaded_tasks_by_name.items() if name in each["groups"]}
    task_names_in_groups = {
        member for name, each in task_groups.items() for member in (*each["tasks"], *each["groups"]) if member != name
    }
    task_names = [name for name in task_names if name not in task_names_in_groups]
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) and not config.confirm_run_unsafe_code:
            problem = f"{name!r} executes code that the model writes, without a sandbox"
            raise ConfigError(f"evaluate.tasks: {problem}; set evaluate.confirm_run_unsafe_code = true to allow it")
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"evaluate.tasks: {name!r} has images, and evaluations have text alone; leave it out")
    num_items_by_name = {name: len(task.eval_docs) for name, task in tasks.items()}
    num_evaluated_by_name = {name: min(n, config.limit or n) for name, n in num_items_by_name.items()}
    return Benchmarks(task_manager, task_names, num_evaluated_by_name)


def _open_task_manager(config: EvaluateConfig) -> TaskManager:
    """Return lm-eval's task manager. The manager reads the tasks built into lm-eval only if the recipe names one of
    them, because this takes half a minute."""
    if config.include_path:
        task_manager = TaskManager(include_path=config.include_path, include_defaults=False)
        tasks = {name for name, entry in task_manager.task_index.items() if entry.kind in {Kind.TASK, Kind.PY_TASK}}
        if tasks.issuperset(config.tasks):
            return task_manager
    return TaskManager(include_path=config.include_path or None)


def match_tasks(task_manager: TaskManager, pattern: str) -> list[str]:
    """Return the names of the lm-eval tasks, groups and tags that a pattern matches; raise `ConfigError` if there are
    none."""
    if task_names := task_manager.match_tasks([pattern]):
        return task_names
    name_suggestions = suggest_names(pattern, task_manager.all_tasks)
    raise ConfigError(f"evaluate.tasks: lm-eval and evaluate.include_path have no task {pattern!r}{name_suggestions}")


def _load_tasks(task_manager: TaskManager, task_name: str) -> dict[str, Any]:
    """Load the lm-eval tasks with the name, group or tag `task_name`, and their rows. Return a dictionary with the keys
    `tasks` and `groups`, whose values are the loaded tasks and groups by name. Raise `ConfigError` if a task cannot be
    loaded, and `DataError` if its rows cannot be read."""
    try:
        loaded_tasks: dict[str, Any] = dict(task_manager.load([task_name]))
        for task in loaded_tasks["tasks"].values():
            len(task.eval_docs)
        return loaded_tasks
    except ImportError as error:
        raise ConfigError(f"evaluate.tasks: {task_name!r} needs a package that is not installed: {error}") from error
    except _DATASET_ERRORS as error:
        entry = task_manager.task_index[task_name]
        dataset_path_text = f", {entry.cfg['dataset_path']}," if entry.cfg and entry.cfg.get("dataset_path") else ""
        reading_problem = f"the rows of {task_name!r}{dataset_path_text} cannot be read ({first_line(error)})"
        raise DataError(f"evaluate.tasks: {reading_problem}; {_MISSING_ROWS_HINT}") from error
    except Exception as error:  # lm-eval raises any error for a mistake in the file of a task
        problem = f"lm-eval cannot load {task_name!r} ({error_on_one_line(error)})"
        raise ConfigError(f"evaluate.tasks: {problem}; correct its YAML file or its rows") from error
