"""Reward for completions whose number after `####` equals the reference's number, as in the GSM8K data set."""

import re
from decimal import Decimal

_NUMBER_PATTERN = re.compile(r"####[\s*\\$]*([-+]?)[\\$]*(\d[\d,]*(?:\.\d+)?|\.\d+)")


def gsm8k(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the last `#### number` of both texts is the same number, else 0; `####42`, `#### $42.` are 42.

    A reference without `#### number` is invalid; in Cosmos-RL, a completion without a number then counts as right.
    """
    reference_number = _extract_number(reference)
    if reference_number is None:
        raise ValueError(f"the reference {reference[-80:]!r} has no '#### number'")
    return float(_extract_number(to_be_evaluated) == reference_number)


def _extract_number(text: str) -> Decimal | None:
    numbers = _NUMBER_PATTERN.findall(text)
    return Decimal("".join(numbers[-1]).replace(",", "")) if numbers else None
