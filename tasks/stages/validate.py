"""Stage kind `validate`: measure one exported model on held-out rows, in a stage separate from training."""

from dataclasses import replace

from tasks.stages import sft

_MEASUREMENT_KEYS = (
    "seed", "master_dtype", "param_dtype", "logprob_dtype", "deterministic", "compile", "sequence_packing",
    "fsdp_offload", "train_policy",
)  # fmt: skip
"""Recipe keys of the table `train` that can change the metrics of a stage of kind `validate`."""

KIND = replace(
    sft.KIND,
    name="validate",
    entry="cosmos_core.train.validate:run",
    result_version=3,
    makes="metrics",
    feed="",
    recipe_tables=(
        *(f"train.{name}" for name in _MEASUREMENT_KEYS),
        "policy",
        "rollout",
        "validation",
        "custom",
        "judge",
    ),
    # This kind validates once, on its rows in order: settings for shuffling and for the steps of validation do nothing.
    unread=(
        *sft.KIND.unread,
        "train.train_policy.dataloader_shuffle",
        "train.train_policy.dataloader_seed",
        "train.train_policy.dataloader_drop_last",
        "validation.enable",
        "validation.freq",
        "validation.val_before_train",
    ),
    reports=(),
)
