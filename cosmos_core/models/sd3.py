"""Stable Diffusion 3 and 3.5: two CLIP models and a T5 encode the prompt, and a VAE encodes the image."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models.diffusion import DiffusionModel, TextInputs
from cosmos_core.models.pipeline_folder import PipelineFolder

PIPELINES = ("StableDiffusion3Pipeline",)

_MAX_PROMPT_TOKENS = 512


class SD3(DiffusionModel):
    """Stable Diffusion 3 and 3.5. The text inputs of the denoiser are the token embeddings of three text encoders and
    the pooled outputs of two of them."""

    prompt_tokenizer = ("tokenizer_3", 0)
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip

    def __init__(self, folder: PipelineFolder, config: DiffusersConfig, device: torch.device | str = "cpu") -> None:
        """Initialise the family; raise ConfigError if the pipeline does not accept prompts as long as configured."""
        if config.max_prompt_length > _MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"policy.diffusers.max_prompt_length = {config.max_prompt_length}: the T5 of a {folder.class_name} "
                f"takes at most {_MAX_PROMPT_TOKENS} tokens; lower it"
            )
        super().__init__(folder, config, device)

    def text_embedding(self, prompts: Sequence[str]) -> TextInputs:
        """Encode prompts to text inputs of the denoiser. Without a T5, its embeddings are zeros, as in the pipeline."""
        pipeline, prompt_list = self.pipeline, list(prompts)
        # Put the config of the denoiser in its place, because the pipeline reads the size of T5 embeddings from it.
        if pipeline.transformer is None:
            pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**self.folder.settings(self.denoiser_name)))
        with self._working("text_encoder", "text_encoder_2", "text_encoder_3"):
            token_embeddings, _, pooled_embedding, _ = pipeline.encode_prompt(
                prompt_list, prompt_list, prompt_list, device=self.device, do_classifier_free_guidance=False,
                max_sequence_length=self.config.max_prompt_length,
            )  # fmt: skip
        return {"prompt_embeds": token_embeddings.cpu(), "pooled_prompt_embeds": pooled_embedding.cpu()}

    def nft_prepare_transformer_input(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> dict[str, Any]:
        return {
            "hidden_states": latents,
            "timestep": sigma_B * self.num_timesteps,
            "encoder_hidden_states": text["prompt_embeds"],
            "pooled_projections": text["pooled_prompt_embeds"],
        }


FAMILY = SD3
