"""Interpretation of the parallel plan of a transformers model, and checks of divisibility."""

import re

from torch import nn
from transformers import PreTrainedModel

from cosmos_core.errors import ModelError


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if a pattern of a parallel plan, with `*` for layer indices, matches the name of a module."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern


def check_heads(model: PreTrainedModel, setting_name: str, num_ranks: int) -> None:
    """Check that the number of attention heads is divisible by the number of ranks, `num_ranks`.

    If `setting_name`, the name of the setting, is `tp_size`, the number of key-value heads must be divisible too.

    Raises:
        ModelError: a number of heads is not divisible.
    """
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(config, name, None)
        if (
            isinstance(num_heads, int)
            and num_heads % num_ranks
            and (setting_name == "tp_size" or name == "num_attention_heads")
        ):
            raise ModelError(
                f"policy.parallelism.{setting_name} = {num_ranks} does not divide the {num_heads} {name} of "
                f"{type(model).__name__}; lower it"
            )


def check_features(model: PreTrainedModel, name: str, module: nn.Module, style: str, num_ranks: int) -> None:
    """Check that the parallel style `style` can split the weight of a linear layer over `num_ranks` ranks.

    Raises:
        ModelError: the dimension to split is not divisible by the number of ranks.
    """
    split_dim = {"colwise": 0, "rowwise": 1}.get(style)
    if split_dim is not None and isinstance(module, nn.Linear) and module.weight.shape[split_dim] % num_ranks:
        raise ModelError(
            f"policy.parallelism.tp_size = {num_ranks} does not divide the {module.weight.shape[split_dim]} features "
            f"of {name} of {type(model).__name__}; lower it"
        )
