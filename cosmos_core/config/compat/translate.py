"""Translate configuration keys of older recipe generations; `keys.toml` lists renamed keys and keys without effect."""

import copy
import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.load import TomlTable, short_text
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import infer_training_type
from cosmos_core.errors import ConfigError

_KEY_TRANSLATIONS: dict[str, Any] = tomllib.loads(files(__package__).joinpath("keys.toml").read_text("utf-8"))
_TRAIN_POLICY_KEY = "train.train_policy"
_CURRENT_TABLE_NAMES = {*Recipe.model_fields, "pipeline", "extends"}
_WFM_TABLE_NAMES = (
    "model", "optimizer", "scheduler", "dataloader_train", "dataloader_val", "trainer", "model_parallel", "job"
)  # fmt: skip
"""Top-level tables of the deprecated `--wfm-mode` schema."""
RENAMED_KEYS: dict[str, str] = _KEY_TRANSLATIONS["moved"] | _KEY_TRANSLATIONS["moved_in_dpo"]
"""Current name of each renamed key of an older generation, by its old name."""
INEFFECTIVE_KEYS: dict[str, str] = {key: effect for effect, keys in _KEY_TRANSLATIONS["dead"].items() for key in keys}
"""Intended effect of each key that occurs in public recipes but has no effect, by name of the key."""
_INEFFECTIVE_GRPO_KEYS = {key: effect for effect, keys in _KEY_TRANSLATIONS["dead_in_grpo"].items() for key in keys}

_VAL_BATCH_SIZE_KEYS = ("train.validation_batch_per_replica", "rollout.val_batch_size")


def with_current_keys(values: TomlTable, source: str, notices: list[str]) -> TomlTable:
    """Return a configuration with current key names in place of older ones; add a message for each change to `notices`.

    Raises:
        ConfigError: an old and a new key of one setting differ, or the file has the deprecated `--wfm-mode` schema.
    """
    _refuse_wfm_schema(values, source)
    values = copy.deepcopy(values)
    _keep_applicable_batch_size(values, notices)
    translated_keys: dict[str, str] = {}
    for old_key, new_key in _KEY_TRANSLATIONS["moved"].items():
        table, name = _find_parent_table(values, old_key)
        if name not in table:
            continue
        value = table.pop(name)
        target_table, new_key_name = _find_parent_table(values, new_key, should_create=True)
        current_value = target_table.get(new_key_name, value)
        if current_value not in (value, None):
            old_text, current_text = f"{old_key} = {short_text(value)}", short_text(current_value)
            conflict_text = f"{old_text} is today's {new_key}, which says {current_text}"
            if new_key in translated_keys:
                conflict_text = f"{translated_keys[new_key]} = {current_text} and {old_text} are both today's {new_key}"
            raise ConfigError(f"{source}: {conflict_text}; keep one of them")
        target_table[new_key_name], translated_keys[new_key] = value, old_key
        notices.append(f"{old_key} is today's {new_key}")
    _translate_remote_reward(values, notices)
    _remove_ineffective_keys(values, INEFFECTIVE_KEYS, notices)
    return values


def _refuse_wfm_schema(values: TomlTable, source: str) -> None:
    """Refuse a recipe of the deprecated `--wfm-mode` schema; a table `[model]` alone may belong to user code."""
    names = [name for name in _WFM_TABLE_NAMES if isinstance(values.get(name), dict)]
    if names and (not _CURRENT_TABLE_NAMES & values.keys() or ("model" in names and len(names) > 1)):
        raise ConfigError(
            f"{source}: [{names[0]}] is of the deprecated --wfm-mode schema; `python tools/convert_wfm.py {source}` "
            f"prints a recipe that says the same"
        )


def with_current_algorithm_keys(values: TomlTable, notices: list[str]) -> TomlTable:
    """Return a recipe without the older keys of DPO and GRPO: they are renamed or, if they have no effect, removed.
    Keys such as `custom.dpo_beta` are renamed only for DPO, since they may otherwise belong to a user's algorithm.

    If both keys are set, the current key takes precedence over the older one.
    """
    values = copy.deepcopy(values)
    policy_table, _ = _find_parent_table(values, f"{_TRAIN_POLICY_KEY}.type")
    if policy_table.get("trainer_type") == "dpo":
        for old_key, new_key in _KEY_TRANSLATIONS["moved_in_dpo"].items():
            _rename_key(values, old_key, new_key, notices)
    if infer_training_type(policy_table) == "grpo":
        _remove_ineffective_keys(values, _INEFFECTIVE_GRPO_KEYS, notices)
    return values


