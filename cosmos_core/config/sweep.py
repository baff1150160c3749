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
from typing import TYPE_CHECKING, Any

from cosmos_core.config.compat.translate import current_name, with_algorithm_keys
from cosmos_core.config.inputs import STAGE_PREFIX, source_of
from cosmos_core.config.load import Values, merge, nest_value, parse
from cosmos_core.config.override import split_key
from cosmos_core.config.schema.marks import NamedThing
from cosmos_core.config.schema.pipeline import STAGE_NAME_LENGTH, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.sweep import SweepBranch, SweepConfig
from cosmos_core.config.schema.table import TableT, convert_named_things
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline

_ARGUMENTS_KEY = "arguments"
_TABLES = (*Recipe.model_fields, _ARGUMENTS_KEY)
"""First parts of the keys of a grid."""
# Branches that differ in the seed share their prepared rows, so that they are compared on the same held-out rows.
_ROW_PRESERVING_KEY = "train.seed"
_TOKENIZER_KEY = "policy.model_name_or_path"  # selects the tokenizer that prepares rows
_DIGEST_LENGTH = 6


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
            pipeline = _expand_sweep(pipeline, stage, stage.sweep, tables)
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
    sweep, location = stage.sweep, _describe_stage(pipeline, stage)
    if sweep is None:
        return
    is_selector, stage_names = pipeline.kind_of(stage).selects_branch, [each.name for each in pipeline.stages]
    for name in [*sweep.through, *(name for branch in sweep.branches for name in branch.stages)]:
        if name not in stage_names:
            hint = suggestion(name, stage_names)
            raise ConfigError(f"{location}: sweep: {name!r} is no stage of this pipeline{hint}")
    if is_selector and (sweep.grid or sweep.through):
        raise ConfigError(
            f"{location}: sweep.grid belongs to the stage that is run with it; kind {stage.kind!r} chooses"
        )
    if is_selector and not sweep.branches and len(stage.after) < 2:
        raise ConfigError(f"{location}: there is nothing to choose from; name at least two stages in `after`")
    if not is_selector and (sweep.branches or not sweep.grid):
        raise ConfigError(f'{location}: sweep needs grid = {{ "train.optm_lr" = [1e-5, 3e-5] }}, and has no branches')


def _expand_sweep(
    pipeline: Pipeline, sweep_stage: StageConfig, sweep: SweepConfig, tables: Mapping[str, Values]
) -> Pipeline:
    location = _describe_stage(pipeline, sweep_stage)
    member_names = _find_branch_stages(pipeline, sweep_stage, sweep, tables)
    recipes, new_stages, branches = dict(pipeline.recipes), [], []
    for suffix, settings in _make_grid_points(sweep.grid, max(map(len, member_names))):
        branch_stage_names = {member_name: f"{member_name}-{suffix}" for member_name in member_names}
        owners = {key: _find_owner_stage(key, sweep_stage.name, member_names) for key in settings}
        for member_name, name in branch_stage_names.items():
            if name in recipes:
                raise ConfigError(f"{location}: sweep: the name {name!r} of a branch is taken by another stage")
            # The stage that prepares rows for the stage with the sweep gets the grid values of that stage.
            owner_name = member_name if member_name in pipeline.with_dependents(sweep_stage.name) else sweep_stage.name
            values = {owners[key][1]: value for key, value in settings.items() if owners[key][0] == owner_name}
            overrides = {key: value for key, value in values.items() if not _is_stage_argument(key)}
            recipe = pipeline.recipes[member_name]
            if overrides:
                settings_text = "".join(f" with {key} = {value!r}" for key, value in overrides.items())
                merged_tables = with_algorithm_keys(merge(tables[owner_name], _nest_keys(overrides)), [])
                recipe = parse(Recipe, merged_tables, source=f"{location}{settings_text}", notices=[])
            recipes[name] = _rename_references(recipe, branch_stage_names)
            stage = _rename_references(pipeline.stage(member_name), branch_stage_names)
            arguments = {key: value for key, value in values.items() if _is_stage_argument(key)}
            if owner_name == member_name:
                stage = stage.model_copy(update=merge({"arguments": stage.arguments}, _nest_keys(arguments)))
            predecessors = tuple(branch_stage_names.get(predecessor, predecessor) for predecessor in stage.after)
            new_stages.append(stage.model_copy(update={"name": name, "after": predecessors, "sweep": None}))
        branches.append(SweepBranch(stages=tuple(branch_stage_names.values()), settings=settings))
    branch_stages = tuple(name for branch in branches for name in branch.stages)
    selector_stage = StageConfig(
        name=sweep_stage.name,
        kind=next(name for name, kind in pipeline.kinds.items() if kind.selects_branch),
        recipe=sweep_stage.recipe,
        after=branch_stages,
        sweep=sweep.model_copy(update={"grid": {}, "through": (), "branches": tuple(branches)}),
    )
    rewired_stages = [
        _replace_branch_references(pipeline, stage, sweep_stage.name, member_names)
        for stage in pipeline.stages
        if stage.name not in member_names
    ]
    for member_name in set(member_names) - {sweep_stage.name}:
        del recipes[member_name]
    return pipeline.with_stages([*rewired_stages, *new_stages, selector_stage], recipes)


