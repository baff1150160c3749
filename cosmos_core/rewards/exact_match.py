"""Reward for completions that equal the reference, without surrounding whitespace."""

from cosmos_core.rewards.base import require_reference


def exact_match(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if completion and reference are equal after `strip`, else 0; an empty reference raises `ValueError`."""
    return float(to_be_evaluated.strip() == require_reference(reference))
