"""Kind `sft`: supervised fine-tuning, resumable from its newest checkpoint; ends with a proven full-precision model."""

from cosmos_core.types import StageKind

KIND = StageKind(
    name="sft",
    entry="cosmos_core.train.setup:run_sft",
    result_version=1,
    recipe_tables=("train", "policy", "validation"),
)