def _find_branch_stages(
    pipeline: Pipeline, sweep_stage: StageConfig, sweep: SweepConfig, tables: Mapping[str, Values]
) -> tuple[str, ...]:
    """Return the names of the stages that each branch of a sweep repeats: the stage with the sweep, the stages up to
    those in `through`, and the stage that prepares the rows if the grid affects the rows."""
    location, member_names = _describe_stage(pipeline, sweep_stage), {sweep_stage.name}
    for name in sweep.through:
        dependents = pipeline.with_dependents(sweep_stage.name)
        if name not in dependents:
            raise ConfigError(f"{location}: sweep.through: stage {name!r} is not behind {sweep_stage.name!r}")
        member_names |= {other for other in dependents if name in pipeline.with_dependents(other)}
    rows_stage_name = source_of(sweep_stage.data) or ""
    own_tables = tables[sweep_stage.name]
    has_own_rows = bool(rows_stage_name) and tables.get(rows_stage_name, own_tables) == own_tables
    for key in sweep.grid:
        owner_name, stage_key = _find_owner_stage(current_name(key), sweep_stage.name, tuple(member_names))
        if not owner_name:
            raise ConfigError(f"{location}: sweep.grid: {key!r} is no key of a recipe{suggestion(key, list(_TABLES))}")
        kind = pipeline.kind_of(pipeline.stage(owner_name))
        if _is_stage_argument(stage_key) and _ARGUMENTS_KEY not in kind.allowed_keys:
            raise ConfigError(f"{location}: sweep.grid: {key!r}: a stage of kind {kind.name!r} takes no arguments")
        if (owner_name == sweep_stage.name and has_own_rows and stage_key != _ROW_PRESERVING_KEY) and (
            stage_key == _TOKENIZER_KEY or pipeline.kind_of(pipeline.stage(rows_stage_name)).reads_key(stage_key)
        ):
            member_names.add(rows_stage_name)
    for name in sorted(member_names):
        stage = pipeline.stage(name)
        if not pipeline.kind_of(stage).is_reusable:
            raise ConfigError(f"{location}: sweep: stage {name!r} of kind {stage.kind!r} cannot be in a branch; put it "
                              "behind the choice")  # fmt: skip
        if name != sweep_stage.name and stage.sweep is not None:
            raise ConfigError(f"{location}: sweep.through: stage {name!r} has a sweep of its own")
    return tuple(stage.name for stage in pipeline.stages if stage.name in member_names)


