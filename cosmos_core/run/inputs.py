"""What a pipeline takes from outside the run directory: models, data, rewards, code of the user's own, packages.

Found by name, without torch and without importing any of it, so that a missing one is told before anything runs.
What is inside (weights, rows, functions) is looked at by the workers.
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
    """Make sure that everything is there that a stage names and that no stage makes.

    Raises:
        ModelError, DataError, RewardError, ConfigError: something is not; the message names stage and key.
    """
    asked = {package for recipe in pipeline.recipes.values() for package in _packages(recipe)}
    missing = asked - facts_of_workers(sorted(asked), pipeline.config.python).versions.keys() if asked else set()
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
                if not stage.work_pool:  # what its machine has, the stage finds there
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
    """Return whether a name is a URL of a store, which `run.remote` reads."""
    return name.startswith("s3://")


def model_source(stage: StageConfig, recipe: Recipe, kind: StageKind) -> Path | str | None:
    """Return the folder of the model, its URL, its name on the Hub or `stage:NAME`; None: the stage reads no model.

    Raises:
        ModelError: it can only be a folder, and there is none.
    """
    own = recipe.policy.model_name_or_path if kind.reads_model else ""
    return _found_model(*(("model", stage.model) if stage.model else ("policy.model_name_or_path", own)))


def teacher_source(recipe: Recipe, kind: StageKind) -> Path | str | None:
    """Return the folder of the teacher, its name on the Hub or `stage:NAME`; None: the stage asks none.

    Raises:
        ModelError: it can only be a folder, and there is none.
    """
    teacher = recipe.teacher_of(kind)
    return _found_model("distillation.model_name_or_path", teacher.model_name_or_path) if teacher else None


def _found_model(key: str, model: str) -> Path | str | None:
    if not model or source_of(model) is not None or is_remote(model):
        return model or None
    found = existing(model, Path.cwd())
    if found is not None and found.is_dir():
        return found
    if found is not None or _looks_like_path(model):
        raise ModelError(f"{key} = {model!r}: no such folder; give a Hugging Face model folder or a Hub id")
    return model


def data_sources(stage: StageConfig, recipe: Recipe, kind: StageKind) -> list[Path | str]:
    """Return the files, folders, URLs and Hub names of the rows that the stage reads and no other stage makes.

    Raises:
        DataError: one can only be a file or folder, and there is none.
    """
    annotations = "custom.dataset.annotation_path"
    named = {"data": stage.data}
    if stage.entry and existing(media_of(recipe).annotation_path, Path.cwd()):
        named[annotations] = media_of(recipe).annotation_path
    if kind.reads_data == "source":
        if not stage.data:
            media = media_of(recipe)
            named = {**_of_table("train.train_policy.dataset", recipe), annotations: media.annotation_path}
            if not any(named.values()):
                raise DataError("train.train_policy.dataset.name is empty; give a file, a folder or a Hub id")
            if media.media_path and media_folder(stage, recipe, kind) is None:
                raise DataError(f"custom.dataset.media_path = {media.media_path!r}: no such folder")
        for table in recipe.datasets:
            if table != "train.train_policy.dataset":
                named |= _of_table(table, recipe)
    found: list[Path | str] = []
    for key, name in named.items():
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
        found.append(path or name)
    return found


def data_code(recipe: Recipe, kind: StageKind) -> list[str]:
    """Return the classes of the user's own that make or change the rows of a stage."""
    if kind.reads_data != "source":
        return []
    policy = recipe.train.train_policy
    tables = (policy.dataset, recipe.validation.dataset)
    return [table.name for table in tables if is_code(table.name)] + [policy.data_packer] * bool(policy.data_packer)


def _of_table(table: str, recipe: Recipe) -> dict[str, str]:
    """Return the key of a data set's table that says where its rows are, and what it says."""
    dataset = recipe.datasets[table]
    if dataset.local_dir:
        return {f"{table}.local_dir": dataset.local_dir}
    return {f"{table}.name": dataset.name}


