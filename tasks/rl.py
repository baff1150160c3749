"""Kind `rl`: the rollout-train loop of GRPO, resumable from its newest checkpoint."""

from cosmos_core.types import StageKind

KIND = StageKind(
    name="rl",
    entry="cosmos_core.train.setup:run_rl",
    result_version=1,
    recipe_tables=("train", "policy", "rollout", "validation", "custom"),
)
