"""A reward that a model without training gets too, light to import."""


def variety(completion: str, reference: str) -> float:
    """More for more different characters."""
    return len(set(completion)) / 5
