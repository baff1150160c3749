"""The fingerprint of a stage: a hash of everything that can change the result of the stage, and of nothing else.

Left out on purpose: paths (their content counts), the git commit (recorded in `run.json`; a change of code that
changes results raises the kind's `result_version`), and fields marked `NoResult` in the schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from cosmos_core.config.compose import Pipeline, source_of
from cosmos_core.config.media import MEDIA_PATHS
from cosmos_core.config.schema.dataset import DATA_SUFFIXES
from cosmos_core.config.schema.marks import Where, mark
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import affects_result, flat_keys, result_values, set_fields
from cosmos_core.config.target import split_target
from cosmos_core.facts import Facts, facts_of_workers
from cosmos_core.registry import code_digest, is_import_path
from cosmos_core.run.content import TOKENIZER_FILES, enters_training, files_of, files_of_encoders, files_of_model
from cosmos_core.run.digests import Digests
from cosmos_core.run.files import read_object
from cosmos_core.run.inputs import (
    adapter_source,
    chat_template_source,
    data_code,
    data_sources,
    existing,
    is_remote,
    kernel_packages,
    media_folder,
    model_source,
    resume_source,
    reward_names,
    reward_service_file,
    reward_service_parts,
    teacher_source,
)
from cosmos_core.run.libraries import LIBRARIES
from cosmos_core.run.weights import weights_source
from cosmos_core.types import StageKind, is_below

DATA_FILES = tuple(f"*{suffix}" for suffix in DATA_SUFFIXES)
CARRIED = "carried"
"""Name of the ingredient for the files of a model that training does not read and exports copy."""
_CUSTOM_OF_OURS = ("dataset", "vision")  # tables of `[custom]` that are read without user code
IMAGES = ("*.png", "*.jpg", "*.jpeg", "*.webp", "*.bmp", "*.gif", "*.tif", "*.tiff", "*.PNG", "*.JPG", "*.JPEG")


@dataclass(frozen=True)
class Fingerprint:
    """Hash of a stage, with the ingredients that were hashed so that a difference can be explained."""

    value: str
    ingredients: dict[str, Any]

    @property
    def of_training(self) -> str:
        """Return the hash of the ingredients that a training depends on; stages with the same hash share
        checkpoints."""
        return _hashed({name: value for name, value in self.ingredients.items() if name != CARRIED})

    def difference(self, older: Mapping[str, Any]) -> list[str]:
        """Return the ingredients that differ from those in `older`, as `key: old -> new`."""
        old, new = flat_keys(older), flat_keys(self.ingredients)
        keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        return [f"{key}: {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys]


def fingerprint(
    pipeline: Pipeline, stage: StageConfig, kind: StageKind, upstream: Mapping[str, str], digests: Digests
) -> Fingerprint:
    """Return the fingerprint of one stage; `upstream` maps each stage in `after` to the digest of its result.

    Raises:
        ModelError, DataError: a local model or data folder is missing.
        ConfigError: user code is missing.
    """
    recipe = pipeline.recipes[stage.name]
    model = model_source(stage, recipe, kind)
    reads = reads_of(pipeline, stage)
    labels = _labels(recipe, reads)
    values = result_values(recipe) if stage.entry else _without_paths(result_values(recipe))
    # User functions may read any file, and data of diffusion models has many file types.
    patterns, media = (("*",), ("*",)) if stage.entry or recipe.policy.is_diffusers else (DATA_FILES, IMAGES)
    world_size = recipe.policy.parallelism.world_size if kind.has_mesh else None
    facts = stage_facts(pipeline, is_group=(world_size or 1) > 1)
    ingredients: dict[str, Any] = {
        "kind": kind.name,
        "result_version": kind.result_version,
        "config": {key: value for key, value in flat_keys(_renamed(values, labels)).items() if reads(key)},
        "inputs": dict(upstream),
        "model": _model_digest(model, recipe.policy.model_revision, kind, digests, recipe),
        "data": [_content(source, patterns, digests) for source in data_sources(stage, recipe, kind)],
        "threads": threads(pipeline) if kind.in_worker and kind.is_numeric else None,
        "device": facts.device if kind.in_worker and kind.is_numeric else None,
        "world_size": world_size,
        "versions": {name: facts.versions[name] for name in kind.libraries if name in facts.versions},
    }
    if (folder := media_folder(stage, recipe, kind)) and (files := files_of(folder, media)):
        ingredients["media"] = [str(folder), digests.of_files(folder, files)]  # prepared rows hold the paths of images
    # The code of tools describes them in prompts; a user's model family encodes text and media.
    tools = recipe.rollout.multi_turn_config.called_tools
    called = labels if kind.scores or kind.trains else (*tools, recipe.policy.model_class)
    code = {label: code_digest(name) for name, label in labels.items() if name in called}
    if code or kind.scores or kind.trains:
        ingredients["code"] = code
    ingredients |= _templates(recipe, reads, digests)
    if teacher := teacher_source(recipe, kind):
        ingredients["teacher"] = _model_digest(teacher, recipe.distillation.model_revision, kind, digests, recipe)
    if stage.entry:
        ingredients["entry"] = {stage.entry.rpartition(":")[2]: code_digest(stage.entry), "arguments": stage.arguments}
        ingredients["config"] = values  # the function receives the whole config
    if kind.trains and (checkpoint := resume_source(recipe)):
        ingredients["resume"] = digests.of_file(checkpoint / "manifest.json")  # holds the digests of all other files
    if kind.trains and (adapter := adapter_source(recipe)):
        ingredients["adapter"] = digests.of_files(adapter, files_of(adapter))
    if kind.trains and (packages := kernel_packages(recipe)):
        ingredients["kernels"] = facts_of_workers(tuple(packages), pipeline.config.python).versions
    ingredients |= _of_service(stage, digests)
    if classes := data_code(recipe, kind):
        ingredients["data_code"] = {name.rpartition(":")[2]: code_digest(name) for name in classes}
        ingredients["config"] = values  # the classes receive the whole config
    if weights := weights_source(model, recipe, kind):
        ingredients["weights"] = {file.name: digests.of_file(file) for file in weights}
    ingredients |= _said_of(stage) | _generation_of(model, kind, digests, recipe)
    ingredients = json.loads(json.dumps(ingredients, sort_keys=True, default=str))
    return Fingerprint(_hashed(ingredients), ingredients)


def _hashed(ingredients: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def _of_service(stage: StageConfig, digests: Digests) -> dict[str, Any]:
    """Return the digests of the reward service's configuration file and of the code and models that it names."""
    if (service := reward_service_file(stage)) is None:
        return {}
    parts = reward_service_parts(service)
    rewards = {name: _content(path, ("*",), digests) for name, path in parts.items()}
    return {"reward_service": digests.of_file(service)} | ({"rewards": rewards} if rewards else {})


