"""Build one resolved pipeline from a TOML file: compose recipes, apply overrides, add implied stages, check the graph.

A recipe without `[pipeline]` is a complete pipeline too: prepare -> train -> validate -> export -> upload, without the
stages that the recipe disables. If no stage prepares the rows of a stage NAME, a `prepare` stage `NAME-data` is added.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.compat.translate import with_current_algorithm_keys, with_current_keys
from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.files import read_config
from cosmos_core.config.inherited import with_inherited_settings
from cosmos_core.config.inputs import STAGE_PREFIX, StageInput, existing_path, referenced_stage, stage_inputs
from cosmos_core.config.load import (
    MAX_FILE_BYTES,
    TomlTable,
    describe_unsupported_value,
    make_printable,
    merge_tables,
    parse_table,
    shorten_message,
    without_none,
)
from cosmos_core.config.media import with_absolute_media_paths
from cosmos_core.config.override import (
    IMPLIED_STAGE_SUFFIX,
    Override,
    drop_ineffective_overrides,
    grid_override_notices,
    group_overrides,
    parse_override,
    recipe_overrides,
)
from cosmos_core.config.schema.field_metadata import ReferenceKind
from cosmos_core.config.schema.pipeline import MAX_STAGE_NAME_LENGTH, PipelineConfig, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import convert_references
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.config.sweep import with_expanded_sweeps
from cosmos_core.config.target import absolute_publication_target
from cosmos_core.config.uploads import with_upload_stages
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggest_names
from cosmos_core.types import StageKind

_DEFAULT_OUTPUT_DIR: str = TrainConfig.model_fields["output_dir"].default
StageKinds = Mapping[str, StageKind]


@dataclass(frozen=True)
class Pipeline:
    """Checked graph of stages in topological order: it has no cycle, and every stage that a stage refers to exists."""

    source_path: Path
    config: PipelineConfig
    recipes: dict[str, Recipe]
    """Recipe of each stage, by stage name."""
    stage_kinds: StageKinds
    """Every available stage kind, by name."""
    notices: tuple[str, ...] = ()
    """Notices about values of the configuration files that were changed or ignored, without duplicates."""

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """Return the stages in topological order."""
        return self.config.stages

    @property
    def output_dir(self) -> Path:
        """Return the folder in which the runs of the pipeline are created."""
        return Path(self.config.output_dir or _DEFAULT_OUTPUT_DIR)

    def stage(self, name: str) -> StageConfig:
        """Return the stage with this name; raise `ConfigError` if the pipeline has no such stage."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        stage_names = [stage.name for stage in self.stages]
        raise ConfigError(f"{self.source_path}: no stage {name!r} in this pipeline{suggest_names(name, stage_names)}")

    def stage_kind(self, stage: StageConfig) -> StageKind:
        """Return the properties of the kind of a stage."""
        return self.stage_kinds[stage.kind]

    def inputs(self, stage: StageConfig) -> tuple[StageInput, ...]:
        """Return the models, rows, files and code that a stage reads but does not make."""
        return stage_inputs(stage, self.recipes[stage.name], self.stage_kind(stage))

    def secret_env_names(self, stage: StageConfig) -> tuple[str, ...]:
        """Return the names of the environment variables of a stage whose values are masked in its log."""
        return (*stage.env, *self.recipes[stage.name].secret_env_names)

    def initial_model(self, stage: StageConfig) -> str:
        """Return the model that a stage starts from, the value of its key `model`. For a stage that selects one of
        several models, or merges them without a `model`, return `stage:NAME`, where NAME is the stage that makes the
        first of these models."""
        kind, branches = self.stage_kind(stage), stage.sweep.branches if stage.sweep else ()
        if not kind.selects_branch and (stage.model or not kind.merges_models):
            return stage.model
        stage_names = branches[0].stages if branches else stage.after
        model_stage_names = [name for name in stage_names if self.stage_kind(self.stage(name)).makes == "model"]
        # The model of a branch is that of the last stage which makes one.
        source_stage_names = (model_stage_names or stage_names[:1])[-1 if branches else 0 :][:1]
        return "".join(f"{STAGE_PREFIX}{name}" for name in source_stage_names)

    def find_branch_selector(self, name: str) -> StageConfig | None:
        """Return the stage that selects the best branch of the sweep to which a stage belongs; None: no sweep."""
        sweep_stages = ((stage, stage.sweep.branches) for stage in self.stages if stage.sweep is not None)
        return next((stage for stage, branches in sweep_stages if any(name in each.stages for each in branches)), None)

    def stage_and_dependents(self, name: str) -> set[str]:
        """Return the names of the stage `name` and of every stage that depends on it."""
        stage_names = {self.stage(name).name}
        for stage in self.stages:  # one pass finds all dependents, because the stages are in topological order
            if stage_names & set(stage.after):
                stage_names.add(stage.name)
        return stage_names

    def with_stages(self, stages: Iterable[StageConfig], recipes: dict[str, Recipe] | None = None) -> Pipeline:
        """Return a copy of the pipeline with its stages and, unless `recipes` is None, its recipes replaced."""
        new_pipeline_config = self.config.model_copy(update={"stages": tuple(stages)})
        return replace(self, config=new_pipeline_config, recipes=self.recipes if recipes is None else recipes)

    def as_toml(self) -> TomlTable:
        """Return the resolved pipeline as TOML tables, from which it can be loaded again without any other file."""
        pipeline_table = self.config.model_dump()
        for stage in pipeline_table["stages"]:
            stage["recipe"], stage["overrides"] = "", self.recipes[stage["name"]].model_dump()
        return without_none({"pipeline": pipeline_table})


