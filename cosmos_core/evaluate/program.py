"""Worker program of stage kind `evaluate`: benchmarks of a language model, or prompt sets of a diffusion model."""

import importlib
from typing import Any

from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome


def check(stage: Stage) -> Outcome:
    """Check that the `evaluate` stage can be run. The key `found` of the outcome's `info` describes the model and its
    benchmarks or prompt sets in one line."""
    return _import_program(stage).check(stage)


def run(stage: Stage) -> Outcome:
    """Evaluate the stage's model. Return the metrics `evaluation/TASK/METRIC` of a language model, or
    `evaluation/PROMPT_SET/REWARD` of a diffusion model."""
    return _import_program(stage).run(stage)


def _import_program(stage: Stage) -> Any:
    # Import one program only, so that lm-eval and diffusers are imported only where they are needed.
    return importlib.import_module(f"cosmos_core.evaluate.{stage.recipe.policy.modality.name}")
