"""`[train.fp8]` and `[train.fp4]`: linear layers in eight or four bits during training."""

from collections.abc import Iterator
from typing import Literal

from cosmos_core.config.schema.table import StageContext, Table

_ScaleGranularity = Literal["rowwise", "tensorwise"]


class FP4Config(Table):
    """`[train.fp4]`: linear layers in 4-bit floating point during training, which is not supported; changed settings of
    the table are refused."""

    enabling_field = "enable_fp4"


class FP8Config(Table):
    """`[train.fp8]`: linear layers in 8-bit floating point during training."""

    enabling_field = "enable_fp8"

    enable_fp8: bool = False
    """Compute the matrix products of the linear layers of the blocks in fp8, with torchao, on an NVIDIA GPU of
    capability 8.9 or newer; on other hardware in `param_dtype`, with a warning. Weights and exports do not change. Not
    yet measured on a GPU."""
    quant_recipe: _ScaleGranularity = "rowwise"
    """Granularity of the fp8 scales: one per row, or one per tensor."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if stage.recipe.policy.lora is not None:
            yield "train.fp8.enable_fp8 = true excludes policy.lora, whose base is not trained; leave [train.fp8] out"
        dtype = stage.recipe.train.param_dtype
        if dtype != "bfloat16":
            yield f"train.fp8.enable_fp8 = true needs train.param_dtype = 'bfloat16', not {dtype!r}"
        if stage.kind.has_mesh:
            mesh = stage.recipe.policy.parallelism
            yield from mesh.unsupported_axis_errors("train.fp8.enable_fp8 = true", allows_tp=True)
