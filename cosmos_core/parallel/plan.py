"""Interpretation of parallel plans of transformers models, and checks that ranks can divide heads and experts."""

import re
from math import gcd
from typing import Any

from transformers import PreTrainedModel

from cosmos_core.errors import ModelError


def matches_pattern(pattern: str, name: str) -> bool:
    """Return True if `pattern`, a name in a parallel plan with `*` for layer indices, matches the module name
    `name`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern


def check_head_split(model: PreTrainedModel, setting_name: str, num_ranks: int, tp_size: int = 1) -> None:
    """Raise a `ModelError` if `num_ranks`, the value of the setting `setting_name`, does not divide the number of
    attention heads of a rank. If the setting is `tp_size`, it must also divide the number of key-value heads. The
    parameter `tp_size` is the number of ranks over which tensor parallelism has already split the heads."""
    for heads_setting in ("num_attention_heads", *(["num_key_value_heads"] if setting_name == "tp_size" else [])):
        num_heads = getattr(model.config.get_text_config(), heads_setting, None)
        if isinstance(num_heads, int) and num_heads // tp_size % num_ranks:
            heads_per_rank_text = f", {num_heads // tp_size} on a rank of tp_size = {tp_size}" if tp_size > 1 else ""
            raise ModelError(
                f"policy.parallelism.{setting_name} = {num_ranks} does not divide the {num_heads} {heads_setting} of "
                f"{type(model).__name__}{heads_per_rank_text}; lower it"
            )


def check_expert_split(experts: Any, num_ranks: int, error_prefix: str) -> None:
    """Raise a `ModelError` with `error_prefix` if `num_ranks` does not divide the number of experts of a layer."""
    if experts.num_experts % num_ranks:
        remedy = f"set it to {gcd(experts.num_experts, num_ranks)}"
        raise ModelError(f"{error_prefix} has {experts.num_experts} experts, which do not divide by it; {remedy}")
