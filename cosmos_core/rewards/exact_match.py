"""The completion is the reference, blanks around both aside."""

from __future__ import annotations

from cosmos_core.rewards.base import require_reference


def exact_match(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if equal after strip, else 0; an empty reference is invalid."""
    return float(to_be_evaluated.strip() == require_reference(reference))
