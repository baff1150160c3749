"""`[train.train_policy]`: supervised fine-tuning (`type = "sft"`) or group-relative policy optimisation (`type =
"grpo"`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cosmos_core.config.dataset import DatasetConfig
from cosmos_core.config.rewards import RewardWeights
from cosmos_core.config.table import NonNegativeFloat, NonNegativeInt, NoResult, PositiveFloat, PositiveInt, Table


class SFTDataConfig(Table):
    """`type = "sft"`: learn the assistant's turns of conversations, or all of plain text."""

    type: Literal["sft"]
    """Which kind of training."""
    dataset: DatasetConfig = DatasetConfig()
    """Rows to learn."""
    conversation_column_name: str = "conversations"
    """Column of the conversation; rows without it may have `messages`, `conversation`, `text` or `prompt` +
    `response`."""
    system_prompt: str = ""
    """Put before conversations that have no system turn; empty: none."""
    mini_batch: PositiveInt = 2
    """Rows per forward pass; changes speed and memory, not results."""
    dataloader_shuffle: bool = True
    """Another order each epoch; False: the order of the file."""
    dataloader_seed: int = 0
    """Seed of that order."""
    dataloader_num_workers: Annotated[NonNegativeInt, NoResult] = 0
    """Processes that tokenise in the `prepare` stage; 0: one."""


class GrpoConfig(Table):
    """`type = "grpo"`: sample groups of answers, score them, learn from their differences (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """Which kind of training."""
    variant: Literal["grpo"] = "grpo"
    """Loss family."""
    dataset: DatasetConfig = DatasetConfig()
    """Prompts."""
    dataloader_shuffle: bool = True
    """Another order each epoch; False: the order of the file."""
    dataloader_seed: int = 0
    """Seed of that order."""
    prompt_column_name: str = ""
    """Column of the prompt, a string or a conversation; empty: the first found of prompt, question, problem,
    conversations, messages."""
    response_column_name: str = ""
    """Column of the reference answer; empty: the first found of answer, response, solution, result."""
    system_prompt: str = ""
    """Put before every prompt; empty: none."""
    reward_function: RewardWeights = Field(default={"single_choice": 1.0})
    """Reward name, list of names, or names with weights; a user's own is `module:function` or
    `path/file.py:function`."""
    reward_timeout_seconds: PositiveFloat = 10.0
    """A reward that takes longer is killed and its completion counts as invalid."""
    temperature: PositiveFloat = 1.0
    """Divides the trainer's logits before log-softmax; must equal the sampling temperature."""
    epsilon_low: float = 0.2
    """Ratios are clipped below at 1 - this; negative: no lower clip."""
    epsilon_high: float = 0.2
    """Ratios are clipped above at 1 + this (clip-higher: 0.28); negative: no upper clip."""
    lower_bound_ratio: float = 3.0
    """Dual clip: the loss of a negative advantage A is at most -A times this (arXiv 1912.09729)."""
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses are averaged over the optimizer step."""
    unbiased_loss_max_tokens: PositiveInt | None = None
    """With `seq-mean-token-mean`: divide by this constant instead of the length (Dr. GRPO, arXiv 2503.20783); None:
    by the length."""
    unbiased_advantage: bool = False
    """True: subtract the group's mean only, do not divide by its standard deviation (Dr. GRPO)."""
    positive_nll_coef: NonNegativeFloat | None = None
    """Weight of an extra log-likelihood term on answers with a positive reward; None: off."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the model that the stage started from; 0: no reference model is held."""
    unbiased_kl_estimate: bool = False
    """Multiply the k3 estimator by the ratio, which makes its gradient that of the reverse KL (arXiv 2512.02556)."""
    mu_iterations: PositiveInt = 1
    """Passes over each batch of rollouts."""
    mini_batch: PositiveInt = 2
    """Completions per forward pass; changes speed and memory, not results."""
    batch_size_per_optimize: PositiveInt | None = None
    """Completions per optimizer step inside a train step; None: all."""

    @field_validator("reward_function")
    @classmethod
    def _some_reward(cls, rewards: dict[str, float]) -> dict[str, float]:
        if not rewards:
            raise ValueError("reward_function is empty; name at least one reward")
        return rewards

    @field_validator("lower_bound_ratio")
    @classmethod
    def _dual_clip_above_one(cls, ratio: float) -> float:
        if ratio <= 1:
            raise ValueError(f"lower_bound_ratio = {ratio} must be greater than 1")
        return ratio

    @model_validator(mode="after")
    def _optimizer_batch(self) -> GrpoConfig:
        size = self.batch_size_per_optimize
        if size is not None and size % self.mini_batch:
            raise ValueError(f"batch_size_per_optimize = {size} must be a multiple of mini_batch = {self.mini_batch}")
        if self.unbiased_loss_max_tokens is not None and self.loss_type != "seq-mean-token-mean":
            raise ValueError("unbiased_loss_max_tokens has a meaning only with loss_type = 'seq-mean-token-mean'")
        return self
