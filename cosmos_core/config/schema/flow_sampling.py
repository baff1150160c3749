"""`[policy.diffusers.sample]` and `[policy.diffusers.flow_rl]`: how diffusion models draw images and videos."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cosmos_core.config.schema.marks import Needs, Unit
from cosmos_core.config.schema.table import Table, check_order
from cosmos_core.config.schema.values import NonNegativeFloat, NonNegativeInt, PositiveInt
from cosmos_core.types import Window

KERNELS = ("flow", "dance", "ddim", "cps")
_DenoisingSteps = Annotated[PositiveInt, Unit("denoising steps")]


class SampleConfig(Table):
    """`[policy.diffusers.sample]`: how images and videos are drawn."""

    num_steps: _DenoisingSteps = 40
    """In rollouts."""
    eval_num_steps: _DenoisingSteps = 40
    """In validation."""
    guidance_scale: NonNegativeFloat = 4.5
    """Scale of classifier-free guidance by the pipeline's formula; up to 1: no guidance."""
    global_std: bool = True
    """Divide advantages by the standard deviation of all rewards of a train step; False: by that of each group.
    Declared but never read in Cosmos-RL, which divides by that of each group."""
    noise_level: NonNegativeFloat = 1.0
    """Eta of stochastic steps."""
    deterministic_sampling: bool = False
    """Every step of a rollout follows the differential equation, without noise."""
    solver: Literal["flow", "dance", "cps", "ddim", "dpm1", "dpm2", "euler"] = "dpm2"
    """Kind of sampling steps: the stochastic steps of FlowGRPO (`flow`, arXiv 2505.05470), DanceGRPO (`dance`,
    2505.07818), FlowCPS (`cps`, 2509.05952) or `ddim`, unless `deterministic_sampling`; or a solver of the differential
    equation, which validation uses in any case: DPM-Solver++ of order 2 (`dpm2`) or 1, which is Euler's. With a solver,
    the stochastic steps of FlowGRPO are those of `flow`."""
    sigma_schedule: Literal["", "flow", "euler", "dpm", "unipc", "karras"] = ""
    """Table of noise levels: evenly spaced and shifted from 1 to 0 (`flow`), or as the schedulers of diffusers have
    them (FlowMatchEuler, DPMSolverMultistep, UniPC, and UniPC with Karras' levels); empty: that of the pipeline."""


class FlowRLConfig(Table):
    """`[policy.diffusers.flow_rl]`: read with `trainer_type = "flow_grpo"` (arXiv 2505.05470) and `"ddrl"` (arXiv
    2512.04332)."""

    train_on: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1), Unit("denoising steps")] = (
        0, 1, 2, 3, 4, 5, 6, 7,
    )  # fmt: skip
    """Steps of a rollout that are trained on, counted from the noise; never the last."""
    window_size: Annotated[PositiveInt | None, Unit("denoising steps")] = None
    """So many consecutive steps of a rollout are stochastic and trained on, all others deterministic (Flow-GRPO-Fast);
    None: all are stochastic."""
    window_range: Annotated[
        tuple[NonNegativeInt, PositiveInt] | None, Field(strict=False), Unit("denoising steps"), Needs("window_size")
    ] = None
    """First stochastic step of the range and the step after the last one; None: the first half of the steps."""
    window_moves_every: Annotated[NonNegativeInt, Unit("train steps"), Needs("window_size")] = 0
    """Number of train steps after which the window moves by one step towards the data (MixGRPO, arXiv 2507.21802); 0:
    it is sampled in each train step."""
    guard: bool = False
    """Centre log-ratios and weigh steps alike (GRPO-Guard, arXiv 2510.22319); clip ranges are about 2e-6 then."""
    use_same_seed: bool = True
    """All completions of a group start from the same noise."""
    min_conditional_frames: Annotated[NonNegativeInt, Unit("latent frames")] = 0
    """Minimum number of conditioning frames from a row's clip in its rollouts, for a network that supports them."""
    max_conditional_frames: Annotated[NonNegativeInt, Unit("latent frames")] = 0
    """Maximum number of conditioning frames; each prompt and train step has a uniformly sampled number. 0: rollouts are
    conditioned only on text."""
    exp_reward: bool = False
    """Take -exp(-A) for the advantage A, before it is clipped."""
    data_beta: NonNegativeFloat = 0.0
    """Weight of the diffusion loss on real clips, the regulariser of DDRL; 0: no such loss."""
    data_on_first_only: Annotated[bool, Needs("use_rl_sigma_and_noise")] = False
    """Compute the diffusion loss on real clips only in the first trained step of a rollout."""
    use_rl_sigma_and_noise: bool = True
    """Compute it at the rollout's noise level and with its noise; False: both are drawn as in SFT."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        check_order(self, "min_conditional_frames", "max_conditional_frames")
        if self.window_size and self.window_range and self.window_range[1] - self.window_range[0] < self.window_size:
            raise ValueError(
                f"window_range = {list(self.window_range)} has no room for window_size = {self.window_size}"
            )
        return self


def window_of(config: FlowRLConfig, num_steps: int) -> Window | None:
    """Return which steps are stochastic; None: all."""
    if config.window_size is None:
        return None
    first, end = config.window_range or (0, max(config.window_size, num_steps // 2))
    return Window(config.window_size, first, min(end, num_steps - 1), config.window_moves_every)
