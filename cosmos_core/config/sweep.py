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

from cosmos_core.config.compat.translate import current_key, with_current_algorithm_keys
from cosmos_core.config.inputs import STAGE_PREFIX, referenced_stage
from cosmos_core.config.load import TomlTable, merge_tables, nest_value, parse_table
from cosmos_core.config.override import split_key
from cosmos_core.config.schema.field_metadata import ReferenceKind
from cosmos_core.config.schema.pipeline import MAX_STAGE_NAME_LENGTH, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.sweep import SweepBranch, SweepConfig
from cosmos_core.config.schema.table import TableT, convert_references
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggest_names

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline

_STAGE_ARGUMENTS_KEY = "arguments"
_GRID_TABLE_NAMES = (*Recipe.model_fields, _STAGE_ARGUMENTS_KEY)
"""Names of the tables whose keys a grid can set: those of a recipe, and `arguments` of a stage."""
# Branches that differ in the seed share their prepared rows, so that they are compared on the same held-out rows.
_SEED_KEY = "train.seed"
# Branches that differ in this key have separate prepared rows, because the tokenizer of the model prepares the rows.
_TOKENIZER_KEY = "policy.model_name_or_path"
_DIGEST_LENGTH = 6


def with_expanded_sweeps(pipeline: Pipeline, tables_by_stage: Mapping[str, TomlTable]) -> Pipeline:
    """Return a pipeline with each sweep expanded to branches and a stage that selects the best branch. The stages of
    `pipeline` must be in topological order; `tables_by_stage` holds the recipes as written in the file, by stage name.
    Raises `ConfigError` if a sweep cannot be expanded; the message names stage and key."""
    for stage in pipeline.stages:
        _check_sweep(pipeline, stage)
    for stage in pipeline.stages:
        if stage.sweep is not None and stage.sweep.grid:
            pipeline = _expand_sweep(pipeline, stage, stage.sweep, tables_by_stage)
    expanded_stages = []
    for stage in pipeline.stages:
        # A `select` stage names no branches: each stage in `after` becomes a branch, of which it selects one.
        if stage.sweep is not None and not stage.sweep.branches:
            branches = tuple(SweepBranch(stages=(name,)) for name in stage.after)
            stage = stage.model_copy(update={"sweep": stage.sweep.model_copy(update={"branches": branches})})
        if stage.sweep is not None:
            branch_stages = [name for branch in stage.sweep.branches for name in branch.stages]
            stage = stage.model_copy(update={"after": tuple(dict.fromkeys((*stage.after, *branch_stages)))})
        expanded_stages.append(stage)
    return pipeline.with_stages(expanded_stages)


def _check_sweep(pipeline: Pipeline, stage: StageConfig) -> None:
    sweep_config, error_prefix = stage.sweep, _make_error_prefix(pipeline, stage)
    if sweep_config is None:
        return
    is_select_stage, stage_names = pipeline.stage_kind(stage).selects_branch, [other.name for other in pipeline.stages]
    for name in [*sweep_config.through, *(name for branch in sweep_config.branches for name in branch.stages)]:
        if name not in stage_names:
            suggestion = suggest_names(name, stage_names)
            raise ConfigError(f"{error_prefix}: sweep: {name!r} is no stage of this pipeline{suggestion}")
    if is_select_stage and (sweep_config.grid or sweep_config.through):
        problem = f"sweep.grid belongs to the stage that is run with it; kind {stage.kind!r} chooses"
        raise ConfigError(f"{error_prefix}: {problem}")
    if is_select_stage and not sweep_config.branches and len(stage.after) < 2:
        raise ConfigError(f"{error_prefix}: there is nothing to choose from; name at least two stages in `after`")
    if not is_select_stage and (sweep_config.branches or not sweep_config.grid):
        problem = 'sweep needs grid = { "train.optm_lr" = [1e-5, 3e-5] }, and has no branches'
        raise ConfigError(f"{error_prefix}: {problem}")


