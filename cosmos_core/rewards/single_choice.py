"""Reward for completions whose choice between answer tags equals that of the reference."""

import re

from cosmos_core.rewards.base import require_reference

_ANSWER_PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def single_choice(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the first `<answer>..</answer>` of both texts is equal without whitespace and case, else 0.

    A text without the tags is compared as a whole. Unlike in Cosmos-RL, an empty reference is invalid and does not
    match an empty answer.
    """
    return float(_extract_choice(to_be_evaluated) == require_reference(_extract_choice(reference)))


def _extract_choice(text: str) -> str:
    match = _ANSWER_PATTERN.search(text)
    return (match.group(1) if match else text).strip().lower()
