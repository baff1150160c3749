"""`[train.train_policy]` with `trainer_type = "ddrl"`: FlowGRPO with a diffusion loss (arXiv 2512.04332)."""

from typing import ClassVar, Literal

from cosmos_core.config.schema.flow_grpo import FlowGrpoConfig


class DdrlConfig(FlowGrpoConfig):
    """`trainer_type = "ddrl"`: FlowGRPO whose rows are images or clips with their prompts, and whose diffusion loss on
    these rows takes the role of a KL term (arXiv 2512.04332)."""

    algorithm: ClassVar[str] = "ddrl"

    trainer_type: Literal["ddrl"] = "ddrl"  # type: ignore[assignment]
    """Algorithm: DDRL."""

    @property
    def rows(self) -> str:  # type: ignore[override]
        """Return the kind of rows, `media`: DDRL always learns from real clips, whatever the key `learns_data` says."""
        return "media"