@contextmanager
def _shorten_error_messages() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(shorten_message(str(error))) from error


@_shorten_error_messages()
def load_pipeline(
    path: Path, overrides: Sequence[str], stage_kinds: StageKinds, overriding_files: Sequence[Path] = ()
) -> Pipeline:
    """Read, compose and check the pipeline or recipe in `path`. The files `overriding_files` take precedence over
    `path`, and `overrides` take precedence over all files.

    `stage_kinds` contains every stage kind, by name; their properties decide which stages are added and checked. Raises
    `ConfigError` if the configuration has an error; the message has one line and names the file and the key.
    """
    notices: list[str] = []
    # Parse overrides before files are read: `--set KEY VALUE` in place of `KEY=VALUE` makes VALUE the name of a file.
    parsed_overrides = list(map(parse_override, overrides))
    root_tables, base_folders = read_config(path, notices, overriding_files)
    base_folders = [path.parent, *base_folders]
    return _compose_pipeline(path, root_tables, parsed_overrides, stage_kinds, notices, base_folders)


@_shorten_error_messages()
def append_stage(pipeline: Pipeline, stage_table: TomlTable, recipe_tables: TomlTable, source: Path) -> Pipeline:
    """Return the pipeline with a new stage, and with the stages that the new stage implies, such as a `prepare` stage.

    Args:
        stage_table: keys of the new stage in `[[pipeline.stages]]`.
        recipe_tables: tables of the recipe of the new stage.
        source: recipe, or Python file of a flow, that defines the stage; error messages name it. Relative paths in
            `recipe_tables` start from its folder, or from the folder of a file that the recipe extends.

    Raises `ConfigError` if the configuration has an error, as `load_pipeline` does.
    """
    notices: list[str] = []
    pipeline_tables = pipeline.as_toml()
    recipe_tables = with_current_keys(recipe_tables, f"{source}: stage {stage_table['name']!r}", notices)
    pipeline_tables["pipeline"].setdefault("stages", []).append({**stage_table, "overrides": recipe_tables})
    base_folders = [source.parent] if source.suffix == ".py" else read_config(source, [])[1]
    return _compose_pipeline(source, pipeline_tables, (), pipeline.stage_kinds, notices, base_folders)


