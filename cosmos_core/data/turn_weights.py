"""Reader of the keys that select which turns are learned, in the formats of OpenAI, ms-swift, Axolotl and others."""

import re
from typing import Any

from cosmos_core.errors import DataError

_TURN_WEIGHT_KEYS = ("weight", "loss", "train", "loss_mask", "trainable")
_UNSUPPORTED_WEIGHT_KEYS = ("loss_scale", "loss_weight", "train_detail", "training_detail")
"""Unsupported keys of a conversation turn, which weight the turn or parts of it by other values than 0 and 1."""
_SELECTION_KEY_REGEX = re.compile(r"loss|train|learn|mask|weight|ignore|supervise|target|skip|label", re.IGNORECASE)
"""Pattern of keys of turns with which other programs select tokens to learn. Such a key with a number, list, yes or no
as value is refused."""


def pop_turn_weight(turn: dict[str, Any], role: str, location: str) -> dict[str, int]:
    """Remove the keys that select whether a turn is learned; return `{"weight": 0}` for a turn without loss, else `{}`.
    Raise DataError if a value is neither 0 nor 1, or marks a turn of another role than the assistant as learned."""
    keys_of_flags = [key for key, value in turn.items() if key not in _TURN_WEIGHT_KEYS and _is_flag_value(value)]
    unsupported_keys = [key for key in turn if key in _UNSUPPORTED_WEIGHT_KEYS]
    if unsupported_keys := [*unsupported_keys, *filter(_SELECTION_KEY_REGEX.search, keys_of_flags)]:
        key = unsupported_keys[0]
        raise DataError(f"{location}: {key!r} is not read; a turn is learned as a whole (`weight` = 1) or not (0)")
    weight_by_key = {key: turn.pop(key) for key in _TURN_WEIGHT_KEYS if key in turn}
    for key, value in weight_by_key.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{location}: {key} = {str(value)[:40]}; a turn is learned (1) or not (0)")
        if value and key != "weight" and role != "assistant":
            learned_role_rule = "only turns of the assistant are learned"
            raise DataError(f"{location}: {key} = {value}, but {learned_role_rule}; leave {key} out")
    return {} if all(weight_by_key.values()) else {"weight": 0}


def _is_flag_value(value: Any) -> bool:
    return isinstance(value, int | float | list) or str(value).lower() in {"0", "1", "false", "true", "no", "yes"}


def check_content_part_keys(content: Any, location: str) -> None:
    """Raise DataError if a part of a turn's content has a key that selects tokens to learn: a turn is learned whole."""
    for part in content if isinstance(content, list) else ():
        for key in (*_TURN_WEIGHT_KEYS, *_UNSUPPORTED_WEIGHT_KEYS):
            if isinstance(part, dict) and key in part:
                raise DataError(f"{location}: a part of the content has {key!r}; put it on the turn, learned whole")


def is_trained_turn(turn: dict[str, Any]) -> bool:
    """Return whether a turn is an assistant turn that is learned."""
    return bool(turn["role"] == "assistant" and turn.get("weight", 1))
