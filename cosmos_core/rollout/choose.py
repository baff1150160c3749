"""Which engine a recipe gets."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.parallel.mesh import is_alone
from cosmos_core.rollout.base import Engine
from cosmos_core.rollout.hf import HfEngine
from cosmos_core.rollout.spread import SpreadEngine
from cosmos_core.rollout.vllm import VllmEngine

logger = logging.getLogger(__name__)


def make_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    rollout: RolloutConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
) -> Engine:
    """The engine of `rollout.backend`, or `hf` in place of a vLLM that cannot be imported, with one warning; on
    several ranks one on each.

    `model` is the trainer's module, or on several ranks a whole copy of it, and `folder` (or Hub id) where it was
    loaded from; the engine starts with the weights of `folder`, as version 0. Random states, thread count, signal
    handlers and environment stay as they were.

    Raises:
        ConfigError: vLLM refuses the model or the settings.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_model_len
    if positions < max_model_len:
        logger.warning("rollout: sequences end at the model's %d positions, not at %d", positions, max_model_len)
        max_model_len = positions
    own = _own_engine(model, tokenizer, folder, rollout, max_model_len=max_model_len, dtype=dtype)
    ranks_each = rollout.parallelism.tp_size if own.name == "vllm" else 1
    return own if is_alone() else SpreadEngine(own, ranks_each)


def _own_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str, rollout: RolloutConfig, **settings: Any
) -> Engine:
    if rollout.backend == "vllm":
        try:
            return VllmEngine(model, tokenizer, folder, rollout, **settings)
        except ImportError as error:
            reason = " ".join(str(error).split())
            logger.warning("rollout.backend = 'vllm' cannot be imported (%s); using 'hf' in its place", reason)
    return HfEngine(model, tokenizer, **settings)
