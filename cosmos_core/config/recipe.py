"""A recipe: one training, as Cosmos-RL writes it. Cross-field rules between tables live here."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cosmos_core.config.logging import LoggingConfig
from cosmos_core.config.policy import PolicyConfig
from cosmos_core.config.rollout import RolloutConfig
from cosmos_core.config.table import Table
from cosmos_core.config.train import TrainConfig
from cosmos_core.config.train_policy import GrpoConfig
from cosmos_core.config.validation import ValidationConfig


class Recipe(Table):
    """The root of a recipe."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """Optimizer, data, precision, checkpoints."""
    policy: PolicyConfig = PolicyConfig()
    """The model."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out measurement."""
    logging: LoggingConfig = LoggingConfig()
    """Sinks."""
    custom: dict[str, Any] = {}
    """Free table for user code; handed to custom stages and rewards."""


def check_rl(recipe: Recipe) -> None:
    """The rules between tables that hold for reinforcement learning.

    Raises:
        ValueError: one is broken; the message names keys, values and the rule.
    """
    policy = recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)
    batch, group = recipe.train.train_batch_per_replica, recipe.rollout.n_generation
    if group < 2:
        raise ValueError("rollout.n_generation must be at least 2: advantages compare answers of one group")
    if batch % group:
        raise ValueError(
            f"train.train_batch_per_replica = {batch} must be a multiple of rollout.n_generation = {group}"
        )
    optimize = policy.batch_size_per_optimize
    if optimize is not None and batch % optimize:
        raise ValueError(
            f"train.train_batch_per_replica = {batch} must be a multiple of batch_size_per_optimize = {optimize}"
        )
    temperature = recipe.rollout.sampling_config.temperature
    if policy.temperature != temperature:
        raise ValueError(
            f"train.train_policy.temperature = {policy.temperature} must equal rollout.sampling_config.temperature = "
            f"{temperature}: log-probabilities are compared between the two"
        )
    if recipe.rollout.max_response_length >= recipe.policy.model_max_length:
        raise ValueError(
            f"rollout.max_response_length = {recipe.rollout.max_response_length} leaves no room for a prompt in "
            f"policy.model_max_length = {recipe.policy.model_max_length}"
        )