def media_folder(stage: StageConfig, recipe: Recipe, kind: StageKind) -> Path | None:
    """Return the folder that the images of the rows are relative to, where the stage reads or is handed them.

    None: there is none, or the model is known to read text alone. Where that is not known beforehand, as of a model on
    the Hub, training still notices an image that changed: prepared rows hold the digest of each.
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
    found = existing(rows, Path.cwd()) if rows else None
    return found.parent if found is not None and found.is_file() else found


def resume_source(recipe: Recipe) -> Path | None:
    """Return the checkpoint that `train.resume` names.

    Raises:
        ModelError: there is none, or it is one of Cosmos-RL.
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
    """Return the adapter that `policy.lora.lora_path` names.

    Raises:
        ModelError: there is none.
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
    """Return the chat template that takes the place of the tokenizer's in prompts to complete.

    Raises:
        ConfigError: there is no such file.
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
    """Return the configuration of the reward service that is started beside a stage; None: it runs already.

    Raises:
        ConfigError: there is no such file.
    """
    if not stage.reward_service or stage.reward_service.startswith(BLOCK):
        return None
    file = existing(stage.reward_service, Path.cwd())
    if file is None or not file.is_file():
        raise ConfigError(f"reward_service = {stage.reward_service!r}: no such file; see docs/how-to/reward-service.md")
    return file


def reward_service_parts(file: Path) -> dict[str, Path]:
    """Return the code of a user's own and the folders of models that the configuration of a reward service names, by
    those names, as far as they are on this machine: the service may run on another."""
    try:
        tables = read_toml(file).get("reward_args", [])
    except ConfigError:  # the service tells it with its line
        return {}
    named = [str(table.get(key, "")) for table in tables if isinstance(table, dict) for key in ("entry", "model_path")]
    found = {}
    for name in filter(None, named):
        module, _, _ = name.rpartition(":") if is_import_path(name) else (name, "", "")
        there = existing(module, Path.cwd()) or existing(module, file.parent)
        with suppress(ConfigError):
            there = there or (code_file(name) if is_import_path(name) else None)
        if there is not None:
            found[name] = there
    return found


def kernel_packages(recipe: Recipe) -> dict[str, str]:
    """Return the packages whose kernels a training computes with, each with the setting that asks for it."""
    train, found = recipe.train, {}
    if train.optm_name.endswith("8bit"):
        found["torchao"] = f"train.optm_name = {train.optm_name!r}"
    if recipe.train.fp8.enable_fp8:
        found["torchao"] = "train.fp8.enable_fp8 = true"
    if recipe.policy.enable_liger_kernel:
        found["liger-kernel"] = "policy.enable_liger_kernel = true"
    return found


def reward_names(recipe: Recipe) -> dict[str, str]:
    """Return the rewards that a stage with this recipe may call, by their key in the recipe."""
    trained = recipe.train.train_policy.rewards
    return {f"train.train_policy.reward_function.{name}": name for name in trained} | {
        f"validation.reward_function.{name}": name for name in recipe.validation.reward_function
    }


def _check_rewards(recipe: Recipe) -> None:
    known = offered_names(REWARDS)
    for key, name in reward_names(recipe).items():
        if is_import_path(name):
            _check_code(key.removesuffix(f".{name}"), name, RewardError)
        elif name not in known:
            raise RewardError(
                f"{key.removesuffix(f'.{name}')}: there is no reward {name!r}; one of your own is module:function or "
                f"path/file.py:function{suggestion(name, known)}"
            )


def _user_code(stage: StageConfig, recipe: Recipe) -> list[tuple[str, str]]:
    """Return each function and class of a user's own, but rewards, with the key that names it."""
    named = [("entry", stage.entry), ("target", split_target(stage.target)[0])]
    named += [("logging.logger", name) for name in recipe.logging.logger]
    named += [(f"train.hooks.{key}", name) for key, name in recipe.train.hooks]
    named += [("train.train_policy.data_packer", recipe.train.train_policy.data_packer)]
    named += [("rollout.multi_turn_config.tools", name) for name in recipe.rollout.multi_turn_config.called_tools]
    return [(key, name) for key, name in named if is_import_path(name)]


def _check_code(key: str, name: str, error_class: type[CosmosError] = ConfigError) -> Path:
    """Return the file of a user's own code; an error about it names the key."""
    try:
        return code_file(name)
    except ConfigError as error:
        raise error_class(f"{key}: {error}") from error


def _packages(recipe: Recipe) -> dict[str, str]:
    """Return the packages, which are also the extras that bring them, with the settings that ask for them."""
    sinks = [name for name in recipe.logging.logger if name != CONSOLE and not is_import_path(name)]
    named = {load_named(name, SINKS_FOLDER, "Sink").package: f"logging.logger {name!r}" for name in sinks}
    return named | kernel_packages(recipe)


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
    """Whether a name can only be a local path: Hub ids have at most one slash and no leading dot."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")
