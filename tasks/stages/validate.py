"""Stage kind `validate`: measure one exported model on held-out rows, in a stage separate from training."""

from cosmos_core.run.libraries import TRAINING
from cosmos_core.types import StageKind
from tasks.stages.prepare import ROW_KEYS

KIND = StageKind(
    name="validate",
    entry="cosmos_core.train.validate:run",
    result_version=3,
    makes="metrics",
    has_mesh=True,
    scores=True,
    allowed_keys=("reward_service", "reward_service_pool"),
    reads_model="weights",
    reads_data="prepared",
    recipe_tables=(
        "train.seed",
        "train.master_dtype",
        "train.param_dtype",
        "train.logprob_dtype",
        "train.deterministic",
        "train.compile",
        "train.sequence_packing",
        "train.fsdp_offload",
        "train.train_policy",
        "policy",
        "rollout",
        "validation",
        "custom",
        "judge",
    ),
    # Validation reads its rows once and in order: settings of shuffling and of its schedule have no effect.
    unread=(
        *ROW_KEYS,
        "train.train_policy.dataloader_shuffle",
        "train.train_policy.dataloader_seed",
        "train.train_policy.dataloader_drop_last",
        "validation.enable",
        "validation.freq",
        "validation.val_before_train",
    ),
    reports=(),
    libraries=TRAINING,
)
