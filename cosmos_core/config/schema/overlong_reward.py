"""`[train.train_policy.overlong_reward]`: a penalty near the longest completion (DAPO, arXiv 2503.14476)."""

from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import NonNegativeFloat, Tokens


class OverlongRewardConfig(Table):
    """`[train.train_policy.overlong_reward]`: read by the reward `overlong`."""

    buffer_length: Tokens = 4096
    """Length of the ramp before `rollout.max_response_length` over which the penalty grows from 0 to
    `penalty_factor`."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty of a completion of the maximum length."""
