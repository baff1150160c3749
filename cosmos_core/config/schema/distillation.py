"""`[distillation]`: a teacher whose log-probabilities train the policy on its own completions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from cosmos_core.config.schema.marks import NoResult, Unit, Where
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.table import InStage, Table
from cosmos_core.config.schema.values import DType, Fraction, NonNegativeFloat, Rows, Tokens


class TeacherParallelismConfig(Table):
    """`[distillation.parallelism]`: a mesh of its own, which a teacher has in Cosmos-RL."""


class DistillationConfig(Table):
    """`[distillation]`: on-policy distillation, read where completions are trained on (arXiv 2306.13649)."""

    switch = "enable"

    enable: bool = False
    """Learn from a teacher in place of rewards: forces `bypass_reward`; validation keeps its own rewards."""
    parallelism: TeacherParallelismConfig = TeacherParallelismConfig()
    """Device mesh of the teacher."""
    model_name_or_path: Annotated[str, NoResult, Where.PATH] = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Teacher: a folder in Hugging Face format, a Hub id, or `stage:NAME` for the export of that stage (the fingerprint
    includes the content). Its tokenizer must have every token of the policy, with the same id."""
    model_revision: str | None = None
    """Hub revision; None: the newest."""
    master_dtype: DType = "float32"
    """Dtype of the teacher's weights."""
    param_dtype: DType = "bfloat16"
    """Dtype of the teacher's forward pass."""
    logprob_dtype: DType = "float32"
    """Dtype of the teacher's log-softmax."""
    fsdp_offload: bool = False
    """Keep the teacher's shards in host memory, from where each block is gathered."""
    fsdp_reshard_after_forward: Literal["always", "never", "default"] = "never"
    """Free a block's gathered weights after its forward pass; False: free the weights of all blocks after all samples
    of a train step are scored."""
    max_token_len_per_mini_batch: Tokens | None = None
    """Token budget of a micro-batch, padding included, in place of `mini_batch`; None: `mini_batch` sequences."""
    sequence_packing: bool = False
    """Pack sequences without padding."""
    mini_batch: Rows = 1
    """Sequences per forward pass."""
    kl_penalty_coef: NonNegativeFloat = 1.0
    """Weight of the teacher: of the penalty in the advantage, or of the divergence in the loss."""
    kl_discount_factor: Fraction = 0.0
    """Discount of the penalties of later tokens in the advantage of a token: 1 gives the gradient of the completion's
    KL, 0 that of the token's own KL."""
    include_prompt: bool = False
    """Also train on the tokens of the prompt; the policy did not sample them, so each token has only its own
    penalty."""
    top_k: Annotated[int, Unit("tokens")] = 0
    """0 or less: the advantage of a token decreases by log policy - log teacher (reverse KL). Otherwise the loss is the
    Jensen-Shannon divergence over this many tokens and one event for all other tokens."""
    jsd_beta: Fraction = 0.5
    """Mixture of that divergence: 0 forward KL, 1 reverse KL."""
    trainer_token_ids_from_teacher: bool = True
    """The `top_k` tokens are the most likely tokens of the teacher; False: those of the policy before the train
    step."""

    @field_validator("model_name_or_path")
    @classmethod
    def _not_empty(cls, name: str) -> str:
        if not name.strip():
            raise ValueError("model_name_or_path is empty; give a folder or a Hub id")
        return name

    @field_validator("top_k")
    @classmethod
    def _of_a_teacher(cls, top_k: int, info: ValidationInfo) -> int:
        return max(0, top_k) if info.data.get("enable") else 0

    @field_validator("trainer_token_ids_from_teacher")
    @classmethod
    def _of_top_k(cls, is_from_teacher: bool, info: ValidationInfo) -> bool:
        return is_from_teacher and info.data.get("top_k", 0) > 0

    def refusals(self, stage: InStage) -> Iterator[str]:
        policy = stage.recipe.train.train_policy
        if not stage.kind.trains:
            return
        if not isinstance(policy, RlConfig) or "causal_lm" not in policy.modalities:
            yield (
                "distillation.enable = true: a teacher judges completions that the policy draws; set "
                "train.train_policy.type = 'grpo', or leave [distillation] out"
            )
        if self.include_prompt and getattr(policy, "use_rollout_logprobs_for_loss", False):
            yield (
                "distillation.include_prompt = true excludes train.train_policy.use_rollout_logprobs_for_loss: the "
                "prompt has no log-probabilities of the rollout; set one of them to false"
            )
        if self.master_dtype != "float32" and self.param_dtype == "float32":
            yield (
                f"distillation.param_dtype = 'float32' is wider than distillation.master_dtype = "
                f"'{self.master_dtype}'; make them equal"
            )
