"""Check the inputs of a pipeline before any stage runs: everything that a stage reads from outside must exist.

No user code is imported. The workers check the contents (weights, rows, functions).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import EVALUATION_REWARDS_KEY, WEIGHTS_SUFFIXES, StageInput
from cosmos_core.config.prompt_sets import find_prompt_set
from cosmos_core.config.schema.dataset import reasoning_gym_generator
from cosmos_core.config.schema.logging import CONSOLE_SINK, SINKS_FOLDER
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import REASONING_GYM_REWARD
from cosmos_core.errors import ConfigError, CosmosError, DataError, ModelError, RewardError
from cosmos_core.machine_properties import measure_worker_machine
from cosmos_core.registry import (
    is_import_path,
    list_defined_names,
    load_class,
    locate_code,
    read_signature,
    suggest_names,
)
from cosmos_core.run.content import list_model_files

_REWARDS_PACKAGE = "cosmos_core.rewards"
GENERATOR_PACKAGE = "reasoning-gym"
"""Package that generates rows of reasoning tasks and computes their reward."""
_NEAR_DUPLICATES_KEY = "train.train_policy.clean.near_duplicates"
_PACKAGE_REQUIRING_KEYS = ("evaluate.tasks", "sample.endpoint", _NEAR_DUPLICATES_KEY)
"""Recipe keys that require an optional package, but only in stages of a kind that reads the key."""
_ADAPTER_SETTINGS_FILES = ("adapter_config.json", "model.safetensors", "pytorch_lora_weights.safetensors")
"""Files with the settings of an adapter: that of PEFT, or the weights of a diffusion model's adapter."""
_PIP_EXTRA_BY_PACKAGE = {"datasketch": "clean", "lm-eval": "eval", "mlflow-skinny": "mlflow"}
"""Extra of this project that installs an optional package, if its name differs from the name of the package."""


def check_inputs(pipeline: Pipeline) -> None:
    """Raise ModelError, DataError, RewardError or ConfigError, with stage and key, if an external input is missing."""
    missing_packages = {package for recipe in pipeline.recipes.values() for package in _list_required_packages(recipe)}
    if missing_packages:
        missing_packages -= measure_worker_machine(sorted(missing_packages), pipeline.config.python).versions.keys()
    for stage in pipeline.stages:
        recipe, stage_kind = pipeline.recipes[stage.name], pipeline.stage_kind(stage)
        try:
            inputs = pipeline.inputs(stage)
            check_local_inputs(inputs)
            for stage_input in inputs:
                if stage_input.role in {"model", "teacher"} and stage_input.location_type == "folder":
                    list_model_files(Path(stage_input.location))
                if stage_input.location_type == "code" and stage_input.role not in {"reward", "data_code"}:
                    _check_code_location(stage_input)
                if stage_input.role == "reward" and (stage_kind.scores or stage_input.key == EVALUATION_REWARDS_KEY):
                    _check_reward(stage_input)
            if stage.entry:
                _check_stage_arguments(stage)
            if stage_kind.trains_model:
                if recipe.policy.enable_liger_kernel and measure_worker_machine(may_use_ray=True).device == "cpu":
                    problem_text = "these kernels need an NVIDIA GPU, and this machine has none"
                    raise ConfigError(f"policy.enable_liger_kernel = true: {problem_text}; leave it out")
                if not stage.work_pool:  # a stage on a work pool uses the compiler of its machine, which checks it
                    _check_compiler(recipe, pipeline.config.python)
            unused_packages = {} if stage_kind.trains_model else list_kernel_packages(recipe)
            for package, key in _list_required_packages(recipe).items():
                is_key_used = key not in _PACKAGE_REQUIRING_KEYS or stage_kind.reads_key(key)
                if is_key_used and package in missing_packages and package not in unused_packages:
                    extra_name = _PIP_EXTRA_BY_PACKAGE.get(package, package)
                    remedy_text = f"pip install 'cosmos-posttrain[{extra_name}]' or leave it out"
                    raise ConfigError(f"{key}: the package {package} is not installed; {remedy_text}")
        except (ConfigError, DataError, ModelError, RewardError) as error:
            raise type(error)(f"{pipeline.source_path}: stage {stage.name!r}: {error}") from error


