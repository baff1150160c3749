"""`[distillation]`: on-policy distillation from a teacher model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.table import (
    LATER,
    DType,
    Fraction,
    NonNegativeFloat,
    Rows,
    Table,
    Tokens,
    Unit,
    planned,
)

_TEACHER = planned("on-policy distillation is not in this version; leave [distillation] out")


class DistillationConfig(Table):
    """`[distillation]`"""

    switch = "enable"

    enable: Annotated[bool, _TEACHER, LATER] = False
    """Add a teacher's log-probabilities to the advantage; forces token ids for rollouts and no rewards."""
    parallelism: ParallelismConfig = ParallelismConfig()
    """Device mesh of the teacher."""
    model_name_or_path: Annotated[str, _TEACHER, LATER] = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Teacher: folder or Hub id."""
    model_revision: Annotated[str | None, _TEACHER, LATER] = None
    """Hub revision; None: the newest."""
    compile: Annotated[bool, _TEACHER, LATER] = True
    """torch.compile the teacher."""
    master_dtype: Annotated[DType, _TEACHER, LATER] = "float32"
    """Dtype of the teacher's weights."""
    param_dtype: Annotated[DType, _TEACHER, LATER] = "bfloat16"
    """Dtype of the teacher's forward pass."""
    logprob_dtype: Annotated[DType, _TEACHER, LATER] = "float32"
    """Dtype of the teacher's log-softmax."""
    fsdp_reduce_dtype: Annotated[Literal["float32"], _TEACHER, LATER] = "float32"
    """Dtype of reductions."""
    fsdp_offload: Annotated[bool, _TEACHER, LATER] = False
    """Keep the teacher's shards in host memory."""
    fsdp_reshard_after_forward: Annotated[Literal["always", "never", "default"], _TEACHER, LATER] = "never"
    """Free gathered weights after a block."""
    batch_size_per_replica: Annotated[Rows, _TEACHER, LATER] = 8
    """Sequences per teacher batch."""
    max_token_len_per_mini_batch: Annotated[Tokens | None, _TEACHER, LATER] = None
    """Token budget of a micro-batch; None: `mini_batch` sequences."""
    sequence_packing: Annotated[bool, _TEACHER, LATER] = False
    """Pack sequences without padding."""
    mini_batch: Annotated[Rows, _TEACHER, LATER] = 1
    """Sequences per forward pass."""
    seed: Annotated[int | None, _TEACHER, LATER] = None
    """None: `train.seed`."""
    kl_penalty_coef: Annotated[NonNegativeFloat, _TEACHER, LATER] = 1.0
    """Weight of the penalty in the advantage."""
    kl_discount_factor: Annotated[NonNegativeFloat, _TEACHER, LATER] = 0.0
    """Discount of future penalties; 0: none are added."""
    include_prompt: Annotated[bool, _TEACHER, LATER] = False
    """Score prompt tokens too."""
    top_k: Annotated[int, Unit("tokens"), _TEACHER, LATER] = 0
    """Tokens of the Jensen-Shannon divergence; 0 or less: the sampled token's difference."""
    jsd_beta: Annotated[Fraction, _TEACHER, LATER] = 0.5
    """Mixture: 0 forward KL, 1 reverse KL."""
    trainer_token_ids_from_teacher: Annotated[bool, _TEACHER, LATER] = True
    """The top-k tokens are the teacher's."""
    rollout_top_k_recompute: Annotated[bool, _TEACHER, LATER] = False
    """Recompute top-k log-probabilities in the rollout engine."""

    @field_validator("top_k")
    @classmethod
    def _of_a_teacher(cls, top_k: int, info: ValidationInfo) -> int:
        return top_k if info.data.get("enable") else 0

    @field_validator("trainer_token_ids_from_teacher")
    @classmethod
    def _of_top_k(cls, is_from_teacher: bool, info: ValidationInfo) -> bool:
        return is_from_teacher and info.data.get("top_k", 0) > 0
