"""The tables of `planned.toml`: recipes may have them, and nothing is built for them yet.

Here is only what their keys make of each other.
"""

import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.schema.declared import TYPES, declared
from cosmos_core.config.schema.lora import LoraConfig

_TABLES = tomllib.loads(files("cosmos_core.config.schema").joinpath("planned.toml").read_text("utf-8"))
TYPES |= {"LoraConfig": LoraConfig}


def _planned(title: str) -> Any:
    table = dict(_TABLES[title])
    return declared(title, table.pop("keys"), **table)


class TokenizerConfig(_planned("TokenizerConfig")):  # type: ignore[misc]
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5."""


TYPES |= {"TokenizerConfig": TokenizerConfig}


class VLAConfig(_planned("VLAConfig")):  # type: ignore[misc]
    """`[vla]`"""


class FP4Config(_planned("FP4Config")):  # type: ignore[misc]
    """`[train.fp4]`"""
