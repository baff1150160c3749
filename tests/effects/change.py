"""What the tests of this folder share: a key, another value for it, and the recipes on both sides of the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.load import merge_tables
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds

Settings = Mapping[str, Any]
"""Dotted key to value."""

SFT: Settings = {"train.train_policy.type": "sft"}
GRPO: Settings = {"train.train_policy.type": "grpo"}
EAGER: Settings = {**SFT, "train.compile": False, "train.param_dtype": "float32"}
SMALL: Settings = {**EAGER, "train.train_batch_per_replica": 2, "policy.model_max_length": 32}
"""A training of four steps on the fixture `inputs`."""


@dataclass(frozen=True)
class Change:
    """One key is set, and nothing else differs."""

    key: str
    value: Any
    base: Settings = field(default_factory=lambda: SFT)
    """What both sides say beside it; the key itself is left at its default, unless it is named here."""

    @property
    def before(self) -> Recipe:
        return recipe(self.base)

    @property
    def after(self) -> Recipe:
        table, _, name = self.key.rpartition(".")
        if isinstance(rows := self.base.get(table), list):  # of tables
            return recipe({**self.base, table: [{**row, name: self.value} for row in rows]})
        return recipe({**self.base, self.key: self.value})


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `after` that differ."""
    return {name: after[name] for name in after if after[name] != before.get(name)}


def recipe(settings: Settings) -> Recipe:
    """The recipe with these settings and defaults; what is for the pipeline is left out."""
    return Recipe.model_validate(nested({k: v for k, v in settings.items() if not k.startswith("pipeline.")}))


def nested(settings: Settings) -> dict[str, Any]:
    """Dotted keys as tables."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tables = merge_tables(tables, value)
    return tables


def changes(
    *cases: Change | tuple[Change, Any], full: Sequence[Change | tuple[Change, Any]] = ()
) -> pytest.MarkDecorator:
    """Parametrise a test over `change`, or over `change` and what is `expected` with it; those in `full` are cells of
    `make acceptance`."""
    pairs = [case if isinstance(case, tuple) else (case,) for case in (*cases, *full)]
    names = ["change", "expected"][: len(pairs[0])]
    params = [
        pytest.param(*pair, id=_name(pair[0]), marks=[pytest.mark.full] * (index >= len(cases)))
        for index, pair in enumerate(pairs)
    ]
    return pytest.mark.parametrize(names, params)


def stage_of(
    path: Path, recipe_: Recipe, *, kind: str = "sft", model: Path | str = "", data: Path | None = None
) -> Stage:
    """A stage as its program sees it."""
    path.mkdir(parents=True, exist_ok=True)
    return Stage(
        path, StageConfig(name=path.name, kind=kind), recipe_, str(model), data, {}, "f" * 64, kind=all_kinds()[kind]
    )


def _name(change: Change) -> str:
    kind = change.base.get("train.train_policy.type", "")
    return f"{change.key}-{kind}" if change.key.startswith("train.train_policy.") else change.key
