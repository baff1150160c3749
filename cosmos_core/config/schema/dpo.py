"""`[train.train_policy]` with `trainer_type = "dpo"`: direct preference optimisation (arXiv 2305.18290)."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import StringOrList

DpoLossType = Literal[
    "sigmoid", "bco_pair", "sft", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm", "simpo", "orpo"
]  # fmt: skip
_LOSSES_WITHOUT_REFERENCE = {"sft", "simpo", "orpo"}
_LOSSES_WITH_SMOOTHING = {"sigmoid", "robust", "simpo"}


class DpoLossConfig(Table):
    """Settings of the DPO loss of a pair of responses. Cosmos-RL has three of these keys in `[custom]`: `dpo_beta`,
    `dpo_loss_type`, `dpo_loss_weights`."""

    beta: PositiveFloat = 0.1
    """Factor beta in the reward of a response, beta x (its log-probability - that under the reference); in `ipo` the
    regularisation tau, in `orpo` the weight of the odds ratio, in `simpo` about 2."""
    loss_type: StringOrList = ("sigmoid",)
    """With rewards c of the chosen and r of the rejected response: `sigmoid` is -log sigmoid(c - r), `bco_pair` -log
    sigmoid(c) - log sigmoid(-r), `sft` the mean of -log p over the chosen responses' tokens, `robust` `sigmoid` for
    labels of which a fraction `label_smoothing` is wrong (arXiv 2403.00409), `hinge` max(0, 1 - c + r) (2305.10425),
    `ipo` the squared distance of the difference per token to 1 / (2 beta) (2310.12036), `apo_zero` sigmoid(-c) +
    sigmoid(r) and `apo_down` sigmoid(c) + sigmoid(r - c) (2408.06266), `sigmoid_norm` `sigmoid` with rewards per token.
    Without a reference: `simpo`, -log sigmoid(beta x difference per token - `simpo_gamma`) (2405.14734), and `orpo`,
    `sft` - beta x log sigmoid of the log odds ratio per token (2403.07691). Or a list of them."""
    loss_weights: Annotated[tuple[NonNegativeFloat, ...] | None, Field(strict=False)] = None
    """Weight of each loss in `loss_type`; None: 1 each."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs in which chosen and rejected response are swapped, in the losses `sigmoid`, `robust`
    and `simpo`."""
    simpo_gamma: NonNegativeFloat = 0.5
    """Target margin of `simpo` between the rewards of a pair."""
    reference_free: bool = False
    """Train without a reference model: a reward is beta x log-probability, as in Cosmos-RL. False: the reference is the
    model from which the stage starts."""

    @field_validator("loss_type")
    @classmethod
    def _check_loss_types(cls, loss_types: tuple[str, ...]) -> tuple[str, ...]:
        if not loss_types or not {*loss_types} <= {*get_args(DpoLossType)}:
            raise ValueError(f"loss_type = {list(loss_types)} must be of {', '.join(get_args(DpoLossType))}")
        return loss_types

    @model_validator(mode="after")
    def _check_loss_weights(self) -> Self:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            rule = f"must be one for each of loss_type = {list(self.loss_type)}"
            raise ValueError(f"loss_weights = {list(self.loss_weights)} {rule}")
        if self.label_smoothing and not _LOSSES_WITH_SMOOTHING & {*self.loss_type}:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} means nothing with loss_type = {list(self.loss_type)}; it "
                f"is for {', '.join(sorted(_LOSSES_WITH_SMOOTHING))}"
            )
        return self


class DpoConfig(SupervisedConfig):
    """`type = "sft"`, `trainer_type = "dpo"`: learn from pairs of a chosen and a rejected response."""

    algorithm: ClassVar[str] = "dpo"
    rows: ClassVar[str] = "pairs"
    num_sequences_per_row: ClassVar[int] = 2
    allows_validation_completions: ClassVar[bool] = False
    precomputes_reference_logprobs: ClassVar[bool] = True

    trainer_type: Literal["dpo"] = "dpo"
    """Algorithm: DPO."""
    prompt_column_name: str = ""
    """Column of the prompt, a string or a conversation, in place of `conversation_column_name`; empty: the first column
    that has one of the default names."""
    chosen_column_name: str = "chosen"
    """Column of the chosen response of a pair."""
    rejected_column_name: str = "rejected"
    """Column of the rejected response of a pair."""
    dpo: DpoLossConfig = DpoLossConfig()
    """Settings of the loss of a pair of responses."""

    @property
    def auxiliary_model_names(self) -> tuple[str, ...]:
        is_reference_free = self.dpo.reference_free or {*self.dpo.loss_type} <= _LOSSES_WITHOUT_REFERENCE
        return () if is_reference_free else ("reference",)

    def notices(self, stage: StageContext) -> Iterator[str]:
        if self.auxiliary_model_names and "reference_free" not in self.dpo.model_fields_set:
            reason = "responses are compared with those of the model that the stage starts from"
            yield f"train.train_policy.dpo.reference_free = false: {reason} (Cosmos-RL's DPO has no reference)"
