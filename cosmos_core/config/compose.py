"""One resolved pipeline from a TOML file: recipes composed, overrides applied, implied stages added, the graph checked.

A recipe without `[pipeline]` is a complete pipeline too: prepare -> train -> validate -> export, without the stages
that have nothing to do. A training stage whose rows nobody prepares gets a `prepare` stage `<name>-data`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.load import Values, merge, nested, parse, parse_override, read_toml, without_none
from cosmos_core.config.pipeline import PipelineConfig, StageConfig
from cosmos_core.config.recipe import Recipe, check_rl
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

TRAINING_KINDS = ("sft", "rl")
STAGE_PREFIX = "stage:"


@dataclass(frozen=True)
class Pipeline:
    """A checked graph: every name resolves, there is no cycle, stages are in an order in which they can run."""

    source: Path
    config: PipelineConfig
    recipes: dict[str, Recipe]
    """By stage name."""

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


def load_pipeline(path: Path, overrides: Sequence[str], kinds: Sequence[str]) -> Pipeline:
    """Read, compose and check a pipeline or a plain recipe.

    Raises:
        ConfigError: any mistake, in one line that names the file and the key.
    """
    raw = read_toml(path)
    table, shared = raw.pop("pipeline", {}), raw
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: pipeline = {table!r}: must be a table")
    names = [s.get("name") for s in table.get("stages", ()) if isinstance(s, Mapping)]
    table, shared, per_stage = _apply(table, shared, overrides, names)
    config = parse(PipelineConfig, {"name": path.stem, **table}, source=str(path), prefix="pipeline")
    if not config.stages:
        config = config.model_copy(update={"stages": _stages_of_recipe(_recipe(path, shared, ""))})
    recipes = {}
    for stage in config.stages:
        values = merge(merge(shared, _recipe_file(path, stage)), stage.overrides)
        recipes[stage.name] = _recipe(path, merge(values, per_stage.get(stage.name, {})), stage.name)
    pipeline = Pipeline(path, config, recipes)
    _check_names(pipeline, kinds)
    return _absolute(_sorted(_with_prepared_data(pipeline)))


def _apply(
    table: Mapping[str, Any], shared: Values, overrides: Sequence[str], names: Sequence[Any]
) -> tuple[Values, Values, Values]:
    """`--set`: a stage's name first addresses that stage, `pipeline.` the table, anything else every stage."""
    per_stage: Values = {}
    values = dict(table)
    for text in overrides:
        keys, value = parse_override(text)
        if len(keys) > 1 and keys[0] in names:
            if keys[1] in Recipe.model_fields:
                per_stage = merge(per_stage, nested(keys, value))
            else:
                stages = [
                    merge(s, nested(keys[1:], value)) if s.get("name") == keys[0] else s for s in values["stages"]
                ]
                values["stages"] = stages
        elif keys[0] == "pipeline":
            values = merge(values, nested(keys[1:], value))
        else:
            shared = merge(shared, nested(keys, value))
            for name in names:  # the command line wins over a stage's recipe file too
                per_stage = merge(per_stage, {name: nested(keys, value)})
    return values, shared, per_stage


def _recipe_file(path: Path, stage: StageConfig) -> Values:
    if not stage.recipe:
        return {}
    file = path.parent / stage.recipe
    if not file.exists():
        raise ConfigError(f"{path}: stage {stage.name!r}: recipe = {stage.recipe!r}: no such file ({file})")
    values = read_toml(file)
    if "pipeline" in values:
        raise ConfigError(f"{file}: a recipe used by a stage cannot have a [pipeline] of its own")
    return values


def _recipe(path: Path, values: Values, stage: str) -> Recipe:
    where = f"{path}: stage {stage!r}" if stage else str(path)
    return parse(Recipe, values, source=where)


def _stages_of_recipe(recipe: Recipe) -> tuple[StageConfig, ...]:
    kind = "sft" if recipe.train.train_policy.type == "sft" else "rl"
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


def _check_names(pipeline: Pipeline, kinds: Sequence[str]) -> None:
    names = [stage.name for stage in pipeline.stages]
    for stage in pipeline.stages:
        where = f"{pipeline.source}: stage {stage.name!r}"
        if names.count(stage.name) > 1:
            raise ConfigError(f"{where}: the name is used twice; stage names are unique")
        if stage.kind not in kinds:
            raise ConfigError(f"{where}: unknown kind {stage.kind!r}{suggestion(stage.kind, list(kinds))}")
        if stage.kind == "custom" and not stage.entry:
            raise ConfigError(f"{where}: kind 'custom' needs entry = \"module:function\"")
        if stage.kind != "custom" and (stage.entry or stage.arguments):
            raise ConfigError(f"{where}: entry and arguments have a meaning only with kind = 'custom'")
        if stage.kind in TRAINING_KINDS:
            wanted = "sft" if stage.kind == "sft" else "grpo"
            found = pipeline.recipes[stage.name].train.train_policy.type
            if found != wanted:
                raise ConfigError(
                    f"{where}: kind {stage.kind!r} needs train.train_policy.type = {wanted!r}, not {found!r}"
                )
        if stage.kind == "rl":
            try:
                check_rl(pipeline.recipes[stage.name])
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
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


