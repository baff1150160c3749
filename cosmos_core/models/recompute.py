"""Recomputation of activations in the backward pass (gradient checkpointing), for whole blocks or for cheap operations.

Selective recomputation keeps the results of attention, and of matrix products whose result is no larger than their
input. Norms, activation functions, rotary embeddings and the wide matrix products of feed-forward layers run again.
This follows arXiv 2205.05198, section 5, but selects by the size of results instead of a fixed list.
"""

import logging
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # noqa: F401 - registers its operator
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

RecomputeMode = bool | Literal["selective"]
"""Type of a recomputation setting. False keeps all activations, True keeps only the inputs of blocks, and
`selective` also keeps small activations that are expensive to compute."""

logger = logging.getLogger(__name__)

_ATEN_OPERATORS = torch.ops.aten
_ATTENTION_OPERATIONS = {
    _ATEN_OPERATORS._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN_OPERATORS._scaled_dot_product_flash_attention.default,
    _ATEN_OPERATORS._scaled_dot_product_efficient_attention.default,
    _ATEN_OPERATORS._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}
_MATRIX_PRODUCT_OPERATIONS = {_ATEN_OPERATORS.mm.default, _ATEN_OPERATORS.addmm.default}


def recompute_activations(model: Any, recompute_mode: RecomputeMode) -> None:
    """Make the blocks of a model of transformers or diffusers recompute activations in the backward pass; gradients do
    not change. If the model does not support recomputation, log a warning and keep all activations: recomputation is a
    default and must not stop a run."""
    if not recompute_mode:
        return
    checkpoint_settings: dict[str, Any] = {"use_reentrant": False}
    if recompute_mode == "selective":
        checkpoint_settings["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_checkpoint_policy)

    def checkpoint_module(module: nn.Module, *args: Any) -> Any:
        return checkpoint(module.__call__, *args, **checkpoint_settings)

    try:
        if isinstance(model, PreTrainedModel):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_settings)
            model.config.use_cache = False
        else:
            model.enable_gradient_checkpointing(checkpoint_module)
    except ValueError as error:
        logger.warning("policy.model_gradient_checkpointing has no effect, every activation is kept: %s", error)


def _choose_checkpoint_policy(checkpoint_context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    should_save_output = operation in _ATTENTION_OPERATIONS
    if operation in _MATRIX_PRODUCT_OPERATIONS:
        left_matrix, right_matrix = args[-2:]
        should_save_output = right_matrix.shape[-1] <= left_matrix.shape[-1]
    return CheckpointPolicy.MUST_SAVE if should_save_output else CheckpointPolicy.PREFER_RECOMPUTE
