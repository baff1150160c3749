"""Recipes of every generation in today's names: moved keys, keys that never did anything, the deprecated schema.

`keys.toml` has the moved and the dead keys, `wfm.toml` the deprecated schema.
"""

from __future__ import annotations

import copy
import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.load import Values, short
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError

_DATA: dict[str, Any] = tomllib.loads(files("cosmos_core.config.compat").joinpath("keys.toml").read_text("utf-8"))
_POLICY = "train.train_policy"
_TODAY = {*Recipe.model_fields, "pipeline", "extends"}
MOVED: dict[str, str] = _DATA["moved"]
"""Key of an older generation to today's."""
DEAD: dict[str, str] = {key: meaning for meaning, keys in _DATA["dead"].items() for key in keys}
"""Keys of public recipes that are read no more, or never were, to what they would have meant."""
_DEAD_IN_GRPO = {key: meaning for meaning, keys in _DATA["dead_in_grpo"].items() for key in keys}


def modern(values: Values, source: str, notices: list[str]) -> Values:
    """Return the same recipe in today's keys; what was changed is told in `notices`.

    Raises:
        ConfigError: an old and a new key for the same thing disagree.
    """
    values = copy.deepcopy(values)
    if values.keys() - _TODAY:  # to build the deprecated schema takes a while, and hardly any file is of it
        from cosmos_core.config.compat.wfm import from_wfm, is_wfm

        values = from_wfm(values, source, notices) if is_wfm(values) else values
    for old, new in MOVED.items():
        table, name = _at(values, old)
        if name not in table:
            continue
        value = table.pop(name)
        there, today_name = _at(values, new, make=True)
        if there.get(today_name, value) not in (value, None):
            raise ConfigError(
                f"{source}: {old} = {short(value)} is today's {new}, which says {short(there[today_name])}; keep one "
                f"of them"
            )
        there[today_name] = value
        notices.append(f"{old} is today's {new}")
    _remote_reward(values, notices)
    policy, _ = _at(values, f"{_POLICY}.type")
    for key, meaning in (DEAD | _DEAD_IN_GRPO if policy.get("type") == "grpo" else DEAD).items():
        table, name = _at(values, key)
        if name in table and (table is not values or isinstance(table[name], dict)):  # at the root: a script's table
            notices.append(f"{key} = {short(table.pop(name))} is ignored; it would have meant {meaning}")
    return values


def _remote_reward(values: Values, notices: list[str]) -> None:
    """`remote_reward.reward_fn = {name = weight}` with one `score_key`, before there were `reward_fns`."""
    old = f"{_POLICY}.remote_reward.reward_fn"
    table, name = _at(values, old)
    if not isinstance(table.get(name), dict):
        return  # the schema complains about anything else
    functions: list[Values] = [{"name": function, "weight": weight} for function, weight in table.pop(name).items()]
    if "score_key" in table:
        key = table.pop("score_key")
        functions = [function | {"score_key": key} for function in functions]
    table["reward_fns"] = functions
    notices.append(f"{old} is today's {old}s")


def today(key: str) -> str:
    """Return today's name of a dotted key, also of one behind the name of a stage."""
    for old, new in MOVED.items():
        if key == old or key.endswith(f".{old}"):
            return key.removesuffix(old) + new
    return key


def _at(values: Values, key: str, *, make: bool = False) -> tuple[Values, str]:
    """The table that a dotted key is in, an empty one where there is none, and its name there; `make` adds the tables
    on the way. The schema complains about what is no table."""
    *parents, name = key.split(".")
    for part in parents:
        inner = values.setdefault(part, {}) if make else values.get(part)
        values = inner if isinstance(inner, dict) else {}
    return values, name
