"""What the commands of one line train: `cosmos sft` and its relatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Method:
    """One such command."""

    command: str
    rows: str
    """The kind of rows that it learns from: the name of a file of `cosmos_core/data/kinds/`."""
    rates: tuple[float, float, float, float]
    """Learning rates of all weights of a model below 100 million, below a billion and above, and of an adapter."""
    needs_reward: bool = False
    """Whether it asks for a reward function."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe that make it this method."""


SFT = Method("sft", "sequences", (1e-3, 2e-5, 1e-5, 1e-4), settings={"train.train_policy.type": "sft"})
DPO = Method("dpo", "pairs", (1e-4, 1e-6, 1e-6, 1e-5),
             settings={"train.train_policy.type": "sft", "train.train_policy.trainer_type": "dpo"})  # fmt: skip
GRPO = Method("grpo", "prompts", (3e-4, 1e-6, 1e-6, 1e-5), needs_reward=True,
              settings={"train.train_policy.type": "grpo"})  # fmt: skip
DIFFUSION_SFT = Method("diffusion-sft", "media", (1e-3, 1e-5, 1e-5, 1e-4),
                       settings={"policy.is_diffusers": True, "train.train_policy.type": "sft"})  # fmt: skip
METHODS = {method.command: method for method in (SFT, DPO, GRPO, DIFFUSION_SFT)}
