"""What the commands of one line train: `cosmos sft` and its relatives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Method:
    """One such command."""

    command: str
    rows: Literal["conversations", "pairs", "prompts", "media"]
    """What it learns from; prompts are completed and scored."""
    rates: tuple[float, float, float, float]
    """Learning rates of all weights of a model below 100 million, below a billion and above, and of an adapter."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe that make it this method."""


SFT = Method("sft", "conversations", (1e-3, 2e-5, 1e-5, 1e-4), {"train.train_policy.type": "sft"})
DPO = Method("dpo", "pairs", (1e-4, 1e-6, 1e-6, 1e-5),
             {"train.train_policy.type": "sft", "train.train_policy.trainer_type": "dpo"})  # fmt: skip
GRPO = Method("grpo", "prompts", (3e-4, 1e-6, 1e-6, 1e-5), {"train.train_policy.type": "grpo"})
DIFFUSION_SFT = Method("diffusion-sft", "media", (1e-3, 1e-5, 1e-5, 1e-4),
                       {"policy.is_diffusers": True, "train.train_policy.type": "sft"})  # fmt: skip
METHODS = {method.command: method for method in (SFT, DPO, GRPO, DIFFUSION_SFT)}
