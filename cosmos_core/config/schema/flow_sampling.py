"""`[policy.diffusers.sample]` and `[policy.diffusers.flow_rl]`: how diffusion models generate images and videos."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit
from cosmos_core.config.schema.table import Table, bounds_validator
from cosmos_core.types import StepWindow

STOCHASTIC_SOLVERS = ("flow", "dance", "ddim", "cps")
_DenoisingSteps = Annotated[PositiveInt, FieldUnit("denoising steps")]


class SampleConfig(Table):
    """`[policy.diffusers.sample]`: settings of the sampler that generates images and videos."""

    num_steps: _DenoisingSteps = 40
    """Number of denoising steps in rollouts."""
    eval_num_steps: _DenoisingSteps = 40
    """Number of denoising steps in validation."""
    guidance_scale: NonNegativeFloat = 4.5
    """Scale of classifier-free guidance, as the diffusers pipeline of the model defines it; 1 or less: no guidance."""
    global_std: bool = True
    """Divide advantages by the standard deviation of all rewards of a train step; False: by the standard deviation
    within each group, as Cosmos-RL does, which declares this key but never reads it."""
    noise_level: NonNegativeFloat = 1.0
    """Scale of the noise (eta) that stochastic denoising steps add."""
    deterministic_sampling: bool = False
    """Make every denoising step of a rollout deterministic: it follows the differential equation without noise."""
    solver: Literal["flow", "dance", "cps", "ddim", "dpm1", "dpm2", "euler"] = "dpm2"
    """Kind of denoising steps. Stochastic steps, unless `deterministic_sampling`: those of FlowGRPO (`flow`, arXiv
    2505.05470), DanceGRPO (`dance`, 2505.07818), FlowCPS (`cps`, 2509.05952) or `ddim`. Solvers of the differential
    equation: DPM-Solver++ of order 2 (`dpm2`) or of order 1, which is Euler's method (`dpm1`, `euler`). Validation
    always uses a solver; the stochastic steps of FlowGRPO with a solver are those of `flow`."""
    sigma_schedule: Literal["", "flow", "euler", "dpm", "unipc", "karras"] = ""
    """Schedule of noise levels: evenly spaced and shifted, from 1 to 0 (`flow`), or that of a scheduler of diffusers:
    FlowMatchEuler, DPMSolverMultistep, UniPC, or UniPC with Karras' levels (`karras`); empty: that of the pipeline."""


class FlowRLConfig(Table):
    """`[policy.diffusers.flow_rl]`: settings of FlowGRPO and DDRL, which are read with `trainer_type = "flow_grpo"`
    (arXiv 2505.05470) and `"ddrl"` (arXiv 2512.04332)."""

    train_on: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1), FieldUnit("denoising steps")] = (
        0, 1, 2, 3, 4, 5, 6, 7,
    )  # fmt: skip
    """Denoising steps of a rollout that are trained on, counted from the noise; the last step is never trained on."""
    window_size: Annotated[PositiveInt | None, FieldUnit("denoising steps")] = None
    """Number of consecutive denoising steps of a rollout that are stochastic and trained on, while all other steps are
    deterministic (Flow-GRPO-Fast); None: all steps are stochastic."""
    window_range: Annotated[
        tuple[NonNegativeInt, PositiveInt] | None,
        Field(strict=False),
        FieldUnit("denoising steps"),
        EnabledBy("window_size"),
    ] = None
    """Range in which the stochastic window lies: the first step that it can contain, and the step after the last one;
    None: the first half of the steps."""
    window_moves_every: Annotated[NonNegativeInt, FieldUnit("train steps"), EnabledBy("window_size")] = 0
    """Number of train steps after which the stochastic window moves by one step towards the data (MixGRPO, arXiv
    2507.21802); 0: its position is sampled in each train step."""
    guard: bool = False
    """Centre log-ratios and weight denoising steps equally (GRPO-Guard, arXiv 2510.22319); useful clip ranges are then
    about 2e-6."""
    use_same_seed: bool = True
    """Start all images or videos of one prompt in a rollout from the same noise."""
    min_conditional_frames: Annotated[NonNegativeInt, FieldUnit("latent frames")] = 0
    """Minimum number of conditioning frames of rollouts, from the clip of the row, for a network that supports them."""
    max_conditional_frames: Annotated[NonNegativeInt, FieldUnit("latent frames")] = 0
    """Maximum number of conditioning frames in rollouts; the number is sampled uniformly for each prompt and train
    step. 0: rollouts are conditioned only on text."""
    exp_reward: bool = False
    """Replace the advantage A by -exp(-A) before it is clipped."""
    data_beta: NonNegativeFloat = 0.0
    """Weight of the diffusion loss on real images or clips, the regulariser of DDRL; 0: no such loss."""
    data_on_first_only: Annotated[bool, EnabledBy("use_rl_sigma_and_noise")] = False
    """Compute the diffusion loss on real clips only in the first trained step of a rollout."""
    use_rl_sigma_and_noise: bool = True
    """Compute the diffusion loss on real clips at the rollout's noise level and with its noise; False: noise level and
    noise are sampled as in SFT."""

    _check_frames = bounds_validator("min_conditional_frames", "max_conditional_frames")

    @model_validator(mode="after")
    def _check_window_range(self) -> Self:
        if self.window_size and self.window_range and self.window_range[1] - self.window_range[0] < self.window_size:
            window_range = list(self.window_range)
            raise ValueError(f"window_range = {window_range} has no room for window_size = {self.window_size}")
        return self


def stochastic_step_window(flow_rl: FlowRLConfig, num_steps: int) -> StepWindow | None:
    """Return the window of stochastic steps in a rollout of `num_steps` denoising steps: its length, the range of steps
    in which it lies, and the number of train steps after which it moves. None: all steps are stochastic."""
    if flow_rl.window_size is None:
        return None
    first_step, end_step = flow_rl.window_range or (0, max(flow_rl.window_size, num_steps // 2))
    return StepWindow(flow_rl.window_size, first_step, min(end_step, num_steps - 1), flow_rl.window_moves_every)