def _rename_key(values: TomlTable, old_key: str, new_key: str, notices: list[str]) -> None:
    table, name = _find_parent_table(values, old_key)
    if name not in table:
        return
    value = table.pop(name)
    target_table, new_key_name = _find_parent_table(values, new_key, should_create=True)
    if target_table.setdefault(new_key_name, value) == value:
        notices.append(f"{old_key} is today's {new_key}")
    else:
        current_value = short_text(target_table[new_key_name])
        notices.append(f"{old_key} = {short_text(value)} is ignored: today's {new_key} says {current_value}")


def _keep_applicable_batch_size(values: TomlTable, notices: list[str]) -> None:
    """If a recipe sets different values for the two older keys of the validation batch size, keep the key that applies
    to its type of training, RL or SFT."""
    tables = [_find_parent_table(values, key) for key in _VAL_BATCH_SIZE_KEYS]
    batch_sizes = [table[name] for table, name in tables if name in table]
    if len(batch_sizes) < 2 or batch_sizes[0] == batch_sizes[1]:
        return
    policy_table, _ = _find_parent_table(values, f"{_TRAIN_POLICY_KEY}.type")
    is_rl = infer_training_type(policy_table) == "grpo" if policy_table else True
    table, name = tables[not is_rl]
    removed_key, kept_key = _VAL_BATCH_SIZE_KEYS[not is_rl], _VAL_BATCH_SIZE_KEYS[is_rl]
    removed_value = short_text(table.pop(name))
    notices.append(f"{removed_key} = {removed_value} is ignored: {kept_key} is that of this type of training")


def _remove_ineffective_keys(values: TomlTable, effect_by_key: dict[str, str], notices: list[str]) -> None:
    """Remove keys that have no effect from `values`, and add a message for each to `notices`."""
    for key, original_effect in effect_by_key.items():
        table, name = _find_parent_table(values, key)
        # At the root of the file only a table is removed; the schema refuses any other value as an unknown key.
        if name in table and (table is not values or isinstance(table[name], dict)):
            notices.append(_ignored_key_message(key, table.pop(name), original_effect))


def _ignored_key_message(key: str, value: Any, original_effect: str) -> str:
    return f"{key} = {short_text(value)} is ignored; it would have meant {original_effect}"


def _translate_remote_reward(values: TomlTable, notices: list[str]) -> None:
    """Replace the table `remote_reward.reward_fn = {name = weight}` and its `score_key` by the list `reward_fns`."""
    old_key = f"{_TRAIN_POLICY_KEY}.remote_reward.reward_fn"
    table, name = _find_parent_table(values, old_key)
    if not isinstance(table.get(name), dict):
        return  # leave a value that is no table unchanged, because the schema refuses it with an error
    settings = {"score_key": table.pop("score_key")} if "score_key" in table else {}
    table["reward_fns"] = [{"name": key, "weight": weight, **settings} for key, weight in table.pop(name).items()]
    notices.append(f"{old_key} is today's {old_key}s")


def current_key(key: str) -> str:
    """Return the current name of a dotted key, which may begin with a stage name (`STAGE.KEY`) or a renamed table."""
    for old_key, new_key in _KEY_TRANSLATIONS["moved"].items():
        stage_prefix, is_below_old_key = _match_stage_prefix(key, old_key)
        if is_below_old_key:
            key = f"{stage_prefix}{new_key}{key.removeprefix(stage_prefix + old_key)}"
    return key


def no_effect_message(key: str, value: Any) -> str:
    """Return a message if a dotted key (`KEY` or `STAGE.KEY`) has no effect; empty if it has an effect."""
    for old_key, original_effect in INEFFECTIVE_KEYS.items():
        if "." in old_key and _match_stage_prefix(key, old_key)[1]:
            return _ignored_key_message(key, value, original_effect)
    return ""


def _match_stage_prefix(key: str, table: str) -> tuple[str, bool]:
    """Return the prefix `STAGE.` of a dotted key (or ""), and whether the key after the prefix is `table` or in it."""
    if f"{key}.".startswith(f"{table}."):
        return "", True
    stage_name, _, remaining_key = key.partition(".")
    return f"{stage_name}.", stage_name != "custom" and f"{remaining_key}.".startswith(f"{table}.")


def _find_parent_table(values: TomlTable, key: str, *, should_create: bool = False) -> tuple[TomlTable, str]:
    """Return the table in which a dotted key lies, and the last part of the key. A missing table is returned as an
    empty table, and added to `values` if `should_create`; a value that is no table counts as missing."""
    *parent_names, name = key.split(".")
    for parent_name in parent_names:
        child_table = values.setdefault(parent_name, {}) if should_create else values.get(parent_name)
        values = child_table if isinstance(child_table, dict) else {}
    return values, name
