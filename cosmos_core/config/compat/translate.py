"""Translate key names of older generations to current names; `keys.toml` lists keys that moved or have no effect."""

import copy
import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.load import Values, short
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import inferred_type
from cosmos_core.errors import ConfigError

_DATA: dict[str, Any] = tomllib.loads(files("cosmos_core.config.compat").joinpath("keys.toml").read_text("utf-8"))
_POLICY = "train.train_policy"
_TODAY = {*Recipe.model_fields, "pipeline", "extends"}
_WFM = ("model", "optimizer", "scheduler", "dataloader_train", "dataloader_val", "trainer", "model_parallel", "job")
"""Top-level tables of the deprecated `--wfm-mode` schema."""
MOVED: dict[str, str] = _DATA["moved"] | _DATA["moved_in_dpo"]
"""Current name of each renamed key of an older generation, by its old name."""
DEAD: dict[str, str] = {key: meaning for meaning, keys in _DATA["dead"].items() for key in keys}
"""Intended meaning of each key that occurs in public recipes but has no effect, by name of the key."""
_DEAD_IN_GRPO = {key: meaning for meaning, keys in _DATA["dead_in_grpo"].items() for key in keys}
_OF_DPO: dict[str, str] = _DATA["moved_in_dpo"]
_BATCHES = ("train.validation_batch_per_replica", "rollout.val_batch_size")


def with_current_keys(values: Values, source: str, notices: list[str]) -> Values:
    """Return a configuration with current key names in place of older ones; add a message for each change to `notices`.

    Raises:
        ConfigError: an old and a new key of one setting differ, or the file has the deprecated `--wfm-mode` schema.
    """
    _refuse_wfm(values, source)
    values = copy.deepcopy(values)
    _keep_one_batch(values, notices)
    said_by: dict[str, str] = {}
    for old, new in _DATA["moved"].items():
        table, name = _at(values, old)
        if name not in table:
            continue
        value = table.pop(name)
        target, today_name = _at(values, new, make=True)
        current = target.get(today_name, value)
        if current not in (value, None) and new in said_by:
            raise ConfigError(
                f"{source}: {said_by[new]} = {short(current)} and {old} = {short(value)} are both today's {new}; keep "
                "one of them"
            )
        if current not in (value, None):
            raise ConfigError(
                f"{source}: {old} = {short(value)} is today's {new}, which says {short(current)}; keep one of them"
            )
        target[today_name], said_by[new] = value, old
        notices.append(f"{old} is today's {new}")
    _remote_reward(values, notices)
    _ignore(values, DEAD, notices)
    return values


def _refuse_wfm(values: Values, source: str) -> None:
    """Refuse a recipe of the deprecated `--wfm-mode` schema; a current recipe may have a table `[model]` for a user's
    script."""
    tables = [name for name in _WFM if isinstance(values.get(name), dict)]
    if tables and (not _TODAY & values.keys() or ("model" in tables and len(tables) > 1)):
        raise ConfigError(
            f"{source}: [{tables[0]}] is of the deprecated --wfm-mode schema; `python tools/convert_wfm.py {source}` "
            f"prints a recipe that says the same"
        )


def with_algorithm_keys(values: Values, notices: list[str]) -> Values:
    """Return the tables of a training's recipe with the older keys of its algorithm translated or removed. Keys such as
    `custom.dpo_beta` are translated only for DPO, since they may otherwise belong to a user's algorithm.

    If both keys are set, the current key takes precedence over the older one.
    """
    policy, custom = _at(values, f"{_POLICY}.type")[0], _at(values, "custom.dpo_beta")[0]
    if policy.get("trainer_type") == "dpo" and any(f"custom.{name}" in _OF_DPO for name in custom):
        values = copy.deepcopy(values)
        for old, new in _OF_DPO.items():
            _fill(values, old, new, notices)
    if inferred_type(policy) == "grpo" and any(f"{_POLICY}.{name}" in _DEAD_IN_GRPO for name in policy):
        values = copy.deepcopy(values)
        _ignore(values, _DEAD_IN_GRPO, notices)
    return values


