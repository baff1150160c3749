"""`[train.fp8]`: linear layers in eight bits during training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from cosmos_core.config.schema.table import Table

if TYPE_CHECKING:
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.types import StageKind

_Recipe = Literal["dynamic_scaling", "delayed_scaling"]
_Quantisation = Literal["rowwise", "tensorwise"]


class FP8Config(Table):
    """`[train.fp8]`"""

    switch = "enable_fp8"

    enable_fp8: bool = False
    """Multiply in fp8 in the linear layers of the blocks, by torchao, on an NVIDIA GPU of capability 8.9 or newer;
    weights and exports stay as they are. Not yet measured on one."""
    fp8_recipe: _Recipe = "dynamic_scaling"
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
