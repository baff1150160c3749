"""Inputs of a pipeline from outside the run directory: models, data, rewards, user code, packages.

Inputs are located by name, without torch and without importing user code, so that a missing input is reported before
any stage runs. The workers check the contents (weights, rows, functions).
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from cosmos_core.config.compose import Pipeline, existing, source_of
from cosmos_core.config.load import read_toml
from cosmos_core.config.media import media_of
from cosmos_core.config.prompt_sets import named_set
from cosmos_core.config.schema.dataset import data_suffix
from cosmos_core.config.schema.logging import CONSOLE, SINKS_FOLDER
from cosmos_core.config.schema.pipeline import BLOCK, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.target import split_target
from cosmos_core.errors import ConfigError, CosmosError, DataError, ModelError, RewardError
from cosmos_core.facts import facts_of_workers
from cosmos_core.registry import code_file, is_code, is_import_path, load_named, offered_names, suggestion
from cosmos_core.run.content import files_of_model
from cosmos_core.run.weights import weights_source
from cosmos_core.types import StageKind

REWARDS = "cosmos_core.rewards"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def check_inputs(pipeline: Pipeline) -> None:
    """Check that every input exists that a stage names and no other stage makes.

    Raises:
        ModelError, DataError, RewardError, ConfigError: an input is missing; the message names stage and key.
    """
    packages = {package for recipe in pipeline.recipes.values() for package in _packages(recipe)}
    missing = (
        packages - facts_of_workers(sorted(packages), pipeline.config.python).versions.keys() if packages else set()
    )
    for stage in pipeline.stages:
        recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
        try:
            if isinstance(model := model_source(stage, recipe, kind), Path):
                files_of_model(model)
            weights_source(model, recipe, kind)
            if isinstance(teacher := teacher_source(recipe, kind), Path):
                files_of_model(teacher)
            data_sources(stage, recipe, kind)
            if kind.trains:
                resume_source(recipe)
                adapter_source(recipe)
                _check_gpu(recipe)
                if not stage.work_pool:  # a stage on a work pool checks its own machine
                    _check_compiler(recipe, pipeline.config.python)
            chat_template_source(recipe)
            if kind.scores:
                _check_rewards(recipe)
            for key, name in _user_code(stage, recipe):
                _check_code(key, name)
            for package, key in _packages(recipe).items():
                if package in missing and (kind.trains or package not in kernel_packages(recipe)):
                    raise ConfigError(
                        f"{key}: the package {package} is not installed; pip install 'cosmos-posttrain[{package}]' or "
                        f"leave it out"
                    )
        except (ConfigError, DataError, ModelError, RewardError) as error:
            raise type(error)(f"{pipeline.source}: stage {stage.name!r}: {error}") from error


def is_remote(name: str) -> bool:
    """Return True if a name is a URL of a store, which `run.remote` reads."""
    return name.startswith("s3://")


def model_source(stage: StageConfig, recipe: Recipe, kind: StageKind) -> Path | str | None:
    """Return the source of the model of a stage: a folder, a URL, a name on the Hub or `stage:NAME`; None if the stage
    reads no model.

    Raises:
        ModelError: the name can only be that of a folder, which does not exist.
    """
    recipe_model = recipe.policy.model_name_or_path if kind.reads_model else ""
    return _found_model(*(("model", stage.model) if stage.model else ("policy.model_name_or_path", recipe_model)))


def teacher_source(recipe: Recipe, kind: StageKind) -> Path | str | None:
    """Return the source of the teacher model: a folder, a name on the Hub or `stage:NAME`; None if the stage has no
    teacher.

    Raises:
        ModelError: the name can only be that of a folder, which does not exist.
    """
    teacher = recipe.teacher_of(kind)
    return _found_model("distillation.model_name_or_path", teacher.model_name_or_path) if teacher else None


def _found_model(key: str, model: str) -> Path | str | None:
    if not model or source_of(model) is not None or is_remote(model):
        return model or None
    path = existing(model, Path.cwd())
    if path is not None and path.is_dir():
        return path
    if path is not None or _looks_like_path(model):
        raise ModelError(f"{key} = {model!r}: no such folder; give a Hugging Face model folder or a Hub id")
    return model


def data_sources(stage: StageConfig, recipe: Recipe, kind: StageKind) -> list[Path | str]:
    """Return the files, folders, URLs and Hub names of the rows that a stage reads and no other stage makes.

    Raises:
        DataError: a name can only be that of a file or folder, which does not exist.
    """
    annotations = "custom.dataset.annotation_path"
    names = {"data": stage.data}
    if stage.entry and existing(media_of(recipe).annotation_path, Path.cwd()):
        names[annotations] = media_of(recipe).annotation_path
    if kind.reads_data == "source":
        if not stage.data:
            media = media_of(recipe)
            names = {**_of_table("train.train_policy.dataset", recipe), annotations: media.annotation_path}
            if not any(names.values()):
                raise DataError("train.train_policy.dataset.name is empty; give a file, a folder or a Hub id")
            if media.media_path and media_folder(stage, recipe, kind) is None:
                raise DataError(f"custom.dataset.media_path = {media.media_path!r}: no such folder")
        for table in recipe.datasets:
            if table != "train.train_policy.dataset":
                names |= _of_table(table, recipe)
    sources: list[Path | str] = []
    for key, name in names.items():
        if not name or source_of(name) is not None:
            continue
        path = None if is_remote(name) else existing(name, Path.cwd())
        if path is None and recipe.policy.is_diffusers:
            path = named_set(name, key)
        if path is None and is_code(name):
            path = _check_code(key, name)
        can_only_be_local = (
            key in {"data", annotations}
            or key.endswith(".local_dir")
            or _looks_like_path(name)
            or data_suffix(name) != ""
        )
        if path is None and can_only_be_local and not is_remote(name):
            raise DataError(f"{key} = {name!r}: no such file or folder")
        if path is not None and not (path.is_file() or path.is_dir()):
            raise DataError(f"{key} = {name!r} is neither a file nor a folder; rows cannot be read twice from it")
        sources.append(path or name)
    return sources


def data_code(recipe: Recipe, kind: StageKind) -> list[str]:
    """Return the import paths of the user classes that make or change the rows of a stage."""
    if kind.reads_data != "source":
        return []
    policy = recipe.train.train_policy
    tables = (policy.dataset, recipe.validation.dataset)
    return [table.name for table in tables if is_code(table.name)] + [policy.data_packer] * bool(policy.data_packer)


def _of_table(table: str, recipe: Recipe) -> dict[str, str]:
    """Return the key of a data set's table that locates its rows, with the value of that key."""
    dataset = recipe.datasets[table]
    if dataset.local_dir:
        return {f"{table}.local_dir": dataset.local_dir}
    return {f"{table}.name": dataset.name}


