"""A user's reward: more for more different characters."""


def variety(completion: str, reference: str) -> tuple[float, dict[str, float]]:
    """Return a reward, and a metric of its own."""
    return len(set(completion)) / 5, {"length": float(len(completion))}
