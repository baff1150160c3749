"""The fingerprint of a stage: a hash of everything that can change the result of the stage, and of nothing else.

The hash leaves out paths (the content of the files is hashed), the git commit (recorded in `run.json`; a change of code
that changes results raises the kind's `result_version`), and fields marked `ResultNeutral` in the schema.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import (
    EVALUATION_PROMPTS_KEY,
    EVALUATION_REWARDS_KEY,
    InputRole,
    StageInput,
    read_card_metadata,
)
from cosmos_core.config.media import MEDIA_PATH_NAMES
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.rl import REASONING_GYM_REWARD
from cosmos_core.config.schema.table import flatten_nonempty_tables, result_values
from cosmos_core.config.unread import disabled_keys
from cosmos_core.environment import mask_settings
from cosmos_core.machine_properties import MachineProperties, measure_worker_machine
from cosmos_core.registry import compute_code_digest
from cosmos_core.run.content import list_data_files, list_model_files
from cosmos_core.run.digests import DigestCache
from cosmos_core.run.files import read_json_object
from cosmos_core.run.inputs import (
    GENERATOR_PACKAGE,
    check_local_inputs,
    list_dedup_packages,
    list_kernel_packages,
)
from cosmos_core.run.libraries import QUANTIZATION_LIBRARIES, RECORDED_LIBRARIES
from cosmos_core.types import StageKind, is_key_within

COPIED_FILES_KEY = "carried"
"""Key in `Fingerprint.ingredients` for the files of a model that training does not read and that exports copy."""
_BUILTIN_CUSTOM_TABLES = ("dataset", "vision")  # tables of `[custom]` that this package reads
_INPUT_ROLES = frozenset(get_args(InputRole)) - {"end_tokens"}
_EOS_TOKEN_KEY = "eos_token_id"
_ROW_ENCODING_KEYS = ("rollout.multi_turn_config.tools", "policy.model_class")
"""Recipe keys that can name user code on which prepared rows depend: prompts describe the tools, and the model class
encodes images and videos."""
InputEntry = tuple[str, str, str, str]
"""Input of a stage in a fingerprint: its role, key and name, and the digest of its content."""


@dataclass(frozen=True)
class Fingerprint:
    """Hash of everything that can change the result of a stage, with the hashed values to explain differences."""

    value: str
    ingredients: dict[str, Any]
    inputs: tuple[InputEntry, ...] = ()

    @property
    def training_hash(self) -> str:
        """Return the hash of what a training depends on; stages with the same hash share checkpoints."""
        return _hash_ingredients({name: value for name, value in self.ingredients.items() if name != COPIED_FILES_KEY})

    def describe_difference(self, older_fingerprint: "Fingerprint") -> list[str]:
        """Return what differs from an older fingerprint: settings as `key old -> new`, inputs as `NAME changed`."""
        can_compare_inputs = bool(self.inputs and older_fingerprint.inputs)
        old_ingredients = flatten_nonempty_tables(older_fingerprint.ingredients)
        new_ingredients = flatten_nonempty_tables(self.ingredients)
        changes = []
        for key in sorted({*old_ingredients, *new_ingredients}):
            is_input_digest = key.partition(".")[0] in _INPUT_ROLES and not is_key_within(key, ("entry.arguments",))
            old_ingredient, new_ingredient = old_ingredients.get(key), new_ingredients.get(key)
            if old_ingredient == new_ingredient or (can_compare_inputs and is_input_digest):
                continue
            is_stage_result = key.startswith("inputs.")
            shortened_values = (_shorten_value(mask_settings(value, key)) for value in (old_ingredient, new_ingredient))
            change_text = f"{key.removeprefix('config.')} {' -> '.join(shortened_values)}"
            changes.append(f"result of stage {key.removeprefix('inputs.')} changed" if is_stage_result else change_text)
        if can_compare_inputs:
            changes += _describe_input_changes(older_fingerprint.inputs, self.inputs)
        return list(dict.fromkeys(changes))


def _describe_input_changes(old_inputs: Sequence[InputEntry], new_inputs: Sequence[InputEntry]) -> Iterator[str]:
    for role_and_key in dict.fromkeys(input_entry[:2] for input_entry in (*old_inputs, *new_inputs)):
        old_digests, new_digests = (
            {name: digest for *entry_prefix, name, digest in input_entries if (*entry_prefix,) == role_and_key}
            for input_entries in (old_inputs, new_inputs)
        )
        if old_digests.keys() == new_digests.keys():
            yield from (f"{name} changed" for name in new_digests if old_digests[name] != new_digests[name])
        elif sorted(old_digests.values()) != sorted(new_digests.values()):
            joined_input_names = (", ".join(input_entries) or "nothing" for input_entries in (old_digests, new_digests))
            yield f"{role_and_key[1]} {' -> '.join(joined_input_names)}"


def compute_fingerprint(
    pipeline: Pipeline, stage: StageConfig, stage_kind: StageKind, input_digests: Mapping[str, str], cache: DigestCache
) -> Fingerprint:
    """Return the fingerprint of one stage; `input_digests` has the digests of the results of its input stages by name.
    Raises `ModelError`, `DataError` or `ConfigError` if a local model, a data folder or user code is missing."""
    recipe, inputs = pipeline.recipes[stage.name], pipeline.inputs(stage)
    is_key_read = make_read_key_predicate(pipeline, stage)
    check_local_inputs(inputs)
    inputs_affecting_result = [each for each in inputs if _input_affects_result(each, stage_kind, is_key_read)]
    inputs_and_digests = [(each, _compute_input_digest(each, cache)) for each in inputs_affecting_result]
    code_labels = _label_user_code(inputs, is_key_read)
    recipe_values = result_values(recipe) if stage.entry else _remove_media_paths(result_values(recipe))
    for name in {"judge", *(each.table for each in pipeline.stage_kinds.values() if each.table)} - {stage_kind.table}:
        # Recipe tables of other stage kinds are skipped if they have only default values, even if user code reads them.
        if (recipe_table := getattr(recipe, name)) == type(recipe_table)():
            recipe_values.pop(name)
    # User functions and classes receive the whole config, so each setting may change their result.
    should_hash_all_settings = any(each.role in {"entry", "data_code"} for each in inputs)
    hashed_settings = recipe_values
    if not should_hash_all_settings:
        flat_recipe_values = flatten_nonempty_tables(_replace_import_paths(recipe_values, code_labels))
        hashed_settings = {key: value for key, value in flat_recipe_values.items() if is_key_read(key)}
    world_size = recipe.policy.parallelism.world_size if stage_kind.has_mesh else None
    libraries = (*stage_kind.libraries, *(list_dedup_packages(recipe) if stage_kind.reads_data == "source" else ()))
    libraries += QUANTIZATION_LIBRARIES if is_key_read("export.formats") else ()
    libraries += recipe.policy.modality.evaluation_libraries if stage_kind.keys_by_modality else ()
    machine_properties = collect_stage_machine_properties(pipeline, has_several_ranks=(world_size or 1) > 1)
    package_versions = machine_properties.versions
    computes_rewards = stage_kind.scores or stage_kind.trains_model
    ingredients: dict[str, Any] = {
        "kind": stage_kind.name,
        "result_version": stage_kind.result_version,
        "config": hashed_settings,
        "inputs": dict(input_digests),
        "threads": count_worker_threads(pipeline) if stage_kind.in_worker and stage_kind.is_numeric else None,
        "device": machine_properties.device if stage_kind.in_worker and stage_kind.is_numeric else None,
        "world_size": world_size,
        "versions": {name: package_versions[name] for name in libraries if name in package_versions},
        **({"code": {}} if computes_rewards else {}),
        **_group_digests_by_role(inputs_and_digests, code_labels),
        **_collect_stage_keys(stage, stage_kind),
    }
    if stage.entry:
        ingredients["entry"]["arguments"] = stage.arguments
    if any(  # if `reasoning-gym` generates or scores rows, the result depends on its version
        (each.role, each.location_type) == ("data", "literal")
        or (computes_rewards and (each.role, each.location) == ("reward", REASONING_GYM_REWARD))
        for each in inputs
    ):
        ingredients["generators"] = measure_worker_machine((GENERATOR_PACKAGE,), pipeline.config.python).versions
    if stage_kind.trains_model and (packages := list_kernel_packages(recipe)):
        ingredients["kernels"] = measure_worker_machine(tuple(packages), pipeline.config.python).versions
    ingredients = json.loads(json.dumps(ingredients, sort_keys=True, default=str))
    input_entries = tuple(_make_input_entry(*each) for each in inputs_and_digests)
    return Fingerprint(_hash_ingredients(ingredients), ingredients, input_entries)


def _input_affects_result(stage_input: StageInput, stage_kind: StageKind, is_key_read: Callable[[str], bool]) -> bool:
    if stage_input.role in {"code", "reward"}:
        is_code_called_by_stage = _computes_rewards(stage_input, stage_kind) or stage_input.key in _ROW_ENCODING_KEYS
        return stage_input.location_type == "code" and is_code_called_by_stage and is_key_read(stage_input.key)
    if stage_input.role in {"chat_template", "template"}:
        return is_key_read(stage_input.key)
    if stage_input.role == "end_tokens":
        return _EOS_TOKEN_KEY in read_json_object(Path(stage_input.location))
    if stage_input.role == "media":
        return bool(list_data_files(Path(stage_input.location), stage_input.patterns))
    return stage_input.role != "hook" and not (stage_input.role == "data" and stage_input.location_type == "stage")


def _computes_rewards(stage_input: StageInput, stage_kind: StageKind) -> bool:
    return stage_kind.scores or stage_kind.trains_model or stage_input.key == EVALUATION_REWARDS_KEY


def _compute_input_digest(stage_input: StageInput, digest_cache: DigestCache) -> Any:
    """Return a value that identifies the content of an input: a digest or a pinned name; for the role `end_tokens`, the
    ids of the end tokens."""
    if stage_input.location_type in {"stage", "literal"}:
        return stage_input.location  # no digest, because the ingredient `inputs` has that of a stage's result
    if stage_input.location_type == "store":
        # Hash only the digest with which a pinned URL ends: the result depends on the content, not on its address.
        return f"remote:{stage_input.location.rpartition('#')[2]}"
    if stage_input.location_type == "hub":  # the revision of a Hub data set is hashed with the config
        revision_suffix = "" if stage_input.role == "data" else f"@{stage_input.revision}"
        return f"hub:{stage_input.location}{revision_suffix}"
    if stage_input.location_type == "code":
        return compute_code_digest(stage_input.location)
    path = Path(stage_input.location)
    if stage_input.role == "end_tokens":
        return read_json_object(path)[_EOS_TOKEN_KEY]
    if stage_input.key == EVALUATION_PROMPTS_KEY:  # hash the file name too, because metric names contain it
        files = list_data_files(path) if path.is_dir() else ()
        return [path.stem, digest_cache.digest_files(path, files) if path.is_dir() else digest_cache.digest_file(path)]
    if not path.is_dir():
        return digest_cache.digest_file(path)
    list_hashed_files = list_model_files if stage_input.role in {"model", "teacher", "carried"} else list_data_files
    digest = digest_cache.digest_files(path, list_hashed_files(path, stage_input.patterns))
    # Hash the `configs` in the card of a data set too, which assign files to splits.
    if stage_input.role == "data" and (configs := read_card_metadata(path).get("configs")):
        return [digest, configs]
    # Hash the path of a media folder too, because prepared rows contain paths of images.
    return [stage_input.location, digest] if stage_input.role == "media" else digest


def _make_input_entry(stage_input: StageInput, digest: Any) -> InputEntry:
    is_local_path = stage_input.location_type not in {"hub", "store", "stage"}
    name = Path(stage_input.location).name if is_local_path else stage_input.location
    digest = digest[-1] if stage_input.key == EVALUATION_PROMPTS_KEY else digest
    return stage_input.role, stage_input.key, name, str(digest)


def _group_digests_by_role(inputs: Sequence[tuple[StageInput, Any]], code_labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the digests of inputs by `StageInput.role`. The value is a list for `data`, a dict by name for roles that
    may have several inputs, such as `code`, and one digest for all other roles."""
    ingredients: dict[str, Any] = {"model": None, "data": []}
    for stage_input, digest in inputs:
        if stage_input.role == "data":
            ingredients["data"].append(digest)
        elif stage_input.role in {"code", "reward"}:
            ingredients.setdefault("code", {})[code_labels[stage_input.location]] = digest
        elif stage_input.location_type == "code" or stage_input.role in {"rewards", "weights"}:
            ingredient_key_by_role = {"rewards": stage_input.key, "weights": Path(stage_input.location).name}
            ingredients.setdefault(stage_input.role, {})[
                ingredient_key_by_role.get(stage_input.role, stage_input.location.rpartition(":")[2])
            ] = digest
        else:
            ingredients[stage_input.role] = digest
    return ingredients