def media_folder(stage: StageConfig, recipe: Recipe, kind: StageKind) -> Path | None:
    """Return the folder that image paths in the rows are relative to, or None if there is none or the model reads text
    only.

    Whether a model on the Hub reads images is not known before it is downloaded. A changed image is still noticed in
    training, because prepared rows hold the digest of each image.
    """
    if not (kind.reads_data == "source" or stage.entry):
        return None
    media = media_of(recipe)
    if media.media_path:
        folder = existing(media.media_path, Path.cwd())
        return folder if folder is not None and folder.is_dir() else None
    rows = media.annotation_path
    model = model_source(stage, recipe, kind)
    if isinstance(model, Path) and any((model / name).is_file() for name in _PROCESSOR_FILES):
        rows = rows or stage.data or recipe.train.train_policy.dataset.name
    path = existing(rows, Path.cwd()) if rows else None
    return path.parent if path is not None and path.is_file() else path


def resume_source(recipe: Recipe) -> Path | None:
    """Return the checkpoint folder that `train.resume` names.

    Raises:
        ModelError: the folder is missing, or is a checkpoint of Cosmos-RL.
    """
    if not isinstance(recipe.train.resume, str):
        return None
    key = f"train.resume = {recipe.train.resume!r}"
    policy = existing(recipe.train.resume, Path.cwd())
    if policy is not None and any(policy.glob("*.pth")):
        raise ModelError(
            f"{key}: a pickled checkpoint of Cosmos-RL, which could run any code when read; start from the safetensors "
            f"folder of that run: policy.model_name_or_path = '.../safetensors/step_N'"
        )
    is_named = policy is not None and policy.name == "policy" and re.fullmatch(r"step_\d+", policy.parent.name)
    if policy is None or not is_named or not (policy / "manifest.json").is_file():
        raise ModelError(f"{key}: no checkpoint; give the folder .../checkpoints/step_N/policy of a run")
    return policy


def adapter_source(recipe: Recipe) -> Path | None:
    """Return the adapter folder that `policy.lora.lora_path` names.

    Raises:
        ModelError: the folder is missing or holds no adapter.
    """
    lora = recipe.policy.lora
    if lora is None or lora.lora_path is None:
        return None
    folder = existing(lora.lora_path, Path.cwd())
    if folder is None or not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"policy.lora.lora_path = {lora.lora_path!r}: no adapter; give a folder with adapter_config.json"
        )
    return folder


def chat_template_source(recipe: Recipe) -> Path | None:
    """Return the file of the chat template that replaces the tokenizer's template in rollouts.

    Raises:
        ConfigError: the file does not exist.
    """
    turns = recipe.rollout.multi_turn_config
    if not turns.enable or turns.custom_chat_template_path is None:
        return None
    file = existing(turns.custom_chat_template_path, Path.cwd())
    if file is None or not file.is_file():
        key = "rollout.multi_turn_config.custom_chat_template_path"
        raise ConfigError(f"{key} = {turns.custom_chat_template_path!r}: no such file; give one that Jinja reads")
    return file


