"""`[policy.diffusers]`: how a diffusion model reads text and media, and where training looks."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cosmos_core.config.schema.flow_sampling import FlowRLConfig, SampleConfig
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.marks import Unit
from cosmos_core.config.schema.planned import TokenizerConfig
from cosmos_core.config.schema.table import Table, check_order
from cosmos_core.config.schema.values import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class DiffusersConfig(Table):
    """`[policy.diffusers]`"""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the text encoders; the VAE is always float32, and the denoiser has `train.master_dtype`."""
    max_prompt_length: Annotated[PositiveInt, Unit("tokens")] = 300
    """Maximum number of tokens of a prompt for the text encoder; for Stable Diffusion 3 of its T5."""
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"] = "logit_normal"
    """Density or weighting of the noise levels in SFT (arXiv 2403.03206, section 3.1), by the names of diffusers:
    `logit_normal` and `mode` are densities, `sigma_sqrt` and `cosmap` weight the loss of uniform levels, `none` is
    uniform and unweighted."""
    train_flow_shift: PositiveFloat | None = None
    """Shifts the noise levels of training towards noise; None: as the pipeline's scheduler does, of Cosmos-Predict2.5
    by 5. Declared as 3.0 but never read in Cosmos-RL."""
    offload: bool = True
    """Keep text encoders and VAE in host memory between uses."""
    logit_mean: float = 0.0
    """Mean of the logit-normal density."""
    logit_std: NonNegativeFloat = 1.0
    """Standard deviation of the logit-normal density."""
    prompt_dropout: Fraction = 0.1
    """Fraction of SFT samples whose prompt is replaced by the empty prompt, which classifier-free guidance needs;
    Cosmos-RL has no such setting."""
    min_given_frames: Annotated[NonNegativeInt, Unit("latent frames")] = 0
    """Minimum number of conditioning frames in SFT, for a network that supports them (Cosmos-Predict2.5); 0: only
    text."""
    max_given_frames: Annotated[NonNegativeInt, Unit("latent frames")] = 2
    """Maximum number of conditioning frames; each sample has a uniformly sampled number. 1 trains image2world, 2 also
    video2world."""
    inference_size: Annotated[tuple[PositiveInt, PositiveInt], Unit("pixels"), Field(strict=False)] = (1024, 1024)
    """Height and width."""
    inference_frames: Annotated[PositiveInt, Unit("frames")] = 41
    """Of a generated video."""
    train_frames: Annotated[PositiveInt, Unit("frames")] = 41
    """Of a training clip."""
    timesteps_fraction: Fraction = 1.0
    """Share of the sampler's steps that DiffusionNFT trains on (also written `timestep_fraction`)."""
    nft_beta: PositiveFloat = 1.0
    """Beta of DiffusionNFT (arXiv 2509.16117)."""
    weight_copy_decay_type: Literal[0, 1, 2] = 0
    """Fraction of its weights that the old policy keeps at its update after n optimizer steps: 0 (0), min(0.001 n, 0.5)
    (1), or 0 for 75 steps and then min(0.0075 (n - 75), 0.999) (2)."""
    lora: LoraConfig | None = None
    """Adapters; see [policy.lora]."""
    sample: SampleConfig = SampleConfig()
    """Sampler."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Video tokenizer."""
    flow_rl: FlowRLConfig = FlowRLConfig()
    """FlowGRPO and DDRL."""

    @model_validator(mode="after")
    def _given_frames(self) -> Self:
        check_order(self, "min_given_frames", "max_given_frames")
        return self