def _sorted(pipeline: Pipeline) -> Pipeline:
    """Topological order that keeps the file's order where it can; a cycle is an error that shows it."""
    done: list[StageConfig] = []
    waiting = list(pipeline.stages)
    while waiting:
        names = {stage.name for stage in done}
        ready = [stage for stage in waiting if set(stage.after) <= names]
        if not ready:
            raise ConfigError(f"{pipeline.source}: the stages form a cycle: {' -> '.join(_cycle(waiting))}")
        done.append(ready[0])
        waiting.remove(ready[0])
    ordered = _with_stages(pipeline, done)
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
    if not target and stage.kind == "upload":
        raise ConfigError(f"{where}: kind 'upload' needs target = \"FOLDER\"")
    if not target and any(parse_condition(text).needs_published for text in stage.require):
        raise ConfigError(
            f"{where}: require compares with `published`, but there is no target to read it from; set target"
        )
    return target


def _with_stages(pipeline: Pipeline, stages: Sequence[StageConfig]) -> Pipeline:
    return replace(pipeline, config=pipeline.config.model_copy(update={"stages": tuple(stages)}))


def _cycle(stages: Sequence[StageConfig]) -> list[str]:
    after = {stage.name: stage.after for stage in stages}
    path = [stages[0].name]
    while True:
        following = next(name for name in after[path[-1]] if name in after)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)


def _with_prepared_data(pipeline: Pipeline) -> Pipeline:
    """Give every training or validating stage a `data = "stage:..."` that names a prepare stage."""
    stages: list[StageConfig] = []
    recipes = dict(pipeline.recipes)
    by_name = {stage.name: stage for stage in pipeline.stages}
    for stage in pipeline.stages:
        if stage.kind not in (*TRAINING_KINDS, "validate") or _prepares(by_name, source_of(stage.data)):
            stages.append(stage)
            continue
        trained = by_name.get(source_of(stage.model) or "")
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
        origin = _origin_of_model(by_name, stage)
        needs = tuple(dict.fromkeys(s for s in (source_of(origin), source_of(stage.data)) if s))
        stages.append(StageConfig(name=name, kind="prepare", model=origin, data=stage.data, after=needs))
        recipes[name] = recipes[stage.name]
        stages.append(_depending(stage, data=f"stage:{name}", after=name))
    return _with_stages(replace(pipeline, recipes=recipes), stages)


def _prepares(by_name: Mapping[str, StageConfig], name: str | None) -> bool:
    return name is not None and name in by_name and by_name[name].kind == "prepare"


def _depending(stage: StageConfig, *, data: str, after: str) -> StageConfig:
    return stage.model_copy(update={"data": data, "after": tuple(dict.fromkeys((*stage.after, after)))})


def _origin_of_model(by_name: Mapping[str, StageConfig], stage: StageConfig) -> str:
    """Where the tokenizer comes from: training does not change it, so rows need not wait for the training."""
    model, seen = stage.model, {stage.name}
    while (name := source_of(model)) is not None and by_name[name].kind in (*TRAINING_KINDS, "export"):
        if name in seen:
            break  # a cycle; reported with its path when the graph is sorted
        seen.add(name)
        model = by_name[name].model
    return model


def _absolute(pipeline: Pipeline) -> Pipeline:
    """Local paths made absolute, so that a run can be resumed from any folder."""
    here = pipeline.source.parent

    def absolute(text: str) -> str:
        if not text or source_of(text) is not None:
            return text
        for base in (Path.cwd(), here):
            if (base / Path(text).expanduser()).exists():
                return str((base / Path(text).expanduser()).resolve())
        return text

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


def _target(target: str) -> str:
    path = target.removeprefix("file://")
    return str(Path(path).expanduser().absolute()) if path and "://" not in path else target


def _absolute_recipe(recipe: Recipe, absolute: Any, entry: Any) -> Recipe:
    values = recipe.model_dump()
    values["policy"]["model_name_or_path"] = absolute(values["policy"]["model_name_or_path"])
    for table in (values["train"]["train_policy"], values["validation"]):
        table["dataset"]["name"] = absolute(table["dataset"]["name"])
        if "reward_function" in table:
            table["reward_function"] = {entry(name): weight for name, weight in table["reward_function"].items()}
    return Recipe.model_validate(values)