def _check_serializable(pipeline: Pipeline) -> None:
    """Raise `ConfigError` if the resolved pipeline could not be saved as TOML and read again: if it has a value that
    TOML does not support, or is too large."""
    resolved_tables = pipeline.as_toml()
    problem_text = describe_unsupported_value(resolved_tables)
    # Estimate the size by `repr` first, because writing the pipeline as TOML takes seven times as long.
    may_exceed_max_file_bytes = 16 * len(repr(resolved_tables)) > MAX_FILE_BYTES
    if not problem_text and may_exceed_max_file_bytes and len(tomli_w.dumps(resolved_tables).encode()) > MAX_FILE_BYTES:
        problem_text = f"more than {MAX_FILE_BYTES} bytes once it is written out for {len(pipeline.stages)} stages"
    if problem_text:
        raise ConfigError(f"{pipeline.source_path}: {problem_text}")


def _compose_pipeline(
    path: Path,
    root_tables: TomlTable,
    overrides: Sequence[Override],
    stage_kinds: StageKinds,
    notices: list[str],
    base_folders: list[Path],
) -> Pipeline:
    pipeline_table = root_tables.pop("pipeline", {})
    parsed_overrides = drop_ineffective_overrides(overrides, notices)
    if not isinstance(pipeline_table, Mapping):
        raise ConfigError(f"{path}: pipeline: must be a table")
    stage_entries = pipeline_table.get("stages", [])
    if not isinstance(stage_entries, list) or not all(isinstance(entry, Mapping) for entry in stage_entries):
        raise ConfigError(f"{path}: pipeline.stages: must be tables, each under a line [[pipeline.stages]]")
    if not stage_entries:
        recipe_tables = with_current_algorithm_keys(merge_tables(root_tables, recipe_overrides(parsed_overrides)), [])
        recipe = parse_table(Recipe, recipe_tables, error_prefix=str(path), notices=[])
        stage_entries = _make_default_stage_entries(recipe, stage_kinds)
    stage_names = [entry["name"] for entry in stage_entries if isinstance(entry.get("name"), str)]
    pipeline_overrides, stage_overrides = group_overrides(parsed_overrides, stage_names)
    pipeline_settings = {"name": path.stem, **{key: value for key, value in pipeline_table.items() if key != "stages"}}
    pipeline_settings = merge_tables(pipeline_settings, pipeline_overrides)
    pipeline_config = parse_table(PipelineConfig, pipeline_settings, error_prefix=str(path), key_prefix="pipeline")
    stages, recipes, recipe_table_by_stage, recipe_folders = [], {}, {}, {"": list[Path]()}
    for stage_index, stage_entry in enumerate(stage_entries):
        name = stage_entry.get("name")
        error_prefix = f"{path}: stage {name!r}" if isinstance(name, str) else f"{path}: pipeline.stages[{stage_index}]"
        stage_table = merge_tables(stage_entry, stage_overrides.get(str(name), {}))
        stage = parse_table(StageConfig, stage_table, error_prefix=error_prefix)
        recipe_values, recipe_folders[stage.recipe] = _read_recipe_file(path, stage, notices)
        recipe_table_by_stage[stage.name] = merge_tables(merge_tables(root_tables, recipe_values), stage.overrides)
        error_prefix = f"{path}: stage {stage.name!r}" + (f" (recipe {stage.recipe})" if stage.recipe else "")
        recipe_tables = with_current_algorithm_keys(recipe_table_by_stage[stage.name], notices)
        recipes[stage.name] = parse_table(Recipe, recipe_tables, error_prefix=error_prefix, notices=notices)
        notices += grid_override_notices(parsed_overrides, stage)
        stages.append(stage)
    resolved_config = pipeline_config.model_copy(update={"stages": tuple(stages)})
    pipeline = Pipeline(path, resolved_config, recipes, stage_kinds, tuple(dict.fromkeys(map(make_printable, notices))))
    _check_stages(pipeline)
    pipeline = _with_output_dir(pipeline)
    pipeline = with_expanded_sweeps(_sort_topologically(_with_prepared_data(pipeline)), recipe_table_by_stage)
    pipeline = with_upload_stages(_sort_topologically(pipeline))
    pipeline = _with_absolute_paths(_sort_topologically(pipeline), base_folders, recipe_folders)
    pipeline = with_inherited_settings(pipeline)
    _check_serializable(pipeline)
    return pipeline


