"""SANA-Video: SANA for video clips. The VAE is that of Wan or, in newer checkpoints, another VAE."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_core.models.sana import Sana
from cosmos_core.models.video_context import ClipSharding, SummedLinearAttention, exchange_frames, shard_blocks

PIPELINES = ("SanaVideoPipeline",)


class SanaVideo(Sana):
    """SANA-Video: the SANA architecture for video clips."""

    is_video = True

    def visual_embedding(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the latents of clips: the mode of the VAE's posterior, normalised per channel, as the mean, and None
        as the log-variance."""
        with self._working("vae") as vae:
            vae_encoding = vae.encode(pixels.to(self.device, torch.float32))
            latents = vae_encoding.latent_dist.mode() if hasattr(vae_encoding, "latent_dist") else vae_encoding.latent
            channel_mean, channel_std = latent_channel_statistics(vae, latents)
            return ((latents - channel_mean) / channel_std).cpu(), None

    def decode(self, latents: Tensor) -> Tensor:
        with self._working("vae") as vae:
            latents = latents.to(self.device, torch.float32)
            channel_mean, channel_std = latent_channel_statistics(vae, latents)
            return vae.decode(latents * channel_std + channel_mean, return_dict=False)[0]

    @property
    def pixels_per_latent(self) -> tuple[int, int]:
        return video_compression_factors(self.folder.settings("vae"))

    def call_settings(self, *size: Any, **settings: Any) -> dict[str, Any]:
        pipeline_call_arguments = super().call_settings(*size, **settings)
        return pipeline_call_arguments | {"frames": pipeline_call_arguments.pop("num_frames")}

    def check_context_parallel_size(self, size: int) -> None:
        """Accept any number of context-parallel ranks, because each rank gets whole frames."""

    def shard_tokens(self, denoiser: Any, mesh: DeviceMesh) -> None:
        """Divide the frames of each clip among the ranks of a mesh; blocks convolve over time, so frames stay whole."""
        clip_sharding, tokens_per_frame = ClipSharding(mesh), 1

        def shard_frames(arguments: dict[str, Any]) -> None:
            nonlocal tokens_per_frame
            tokens_per_frame = arguments["height"] * arguments["width"]
            clip_sharding.distribute_tokens(arguments["frames"] * tokens_per_frame, tokens_per_frame)
            arguments["frames"] = clip_sharding.num_local_tokens // tokens_per_frame

        shard_blocks(denoiser, clip_sharding, {"rotary_emb": 1}, shard_frames, {})
        for block in denoiser.transformer_blocks:
            block.attn1.set_processor(SummedLinearAttention(clip_sharding))
            exchange_frames(block.ff.conv_temp, clip_sharding, lambda: tokens_per_frame)


def latent_channel_statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each channel of a VAE's latents, from its configuration or its
    buffers, in a shape that broadcasts over `latents`; 0 and 1 if it has neither."""
    channel_statistics = []
    for name, default_value in (("latents_mean", 0.0), ("latents_std", 1.0)):
        stats_C = vae.config.get(name)
        stats_C = vae.__dict__.get("_buffers", {}).get(name) if stats_C is None else stats_C
        stats_C = torch.full((latents.shape[1],), default_value) if stats_C is None else torch.as_tensor(stats_C)
        channel_statistics.append(stats_C.to(latents).view(1, -1, 1, 1, 1))
    return channel_statistics[0], channel_statistics[1]


def video_compression_factors(vae_settings: dict[str, Any]) -> tuple[int, int]:
    """Return from the settings of a VAE how many frames, and how many pixels per side, a latent position covers."""
    temporal_factor = vae_settings.get("scale_factor_temporal") or vae_settings.get("temporal_compression_ratio")
    spatial_factor = vae_settings.get("scale_factor_spatial") or vae_settings.get("spatial_compression_ratio")
    if temporal_factor and spatial_factor:
        return int(temporal_factor), int(spatial_factor)
    downsamples_time_by_block = vae_settings.get("temperal_downsample") or []
    return 2 ** sum(downsamples_time_by_block), 2 ** len(downsamples_time_by_block)


FAMILY = SanaVideo
