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
    text = config.get_text_config()
    try:
        check_ids(folder, getattr(text, "vocab_size", 0))
    except DataError:  # the embeddings of some models have more rows than `vocab_size`
        embedding: Any = build().get_input_embeddings()
        check_ids(folder, embedding.weight.shape[0])
    limit, longest = getattr(text, "max_position_embeddings", None), longest_row(folder)
    if not limit or longest <= limit:
        return ""
    problem = f"rows of up to {longest:,} tokens are longer than the {limit:,} positions of the model"
    model = build()
    modules = (each for each in model.modules() if each is not model.get_input_embeddings())
    if any(isinstance(each, nn.Embedding) and each.num_embeddings in (limit, limit + 2) for each in modules):
        raise ModelError(f"{problem}; lower policy.model_max_length")
    return (
        f"{problem} (max_position_embeddings), so it learns positions that it never saw; lower policy.model_max_length"
    )