def _read_recipe_file(path: Path, stage: StageConfig, notices: list[str]) -> tuple[TomlTable, list[Path]]:
    if not stage.recipe:
        return {}, []
    recipe_path = path.parent / stage.recipe
    if not os.path.exists(recipe_path):  # use os.path, because Path.exists fails for an invalid path
        raise ConfigError(f"{path}: stage {stage.name!r}: recipe = {stage.recipe!r}: no such file ({recipe_path})")
    recipe_tables, base_folders = read_config(recipe_path, notices)
    if "pipeline" in recipe_tables:
        raise ConfigError(f"{recipe_path}: a recipe used by a stage cannot have a [pipeline] of its own")
    return recipe_tables, base_folders


def _make_default_stage_entries(recipe: Recipe, kinds: StageKinds) -> list[Mapping[str, Any]]:
    """Return the entries of `[[pipeline.stages]]` for a recipe without `[pipeline]`; each stage has the name of its
    kind."""
    prepare_kind = _find_stage_kind(kinds, makes="data")
    training_kind = _find_stage_kind(kinds, feed=_find_feed(recipe))
    data_table: TomlTable = {"data": f"{STAGE_PREFIX}{prepare_kind}"}
    model_settings = {"after": (training_kind,), "model": f"{STAGE_PREFIX}{training_kind}"}
    settings_by_kind: dict[str, TomlTable] = {prepare_kind: {}, training_kind: {"after": (prepare_kind,)} | data_table}
    if recipe.validation.enable:
        settings_by_kind[_find_stage_kind(kinds, makes="metrics", reads_data="prepared")] = model_settings | data_table
    if recipe.train.ckpt.export_safetensors:
        export_kind = _find_stage_kind(kinds, makes="model", feed="", selects_branch=False, required_keys={})
        settings_by_kind[export_kind] = model_settings
    return [{"name": kind, "kind": kind, **settings} for kind, settings in settings_by_kind.items()]


def _find_stage_kind(kinds: StageKinds, **attributes: object) -> str:
    """Return the name of the first stage kind in `kinds` whose attributes have the values in the keyword arguments."""
    return next(n for n, kind in kinds.items() if all(getattr(kind, key) == attributes[key] for key in attributes))


def stage_references(stage: StageConfig, recipe: Recipe, stage_kind: StageKind) -> Iterator[tuple[str, str]]:
    """Yield pairs of a key and its value, for each setting of a stage in which a reference `stage:NAME` is allowed."""
    yield "model", stage.model
    yield "data", stage.data
    if stage_kind.reads_data == "source":
        yield from _dataset_references(recipe)
    if teacher := recipe.teacher_for_stage(stage_kind):
        yield "distillation.model_name_or_path", teacher.model_name_or_path


