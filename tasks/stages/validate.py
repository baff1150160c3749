"""Stage kind `validate`: measure one exported model on held-out rows, in a stage separate from training."""

from cosmos_core.run.libraries import TRAINING
from cosmos_core.types import StageKind
from tasks.stages.prepare import ROW_KEYS

_TRAIN_KEYS = (
    "seed", "master_dtype", "param_dtype", "logprob_dtype", "deterministic", "compile", "sequence_packing",
    "fsdp_offload", "train_policy",
)  # fmt: skip
"""Keys of `train` that change measured values."""

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
    recipe_tables=(*(f"train.{name}" for name in _TRAIN_KEYS), "policy", "rollout", "validation", "custom", "judge"),
    # This kind validates once, on its rows in order: settings for shuffling and for the steps of validation do nothing.
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
