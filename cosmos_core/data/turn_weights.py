"""Which turns of a row are learned, as the formats of OpenAI, ms-swift, Axolotl and others say it."""

from __future__ import annotations

from typing import Any

from cosmos_core.errors import DataError

_KEYS = ("weight", "loss", "train", "loss_mask", "trainable")
_PARTIAL_KEYS = ("loss_scale", "loss_weight", "train_detail", "training_detail")
"""Keys that weigh a turn, or parts of it, otherwise than by 0 and 1."""


def take_weight(turn: dict[str, Any], role: str, where: str) -> dict[str, int]:
    """Take what says whether it is learned out of a turn, and return `weight` = 0 where it is not.

    Raises:
        DataError: a key weighs the turn otherwise than by 0 and 1, or would have a turn of another role learned.
    """
    if partial := [key for key in _PARTIAL_KEYS if key in turn]:
        raise DataError(f"{where}: {partial[0]!r} is not read; a turn is learned as a whole (`weight` = 1) or not (0)")
    said = {key: turn.pop(key) for key in _KEYS if key in turn}
    for key, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{where}: {key} = {str(value)[:40]}; a turn is learned (1) or not (0)")
        if value and key != "weight" and role != "assistant":
            raise DataError(f"{where}: {key} = {value}, but only turns of the assistant are learned; leave {key} out")
    return {} if all(said.values()) else {"weight": 0}


def check_parts(content: Any, where: str) -> None:
    """Refuse content of which a part says whether it is learned.

    Raises:
        DataError: one does.
    """
    for part in content if isinstance(content, list) else ():
        if keys := [key for key in (*_KEYS, *_PARTIAL_KEYS) if isinstance(part, dict) and key in part]:
            raise DataError(f"{where}: a part of the content has {keys[0]!r}; put it on the turn, learned whole")


def is_learned(turn: dict[str, Any]) -> bool:
    """Return whether a turn is what a model is to say."""
    return bool(turn["role"] == "assistant" and turn.get("weight", 1))