def _expand_sweep(
    pipeline: Pipeline, sweep_stage: StageConfig, sweep_config: SweepConfig, tables_by_stage: Mapping[str, TomlTable]
) -> Pipeline:
    error_prefix = _make_error_prefix(pipeline, sweep_stage)
    copied_stage_names = _find_copied_stages(pipeline, sweep_stage, sweep_config, tables_by_stage)
    recipes, copied_stages, branches = dict(pipeline.recipes), [], []
    dependent_stage_names = pipeline.stage_and_dependents(sweep_stage.name)
    for branch_suffix, grid_point in _list_grid_points(sweep_config.grid, max(map(len, copied_stage_names))):
        copy_by_original = {original_name: f"{original_name}-{branch_suffix}" for original_name in copied_stage_names}
        key_parts = {key: _split_grid_key(key, sweep_stage.name, copied_stage_names) for key in grid_point}
        for original_name, name in copy_by_original.items():
            if name in recipes:
                raise ConfigError(f"{error_prefix}: sweep: the name {name!r} of a branch is taken by another stage")
            # A copied `prepare` stage gets the grid values of the stage with the sweep, whose rows it prepares.
            source_stage = original_name if original_name in dependent_stage_names else sweep_stage.name
            stage_keys = {key: name for key, (stage_name, name) in key_parts.items() if stage_name == source_stage}
            stage_settings = {name: grid_point[key] for key, name in stage_keys.items()}
            recipe_overrides = {key: value for key, value in stage_settings.items() if not _is_stage_argument(key)}
            recipe = pipeline.recipes[original_name]
            if recipe_overrides:
                settings_text = "".join(f" with {key} = {value!r}" for key, value in recipe_overrides.items())
                tables = merge_tables(tables_by_stage[source_stage], _nest_dotted_settings(recipe_overrides))
                tables = with_current_algorithm_keys(tables, [])
                recipe = parse_table(Recipe, tables, error_prefix=f"{error_prefix}{settings_text}", notices=[])
            recipes[name] = _rename_references(recipe, copy_by_original)
            stage = _rename_references(pipeline.stage(original_name), copy_by_original)
            stage_arguments = {key: value for key, value in stage_settings.items() if _is_stage_argument(key)}
            if source_stage == original_name:
                arguments = merge_tables({"arguments": stage.arguments}, _nest_dotted_settings(stage_arguments))
                stage = stage.model_copy(update=arguments)
            predecessor_names = tuple(copy_by_original.get(predecessor, predecessor) for predecessor in stage.after)
            copied_stages.append(stage.model_copy(update={"name": name, "after": predecessor_names, "sweep": None}))
        branches.append(SweepBranch(stages=tuple(copy_by_original.values()), settings=grid_point))
    name, branch_stages = sweep_stage.name, tuple(stage_name for branch in branches for stage_name in branch.stages)
    kind = next(kind_name for kind_name, kind in pipeline.stage_kinds.items() if kind.selects_branch)
    sweep = sweep_config.model_copy(update={"grid": {}, "through": (), "branches": tuple(branches)})
    select_stage = StageConfig(name=name, kind=kind, recipe=sweep_stage.recipe, after=branch_stages, sweep=sweep)
    uncopied_stages = [stage for stage in pipeline.stages if stage.name not in copied_stage_names]
    uncopied_stages = [_replace_branch_references(pipeline, s, name, copied_stage_names) for s in uncopied_stages]
    for original_name in set(copied_stage_names) - {name}:
        del recipes[original_name]
    return pipeline.with_stages([*uncopied_stages, *copied_stages, select_stage], recipes)


