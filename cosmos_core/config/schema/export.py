"""`[export]`: formats in which a stage of kind `export` writes its model."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cosmos_core.config.schema.table import StageContext, Table

ExportFormat = Literal["bf16", "fp8", "int8", "w4a16", "gguf"]
UNQUANTIZED_FORMAT = "bf16"
"""Format without quantisation, from which all other formats are made."""


class ExportConfig(Table):
    """`[export]`: settings of the formats of an exported model."""

    formats: Annotated[tuple[ExportFormat, ...], Field(strict=False)] = ()
    """Formats to write, each in its own folder. `bf16`: the model itself, with which all others are compared. `fp8`:
    8-bit floating-point weights and activations. `int8`: 8-bit integer weights and activations. `w4a16`: 4-bit integer
    weights in groups of 128. Weights have a scale per output channel or group, activations one per token; only linear
    layers of the decoder blocks are quantised. `gguf`: one file in bfloat16, written by `convert_hf_to_gguf.py` of
    llama.cpp on PATH, and loaded by transformers with the package gguf. Empty: the model in `train.param_dtype`."""
    unproven: bool = False
    """Also write a format that vLLM cannot run on the machine of the stage, such as `w4a16` on a CPU without AVX-512.
    Its divergence is then measured with transformers, and its model card says so. False: refuse such a format."""

    @property
    def quantized_formats(self) -> tuple[ExportFormat, ...]:
        """Return the quantised formats, each once, in the order of `formats`."""
        return tuple(dict.fromkeys(name for name in self.formats if name != UNQUANTIZED_FORMAT))

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if stage.kind.table != "export" or not self.formats:
            return
        dtype = stage.recipe.train.param_dtype
        if stage.recipe.policy.is_diffusers:
            yield "export.formats is for language models; leave it out with policy.is_diffusers = true"
        elif UNQUANTIZED_FORMAT not in self.formats:
            yield f"export.formats = {list(self.formats)}: the others are made of 'bf16'; add it"
        elif dtype != "bfloat16":
            yield f"export.formats needs train.param_dtype = 'bfloat16', not {dtype!r}"
