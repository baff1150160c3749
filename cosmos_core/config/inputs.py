"""Inputs of a stage: everything that the stage reads but does not make, each with its location.

The inputs are computed from the recipe, the entry of the stage and its kind, without importing torch or user code.
Missing files are not reported here, but by `run.inputs.check_local_inputs`. Pinning, digests, downloads, credentials,
lineage and checks use this list.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from cosmos_core.config.load import read_toml
from cosmos_core.config.media import ImageSettings, image_settings
from cosmos_core.config.prompt_sets import KNOWN_PROMPT_SETS, find_prompt_set
from cosmos_core.config.schema.dataset import data_suffix, reasoning_gym_generator
from cosmos_core.config.schema.field_metadata import ReferenceKind, find_metadata
from cosmos_core.config.schema.modality import ALL_FILES, TOKENIZER_FILES
from cosmos_core.config.schema.pipeline import BLOCK_PREFIX, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import active_fields, affects_result
from cosmos_core.config.target import split_publication_target
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.registry import is_import_path, is_user_code, locate_code
from cosmos_core.types import StageKind

STAGE_PREFIX = "stage:"
TRAINING_FILES = (
    *TOKENIZER_FILES, "*.safetensors", "*model*.bin", "adapter_*", "*.index.json", "config.json", "configuration*",
    "model_index.json", "scheduler_config.json", "*.py",
)  # fmt: skip
"""Patterns of the files of a model folder that training reads: weights, configuration of the model, tokenizer. Other
files, such as `generation_config.json` or a licence, affect exported models only."""
_NON_TRAINING_FILES = tuple(f"!{pattern}" for pattern in TRAINING_FILES)
WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json")
ANNOTATION_PATH_KEY, MEDIA_PATH_KEY = "custom.dataset.annotation_path", "custom.dataset.media_path"
LM_EVAL_TASK_FILES = ("!*.pyc",)
"""Patterns of the files of a folder of lm-eval tasks: all except Python's bytecode."""
_TRAIN_DATASET_KEY = "train.train_policy.dataset"
EVALUATION_PROMPTS_KEY, EVALUATION_REWARDS_KEY = "evaluate.prompts", "evaluate.rewards"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

InputRole = Literal[
    "model", "carried", "end_tokens", "weights", "teacher", "resume", "adapter", "data", "media", "chat_template",
    "template", "entry", "target", "code", "hook", "reward", "data_code", "reward_service", "rewards",
]  # fmt: skip
LocationType = Literal["folder", "hub", "store", "stage", "code", "literal"]


@dataclass(frozen=True, slots=True)
class StageInput:
    """Input of a stage: a model, data set, file or code that the stage reads and does not make."""

    key: str
    """Configuration key of the input; for code or a model of a reward service, the name in its configuration file."""
    role: InputRole
    """Use of the input. `carried`: files of the model that training does not read and exports copy. `end_tokens`: file
    with the tokens that end a generation. `hook`: user code that does not change the result. `rewards`: code and models
    of a reward service, or models of a built-in reward."""
    location: str
    """Location of the input: path, URL, Hub id, `stage:NAME`, import path, built-in module or row generator."""
    location_type: LocationType
    """Type of the location; `folder` is a file or folder on this machine, which may be missing."""
    patterns: tuple[str, ...] = ALL_FILES
    """Patterns of the files that are read in a folder; see `run.content.matches_patterns`."""
    revision: str | None = None
    """Revision of a model or data set on the Hub; None means the newest revision."""


def referenced_stage(input_reference: str) -> str | None:
    """Return `NAME` of a reference `stage:NAME`; None for a text of any other form."""
    return input_reference.removeprefix(STAGE_PREFIX) if input_reference.startswith(STAGE_PREFIX) else None


def is_s3_url(name: str) -> bool:
    """Return True if the name of a model or data set is the URL of an S3 store."""
    return name.startswith("s3://")