def _fill(values: Values, old: str, new: str, notices: list[str]) -> None:
    table, name = _at(values, old)
    if name not in table:
        return
    value = table.pop(name)
    target, today_name = _at(values, new, make=True)
    if target.setdefault(today_name, value) == value:
        notices.append(f"{old} is today's {new}")
    else:
        notices.append(f"{old} = {short(value)} is ignored: today's {new} says {short(target[today_name])}")


def _keep_one_batch(values: Values, notices: list[str]) -> None:
    """Remove one of two validation batch sizes in a file of the first generation; keep the one that applies to the type
    of training, RL or SFT."""
    (first, name), (second, other) = (_at(values, key) for key in _BATCHES)
    if name not in first or other not in second or first[name] == second[other]:
        return
    policy, _ = _at(values, f"{_POLICY}.type")
    is_rl = inferred_type(policy) == "grpo" if policy else True
    removed_value = first.pop(name) if is_rl else second.pop(other)
    kept_key = _BATCHES[is_rl]
    notices.append(
        f"{_BATCHES[not is_rl]} = {short(removed_value)} is ignored: {kept_key} is that of this type of training"
    )


def _ignore(values: Values, keys: dict[str, str], notices: list[str]) -> None:
    """Remove keys that have no effect from `values`, and add a message for each to `notices`."""
    for key, meaning in keys.items():
        table, name = _at(values, key)
        # A table at the root of the file is kept if it may belong to a user's script.
        if name in table and (table is not values or isinstance(table[name], dict)):
            notices.append(_ignored(key, table.pop(name), meaning))


def _ignored(key: str, value: Any, meaning: str) -> str:
    return f"{key} = {short(value)} is ignored; it would have meant {meaning}"


def _remote_reward(values: Values, notices: list[str]) -> None:
    """Translate a table `remote_reward.reward_fn = {name = weight}` and its `score_key` to the list `reward_fns`."""
    old = f"{_POLICY}.remote_reward.reward_fn"
    table, name = _at(values, old)
    if not isinstance(table.get(name), dict):
        return  # the schema reports a value that is no table
    functions: list[Values] = [{"name": function, "weight": weight} for function, weight in table.pop(name).items()]
    if "score_key" in table:
        key = table.pop("score_key")
        functions = [function | {"score_key": key} for function in functions]
    table["reward_fns"] = functions
    notices.append(f"{old} is today's {old}s")


def current_name(key: str) -> str:
    """Return the current name of a dotted key, also if the key follows the name of a stage or is in a renamed table."""
    for old, new in _DATA["moved"].items():
        stage, is_match = _split_stage_key(key, old)
        if is_match:
            key = f"{stage}{new}{key.removeprefix(stage + old)}"
    return key


def no_effect_message(key: str, value: Any) -> str:
    """Return a message if a dotted key, with or without the name of a stage before it, has no effect; otherwise an
    empty string."""
    for old, meaning in DEAD.items():
        if "." in old and _split_stage_key(key, old)[1]:
            return _ignored(key, value, meaning)
    return ""


def _split_stage_key(key: str, table: str) -> tuple[str, bool]:
    """Return the name of the stage at the beginning of a dotted key, with its dot, and whether the rest of the key is
    in `table`."""
    if f"{key}.".startswith(f"{table}."):
        return "", True
    stage, _, rest = key.partition(".")
    return f"{stage}.", stage != "custom" and f"{rest}.".startswith(f"{table}.")


def _at(values: Values, key: str, *, make: bool = False) -> tuple[Values, str]:
    """Return the table that contains a dotted key, and the last part of the key. If the table does not exist, return an
    empty table, which `make` adds to `values`. The schema reports values that are not tables."""
    *parents, name = key.split(".")
    for part in parents:
        inner = values.setdefault(part, {}) if make else values.get(part)
        values = inner if isinstance(inner, dict) else {}
    return values, name
