"""The number after `#### ` is the reference's, as in the GSM8K data set."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the first `#### number` of both is the same string, thousands separators aside, else 0.

    Unlike in Cosmos-RL a reference without `#### number` is invalid; there, a completion without one would be right.
    """
    expected = _number(reference)
    if expected is None:
        raise ValueError(f"the reference {reference[-80:]!r} has no '#### number'")
    return float(_number(to_be_evaluated) == expected)


def _number(text: str) -> str | None:
    match = _NUMBER.search(text)
    number = match.group(1).replace(",", "") if match else ""
    return number if any(character.isdigit() for character in number) else None
