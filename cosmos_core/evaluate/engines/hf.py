"""Engine that runs benchmarks with transformers, like `lm_eval --model hf`."""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from cosmos_core.run.stage import Stage


def open_model(stage: Stage) -> Any:
    """Return lm-eval's model object for the stage's model."""
    settings = stage.recipe.evaluate
    return HFLM(
        pretrained=stage.model,
        revision=stage.recipe.policy.model_revision or "main",
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=settings.batch_size or 1,
        max_length=settings.max_length,
    )
