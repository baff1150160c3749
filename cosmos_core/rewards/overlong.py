"""A penalty for completions that come near the limit of their length (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def overlong(
    to_be_evaluated: str, reference: str, num_tokens: int, max_tokens: int, overlong: Mapping[str, Any]
) -> float:
    """Return 0 up to `max_tokens - buffer_length` sampled tokens, from there on a ramp down to -`penalty_factor`.

    Cosmos-RL's has no lower bound: a completion beyond the limit would lose more.
    """
    buffer = min(overlong["buffer_length"], max_tokens)
    excess = num_tokens - (max_tokens - buffer)
    return -overlong["penalty_factor"] * min(1.0, max(0.0, excess / buffer))
