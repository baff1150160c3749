"""Tables that a recipe may have and that have no effect; `unused.toml` declares their keys."""

from cosmos_core.config.schema.table import Table


class TokenizerConfig(Table):
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5."""


class VLAConfig(Table):
    """`[vla]`"""


class FP4Config(Table):
    """`[train.fp4]`"""

    switch = "enable_fp4"
