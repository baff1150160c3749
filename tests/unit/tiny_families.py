"""Tiny random models of the real classes, each with a byte-level tokenizer: two layers, made without a download.

A vision-language model has its vision tower; the rows are text. Weights are large enough that a wrong mask, position
or missing weight changes the logits far beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers.pre_tokenizers import ByteLevel

from tests.written_once import write_once

WINDOW = 6
"""Sliding windows and attention chunks in tokens: shorter than the rows of the tests."""

_NAMES = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_IMAGE, _VIDEO, _VISION_START, _VISION_END, _VOCABULARY = 259, 260, 261, 262, 264
_SPECIAL: dict[str, Any] = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256}
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    **_SPECIAL,
}  # fmt: skip
_HEADS_OF_16: dict[str, Any] = {**_TEXT, "head_dim": 16}
_MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_QWEN_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32
}  # fmt: skip
_QWEN_TOKENS: dict[str, Any] = {
    "image_token_id": _IMAGE, "video_token_id": _VIDEO, "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
}  # fmt: skip
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def _gemma3_vlm() -> hf.PreTrainedModel:
    text = {**_HEADS_OF_16, **_MIXED, "query_pre_attn_scalar": 16}
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config=text, vision_config={**_VISION, "vision_use_head": False}, mm_tokens_per_image=4,
            image_token_index=_IMAGE, boi_token_index=_VISION_START, eoi_token_index=_VISION_END,
            tie_word_embeddings=True, **_SPECIAL,
        )
    )  # fmt: skip


def _llama4_vlm() -> hf.PreTrainedModel:
    text = {
        **_HEADS_OF_16, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0],
    }  # fmt: skip
    vision = {**_VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    return hf.Llama4ForConditionalGeneration(
        hf.Llama4Config(
            text_config=text, vision_config=vision, image_token_index=_IMAGE, boi_token_index=_VISION_START,
            eoi_token_index=_VISION_END, **_SPECIAL,
        )
    )  # fmt: skip


def _mllama() -> hf.PreTrainedModel:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 32,
        "intermediate_layers_indices": [0], "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    text = {**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    config = hf.MllamaConfig(text_config=text, vision_config=vision, image_token_index=_IMAGE, **_SPECIAL)
    return hf.MllamaForConditionalGeneration(config)


def _llava() -> hf.PreTrainedModel:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**_TEXT), vision_config=hf.CLIPVisionConfig(**_VISION), image_token_index=_IMAGE,
        vision_feature_layer=-1, **_SPECIAL,
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def _llava_next() -> hf.PreTrainedModel:
    config = hf.LlavaNextConfig(
        text_config=hf.MistralConfig(**_TEXT), vision_config=hf.CLIPVisionConfig(**_VISION), vision_feature_layer=-1,
        image_token_index=_IMAGE, image_grid_pinpoints=[[8, 8]], **_SPECIAL,
    )  # fmt: skip
    return hf.LlavaNextForConditionalGeneration(config)


def _qwen2_5_vl() -> hf.PreTrainedModel:
    text = {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=_QWEN_VISION, **_QWEN_TOKENS, **_SPECIAL)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> hf.PreTrainedModel:
    text = {**_HEADS_OF_16, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}}
    vision = {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_QWEN_TOKENS)
    return hf.Qwen3VLForConditionalGeneration(config)


def _internvl() -> hf.PreTrainedModel:
    vision = {**_VISION, "image_size": [8, 8], "patch_size": [4, 4]}
    config = hf.InternVLConfig(
        text_config=hf.Qwen2Config(**_TEXT), vision_config=vision, image_token_id=_IMAGE, **_SPECIAL
    )
    return hf.InternVLForConditionalGeneration(config)


def _gpt_oss() -> hf.PreTrainedModel:
    config = hf.GptOssConfig(**_HEADS_OF_16, **_MIXED, num_local_experts=4, num_experts_per_tok=2)
    return hf.GptOssForCausalLM(config)


def _deepseek_v3() -> hf.PreTrainedModel:
    config = hf.DeepseekV3Config(
        **{**_TEXT, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=16, num_mtp_layers=0,
    )  # fmt: skip
    return hf.DeepseekV3ForCausalLM(config)


def _qwen3_next() -> hf.PreTrainedModel:
    config = hf.Qwen3NextConfig(
        **_HEADS_OF_16, **_MOE, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return hf.Qwen3NextForCausalLM(config)


FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_TEXT, sliding_window=WINDOW)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**_HEADS_OF_16, **_MIXED, query_pre_attn_scalar=16)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_HEADS_OF_16, **_MIXED, query_pre_attn_scalar=16)),
    "gemma3-vlm": _gemma3_vlm,
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_TEXT, sliding_window=WINDOW)),
    "phi4": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**_TEXT, rope_parameters={**_ROPE, "partial_rotary_factor": 0.5})),
    "gpt-oss": _gpt_oss,
    "qwen2.5": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_TEXT, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_HEADS_OF_16)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_HEADS_OF_16, **_MOE)),
    "llama3": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **_TEXT,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        )
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek-v3": _deepseek_v3,
    "mllama": _mllama,
    "llama4": _llama4_vlm,
    "llava": _llava,
    "llava-next": _llava_next,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
    "internvl": _internvl,
    # Families that no code here names.
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**_TEXT)),
    "cohere2": lambda: hf.Cohere2ForCausalLM(hf.Cohere2Config(**_TEXT, **_MIXED, logit_scale=0.5)),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**_TEXT, sliding_window=WINDOW)),
    "qwen3-next": _qwen3_next,
}  # fmt: skip

ODD: dict[str, Callable[[], hf.PreTrainedModel]] = {
    # Attention called with the mask by its name; a second module that is not to be split inside a block.
    "afmoe": lambda: hf.AfmoeForCausalLM(hf.AfmoeConfig(**_TEXT, **_MIXED, **_MOE, head_dim=8, num_dense_layers=1)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=_VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, **_SPECIAL)
    ),
    # More than the plan says: a weight of this rank's features, a norm over all heads, sizes written into the forward.
    "apertus": lambda: hf.ApertusForCausalLM(hf.ApertusConfig(**_TEXT)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**_TEXT, qk_layernorm=True)),
    "doge": lambda: hf.DogeForCausalLM(hf.DogeConfig(**_TEXT)),
    # Experts beside dense layers, beside a shared expert, and all that a layer has.
    "qwen3-moe with a dense layer": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_HEADS_OF_16, **_MOE, mlp_only_layers=[0])
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_TEXT, **_MOE, shared_expert_intermediate_size=16)),
    "granite-moe": lambda: hf.GraniteMoeForCausalLM(
        hf.GraniteMoeConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2)
    ),
    # Sizes that do not divide by two.
    "three heads": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**{**_HEADS_OF_16, "num_attention_heads": 3, "num_key_value_heads": 3})
    ),
    "odd features": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**_HEADS_OF_16, "intermediate_size": 49})),
    "one head": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**{**_TEXT, "num_key_value_heads": 1})),
}
"""What is hard on a mesh, or for an adapter."""


def save_family(name: str, folder: Path) -> Path:
    """Write model and tokenizer of a family to `folder`."""
    return write_once(folder, _write, name)


def _write(folder: Path, name: str) -> None:
    tokenizer = hf.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(_NAMES)}, merges=[], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (FAMILIES | ODD)[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))  # no bias, sink or norm is 0 or 1
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
