"""A family that a user adds in one file: FLUX.1, whose network takes latents as a row of 2 x 2 patches."""

import torch

from cosmos_core.models.diffusion import DiffusionModel


class Flux(DiffusionModel):
    """`policy.model_class = "flux.py:Flux"`."""

    def text_embedding(self, prompts):
        given = list(prompts)
        with self._working("text_encoder", "text_encoder_2"):
            tokens, pooled, _ = self.pipeline.encode_prompt(
                given, given, device=self.device, max_sequence_length=self.config.max_prompt_length
            )
        return {"prompt_embeds": tokens.cpu(), "pooled_prompt_embeds": pooled.cpu()}

    def nft_prepare_transformer_input(self, latents, sigma_B, text, num_conditioning_B=None):
        batch, channels, height, width = latents.shape
        pipeline = self.folder.pipeline_class
        return {
            "hidden_states": pipeline._pack_latents(latents, batch, channels, height, width),
            "timestep": sigma_B,
            "guidance": None,
            "encoder_hidden_states": text["prompt_embeds"],
            "pooled_projections": text["pooled_prompt_embeds"],
            "txt_ids": torch.zeros(text["prompt_embeds"].shape[1], 3),
            "img_ids": pipeline._prepare_latent_image_ids(
                batch, height // 2, width // 2, latents.device, latents.dtype
            ),
        }

    def velocity_of(self, output, latents):
        return self.latents_in(output, latents.shape[1:])

    def latents_in(self, hidden_states, shape):
        channels, height, width = shape
        patches = hidden_states.unflatten(1, (height // 2, width // 2)).unflatten(-1, (channels, 2, 2))
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    @property
    def num_channels(self):
        return super().num_channels // 4

    @property
    def size_multiple(self):
        return super().size_multiple * 2
