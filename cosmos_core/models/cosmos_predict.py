"""Cosmos-Predict2.5: video clips from text, an image or a clip. The text inputs are the hidden states of all layers of
a language model.

Training does not run the pipeline's guardrail. The model's licence requires the guardrail when people use the model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from cosmos_core.errors import ConfigError
from cosmos_core.models.diffusion import DiffusionModel, TextInputs
from cosmos_core.models.sana_video import SanaVideo, video_compression_factors
from cosmos_core.models.video_context import ClipSharding, UlyssesAttention, shard_blocks

PIPELINES = ("Cosmos2_5_PredictBasePipeline",)

CONDITIONING_NOISE_LEVEL = 0.0001
"""Noise level that the network expects for clean conditioning frames."""
_DEFAULT_TRAIN_SHIFT = 5.0
_DENOISER_MODULE_NAME = "diffusers.models.transformers.transformer_cosmos"


class GuardrailPlaceholder:
    """Placeholder for the guardrail that the constructor of the pipeline requires."""

    def to(self, *args: Any, **kwargs: Any) -> GuardrailPlaceholder:
        """Return this object: in place of a guardrail model, it has no weights to move to a device."""
        return self

    def check_text_safety(self, prompt: str) -> bool:
        """Return True for every prompt, in place of a guardrail model."""
        return True

    def check_video_safety(self, frames: Any) -> Any:
        """Return the frames of a video unchanged, in place of a guardrail model."""
        return frames


class CosmosPredict(SanaVideo):
    """Cosmos-Predict2.5, whose network also receives clean conditioning frames and a mask that marks them."""

    prompt_tokenizer = ("tokenizer", 22)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
    pipeline_multiple = 16
    max_conditioning_frames = 2

    def text_embedding(self, prompts: Sequence[str]) -> TextInputs:
        with self._working("text_encoder"):
            prompt_embeddings = [
                self.pipeline.encode_prompt(
                    [prompt], do_classifier_free_guidance=False, device=self.device,
                    max_sequence_length=self.config.max_prompt_length,
                )[0].cpu()
                for prompt in prompts
            ]  # fmt: skip
        return {"prompt_embeds": torch.cat(prompt_embeddings)}

    def dropped_text(self, empty_text: Mapping[str, Tensor]) -> TextInputs:
        """Return zeros as text inputs for a prompt that prompt dropout removed, as in training of the base model."""
        return {name: torch.zeros_like(value) for name, value in empty_text.items()}

    def nft_prepare_transformer_input(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the denoiser for latents at their noise levels. Timesteps are noise levels from 0 to
        1, one per frame."""
        trained_frames_mask = self.trained_frames_mask(latents, num_conditioning_B)
        if trained_frames_mask is None:
            trained_frames_mask = latents.new_ones(len(latents), 1, latents.shape[2], 1, 1)
        noise_level = sigma_B.to(latents.device).view(-1, 1, 1, 1, 1)
        height, width = latents.shape[-2:]
        pixels_per_position = self.pixels_per_latent[1]
        return {
            "hidden_states": latents,
            "condition_mask": (1 - trained_frames_mask).expand(-1, -1, -1, height, width),
            "timestep": (1 - trained_frames_mask) * CONDITIONING_NOISE_LEVEL + trained_frames_mask * noise_level,
            "encoder_hidden_states": text["prompt_embeds"],
            "padding_mask": latents.new_zeros(1, 1, height * pixels_per_position, width * pixels_per_position),
        }

    def call_settings(self, *size: Any, **settings: Any) -> dict[str, Any]:
        return DiffusionModel.call_settings(self, *size, **settings)

    def check_context_parallel_size(self, size: int) -> None:
        """Raise ConfigError if `size` ranks cannot share the attention heads equally, as Ulysses attention requires."""
        num_heads = int(self.folder.settings(self.denoiser_name)["num_attention_heads"])
        if num_heads % size:
            raise ConfigError(
                f"policy.parallelism.cp_size = {size} does not divide the {num_heads} attention heads of the denoiser; "
                f"make it a divisor"
            )

    def shard_tokens(self, denoiser: Any, mesh: DeviceMesh) -> None:
        clip_sharding = ClipSharding(mesh)
        timestep_token_dims = {"embedded_timestep": 1, "temb": 1}
        shard_blocks(
            denoiser, clip_sharding, {**timestep_token_dims, "image_rotary_emb": 0, "extra_pos_emb": 1},
            lambda arguments: clip_sharding.distribute_tokens(len(arguments["image_rotary_emb"][0])),
            {"norm_out": timestep_token_dims},
        )  # fmt: skip
        for block in denoiser.transformer_blocks:
            block.attn1.set_processor(UlyssesAttention(clip_sharding))

    def apply_guidance(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Return the velocity with classifier-free guidance by the pipeline's formula; scale 0 disables guidance."""
        return conditional + guidance_scale * (conditional - unconditional)

    @property
    def train_shift(self) -> float:
        """Return the timestep shift of training from the recipe. If the recipe sets none, return a default, because the
        scheduler of this pipeline has no shift."""
        return self.config.train_flow_shift or _DEFAULT_TRAIN_SHIFT

    @property
    def pixels_per_latent(self) -> tuple[int, int]:
        """Return the VAE's compression factors in time and space, from the settings that the pipeline itself uses."""
        return video_compression_factors({"temperal_downsample": self.folder.settings("vae")["temperal_downsample"]})

    @property
    def num_channels(self) -> int:
        """Return the number of channels of a latent: the network's input channels without the conditioning mask."""
        return super().num_channels - 1

    @classmethod
    def component_placeholders(cls) -> dict[str, Any]:
        """Return a placeholder for the guardrail, which the constructor of the pipeline requires. Also call
        `substitute_torchvision`."""
        substitute_torchvision()
        return {"safety_checker": GuardrailPlaceholder()}

    def load_denoiser(self, dtype: torch.dtype) -> Any:
        substitute_torchvision()
        return super().load_denoiser(dtype)


def substitute_torchvision() -> None:
    """Replace `torchvision.transforms` in the network's module, if torchvision is not installed, by a resize function.
    The network uses torchvision only to resize its padding mask."""
    if importlib.util.find_spec("torchvision") is not None:
        return

    def resize(image: Tensor, size: list[int], interpolation: object = None) -> Tensor:
        return functional.interpolate(image, size=size, mode="nearest")

    interpolation_modes = SimpleNamespace(NEAREST="nearest")
    transforms_stub = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=interpolation_modes)
    importlib.import_module(_DENOISER_MODULE_NAME).__dict__.setdefault("transforms", transforms_stub)


FAMILY = CosmosPredict