def _said_of(stage: StageConfig) -> dict[str, Any]:
    """Return the keys of the stage itself that are set and change its result."""
    values: dict[str, Any] = {}
    if is_import_path(target := split_target(stage.target)[0]):
        values["target"] = {target.rpartition(":")[2]: code_digest(target)}
    for key in ("checkpoint", "require", "confidence"):
        if value := getattr(stage, key):
            values[key] = list(value) if isinstance(value, tuple) else value
    if stage.sweep is not None:
        branches = [list(branch.stages) for branch in stage.sweep.branches]
        values["sweep"] = {"metric": stage.sweep.metric, "mode": stage.sweep.mode, "branches": branches}
    return values


def _templates(recipe: Recipe, reads: Callable[[str], bool], digests: Digests) -> dict[str, str]:
    """Return the digest of each chat template file, or the name of a template that is part of this package."""
    templates = {}
    if reads("rollout.multi_turn_config.custom_chat_template_path") and (template := chat_template_source(recipe)):
        templates["chat_template"] = digests.of_file(template)
    if reads("policy.chat_template") and (name := recipe.policy.chat_template):
        file = existing(name, Path.cwd())
        templates["template"] = digests.of_file(file) if file and file.is_file() else name
    return templates


def reads_of(pipeline: Pipeline, stage: StageConfig) -> Callable[[str], bool]:
    """Return a function that tells whether a stage reads a key of its recipe: a key of its kind that no other setting
    disables."""
    kind, recipe = pipeline.kind_of(stage), pipeline.recipes[stage.name]
    unread: list[str] = []
    if kind.trains and not recipe.validation.enable:
        unread += [f"validation.{name}" for name in type(recipe.validation).model_fields if name != "enable"]
    if recipe.teacher_of(kind) is None:
        unread += [f"distillation.{name}" for name in type(recipe.distillation).model_fields if name != "enable"]
    if not _completes_prompts(pipeline, stage):
        unread.append("rollout")

    def is_read(key: str) -> bool:
        return kind.reads(key) and not is_below(key, unread)

    if "custom" in kind.recipe_tables and not stage.entry and not _labels(recipe, is_read):
        unread += [f"custom.{name}" for name in recipe.custom if name not in _CUSTOM_OF_OURS]
    return is_read