def _find_copied_stages(
    pipeline: Pipeline, sweep_stage: StageConfig, sweep_config: SweepConfig, tables_by_stage: Mapping[str, TomlTable]
) -> tuple[str, ...]:
    """Return the names of the stages that are copied into each branch of a sweep: the stage with the sweep, the stages
    between it and those in `through`, and the stage that prepares the rows if the grid affects the rows."""
    error_prefix, copied_stage_names = _make_error_prefix(pipeline, sweep_stage), {sweep_stage.name}
    dependent_stage_names = pipeline.stage_and_dependents(sweep_stage.name)
    for name in sweep_config.through:
        if name not in dependent_stage_names:
            raise ConfigError(f"{error_prefix}: sweep.through: stage {name!r} is not behind {sweep_stage.name!r}")
        copied_stage_names |= {other for other in dependent_stage_names if name in pipeline.stage_and_dependents(other)}
    rows_stage_name = referenced_stage(sweep_stage.data) or ""
    recipe_tables = tables_by_stage[sweep_stage.name]
    has_rows_of_recipe = bool(rows_stage_name) and tables_by_stage.get(rows_stage_name, recipe_tables) == recipe_tables
    for key in sweep_config.grid:
        key_stage_name, stage_key = _split_grid_key(current_key(key), sweep_stage.name, tuple(copied_stage_names))
        if not key_stage_name:
            suggestion = suggest_names(key, list(_GRID_TABLE_NAMES))
            raise ConfigError(f"{error_prefix}: sweep.grid: {key!r} is no key of a recipe{suggestion}")
        kind = pipeline.stage_kind(pipeline.stage(key_stage_name))
        if _is_stage_argument(stage_key) and _STAGE_ARGUMENTS_KEY not in kind.allowed_keys:
            raise ConfigError(f"{error_prefix}: sweep.grid: {key!r}: a stage of kind {kind.name!r} takes no arguments")
        if (key_stage_name == sweep_stage.name and has_rows_of_recipe and stage_key != _SEED_KEY) and (
            stage_key == _TOKENIZER_KEY or pipeline.stage_kind(pipeline.stage(rows_stage_name)).reads_key(stage_key)
        ):
            copied_stage_names.add(rows_stage_name)
    for name in sorted(copied_stage_names):
        stage = pipeline.stage(name)
        if not pipeline.stage_kind(stage).is_reusable:
            raise ConfigError(f"{error_prefix}: sweep: stage {name!r} of kind {stage.kind!r} cannot be in a branch; "
                              "put it behind the choice")  # fmt: skip
        if name != sweep_stage.name and stage.sweep is not None:
            raise ConfigError(f"{error_prefix}: sweep.through: stage {name!r} has a sweep of its own")
    return tuple(stage.name for stage in pipeline.stages if stage.name in copied_stage_names)


def _split_grid_key(key: str, sweep_stage_name: str, copied_stage_names: Sequence[str]) -> tuple[str, str]:
    """Split a key of a grid, `KEY` or `STAGE.KEY`, into a stage name and `KEY`. Without STAGE, the name is that of the
    stage with the sweep; it is empty for an unknown key."""
    first_key_part, _, stage_key = key.partition(".")
    if first_key_part in copied_stage_names and stage_key.partition(".")[0] in _GRID_TABLE_NAMES:
        return first_key_part, stage_key
    return (sweep_stage_name, key) if first_key_part in _GRID_TABLE_NAMES and stage_key else ("", key)


def _is_stage_argument(key: str) -> bool:
    return key.partition(".")[0] == _STAGE_ARGUMENTS_KEY


