"""`[train.train_policy.overlong_reward]`: a penalty near the longest completion (DAPO, arXiv 2503.14476)."""

from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import NonNegativeFloat, Tokens


class OverlongRewardConfig(Table):
    """`[train.train_policy.overlong_reward]`: read by the reward `overlong`."""

    buffer_length: Tokens = 4096
    """The ramp before `rollout.max_response_length`."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty at the limit."""
