"""Translate configuration keys of older recipe generations; `keys.toml` lists renamed keys and keys without effect."""

import copy
import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.load import Values, short_text
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import inferred_type
from cosmos_core.errors import ConfigError

_DATA: dict[str, Any] = tomllib.loads(files("cosmos_core.config.compat").joinpath("keys.toml").read_text("utf-8"))
_POLICY = "train.train_policy"
_CURRENT_TABLE_NAMES = {*Recipe.model_fields, "pipeline", "extends"}
_WORLD_MODEL_TABLES = (
    "model", "optimizer", "scheduler", "dataloader_train", "dataloader_val", "trainer", "model_parallel", "job"
)  # fmt: skip
"""Top-level tables of the deprecated `--wfm-mode` schema."""
RENAMED_KEYS: dict[str, str] = _DATA["moved"] | _DATA["moved_in_dpo"]
"""Current name of each renamed key of an older generation, by its old name."""
UNUSED_KEYS: dict[str, str] = {key: meaning for meaning, keys in _DATA["dead"].items() for key in keys}
"""Intended meaning of each key that occurs in public recipes but has no effect, by name of the key."""
_UNUSED_GRPO_KEYS = {key: meaning for meaning, keys in _DATA["dead_in_grpo"].items() for key in keys}
_RENAMED_DPO_KEYS: dict[str, str] = _DATA["moved_in_dpo"]
_BATCHES = ("train.validation_batch_per_replica", "rollout.val_batch_size")


def with_current_keys(values: Values, source: str, notices: list[str]) -> Values:
    """Return a configuration with current key names in place of older ones; add a message for each change to `notices`.

    Raises:
        ConfigError: an old and a new key of one setting differ, or the file has the deprecated `--wfm-mode` schema.
    """
    _refuse_wfm(values, source)
    values = copy.deepcopy(values)
    _keep_applicable_batch_size(values, notices)
    source_of_key: dict[str, str] = {}
    for old_key, new in _DATA["moved"].items():
        table, name = _find_table(values, old_key)
        if name not in table:
            continue
        value = table.pop(name)
        target, new_key_name = _find_table(values, new, make=True)
        current = target.get(new_key_name, value)
        if current not in (value, None) and new in source_of_key:
            raise ConfigError(
                f"{source}: {source_of_key[new]} = {short_text(current)} and {old_key} = {short_text(value)} are both "
                f"today's {new}; keep one of them"
            )
        if current not in (value, None):
            raise ConfigError(
                f"{source}: {old_key} = {short_text(value)} is today's {new}, which says {short_text(current)}; keep "
                f"one of them"
            )
        target[new_key_name], source_of_key[new] = value, old_key
        notices.append(f"{old_key} is today's {new}")
    _remote_reward(values, notices)
    _remove_unused_keys(values, UNUSED_KEYS, notices)
    return values


def _refuse_wfm(values: Values, source: str) -> None:
    """Refuse a recipe of the deprecated `--wfm-mode` schema; a table `[model]` alone may belong to user code."""
    tables = [name for name in _WORLD_MODEL_TABLES if isinstance(values.get(name), dict)]
    if tables and (not _CURRENT_TABLE_NAMES & values.keys() or ("model" in tables and len(tables) > 1)):
        raise ConfigError(
            f"{source}: [{tables[0]}] is of the deprecated --wfm-mode schema; `python tools/convert_wfm.py {source}` "
            f"prints a recipe that says the same"
        )


def with_algorithm_keys(values: Values, notices: list[str]) -> Values:
    """Return the tables of a training's recipe with the older keys of its algorithm translated or removed. Keys such as
    `custom.dpo_beta` are translated only for DPO, since they may otherwise belong to a user's algorithm.

    If both keys are set, the current key takes precedence over the older one.
    """
    policy, custom = _find_table(values, f"{_POLICY}.type")[0], _find_table(values, "custom.dpo_beta")[0]
    if policy.get("trainer_type") == "dpo" and any(f"custom.{name}" in _RENAMED_DPO_KEYS for name in custom):
        values = copy.deepcopy(values)
        for old_key, new in _RENAMED_DPO_KEYS.items():
            _fill(values, old_key, new, notices)
    if inferred_type(policy) == "grpo" and any(f"{_POLICY}.{name}" in _UNUSED_GRPO_KEYS for name in policy):
        values = copy.deepcopy(values)
        _remove_unused_keys(values, _UNUSED_GRPO_KEYS, notices)
    return values


