"""Kind `validate`: measure one exported model on held-out rows, apart from any training."""

from cosmos_core.types import StageKind

KIND = StageKind(
    name="validate",
    entry="cosmos_core.train.validate:run",
    result_version=1,
    recipe_tables=("train.seed", "train.param_dtype", "train.train_policy", "policy", "rollout", "validation"),
)