def reward_service_file(stage: StageConfig) -> Path | None:
    """Return the configuration file of the reward service that is started for a stage; None if the stage uses no
    service or a running one.

    Raises:
        ConfigError: the file does not exist.
    """
    if not stage.reward_service or stage.reward_service.startswith(BLOCK):
        return None
    file = existing(stage.reward_service, Path.cwd())
    if file is None or not file.is_file():
        raise ConfigError(f"reward_service = {stage.reward_service!r}: no such file; see docs/how-to/reward-service.md")
    return file


def reward_service_parts(file: Path) -> dict[str, Path]:
    """Return the user code and the model folders that the configuration of a reward service names, by name; paths that
    are not on this machine are left out, because the service may run on another one."""
    try:
        tables = read_toml(file).get("reward_args", [])
    except ConfigError:  # the service reports the error with its line
        return {}
    names = [str(table.get(key, "")) for table in tables if isinstance(table, dict) for key in ("entry", "model_path")]
    paths = {}
    for name in filter(None, names):
        module, _, _ = name.rpartition(":") if is_import_path(name) else (name, "", "")
        path = existing(module, Path.cwd()) or existing(module, file.parent)
        with suppress(ConfigError):
            path = path or (code_file(name) if is_import_path(name) else None)
        if path is not None:
            paths[name] = path
    return paths


def kernel_packages(recipe: Recipe) -> dict[str, str]:
    """Return the packages that provide the kernels of a training, each with the setting that selects it."""
    train, packages = recipe.train, {}
    if train.optm_name.endswith("8bit"):
        packages["torchao"] = f"train.optm_name = {train.optm_name!r}"
    if recipe.train.fp8.enable_fp8:
        packages["torchao"] = "train.fp8.enable_fp8 = true"
    if recipe.policy.enable_liger_kernel:
        packages["liger-kernel"] = "policy.enable_liger_kernel = true"
    return packages


def reward_names(recipe: Recipe) -> dict[str, str]:
    """Return the rewards that a stage with this recipe may call, by their key in the recipe."""
    training_rewards = recipe.train.train_policy.rewards
    return {f"train.train_policy.reward_function.{name}": name for name in training_rewards} | {
        f"validation.reward_function.{name}": name for name in recipe.validation.reward_function
    }


def _check_rewards(recipe: Recipe) -> None:
    names = offered_names(REWARDS)
    for key, name in reward_names(recipe).items():
        if is_import_path(name):
            _check_code(key.removesuffix(f".{name}"), name, RewardError)
        elif name not in names:
            raise RewardError(
                f"{key.removesuffix(f'.{name}')}: there is no reward {name!r}; one of your own is module:function or "
                f"path/file.py:function{suggestion(name, names)}"
            )


def _user_code(stage: StageConfig, recipe: Recipe) -> list[tuple[str, str]]:
    """Return the key and the import path of each user function and class that the stage names, except rewards."""
    references = [("entry", stage.entry), ("target", split_target(stage.target)[0])]
    references += [("logging.logger", name) for name in recipe.logging.logger]
    references += [(f"train.hooks.{key}", name) for key, name in recipe.train.hooks]
    references += [("train.train_policy.data_packer", recipe.train.train_policy.data_packer)]
    references += [("rollout.multi_turn_config.tools", name) for name in recipe.rollout.multi_turn_config.called_tools]
    return [(key, name) for key, name in references if is_import_path(name)]


def _check_code(key: str, name: str, error_class: type[CosmosError] = ConfigError) -> Path:
    """Return the file of user code; an error about the file names the key."""
    try:
        return code_file(name)
    except ConfigError as error:
        raise error_class(f"{key}: {error}") from error


def _packages(recipe: Recipe) -> dict[str, str]:
    """Return the required optional packages, whose names are also the extras that install them, with the settings that
    require them."""
    sinks = [name for name in recipe.logging.logger if name != CONSOLE and not is_import_path(name)]
    packages = {load_named(name, SINKS_FOLDER, "Sink").package: f"logging.logger {name!r}" for name in sinks}
    return packages | kernel_packages(recipe)


def _check_gpu(recipe: Recipe) -> None:
    if recipe.policy.enable_liger_kernel and facts_of_workers(is_group=True).device == "cpu":
        raise ConfigError(
            "policy.enable_liger_kernel = true: these kernels need an NVIDIA GPU, and this machine has none; leave it "
            "out"
        )


def _check_compiler(recipe: Recipe, python: str) -> None:
    facts = facts_of_workers(python=python, is_group=True)
    optimizer = recipe.train.optm_name
    if optimizer.endswith("8bit"):
        key, remedy = f"train.optm_name = {optimizer!r}", "take another optimizer"
    elif recipe.compiles_on("cpu" if facts.device == "cpu" else "cuda"):
        key, remedy = "train.compile", "set train.compile = false"
    else:
        return
    if facts.lacks:
        raise ConfigError(f"{key} needs {facts.lacks} on {facts.host}, which runs it; install it there, or {remedy}")


def _looks_like_path(name: str) -> bool:
    """Return True if a name can only be a local path: Hub ids have at most one slash and no leading dot."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")
