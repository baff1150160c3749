"""`[validation]`: what is measured on held-out rows, and when."""

from __future__ import annotations

from cosmos_core.config.dataset import DatasetConfig
from cosmos_core.config.rewards import RewardWeights
from cosmos_core.config.table import NonNegativeFloat, Nucleus, PositiveFloat, PositiveInt, Table, TopK


class ValidationConfig(Table):
    """`[validation]`"""

    enable: bool = False
    """Measure during training; a stage of kind `validate` measures whether or not this is set."""
    val_before_train: bool = False
    """Also before the first step."""
    freq: PositiveInt = 20
    """Every N optimizer steps (SFT) or train steps (RL)."""
    batch_size: PositiveInt | None = None
    """Rows per forward pass or prompts per generation call; None: as in training."""
    dataset: DatasetConfig = DatasetConfig()
    """Held-out rows; empty name: `test_size` rows of the training data."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Nucleus | None = None
    """None: as in `rollout.sampling_config`."""
    top_k: TopK | None = None
    """None: as in `rollout.sampling_config`."""
    repetition_penalty: PositiveFloat = 1.0
    """1: off."""
    n_generation: PositiveInt = 1
    """Completions per prompt; accuracy is averaged over them."""
    max_response_length: PositiveInt | None = None
    """None: as in `rollout`."""
    reward_function: RewardWeights = {}
    """Empty: the rewards of training."""
