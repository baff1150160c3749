"""Stable Diffusion 3.5 medium and SANA in their public shapes, with random weights or, on the meta device, none; and
floating-point operations by the counter of PyTorch. diffusers and transformers are imported when a shape is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

T5_TOKENS, CLIP_TOKENS = 256, 77


class Shape(NamedTuple):
    """What a denoiser is given for one image of 1,024 pixels; nothing of it has the dimension of a batch."""

    make: Callable[[], nn.Module]
    latents: tuple[int, ...]
    text: dict[str, tuple[int, ...]]
    """By the names that the family's `text_embedding` has; `prompt_attention_mask` is all ones."""
    family: str
    """The file in `cosmos_core.models`."""


def sd35_medium(layers: int = 24) -> nn.Module:
    """Return the transformer of Stable Diffusion 3.5 medium."""
    import diffusers

    return diffusers.SD3Transformer2DModel(  # type: ignore[no-any-return, return-value]
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
        pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=tuple(range(min(13, layers))),
    )  # fmt: skip


def sana(layers: int = 20) -> nn.Module:
    """Return the transformer of SANA with 1.6 billion weights."""
    import diffusers

    return diffusers.SanaTransformer2DModel(num_layers=layers)  # type: ignore[no-any-return, return-value]


SHAPES = {
    "SD3.5-medium": Shape(
        sd35_medium, (16, 128, 128),
        {"prompt_embeds": (CLIP_TOKENS + T5_TOKENS, 4096), "pooled_prompt_embeds": (2048,)}, "sd3",
    ),
    "SANA-1.6B": Shape(sana, (32, 32, 32), {"prompt_embeds": (300, 2304), "prompt_attention_mask": (300,)}, "sana"),
}  # fmt: skip


def flops_of(run: Callable[[], Any]) -> float:
    """Return the floating-point operations of matrix products, attention and convolutions in a call."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return float(counter.get_total_flops())


def sd35_step_flops(size: int) -> dict[str, float]:
    """Return the operations of what a train step of Stable Diffusion 3.5 medium, all weights, is made of: one image of
    `size` pixels and its prompt. Nothing is computed."""
    with torch.device("meta"):
        denoiser, vae, encoders = sd35_medium(), _vae(), _encoders()
        side = size // 8
        ids = {name: torch.zeros(1, T5_TOKENS if name == "T5-XXL" else CLIP_TOKENS, dtype=torch.long)
               for name in encoders}  # fmt: skip

        def learn() -> None:
            velocity: Tensor = denoiser(
                torch.zeros(1, 16, side, side), torch.zeros(1, CLIP_TOKENS + T5_TOKENS, 4096), torch.zeros(1, 2048),
                torch.zeros(1), return_dict=False,
            )[0]  # fmt: skip
            velocity.square().mean().backward()  # type: ignore[no-untyped-call]

        found = {"denoiser, forward and backward": flops_of(learn)}
        with torch.no_grad():
            found["VAE"] = flops_of(lambda: vae.encode(torch.zeros(1, 3, size, size)))
            for name, encoder in encoders.items():
                found[name] = flops_of(lambda encoder=encoder, name=name: encoder(ids[name]))  # type: ignore[misc]
    return found


def _vae() -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=16, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip


def _encoders() -> dict[str, Any]:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    def clip(width: int, layers: int, heads: int) -> Any:
        return CLIPTextModelWithProjection(
            CLIPTextConfig(  # type: ignore[call-arg]
                hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
                projection_dim=width, attn_implementation="sdpa",
            )
        )  # fmt: skip

    t5 = T5EncoderModel(
        T5Config(
            vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    return {"CLIP-L": clip(768, 12, 12), "CLIP-G": clip(1280, 32, 20), "T5-XXL": t5}
