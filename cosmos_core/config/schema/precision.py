"""`[train.fp8]` and `[train.fp4]`: linear layers in eight or four bits during training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from cosmos_core.config.schema.table import LATER, Table, planned, unsupported

if TYPE_CHECKING:
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.types import StageKind

_FP4 = unsupported("training in NVFP4 is not done here; leave [train.fp4] out and use bfloat16 or fp8")
_Recipe = Literal["dynamic_scaling", "delayed_scaling"]
_Quantisation = Literal["rowwise", "tensorwise"]


class FP8Config(Table):
    """`[train.fp8]`"""

    switch = "enable_fp8"

    enable_fp8: bool = False
    """Multiply in fp8 in the linear layers of the blocks, by torchao, on an NVIDIA GPU of capability 8.9 or newer;
    weights and exports stay as they are. Not yet measured on one."""
    fp8_recipe: Annotated[
        _Recipe, planned("this version has 'dynamic_scaling' alone, as Cosmos-RL has; leave it out")
    ] = "dynamic_scaling"
    """How scales follow the values."""
    quant_recipe: _Quantisation = "rowwise"
    """One scale per row, or one per tensor."""

    def refusals(self, recipe: Recipe, kind: StageKind) -> Iterator[str]:
        """See `Table.refusals`."""
        if recipe.policy.lora is not None:
            yield "train.fp8.enable_fp8 = true excludes policy.lora, whose base is not trained; leave [train.fp8] out"
        if recipe.train.param_dtype != "bfloat16":
            yield (
                f"train.fp8.enable_fp8 = true needs train.param_dtype = 'bfloat16', not {recipe.train.param_dtype!r}"
            )
        if kind.has_mesh:
            yield from recipe.policy.parallelism.only_data_parallel("train.fp8.enable_fp8 = true")


class FP4Config(Table):
    """`[train.fp4]`"""

    switch = "enable_fp4"

    enable_fp4: Annotated[bool, _FP4, LATER] = False
    """Convert linear layers to NVFP4."""
    fp4_recipe: Annotated[_Recipe, _FP4, LATER] = "dynamic_scaling"
    """How scales follow the values."""
    quant_recipe: Annotated[_Quantisation, _FP4, LATER] = "rowwise"
    """One scale per row, or one per tensor."""
