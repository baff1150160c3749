"""Decodes latents of videos in a process of its own, once for all rewards that are asked: Wan's VAE, by diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_core.errors import RewardError
from cosmos_core.rewards.served import Settings, require

_vae: Any = None
_normalised = False


def load(settings: Settings) -> None:
    """Load the VAE.

    Raises:
        RewardError: it cannot be loaded.
    """
    global _vae, _normalised
    require(
        "latent decoder", "pip install diffusers torch, or leave decode_args.model_path empty", "torch", "diffusers"
    )
    import torch
    from diffusers import AutoencoderKLWan

    device = settings.device if torch.cuda.is_available() or not settings.device.startswith("cuda") else "cpu"
    dtype = getattr(torch, settings.dtype) if device != "cpu" else torch.float32
    try:
        _vae = AutoencoderKLWan.from_pretrained(settings.model_path, torch_dtype=dtype).to(device).eval()
    except (OSError, ValueError) as error:
        raise RewardError(
            f"decode_args.model_path = {settings.model_path!r}: {' '.join(str(error).split())[:300]}; give a Wan "
            f"VAE in diffusers' format"
        ) from error
    _normalised = bool(settings.options.get("load_mean_std"))


def decode(latents: np.ndarray) -> np.ndarray:
    """Return the videos of latents of B, C, T, H, W as uint8 of B, 3, F, H, W; uint8 latents are bytes of bfloat16."""
    import torch

    with torch.inference_mode():
        tensor = torch.from_numpy(np.array(latents))
        tensor = tensor.view(torch.bfloat16) if latents.dtype == np.uint8 else tensor
        found = []
        for each in tensor.to(_vae.device, _vae.dtype).split(1):
            if _normalised:
                shape = (1, -1, 1, 1, 1)
                mean = torch.tensor(_vae.config.latents_mean, device=each.device, dtype=each.dtype).view(shape)
                std = torch.tensor(_vae.config.latents_std, device=each.device, dtype=each.dtype).view(shape)
                each = each * std + mean
            video = _vae.decode(each, return_dict=False)[0]
            found.append(((video.clamp(-1, 1) + 1) / 2 * 255).float().cpu().to(torch.uint8))
        return torch.cat(found).numpy()
