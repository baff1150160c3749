"""`[train.fp8]` and `[train.fp4]`: linear layers in eight or four bits during training."""

from __future__ import annotations

from typing import Annotated, Literal

from cosmos_core.config.schema.table import LATER, Table, planned, unsupported

_FP8 = planned(
    "linear layers in fp8 need an NVIDIA GPU of capability 8.9 or newer and torchao, and are not in this version; "
    "leave [train.fp8] out"
)
_FP4 = unsupported("training in NVFP4 is not done here; leave [train.fp4] out and use bfloat16 or fp8")
_Recipe = Literal["dynamic_scaling", "delayed_scaling"]
_Quantisation = Literal["rowwise", "tensorwise"]


class FP8Config(Table):
    """`[train.fp8]`"""

    switch = "enable_fp8"

    enable_fp8: Annotated[bool, _FP8] = False
    """Convert linear layers to fp8."""
    fp8_recipe: Annotated[_Recipe, _FP8] = "dynamic_scaling"
    """How scales follow the values; Cosmos-RL implements `dynamic_scaling` alone."""
    quant_recipe: Annotated[_Quantisation, _FP8] = "rowwise"
    """One scale a row, or one a tensor."""


class FP4Config(Table):
    """`[train.fp4]`"""

    switch = "enable_fp4"

    enable_fp4: Annotated[bool, _FP4, LATER] = False
    """Convert linear layers to NVFP4."""
    fp4_recipe: Annotated[_Recipe, _FP4, LATER] = "dynamic_scaling"
    """How scales follow the values."""
    quant_recipe: Annotated[_Quantisation, _FP4, LATER] = "rowwise"
    """One scale a row, or one a tensor."""
