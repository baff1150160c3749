"""`[policy.diffusers]`: what diffusion models need beside the model itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cosmos_core.config.schema.flow_rl import FlowRLConfig
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.table import (
    LATER,
    DType,
    Fraction,
    Frames,
    NonNegativeFloat,
    PositiveInt,
    Table,
    Tokens,
    Unit,
    no_effect,
    planned,
)

_DIFFUSION = planned("diffusion models are not in this version; leave [policy.diffusers] out")
_DEAD = "declared but never read in Cosmos-RL either"


class SampleConfig(Table):
    """`[policy.diffusers.sample]`: how images and videos are drawn."""

    num_steps: Annotated[PositiveInt, Unit("denoising steps"), _DIFFUSION, LATER] = 40
    """In rollouts."""
    eval_num_steps: Annotated[PositiveInt, Unit("denoising steps"), _DIFFUSION, LATER] = 40
    """In validation."""
    guidance_scale: Annotated[NonNegativeFloat, _DIFFUSION, LATER] = 4.5
    """Classifier-free guidance; 1: off."""
    global_std: Annotated[bool, no_effect(_DEAD), LATER] = True
    """Would divide advantages by the standard deviation of the whole batch."""
    noise_level: Annotated[NonNegativeFloat, _DIFFUSION, LATER] = 1.0
    """Eta of the SDE solvers."""
    deterministic_sampling: Annotated[bool, _DIFFUSION, LATER] = False
    """ODE in place of SDE."""
    solver: Annotated[Literal["flow", "dance", "ddim", "dpm1", "dpm2", "euler"], _DIFFUSION, LATER] = "dpm2"
    """Sampler; `dpm1` and `dpm2` need `deterministic_sampling`."""


class TokenizerConfig(Table):
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5."""

    chunk_duration: Annotated[Frames, _DIFFUSION, LATER] = 81
    """Frames that the VAE takes at once."""
    load_mean_std: Annotated[bool, _DIFFUSION, LATER] = False
    """Load the statistics of the latents."""
    compile_encode: Annotated[bool, _DIFFUSION, LATER] = False
    """torch.compile the encoder."""
    temporal_window: Annotated[Frames, _DIFFUSION, LATER] = 16
    """Window of the VAE in time."""


class DiffusersConfig(Table):
    """`[policy.diffusers]`"""

    dtype: Annotated[DType, _DIFFUSION, LATER] = "float32"
    """Of the loaded pipeline; the VAE is always float32."""
    is_video: Annotated[bool, _DIFFUSION, LATER] = False
    """Latents of five dimensions in place of four."""
    max_prompt_length: Annotated[Tokens, _DIFFUSION, LATER] = 300
    """Longest prompt that the text encoder takes."""
    weighting_scheme: Annotated[Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none"], _DIFFUSION, LATER] = (
        "logit_normal"
    )
    """Density of the timesteps in SFT, by the names of diffusers."""
    train_flow_shift: Annotated[float, no_effect(_DEAD), LATER] = 3.0
    """Would shift the timesteps of training."""
    offload: Annotated[bool, _DIFFUSION, LATER] = True
    """Keep text encoder and VAE in host memory between uses."""
    logit_mean: Annotated[float, _DIFFUSION, LATER] = 0.0
    """Mean of the logit-normal density."""
    logit_std: Annotated[NonNegativeFloat, _DIFFUSION, LATER] = 1.0
    """Standard deviation of the logit-normal density."""
    inference_size: Annotated[
        tuple[PositiveInt, PositiveInt], Field(strict=False), Unit("pixels"), _DIFFUSION, LATER
    ] = (1024, 1024)
    """Height and width."""
    inference_frames: Annotated[Frames, _DIFFUSION, LATER] = 41
    """Of a generated video."""
    train_frames: Annotated[Frames, _DIFFUSION, LATER] = 41
    """Of a training clip."""
    timesteps_fraction: Annotated[Fraction, _DIFFUSION, LATER] = 1.0
    """Share of the sampler's steps that DiffusionNFT trains on (also written `timestep_fraction`)."""
    nft_beta: Annotated[float, _DIFFUSION, LATER] = 1.0
    """Beta of DiffusionNFT (arXiv 2509.16117)."""
    weight_copy_decay_type: Annotated[Literal[0, 1, 2], _DIFFUSION, LATER] = 0
    """How fast the old policy follows: 0 at once, 1 slowly, 2 after a start."""
    lora: Annotated[LoraConfig | None, no_effect("[policy.lora] is read, as in Cosmos-RL"), LATER] = None
    """Adapters; see [policy.lora]."""
    sample: SampleConfig = SampleConfig()
    """Sampler."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Video tokenizer."""
    flow_rl: FlowRLConfig = FlowRLConfig()
    """FlowGRPO and DDRL."""
