"""Stage kind `merge`: average the models of several stages, or add their differences from a base model (TIES, DARE)."""

from cosmos_core.run.libraries import MODEL_FILE_LIBRARIES
from cosmos_core.types import StageKind

KIND = StageKind(
    name="merge",
    entry="cosmos_core.checkpoint.merge:run",
    result_version=1,
    makes="model",
    reads_model="weights",
    required_keys={"after": '["STAGE", "STAGE"]'},
    table="merge",
    is_numeric=False,
    recipe_tables=("train.seed", "policy.model_revision", "merge"),
    reports=("merge/*",),
    libraries=MODEL_FILE_LIBRARIES,
)
