"""Build the arguments of `from_pretrained` that load an exported diffusion pipeline.

Loading itself needs diffusers and is in `models/diffusion.py`.
"""

from collections.abc import Mapping
from typing import Any

_ENCODER_PREFIXES = ("text_encoder", "tokenizer")


def pipeline_arguments(index: Mapping[str, Any]) -> str:
    """Return the arguments after the folder in a call of `DiffusionPipeline.from_pretrained`, for a pipeline with the
    content `index` of model_index.json. An encoder that the pipeline lacks is set to None, since diffusers looks for
    its files otherwise."""
    absent_encoders = [
        name for name, entry in index.items() if name.startswith(_ENCODER_PREFIXES) and entry == [None, None]
    ]
    return "".join(f", {name}=None" for name in absent_encoders)


def pipeline_needs(index: Mapping[str, Any]) -> str:
    """Return a Python comment that names the packages to install before loading a pipeline; empty if diffusers is
    enough."""
    is_guarded = str(index.get("_class_name", "")).startswith("Cosmos") and not any(index.get("safety_checker", ()))
    return "  # pip install cosmos_guardrail, or give a safety_checker" if is_guarded else ""