def _find_owner_stage(key: str, sweep_stage_name: str, member_names: Sequence[str]) -> tuple[str, str]:
    """Return the name of the stage to which a key of a grid belongs (or ""), and the key within the stage."""
    first_part, _, stage_key = key.partition(".")
    if first_part in member_names and stage_key.partition(".")[0] in _TABLES:
        return first_part, stage_key
    return (sweep_stage_name, key) if first_part in _TABLES and stage_key else ("", key)


def _is_stage_argument(key: str) -> bool:
    return key.partition(".")[0] == _ARGUMENTS_KEY


def _make_grid_points(grid: Mapping[str, list[Any]], max_member_length: int) -> list[tuple[str, Values]]:
    """Return the combinations of the grid, each after a suffix for stage names of up to `max_member_length`
    characters."""
    settings = [dict(zip(map(current_name, grid), values, strict=True)) for values in itertools.product(*grid.values())]
    labels = _shorten_keys([current_name(key) for key in grid])
    suffixes = ["-".join(f"{labels[key]}-{_value_for_name(value)}" for key, value in each.items()) for each in settings]
    max_name_length = STAGE_NAME_LENGTH - max_member_length - 1
    grid_points = []
    for suffix, each in zip(suffixes, settings, strict=True):
        if len(suffix) > max_name_length or suffixes.count(suffix) > 1:
            digest = hashlib.sha256(json.dumps(each, sort_keys=True, default=str).encode()).hexdigest()
            suffix = f"{suffix[: max(0, max_name_length - _DIGEST_LENGTH - 1)]}-{digest[:_DIGEST_LENGTH]}".lstrip("-")
        grid_points.append((suffix, each))
    return grid_points


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ending of each dotted key that no other key has, by key."""
    label_by_key = {}
    for key in keys:
        key_parts = split_key(key)
        num_label_parts = next(
            num_parts for num_parts in range(1, len(key_parts) + 1)
            if num_parts == len(key_parts)
            or sum(split_key(other_key)[-num_parts:] == key_parts[-num_parts:] for other_key in keys) == 1
        )  # fmt: skip
        label_by_key[key] = re.sub(r"[^A-Za-z0-9_]+", "_", "_".join(key_parts[-num_label_parts:]))
    return label_by_key


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
        values = merge(values, nest_value(split_key(key), value))
    return values


def _rename_references(table: TableT, new_names: Mapping[str, str]) -> TableT:
    """Return a stage of a branch or its recipe, with `stage:NAME` of other stages of the branch renamed."""

    def rename_reference(_named_thing: NamedThing, text: str) -> str:
        name = new_names.get(source_of(text) or "")
        return f"{STAGE_PREFIX}{name}" if name else text

    return convert_named_things(table, rename_reference)


def _replace_branch_references(
    pipeline: Pipeline, stage: StageConfig, sweep_stage_name: str, member_names: Sequence[str]
) -> StageConfig:
    """Return a stage outside of the branches, with references to branch stages replaced by the selecting stage."""
    location = _describe_stage(pipeline, stage)
    branch_references = {f"{STAGE_PREFIX}{name}" for name in member_names}
    if stage.data in branch_references:
        raise ConfigError(
            f"{location}: data = {stage.data!r} is in every branch of the sweep of {sweep_stage_name!r}; name the "
            f"stage in its sweep.through, or give it rows of its own"
        )
    if stage.model in branch_references and stage.checkpoint:
        raise ConfigError(
            f"{location}: checkpoint = {stage.checkpoint!r}: the choice of sweep {sweep_stage_name!r} has no "
            f"checkpoints; name the stage in its sweep.through"
        )
    predecessors = tuple(dict.fromkeys(sweep_stage_name if name in member_names else name for name in stage.after))
    model = f"{STAGE_PREFIX}{sweep_stage_name}" if stage.model in branch_references else stage.model
    return stage.model_copy(update={"after": predecessors, "model": model})


def _describe_stage(pipeline: Pipeline, stage: StageConfig) -> str:
    return f"{pipeline.source}: stage {stage.name!r}"
