"""Decoder of video latents in a separate process, once for all rewards of a request."""

import numpy as np

from cosmos_core.rewards.reward_model import Settings
from cosmos_core.rewards.wan_latents import WanLatents

_vae: WanLatents | None = None


def load(settings: Settings) -> int:
    """Load the VAE; return the number of channels of its latents: 16 for Wan2.1, 48 for Wan2.2.

    Raises:
        RewardError: the VAE cannot be loaded.
    """
    global _vae
    _vae = WanLatents("decode_args.model_path", settings.model_path, settings.device, settings.dtype)
    return _vae.num_channels


def decode(latents: np.ndarray) -> np.ndarray:
    """Return the videos of latents of shape B, C, T, H, W as uint8 of B, 3, F, H, W."""
    assert _vae is not None
    return _vae.decode(latents)
