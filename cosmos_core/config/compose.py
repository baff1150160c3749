"""One resolved pipeline from a TOML file: recipes composed, overrides applied, implied stages added, the graph checked.

A recipe without `[pipeline]` is a complete pipeline too: prepare -> train -> validate -> export, without the stages
that have nothing to do. A training stage whose rows nobody prepares gets a `prepare` stage `<name>-data`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.files import read_config
from cosmos_core.config.graph import in_order
from cosmos_core.config.load import MAX_FILE_BYTES, TableT, Values, excess, fit, merge, parse, printable, without_none
from cosmos_core.config.media import located_media
from cosmos_core.config.override import entry_with, parse_setting, shared_values, sort_settings
from cosmos_core.config.schema.pipeline import PipelineConfig, StageConfig
from cosmos_core.config.schema.recipe import Recipe, check_rl, doubts_about_rl
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

TRAINING_KINDS = ("sft", "rl")
MESH_KINDS = (*TRAINING_KINDS, "validate")
"""Kinds of stages that run on the ranks of `policy.parallelism`."""
STAGE_PREFIX = "stage:"
_KEYS_OF_KINDS = {
    "entry": ("custom",), "arguments": ("custom",), "require": ("gate",), "target": ("gate", "upload"),
    "checkpoint": ("export",),
}  # fmt: skip
_REQUIRED = (
    ("custom", "entry", '"module:function" or "path/file.py:function"'),
    ("gate", "require", '["METRIC >= NUMBER"]'),
    ("upload", "model", '"stage:NAME"'),
    ("upload", "target", '"FOLDER"'),
)


@dataclass(frozen=True)
class Pipeline:
    """A checked graph: every name resolves, there is no cycle, stages are in an order in which they can run."""

    source: Path
    config: PipelineConfig
    recipes: dict[str, Recipe]
    """By stage name."""
    notices: tuple[str, ...] = ()
    """What was changed in the values that the files say, once each."""

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """In topological order."""
        return self.config.stages

    @property
    def output_dir(self) -> Path:
        """Folder of all runs."""
        recipe_dirs = [recipe.train.output_dir for recipe in self.recipes.values()]
        return Path(self.config.output_dir or (recipe_dirs[0] if recipe_dirs else "./outputs"))

    def stage(self, name: str) -> StageConfig:
        """The stage of that name.

        Raises:
            ConfigError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(
            f"{self.source}: no stage {name!r} in this pipeline{suggestion(name, [s.name for s in self.stages])}"
        )

    def behind(self, name: str) -> set[str]:
        """The stage and every stage that depends on it."""
        found = {self.stage(name).name}
        for stage in self.stages:  # topological, so one pass is enough
            if found & set(stage.after):
                found.add(stage.name)
        return found

    def as_toml(self) -> Values:
        """The resolved pipeline; loading it gives this pipeline again, without any other file."""
        pipeline = self.config.model_dump()
        for stage in pipeline["stages"]:
            stage["recipe"], stage["overrides"] = "", self.recipes[stage["name"]].model_dump()
        return without_none({"pipeline": pipeline})


def source_of(reference: str) -> str | None:
    """`NAME` of a reference `stage:NAME`; None for a folder or an empty string."""
    return reference.removeprefix(STAGE_PREFIX) if reference.startswith(STAGE_PREFIX) else None


def load_pipeline(path: Path, overrides: Sequence[str], kinds: Sequence[str], over: Sequence[Path] = ()) -> Pipeline:
    """Read, compose and check a pipeline or a plain recipe; the files `over` win over it, `overrides` over them.

    Raises:
        ConfigError: any mistake, in one line that names the file and the key.
    """
    try:
        pipeline = _load(path, overrides, kinds, over)
    except ConfigError as error:
        raise ConfigError(fit(str(error))) from error
    saved = pipeline.as_toml()  # by a run, which must be able to read it back
    found = excess(saved)
    if not found and len(tomli_w.dumps(saved).encode()) > MAX_FILE_BYTES:
        found = f"more than {MAX_FILE_BYTES} bytes once it is written out for {len(pipeline.stages)} stages"
    if found:
        raise ConfigError(fit(f"{path}: {found}"))
    return pipeline


