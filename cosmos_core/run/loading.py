"""Build the arguments of `from_pretrained` that load an exported diffusion pipeline.

Loading itself needs diffusers and is in `models/diffusion.py`.
"""

from collections.abc import Mapping
from typing import Any

_ENCODER_NAME_PREFIXES = ("text_encoder", "tokenizer")


def render_pipeline_arguments(model_index: Mapping[str, Any]) -> str:
    """Return the code of the keyword arguments of `DiffusionPipeline.from_pretrained` for an exported model:
    `NAME=None` for each encoder without files. `model_index` is the content of model_index.json."""
    absent_components = [name for name, entry in model_index.items() if entry == [None, None]]
    return "".join(f", {name}=None" for name in absent_components if name.startswith(_ENCODER_NAME_PREFIXES))


def render_extra_packages(model_index: Mapping[str, Any]) -> str:
    """Return a comment with the packages that a pipeline needs besides diffusers; empty if it needs none."""
    if str(model_index.get("_class_name", "")).startswith("Cosmos") and not any(model_index.get("safety_checker", ())):
        return "  # pip install cosmos_guardrail, or give a safety_checker"
    return ""


def draws_videos(model_index: Mapping[str, Any]) -> bool:
    """Return whether a pipeline has a denoiser of video clips, whose class diffusers names `...3DModel`."""
    return any(isinstance(entry, list) and "3DModel" in str(entry[-1:]) for entry in model_index.values())
