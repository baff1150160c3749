"""A random Qwen3 of about 0.1M parameters with a byte-level tokenizer, made in milliseconds without a download."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.models.lora import merge_adapter, merged_state_dict
from tests.written_once import write_once


def save_tiny_model(folder: Path, *, tied: bool = True, head_dim: int = 32) -> Path:
    """Write model and tokenizer to `folder`; weights are large enough that answers depend on the prompt."""
    return write_once(folder, _write, tied, head_dim)


def _write(folder: Path, tied: bool, head_dim: int) -> None:
    names = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)}, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    config = Qwen3Config(
        vocab_size=len(names) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.2, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def iter_checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in a checkpoint and the tensor of every weight; tied weights appear under each of their names.
    Tensors are not copied, except for weights that an adapter changes, which are merged."""
    with merge_adapter(model):
        yield from revert_weight_conversion(model, merged_state_dict(model)).items()
