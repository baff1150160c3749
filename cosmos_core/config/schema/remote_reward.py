"""`[train.train_policy.remote_reward]`: requests to a reward service, and the rewards computed from its scores."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from cosmos_core.config.schema.field_metadata import FieldUnit, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import Table, bounds_validator
from cosmos_core.config.schema.value_types import CompletionCount


class RewardFunctionConfig(Table):
    """`[[...remote_reward.reward_fns]]`: settings of one reward function of the reward service."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the reward function in the reward service."""
    weight: float = 1.0
    """Weight of the function's score in the total reward."""
    score_key: str | None = None
    """Key of the function's score in the service's response, `a+b` for a sum of two keys; None: `name`."""
    clip_min: float = -5.0
    """Lower bound to which the function's score is clipped."""
    clip_max: float = 5.0
    """Upper bound to which the function's score is clipped."""

    @field_validator("score_key")
    @classmethod
    def _default_score_key(cls, score_key: str | None, info: ValidationInfo) -> str | None:
        return info.data.get("name") if score_key is None else score_key

    _check_clip_bounds = bounds_validator("clip_min", "clip_max")

    def clip_score(self, score: float) -> float:
        """Return a score clipped to `clip_min` and `clip_max`."""
        return min(max(score, self.clip_min), self.clip_max)


class RemoteRewardConfig(Table):
    """`[...remote_reward]`: settings of requests to a reward service."""

    scale: float = 1.0
    """Factor by which the total reward is multiplied after the total is clipped."""
    reward_fns: Annotated[tuple[RewardFunctionConfig, ...], Field(strict=False)] = (
        RewardFunctionConfig(name="dance_grpo", score_key="overall_reward"),
    )
    """Reward functions that the service computes."""
    reward_clip_min: float = -5.0
    """Lower bound to which the weighted sum of the scores is clipped."""
    reward_clip_max: float = 5.0
    """Upper bound to which the weighted sum of the scores is clipped."""
    batch_size: CompletionCount = 1
    """Number of completions per request to the reward service."""
    timeout_seconds: Annotated[PositiveFloat, FieldUnit("seconds")] = 600.0
    """Time limit of a score in seconds, after which the score counts as missing."""
    max_in_flight: Annotated[PositiveInt, FieldUnit("requests"), ResultNeutral] = 64
    """Maximum number of requests that wait for their scores at a time."""
    missing_score: Literal["retry", "drop_group", "fail"] = "retry"
    """Behaviour for a missing score: request the scores again, up to `retries` times, and then drop the groups; drop
    the groups at once; or fail the stage. A missing score is never treated as 0."""
    retries: NonNegativeInt = 2
    """With missing_score = 'retry': maximum number of times that completions without a score are sent again."""
    video_vae: Annotated[str, ReferenceKind.PATH] = ""
    """Wan VAE (a folder or Hub id in the format of diffusers, or the file Wan2.1_VAE.pth) that encodes videos into
    latents before they are sent, as Cosmos-RL's client does and its service requires; empty: pixels are sent."""

    @field_validator("reward_fns")
    @classmethod
    def _check_repeated_functions(cls, functions: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        if not functions:
            raise ValueError("reward_fns is empty; name at least one function of the service")
        name_key_pairs = [(function.name, function.score_key) for function in functions]
        if repeated_name := next((name for name, key in name_key_pairs if name_key_pairs.count((name, key)) > 1), None):
            raise ValueError(f"reward_fns has {repeated_name!r} twice with the same score_key; name it once")
        return functions

    _check_reward_bounds = bounds_validator("reward_clip_min", "reward_clip_max")

    @property
    def metric_names(self) -> dict[RewardFunctionConfig, str]:
        """Return the metric name of each reward function: its `name`, or `name/score_key` if several have that name."""
        num_functions_by_name = Counter(reward_function.name for reward_function in self.reward_fns)
        return {f: f.name if num_functions_by_name[f.name] == 1 else f"{f.name}/{f.score_key}" for f in self.reward_fns}

    def compute_full_reward(self, metrics: Mapping[str, float]) -> float | None:
        """Return the total reward of a completion if every reward function of positive weight returned 1; functions of
        negative weight contribute the completion's scores in `metrics`. None if no function has a positive weight."""
        if all(function.weight <= 0 for function in self.reward_fns):
            return None
        weighted_sum = sum(
            function.weight * (function.clip_score(1.0) if function.weight > 0 else metrics.get(metric_name, 0.0))
            for function, metric_name in self.metric_names.items()
        )
        return self.scale * min(max(weighted_sum, self.reward_clip_min), self.reward_clip_max)
