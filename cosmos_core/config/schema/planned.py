"""The tables of `planned.toml`: recipes may have them, and nothing is built for them yet.

Here is only what their keys make of each other.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from pydantic import ValidationInfo, field_validator

from cosmos_core.config.schema.declared import TYPES, declared
from cosmos_core.config.schema.lora import LoraConfig

_TABLES = tomllib.loads(files("cosmos_core.config.schema").joinpath("planned.toml").read_text("utf-8"))
TYPES |= {"LoraConfig": LoraConfig}


def _planned(title: str) -> Any:
    table = dict(_TABLES[title])
    return declared(title, table.pop("keys"), **table)


class SampleConfig(_planned("SampleConfig")):  # type: ignore[misc]
    """`[policy.diffusers.sample]`: how images and videos are drawn."""


class TokenizerConfig(_planned("TokenizerConfig")):  # type: ignore[misc]
    """`[policy.diffusers.tokenizer]`: the video tokenizer of Cosmos-Predict2.5."""


class FlowRLConfig(_planned("FlowRLConfig")):  # type: ignore[misc]
    """Read with `trainer_type = "flow_grpo"` (arXiv 2505.05470) and `"ddrl"` (arXiv 2512.04332)."""


TYPES |= {table.__name__: table for table in (SampleConfig, TokenizerConfig, FlowRLConfig)}


class VLAConfig(_planned("VLAConfig")):  # type: ignore[misc]
    """`[vla]`"""


class FP4Config(_planned("FP4Config")):  # type: ignore[misc]
    """`[train.fp4]`"""


class DiffusersConfig(_planned("DiffusersConfig")):  # type: ignore[misc]
    """`[policy.diffusers]`"""


class RewardFunctionConfig(_planned("RewardFunctionConfig")):  # type: ignore[misc]
    """`[[...remote_reward.reward_fns]]`: one function of the service."""

    @field_validator("score_key")
    @classmethod
    def _key_is_the_name(cls, key: str | None, info: ValidationInfo) -> str | None:
        return info.data.get("name") if key is None else key


TYPES["RewardFunctionConfig"] = RewardFunctionConfig


class RemoteRewardConfig(_planned("RemoteRewardConfig")):  # type: ignore[misc]
    """`[...remote_reward]`"""
