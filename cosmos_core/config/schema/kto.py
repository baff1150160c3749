"""`[train.train_policy]` with `trainer_type = "kto"`: learning from responses with a label (arXiv 2402.01306)."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from cosmos_core.config.schema.sft import SftConfig
from cosmos_core.config.schema.table import StageContext, Table


class KtoLossConfig(Table):
    """Settings of the KTO loss of a labelled response. The loss depends on the reward of the response: beta x (its
    log-probability under the policy - its log-probability under the reference)."""

    beta: PositiveFloat = 0.1
    """Factor of the KTO reward; the higher, the closer the policy stays to the reference."""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Loss of a labelled response. `kto`: weight x (1 - sigmoid(reward - beta x KL)) of a desirable response, weight x
    (1 - sigmoid(beta x KL - reward)) of an undesirable response. KL is estimated from each prompt with the response to
    the previous prompt of the step, and is at least 0. `apo_zero_unpaired`: the same with KL = 0 (arXiv 2408.06266)."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable responses. This weight times their number should be 1 to 1.33 times the same product for
    undesirable responses."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of undesirable responses."""


class KtoConfig(SftConfig):
    """`type = "sft"`, `trainer_type = "kto"`: learn from responses with a label, desirable or not."""

    algorithm: ClassVar[str] = "kto"
    rows: ClassVar[str] = "labelled"
    allows_validation_completions: ClassVar[bool] = False
    reports_rewards: ClassVar[bool] = True

    trainer_type: Literal["kto"] = "kto"  # type: ignore[assignment]
    """Algorithm: KTO."""
    label_column_name: str = "label"
    """Column with the label of the response, desirable or not: true or false, or 1 or 0."""
    kto: KtoLossConfig = KtoLossConfig()
    """Settings of the loss of a labelled response."""

    @property
    def saves_reference_logprobs(self) -> bool:
        return True

    @property
    def auxiliary_model_names(self) -> tuple[str, ...]:
        return ("reference",)

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if self.kto.loss_type == "kto" and stage.recipe.train.train_batch_per_replica < 2:
            reason = "the KL estimate of 'kto' needs the response to another prompt of the step"
            remedy = "give at least 2, or kto.loss_type = 'apo_zero_unpaired'"
            yield f"train.train_batch_per_replica = 1: {reason}; {remedy}"
