"""`[train.train_policy]` with `type = "grpo"`: group-relative policy optimisation and its relatives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.overlong_reward import OverlongRewardConfig
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.rewards import RewardWeights
from cosmos_core.config.schema.sft import MAPPED, POSITIONS, PREPARED
from cosmos_core.config.schema.table import (
    LATER,
    OURS,
    Completions,
    Names,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Steps,
    Table,
    Tokens,
    Unit,
    no_effect,
    planned,
    say,
)

_NFT = planned("DiffusionNFT is not in this version; leave it out")
_IN_TURN = no_effect("generation and training take turns here, so every rollout is made with the newest weights")
_ALWAYS = no_effect("rollouts always carry token ids and their log-probabilities")
_DECOUPLED = planned("corrections by the rollouts' log-probabilities are not in this version; leave it out")
_DYNAMIC = planned("dynamic sampling is not in this version; leave it out")
_RESET = planned("the reference model stays the one that the stage started from; leave it out")
DAPO_FETCH = 128


class GrpoConfig(Table):
    """`type = "grpo"`: sample groups of answers, score them, learn from their differences (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    """Which kind of training."""
    trainer_type: Annotated[
        str, Field(min_length=1), planned("this version trains with 'grpo' alone; leave it out"), LATER
    ] = "grpo"
    """Loss: `grpo`, `diffusion_nft`, `grpo_vla` or a registered name."""
    variant: Annotated[
        Literal["grpo", "dapo", "gspo"], planned("this version has the variant 'grpo' alone; leave it out")
    ] = "grpo"
    """Loss family."""
    dataset: DatasetConfig = DatasetConfig()
    """Prompts."""
    dataloader_shuffle: bool = True
    """Another order each epoch; False: the order of the file."""
    dataloader_seed: Annotated[int, LATER] = 0
    """Seed of that order."""
    data_dispatch_as_rank_in_mesh: Annotated[bool, POSITIONS, LATER] = False
    """Hand out prompts by global rank."""
    enable_dataset_cache: Annotated[bool, PREPARED] = False
    """Keep processed rows on disk."""
    dataloader_num_workers: Annotated[int, MAPPED] = 0
    """Processes that load prompts; 0 or less: none."""
    dataloader_prefetch_factor: Annotated[int | None, MAPPED] = None
    """Batches that a loader reads ahead."""
    dataloader_batch_size: Annotated[int, POSITIONS, LATER] = 1
    """Batch of the controller's iterator; 0 or less: all."""
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
    temperature: PositiveFloat = 1.0
    """Divides the trainer's logits before log-softmax; should equal the sampling temperature."""
    epsilon_low: float = 0.2
    """Ratios are clipped below at 1 - this; negative: no lower clip."""
    epsilon_high: float = 0.2
    """Ratios are clipped above at 1 + this (clip-higher: 0.28); negative: no upper clip."""
    advantage_low: Annotated[float, _NFT, LATER] = -5.0
    """Lowest advantage in DiffusionNFT."""
    advantage_high: Annotated[float, _NFT, LATER] = 5.0
    """Highest advantage in DiffusionNFT, and its scale."""
    positive_nll_coef: NonNegativeFloat | None = None
    """Weight of an extra log-likelihood term on answers with a positive reward; None: off."""
    lower_bound_ratio: float = 3.0
    """Dual clip: the loss of a negative advantage A is at most -A times this (arXiv 1912.09729)."""
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"] = "token-mean"
    """How token losses are averaged over the optimizer step."""
    unbiased_loss_max_tokens: Tokens | None = None
    """With `seq-mean-token-mean`: divide by this constant instead of the length (Dr. GRPO, arXiv 2503.20783); None:
    by the length."""
    unbiased_advantage: bool = False
    """True: subtract the group's mean only, do not divide by its standard deviation (Dr. GRPO)."""
    algo: Annotated[
        str, Field(min_length=1), planned("this version has the rule 'grpo' alone; leave it out"), LATER
    ] = "grpo"
    """Name of the rule that turns rewards into advantages."""
    overlong_reward: OverlongRewardConfig = OverlongRewardConfig()
    """Penalty for long answers."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the model that the stage started from; 0: no reference model is held."""
    unbiased_kl_estimate: Annotated[bool, LATER] = False
    """Multiply the k3 estimator by the ratio, which makes its gradient that of the reverse KL (arXiv 2512.02556)."""
    off_policy_masking_delta: Annotated[NonNegativeFloat | None, _DECOUPLED, LATER] = None
    """Mask sequences of negative advantage whose mean log-ratio is beyond this; None: none."""
    aipo_rho: Annotated[PositiveFloat | None, planned("AIPO is not in this version; leave it out")] = None
    """Cap ratios at this in place of clipping (arXiv 2505.24034); None: off."""
    mu_iterations: Annotated[PositiveInt, Unit("passes")] = 1
    """Passes over each batch of rollouts."""
    mini_batch: Completions = 2
    """Completions per forward pass; changes speed and memory, not results."""
    batch_size_per_optimize: Annotated[Completions | None, LATER] = None
    """Completions per optimizer step inside a train step; None: all."""
    max_token_len_per_mini_batch: Annotated[
        Tokens | None, planned("micro-batches hold mini_batch completions in this version; leave it out"), LATER
    ] = None
    """Token budget of a micro-batch; None: `mini_batch` completions."""
    entropy_coeff: Annotated[float, planned("the entropy bonus is not in this version; leave it out"), LATER] = 0.0
    """Weight of the entropy bonus; 0: off."""
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
    min_filter_prefix_tokens: Annotated[
        Tokens | None, planned("shared prefixes are not masked in this version; leave it out")
    ] = None
    """Mask prefixes of at least this length that answers of different rewards share; None: off."""
    max_retry_for_on_policy: Annotated[int, _DYNAMIC, LATER] = -1
    """Most extra rounds of sampling; 0 or less: unlimited."""
    reference_reset_interval: Annotated[Steps | None, _RESET, LATER] = None
    """Copy the policy into the reference every N steps; None: never."""
    reset_optimizer_with_reference: Annotated[bool, _RESET, Needs("reference_reset_interval"), LATER] = True
    """Start the optimizer anew with it."""
    balance_dp_token: Annotated[
        bool, no_effect("losses are always divided by the tokens of all ranks together"), LATER
    ] = False
    """Divide by the tokens of all data-parallel ranks."""
    use_decoupled_loss: Annotated[bool, _DECOUPLED, LATER] = False
    """Weight tokens by old policy / rollout policy."""
    behav_imp_weight_cap: Annotated[PositiveFloat | None, _DECOUPLED, Needs("use_decoupled_loss"), LATER] = None
    """Tokens above this weight get weight 0; None: no cap."""
    rollout_as_token_ids: Annotated[bool, _ALWAYS, LATER] = False
    """Hand over token ids in place of text."""
    collect_rollout_logprobs: Annotated[bool, _ALWAYS, LATER] = False
    """Hand over the log-probabilities of sampled tokens."""
    use_rollout_logprobs_for_loss: Annotated[bool, _DECOUPLED, LATER] = False
    """Take them as the old policy's."""

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

    @model_validator(mode="after")
    def _loaders(self) -> GrpoConfig:
        if self.dataloader_num_workers <= 0:
            self.settle(dataloader_num_workers=0, dataloader_prefetch_factor=None)
        if self.dataloader_batch_size < 0:
            self.settle(dataloader_batch_size=0)
        return self

    @model_validator(mode="after")
    def _behaviour_policy(self) -> GrpoConfig:
        if self.use_decoupled_loss and self.use_rollout_logprobs_for_loss:
            raise ValueError(
                "use_decoupled_loss and use_rollout_logprobs_for_loss exclude each other: one recomputes the old "
                "log-probabilities, the other takes those of the rollouts; set one of them to false"
            )
        if self.use_decoupled_loss:
            self.settle(rollout_as_token_ids=True, collect_rollout_logprobs=True)
        if self.use_rollout_logprobs_for_loss:
            self.settle(collect_rollout_logprobs=True)
        return self

    @model_validator(mode="after")
    def _staleness(self, info: ValidationInfo) -> GrpoConfig:
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
