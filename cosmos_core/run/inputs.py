"""What a pipeline takes from outside the run directory: models, data, rewards, code of the user's own, packages.

Found by name, without torch and without importing any of it, so that a missing one is told before anything runs.
What is inside (weights, rows, functions) is looked at by the workers.
"""

from __future__ import annotations

from pathlib import Path

from cosmos_core.config.compose import Pipeline, existing, source_of
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, DataError, ModelError, RewardError
from cosmos_core.registry import code_file, is_import_path, offered_names, suggestion
from cosmos_core.run.packages import installed

REWARDS = "cosmos_core.rewards"
MODEL_KINDS = ("prepare", "sft", "rl", "validate", "export")
REWARDED_KINDS = ("sft", "rl", "validate")
SINK_PACKAGES = ("wandb", "tensorboard")
"""Of the same name as the sink, and as the extra of ours that brings it."""
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet", ".arrow", ".csv"}


def check_inputs(pipeline: Pipeline) -> None:
    """Everything that a stage names and that no stage makes is there.

    Raises:
        ModelError, DataError, RewardError, ConfigError: something is not; the message names stage and key.
    """
    asked = {name for recipe in pipeline.recipes.values() for name in recipe.logging.logger}.intersection(SINK_PACKAGES)
    missing = asked - installed(sorted(asked), pipeline.config.python).keys() if asked else set()
    for stage in pipeline.stages:
        recipe = pipeline.recipes[stage.name]
        try:
            _check_sinks(missing.intersection(recipe.logging.logger))
            model_source(stage, recipe)
            data_sources(stage, recipe)
            if stage.kind in REWARDED_KINDS:
                for key, name in reward_names(recipe).items():
                    _check_reward(key, name)
            if stage.entry:
                code_file(stage.entry)
        except (ConfigError, DataError, ModelError, RewardError) as error:
            raise type(error)(f"{pipeline.source}: stage {stage.name!r}: {error}") from error


def model_source(stage: StageConfig, recipe: Recipe) -> Path | str | None:
    """Folder of the model, its name on the Hub or `stage:NAME`; None: the stage reads no model.

    Raises:
        ModelError: it can only be a folder, and there is none.
    """
    key, model = ("model", stage.model) if stage.model else ("policy.model_name_or_path", _own_model(stage, recipe))
    if not model or source_of(model) is not None:
        return model or None
    found = existing(model, Path.cwd())
    if found is not None and found.is_dir():
        return found
    if found is not None or _looks_like_path(model):
        raise ModelError(f"{key} = {model!r}: no such folder; give a Hugging Face model folder or a Hub id")
    return model


def data_sources(stage: StageConfig, recipe: Recipe) -> list[Path | str]:
    """Files, folders and Hub names of the rows that the stage reads itself; those of other stages left out.

    Raises:
        DataError: one can only be a file or folder, and there is none.
    """
    named = {"data": stage.data}
    if stage.kind == "prepare":
        if not stage.data:
            named = {"train.train_policy.dataset.name": recipe.train.train_policy.dataset.name}
            if not any(named.values()):
                raise DataError("train.train_policy.dataset.name is empty; give a file, a folder or a Hub id")
        named["validation.dataset.name"] = recipe.validation.dataset.name
    found: list[Path | str] = []
    for key, name in named.items():
        if not name or source_of(name) is not None:
            continue
        path = existing(name, Path.cwd())
        if path is None and (_looks_like_path(name) or Path(name).suffix in _DATA_SUFFIXES):
            raise DataError(f"{key} = {name!r}: no such file or folder")
        found.append(path or name)
    return found


def reward_names(recipe: Recipe) -> dict[str, str]:
    """Rewards that a stage with this recipe may call, by their key in the recipe."""
    policy = recipe.train.train_policy
    trained = policy.reward_function if policy.type == "grpo" else {}
    return {f"train.train_policy.reward_function.{name}": name for name in trained} | {
        f"validation.reward_function.{name}": name for name in recipe.validation.reward_function
    }


def _own_model(stage: StageConfig, recipe: Recipe) -> str:
    return recipe.policy.model_name_or_path if stage.kind in MODEL_KINDS else ""


def _check_reward(key: str, name: str) -> None:
    key = key.removesuffix(f".{name}")
    if is_import_path(name):
        try:
            code_file(name)
        except ConfigError as error:
            raise RewardError(f"{key}: {error}") from error
    elif name not in (known := offered_names(REWARDS)):
        raise RewardError(
            f"{key}: there is no reward {name!r}; one of your own is module:function or path/file.py:function"
            f"{suggestion(name, known)}"
        )


def _check_sinks(missing: set[str]) -> None:
    for name in sorted(missing):
        raise ConfigError(
            f"logging.logger {name!r}: the package {name} is not installed; pip install 'cosmos-posttrain[{name}]' "
            f"or leave it out"
        )


def _looks_like_path(name: str) -> bool:
    """Whether a name can only be a local path: Hub ids have at most one slash and no leading dot."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")