def _load(path: Path, overrides: Sequence[str], kinds: Sequence[str], over: Sequence[Path]) -> Pipeline:
    notices: list[str] = []
    shared = read_config(path, notices, over)
    table = shared.pop("pipeline", {})
    given = [parse_setting(text) for text in overrides]
    entries = _entries(path, table)
    if not entries:
        implied = _stages_of_recipe(_recipe(str(path), merge(shared, shared_values(given)), []))
        entries = [stage.model_dump(exclude_defaults=True) for stage in implied]
    settings = sort_settings(given, [entry["name"] for entry in entries if isinstance(entry.get("name"), str)])
    shared = merge(shared, settings.shared)
    values = merge({"name": path.stem, **{k: v for k, v in table.items() if k != "stages"}}, settings.pipeline)
    config = parse(PipelineConfig, values, source=str(path), prefix="pipeline")
    stages, recipes = [], {}
    for number, entry in enumerate(entries):
        stage = parse(StageConfig, entry_with(entry, settings), source=_where(path, entry, number))
        tables = merge(merge(shared, _recipe_file(path, stage, notices)), stage.overrides)
        beside = f" (recipe {stage.recipe})" if stage.recipe else ""
        where = f"{path}: stage {stage.name!r}{beside}"
        recipes[stage.name] = _recipe(where, merge(tables, settings.recipes.get(stage.name, {})), notices)
        if stage.kind == "rl" and recipes[stage.name].train.train_policy.rows == "prompts":
            notices += doubts_about_rl(recipes[stage.name])
        stages.append(stage)
    complete = config.model_copy(update={"stages": tuple(stages)})
    pipeline = Pipeline(path, complete, recipes, tuple(dict.fromkeys(map(printable, notices))))
    _check_stages(pipeline, kinds)
    return _absolute(_sorted(_with_prepared_data(pipeline)))


def _entries(path: Path, table: Any) -> list[Mapping[str, Any]]:
    """`[[pipeline.stages]]` as it was written."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: pipeline: must be a table")
    entries = table.get("stages", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path}: pipeline.stages: must be tables, each under a line [[pipeline.stages]]")
    return entries


def _where(path: Path, entry: Mapping[str, Any], number: int) -> str:
    name = entry.get("name")
    return f"{path}: stage {name!r}" if isinstance(name, str) else f"{path}: pipeline.stages[{number}]"


def _recipe_file(path: Path, stage: StageConfig, notices: list[str]) -> Values:
    if not stage.recipe:
        return {}
    file = path.parent / stage.recipe
    if not os.path.exists(file):  # unlike Path.exists, False for what can be no path
        raise ConfigError(f"{path}: stage {stage.name!r}: recipe = {stage.recipe!r}: no such file ({file})")
    values = read_config(file, notices)
    if "pipeline" in values:
        raise ConfigError(f"{file}: a recipe used by a stage cannot have a [pipeline] of its own")
    return values


def _recipe(where: str, values: Values, notices: list[str]) -> Recipe:
    return parse(Recipe, values, source=where, notices=notices)


def _stages_of_recipe(recipe: Recipe) -> tuple[StageConfig, ...]:
    kind = "rl" if recipe.train.train_policy.rows == "prompts" else "sft"
    stages = [
        StageConfig(name="prepare", kind="prepare"),
        StageConfig(name=kind, kind=kind, after=("prepare",), data="stage:prepare"),
    ]
    model: Values = {"after": (kind,), "model": f"stage:{kind}"}
    if recipe.validation.enable:
        stages.append(StageConfig(name="validate", kind="validate", data="stage:prepare", **model))
    if recipe.train.ckpt.export_safetensors:
        stages.append(StageConfig(name="export", kind="export", **model))
    return tuple(stages)


def _check_stages(pipeline: Pipeline, kinds: Sequence[str]) -> None:
    names = [stage.name for stage in pipeline.stages]
    trainings = [stage.name for stage in pipeline.stages if stage.kind in TRAINING_KINDS]
    for stage in pipeline.stages:
        where = f"{pipeline.source}: stage {stage.name!r}"
        if names.count(stage.name) > 1:
            raise ConfigError(f"{where}: the name is used twice; stage names are unique")
        if stage.kind not in kinds:
            raise ConfigError(f"{where}: unknown kind {stage.kind!r}{suggestion(stage.kind, list(kinds))}")
        _check_kind(where, stage, pipeline.recipes[stage.name])
        if stage.checkpoint and source_of(stage.model) not in trainings:
            raise ConfigError(f'{where}: checkpoint = {stage.checkpoint!r} needs model = "stage:NAME" of a training')
        for upstream in stage.after:
            if upstream not in names:
                raise ConfigError(
                    f"{where}: after = {upstream!r} is no stage of this pipeline{suggestion(upstream, names)}"
                )
        for key, reference in (("model", stage.model), ("data", stage.data)):
            named = source_of(reference)
            if named is not None and named not in names:
                raise ConfigError(
                    f"{where}: {key} = {reference!r} is no stage of this pipeline{suggestion(named, names)}"
                )


def _check_kind(where: str, stage: StageConfig, recipe: Recipe) -> None:
    """The rules of each kind; what another kind would ignore is refused."""
    for key, users in _KEYS_OF_KINDS.items():
        if getattr(stage, key) and stage.kind not in users:
            raise ConfigError(f"{where}: {key} has a meaning only with kind = {' or '.join(map(repr, users))}")
    for kind, key, form in _REQUIRED:
        if stage.kind == kind and not getattr(stage, key):
            raise ConfigError(f"{where}: kind {kind!r} needs {key} = {form}")
    if stage.kind in TRAINING_KINDS:
        wanted = "sft" if stage.kind == "sft" else "grpo"
        found = recipe.train.train_policy.type
        if found != wanted:
            raise ConfigError(f"{where}: kind {stage.kind!r} needs train.train_policy.type = {wanted!r}, not {found!r}")
    if stage.kind == "rl":
        try:
            check_rl(recipe)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error


def _sorted(pipeline: Pipeline) -> Pipeline:
    """Topological order that keeps the file's order where it can; a cycle is an error that shows it."""
    try:
        ordered = _with_stages(pipeline, in_order(pipeline.stages))
    except ValueError as error:
        raise ConfigError(f"{pipeline.source}: {error}") from error
    complete = []
    for stage in ordered.stages:
        inputs = list(stage.after)
        for key, reference in (("model", stage.model), ("data", stage.data)):
            upstream = source_of(reference)
            if upstream is not None and stage.name not in ordered.behind(upstream):
                raise ConfigError(
                    f"{pipeline.source}: stage {stage.name!r}: {key} = {reference!r} but {upstream!r} is not in its "
                    f'`after`; write after = ["{upstream}"]'
                )
            inputs += [upstream] if upstream else []
        complete.append(
            stage.model_copy(update={"after": tuple(dict.fromkeys(inputs)), "target": _gate_target(ordered, stage)})
        )
    return _with_stages(ordered, complete)


