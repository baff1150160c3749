"""`[train.train_policy]` with `type = "grpo"`: what learning from scored rollouts has, whatever the loss."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.algorithm import AlgorithmConfig, RowKind
from cosmos_core.config.schema.overlong_reward import OverlongRewardConfig
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.rewards import RewardWeights
from cosmos_core.config.schema.table import (
    LATER,
    OURS,
    Completions,
    Names,
    Needs,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tokens,
    Unit,
    no_effect,
    planned,
    say,
)

_IN_TURN = no_effect("generation and training take turns here, so every rollout is made with the newest weights")
_ALWAYS = no_effect("rollouts always carry token ids and their log-probabilities")
_DYNAMIC = planned("dynamic sampling is not in this version; leave it out")
DAPO_FETCH = 128


class RlConfig(AlgorithmConfig):
    """What the algorithms that sample groups of completions and score them share."""

    rows: ClassVar[RowKind] = "prompts"

    type: Literal["grpo"] = "grpo"
    """Which kind of training."""
    mini_batch: Completions = 2
    """Completions per forward pass; changes speed and memory, not results."""
    prompt_column_name: str = ""
    """Column of the prompt, a string or a conversation; empty: the first found of prompt, question, problem,
    conversations, messages."""
    response_column_name: str = ""
    """Column of the reference answer; empty: the first found of answer, response, solution, result."""
    system_prompt: Annotated[str, OURS] = ""
    """Put before every prompt; empty: none."""
    reward_function: RewardWeights = Field(default={"single_choice": 1.0})
    """Reward name, list of names, or names with weights; a user's own is `module:function` or
    `path/file.py:function`."""
    reward_timeout_seconds: Annotated[PositiveFloat, Unit("seconds"), OURS] = 10.0
    """A reward that takes longer is killed and its completion counts as invalid."""
    use_remote_reward: Annotated[
        bool, planned("the reward service is not in this version; use reward_function"), LATER
    ] = False
    """Ask the reward service in place of `reward_function`."""
    remote_reward: Annotated[RemoteRewardConfig, Needs("use_remote_reward")] = RemoteRewardConfig()
    """What is asked of it."""
    filter_reward_metric: Annotated[Names, _DYNAMIC, LATER] = ()
    """Metrics that must differ inside a group for it to be trained on; empty: all groups are."""
    bypass_reward: Annotated[bool, planned("rewards cannot be left out in this version; leave it out"), LATER] = False
    """Every reward is 0."""
    group_reward_calculation: Annotated[
        bool, planned("rewards are called once a completion in this version; leave it out"), LATER
    ] = False
    """Call rewards once a group, with lists."""
    overlong_reward: OverlongRewardConfig = OverlongRewardConfig()
    """Penalty for long answers."""
    allowed_outdated_steps: Annotated[NonNegativeInt, Unit("train steps"), _IN_TURN] = 4
    """How many steps old the weights of a rollout may be."""
    on_policy: Annotated[bool, _IN_TURN] = False
    """Train only on rollouts of the newest weights."""
    uncentralized_training: Annotated[bool, _IN_TURN, LATER] = False
    """Rollouts go straight to the trainer."""
    outdated_rollout_fetch_batch_size: Annotated[int, Unit("prompts"), _IN_TURN, LATER] = 0
    """Prompts that are still handed out while generation waits; 0: none (DAPO: 128)."""
    max_inflight_steps: Annotated[int | None, Unit("train steps"), _IN_TURN, LATER] = None
    """Most waiting rollouts, in train steps; None: unlimited."""
    max_retry_for_on_policy: Annotated[int, _DYNAMIC, LATER] = -1
    """Most extra rounds of sampling; 0 or less: unlimited."""
    balance_dp_token: Annotated[
        bool, no_effect("losses are always divided by the tokens of all ranks together"), LATER
    ] = False
    """Divide by the tokens of all data-parallel ranks."""
    variant: Annotated[
        Literal["grpo", "dapo", "gspo"], planned("this version has the variant 'grpo' alone; leave it out")
    ] = "grpo"
    """Loss family."""
    temperature: PositiveFloat = 1.0
    """Divides the trainer's logits before log-softmax; should equal the sampling temperature."""
    rollout_as_token_ids: Annotated[bool, _ALWAYS, LATER] = False
    """Hand over token ids in place of text."""
    collect_rollout_logprobs: Annotated[bool, _ALWAYS, LATER] = False
    """Hand over the log-probabilities of sampled tokens."""
    batch_size_per_optimize: Annotated[Completions | None, LATER] = None
    """Completions per optimizer step inside a train step; None: all."""
    mu_iterations: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes over each batch of rollouts."""
    max_token_len_per_mini_batch: Annotated[
        Tokens | None, planned("micro-batches hold mini_batch completions in this version; leave it out"), LATER
    ] = None
    """Token budget of a micro-batch; None: `mini_batch` completions."""

    @property
    def rewards(self) -> dict[str, float]:
        """See `AlgorithmConfig.rewards`."""
        return self.reward_function

    @property
    def reward_seconds(self) -> float:
        """See `AlgorithmConfig.reward_seconds`."""
        return self.reward_timeout_seconds

    @field_validator("reward_function")
    @classmethod
    def _some_reward(cls, rewards: dict[str, float]) -> dict[str, float]:
        if not rewards:
            raise ValueError("reward_function is empty; name at least one reward")
        return rewards

    @model_validator(mode="after")
    def _loaders(self) -> RlConfig:
        if self.dataloader_num_workers <= 0:
            self.settle(dataloader_num_workers=0, dataloader_prefetch_factor=None)
        if self.dataloader_batch_size < 0:
            self.settle(dataloader_batch_size=0)
        return self

    @model_validator(mode="after")
    def _staleness(self, info: ValidationInfo) -> RlConfig:
        if self.uncentralized_training and self.variant != "grpo":
            raise ValueError(f"uncentralized_training needs variant = 'grpo', not {self.variant!r}")
        if self.variant == "dapo" and self.outdated_rollout_fetch_batch_size <= 0:
            self.settle(outdated_rollout_fetch_batch_size=DAPO_FETCH)
        if self.on_policy and self.allowed_outdated_steps:
            if "allowed_outdated_steps" in self.model_fields_set:
                say(info, f"train.train_policy.allowed_outdated_steps = {self.allowed_outdated_steps}: 0, because "
                    f"on_policy is set")  # fmt: skip
            self.settle(allowed_outdated_steps=0)
        least = self.allowed_outdated_steps + 1
        if self.max_inflight_steps is not None and self.max_inflight_steps < least:
            say(info, f"train.train_policy.max_inflight_steps = {self.max_inflight_steps}: {least}, which is "
                f"allowed_outdated_steps + 1")  # fmt: skip
            self.settle(max_inflight_steps=least)
        return self
