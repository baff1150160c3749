"""Find the local data files that lm-eval tasks (YAML files in a folder) read, without importing lm-eval."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TASK_FILES = ("!*.pyc",)
"""Patterns of the files of a task folder that the fingerprint covers: all except Python's bytecode."""


class _TaskYamlLoader(yaml.SafeLoader):
    """YAML loader that replaces values with lm-eval tags, such as `!function`, by None."""


_TaskYamlLoader.add_multi_constructor("!", lambda _loader, _tag, _node: None)


def local_data_files(folder: Path) -> list[Path]:
    """Return the sorted local data files and folders that the lm-eval tasks below `folder` name in `dataset_path`, or
    in `data_files` and `data_dir` of `dataset_kwargs`.

    A relative path starts from the working directory, as in lm-eval. A missing file is left out, because lm-eval itself
    refuses the task that needs it.
    """
    # A template file that tasks include has no dot before `yaml`: `_default_template_yaml`.
    path_patterns = {
        path_pattern for task_file in sorted(folder.rglob("*yaml")) for path_pattern in _find_data_patterns(task_file)
    }
    return sorted(
        {Path(path).absolute() for path_pattern in path_patterns for path in glob.glob(path_pattern, recursive=True)}
    )


def _find_data_patterns(task_file: Path) -> Iterator[str]:
    try:
        task = yaml.load(task_file.read_text(encoding="utf-8"), _TaskYamlLoader)
    except (OSError, ValueError, yaml.YAMLError):  # lm-eval reports the error of the task file
        return
    if isinstance(task, dict):
        dataset_kwargs = task.get("dataset_kwargs")
        dataset_kwargs = dataset_kwargs if isinstance(dataset_kwargs, dict) else {}
        yield from _iterate_strings(
            [task.get("dataset_path"), dataset_kwargs.get("data_files"), dataset_kwargs.get("data_dir")]
        )


def _iterate_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_strings(item)
