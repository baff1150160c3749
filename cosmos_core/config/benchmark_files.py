"""Find the local data files that lm-eval tasks (YAML files in a folder) read, without importing lm-eval."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TASK_FILES = ("!*.pyc",)
"""Patterns of the files of a task folder that the fingerprint covers: all except Python's bytecode."""


class _Loader(yaml.SafeLoader):
    """YAML loader that replaces values with lm-eval tags, such as `!function`, by None."""


_Loader.add_multi_constructor("!", lambda _loader, _tag, _node: None)


def local_data_files(folder: Path) -> list[Path]:
    """Return the sorted local data files and folders that the lm-eval tasks below `folder` name in `dataset_path`, or
    in `data_files` and `data_dir` of `dataset_kwargs`.

    A relative path starts from the working directory, as in lm-eval. A missing file is left out, because lm-eval itself
    refuses the task that needs it.
    """
    # A template file that tasks include has no dot before `yaml`: `_default_template_yaml`.
    names = {name for file in sorted(folder.rglob("*yaml")) for name in _data_files(file)}
    return sorted({Path(path).absolute() for name in names for path in glob.glob(name, recursive=True)})


def _data_files(file: Path) -> Iterator[str]:
    try:
        task = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError):  # lm-eval reports the error of the task file
        return
    if isinstance(task, dict):
        arguments = task.get("dataset_kwargs")
        arguments = arguments if isinstance(arguments, dict) else {}
        yield from _texts([task.get("dataset_path"), arguments.get("data_files"), arguments.get("data_dir")])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
