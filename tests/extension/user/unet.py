"""A pipeline whose denoiser is called `unet`: Stable Diffusion as a rectified flow."""

from cosmos_core.models.diffusion import DiffusionModel


class FlowUnet(DiffusionModel):
    """`policy.model_class = "unet.py:FlowUnet"`."""

    denoiser_name = "unet"

    def text_embedding(self, prompts):
        with self._working("text_encoder"):
            tokens, _ = self.pipeline.encode_prompt(list(prompts), self.device, 1, False)
        return {"prompt_embeds": tokens.cpu()}

    def nft_prepare_transformer_input(self, latents, sigma_B, text, num_conditioning_B=None):
        return {
            "sample": latents,
            "timestep": sigma_B * self.num_timesteps,
            "encoder_hidden_states": text["prompt_embeds"],
        }

    @property
    def size_multiple(self):
        return self.pixels_per_latent[1] * 4

    def call_settings(self, *size, **settings):
        arguments = super().call_settings(*size, **settings)
        arguments.pop("max_sequence_length")
        return arguments
