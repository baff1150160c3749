"""Reward for completions whose text between `<answer>` tags equals the text between the tags of the reference."""

import re

from cosmos_core.rewards.base import require_reference

_ANSWER_PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def single_choice(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if both texts have the same content in their first `<answer>..</answer>`, else 0. Case and surrounding
    whitespace are ignored. A text without the tags is compared as a whole. An empty reference raises `ValueError`,
    whereas in Cosmos-RL it matches an empty answer."""
    return float(_extract_choice(to_be_evaluated) == require_reference(_extract_choice(reference)))


def _extract_choice(text: str) -> str:
    answer_match = _ANSWER_PATTERN.search(text)
    return (answer_match.group(1) if answer_match else text).strip().lower()
