"""Stage kind `sft`: supervised fine-tuning, resumable from a checkpoint; writes a verified full-precision model."""

from cosmos_core.run.libraries import TRAINING_LIBRARIES
from cosmos_core.types import StageKind
from tasks.stages.prepare import ROW_SETTINGS

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
    # The tables `rollout` and `custom` are read because completions of held-out rows may be generated and scored.
    recipe_tables=("train", "policy", "validation", "rollout", "custom", "judge"),
    unread=ROW_SETTINGS,
    libraries=TRAINING_LIBRARIES,
)
