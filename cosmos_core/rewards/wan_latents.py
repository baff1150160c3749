"""Encoder and decoder of the video latents that Cosmos-RL's clients and service use: latent means of Wan's VAE.

Latents of B videos with F frames of H by W pixels have the shape B, C, T, H/8, W/8 with T = 1 + (F - 1) / 4. They are
always normalised, per channel, by the statistics in the configuration of the VAE. `protocol.py` has the wire format.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.errors import RewardError
from cosmos_core.rewards.reward_model import require_packages

_HUB_FILE_PATTERN = re.compile(r"(?:https://huggingface\.co/)?([\w.-]+/[\w.-]+)/(?:resolve/[\w.-]+/)?([\w.-]+\.pth)")


class WanVae:
    """Wan VAE from a folder or Hub name of diffusers, or from the published file `Wan2.1_VAE.pth`."""

    def __init__(self, setting_name: str, path: str, device: str, dtype: str = "bfloat16") -> None:
        """Load the VAE at `path`, in float32 on a CPU. Raise `RewardError`, which names the setting `setting_name`, if
        the VAE cannot be loaded."""
        install_hint = f"pip install diffusers torch, or leave {setting_name} empty"
        require_packages(setting_name, install_hint, "torch", "diffusers")
        import torch
        from diffusers import AutoencoderKLWan

        self._device = torch.device(device if torch.cuda.is_available() or not device.startswith("cuda") else "cpu")
        self._dtype = torch.float32 if self._device.type == "cpu" else getattr(torch, dtype)
        try:
            if path.endswith(".pth"):
                vae: Any = _load_published_vae(path).to(self._dtype)
            else:
                vae = AutoencoderKLWan.from_pretrained(path, torch_dtype=self._dtype)
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            error_text = " ".join(str(error).split())[:300]
            raise RewardError(
                f"{setting_name} = {path!r}: {error_text}; give a Wan VAE in diffusers' format, or Wan2.1_VAE.pth, or "
                "none"
            ) from error
        self._vae = vae.to(self._device).eval().requires_grad_(False)
        self._latents_mean, self._latents_std = (
            torch.tensor(values, device=self._device, dtype=self._dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self.num_channels = int(vae.config.z_dim)

    def encode(self, videos: Sequence[np.ndarray]) -> np.ndarray:
        """Return the latents of videos of one shape (uint8: frames, height, width, 3) as float16 of B, C, T, H, W."""
        import torch

        latents = []
        with torch.inference_mode():
            for video in videos:
                pixel_tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(video, -1, 0)))[None].to(self._device)
                latent_mean = self._vae.encode((pixel_tensor / 127.5 - 1).to(self._dtype)).latent_dist.mode()
                latents.append(((latent_mean - self._latents_mean) / self._latents_std).to(torch.float16).cpu())
        return torch.cat(latents).numpy()

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Return the videos of latents as uint8 of B, 3, F, H, W; latents of type uint8 are bytes of bfloat16."""
        import torch

        all_latents = torch.from_numpy(np.array(latents))
        all_latents = all_latents.view(torch.bfloat16) if latents.dtype == np.uint8 else all_latents.to(torch.bfloat16)
        videos = []
        with torch.inference_mode():
            for latent in all_latents.to(self._device, self._dtype).split(1):
                video = self._vae.decode(latent * self._latents_std + self._latents_mean, return_dict=False)[0]
                videos.append((((1 + video.clamp(-1, 1)) / 2).float() * 255).to(torch.uint8).cpu())
        return torch.cat(videos).numpy()


def describe_vae(setting_name: str, path: str) -> str:
    """Return a line of text that describes the Wan VAE at `path`. Raise `RewardError`, which names the setting
    `setting_name`, if there is no Wan VAE."""
    from diffusers import AutoencoderKLWan

    if path.endswith(".pth"):
        if not Path(path).is_file() and not _HUB_FILE_PATTERN.fullmatch(path):
            raise RewardError(f"{setting_name} = {path!r}: no such file")
        return f"{setting_name}: {path}"
    try:
        vae_class_name = AutoencoderKLWan.load_config(path).get("_class_name", "")
    except (OSError, ValueError) as error:
        raise RewardError(f"{setting_name} = {path!r}: {' '.join(str(error).split())[:300]}") from error
    if vae_class_name != AutoencoderKLWan.__name__:
        remedy = f"give a Wan VAE ({AutoencoderKLWan.__name__})"
        raise RewardError(f"{setting_name} = {path!r} is of the class {vae_class_name!r}; {remedy}")
    return f"{setting_name}: {vae_class_name}"


def _load_published_vae(path: str) -> Any:
    """Return the VAE in a file in Wan's published format, on this machine or in a repository of the Hub."""
    import torch
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    vae_file = Path(path)
    if not vae_file.is_file() and (hub_path_match := _HUB_FILE_PATTERN.fullmatch(path)):
        from huggingface_hub import hf_hub_download

        vae_file = Path(hf_hub_download(*hub_path_match.groups()))
    state_dict = torch.load(vae_file, "cpu", weights_only=True)
    vae: Any = AutoencoderKLWan(base_dim=len(state_dict["encoder.conv1.weight"]), z_dim=len(state_dict["conv2.weight"]))
    vae.load_state_dict(convert_wan_vae_to_diffusers(state_dict))
    return vae
