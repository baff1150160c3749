"""Training methods of the commands that need no recipe, `cosmos sft`, `cosmos dpo` and others."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainingMethod:
    """Training method of a command such as `cosmos sft`: its rows, learning rates and recipe keys."""

    command: str
    rows: str
    """Kind of rows that the method learns from: the name of a file of `cosmos_core/data/kinds/`."""
    learning_rates: tuple[float, float, float, float]
    """Default learning rates: for a model below 100 million parameters, below a billion, above, and a LoRA adapter."""
    needs_reward: bool = False
    """Whether the command requires a reward function."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Recipe keys with the values that select this method."""


SFT = TrainingMethod("sft", "sequences", (1e-3, 2e-5, 1e-5, 1e-4), settings={"train.train_policy.type": "sft"})
DPO = TrainingMethod("dpo", "pairs", (1e-4, 1e-6, 1e-6, 1e-5),
             settings={"train.train_policy.type": "sft", "train.train_policy.trainer_type": "dpo"})  # fmt: skip
GRPO = TrainingMethod("grpo", "prompts", (3e-4, 1e-6, 1e-6, 1e-5), needs_reward=True,
              settings={"train.train_policy.type": "grpo"})  # fmt: skip
DIFFUSION_SFT = TrainingMethod("diffusion-sft", "media", (1e-3, 1e-5, 1e-5, 1e-4),
                       settings={"policy.is_diffusers": True, "train.train_policy.type": "sft"})  # fmt: skip
TRAINING_METHODS = {method.command: method for method in (SFT, DPO, GRPO, DIFFUSION_SFT)}