def _fill(values: Values, old_key: str, new: str, notices: list[str]) -> None:
    table, name = _find_table(values, old_key)
    if name not in table:
        return
    value = table.pop(name)
    target, new_key_name = _find_table(values, new, make=True)
    if target.setdefault(new_key_name, value) == value:
        notices.append(f"{old_key} is today's {new}")
    else:
        current = short_text(target[new_key_name])
        notices.append(f"{old_key} = {short_text(value)} is ignored: today's {new} says {current}")


def _keep_applicable_batch_size(values: Values, notices: list[str]) -> None:
    """Keep the validation batch size of the training type, RL or SFT, if a file of the first recipe generation sets
    different batch sizes for both."""
    (first, name), (second_value, other) = (_find_table(values, key) for key in _BATCHES)
    if name not in first or other not in second_value or first[name] == second_value[other]:
        return
    policy, _ = _find_table(values, f"{_POLICY}.type")
    is_rl = inferred_type(policy) == "grpo" if policy else True
    removed = short_text(first.pop(name) if is_rl else second_value.pop(other))
    removed_key, kept_key = _BATCHES[not is_rl], _BATCHES[is_rl]
    notices.append(f"{removed_key} = {removed} is ignored: {kept_key} is that of this type of training")


def _remove_unused_keys(values: Values, keys: dict[str, str], notices: list[str]) -> None:
    """Remove keys that have no effect from `values`, and add a message for each to `notices`."""
    for key, meaning in keys.items():
        table, name = _find_table(values, key)
        # A table at the root of the file is kept if it may belong to a user's script.
        if name in table and (table is not values or isinstance(table[name], dict)):
            notices.append(_ineffective_message(key, table.pop(name), meaning))


def _ineffective_message(key: str, value: Any, meaning: str) -> str:
    return f"{key} = {short_text(value)} is ignored; it would have meant {meaning}"


def _remote_reward(values: Values, notices: list[str]) -> None:
    """Translate a table `remote_reward.reward_fn = {name = weight}` and its `score_key` to the list `reward_fns`."""
    old_key = f"{_POLICY}.remote_reward.reward_fn"
    table, name = _find_table(values, old_key)
    if not isinstance(table.get(name), dict):
        return  # the schema reports a value that is no table
    functions: list[Values] = [{"name": function, "weight": weight} for function, weight in table.pop(name).items()]
    if "score_key" in table:
        key = table.pop("score_key")
        functions = [function | {"score_key": key} for function in functions]
    table["reward_fns"] = functions
    notices.append(f"{old_key} is today's {old_key}s")


def current_name(key: str) -> str:
    """Return the current name of a dotted key, also if the key follows the name of a stage or is in a renamed table."""
    for old_key, new in _DATA["moved"].items():
        stage, is_match = _split_stage_key(key, old_key)
        if is_match:
            key = f"{stage}{new}{key.removeprefix(stage + old_key)}"
    return key


def no_effect_message(key: str, value: Any) -> str:
    """Return a message if a dotted key, with or without the name of a stage before it, has no effect; otherwise an
    empty string."""
    for old_key, meaning in UNUSED_KEYS.items():
        if "." in old_key and _split_stage_key(key, old_key)[1]:
            return _ineffective_message(key, value, meaning)
    return ""


def _split_stage_key(key: str, table: str) -> tuple[str, bool]:
    """Return the prefix `STAGE.` of a dotted key (or ""), and whether the key after this prefix is in `table`."""
    if f"{key}.".startswith(f"{table}."):
        return "", True
    stage, _, rest = key.partition(".")
    return f"{stage}.", stage != "custom" and f"{rest}.".startswith(f"{table}.")


def _find_table(values: Values, key: str, *, make: bool = False) -> tuple[Values, str]:
    """Return the table that contains a dotted key, and the last part of the key. If the table does not exist, return an
    empty table, which `make` adds to `values`. The schema reports values that are not tables."""
    *parents, name = key.split(".")
    for part in parents:
        child = values.setdefault(part, {}) if make else values.get(part)
        values = child if isinstance(child, dict) else {}
    return values, name
