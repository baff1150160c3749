"""A configuration from its files: `extends`, several files on top of each other, names of older generations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.compat.translate import modern
from cosmos_core.config.load import MAX_DEPTH, Values, merge, read_toml
from cosmos_core.errors import ConfigError


def read_config(path: Path, notices: list[str], over: Sequence[Path] = ()) -> Values:
    """Return the tables of `path` on top of what it `extends`, and the files `over` on top of both, in today's names.

    `extends` is a file or a list of files, relative to the file that says it; what comes later wins.

    Raises:
        ConfigError: a file cannot be read, or the files extend each other in a circle.
    """
    values = _read(path, notices, ())
    for file in over:
        values = merge(values, _at_home(_read(file, notices, ()), file))
    return values


def _read(path: Path, notices: list[str], below: tuple[Path, ...]) -> Values:
    here = Path(os.path.realpath(path))  # unlike Path.resolve, without an error for links in a circle
    if len(below) == MAX_DEPTH:
        raise ConfigError(f"{path}: behind {MAX_DEPTH} files that extend each other, the most that there may be")
    if here in below:
        circle = " -> ".join(str(file) for file in (*below, here))
        raise ConfigError(f"{path}: extends itself: {circle}")
    values = modern(read_toml(path), str(path), notices)
    for stage in _stages(values):
        if isinstance(stage.get("overrides"), dict):
            where = f"{path}: stage {stage.get('name')!r}: overrides"
            stage["overrides"] = modern(stage["overrides"], where, notices)
    bases = values.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{path}: extends = {bases!r}: must be a file or a list of files, relative to this one")
    merged: Values = {}
    for base in bases:
        file = path.parent / base
        if not os.path.exists(file):  # unlike Path.exists, False for what can be no path
            raise ConfigError(f"{path}: extends = {base!r}: no such file ({file})")
        merged = merge(merged, _at_home(_read(file, notices, (*below, here)), file))
    return merge(merged, values)


def _at_home(values: Values, file: Path) -> Values:
    """The values with the recipe files of their stages named from `file`, which wrote them."""
    for stage in _stages(values):
        if isinstance(stage.get("recipe"), str) and stage["recipe"]:
            stage["recipe"] = os.path.realpath(file.parent / stage["recipe"])
    return values


def _stages(values: Values) -> list[Values]:
    """`[[pipeline.stages]]`, as far as they have that form; the schema complains about the rest."""
    pipeline = values.get("pipeline")
    stages = pipeline.get("stages") if isinstance(pipeline, dict) else None
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
