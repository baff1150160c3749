"""`[train.train_policy.remote_reward]` and `[validation.remote_reward]`: scores from a reward service."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.table import LATER, Completions, Table, planned

_REMOTE = planned("the reward service is not in this version; use reward_function")


class RewardFunctionConfig(Table):
    """`[[...remote_reward.reward_fns]]`: one function of the service."""

    name: Annotated[str, Field(min_length=1), _REMOTE, LATER]
    """What the service calls it."""
    weight: Annotated[float, _REMOTE, LATER] = 1.0
    """In the sum."""
    score_key: Annotated[str | None, _REMOTE, LATER] = None
    """Key among the returned scores, `a+b` for a sum of keys; None: `name`."""
    clip_min: Annotated[float, _REMOTE, LATER] = -5.0
    """Lowest score."""
    clip_max: Annotated[float, _REMOTE, LATER] = 5.0
    """Highest score."""

    @field_validator("score_key")
    @classmethod
    def _key_is_the_name(cls, key: str | None, info: ValidationInfo) -> str | None:
        return info.data.get("name") if key is None else key

    @model_validator(mode="after")
    def _range(self) -> RewardFunctionConfig:
        if self.clip_min > self.clip_max:
            raise ValueError(f"clip_min = {self.clip_min} must not be above clip_max = {self.clip_max}")
        return self


class RemoteRewardConfig(Table):
    """`[...remote_reward]`"""

    scale: Annotated[float, _REMOTE, LATER] = 1.0
    """Multiplies the clipped sum."""
    reward_fns: Annotated[tuple[RewardFunctionConfig, ...], Field(strict=False), _REMOTE, LATER] = (
        RewardFunctionConfig(name="dance_grpo", score_key="overall_reward"),
    )
    """Functions that are asked for."""
    reward_clip_min: Annotated[float, _REMOTE, LATER] = -5.0
    """Lowest weighted sum."""
    reward_clip_max: Annotated[float, _REMOTE, LATER] = 5.0
    """Highest weighted sum."""
    batch_size: Annotated[Completions, _REMOTE, LATER] = 1
    """Completions per request."""

    @model_validator(mode="after")
    def _range(self) -> RemoteRewardConfig:
        if self.reward_clip_min > self.reward_clip_max:
            raise ValueError(
                f"reward_clip_min = {self.reward_clip_min} must not be above reward_clip_max = {self.reward_clip_max}"
            )
        return self