def check_local_inputs(inputs: Sequence[StageInput]) -> None:
    """Raise ModelError, DataError or ConfigError, with the key, if a file or folder is missing or of a wrong type."""
    model_input = next((stage_input for stage_input in inputs if stage_input.role == "model"), None)
    for stage_input in inputs:
        if stage_input.role == "weights" and model_input is not None and model_input.location_type != "folder":
            problem_text = f"its configuration is {model_input.location!r}, which has to be a folder"
            raise ModelError(f"{stage_input.key} = {stage_input.location!r}: {problem_text}; download it")
        if stage_input.role == "data" and stage_input.location_type == "code":
            _check_code_location(stage_input)
        if stage_input.location_type == "folder":
            _check_files(stage_input, Path(stage_input.location))


def _check_files(stage_input: StageInput, local_path: Path) -> None:
    setting_text = f"{stage_input.key} = {stage_input.location!r}"
    match stage_input.role:
        case "model" | "teacher" if not os.path.isdir(local_path):
            raise ModelError(f"{setting_text}: no such folder; give a Hugging Face model folder or a Hub id")
        case "weights" if not (stage_input.location.endswith(WEIGHTS_SUFFIXES) and os.path.isfile(local_path)):
            raise ModelError(f"{setting_text}: no .safetensors file, and no folder with one")
        case "adapter" if not any(os.path.isfile(local_path / name) for name in _ADAPTER_SETTINGS_FILES):
            raise ModelError(f"{setting_text}: no adapter; give a folder with adapter_config.json")
        case "resume":
            _check_checkpoint(stage_input.key, local_path.parent)
        case "data":
            _check_dataset_path(stage_input, local_path)
        case "media" if not os.path.isdir(local_path):
            raise DataError(f"{setting_text}: no such folder")
        case "chat_template" if not os.path.isfile(local_path):
            raise ConfigError(f"{setting_text}: no such file; give one that Jinja reads")
        case "reward_service" if not os.path.isfile(local_path):
            raise ConfigError(f"{setting_text}: no such file; see docs/how-to/reward-service.md")


def _check_checkpoint(setting_key: str, policy_folder: Path) -> None:
    setting_text = f"{setting_key} = {str(policy_folder)!r}"
    if os.path.isdir(policy_folder) and any(policy_folder.glob("*.pth")):
        raise ModelError(
            f"{setting_text}: a pickled checkpoint of Cosmos-RL, which could run any code when read; start from the "
            "safetensors folder of that run: policy.model_name_or_path = '.../safetensors/step_N'"
        )
    is_policy_folder = policy_folder.name == "policy" and re.fullmatch(r"step_\d+", policy_folder.parent.name)
    if not is_policy_folder or not os.path.isfile(policy_folder / "manifest.json"):
        raise ModelError(f"{setting_text}: no checkpoint; give the folder .../checkpoints/step_N/policy of a run")


def _check_dataset_path(stage_input: StageInput, path: Path) -> None:
    setting_text = f"{stage_input.key} = {stage_input.location!r}"
    if not stage_input.location:
        raise DataError(f"{stage_input.key} is empty; give a file, a folder or a Hub id")
    if os.path.isfile(path) or os.path.isdir(path):
        return
    if os.path.exists(path):
        raise DataError(f"{setting_text} is neither a file nor a folder; rows cannot be read twice from it")
    find_prompt_set(stage_input.location, stage_input.key)
    raise DataError(f"{setting_text}: no such file or folder")


