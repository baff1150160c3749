"""`[train.train_policy]` with `type = "grpo"`: keys of algorithms that learn from scored rollouts, with any loss."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cosmos_core.config.schema.algorithm import DEFAULT_MINI_BATCH, AlgorithmConfig
from cosmos_core.config.schema.dataset import reasoning_gym_generator
from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, ResultNeutral
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.table import StageContext, Table, add_notice
from cosmos_core.config.schema.value_types import Auto, CompletionCount, RewardWeights, StringOrList, TokenCount
from cosmos_core.config.source_weights import RewardWeightsBySource

_DAPO_MAX_EXTRA_PROMPTS = 128
REASONING_GYM_REWARD = "reasoning_gym"
"""Name of the reward function that scores rows of a generator of `reasoning-gym` unless the recipe sets another."""


def _is_generated_dataset(dataset: Any) -> bool:
    """Return whether `dataset`, a TOML table or a `DatasetConfig`, names a row generator of the package
    `reasoning-gym`."""
    name = dataset.get("name") if isinstance(dataset, dict) else getattr(dataset, "name", "")
    return bool(reasoning_gym_generator(str(name or "")))


class OverlongRewardConfig(Table):
    """`[train.train_policy.overlong_reward]`: settings of the reward `overlong`."""

    buffer_length: TokenCount = 4096
    """Length of the ramp below `rollout.max_response_length` in which the penalty grows from 0 to `penalty_factor`."""
    penalty_factor: NonNegativeFloat = 1.0
    """Penalty of a completion of the maximum length."""


class RlConfig(AlgorithmConfig):
    """Keys of all algorithms that sample and score groups of completions."""

    rows: ClassVar[str] = "prompts"
    has_rollouts: ClassVar[bool] = True

    type: Literal["grpo"] = "grpo"
    """Kind of training: reinforcement learning from scored rollouts."""
    variant: Literal["grpo", "dapo", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl"] = "grpo"
    """Variant of the policy loss: clipped for each token (`grpo`; `dapo` also drops groups without a difference and
    samples replacements, arXiv 2503.14476), clipped for each sequence (`gspo`, 2507.18071), with a capped weight that
    never removes a token's gradient (`cispo`, 2506.13585), weighted by a gate that closes gradually (`sapo`,
    2511.20347), or without the tokens whose total variation or KL divergence is too large (`dppo_tv`, `dppo_kl`,
    2602.04879)."""
    mini_batch: CompletionCount | Auto = DEFAULT_MINI_BATCH
    """Number of completions per forward pass; changes speed and memory, not results. On a CPU a forward pass may have
    more completions of a long prompt, which is then run only once, but not more tokens. `auto`: the fastest number that
    fits into memory, measured in at most a minute in the first train step whose loss includes at least half of the
    completions."""
    prompt_column_name: str = ""
    """Column of the prompt, a string or a conversation; empty: the first filled column of those in
    docs/reference/columns.md."""
    response_column_name: str = ""
    """Column of the reference response; empty: the first filled column of those in docs/reference/columns.md."""
    system_prompt: str = ""
    """System prompt for prompts without a system turn and without a column `system`; empty: no system prompt."""
    reward_function: RewardWeights = Field(default={"single_choice": 1.0})
    """Reward functions: one name, a list of names, or names with weights; user code is `module:function` or
    `path/file.py:function`. If the key is left out and `dataset` is a generator of `reasoning-gym`: `reasoning_gym`,
    the generator's own scoring."""
    reward_timeout_seconds: Annotated[PositiveFloat, FieldUnit("seconds")] = 10.0
    """Time limit of one call of a reward function, after which the call is killed; the reward of the completion is then
    invalid."""
    reward_env: Annotated[StringOrList, ResultNeutral] = ()
    """Names of environment variables that reward functions receive, such as the key of a service, in addition to those
    that every subprocess receives, such as PATH; their values are masked in logs."""
    use_remote_reward: bool = False
    """Take rewards from a reward service in place of `reward_function`."""
    remote_reward: Annotated[RemoteRewardConfig, EnabledBy("use_remote_reward")] = RemoteRewardConfig()
    """Settings of requests to the reward service."""
    filter_reward_metric: StringOrList = ()
    """With variant = 'dapo': reward metrics that must differ within a group for it to be trained on; the total reward
    if empty, or if the group's rewards report none of them. A reward of weight 0 can serve this purpose alone."""
    bypass_reward: bool = False
    """Set every reward to 0 without a call of a reward function."""
    group_reward_calculation: bool = False
    """Call a user's reward functions once for all completions of a prompt, with lists, also in validation; built-in
    reward functions score each completion separately. If a call fails or times out, all its completions are invalid."""
    overlong_reward: OverlongRewardConfig = OverlongRewardConfig()
    """Settings of the reward `overlong`, a penalty for long completions."""
    on_policy: bool = False
    """With mode = 'disaggregated': train only on rollouts of the newest weights, as with `allowed_outdated_steps` = 0;
    engines and trainer then alternate."""
    allowed_outdated_steps: Annotated[NonNegativeInt, FieldUnit("train steps")] = 4
    """With mode = 'disaggregated': maximum age, in train steps, of the weights that sampled a rollout when it is
    trained on; engines generate this many steps ahead."""
    uncentralized_training: bool = False
    """Send rollouts directly to the trainer rather than through Cosmos-RL's controller."""
    outdated_rollout_fetch_batch_size: Annotated[int, FieldUnit("prompts")] = 0
    """With mode = 'disaggregated': number of prompts that engines receive in addition to those of
    `allowed_outdated_steps`; 0: none. A group that is too old at its train step is generated again and counted
    (`rollout/outdated`). With DAPO the number is that of the groups dropped in recent steps, and this key is its
    maximum (0: 128)."""
    max_inflight_steps: Annotated[int | None, FieldUnit("train steps")] = None
    """Maximum number of train steps whose prompts are in flight or waiting; None: unlimited."""
    max_retry_for_on_policy: int = -1
    """With variant = 'dapo': maximum number of additional rounds of sampling in a train step. A step whose groups are
    all dropped learns nothing, and the first step fails. 0 or less: until the prompts are used up."""
    temperature: PositiveFloat = 1.0
    """Temperature by which the trainer divides logits before log-softmax; should equal the sampling temperature."""
    rollout_as_token_ids: bool = False
    """Pass the token ids of completions to the trainer in place of text."""
    collect_rollout_logprobs: bool = False
    """Pass the engine's log-probabilities of the sampled tokens to the trainer."""
    batch_size_per_optimize: CompletionCount | None = None
    """Maximum number of completions of an optimizer step; the completions of a train step are distributed evenly over
    as few optimizer steps as this allows. None: one optimizer step for all."""
    mu_iterations: Annotated[PositiveInt, FieldUnit("passes")] = 1
    """Number of passes over each batch of rollouts."""
    max_token_len_per_mini_batch: TokenCount | None = None
    """Maximum number of tokens of a micro-batch, padding included, in place of `mini_batch`; None: `mini_batch`
    completions. Changes speed and memory, not results."""

    @property
    def rewards(self) -> dict[str, float]:
        if self.bypass_reward or self.use_remote_reward or not self.datasets:
            return {} if self.bypass_reward or self.use_remote_reward else self.reward_function
        datasets_and_tables = zip(self.datasets, self.tables_by_dataset.values(), strict=True)
        weights_by_label = {each.label: table.reward_function for each, table in datasets_and_tables}
        return RewardWeightsBySource({"": self.reward_function} | weights_by_label)

    @property
    def validation_rewards(self) -> dict[str, float]:
        """Return the reward functions of validation; with `bypass_reward`, only those that the recipe sets."""
        return self.reward_function if self.bypass_reward else self.rewards

    @property
    def remote_reward_config(self) -> RemoteRewardConfig | None:
        return self.remote_reward if self.use_remote_reward and not self.bypass_reward else None

    @property
    def dynamic_sampling(self) -> tuple[Sequence[str], int] | None:
        # If `bypass_reward` sets all rewards to 0, do not sample groups again, because the filter would keep no group.
        if self.variant != "dapo" or self.bypass_reward:
            return None
        return self.filter_reward_metric, max(0, self.max_retry_for_on_policy)

    @property
    def rollout_lookahead(self) -> tuple[int, int, int | None]:
        num_extra_prompts = 0 if self.on_policy else max(0, self.outdated_rollout_fetch_batch_size)
        return self.allowed_outdated_steps, num_extra_prompts, self.max_inflight_steps

    def notices(self, stage: StageContext) -> Iterator[str]:
        if self.variant == "dapo" and self.bypass_reward and stage.kind.trains_model:
            yield "train.train_policy.variant = 'dapo' drops no group here, because every reward is 0"
        temperature = stage.recipe.rollout.sampling_config.temperature
        if self.temperature != temperature and stage.kind.trains_model and not stage.recipe.policy.is_diffusers:
            settings_text = f"{self.temperature} and rollout.sampling_config.temperature = {temperature}"
            effect_text = "the loss weights their tokens by policy / sampled distribution"
            reason = "training completions are not drawn from the policy"
            yield f"train.train_policy.temperature = {settings_text} differ: {reason}; {effect_text}"
        is_trained_on_rewards = stage.kind.trains_model and not stage.recipe.distillation.enable
        if is_trained_on_rewards and self.rewards and not any(self.rewards.values()):
            yield "train.train_policy.reward_function: every weight is 0, so that no completion is better than another"
        for name in ("filter_reward_metric", "max_retry_for_on_policy"):
            if self.variant != "dapo" and self.is_set(name):
                yield f"train.train_policy.{name} has no effect here: it is for variant = 'dapo'"

    @model_validator(mode="before")
    @classmethod
    def _set_generated_reward(cls, policy_table: Any) -> Any:
        """Set the reward function `reasoning_gym` for generated rows unless the recipe sets another."""
        if not isinstance(policy_table, dict) or "reward_function" in policy_table:
            return policy_table
        datasets, reward_setting = policy_table.get("datasets") or (), {"reward_function": REASONING_GYM_REWARD}
        if not isinstance(datasets, list | tuple):
            return policy_table
        if all(_is_generated_dataset(each) for each in datasets or (policy_table.get("dataset"),)):
            policy_table = policy_table | reward_setting
        if any(map(_is_generated_dataset, datasets)):
            is_generated_flags = [isinstance(each, dict) and _is_generated_dataset(each) for each in datasets]
            datasets_with_flags = zip(datasets, is_generated_flags, strict=True)
            datasets = [reward_setting | each if is_generated else each for each, is_generated in datasets_with_flags]
            policy_table = policy_table | {"datasets": datasets}
        return policy_table

    @model_validator(mode="after")
    def _apply_bypass_reward(self) -> Self:
        if not self.reward_function and not self.bypass_reward:
            raise ValueError("reward_function is empty; name at least one reward")
        if self.uncentralized_training and self.variant != "grpo":
            raise ValueError(f"uncentralized_training needs variant = 'grpo', not {self.variant!r}")
        return self.with_bypassed_rewards() if self.bypass_reward else self

    def with_bypassed_rewards(self) -> Self:
        """Return a copy with `bypass_reward`. A `reward_function` that the user has not set becomes empty: in a
        resolved recipe, which sets all keys, the default would count as set, and validation would use it."""
        is_default_reward = "reward_function" not in self.model_fields_set
        return self.copy_with(bypass_reward=True, reward_function={} if is_default_reward else self.reward_function)

    @field_validator("dataloader_batch_size")
    @classmethod
    def _clamp_dataloader_batch_size(cls, batch_size: int) -> int:
        return max(0, batch_size)

    @model_validator(mode="before")
    @classmethod
    def _report_ignored_outdated_steps(cls, policy: Any, info: ValidationInfo) -> Any:
        if isinstance(policy, dict) and policy.get("on_policy") is True and policy.get("allowed_outdated_steps"):
            full_key, outdated_steps = "train.train_policy.allowed_outdated_steps", policy["allowed_outdated_steps"]
            add_notice(info, f"{full_key} = {outdated_steps}: 0, because on_policy is set")
        return policy

    @field_validator("allowed_outdated_steps")
    @classmethod
    def _reset_outdated_steps_on_policy(cls, max_outdated_steps: int, info: ValidationInfo) -> int:
        return 0 if info.data.get("on_policy") else max_outdated_steps

    @field_validator("outdated_rollout_fetch_batch_size")
    @classmethod
    def _set_default_fetch_size(cls, num_prompts: int, info: ValidationInfo) -> int:
        return _DAPO_MAX_EXTRA_PROMPTS if info.data.get("variant") == "dapo" and num_prompts <= 0 else num_prompts

    @field_validator("max_inflight_steps")
    @classmethod
    def _increase_max_inflight_steps(cls, max_inflight_steps: int | None, info: ValidationInfo) -> int | None:
        min_inflight_steps = info.data.get("allowed_outdated_steps", 0) + 1
        if max_inflight_steps is None or max_inflight_steps >= min_inflight_steps:
            return max_inflight_steps
        key = "train.train_policy.max_inflight_steps"
        add_notice(info, f"{key} = {max_inflight_steps}: {min_inflight_steps}, which is allowed_outdated_steps + 1")
        return int(min_inflight_steps)
