"""SANA: the language model Gemma 2 encodes prompts, and a deterministic deep-compression autoencoder encodes images.

As in the pipeline, an instruction to enrich the prompt is put before the prompt.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosmos_core.models.diffusion import DiffusionModel, TextInputs

PIPELINES = ("SanaPipeline",)


class Sana(DiffusionModel):
    """SANA, whose denoiser gets the token embeddings of the prompt and their mask as text inputs."""

    lora_targets: ClassVar[tuple[str, ...]] = (
        "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0",
        "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
    )  # fmt: skip

    prompt_tokenizer = ("tokenizer", 1)
    text_components = ("text_encoder", "tokenizer")
    pipeline_multiple = 32

    def text_embedding(self, prompts: Sequence[str]) -> TextInputs:
        pipeline_call_parameters = inspect.signature(type(self.pipeline).__call__).parameters
        prompt_instruction = pipeline_call_parameters["complex_human_instruction"].default
        embeddings_and_masks = []
        with self._working("text_encoder"):
            for prompt in prompts:
                embedding_1LD, prompt_mask_1L, _, _ = self.pipeline.encode_prompt(
                    [prompt], False, device=self.device, max_sequence_length=self.config.max_prompt_length,
                    complex_human_instruction=prompt_instruction if prompt else None,
                )  # fmt: skip
                embeddings_and_masks.append((embedding_1LD.cpu(), prompt_mask_1L.cpu()))
        embeddings_BLD, prompt_mask_BL = (torch.cat(tensors) for tensors in zip(*embeddings_and_masks, strict=True))
        return {"prompt_embeds": embeddings_BLD, "prompt_attention_mask": prompt_mask_BL}

    def visual_embedding(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        with self._working("vae") as vae:
            latents: Tensor = vae.encode(pixels.to(self.device, torch.float32)).latent * self._vae_scaling[0]
            return latents.cpu(), None

    def nft_prepare_transformer_input(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> dict[str, Any]:
        return {
            "hidden_states": latents,
            "timestep": sigma_B * self.num_timesteps * self.timestep_scale,
            "encoder_hidden_states": text["prompt_embeds"],
            "encoder_attention_mask": text["prompt_attention_mask"],
        }

    def call_settings(self, *size: Any, **settings: Any) -> dict[str, Any]:
        """Return the keyword arguments of a call of the diffusers pipeline, without prompt and seed. They disable the
        rounding of the image size to one of the training resolutions."""
        return super().call_settings(*size, **settings) | {"use_resolution_binning": False}

    @property
    def timestep_scale(self) -> float:
        """Return the factor by which timesteps are multiplied before the network gets them."""
        return float(self.folder.settings(self.denoiser_name).get("timestep_scale", 1.0))


FAMILY = Sana
