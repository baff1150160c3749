"""Tiny pipelines of diffusers with random weights and real classes, made in a second without a download.

`save(name, folder)` writes one as a user would have it on disk; `FAMILIES` are the names. Each has tokenizers of
characters, so prompts are long in tokens: put what tells them apart first. Without torchvision the network of
Cosmos-Predict2.5 needs `cosmos_core.models.cosmos_predict`, whose import puts a substitute there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tests.written_once import write_once

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Modules that every family has."""
_BYTES = sorted(ByteLevel.alphabet())
_WORD_START = "\u2581"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)


class NoChecker(ModelMixin, ConfigMixin):
    """Stands for the guardrail of Cosmos-Predict2.5: everything is safe."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


def save(name: str, folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write the pipeline of a family to `folder` and return it; `settings` are those of its function here."""
    return write_once(folder, _write, name, seed, *settings.items())


def _write(folder: Path, name: str, seed: int, *settings: tuple[str, Any]) -> None:
    make(name, seed=seed, **dict(settings)).save_pretrained(folder)
    index = folder / "model_index.json"
    components = json.loads(index.read_text())
    if components.pop("safety_checker", None):
        index.write_text(json.dumps(components, indent=2) + "\n")


def make(name: str, *, seed: int = 0, **settings: Any) -> Any:
    """Return the pipeline of a family in memory."""
    kept = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        pipeline = FAMILIES[name](**settings)
    finally:
        torch.set_rng_state(kept)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sd3(*, width: int = 32, layers: int = 2, latent_channels: int = 4, has_t5: bool = True, image: int = 16) -> Any:
    """Stable Diffusion 3.5: `width` of the denoiser is a multiple of 8; images of `image` pixels, a factor of 2 in the
    VAE."""
    clip, t5 = _clip_tokenizer(), _t5_tokenizer()
    encoders = [
        CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(clip), hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
                projection_dim=16, max_position_embeddings=77, bos_token_id=clip.bos_token_id,
                eos_token_id=clip.eos_token_id, pad_token_id=clip.pad_token_id,
            )
        )
        for _ in range(2)
    ]  # fmt: skip
    t5_model = T5EncoderModel(
        T5Config(
            vocab_size=len(t5), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
            relative_attention_num_buckets=8,
        )
    )  # fmt: skip
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=image // 2, patch_size=2, in_channels=latent_channels, out_channels=latent_channels,
        num_layers=layers, attention_head_dim=8, num_attention_heads=width // 8, caption_projection_dim=width,
        joint_attention_dim=32, pooled_projection_dim=32, pos_embed_max_size=max(16, image // 4),
        qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, latent_channels=latent_channels,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609,
        scaling_factor=1.5305, sample_size=image,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(), vae=vae.eval(), text_encoder=encoders[0].eval(), tokenizer=clip,
        text_encoder_2=encoders[1].eval(), tokenizer_2=_clip_tokenizer(),
        text_encoder_3=t5_model.eval() if has_t5 else None, tokenizer_3=t5 if has_t5 else None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip


def sana() -> Any:
    """SANA: images of 32 pixels, a factor of 2 in the VAE."""
    tokenizer, encoder = _gemma()
    block = ("ResBlock", "EfficientViTBlock")
    vae = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=block, decoder_block_types=block,
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm",
        decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
        sample_size=32,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=vae.eval(), transformer=transformer.eval(),
        scheduler=_flow_dpm(),
    )  # fmt: skip


def sana_video() -> Any:
    """SANA-Video: clips of 9 frames of 32 pixels, 3 latent frames."""
    tokenizer, encoder = _gemma()
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=8,
        mlp_ratio=2.5, sample_size=8, patch_size=(1, 2, 2), norm_elementwise_affine=False,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return diffusers.SanaVideoPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=_wan_vae(), transformer=transformer.eval(),
        scheduler=_flow_dpm(),
    )  # fmt: skip


def cosmos_predict(*, has_padding_mask: bool = True) -> Any:
    """Cosmos-Predict2.5: clips of 9 frames of 32 pixels, 3 latent frames."""
    tokenizer = _qwen_tokenizer()
    layers, hidden = 2, 16
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 16, "num_hidden_layers": layers,
            "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e6,
            "bos_token_id": None, "eos_token_id": None,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"},
        },
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16},
    )  # fmt: skip
    transformer = diffusers.CosmosTransformer3DModel(
        in_channels=17, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=2, mlp_ratio=2,
        text_embed_dim=layers * hidden, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0), concat_padding_mask=has_padding_mask, extra_pos_embed_type="learnable",
    )  # fmt: skip
    return diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(), tokenizer=tokenizer,
        transformer=transformer.eval(), vae=_wan_vae(), safety_checker=NoChecker(),
        scheduler=diffusers.UniPCMultistepScheduler(
            use_karras_sigmas=True, use_flow_sigmas=True, prediction_type="flow_prediction", sigma_max=200.0,
            sigma_min=0.01,
        ),
    )  # fmt: skip


FAMILIES: dict[str, Callable[..., Any]] = {
    "sd3": sd3, "sana": sana, "sana_video": sana_video, "cosmos_predict": cosmos_predict,
}  # fmt: skip
"""What makes the pipeline of each family."""
CLIPS = {"sana_video", "cosmos_predict"}
"""Families whose latents have frames."""


def pixels(name: str, count: int, *, seed: int = 0, size: int = 32) -> torch.Tensor:
    """Return random media of a family in [-1, 1]: images of `size` pixels, or clips of 9 frames of 32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, 9, 32, 32) if name in CLIPS else (count, 3, size, size)
    return torch.rand(shape, generator=generator) * 2 - 1


def _wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()


def _flow_dpm() -> Any:
    return diffusers.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )


def _gemma() -> tuple[Any, Any]:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*specials, *(f"<0x{i:02X}>" for i in range(256)), _WORD_START, *map(chr, range(33, 127))]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = GemmaTokenizer(vocab=vocab, merges=[], model_max_length=300)
    config = Gemma2Config(
        vocab_size=len(tokenizer), head_dim=16, hidden_size=8, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    return tokenizer, Gemma2Model(config).eval()


def _clip_tokenizer() -> Any:
    pieces = [*_BYTES, *(f"{piece}</w>" for piece in _BYTES), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", _WORD_START, *map(chr, range(33, 127))]
    return T5Tokenizer(vocab=[(piece, 0.0) for piece in pieces], extra_ids=0, model_max_length=77)


def _qwen_tokenizer() -> Any:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {piece: i for i, piece in enumerate([*_BYTES, *specials])}
    return Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=specials[1:], chat_template=_CHAT_TEMPLATE)
