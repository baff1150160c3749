"""`[distillation]`: a teacher whose log-probabilities train the policy on its own completions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, ValidationInfo, field_validator

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import DType, Fraction, ModelName, RowCount, TokenCount


class TeacherParallelismConfig(Table):
    """`[distillation.parallelism]`: device mesh of the teacher in Cosmos-RL; the table has no effect."""


class DistillationConfig(Table):
    """`[distillation]`: on-policy distillation (arXiv 2306.13649), for algorithms that train on completions."""

    enabling_field = "enable"

    enable: bool = False
    """Train on the log-probabilities of a teacher in place of rewards: forces `bypass_reward`; validation keeps its
    rewards."""
    parallelism: TeacherParallelismConfig = TeacherParallelismConfig()
    """Device mesh of the teacher, which has no effect: the teacher is distributed over the ranks of the policy."""
    model_name_or_path: ModelName = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Teacher model: a folder in Hugging Face format, a Hub id, or `stage:NAME` for the export of that stage (the
    fingerprint includes the content). Its tokenizer must have every token of the policy's tokenizer, with equal ids."""
    model_revision: str | None = None
    """Revision of the teacher on the Hub; None: the newest."""
    master_dtype: DType = "float32"
    """Dtype of the teacher's weights."""
    param_dtype: DType = "bfloat16"
    """Dtype of the teacher's forward pass."""
    logprob_dtype: DType = "float32"
    """Dtype of the teacher's log-softmax."""
    fsdp_offload: bool = False
    """Keep the teacher's shards in host memory; the weights of each block are gathered from there."""
    fsdp_reshard_after_forward: Literal["always", "never", "default"] = "never"
    """Whether the gathered weights of a teacher's block are freed after its forward pass; with `never` they are freed
    when all samples of a train step are scored."""
    max_token_len_per_mini_batch: TokenCount | None = None
    """Maximum number of tokens of a micro-batch of the teacher, padding included, in place of `mini_batch`; None:
    `mini_batch` sequences."""
    sequence_packing: bool = False
    """Concatenate the sequences of a micro-batch of the teacher without padding."""
    mini_batch: RowCount = 1
    """Number of sequences per forward pass of the teacher."""
    kl_penalty_coef: NonNegativeFloat = 1.0
    """Weight of the penalty log policy - log teacher in the advantage or, with `top_k`, of the divergence from the
    teacher in the loss."""
    kl_discount_factor: Fraction = 0.0
    """Discount factor per token, with which the advantage of a token includes the teacher's penalties of later tokens:
    1 gives the gradient of the completion's KL, 0 that of the token's own KL."""
    include_prompt: bool = False
    """Also train on the tokens of the prompt. The policy did not sample these tokens, so the advantage of a prompt
    token is its own penalty only."""
    top_k: Annotated[int, FieldUnit("tokens")] = 0
    """Number of tokens of the teacher's distribution in the loss. 0 or less: the advantage of a token decreases by log
    policy - log teacher (reverse KL). Otherwise the loss is the Jensen-Shannon divergence over this many tokens and one
    event for all other tokens."""
    jsd_beta: Annotated[Fraction, EnabledBy("top_k")] = 0.5
    """Mixture weight of the Jensen-Shannon divergence with `top_k`: 0 is the forward KL, 1 the reverse KL."""
    trainer_token_ids_from_teacher: bool = True
    """Take the `top_k` tokens that are most likely under the teacher; False: those that are most likely under the
    policy before the train step."""

    @field_validator("top_k")
    @classmethod
    def _disable_top_k_without_teacher(cls, top_k: int, info: ValidationInfo) -> int:
        return max(0, top_k) if info.data.get("enable") else 0

    @field_validator("trainer_token_ids_from_teacher")
    @classmethod
    def _disable_teacher_ids_without_top_k(cls, takes_teacher_ids: bool, info: ValidationInfo) -> bool:
        return takes_teacher_ids and info.data.get("top_k", 0) > 0

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        train_policy = stage.recipe.train.train_policy
        if not stage.kind.trains_model:
            return
        if not isinstance(train_policy, RlConfig) or "causal_lm" not in train_policy.modalities:
            remedy = "set train.train_policy.type = 'grpo', or leave [distillation] out"
            yield f"distillation.enable = true: a teacher judges completions that the policy draws; {remedy}"
        if self.include_prompt and getattr(train_policy, "use_rollout_logprobs_for_loss", False):
            excluded_key = "train.train_policy.use_rollout_logprobs_for_loss"
            reason = "the prompt has no log-probabilities of the rollout"
            yield f"distillation.include_prompt = true excludes {excluded_key}: {reason}; set one of them to false"
        if self.master_dtype != "float32" and self.param_dtype == "float32":
            master_dtype_text = f"distillation.master_dtype = '{self.master_dtype}'"
            yield f"distillation.param_dtype = 'float32' is wider than {master_dtype_text}; make them equal"