def _check_reward(stage_input: StageInput) -> None:
    if stage_input.location_type == "code":
        _check_code_location(stage_input, RewardError)
    elif stage_input.location not in (reward_names := list_defined_names(_REWARDS_PACKAGE)):
        raise RewardError(
            f"{stage_input.key}: there is no reward {stage_input.location!r}; one of your own is module:function or "
            f"path/file.py:function{suggest_names(stage_input.location, reward_names)}"
        )


def _check_code_location(stage_input: StageInput, error_class: type[CosmosError] = ConfigError) -> None:
    try:
        locate_code(stage_input.location)
    except ConfigError as error:
        raise error_class(f"{stage_input.key}: {error}") from error


def _check_stage_arguments(stage: StageConfig) -> None:
    if (signature := read_signature(stage.entry)) is None:
        return
    try:
        signature.bind(stage, **stage.arguments)
    except TypeError as error:
        raise ConfigError(f"arguments do not fit {stage.entry}: {error}") from error


def list_dedup_packages(recipe: Recipe) -> tuple[str, ...]:
    """Return the packages that removing near-duplicate rows requires; empty if the recipe does not remove them."""
    cleaning_config = recipe.train.train_policy.clean
    return ("datasketch",) if cleaning_config and cleaning_config.near_duplicates else ()


def list_kernel_packages(recipe: Recipe) -> dict[str, str]:
    """Return the packages that provide the kernels of a training, each with the setting that selects it."""
    train_config, setting_by_package = recipe.train, {}
    if train_config.optm_name.endswith("8bit"):
        setting_by_package["torchao"] = f"train.optm_name = {train_config.optm_name!r}"
    if train_config.fp8.enable_fp8:
        setting_by_package["torchao"] = "train.fp8.enable_fp8 = true"
    if recipe.policy.enable_liger_kernel:
        setting_by_package["liger-kernel"] = "policy.enable_liger_kernel = true"
    return setting_by_package


def _list_required_packages(recipe: Recipe) -> dict[str, str]:
    """Return the optional packages that a recipe requires, each with the setting that requires it."""
    sinks = [name for name in recipe.logging.logger if name != CONSOLE_SINK and not is_import_path(name)]
    setting_by_package = {load_class(name, SINKS_FOLDER, "Sink").package: f"logging.logger {name!r}" for name in sinks}
    if recipe.evaluate.tasks:
        setting_by_package["lm-eval"] = "evaluate.tasks"
    if recipe.sample.endpoint:
        setting_by_package["openai"] = "sample.endpoint"
    if list_dedup_packages(recipe):
        setting_by_package["datasketch"] = _NEAR_DUPLICATES_KEY
    if recipe.uses_judge:
        setting_by_package["openai"] = "the reward judge"
    for key, dataset in recipe.datasets.items():
        if reasoning_gym_generator(dataset.name):
            setting_by_package[GENERATOR_PACKAGE] = f"{key}.name = {dataset.name!r}"
    if REASONING_GYM_REWARD in {*recipe.train.train_policy.rewards, *recipe.validation.reward_function}:
        setting_by_package.setdefault(GENERATOR_PACKAGE, f"the reward {REASONING_GYM_REWARD}")
    return setting_by_package | list_kernel_packages(recipe)


def _check_compiler(recipe: Recipe, python_path: str) -> None:
    machine_properties = measure_worker_machine(python_path=python_path, may_use_ray=True)
    optimizer_name = recipe.train.optm_name
    if optimizer_name.endswith("8bit"):
        setting_text, remedy_text = f"train.optm_name = {optimizer_name!r}", "take another optimizer"
    elif recipe.should_compile_blocks("cpu" if machine_properties.device == "cpu" else "cuda"):
        setting_text, remedy_text = "train.compile", "set train.compile = false"
    else:
        return
    if machine_properties.lacks:
        problem_text = f"{setting_text} needs {machine_properties.lacks} on {machine_properties.host}, which runs it"
        raise ConfigError(f"{problem_text}; install it there, or {remedy_text}")