def _list_grid_points(grid: Mapping[str, list[Any]], max_copied_name_length: int) -> list[tuple[str, TomlTable]]:
    """Return one pair for each branch of a sweep: a suffix for the names of the branch's stages, and its values of the
    grid by key. The suffix is so short that it can be appended to names of `max_copied_name_length` characters."""
    points = [dict(zip(map(current_key, grid), values, strict=True)) for values in itertools.product(*grid.values())]
    short_name_by_key = _shorten_keys([current_key(key) for key in grid])
    setting_texts = [[f"{short_name_by_key[key]}-{_format_value(point[key])}" for key in point] for point in points]
    branch_suffixes = list(map("-".join, setting_texts))
    max_suffix_length = MAX_STAGE_NAME_LENGTH - max_copied_name_length - 1
    grid_points = []
    for branch_suffix, point in zip(branch_suffixes, points, strict=True):
        if len(branch_suffix) > max_suffix_length or branch_suffixes.count(branch_suffix) > 1:
            grid_point_digest = hashlib.sha256(json.dumps(point, sort_keys=True, default=str).encode()).hexdigest()
            shortened_suffix = branch_suffix[: max(0, max_suffix_length - _DIGEST_LENGTH - 1)]
            branch_suffix = f"{shortened_suffix}-{grid_point_digest[:_DIGEST_LENGTH]}".lstrip("-")
        grid_points.append((branch_suffix, point))
    return grid_points


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name for each dotted key: its last parts, joined by `_`, as many as distinguish it from the other
    keys."""
    short_name_by_key, parts_of_keys = {}, [split_key(key) for key in keys]
    for key, parts in zip(keys, parts_of_keys, strict=True):
        key_endings = [parts[-num_parts:] for num_parts in range(1, len(parts) + 1)]
        unique_endings = (end for end in key_endings if sum(other[-len(end) :] == end for other in parts_of_keys) == 1)
        short_name_by_key[key] = re.sub(r"[^A-Za-z0-9_]+", "_", "_".join(next(unique_endings, parts)))
    return short_name_by_key


def _format_value(value: Any) -> str:
    """Return the value of a setting as a text that can be part of a stage name: letters, digits, `-` and `_`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "_".join(map(_format_value, value))
    text = re.sub(r"e([+-])0*(?=\d)", r"e\1", repr(value)) if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9-]+", "_", text.rpartition("/")[2] if isinstance(value, str) else text).strip("_")


def _nest_dotted_settings(dotted_settings: TomlTable) -> TomlTable:
    nested_tables: TomlTable = {}
    for key, setting_value in dotted_settings.items():
        nested_tables = merge_tables(nested_tables, nest_value(split_key(key), setting_value))
    return nested_tables


def _rename_references(stage_or_recipe: TableT, copy_name_by_original: Mapping[str, str]) -> TableT:
    """Return a stage of a branch, or the recipe of this stage, in which each reference `stage:NAME` to a copied stage
    refers to the copy in the branch. `copy_name_by_original` maps names of stages to those of their copies."""

    def rename_reference(_reference_kind: ReferenceKind, reference: str) -> str:
        copied_stage_name = copy_name_by_original.get(referenced_stage(reference) or "")
        return f"{STAGE_PREFIX}{copied_stage_name}" if copied_stage_name else reference

    return convert_references(stage_or_recipe, rename_reference)


def _replace_branch_references(
    pipeline: Pipeline, stage: StageConfig, sweep_stage_name: str, copied_stage_names: Sequence[str]
) -> StageConfig:
    """Return a stage outside of the sweep, with each reference to a stage copied into branches replaced by one to the
    sweep's select stage. Raises `ConfigError` if the stage refers to rows or to a checkpoint of a copied stage."""
    error_prefix = _make_error_prefix(pipeline, stage)
    references_to_copied_stages = {f"{STAGE_PREFIX}{name}" for name in copied_stage_names}
    if stage.data in references_to_copied_stages:
        reason = f"data = {stage.data!r} is in every branch of the sweep of {sweep_stage_name!r}"
        raise ConfigError(f"{error_prefix}: {reason}; name the stage in its sweep.through, or give it rows of its own")
    if stage.model in references_to_copied_stages and stage.checkpoint:
        reason = f"checkpoint = {stage.checkpoint!r}: the choice of sweep {sweep_stage_name!r} has no checkpoints"
        raise ConfigError(f"{error_prefix}: {reason}; name the stage in its sweep.through")
    predecessors = [sweep_stage_name if name in copied_stage_names else name for name in stage.after]
    model_reference = f"{STAGE_PREFIX}{sweep_stage_name}" if stage.model in references_to_copied_stages else stage.model
    return stage.model_copy(update={"after": tuple(dict.fromkeys(predecessors)), "model": model_reference})


def _make_error_prefix(pipeline: Pipeline, stage: StageConfig) -> str:
    return f"{pipeline.source_path}: stage {stage.name!r}"
