"""`[train.train_policy.dpo]`: how a pair of answers is compared (arXiv 2305.18290)."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from cosmos_core.config.schema.table import OURS, Names, NonNegativeFloat, PositiveFloat, Table

LossType = Literal["sigmoid", "bco_pair", "sft"]


class DpoConfig(Table):
    """Read with `trainer_type = "dpo"`; Cosmos-RL has three of these in `[custom]`: `dpo_beta`, `dpo_loss_type`,
    `dpo_loss_weights`."""

    beta: Annotated[PositiveFloat, OURS] = 0.1
    """Reward of an answer: beta x (its log-probability - that under the reference)."""
    loss_type: Annotated[Names, OURS] = ("sigmoid",)
    """With rewards c of the chosen and r of the rejected answer: `sigmoid` is -log sigmoid(c - r), `bco_pair` -log
    sigmoid(c) - log sigmoid(-r), `sft` the mean of -log p over the chosen answers' tokens; or a list of them."""
    loss_weights: Annotated[tuple[NonNegativeFloat, ...] | None, Field(strict=False), OURS] = None
    """Weight of each; None: 1."""
    reference_free: Annotated[bool, OURS] = False
    """False: the reference is the model that the stage starts from. True: there is none, a reward is beta x
    log-probability, as in Cosmos-RL."""

    @field_validator("loss_type")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in get_args(LossType)]
        if unknown or not names:
            raise ValueError(f"loss_type = {list(names)} must be of {', '.join(get_args(LossType))}")
        return names

    @model_validator(mode="after")
    def _one_weight_each(self) -> DpoConfig:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise ValueError(
                f"loss_weights = {list(self.loss_weights)} must be one for each of loss_type = {list(self.loss_type)}"
            )
        return self
