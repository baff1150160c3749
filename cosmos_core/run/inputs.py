"""Check the inputs of a pipeline before any stage runs: everything that a stage reads from outside must exist.

No user code is imported. The workers check the contents (weights, rows, functions).
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import EVALUATION_REWARDS, WEIGHTS_SUFFIXES, Input
from cosmos_core.config.prompt_sets import find_prompt_set
from cosmos_core.config.schema.dataset import generator_of
from cosmos_core.config.schema.logging import CONSOLE, SINKS_FOLDER
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import GENERATED_REWARD
from cosmos_core.errors import ConfigError, CosmosError, DataError, ModelError, RewardError
from cosmos_core.machine_properties import measure_workers
from cosmos_core.registry import code_file, is_import_path, load_named, offered_names, suggestion
from cosmos_core.run.content import files_of_model

_REWARDS = "cosmos_core.rewards"
GENERATORS = "reasoning-gym"
"""Package that generates rows of reasoning tasks and computes their reward."""
_NEAR_DUPLICATES_KEY = "train.train_policy.clean.near_duplicates"
_KEYS_BY_KIND = ("evaluate.tasks", "sample.endpoint", _NEAR_DUPLICATES_KEY)
"""Recipe keys that require a package only in stages whose kind reads the key."""
_EXTRAS = {"datasketch": "clean", "lm-eval": "eval", "mlflow-skinny": "mlflow"}
"""Name of the extra that installs a package, if it differs from the name of the package."""


def check_inputs(pipeline: Pipeline) -> None:
    """Check that every input that a stage reads from outside the run exists.

    Raises:
        ModelError, DataError, RewardError, ConfigError: an input is missing; the message names stage and key.
    """
    missing = {package for recipe in pipeline.recipes.values() for package in _packages(recipe)}
    if missing:
        missing -= measure_workers(sorted(missing), pipeline.config.python).versions.keys()
    for stage in pipeline.stages:
        recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
        try:
            inputs = pipeline.inputs(stage)
            check_located(inputs)
            for each in inputs:
                if each.role in {"model", "teacher"} and each.form == "folder":
                    files_of_model(Path(each.location))
                if each.form == "code" and each.role not in {"reward", "data_code"}:
                    _check_code(each)
                if each.role == "reward" and (kind.scores or each.key == EVALUATION_REWARDS):
                    _check_reward(each)
            if kind.trains_model:
                _check_gpu(recipe)
                if not stage.work_pool:  # a stage of a work pool is checked by the machine that runs it
                    _check_compiler(recipe, pipeline.config.python)
            unused = {} if kind.trains_model else kernel_packages(recipe)
            for package, key in _packages(recipe).items():
                if package in missing and package not in unused and (key not in _KEYS_BY_KIND or kind.reads_key(key)):
                    extra = _EXTRAS.get(package, package)
                    raise ConfigError(
                        f"{key}: the package {package} is not installed; pip install 'cosmos-posttrain[{extra}]' or "
                        f"leave it out"
                    )
        except (ConfigError, DataError, ModelError, RewardError) as error:
            raise type(error)(f"{pipeline.source}: stage {stage.name!r}: {error}") from error


def check_located(inputs: Sequence[Input]) -> None:
    """Check that the files and folders among the inputs exist.

    Raises:
        ModelError, DataError, ConfigError: a file or folder is missing or of a wrong type; the message names the key.
    """
    model = next((each for each in inputs if each.role == "model"), None)
    for each in inputs:
        if each.role == "weights" and model is not None and model.form != "folder":
            raise ModelError(
                f"{each.key} = {each.location!r}: its configuration is {model.location!r}, which has to be a folder; "
                f"download it"
            )
        if each.role == "data" and each.form == "code":
            _check_code(each)
        if each.form == "folder":
            _check_files(each, Path(each.location))


def _check_files(each: Input, path: Path) -> None:
    setting = f"{each.key} = {each.location!r}"
    match each.role:
        case "model" | "teacher" if not os.path.isdir(path):
            raise ModelError(f"{setting}: no such folder; give a Hugging Face model folder or a Hub id")
        case "weights" if not (each.location.endswith(WEIGHTS_SUFFIXES) and os.path.isfile(path)):
            raise ModelError(f"{setting}: no .safetensors file, and no folder with one")
        case "adapter" if not os.path.isfile(path / "adapter_config.json"):
            raise ModelError(f"{setting}: no adapter; give a folder with adapter_config.json")
        case "resume":
            _check_checkpoint(each.key, path.parent)
        case "data":
            _check_rows(each, path)
        case "media" if not os.path.isdir(path):
            raise DataError(f"{setting}: no such folder")
        case "chat_template" if not os.path.isfile(path):
            raise ConfigError(f"{setting}: no such file; give one that Jinja reads")
        case "reward_service" if not os.path.isfile(path):
            raise ConfigError(f"{setting}: no such file; see docs/how-to/reward-service.md")


def _check_checkpoint(key: str, policy: Path) -> None:
    if os.path.isdir(policy) and any(policy.glob("*.pth")):
        raise ModelError(
            f"{key} = {str(policy)!r}: a pickled checkpoint of Cosmos-RL, which could run any code when read; start "
            f"from the safetensors folder of that run: policy.model_name_or_path = '.../safetensors/step_N'"
        )
    is_policy_folder = policy.name == "policy" and re.fullmatch(r"step_\d+", policy.parent.name)
    if not is_policy_folder or not os.path.isfile(policy / "manifest.json"):
        raise ModelError(
            f"{key} = {str(policy)!r}: no checkpoint; give the folder .../checkpoints/step_N/policy of a run"
        )


def _check_rows(each: Input, path: Path) -> None:
    if not each.location:
        raise DataError(f"{each.key} is empty; give a file, a folder or a Hub id")
    if os.path.isfile(path) or os.path.isdir(path):
        return
    if os.path.exists(path):
        raise DataError(
            f"{each.key} = {each.location!r} is neither a file nor a folder; rows cannot be read twice from it"
        )
    find_prompt_set(each.location, each.key)
    raise DataError(f"{each.key} = {each.location!r}: no such file or folder")


def _check_reward(each: Input) -> None:
    if each.form == "code":
        _check_code(each, RewardError)
    elif each.location not in (names := offered_names(_REWARDS)):
        raise RewardError(
            f"{each.key}: there is no reward {each.location!r}; one of your own is module:function or "
            f"path/file.py:function{suggestion(each.location, names)}"
        )


def _check_code(each: Input, error_class: type[CosmosError] = ConfigError) -> None:
    """Check that the file exists from which user code is imported."""
    try:
        code_file(each.location)
    except ConfigError as error:
        raise error_class(f"{each.key}: {error}") from error


def clean_packages(recipe: Recipe) -> tuple[str, ...]:
    """Return the packages that the search for near-duplicate rows needs."""
    clean = recipe.train.train_policy.clean
    return ("datasketch",) if clean and clean.near_duplicates else ()


def kernel_packages(recipe: Recipe) -> dict[str, str]:
    """Return the packages that provide the kernels of a training, each with the setting that selects it."""
    train, packages = recipe.train, {}
    if train.optm_name.endswith("8bit"):
        packages["torchao"] = f"train.optm_name = {train.optm_name!r}"
    if train.fp8.enable_fp8:
        packages["torchao"] = "train.fp8.enable_fp8 = true"
    if recipe.policy.enable_liger_kernel:
        packages["liger-kernel"] = "policy.enable_liger_kernel = true"
    return packages


def _packages(recipe: Recipe) -> dict[str, str]:
    """Return the optional packages that a recipe requires, each with the setting that requires it; the name of a
    package is also the name of the extra that installs it, unless `_EXTRAS` has another."""
    sinks = [name for name in recipe.logging.logger if name != CONSOLE and not is_import_path(name)]
    packages = {load_named(name, SINKS_FOLDER, "Sink").package: f"logging.logger {name!r}" for name in sinks}
    if recipe.evaluate.tasks:
        packages["lm-eval"] = "evaluate.tasks"
    if recipe.sample.endpoint:
        packages["openai"] = "sample.endpoint"
    if clean_packages(recipe):
        packages["datasketch"] = _NEAR_DUPLICATES_KEY
    if recipe.uses_judge:
        packages["openai"] = "the reward judge"
    for key, dataset in recipe.datasets.items():
        if generator_of(dataset.name):
            packages[GENERATORS] = f"{key}.name = {dataset.name!r}"
    if GENERATED_REWARD in {*recipe.train.train_policy.rewards, *recipe.validation.reward_function}:
        packages.setdefault(GENERATORS, f"the reward {GENERATED_REWARD}")
    return packages | kernel_packages(recipe)


def _check_gpu(recipe: Recipe) -> None:
    if recipe.policy.enable_liger_kernel and measure_workers(is_group=True).device == "cpu":
        raise ConfigError(
            "policy.enable_liger_kernel = true: these kernels need an NVIDIA GPU, and this machine has none; leave it "
            "out"
        )


def _check_compiler(recipe: Recipe, python: str) -> None:
    facts = measure_workers(python=python, is_group=True)
    optimizer = recipe.train.optm_name
    if optimizer.endswith("8bit"):
        key, remedy = f"train.optm_name = {optimizer!r}", "take another optimizer"
    elif recipe.should_compile_blocks("cpu" if facts.device == "cpu" else "cuda"):
        key, remedy = "train.compile", "set train.compile = false"
    else:
        return
    if facts.lacks:
        raise ConfigError(f"{key} needs {facts.lacks} on {facts.host}, which runs it; install it there, or {remedy}")
