"""The choice between answer tags is the reference's."""

from __future__ import annotations

import re

from cosmos_core.rewards.base import require_reference

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def single_choice(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the first `<answer>..</answer>` of both is equal, blanks and case aside, else 0.

    A text without the tags counts as a whole. Unlike in Cosmos-RL an empty reference is invalid, not a match for an
    empty answer.
    """
    return float(_choice(to_be_evaluated) == require_reference(_choice(reference)))


def _choice(text: str) -> str:
    match = _ANSWER.search(text)
    return (match.group(1) if match else text).strip().lower()
