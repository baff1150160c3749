"""What a transformers model's own plan means, and whether its sizes divide."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from cosmos_core.errors import ModelError


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of a plan means the module of that name."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern


def check_heads(model: PreTrainedModel, key: str, size: int) -> None:
    """Check that `size` ranks can share the attention heads.

    Raises:
        ModelError: they do not divide.
    """
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size and (key == "tp_size" or name == "num_attention_heads"):
            raise ModelError(
                f"policy.parallelism.{key} = {size} does not divide the {count} {name} of {type(model).__name__}; "
                f"lower it"
            )


def check_features(model: PreTrainedModel, name: str, module: nn.Module, style: str, size: int) -> None:
    """Check that `size` ranks can share a matrix of the model.

    Raises:
        ModelError: it does not divide.
    """
    axis = {"colwise": 0, "rowwise": 1}.get(style)
    if axis is not None and isinstance(module, nn.Linear) and module.weight.shape[axis] % size:
        raise ModelError(
            f"policy.parallelism.tp_size = {size} does not divide the {module.weight.shape[axis]} features of {name} "
            f"of {type(model).__name__}; lower it"
        )