def existing_path(path_or_name: str, base_folder: Path) -> Path | None:
    """Return the path of a file or folder, with a relative path below `base_folder`; None if it does not exist, as for
    a Hub id."""
    try:
        path = base_folder / Path(path_or_name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # raised for a path that is too long, or an unknown user in `~USER`
        return None


def read_card_metadata(model_or_data_folder: Path) -> dict[str, Any]:
    """Return the YAML metadata at the beginning of README.md in the folder of a model or data set; empty if there is
    none, or it is not valid."""
    if not (card_file := model_or_data_folder / "README.md").is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    with suppress(OSError, ValueError, yaml.YAMLError):
        return metadata_load(card_file) or {}
    return {}


def stage_inputs(stage: StageConfig, recipe: Recipe, kind: StageKind) -> tuple[StageInput, ...]:
    """Return the inputs of a stage, models first, then rows, files and code. Raises `ConfigError` if the image settings
    of the recipe are invalid, see `config.media.image_settings`."""
    model_inputs = tuple(_model_inputs(stage, recipe, kind))
    row_inputs = _row_inputs(stage, recipe, kind, next((item for item in model_inputs if item.role == "model"), None))
    file_inputs = (*_benchmark_inputs(recipe, kind), *_file_inputs(stage, recipe))
    return (*model_inputs, *row_inputs, *file_inputs, *_code_inputs(stage, recipe, kind))


def _model_inputs(stage: StageConfig, recipe: Recipe, stage_kind: StageKind) -> Iterator[StageInput]:
    policy, reads_weights = recipe.policy, stage_kind.reads_model == "weights"
    # A user-defined stage or model class may read any file of the model folder, so all its files are inputs.
    may_read_any_file = not stage_kind.entry or bool(policy.model_class)
    file_patterns = ALL_FILES if may_read_any_file else TRAINING_FILES
    if stage_kind.reads_model == "tokenizer":
        file_patterns = policy.modality.encoder_files
    key, name = "policy.model_name_or_path", policy.model_name_or_path if stage_kind.reads_model else ""
    if stage.model:
        key, name = "model", stage.model
    if name:
        model_input = StageInput(key, "model", *_locate_model_or_dataset(name), file_patterns, policy.model_revision)
        yield model_input
        if model_input.location_type == "folder" and not may_read_any_file:
            yield StageInput(key, "end_tokens", f"{model_input.location}/generation_config.json", "folder")
            if reads_weights:
                yield replace(model_input, role="carried", patterns=_NON_TRAINING_FILES)
        if reads_weights and model_input.location_type != "stage" and policy.model_safetensor_path:
            # Yield the weights files in a folder, or the path itself if it is a file or a folder without such files.
            path = Path(os.path.expanduser(policy.model_safetensor_path))  # Path.expanduser fails for an unknown user
            model_files = [path] if os.path.isfile(path) else sorted(path.iterdir()) if os.path.isdir(path) else []
            weight_files = [str(file) for file in model_files if file.name.endswith(WEIGHTS_SUFFIXES)]
            for weight_file in weight_files or [policy.model_safetensor_path]:
                yield StageInput("policy.model_safetensor_path", "weights", weight_file, "folder")
    if teacher := recipe.teacher_for_stage(stage_kind):
        location = _locate_model_or_dataset(teacher.model_name_or_path)
        yield StageInput("distillation.model_name_or_path", "teacher", *location, file_patterns, teacher.model_revision)
    # The manifest stands for the whole checkpoint, because it contains the digests of all other files.
    if stage_kind.trains_model and isinstance(recipe.train.resume, str):
        yield StageInput("train.resume", "resume", f"{_to_existing_path(recipe.train.resume)}/manifest.json", "folder")
    if stage_kind.trains_model and policy.lora is not None and policy.lora.lora_path is not None:
        yield StageInput("policy.lora.lora_path", "adapter", _to_existing_path(policy.lora.lora_path), "folder")


def _row_inputs(stage: StageConfig, recipe: Recipe, kind: StageKind, model: StageInput | None) -> Iterator[StageInput]:
    """Yield the data sets of rows that a stage reads, and the folder of the images in these rows."""
    image_config, modality = image_settings(recipe), recipe.policy.modality
    # All files of a folder are inputs of a stage with a user function (`entry`), because it may read any of them.
    data_patterns = ALL_FILES if stage.entry else modality.data_files
    media_patterns = ALL_FILES if stage.entry else modality.media_files
    reads_raw_rows, tables_by_dataset = kind.reads_data == "source", recipe.train.train_policy.tables_by_dataset
    annotation_path = image_config.annotation_path
    is_annotation_read = bool(stage.entry and existing_path(annotation_path, Path.cwd()))
    is_annotation_read |= reads_raw_rows and not stage.data
    dataset_names_by_key = {"data": stage.data, ANNOTATION_PATH_KEY: annotation_path if is_annotation_read else ""}
    for dataset_key, dataset in recipe.datasets.items() if reads_raw_rows else ():
        if dataset_key not in tables_by_dataset or not stage.data:
            key = "local_dir" if getattr(dataset, "local_dir", "") else "name"
            dataset_names_by_key[f"{dataset_key}.{key}"] = getattr(dataset, key)
        dataset_names_by_key[f"{dataset_key}.pass_rates"] = dataset.pass_rates
    datasets = [source.dataset for source in tables_by_dataset.values()]
    has_dataset_name = any(dataset.name or getattr(dataset, "local_dir", "") for dataset in datasets)
    if reads_raw_rows and not (stage.data or annotation_path or has_dataset_name):
        yield StageInput(f"{_TRAIN_DATASET_KEY}.name", "data", "", "folder")
    for key, name in dataset_names_by_key.items():
        if name:
            rows = _dataset_input(key, name, data_patterns, allows_prompt_sets=modality.accepts_prompt_set_names)
            table = recipe.datasets.get(key.removesuffix(".name"))
            yield replace(rows, revision=table.revision or None) if table and rows.location_type != "folder" else rows
    if (reads_raw_rows or stage.entry) and (media_folder := _find_media_folder(stage, recipe, image_config, model)):
        requires_media_folder = reads_raw_rows and not stage.data and bool(image_config.media_path)
        if requires_media_folder or os.path.isdir(media_folder):
            yield StageInput(MEDIA_PATH_KEY, "media", media_folder, "folder", media_patterns)


def _dataset_input(key: str, name: str, file_patterns: tuple[str, ...], *, allows_prompt_sets: bool) -> StageInput:
    if reasoning_gym_generator(name):
        return StageInput(key, "data", name, "literal")
    location, location_type = _locate_model_or_dataset(name)
    if location_type in {"folder", "hub"} and not existing_path(name, Path.cwd()):
        if allows_prompt_sets and name in KNOWN_PROMPT_SETS:
            location_type = "folder"
            with suppress(DataError):
                location = str(find_prompt_set(name, key))
        elif is_user_code(name):
            location_type = "code"
            with suppress(ConfigError):
                location, location_type = str(locate_code(name)), "folder"
        elif key in {"data", ANNOTATION_PATH_KEY} or key.endswith((".local_dir", ".pass_rates")) or data_suffix(name):
            location_type = "folder"
    return StageInput(key, "data", location, location_type, file_patterns)


def _find_media_folder(
    stage: StageConfig, recipe: Recipe, image_config: ImageSettings, model: StageInput | None
) -> str:
    """Return the folder to which image paths in the rows are relative; empty if there is no such folder, or if the
    model reads only text.

    Unless the recipe names this folder or an annotation file, the result is also empty for a Hub model that is not
    downloaded yet, because it is unknown whether the model reads images. A changed image is still noticed in training,
    because prepared rows hold the digest of each image.
    """
    if image_config.media_path:
        return _to_existing_path(image_config.media_path)
    rows_path = image_config.annotation_path
    model_folder = model.location if model and model.location_type == "folder" else ""
    if model_folder and any(os.path.isfile(Path(model_folder, name)) for name in _PROCESSOR_FILES):
        rows_path = rows_path or stage.data or next(iter(recipe.datasets.values())).name
    path = existing_path(rows_path, Path.cwd()) if rows_path else None
    return str(path.parent if path.is_file() else path) if path is not None else ""


def _benchmark_inputs(recipe: Recipe, stage_kind: StageKind) -> Iterator[StageInput]:
    """Yield the inputs of a stage of kind `evaluate`: the user's lm-eval tasks with the local data files that they
    name, and the prompt sets of a diffusion model."""
    if stage_kind.reads_key(EVALUATION_PROMPTS_KEY):
        for name in recipe.evaluate.prompts:
            prompts_input = _dataset_input(EVALUATION_PROMPTS_KEY, name, ALL_FILES, allows_prompt_sets=True)
            yield replace(prompts_input, location_type="folder")
    key = "evaluate.include_path"
    if stage_kind.reads_key(key) and (task_folder := recipe.evaluate.include_path):
        yield StageInput(key, "data", task_path := _to_existing_path(task_folder), "folder", LM_EVAL_TASK_FILES)
        # The pattern has no dot, so that it also matches templates without a suffix, like `_default_template_yaml`.
        data_patterns = {text for file in Path(task_path).rglob("*yaml") for text in _find_data_patterns(file)}
        # A path is relative to the working directory, as in lm-eval, which itself refuses a task without its file.
        data_paths = {Path(path).absolute() for text in data_patterns for path in glob.glob(text, recursive=True)}
        yield from (StageInput(key, "data", str(path), "folder") for path in sorted(data_paths))


class _TaskYamlLoader(yaml.SafeLoader):
    """YAML loader that replaces values with lm-eval tags, such as `!function`, by None."""


_TaskYamlLoader.add_multi_constructor("!", lambda _loader, _tag, _node: None)


def _find_data_patterns(task_file: Path) -> Iterator[str]:
    """Yield the paths of local data that the YAML file of an lm-eval task names, as glob patterns; names of Hub data
    sets are also yielded. Yields nothing if the file is invalid."""
    try:
        task = yaml.load(task_file.read_text(encoding="utf-8"), _TaskYamlLoader)
    except (OSError, ValueError, yaml.YAMLError):  # skip an invalid task file, because lm-eval reports its error
        return
    if isinstance(task, dict):
        load_kwargs = task.get("dataset_kwargs")
        load_kwargs = load_kwargs if isinstance(load_kwargs, dict) else {}
        yield from _find_strings([task.get("dataset_path"), load_kwargs.get("data_files"), load_kwargs.get("data_dir")])


def _find_strings(yaml_value: Any) -> Iterator[str]:
    if isinstance(yaml_value, str):
        yield yaml_value
    elif isinstance(yaml_value, list | dict):
        for nested_value in yaml_value.values() if isinstance(yaml_value, dict) else yaml_value:
            yield from _find_strings(nested_value)


def _file_inputs(stage: StageConfig, recipe: Recipe) -> Iterator[StageInput]:
    """Yield the chat templates of a stage, and its reward service with the code and models that the service uses."""
    multi_turn_config, chat_template = recipe.rollout.multi_turn_config, recipe.policy.chat_template
    if multi_turn_config.enable and (template_path := multi_turn_config.custom_chat_template_path) is not None:
        key = "rollout.multi_turn_config.custom_chat_template_path"
        yield StageInput(key, "chat_template", _to_existing_path(template_path), "folder")
    if chat_template:
        is_template_file = os.path.isfile(path := _to_existing_path(chat_template))
        location_type: LocationType = "folder" if is_template_file else "literal"
        yield StageInput("policy.chat_template", "template", path if is_template_file else chat_template, location_type)
    if stage.reward_service and not stage.reward_service.startswith(BLOCK_PREFIX):
        service_config_path = _to_existing_path(stage.reward_service)
        yield StageInput("reward_service", "reward_service", service_config_path, "folder")
        for name, input_path in _list_service_files(Path(service_config_path)):
            yield StageInput(name, "rewards", str(input_path), "folder")


def _list_service_files(config_file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the user code and the model folders that the configuration of a reward service names, as pairs of name and
    path. Names without an existing path are left out, because the service may run on another machine."""
    try:
        reward_args = read_toml(config_file).get("reward_args")
    except ConfigError:  # skip an invalid file, because the reward service reports its error
        return
    reward_tables = [table for table in reward_args if isinstance(table, dict)] if isinstance(reward_args, list) else []
    code_or_model_names = [str(table.get(key, "")) for table in reward_tables for key in ("entry", "model_path")]
    for name in filter(None, dict.fromkeys(code_or_model_names)):
        module_name, _, _ = name.rpartition(":") if is_import_path(name) else (name, "", "")
        path = existing_path(module_name, Path.cwd()) or existing_path(module_name, config_file.parent)
        with suppress(ConfigError):
            path = path or (locate_code(name) if is_import_path(name) else None)
        if path is not None:
            yield name, path


def _code_inputs(stage: StageConfig, recipe: Recipe, stage_kind: StageKind) -> Iterator[StageInput]:
    """Yield the user code of a stage, and the built-in reward functions that the stage uses."""
    if stage.entry:
        yield StageInput("entry", "entry", stage.entry, "code")
    if is_import_path(publication_target := split_publication_target(stage.target)[0]):
        yield StageInput("target", "target", publication_target, "code")
    train_policy, held_out_rewards = recipe.train.train_policy, recipe.validation.reward_function
    for key, field, setting_value, _ in active_fields(recipe):
        if find_metadata(field, ReferenceKind) is ReferenceKind.CODE:
            names = (setting_value,) if isinstance(setting_value, str) else setting_value or ()
            role: InputRole = "code" if affects_result(field) else "hook"
            reward_fns = {*train_policy.validation_rewards, *held_out_rewards, *recipe.evaluate.rewards}
            yield from (StageInput(key, role, n, "code") for n in names if is_import_path(n) and n not in reward_fns)
    reward_names: dict[str, Iterable[str]] = {
        "train.train_policy.reward_function": train_policy.validation_rewards,
        "validation.reward_function": held_out_rewards,
    }
    if stage_kind.reads_key(EVALUATION_REWARDS_KEY):
        reward_names = {EVALUATION_REWARDS_KEY: recipe.evaluate.rewards}
    for key, names in reward_names.items():
        yield from (StageInput(key, "reward", n, "code" if is_import_path(n) else "literal") for n in names)
    runs_reward_functions = stage_kind.scores or stage_kind.trains_model or EVALUATION_REWARDS_KEY in reward_names
    for name in dict.fromkeys(name for names in reward_names.values() for name in names if runs_reward_functions):
        reward_table = recipe.custom.get(name)
        for custom_key, setting_value in reward_table.items() if isinstance(reward_table, dict) else ():
            if isinstance(setting_value, str) and setting_value and (path := existing_path(setting_value, Path.cwd())):
                yield StageInput(f"custom.{name}.{custom_key}", "rewards", str(path), "folder")
    if stage_kind.reads_data == "source":
        dataset_names = [source.dataset.name for source in train_policy.tables_by_dataset.values()]
        dataset_class_paths = [name for name in (*dataset_names, recipe.validation.dataset.name) if is_user_code(name)]
        for name in (*dataset_class_paths, *filter(None, (train_policy.data_packer,))):
            yield StageInput(f"{_TRAIN_DATASET_KEY}.name", "data_code", name, "code")


def _locate_model_or_dataset(name: str) -> tuple[str, LocationType]:
    """Return the location of a model or data set, and the type of the location. A name that is no URL, path or
    reference to a stage is a Hub id."""
    if referenced_stage(name) is not None:
        return name, "stage"
    if is_s3_url(name):
        return name, "store"
    path = existing_path(name, Path.cwd())
    # A name that cannot be a Hub id is a path: a Hub id has at most one slash and no leading dot.
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")
    return str(path or name), "folder" if path or looks_like_path else "hub"


def _to_existing_path(name: str) -> str:
    """Return the absolute path of an existing file or folder; return `name` unchanged if there is none."""
    return str(existing_path(name, Path.cwd()) or name)
