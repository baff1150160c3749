"""Expand a stage with a sweep into branches, one per point of the grid, and a stage of the original name that chooses
the best branch. Stages that depended on the original stage depend on the new stage.

Names of branches are made from their settings, so that existing branches keep their names when the grid grows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cosmos_core.config.compat.translate import current_name, with_algorithm_keys
from cosmos_core.config.inputs import STAGE_PREFIX, source_of
from cosmos_core.config.load import Values, merge, nest_value, parse
from cosmos_core.config.schema.pipeline import STAGE_NAME_LENGTH, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.sweep import SweepBranch, SweepConfig
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline

_ARGUMENTS = "arguments"
# Branches that differ in the seed share their prepared rows, so that they are compared on the same held-out rows.
_ROW_PRESERVING_KEY = "train.seed"
_TOKENIZER_KEY = "policy.model_name_or_path"  # selects the tokenizer that prepares rows
_DIGEST_LENGTH = 6


@dataclass(frozen=True)
class _GridPoint:
    """One combination of values from the grid of a sweep."""

    suffix: str
    settings: Values

    def of(self, member: str, head: str, members: Sequence[str]) -> Values:
        """Return the settings of this point for the stage `member`, by dotted key without the name of the stage. `head`
        is the stage with the sweep, and `members` are the stages of a branch."""
        settings: Values = {}
        for key, value in self.settings.items():
            owner, key_rest = _owner(key, head, members)
            if owner == member:
                settings[key_rest] = value
        return settings


def with_sweeps(pipeline: Pipeline, tables: Mapping[str, Values]) -> Pipeline:
    """Return a pipeline in topological order with each sweep expanded to branches and a stage that chooses one of them.

    `tables` holds the recipe tables of each stage as written in the file, by stage name.

    Raises:
        ConfigError: a sweep cannot be expanded; the message names stage and key.
    """
    for stage in pipeline.stages:
        _check_sweep(pipeline, stage)
    for stage in pipeline.stages:
        if stage.sweep is not None and stage.sweep.grid:
            pipeline = _expand(pipeline, stage, stage.sweep, tables)
    stages = []
    for stage in pipeline.stages:
        if stage.sweep is not None and not stage.sweep.branches:  # a `select` stage chooses among the stages in `after`
            branches = tuple(SweepBranch(stages=(name,)) for name in stage.after)
            stage = stage.model_copy(update={"sweep": stage.sweep.model_copy(update={"branches": branches})})
        if stage.sweep is not None:
            branch_stages = [name for branch in stage.sweep.branches for name in branch.stages]
            stage = stage.model_copy(update={"after": tuple(dict.fromkeys((*stage.after, *branch_stages)))})
        stages.append(stage)
    return pipeline.with_stages(stages)


def _check_sweep(pipeline: Pipeline, stage: StageConfig) -> None:
    sweep, where = stage.sweep, _describe_stage(pipeline, stage)
    if sweep is None:
        return
    chooses, names = pipeline.kind_of(stage).selects_branch, [each.name for each in pipeline.stages]
    for name in [*sweep.through, *(name for branch in sweep.branches for name in branch.stages)]:
        if name not in names:
            raise ConfigError(f"{where}: sweep: {name!r} is no stage of this pipeline{suggestion(name, names)}")
    if chooses and (sweep.grid or sweep.through):
        raise ConfigError(f"{where}: sweep.grid belongs to the stage that is run with it; kind {stage.kind!r} chooses")
    if chooses and not sweep.branches and len(stage.after) < 2:
        raise ConfigError(f"{where}: there is nothing to choose from; name at least two stages in `after`")
    if not chooses and (sweep.branches or not sweep.grid):
        raise ConfigError(f'{where}: sweep needs grid = {{ "train.optm_lr" = [1e-5, 3e-5] }}, and has no branches')


def _expand(pipeline: Pipeline, head: StageConfig, sweep: SweepConfig, tables: Mapping[str, Values]) -> Pipeline:
    where = _describe_stage(pipeline, head)
    members = _branch_members(pipeline, head, sweep, tables)
    recipes, new_stages, branches = dict(pipeline.recipes), [], []
    for point in _points(sweep.grid, max(map(len, members))):
        names = {member: f"{member}-{point.suffix}" for member in members}
        for member, name in names.items():
            if name in recipes:
                raise ConfigError(f"{where}: sweep: the name {name!r} of a branch is taken by another stage")
            # A stage that prepares rows for the stage with the sweep has the settings of that stage.
            owner = member if member in pipeline.with_dependents(head.name) else head.name
            overrides = point.of(owner, head.name, members)
            member_overrides = overrides if owner == member else {}
            arguments = {
                key.partition(".")[2]: value for key, value in member_overrides.items() if _is_stage_argument(key)
            }
            overrides = {key: value for key, value in overrides.items() if not _is_stage_argument(key)}
            recipe = pipeline.recipes[member]
            if overrides:
                settings = "".join(f" with {key} = {value!r}" for key, value in overrides.items())
                merged = with_algorithm_keys(merge(tables[owner], _nest_keys(overrides)), [])
                recipe = parse(Recipe, merged, source=f"{where}{settings}", notices=[])
            recipes[name] = _rename_teacher(recipe, names)
            stage = _rename_references(pipeline.stage(member), names)
            changes = {"name": name, "sweep": None, "arguments": merge(stage.arguments, _nest_keys(arguments))}
            new_stages.append(stage.model_copy(update=changes))
        branches.append(SweepBranch(stages=tuple(names.values()), settings=point.settings))
    branch_stages = tuple(name for branch in branches for name in branch.stages)
    choice = StageConfig(
        name=head.name,
        kind=next(name for name, kind in pipeline.kinds.items() if kind.selects_branch),
        after=branch_stages,
        sweep=sweep.model_copy(update={"grid": {}, "through": (), "branches": tuple(branches)}),
    )
    outside = [stage for stage in pipeline.stages if stage.name not in members]
    unchanged = [_replace_branch_references(pipeline, stage, head.name, members) for stage in outside]
    for member in set(members) - {head.name}:
        del recipes[member]
    return pipeline.with_stages([*unchanged, *new_stages, choice], recipes)


def _branch_members(
    pipeline: Pipeline, head: StageConfig, sweep: SweepConfig, tables: Mapping[str, Values]
) -> tuple[str, ...]:
    """Return the names of the stages that each branch of a sweep repeats: the stage with the sweep, the stages up to
    those in `through`, and the stage that prepares the rows if the grid affects the rows."""
    where, members = _describe_stage(pipeline, head), {head.name}
    for name in sweep.through:
        if name not in pipeline.with_dependents(head.name):
            raise ConfigError(f"{where}: sweep.through: stage {name!r} is not behind {head.name!r}")
        members |= {other for other in pipeline.with_dependents(head.name) if name in pipeline.with_dependents(other)}
    rows = source_of(head.data) or ""
    has_own_rows = bool(rows) and tables.get(rows, tables[head.name]) == tables[head.name]
    for key in sweep.grid:
        owner, key_rest = _owner(current_name(key), head.name, tuple(members))
        if not owner:
            raise ConfigError(f"{where}: sweep.grid: {key!r} is no key of a recipe{suggestion(key, list(_tables()))}")
        kind = pipeline.kind_of(pipeline.stage(owner))
        if _is_stage_argument(key_rest) and _ARGUMENTS not in kind.allowed_keys:
            raise ConfigError(f"{where}: sweep.grid: {key!r}: a stage of kind {kind.name!r} takes no arguments")
        if (owner == head.name and has_own_rows and key_rest != _ROW_PRESERVING_KEY) and (
            key_rest == _TOKENIZER_KEY or pipeline.kind_of(pipeline.stage(rows)).reads_key(key_rest)
        ):
            members.add(rows)
    for name in sorted(members):
        stage = pipeline.stage(name)
        if not pipeline.kind_of(stage).is_reusable:
            raise ConfigError(f"{where}: sweep: stage {name!r} of kind {stage.kind!r} cannot be in a branch; put it "
                              "behind the choice")  # fmt: skip
        if name != head.name and stage.sweep is not None:
            raise ConfigError(f"{where}: sweep.through: stage {name!r} has a sweep of its own")
    return tuple(stage.name for stage in pipeline.stages if stage.name in members)


def _owner(key: str, head: str, members: Sequence[str]) -> tuple[str, str]:
    """Return the name of the stage to which a key of a grid belongs (or ""), and the key within the stage."""
    first, _, key_rest = key.partition(".")
    if first in members and key_rest.partition(".")[0] in _tables():
        return first, key_rest
    return (head, key) if first in _tables() and key_rest else ("", key)


def _tables() -> tuple[str, ...]:
    return (*Recipe.model_fields, _ARGUMENTS)


def _is_stage_argument(key: str) -> bool:
    return key.partition(".")[0] == _ARGUMENTS


def _points(grid: Mapping[str, list[Any]], longest: int) -> list[_GridPoint]:
    """Return the combinations of the grid, each with a suffix for stage names of up to `longest` characters."""
    settings = [dict(zip(map(current_name, grid), values, strict=True)) for values in itertools.product(*grid.values())]
    labels = _labels([current_name(key) for key in grid])
    suffixes = ["-".join(f"{labels[key]}-{_value_for_name(value)}" for key, value in each.items()) for each in settings]
    max_name_length = STAGE_NAME_LENGTH - longest - 1
    points = []
    for suffix, each in zip(suffixes, settings, strict=True):
        if len(suffix) > max_name_length or suffixes.count(suffix) > 1:
            digest = hashlib.sha256(json.dumps(each, sort_keys=True, default=str).encode()).hexdigest()
            suffix = f"{suffix[: max(0, max_name_length - _DIGEST_LENGTH - 1)]}-{digest[:_DIGEST_LENGTH]}".lstrip("-")
        points.append(_GridPoint(suffix, each))
    return points


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ending of each dotted key that no other key has, by key."""
    labels = {}
    for key in keys:
        parts = key.split(".")
        number = next(
            n for n in range(1, len(parts) + 1)
            if n == len(parts) or sum(other.split(".")[-n:] == parts[-n:] for other in keys) == 1
        )  # fmt: skip
        labels[key] = re.sub(r"[^A-Za-z0-9_]+", "_", "_".join(parts[-number:]))
    return labels


