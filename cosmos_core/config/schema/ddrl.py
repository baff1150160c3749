"""`[train.train_policy]` with `trainer_type = "ddrl"`: FlowGRPO with real clips beside its own (arXiv 2512.04332)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from cosmos_core.config.schema.algorithm import RowKind
from cosmos_core.config.schema.flow_grpo import FlowGrpoConfig
from cosmos_core.config.schema.table import InStage


class DdrlConfig(FlowGrpoConfig):
    """`trainer_type = "ddrl"`: FlowGRPO whose rows are images or clips with their prompts, with the diffusion loss on
    them in place of a KL term (arXiv 2512.04332); its weight is `policy.diffusers.flow_rl.data_beta`."""

    algorithm: ClassVar[str] = "ddrl"
    rows: ClassVar[RowKind] = "media"

    trainer_type: Literal["ddrl"] = "ddrl"  # type: ignore[assignment]
    """The algorithm."""

    def refusals(self, stage: InStage) -> Iterator[str]:
        """See `Table.refusals`."""
        yield from super().refusals(stage)
        if not stage.recipe.policy.diffusers.flow_rl.data_beta:
            yield (
                "policy.diffusers.flow_rl.data_beta = 0 leaves the real clips of trainer_type = 'ddrl' out; set it to "
                "about 0.01, or take 'flow_grpo'"
            )
