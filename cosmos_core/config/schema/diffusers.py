"""`[policy.diffusers]`: text encoders, noise levels, sizes of images and videos, and sampling of a diffusion model."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cosmos_core.config.schema.field_metadata import FieldUnit
from cosmos_core.config.schema.flow_sampling import FlowRLConfig, SampleConfig
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.table import Table, bounds_validator
from cosmos_core.config.schema.value_types import Fraction


class VideoTokenizerConfig(Table):
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5; the table has no effect."""


class DiffusersConfig(Table):
    """`[policy.diffusers]`: settings of diffusion models."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the text encoders; the VAE is always float32, and the denoiser has `train.master_dtype`."""
    max_prompt_length: Annotated[PositiveInt, FieldUnit("tokens")] = 300
    """Maximum number of tokens of a prompt for the text encoder; with Stable Diffusion 3 for its T5 encoder."""
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"] = "logit_normal"
    """Density or weighting of the noise levels in SFT (arXiv 2403.03206, section 3.1), by the names of diffusers:
    `logit_normal` and `mode` are densities, `sigma_sqrt` and `cosmap` weight the loss of uniform levels, `none` is
    uniform and unweighted."""
    train_flow_shift: PositiveFloat | None = None
    """Factor that shifts the noise levels of training towards noise; None: the shift of the pipeline's scheduler, for
    Cosmos-Predict2.5 a shift of 5. Declared as 3.0 but never read in Cosmos-RL."""
    offload: bool = True
    """Keep text encoders and VAE in host memory while they are not in use."""
    logit_mean: float = 0.0
    """Mean of the logit-normal density of noise levels."""
    logit_std: NonNegativeFloat = 1.0
    """Standard deviation of the logit-normal density of noise levels."""
    prompt_dropout: Fraction = 0.1
    """Fraction of SFT samples whose prompt is replaced by the empty prompt, which classifier-free guidance needs;
    Cosmos-RL has no such setting."""
    min_given_frames: Annotated[NonNegativeInt, FieldUnit("latent frames")] = 0
    """Minimum number of conditioning frames in SFT, for a network that supports them (Cosmos-Predict2.5); 0: some
    samples are conditioned only on text."""
    max_given_frames: Annotated[NonNegativeInt, FieldUnit("latent frames")] = 2
    """Maximum number of conditioning frames in SFT; the number is sampled uniformly for each sample. 1 trains
    image2world, 2 also video2world."""
    inference_size: Annotated[tuple[PositiveInt, PositiveInt], FieldUnit("pixels"), Field(strict=False)] = (1024, 1024)
    """Height and width of images and videos."""
    inference_frames: Annotated[PositiveInt, FieldUnit("frames")] = 41
    """Number of frames of a generated video."""
    train_frames: Annotated[PositiveInt, FieldUnit("frames")] = 41
    """Number of frames of a training clip."""
    timesteps_fraction: Fraction = 1.0
    """Fraction of the sampler's denoising steps that DiffusionNFT trains on (also written `timestep_fraction`)."""
    nft_beta: PositiveFloat = 1.0
    """Beta of DiffusionNFT (arXiv 2509.16117): its positive policy mixes beta of the trained policy with 1 - beta of
    the old policy, its negative policy -beta of the trained with 1 + beta of the old policy."""
    weight_copy_decay_type: Literal[0, 1, 2] = 0
    """Schedule of the fraction of its weights that the old policy of DiffusionNFT keeps when it is updated, after n
    optimizer steps: 0 (schedule 0), min(0.001 n, 0.5) (schedule 1), or 0 for 75 steps and then min(0.0075 (n - 75),
    0.999) (schedule 2)."""
    lora: LoraConfig | None = None
    """Settings of LoRA for the denoiser, which have no effect; `[policy.lora]` is read instead."""
    sample: SampleConfig = SampleConfig()
    """Settings of the sampler that generates images and videos."""
    tokenizer: VideoTokenizerConfig = VideoTokenizerConfig()
    """Settings of the video tokenizer, which have no effect."""
    flow_rl: FlowRLConfig = FlowRLConfig()
    """Settings of FlowGRPO and DDRL."""

    _check_frames = bounds_validator("min_given_frames", "max_given_frames")
