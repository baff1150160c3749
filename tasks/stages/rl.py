"""Stage kind `rl`: train a policy with rollouts and updates, such as GRPO, resumable from the newest checkpoint."""

from cosmos_core.run.libraries import TRAINING
from cosmos_core.types import StageKind
from tasks.stages.prepare import ROW_KEYS

KIND = StageKind(
    name="rl",
    entry="cosmos_core.train.setup:run",
    result_version=4,
    makes="model",
    feed="rollouts",
    has_mesh=True,
    scores=True,
    allowed_keys=("reward_service", "reward_service_pool"),
    reads_model="weights",
    reads_data="prepared",
    recipe_tables=("train", "policy", "rollout", "validation", "custom", "judge", "distillation", "mode"),
    unread=ROW_KEYS,
    libraries=TRAINING,
)
