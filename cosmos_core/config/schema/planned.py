"""Tables that a recipe may have and that have no effect; `unused.toml` declares their keys."""

from cosmos_core.config.schema.table import Table


class TokenizerConfig(Table):
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5."""


class VLAConfig(Table):
    """`[vla]`: vision-language-action models for robots; the table has no effect."""


class FP4Config(Table):
    """`[train.fp4]`: linear layers in 4-bit floating point; the table has no effect."""

    switch = "enable_fp4"