def _value_for_name(value: Any) -> str:
    """Return the value of a setting as a text for the name of a stage."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "_".join(map(_value_for_name, value))
    text = re.sub(r"e([+-])0*(?=\d)", r"e\1", repr(value)) if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9-]+", "_", text.rpartition("/")[2] if isinstance(value, str) else text).strip("_")


def _nest_keys(settings: Values) -> Values:
    values: Values = {}
    for key, value in settings.items():
        values = merge(values, nest_value(key.split("."), value))
    return values


def _rename_references(stage: StageConfig, names: Mapping[str, str]) -> StageConfig:
    """Return a stage of a branch, with its references to other stages of the branch renamed."""

    def rename_reference(text: str) -> str:
        name = names.get(source_of(text) or "")
        return f"{STAGE_PREFIX}{name}" if name else text

    after = tuple(names.get(name, name) for name in stage.after)
    return stage.model_copy(
        update={"after": after, "model": rename_reference(stage.model), "data": rename_reference(stage.data)}
    )


def _rename_teacher(recipe: Recipe, names: Mapping[str, str]) -> Recipe:
    name = names.get(source_of(recipe.distillation.model_name_or_path) or "")
    if name is None:
        return recipe
    return recipe.derive(distillation=recipe.distillation.derive(model_name_or_path=f"{STAGE_PREFIX}{name}"))


def _replace_branch_references(
    pipeline: Pipeline, stage: StageConfig, head: str, members: Sequence[str]
) -> StageConfig:
    """Return a stage outside of the branches, with references to branch stages replaced by the selecting stage."""
    where = _describe_stage(pipeline, stage)
    swept_names = {f"{STAGE_PREFIX}{name}" for name in members}
    if stage.data in swept_names:
        raise ConfigError(
            f"{where}: data = {stage.data!r} is in every branch of the sweep of {head!r}; name the stage in its "
            "sweep.through, or give it rows of its own"
        )
    if stage.model in swept_names and stage.checkpoint:
        raise ConfigError(
            f"{where}: checkpoint = {stage.checkpoint!r}: the choice of sweep {head!r} has no checkpoints; name the "
            "stage in its sweep.through"
        )
    predecessors = tuple(dict.fromkeys(head if name in members else name for name in stage.after))
    model = f"{STAGE_PREFIX}{head}" if stage.model in swept_names else stage.model
    return stage.model_copy(update={"after": predecessors, "model": model})


def _describe_stage(pipeline: Pipeline, stage: StageConfig) -> str:
    return f"{pipeline.source}: stage {stage.name!r}"
