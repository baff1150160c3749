"""`[train.train_policy.overlong_reward]`: a penalty near the longest completion (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from typing import Annotated

from cosmos_core.config.schema.table import NonNegativeFloat, Table, Tokens, planned

_OVERLONG = planned("the overlong penalty is not in this version; leave it out")


class OverlongRewardConfig(Table):
    """`[train.train_policy.overlong_reward]`"""

    switch = "enable_overlong_penalty"

    enable_overlong_penalty: Annotated[bool, _OVERLONG] = False
    """Punish long completions."""
    buffer_length: Annotated[Tokens, _OVERLONG] = 4096
    """The ramp before `rollout.max_response_length`."""
    penalty_factor: Annotated[NonNegativeFloat, _OVERLONG] = 1.0
    """Penalty at the limit."""
