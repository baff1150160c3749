"""`[policy.diffusers.flow_rl]`: reinforcement learning on single denoising steps, FlowGRPO and DDRL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cosmos_core.config.schema.table import OURS, NonNegativeFloat, NonNegativeInt, Table, Unit, planned

_FLOW_RL = planned("FlowGRPO and DDRL are not in this version; leave [policy.diffusers.flow_rl] out")


class FlowRLConfig(Table):
    """Read with `trainer_type = "flow_grpo"` (arXiv 2505.05470) and `"ddrl"` (arXiv 2512.04332)."""

    train_on: Annotated[
        tuple[NonNegativeInt, ...], Field(strict=False, min_length=1), Unit("denoising steps"), _FLOW_RL, OURS
    ] = tuple(range(8))
    """Steps of a rollout that are trained on, counted from the noise."""
    solver_option: Annotated[Literal["2ab", "2mid", "1euler"], _FLOW_RL, OURS] = "2ab"
    """Solver of a rollout: multistep of order 2, midpoint, Euler."""
    s_churn: Annotated[NonNegativeFloat, _FLOW_RL, OURS] = 1.0
    """Noise that the solver adds, spread over all steps (Karras et al., arXiv 2206.00364); 0: none, which leaves
    nothing to learn from."""
    use_same_seed: Annotated[bool, _FLOW_RL, OURS] = True
    """All completions of a group start from the same noise."""
    min_conditional_frames: Annotated[NonNegativeInt, Unit("latent frames"), _FLOW_RL, OURS] = 1
    """Fewest frames of the clip that a rollout is given; 0: from text alone."""
    max_conditional_frames: Annotated[NonNegativeInt, Unit("latent frames"), _FLOW_RL, OURS] = 1
    """Most frames; the number is drawn evenly."""
    exp_reward: Annotated[bool, _FLOW_RL, OURS] = False
    """Take -exp(-A) for the advantage A, before it is clipped."""
    data_beta: Annotated[NonNegativeFloat, _FLOW_RL, OURS] = 0.0
    """Weight of the diffusion loss on real clips, DDRL's regulariser; 0: none."""
    data_on_first_only: Annotated[bool, _FLOW_RL, OURS] = False
    """Compute that loss at the first of the trained steps alone."""
    use_rl_sigma_and_noise: Annotated[bool, _FLOW_RL, OURS] = True
    """Compute it at the rollout's noise level and with its noise; False: both are drawn as in SFT."""

    @model_validator(mode="after")
    def _frames(self) -> FlowRLConfig:
        if self.min_conditional_frames > self.max_conditional_frames:
            raise ValueError(
                f"min_conditional_frames = {self.min_conditional_frames} must not be above max_conditional_frames = "
                f"{self.max_conditional_frames}"
            )
        return self
