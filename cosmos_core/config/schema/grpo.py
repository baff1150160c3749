"""`[train.train_policy]` with `type = "grpo"`: group-relative policy optimisation (GRPO) and its variants."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.data_term import DataTermConfig
from cosmos_core.config.schema.field_metadata import EnabledBy, ReferenceKind, SupportedValues
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.table import StageContext, add_notice
from cosmos_core.config.schema.value_types import NameOrImportPath, StepCount, TokenCount
from cosmos_core.registry import is_user_code

AdvantageRule = Literal["grpo", "rloo", "batch-std", "reinforce++", "reinforce++-baseline", "maxrl", "gdpo"]
_TRAINER_TYPES = SupportedValues(("grpo",), "this version trains with 'grpo'; leave it out", takes_import_paths=True)
RolloutCorrection = Literal["", "none", "truncate", "mask", "sequence-truncate", "sequence-mask"]


class GrpoConfig(RlConfig):
    """`type = "grpo"`: sample groups of completions, score them, learn from their differences (arXiv 2402.03300)."""

    algorithm: ClassVar[str] = "grpo"

    trainer_type: Annotated[NameOrImportPath, _TRAINER_TYPES, ReferenceKind.CODE] = "grpo"
    """Algorithm: `grpo`, or a user class `path/file.py:Class`."""

    epsilon_low: float = 0.2
    """Lower clip range: probability ratios are clipped below at 1 - `epsilon_low`; negative: no lower clip. With
    variant = 'dppo_tv' or 'dppo_kl': the largest divergence of a token that becomes less likely, about 0.15 or 0.05."""
    epsilon_high: float = 0.2
    """Upper clip range: probability ratios are clipped above at 1 + `epsilon_high` (clip-higher: 0.28); negative: no
    upper clip. With variant = 'dppo_tv' or 'dppo_kl': the largest divergence of a token that becomes more likely."""
    advantage_low: float = -5.0
    """Minimum advantage for a diffusion model."""
    advantage_high: float = 5.0
    """Maximum advantage for a diffusion model, and the scale of advantages in DiffusionNFT."""
    positive_nll_coef: NonNegativeFloat | None = None
    """Weight of an extra log-likelihood term on completions with a positive reward; None: off."""
    lower_bound_ratio: float = 3.0
    """Bound of the dual clip: the loss of a negative advantage A is at most -A times this value (arXiv 1912.09729)."""
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"] = "token-mean"
    """Rule by which the losses of tokens are reduced to the loss of an optimizer step. `token-mean`: mean over all
    tokens. `seq-mean-token-sum` and `seq-mean-token-mean`: mean over sequences of the sum or the mean over their
    tokens. `token-sum`: sum over all tokens."""
    unbiased_loss_max_tokens: TokenCount | None = None
    """With `seq-mean-token-mean`: number of tokens by which the loss of a sequence is divided instead of its length
    (Dr. GRPO, arXiv 2503.20783); None: its length."""
    unbiased_advantage: bool = False
    """Subtract only the group's mean from a reward, without division by the group's standard deviation (Dr. GRPO);
    False: subtract and divide."""
    algo: AdvantageRule = "grpo"
    """Rule that turns the rewards of a group into advantages: r - mean over the std of the group (`grpo`), r - mean of
    the other completions (`rloo`, arXiv 2402.14740), r - mean over the std of the step (`batch-std`, 2508.08221), r
    whitened over the trained tokens of the step (`reinforce++`, 2501.03262), r - mean whitened in that way
    (`reinforce++-baseline`), r - mean over the mean (`maxrl`, 2602.02710), or each reward function's values over the
    sample std of their group, weighted, summed and normalised over the step (`gdpo`, 2601.05242)."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty towards the reference model, from which the stage started; 0: no penalty, and no
    reference model in memory."""
    kl_in_reward: Annotated[bool, EnabledBy("kl_beta")] = False
    """Take `kl_beta` * log(old policy / reference) from the reward of each token, whose advantage is then its whitened
    return, as in the paper of `algo = "reinforce++"` (arXiv 2501.03262), instead of adding the KL to the loss."""
    unbiased_kl_estimate: Annotated[bool, EnabledBy("kl_beta")] = False
    """Multiply the k3 estimator of the KL by the probability ratio, which makes its gradient that of the reverse KL
    (arXiv 2512.02556)."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL divergence from the reference model (joschu.net/blog/kl-approx.html): the gradient of `k2` is
    that of the reverse KL, that of `k3` of the forward KL, or with `unbiased_kl_estimate` of the reverse KL."""
    off_policy_masking_delta: NonNegativeFloat | None = None
    """Exclude sequences with a negative advantage and a mean log(rollout policy / policy) above this value (arXiv
    2512.02556); None: exclude none."""
    ratio_cap: PositiveFloat | None = None
    """Largest weight of a token with variant = 'cispo', 'dppo_tv' or 'dppo_kl': the cap of the ratio itself, not of its
    distance from 1. None: 5 with 'cispo', 20 with the others."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """With variant = 'sapo': temperature of the gate for tokens with a positive advantage; the higher, the faster the
    weight of a token falls as its ratio leaves 1."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """With variant = 'sapo': temperature of the gate for tokens without a positive advantage."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the trained tokens of an optimizer step that the policy loss includes: the tokens with the highest
    entropy. Below 1 it needs an additional forward pass (arXiv 2506.01939: 0.2). 1: all tokens."""
    mask_truncated_completions: bool = False
    """Leave completions that reached `rollout.max_response_length`, or the last turn with a tool call, out of the loss;
    their rewards still count in the advantages of their group (arXiv 2503.14476, overlong filtering)."""
    aipo_rho: PositiveFloat | None = None
    """Maximum importance weight of AIPO, which weights tokens by policy / rollout policy in place of clipping (arXiv
    2505.24034); None: off."""
    aipo_form: Annotated[Literal["weighted", "clamped"], EnabledBy("aipo_rho")] = "weighted"
    """Form of AIPO. `weighted`: as in the paper, every token has a gradient. `clamped`: as in Cosmos-RL, a token with a
    ratio policy / old policy above `aipo_rho` has no gradient."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss; unlike in Cosmos-RL the bonus has a gradient. 0: no bonus."""
    log_entropy: bool = True
    """Compute the policy's entropy for the metrics, which takes about a tenth of the time of a step at a vocabulary of
    150,000."""
    min_filter_prefix_tokens: TokenCount | None = None
    """Minimum number of tokens of a prefix that is left out of the loss because completions with different rewards
    share it; None: no prefix is left out."""
    reference_reset_interval: StepCount | None = None
    """Number of train steps after which the current policy becomes the new reference of the KL penalty; None: never."""
    reset_optimizer_with_reference: Annotated[bool, EnabledBy("reference_reset_interval")] = True
    """Also reset the optimizer's moments when the reference policy is reset; the learning rate schedule continues."""
    use_decoupled_loss: bool = False
    """Weight tokens by old policy / rollout policy, and clip against the old policy (arXiv 2505.24298)."""
    behav_imp_weight_cap: Annotated[PositiveFloat | None, EnabledBy("use_decoupled_loss")] = None
    """With `use_decoupled_loss`: tokens whose weight old policy / rollout policy exceeds this value get weight 0; None:
    no cap."""
    use_rollout_logprobs_for_loss: bool = False
    """Use the log-probabilities of the rollout engine as those of the old policy, instead of recomputing them."""
    rollout_correction: RolloutCorrection = ""
    """Importance weights w = old policy / rollout policy: `truncate` them at `rollout_correction_high` (TIS), `mask`
    tokens outside low and high (IcePop), or apply either to the product over a sequence; `none`: w = 1. Empty:
    `truncate` if rollouts may be older than the policy or are sampled from another distribution, otherwise `none`."""
    rollout_correction_low: Annotated[NonNegativeFloat, EnabledBy("rollout_correction")] = 0.5
    """Smallest importance weight that `rollout_correction` does not mask."""
    rollout_correction_high: PositiveFloat = 2.0
    """Largest importance weight of `rollout_correction`, above which a weight is truncated or masked."""
    geometric_mask: PositiveFloat | None = None
    """Exclude sequences whose geometric mean of w = old policy / rollout policy differs from 1 by more than this value,
    such as 0.01; None: exclude none."""
    mean_k3_mask: PositiveFloat | None = None
    """Exclude sequences whose mean of w - 1 - log w over the tokens is above this value, where w = old policy / rollout
    policy; the mean estimates the KL divergence between the two policies. None: exclude none."""
    max_k3_mask: PositiveFloat | None = None
    """Exclude sequences whose largest w - 1 - log w is above this value, where w = old policy / rollout policy: it
    detects single tokens about which rollouts and trainer disagree. None: exclude none."""
    self_normalised_weights: bool = False
    """Divide the importance weights of `rollout_correction` by their mean over the trained tokens of the train step, or
    with `sequence-truncate` and `sequence-mask` over its sequences; the mean costs an additional forward pass."""

    data_term: DataTermConfig = DataTermConfig()
    """Settings of SFT rows that are trained on in addition to rollouts."""

    def notices(self, stage: StageContext) -> Iterator[str]:
        yield from super().notices(stage)
        clipping_variants = ("grpo", "dapo", "gspo", "dppo_tv", "dppo_kl")
        variants_by_key = {
            "epsilon_low": clipping_variants,
            "epsilon_high": clipping_variants,
            "lower_bound_ratio": ("grpo", "dapo"),
            "ratio_cap": ("cispo", "dppo_tv", "dppo_kl"),
            "sapo_temperature_pos": ("sapo",),
            "sapo_temperature_neg": ("sapo",),
        }
        for name, variants in variants_by_key.items():
            if self.is_set(name) and (self.variant not in variants or self.aipo_rho is not None):
                variants_text = " or ".join(map(repr, variants)) + ", without aipo_rho" * (self.aipo_rho is not None)
                yield f"train.train_policy.{name} has no effect here: it is for variant = {variants_text}"
        for name in ("advantage_low", "advantage_high"):
            if not stage.recipe.policy.is_diffusers and self.is_set(name):
                yield f"train.train_policy.{name} has no effect here: it bounds advantages of diffusion models"
        for name in ("direct_math", "overlong") if self.algo == "maxrl" else ():
            if self.rewards.get(name):
                yield f"train.train_policy.algo = 'maxrl' ends the run at a reward below 0, which {name!r} can give"

    @field_validator("lower_bound_ratio")
    @classmethod
    def _check_dual_clip_bound(cls, loss_bound: float) -> float:
        if loss_bound <= 1:
            raise ValueError(f"lower_bound_ratio = {loss_bound} must be greater than 1")
        return loss_bound

    @model_validator(mode="after")
    def _check_optimizer_batch(self) -> Self:
        optimizer_batch_size = self.batch_size_per_optimize
        if optimizer_batch_size is not None and self.mini_batch != "auto" and optimizer_batch_size % self.mini_batch:
            rule = f"must be a multiple of mini_batch = {self.mini_batch}"
            raise ValueError(f"batch_size_per_optimize = {optimizer_batch_size} {rule}")
        if self.unbiased_loss_max_tokens is not None and self.loss_type != "seq-mean-token-mean":
            raise ValueError("unbiased_loss_max_tokens has a meaning only with loss_type = 'seq-mean-token-mean'")
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_default_loss_type(cls, table: Any, info: ValidationInfo) -> Any:
        variant = table.get("variant") if isinstance(table, dict) and table.get("aipo_rho") is None else None
        if variant in {"gspo", "sapo"} and "loss_type" not in table:
            default_reason = f"as in the paper of variant = {variant!r}; set it to have another"
            add_notice(info, f"train.train_policy.loss_type: seq-mean-token-mean, {default_reason}")
            return table | {"loss_type": "seq-mean-token-mean"}
        return table

    @model_validator(mode="after")
    def _check_exclusive_settings(self) -> Self:
        if self._has_rollout_correction and (self.use_decoupled_loss or self.use_rollout_logprobs_for_loss):
            problem = "rollout_correction excludes use_decoupled_loss and use_rollout_logprobs_for_loss"
            reason = "each says what the log-probabilities of the rollouts are for"
            raise ValueError(f"{problem}: {reason}; set one of them")
        if self.algo == "gdpo" and any(source_config.reward_function for source_config in self.datasets):
            remedy = "leave reward_function of datasets out"
            raise ValueError(f"algo = 'gdpo' compares the same rewards in all groups; {remedy}")
        min_weight, max_weight = self.rollout_correction_low, self.rollout_correction_high
        if min_weight > max_weight:
            problem = f"rollout_correction_low = {min_weight:g} is above rollout_correction_high = {max_weight:g}"
            raise ValueError(f"{problem}: no weight is between; swap them")
        mask_keys = [n for n in ("geometric_mask", "mean_k3_mask", "max_k3_mask") if getattr(self, n) is not None]
        if mask_keys and self.use_rollout_logprobs_for_loss:
            reason = "use_rollout_logprobs_for_loss = true takes the one for the other"
            raise ValueError(f"{mask_keys[0]} compares the old policy with the rollouts, and {reason}; set one of them")
        if self.self_normalised_weights and not (self._has_rollout_correction or self.use_decoupled_loss):
            remedy = "set rollout_correction, such as 'truncate', or leave it out"
            raise ValueError(f"self_normalised_weights = true needs weights: {remedy}")
        if self.unbiased_kl_estimate and self.kl_estimator == "k2":
            reason = "the gradient of 'k2' is that of the reverse KL already, and times the ratio it is that of nothing"
            raise ValueError(f"unbiased_kl_estimate is for kl_estimator = 'k3': {reason}; leave one of them out")
        if self.unbiased_advantage and self.algo not in {"grpo", "rloo"}:
            rule = f"leaves out the division that algo = {self.algo!r} is"
            raise ValueError(f"unbiased_advantage = true {rule}; set one of them")
        if self.kl_in_reward and self.algo != "reinforce++":
            reason = f"makes returns of tokens, which algo = {self.algo!r} does not know"
            raise ValueError(f"kl_in_reward = true {reason}; set algo to 'reinforce++'")
        if self.kl_in_reward and (self.unbiased_kl_estimate or self.kl_estimator == "k2"):
            reason = "leaves no KL in the loss for kl_estimator and unbiased_kl_estimate"
            raise ValueError(f"kl_in_reward = true {reason}; leave them out")
        if self.reference_reset_interval and not self.kl_beta:
            raise ValueError("reference_reset_interval needs a reference: set kl_beta above 0, or leave it out")
        return self

    @property
    def _has_rollout_correction(self) -> bool:
        return self.rollout_correction not in {"", "none"}

    @model_validator(mode="after")
    def _derive_importance_weight_settings(self, info: ValidationInfo) -> Self:
        """Refuse or switch off a second importance weight if AIPO already weights tokens by policy / rollout policy,
        and switch on the rollout log-probabilities that the losses with importance weights need."""
        uses_decoupled_loss = self.use_decoupled_loss
        if self.aipo_rho is not None and self.aipo_form == "weighted":
            if self._has_rollout_correction:
                raise ValueError(
                    f"rollout_correction = {self.rollout_correction!r} would weight tokens a second time: aipo_rho "
                    f"weights them by policy / rollout policy; set one of them, or aipo_form = 'clamped'"
                )
            if uses_decoupled_loss:
                conflict_text = "aipo_rho weights tokens by policy / rollout policy already"
                add_notice(info, f"train.train_policy.use_decoupled_loss: false, because {conflict_text}")
                uses_decoupled_loss = False
        if self.aipo_rho is not None and self.variant not in {"grpo", "dapo"}:
            variant_key = "train.train_policy.variant"
            add_notice(info, f"{variant_key} = {self.variant!r} has no effect on the loss, because aipo_rho is set")
        if uses_decoupled_loss and self.use_rollout_logprobs_for_loss:
            problem = "use_decoupled_loss and use_rollout_logprobs_for_loss exclude each other"
            reason = "one recomputes the old log-probabilities, the other takes those of the rollouts"
            raise ValueError(f"{problem}: {reason}; set one of them to false")
        if uses_decoupled_loss:
            return self.copy_with(rollout_as_token_ids=True, collect_rollout_logprobs=True)
        table = self.copy_with(use_decoupled_loss=False) if self.use_decoupled_loss else self
        return table.copy_with(collect_rollout_logprobs=True) if self.use_rollout_logprobs_for_loss else table

    @property
    def supervised_rows(self) -> DataTermConfig | None:
        return self.data_term if self.data_term.name else None

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from super().unsupported_setting_errors(stage)
        data_term_config, table_key = self.data_term, "train.train_policy.data_term"
        if data_term_config.weight and not data_term_config.name:
            yield f"{table_key}.weight = {data_term_config.weight} names no rows: set {table_key}.name, or leave it out"
        if data_term_config.name and not data_term_config.weight:
            yield f"{table_key}.weight = 0 leaves out the rows of {table_key}.name; set it to about 0.1"
        if is_user_code(data_term_config.name):
            remedy = "write the rows to a file"
            yield f"{table_key}.name = {data_term_config.name!r}: a data set class of your own gives prompts; {remedy}"
        if data_term_config.name and stage.recipe.policy.parallelism.pp_size > 1:
            yield f"policy.parallelism.pp_size excludes {table_key}; set it to 1"

    @property
    def has_group_relative_advantages(self) -> bool:
        return self.algo != "reinforce++" and not self.bypass_reward

    @property
    def auxiliary_model_names(self) -> tuple[str, ...]:
        return ("reference",) if self.kl_beta else ()
