"""Stage kind `export`: write the model in `train.param_dtype` and in quantised formats, and verify that it loads."""

from cosmos_core.run.libraries import MODEL_FILE_LIBRARIES
from cosmos_core.types import StageKind

KIND = StageKind(
    name="export",
    entry="cosmos_core.export.program:run",
    result_version=1,
    makes="model",
    reads_model="weights",
    allowed_keys=("checkpoint",),
    table="export",
    check="cosmos_core.export.program:check",
    is_numeric=False,
    recipe_tables=("train.param_dtype", "policy.model_revision", "policy.chat_template", "export"),
    reports=("export/*",),
    libraries=(*MODEL_FILE_LIBRARIES, "jinja2"),
)