def _hash_ingredients(ingredients: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def _collect_stage_keys(stage: StageConfig, stage_kind: StageKind) -> dict[str, Any]:
    """Return the values of a stage's `[[pipeline.stages]]` entry, outside of its recipe, that change its result."""
    stage_fields: dict[str, Any] = {}
    if stage_kind.merges_models:  # keep the order of the models, to which merge weights refer
        stage_fields["after"] = list(stage.after)
    for key in ("checkpoint", "format", "require", "confidence"):
        if value := getattr(stage, key):
            stage_fields[key] = list(value) if isinstance(value, tuple) else value
    if stage.sweep is not None:
        branch_stage_names = [list(sweep_branch.stages) for sweep_branch in stage.sweep.branches]
        stage_fields["sweep"] = {"metric": stage.sweep.metric, "mode": stage.sweep.mode, "branches": branch_stage_names}
    return stage_fields


def make_read_key_predicate(pipeline: Pipeline, stage: StageConfig) -> Callable[[str], bool]:
    """Return a function that is True for each recipe key that the stage's kind reads and that no setting disables."""
    stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
    unread_keys = [key for _, keys in disabled_keys(pipeline, stage) for key in keys]

    def is_key_read(key: str) -> bool:
        return stage_kind.reads_key(key) and not is_key_within(key, unread_keys)

    inputs = pipeline.inputs(stage)
    if is_key_read("custom") and not stage.entry and not _label_user_code(inputs, is_key_read):
        rewards = {each.location for each in inputs if each.role == "reward" and _computes_rewards(each, stage_kind)}
        unread_keys += [f"custom.{name}" for name in recipe.custom.keys() - {*_BUILTIN_CUSTOM_TABLES, *rewards}]
    return is_key_read


def count_worker_threads(pipeline: Pipeline) -> int:
    """Return the number of CPU threads of a worker: `threads` of the pipeline or, if unset, that of the workers'
    machine."""
    return pipeline.config.threads or collect_stage_machine_properties(pipeline).threads


def collect_stage_machine_properties(pipeline: Pipeline, *, has_several_ranks: bool = False) -> MachineProperties:
    """Return the properties of the machine that runs the stages, with the versions of the libraries
    `RECORDED_LIBRARIES`; with `has_several_ranks`, of a machine of the Ray cluster if `RAY_ADDRESS` is set."""
    return measure_worker_machine(RECORDED_LIBRARIES, pipeline.config.python, may_use_ray=has_several_ranks)


def _remove_media_paths(recipe_values: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe values without the media paths in `custom.dataset`: the content of these files is hashed
    instead."""
    custom_table = recipe_values.get("custom") or {}
    if not isinstance(custom_table.get("dataset"), dict):
        return recipe_values
    dataset_settings = {key: value for key, value in custom_table["dataset"].items() if key not in MEDIA_PATH_NAMES}
    return recipe_values | {"custom": custom_table | {"dataset": dataset_settings}}


def _label_user_code(inputs: Sequence[StageInput], is_key_read: Callable[[str], bool]) -> dict[str, str]:
    """Return a label for each import path of a user's reward, algorithm or engine that the stage reads. The label is
    the path without folders, because the location of the file does not change the result; if two labels are equal, the
    whole paths are used."""
    code_inputs = [each for each in inputs if each.role in {"code", "reward"} and each.location_type == "code"]
    import_paths = sorted({each.location for each in code_inputs if is_key_read(each.key)})
    code_names = [import_path.rpartition("/")[2] for import_path in import_paths]
    return dict(zip(import_paths, code_names if len(set(code_names)) == len(code_names) else import_paths, strict=True))


def _replace_import_paths(recipe_value: Any, code_labels: Mapping[str, str]) -> Any:
    """Return nested values in which each import path of user code, a key or a value, is replaced by its label in
    `code_labels`."""
    if isinstance(recipe_value, str):
        return code_labels.get(recipe_value, recipe_value)
    if isinstance(recipe_value, list):
        return [_replace_import_paths(value, code_labels) for value in recipe_value]
    if not isinstance(recipe_value, dict):
        return recipe_value
    return {code_labels.get(key, key): _replace_import_paths(value, code_labels) for key, value in recipe_value.items()}


def _shorten_value(setting_value: Any) -> str:
    setting_text = "nothing" if setting_value is None else str(setting_value)
    return setting_text if len(setting_text) <= 40 else setting_text[:12] + "..."
