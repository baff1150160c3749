"""Kind `sft`: supervised fine-tuning, resumable from its newest checkpoint; writes a verified full-precision model."""

from cosmos_core.run.libraries import TRAINING
from cosmos_core.types import StageKind
from tasks.stages.prepare import ROW_KEYS

KIND = StageKind(
    name="sft",
    entry="cosmos_core.train.setup:run",
    result_version=2,
    makes="model",
    feed="dataset",
    has_mesh=True,
    scores=True,
    allowed_keys=("reward_service", "reward_service_pool"),
    reads_model="weights",
    reads_data="prepared",
    # `rollout` and `custom` are read because held-out completions may be generated and scored during training.
    recipe_tables=("train", "policy", "validation", "rollout", "custom", "judge"),
    unread=ROW_KEYS,
    libraries=TRAINING,
)