def _dataset_references(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield pairs of a key and its value, for each setting of a recipe's data sets in which a reference `stage:NAME` is
    allowed."""
    for key, dataset in recipe.datasets.items():
        yield f"{key}.name", dataset.name
        yield f"{key}.pass_rates", dataset.pass_rates


def _find_feed(recipe: Recipe) -> str:
    """Return `rollouts` if the algorithm of the recipe trains on rollouts, otherwise `dataset`: the value of
    `StageKind.feed` that a stage needs to train with this algorithm."""
    return "rollouts" if recipe.train.train_policy.has_rollouts else "dataset"


def _check_stages(pipeline: Pipeline) -> None:
    stage_kinds = pipeline.stage_kinds
    stage_names = [stage.name for stage in pipeline.stages]
    for stage in pipeline.stages:
        if stage.kind not in stage_kinds:
            suggestion = suggest_names(stage.kind, list(stage_kinds))
            raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: unknown kind {stage.kind!r}{suggestion}")
    training_names = [stage.name for stage in pipeline.stages if stage_kinds[stage.kind].trains_model]
    export_names = [stage.name for stage in pipeline.stages if stage_kinds[stage.kind].reads_key("export.formats")]
    for stage in pipeline.stages:
        location = f"{pipeline.source_path}: stage {stage.name!r}"
        if stage_names.count(stage.name) > 1:
            raise ConfigError(f"{location}: the name is used twice; stage names are unique")
        _check_stage_kind(location, stage, pipeline.recipes[stage.name], stage_kinds)
        model_stage_name = referenced_stage(stage.model)
        if stage.checkpoint and model_stage_name not in training_names:
            raise ConfigError(f'{location}: checkpoint = {stage.checkpoint!r} needs model = "stage:NAME" of a training')
        select_stages = [each for each in pipeline.stages if stage_kinds[each.kind].selects_branch]
        select_stages = [each for each in select_stages if stage.format and each.name == model_stage_name]
        export_name = referenced_stage(pipeline.initial_model(select_stages[0])) if select_stages else model_stage_name
        export_formats = pipeline.recipes[export_name].export.formats if export_name in export_names else ()
        if stage.format and stage.format not in export_formats:
            problem_text = f"format = {stage.format!r} is not among export.formats of model = {stage.model!r}"
            raise ConfigError(f"{location}: {problem_text}")
        recipe = pipeline.recipes[stage.name]
        settings = (*stage_references(stage, recipe, stage_kinds[stage.kind]), *_dataset_references(recipe))
        references = [("after", name, name) for name in stage.after]
        references += [(key, value, name) for key, value in settings if (name := referenced_stage(value)) is not None]
        for key, value, name in references:
            if name not in stage_names:
                suggestion = suggest_names(name, stage_names)
                raise ConfigError(f"{location}: {key} = {value!r} is no stage of this pipeline{suggestion}")


def _check_stage_kind(error_prefix: str, stage: StageConfig, recipe: Recipe, kinds: StageKinds) -> None:
    """Raise `ConfigError` if a stage sets a key that its kind does not read, lacks a key that its kind needs, or is of
    a kind that cannot train with the algorithm of its recipe."""
    stage_kind = kinds[stage.kind]
    for key in dict.fromkeys(key for other_kind in kinds.values() for key in other_kind.allowed_keys):
        if getattr(stage, key) and key not in stage_kind.allowed_keys:
            supporting_kinds_text = " or ".join(repr(kind.name) for kind in kinds.values() if key in kind.allowed_keys)
            raise ConfigError(f"{error_prefix}: {key} has a meaning only with kind = {supporting_kinds_text}")
    for key, example_value in stage_kind.required_keys.items():
        if not getattr(stage, key):
            raise ConfigError(f"{error_prefix}: kind {stage_kind.name!r} needs {key} = {example_value}")
    if stage_kind.trains_model and stage_kind.feed != _find_feed(recipe):
        raise ConfigError(
            f"{error_prefix}: kind {stage_kind.name!r} does not train with train.train_policy.type = "
            f"{recipe.train.train_policy.type!r}; take kind = {_find_stage_kind(kinds, feed=_find_feed(recipe))!r}"
        )


def _with_output_dir(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with the `output_dir` that its recipes set, unless `[pipeline]` sets one; raise `ConfigError`
    if recipes set different folders."""
    if folder := pipeline.config.output_dir:
        train_output_dirs = {recipe.train.output_dir for recipe in pipeline.recipes.values()} - {_DEFAULT_OUTPUT_DIR}
        ineffective_text = f"has no effect here: pipeline.output_dir = {folder!r}"
        notices = sorted(f"train.output_dir = {other!r} {ineffective_text}" for other in train_output_dirs - {folder})
        return replace(pipeline, notices=(*pipeline.notices, *notices))
    stage_name_by_folder: dict[str, str] = {}
    for name, recipe in pipeline.recipes.items():
        if "output_dir" in recipe.train.model_fields_set:
            stage_name_by_folder.setdefault(recipe.train.output_dir, name)
    if len(stage_name_by_folder) > 1:
        conflict_text = " and ".join(f"{folder!r} of stage {stage!r}" for folder, stage in stage_name_by_folder.items())
        single_folder_rule = "a run has one folder; set pipeline.output_dir"
        raise ConfigError(f"{pipeline.source_path}: train.output_dir = {conflict_text}: {single_folder_rule}")
    output_dir = next(iter(stage_name_by_folder), _DEFAULT_OUTPUT_DIR)
    return replace(pipeline, config=pipeline.config.copy_with(output_dir=output_dir))


def _sort_topologically(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with its stages in topological order; stages that do not depend on each other keep the order
    of the file. If a key of a stage refers to another stage, that stage is added to its `after`; the publication target
    of each gate is set. Raises `ConfigError` if the stages form a cycle, or if a stage refers to another stage without
    depending on it through `after`."""
    pipeline, sorted_stages = pipeline.with_stages(_topological_order(pipeline)), []
    for stage in pipeline.stages:
        predecessors = list(stage.after)
        for key, reference in stage_references(stage, pipeline.recipes[stage.name], pipeline.stage_kind(stage)):
            referenced_name = referenced_stage(reference)
            if referenced_name is not None and stage.name not in pipeline.stage_and_dependents(referenced_name):
                problem = f"{key} = {reference!r} but {referenced_name!r} is not in its `after`"
                remedy = f'write after = ["{referenced_name}"]'
                raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: {problem}; {remedy}")
            predecessors += [referenced_name] if referenced_name else []
        updated_fields = {"after": tuple(dict.fromkeys(predecessors)), "target": _find_gate_target(pipeline, stage)}
        sorted_stages.append(stage.model_copy(update=updated_fields))
    return pipeline.with_stages(sorted_stages)


def _topological_order(pipeline: Pipeline) -> list[StageConfig]:
    """Return the stages of a pipeline so that each follows the stages in its `after`; otherwise the order of the file
    is kept. Raises `ConfigError` if the stages form a cycle."""
    stages_by_name = {stage.name: stage for stage in pipeline.stages}
    topological_sorter = TopologicalSorter({name: stage.after for name, stage in stages_by_name.items()})
    try:
        topological_sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"{pipeline.source_path}: the stages form a cycle: {' -> '.join(error.args[1])}") from error
    ready_stage_names, ordered_stages = list(topological_sorter.get_ready()), []
    while ready_stage_names:
        name = min(ready_stage_names, key=list(stages_by_name).index)
        ready_stage_names.remove(name)
        ordered_stages.append(stages_by_name[name])
        topological_sorter.done(name)
        ready_stage_names += topological_sorter.get_ready()
    return ordered_stages


def _find_gate_target(pipeline: Pipeline, stage: StageConfig) -> str:
    """Return the publication target of a gate, by default the target of the first upload stage that depends on the
    gate. If there is none, return an empty string, or raise `ConfigError` if a condition compares with `published`."""
    dependents = pipeline.stage_and_dependents(stage.name) if stage.require else set[str]()
    upload_stages = [each for each in pipeline.stages if pipeline.stage_kind(each).makes == "publication"]
    publication_target = stage.target or next((each.target for each in upload_stages if each.name in dependents), "")
    if not publication_target and any(parse_condition(condition).needs_published_model for condition in stage.require):
        reason = "require compares with `published`, but there is no target to read it from"
        raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: {reason}; set target")
    return publication_target


def _with_prepared_data(pipeline: Pipeline) -> Pipeline:
    """Set `data = "stage:NAME"` in every stage that reads prepared rows, and add the stages that prepare these rows."""
    stages: list[StageConfig] = []
    recipes = dict(pipeline.recipes)
    stages_by_name = {stage.name: stage for stage in pipeline.stages}
    kinds = {stage.name: pipeline.stage_kind(stage) for stage in pipeline.stages}

    def find_prepare_stage(stage: StageConfig) -> str:
        """Return the name of the prepare stage that `stage.data` refers to; empty if it refers to none."""
        name = referenced_stage(stage.data) or ""
        return name if name in kinds and kinds[name].makes == "data" else ""

    for stage in pipeline.stages:
        if kinds[stage.name].reads_data != "prepared" or find_prepare_stage(stage):
            stages.append(stage)
            continue
        training = stages_by_name.get(referenced_stage(stage.model) or "")
        if training and kinds[training.name].makes == "model" and not kinds[training.name].trains_model:
            training = stages_by_name.get(referenced_stage(training.model) or "")
        if training and kinds[training.name].trains_model and kinds[stage.name].makes == "metrics" and not stage.data:
            name = find_prepare_stage(training) or f"{training.name}{IMPLIED_STAGE_SUFFIX}"
            stages.append(_add_data_dependency(stage, name))
            continue
        name = f"{stage.name}{IMPLIED_STAGE_SUFFIX}"
        if len(name) > MAX_STAGE_NAME_LENGTH:
            stage_name_rule = f"NAME-data, may have {MAX_STAGE_NAME_LENGTH} characters"
            problem = f"the name of the stage that prepares its rows, {stage_name_rule}"
            remedy = "shorten the name, or name a prepare stage in data"
            raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: {problem}; {remedy}")
        if name in stages_by_name:
            error_prefix = f"{pipeline.source_path}: stage {name!r}"
            raise ConfigError(f"{error_prefix}: the name is taken by the data of stage {stage.name!r}")
        model = _find_tokenizer_model(pipeline, stages_by_name, stage)
        prepare_kind = _find_stage_kind(pipeline.stage_kinds, makes="data")
        prepare_stage = StageConfig(name=name, kind=prepare_kind, model=model, data=stage.data, recipe=stage.recipe)
        references = stage_references(prepare_stage, recipes[stage.name], pipeline.stage_kinds[prepare_kind])
        predecessors = dict.fromkeys(source for _, reference in references if (source := referenced_stage(reference)))
        stages.append(prepare_stage.model_copy(update={"after": tuple(predecessors)}))
        recipes[name] = recipes[stage.name]
        stages.append(_add_data_dependency(stage, name))
    return pipeline.with_stages(stages, recipes)


def _add_data_dependency(stage: StageConfig, name: str) -> StageConfig:
    return stage.model_copy(update={"data": f"stage:{name}", "after": tuple(dict.fromkeys((*stage.after, name)))})


def _find_tokenizer_model(pipeline: Pipeline, stages_by_name: Mapping[str, StageConfig], stage: StageConfig) -> str:
    """Return the model whose tokenizer prepares the rows of a stage; empty if this model is that of the stage's recipe.
    The model of a training is replaced by the model from which the training starts: both have the same tokenizer, and
    the rows can be prepared before the training."""
    recipes, model, visited_stage_names = pipeline.recipes, stage.model, {stage.name}
    while (name := referenced_stage(model)) is not None and pipeline.stage_kind(stages_by_name[name]).makes == "model":
        if name in visited_stage_names:
            break  # end the loop at a cycle of stages; `_topological_order` later raises an error for it
        visited_stage_names.add(name)
        model = pipeline.initial_model(stages_by_name[name]) or recipes[name].policy.model_name_or_path
    return "" if model == recipes[stage.name].policy.model_name_or_path else model


def _with_absolute_paths(
    pipeline: Pipeline, base_folders: Sequence[Path], recipe_folders: Mapping[str, Sequence[Path]]
) -> Pipeline:
    """Return the pipeline with absolute local paths, so that a run can be resumed from any folder.

    A relative path is searched for in the current folder, then in the folder of the pipeline's file, then in the
    folders of the other configuration files of the stage. `base_folders` starts with the folder of the pipeline's file,
    followed by the folders of its other files; `recipe_folders` maps a recipe file to its folder and those of the
    extended files.
    """
    stages, recipes = [], dict(pipeline.recipes)
    for stage in pipeline.stages:
        search_folders = (Path.cwd(), base_folders[0], *recipe_folders[stage.recipe], *base_folders[1:])
        make_absolute = partial(_absolute_path, search_folders)
        convert_reference_fn = partial(_convert_reference, make_absolute)
        stages.append(convert_references(stage, convert_reference_fn))
        recipe = convert_references(recipes[stage.name], convert_reference_fn)
        recipes[stage.name] = recipe.copy_with(custom=with_absolute_media_paths(recipe.custom, make_absolute))
    python_path = pipeline.config.python
    # If a stage runs on a work pool, keep the interpreter's path, because other machines may resolve it to another one.
    if os.sep in python_path and not any(stage.work_pool for stage in stages):
        # Symbolic links are not resolved, because Python finds its virtual environment by the path of the link.
        python_path = os.path.abspath(os.path.expanduser(python_path))
        pipeline = replace(pipeline, config=pipeline.config.copy_with(python=python_path))
    return pipeline.with_stages(stages, recipes)


def with_paths_of_other_folders(config_values: Any, config_folders: Sequence[Path], pipeline: Pipeline) -> Any:
    """Return `config_values`, the merged values of configuration files, with an absolute path in place of each relative
    path that exists neither in the current folder nor in the first of `config_folders`, but in a later one. Only paths
    that the resolved `pipeline` of these files has under the same key are replaced."""
    find_in_first_folders, find_in_all_folders = (
        partial(_convert_reference, partial(_absolute_path, folders), ReferenceKind.PATH)
        for folders in ((Path.cwd(), config_folders[0]), config_folders)
    )
    resolved_texts = {(_recipe_keys(keys), text) for keys, text in _iterate_texts(pipeline.as_toml())}

    def convert_paths(value: Any, keys: tuple[str, ...] = ()) -> Any:
        if isinstance(value, dict):
            return {convert_paths(key, keys): convert_paths(item, (*keys, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [convert_paths(item, keys) for item in value]
        if not isinstance(value, str) or find_in_first_folders(value) != value:
            return value
        path = find_in_all_folders(value)
        return path if (_recipe_keys(keys), path) in resolved_texts else value

    return convert_paths(config_values)


def _recipe_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that lead to a value of a recipe without those that lead to the recipe of a stage."""
    return keys[3:] if keys[:3] == ("pipeline", "stages", "overrides") else keys


def _iterate_texts(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each string in nested tables and lists, the keys of tables included, after the keys that lead to it."""
    if isinstance(value, dict):
        for key, nested_value in value.items():
            yield keys, key
            yield from _iterate_texts(nested_value, (*keys, key))
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item, keys)
    elif isinstance(value, str):
        yield keys, value


def _absolute_path(base_folders: Sequence[Path], name: str) -> str:
    """Return the absolute path, with links resolved, of the file or folder `name` in the first of `base_folders` that
    contains it. Return `name` unchanged if no folder contains it, or if it is a reference `stage:NAME`. A link to a
    file with another suffix is not resolved, because the suffix selects the format: links in the Hub's cache point to
    files without suffix."""
    existing_paths = (existing_path(name, folder) for folder in base_folders)
    path = next(filter(None, existing_paths), None) if referenced_stage(name) is None else None
    if path is None:
        return name
    resolves_to_same_suffix = path.is_dir() or path.resolve().suffix == path.suffix
    return str(path.resolve() if resolves_to_same_suffix else path.parent.resolve() / path.name)


def _convert_reference(make_absolute: Callable[[str], str], reference_kind: ReferenceKind, reference: str) -> str:
    if reference_kind is ReferenceKind.PUBLICATION_TARGET:
        return absolute_publication_target(reference, make_absolute)
    python_file_path, separator, python_object_name = reference.rpartition(":")
    if python_file_path.endswith(".py"):
        return f"{make_absolute(python_file_path)}{separator}{python_object_name}"
    return make_absolute(reference) if reference_kind is ReferenceKind.PATH and reference else reference
