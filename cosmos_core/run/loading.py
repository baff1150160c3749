"""Build the arguments of `from_pretrained` that load an exported diffusion pipeline.

Loading itself needs diffusers and is in `models/diffusion.py`.
"""

from collections.abc import Mapping
from typing import Any

_ENCODER_PREFIXES = ("text_encoder", "tokenizer")


def pipeline_arguments(index: Mapping[str, Any]) -> str:
    """Return the arguments after the folder in a call of `DiffusionPipeline.from_pretrained`, for the content `index`
    of model_index.json: None for an encoder that is absent, whose files diffusers looks for otherwise."""
    absent_parts = [name for name, entry in index.items() if entry == [None, None]]
    return "".join(f", {name}=None" for name in absent_parts if name.startswith(_ENCODER_PREFIXES))


def pipeline_needs(index: Mapping[str, Any]) -> str:
    """Return a comment with the packages that a pipeline needs besides diffusers; empty if it needs none."""
    is_guarded = str(index.get("_class_name", "")).startswith("Cosmos") and not any(index.get("safety_checker", ()))
    return "  # pip install cosmos_guardrail, or give a safety_checker" if is_guarded else ""