def _gate_target(pipeline: Pipeline, stage: StageConfig) -> str:
    """A gate compares with what the first upload behind it replaces, unless it names a target itself."""
    uploads = [s.target for s in pipeline.stages if s.kind == "upload" and s.name in pipeline.behind(stage.name)]
    target = stage.target or (uploads[0] if stage.kind == "gate" and uploads else "")
    where = f"{pipeline.source}: stage {stage.name!r}"
    if not target and any(parse_condition(text).needs_published for text in stage.require):
        raise ConfigError(
            f"{where}: require compares with `published`, but there is no target to read it from; set target"
        )
    return target


def _with_stages(pipeline: Pipeline, stages: Sequence[StageConfig]) -> Pipeline:
    return replace(pipeline, config=pipeline.config.model_copy(update={"stages": tuple(stages)}))


def _with_prepared_data(pipeline: Pipeline) -> Pipeline:
    """Give every training or validating stage a `data = "stage:..."` that names a prepare stage."""
    stages: list[StageConfig] = []
    recipes = dict(pipeline.recipes)
    by_name = {stage.name: stage for stage in pipeline.stages}
    for stage in pipeline.stages:
        if stage.kind not in MESH_KINDS or _prepares(by_name, source_of(stage.data)):
            stages.append(stage)
            continue
        trained = by_name.get(source_of(stage.model) or "")
        if trained is not None and trained.kind == "export":
            trained = by_name.get(source_of(trained.model) or "")
        if stage.kind == "validate" and not stage.data and trained is not None and trained.kind in TRAINING_KINDS:
            prepared = (
                source_of(trained.data) if _prepares(by_name, source_of(trained.data)) else f"{trained.name}-data"
            )
            stages.append(_depending(stage, data=f"stage:{prepared}", after=prepared or ""))
            continue
        name = f"{stage.name}-data"
        if name in by_name:
            raise ConfigError(
                f"{pipeline.source}: stage {name!r}: the name is taken by the data of stage {stage.name!r}"
            )
        origin = _origin_of_model(by_name, pipeline.recipes, stage)
        needs = tuple(dict.fromkeys(s for s in (source_of(origin), source_of(stage.data)) if s))
        stages.append(StageConfig(name=name, kind="prepare", model=origin, data=stage.data, after=needs))
        recipes[name] = recipes[stage.name]
        stages.append(_depending(stage, data=f"stage:{name}", after=name))
    return _with_stages(replace(pipeline, recipes=recipes), stages)