def _completes_prompts(pipeline: Pipeline, stage: StageConfig) -> bool:
    """Return True if some rows of the stage may be prompts for rollouts; the stage that prepares the rows decides."""
    kind, source = pipeline.kind_of(stage), source_of(stage.data)
    if kind.feed == "rollouts":
        return True
    if kind.trains and not pipeline.recipes[stage.name].validation.enable:
        return False
    if kind.reads_data == "prepared":
        if source is None or pipeline.kind_of(pipeline.stage(source)).makes != "data":
            return True  # unknown, so assume that some are
        stage = pipeline.stage(source)
    recipe = pipeline.recipes[stage.name]
    return recipe.train.train_policy.has_rollouts or bool(recipe.validation.reward_function)


def threads(pipeline: Pipeline) -> int:
    """Return the number of CPU threads of a worker."""
    return pipeline.config.threads or stage_facts(pipeline).threads


def stage_facts(pipeline: Pipeline, *, is_group: bool = False) -> Facts:
    """Return the properties of the machine and interpreter that run a stage, with the versions of the numeric
    libraries.

    Raises:
        ConfigError, StageFailed: as `facts_of_workers`.
    """
    return facts_of_workers(LIBRARIES, pipeline.config.python, is_group=is_group)


def _model_digest(
    model: Path | str | None, revision: str | None, kind: StageKind, digests: Digests, recipe: Recipe
) -> str | None:
    if isinstance(model, Path) and kind.reads_model == "tokenizer" and recipe.policy.is_diffusers:
        return digests.of_files(model, files_of_encoders(model))
    if isinstance(model, Path):
        patterns = TOKENIZER_FILES if kind.reads_model == "tokenizer" else ("*",)
        files = files_of_model(model, patterns)
        if not _reads_any_file(kind, recipe):
            files = [file for file in files if enters_training(file)]
        return digests.of_files(model, files)
    if model is None or source_of(model) is not None:
        return model  # the digest of that stage is in `inputs`
    return remote_digest(model) if is_remote(model) else f"hub:{model}@{revision}"


def _reads_any_file(kind: StageKind, recipe: Recipe) -> bool:
    """Return True if user code reads the model, which may read any file of the folder."""
    return not kind.entry or bool(recipe.policy.model_class)


def _generation_of(model: Path | str | None, kind: StageKind, digests: Digests, recipe: Recipe) -> dict[str, Any]:
    """Return the tokens at which generation ends, which rows and completions depend on, and the digest of the files
    that exports copy."""
    if not isinstance(model, Path) or _reads_any_file(kind, recipe):
        return {}
    generation_config = read_object(model / "generation_config.json")
    ingredients: dict[str, Any] = (
        {"end_tokens": generation_config["eos_token_id"]} if "eos_token_id" in generation_config else {}
    )
    if kind.reads_model == "weights":
        carried_files = [file for file in files_of_model(model) if not enters_training(file)]
        ingredients[CARRIED] = digests.of_files(model, carried_files)
    return ingredients


def remote_digest(url: str) -> str:
    """Return the text that represents the content of a pinned URL, independent of its location."""
    return f"remote:{url.rpartition('#')[2]}"


def _content(source: Path | str, patterns: Sequence[str], digests: Digests) -> str:
    if isinstance(source, str):
        return remote_digest(source) if is_remote(source) else f"hub:{source}"  # the revision is in the recipe
    return digests.of_files(source, files_of(source, patterns)) if source.is_dir() else digests.of_file(source)


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the paths in `custom.dataset`: the content counts, not its location."""
    custom = values.get("custom") or {}
    if not isinstance(custom.get("dataset"), dict):
        return values
    dataset = {key: value for key, value in custom["dataset"].items() if key not in MEDIA_PATHS}
    return values | {"custom": custom | {"dataset": dataset}}


def _labels(recipe: Recipe, reads: Callable[[str], bool]) -> dict[str, str]:
    """Return a label for each user reward, algorithm and engine that the stage reads: the name without the folder of
    its file, because the location does not change the result."""
    fields = [(key, value) for key, field, value, _ in set_fields(recipe) if affects_result(field) and _is_code(field)]
    code = [value for key, value in fields if reads(key)]
    code += [name for key, name in reward_names(recipe).items() if reads(key)]
    texts = [text for value in code if value for text in ([value] if isinstance(value, str) else value)]
    names = sorted({text for text in texts if is_import_path(text)})
    labels = {name: name.rpartition("/")[2] for name in names}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def _is_code(field: FieldInfo) -> bool:
    return mark(field, Where) is Where.CODE


def _renamed(values: Any, labels: Mapping[str, str]) -> Any:
    """Return the values with each import path of user code replaced by its label, in keys and values."""
    if isinstance(values, str):
        return labels.get(values, values)
    if isinstance(values, list):
        return [_renamed(value, labels) for value in values]
    if not isinstance(values, dict):
        return values
    return {labels.get(key, key): _renamed(value, labels) for key, value in values.items()}


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "..."
