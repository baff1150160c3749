"""Check that prepared rows fit a language model: all tokens have embeddings, and lengths do not exceed its limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.data.prepared import check_ids, longest_row
from cosmos_core.errors import DataError, ModelError


def check_rows(config: PretrainedConfig, folder: Path, build: Callable[[], PreTrainedModel]) -> str:
    """Refuse prepared rows in `folder` that a model cannot process. Return a warning if rows exceed the model's
    positions, otherwise an empty string. `build` returns the model; it is called only if weight shapes are needed.

    Raises:
        DataError: a token has no embedding.
        ModelError: a row has more tokens than the model has learned position embeddings.
    """
    text_config = config.get_text_config()
    try:
        check_ids(folder, getattr(text_config, "vocab_size", 0))
    except DataError:  # the embeddings of some models have more rows than `vocab_size`
        embedding: Any = build().get_input_embeddings()
        check_ids(folder, embedding.weight.shape[0])
    max_positions, longest_length = getattr(text_config, "max_position_embeddings", None), longest_row(folder)
    if not max_positions or longest_length <= max_positions:
        return ""
    problem = f"rows of up to {longest_length:,} tokens are longer than the {max_positions:,} positions of the model"
    model = build()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {each.num_embeddings for each in embeddings if each is not model.get_input_embeddings()}
    if not sizes.isdisjoint({max_positions, max_positions + 2}):
        raise ModelError(f"{problem}; lower policy.model_max_length")
    return (
        f"{problem} (max_position_embeddings), so it learns positions that it never saw; lower policy.model_max_length"
    )
