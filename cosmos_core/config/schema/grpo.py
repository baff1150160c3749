"""`[train.train_policy]` with `type = "grpo"`: group-relative policy optimisation and its relatives."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cosmos_core.config.schema.marks import Needs, Only, Where
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.values import NonNegativeFloat, PositiveFloat, Steps, Thing, Tokens


class GrpoConfig(RlConfig):
    """`type = "grpo"`: sample groups of completions, score them, learn from their differences (arXiv 2402.03300)."""

    algorithm: ClassVar[str] = "grpo"

    trainer_type: Annotated[
        Thing, Only(("grpo",), "this version trains with 'grpo'; leave it out", takes_import_paths=True), Where.CODE
    ] = "grpo"
    """The algorithm: `grpo`, or `path/file.py:Class` of your own."""

    epsilon_low: float = 0.2
    """Ratios are clipped below at 1 - this; negative: no lower clip."""
    epsilon_high: float = 0.2
    """Ratios are clipped above at 1 + this (clip-higher: 0.28); negative: no upper clip."""
    advantage_low: float = -5.0
    """Lowest advantage in DiffusionNFT."""
    advantage_high: float = 5.0
    """Highest advantage in DiffusionNFT, and its scale."""
    positive_nll_coef: NonNegativeFloat | None = None
    """Weight of an extra log-likelihood term on completions with a positive reward; None: off."""
    lower_bound_ratio: float = 3.0
    """Dual clip: the loss of a negative advantage A is at most -A times this (arXiv 1912.09729)."""
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"] = "token-mean"
    """How token losses are averaged over the optimizer step."""
    unbiased_loss_max_tokens: Tokens | None = None
    """With `seq-mean-token-mean`: divide by this constant instead of the length (Dr. GRPO, arXiv 2503.20783); None:
    by the length."""
    unbiased_advantage: bool = False
    """True: subtract the group's mean only, do not divide by its standard deviation (Dr. GRPO)."""
    algo: Annotated[str, Field(min_length=1)] = "grpo"
    """Name of the rule that turns rewards into advantages."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the model that the stage started from; 0: no reference model is held."""
    unbiased_kl_estimate: bool = False
    """Multiply the k3 estimator by the ratio, which makes its gradient that of the reverse KL (arXiv 2512.02556)."""
    off_policy_masking_delta: NonNegativeFloat | None = None
    """Mask sequences of negative advantage whose mean log-ratio is beyond this; None: none."""
    aipo_rho: PositiveFloat | None = None
    """Cap ratios at this in place of clipping (arXiv 2505.24034); None: off."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; 0: off."""
    min_filter_prefix_tokens: Tokens | None = None
    """Mask prefixes of at least this length that completions of different rewards share; None: off."""
    reference_reset_interval: Steps | None = None
    """Copy the policy into the reference every N steps; None: never."""
    reset_optimizer_with_reference: Annotated[bool, Needs("reference_reset_interval")] = True
    """Start the optimizer anew with it."""
    use_decoupled_loss: bool = False
    """Weight tokens by old policy / rollout policy."""
    behav_imp_weight_cap: Annotated[PositiveFloat | None, Needs("use_decoupled_loss")] = None
    """Tokens above this weight get weight 0; None: no cap."""
    use_rollout_logprobs_for_loss: bool = False
    """Take them as the old policy's."""

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
    def _behaviour_policy(self) -> GrpoConfig:
        if self.use_decoupled_loss and self.use_rollout_logprobs_for_loss:
            raise ValueError(
                "use_decoupled_loss and use_rollout_logprobs_for_loss exclude each other: one recomputes the old "
                "log-probabilities, the other takes those of the rollouts; set one of them to false"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _collected(cls, values: Any) -> Any:
        """What the corrections need of the rollouts."""
        if isinstance(values, dict) and values.get("use_decoupled_loss") is True:
            return values | {"rollout_as_token_ids": True, "collect_rollout_logprobs": True}
        if isinstance(values, dict) and values.get("use_rollout_logprobs_for_loss") is True:
            return values | {"collect_rollout_logprobs": True}
        return values

    @property
    def named_weights(self) -> tuple[str, ...]:
        """See `AlgorithmConfig.named_weights`."""
        return ("reference",) if self.kl_beta else ()
