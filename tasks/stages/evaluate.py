"""Stage kind `evaluate`: run public benchmarks, the tasks of lm-eval, on one model."""

from cosmos_core.run.libraries import EVALUATION
from cosmos_core.types import StageKind

KIND = StageKind(
    name="evaluate",
    entry="cosmos_core.evaluate.program:run",
    check="cosmos_core.evaluate.program:check",
    result_version=1,
    makes="metrics",
    has_engine=True,
    reads_model="weights",
    allowed_keys=("format",),
    table="evaluate",
    recipe_tables=("evaluate", "rollout.backend", "rollout.parallelism.tp_size"),
    reports=("evaluation/*",),
    extras={"lm-eval": "eval"},
    libraries=EVALUATION,
)
