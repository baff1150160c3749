"""How anyone loads an exported pipeline: what `from_pretrained` has to be told beside the folder.

Not here: loading it (`models/diffusion.py`), which needs diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENCODERS = ("text_encoder", "tokenizer")


def pipeline_arguments(index: Mapping[str, Any]) -> str:
    """Return what follows the folder in a call of `DiffusionPipeline.from_pretrained`, of its model_index.json:
    diffusers looks for an encoder that the folder has not, unless it is told that there is none."""
    absent = [name for name, entry in index.items() if name.startswith(_ENCODERS) and entry == [None, None]]
    return "".join(f", {name}=None" for name in absent)


def pipeline_needs(index: Mapping[str, Any]) -> str:
    """Return the Python comment about what must be installed to load a pipeline; empty: diffusers alone."""
    is_guarded = str(index.get("_class_name", "")).startswith("Cosmos") and "safety_checker" not in index
    return "  # pip install cosmos_guardrail, or give a safety_checker" if is_guarded else ""
