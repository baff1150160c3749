"""Penalty for completions that come near the length limit (DAPO, arXiv 2503.14476)."""

from collections.abc import Mapping
from typing import Any


def overlong(
    to_be_evaluated: str, reference: str, num_tokens: int, max_tokens: int, overlong: Mapping[str, Any]
) -> float:
    """Return the penalty of a completion: 0 up to `max_tokens - buffer_length` sampled tokens, then a value that falls
    linearly to -`penalty_factor` at `max_tokens`. The table `overlong` has both settings. Cosmos-RL has no lower bound:
    there, a completion beyond `max_tokens` has a larger penalty."""
    buffer_length = min(overlong["buffer_length"], max_tokens)
    num_excess_tokens = num_tokens - (max_tokens - buffer_length)
    return -overlong["penalty_factor"] * min(1.0, max(0.0, num_excess_tokens / buffer_length))