def _prepares(by_name: Mapping[str, StageConfig], name: str | None) -> bool:
    return name is not None and name in by_name and by_name[name].kind == "prepare"


def _depending(stage: StageConfig, *, data: str, after: str) -> StageConfig:
    return stage.model_copy(update={"data": data, "after": tuple(dict.fromkeys((*stage.after, after)))})


def _origin_of_model(by_name: Mapping[str, StageConfig], recipes: Mapping[str, Recipe], stage: StageConfig) -> str:
    """Where the tokenizer comes from: training does not change it, so rows need not wait for the training."""
    model, seen = stage.model, {stage.name}
    while (name := source_of(model)) is not None and by_name[name].kind in (*TRAINING_KINDS, "export"):
        if name in seen:
            break  # a cycle; reported with its path when the graph is sorted
        seen.add(name)
        model = by_name[name].model or recipes[name].policy.model_name_or_path
    return "" if model == recipes[stage.name].policy.model_name_or_path else model


def _absolute(pipeline: Pipeline) -> Pipeline:
    """Local paths made absolute, so that a run can be resumed from any folder."""
    here = pipeline.source.parent

    def absolute(text: str) -> str:
        if not text or source_of(text) is not None:
            return text
        found = existing(text, Path.cwd()) or existing(text, here)
        return str(found.resolve()) if found else text

    def entry(text: str) -> str:
        file, colon, thing = text.rpartition(":")
        return f"{absolute(file)}{colon}{thing}" if file.endswith(".py") else text

    stages = tuple(
        s.model_copy(
            update={
                "model": absolute(s.model),
                "data": absolute(s.data),
                "entry": entry(s.entry),
                "target": _target(s.target),
            }
        )
        for s in pipeline.stages
    )
    recipes = {name: _absolute_recipe(recipe, absolute, entry) for name, recipe in pipeline.recipes.items()}
    return _with_stages(replace(pipeline, recipes=recipes), stages)


def existing(text: str, base: Path) -> Path | None:
    """The file or folder that a name means, relative to `base`; None where there is none, as for a name on the Hub."""
    try:
        path = base / Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # longer than a path can be; `~` of a user who does not exist
        return None


def _target(target: str) -> str:
    path = target.removeprefix("file://")
    return os.path.abspath(os.path.expanduser(path)) if path and "://" not in path else target


def _absolute_recipe(recipe: Recipe, absolute: Any, entry: Any) -> Recipe:
    def located(table: Any) -> Any:
        update: Values = {"dataset": _changed(table.dataset, name=absolute(table.dataset.name))}
        if hasattr(table, "reward_function"):
            update["reward_function"] = {entry(name): weight for name, weight in table.reward_function.items()}
        return _changed(table, **update)

    lora = recipe.policy.lora
    if lora is not None and lora.lora_path:
        lora = _changed(lora, lora_path=absolute(lora.lora_path))
    policy = _changed(recipe.policy, model_name_or_path=absolute(recipe.policy.model_name_or_path), lora=lora)
    resume = recipe.train.resume
    train = _changed(
        recipe.train,
        train_policy=located(recipe.train.train_policy),
        resume=absolute(resume) if isinstance(resume, str) else resume,
    )
    custom = located_media(recipe.custom, absolute)
    return _changed(recipe, train=train, policy=policy, validation=located(recipe.validation), custom=custom)


def _changed(table: TableT, **values: Any) -> TableT:
    """The table with other values; what was given and what is a default stays known."""
    new = {name: value for name, value in values.items() if value != getattr(table, name)}
    return table.model_copy(update=new) if new else table
