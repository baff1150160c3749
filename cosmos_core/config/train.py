"""`[train]`: optimizer, schedule, batch, precision, checkpoints. `[train.train_policy]` has a file of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cosmos_core.config.table import (
    Fraction,
    NonNegativeFloat,
    NoResult,
    PositiveFloat,
    PositiveInt,
    Table,
)
from cosmos_core.config.train_policy import GrpoConfig, SFTDataConfig

DType = Literal["float32", "bfloat16", "float16"]
DEFAULT_SEED = 42
_Decay = Annotated[float, Field(ge=0, lt=1)]
_UNCATCHABLE = {"SIGKILL", "SIGSTOP", "SIGCHLD"}  # the last one ends every child, which is no wish to stop


class CheckpointConfig(Table):
    """`[train.ckpt]`: when the state is saved and how much of it is kept."""

    enable_checkpoint: Annotated[bool, NoResult] = False
    """Save during training. The final state and the state at a signal are saved regardless."""
    save_freq: Annotated[PositiveInt, NoResult] = 20
    """Every N train steps."""
    save_mode: Annotated[Literal["sync", "async"], NoResult] = "async"
    """`async`: training goes on while the state is written; one save at a time."""
    max_keep: Annotated[int, NoResult] = 5
    """Newest checkpoints that are kept; -1: all."""
    export_safetensors: Annotated[bool, NoResult] = True
    """True: the pipeline ends with a proven safetensors export (a plain recipe gets an `export` stage)."""

    @field_validator("max_keep")
    @classmethod
    def _keep_some(cls, count: int) -> int:
        if count == 0 or count < -1:
            raise ValueError(f"max_keep = {count} must be -1 (all) or at least 1")
        return count


class TrainConfig(Table):
    """`[train]`"""

    train_policy: SFTDataConfig | GrpoConfig = Field(default_factory=GrpoConfig, discriminator="type")
    """What is learned from what; `type` is `sft` or `grpo`."""

    epoch: PositiveInt = 1
    """Passes over the data."""
    max_num_steps: PositiveInt | None = None
    """Upper bound on train steps; None: until the epochs end. The schedule is laid over what remains."""
    train_batch_per_replica: PositiveInt = 8
    """SFT: rows per optimizer step. GRPO: completions per train step, a multiple of `rollout.n_generation`."""

    optm_name: Literal["AdamW", "Adam"] = "AdamW"
    """torch.optim class."""
    optm_lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    optm_impl: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation inside torch; `fused` on CPU needs a float32 or bfloat16 master."""
    optm_weight_decay: NonNegativeFloat = 0.01
    """Decoupled (AdamW) or L2 (Adam); not applied to biases and norms, which have one dimension."""
    optm_betas: Annotated[tuple[_Decay, _Decay], Field(strict=False)] = (0.9, 0.999)
    """Adam's decay rates."""
    epsilon: PositiveFloat = 1e-6
    """Adam's epsilon."""
    optm_warmup_steps: int | float = 20
    """A count of steps, or a float up to 1.0 for a fraction of all steps."""
    optm_warmup_start_factor: Fraction = 0.0
    """Learning-rate factor before the first warm-up step; the first step itself is one increment above it, never
    wasted at 0."""
    optm_decay_ratio: Fraction | None = None
    """Fraction of all steps that decay; None: all after warm-up."""
    optm_decay_type: Literal["none", "linear", "cosine", "sqrt"] | None = None
    """Decay curve; None or `none`: constant."""
    optm_min_lr_factor: Fraction = 0.0
    """Factor that the decay ends at."""
    optm_grad_norm_clip: float = 1.0
    """Global gradient norm is clipped to this; 0 or less: only measured."""

    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and optimizer state."""
    param_dtype: DType = "bfloat16"
    """Compute in the forward and backward pass, and the dtype of the export."""
    logprob_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Logits are cast to this before log-softmax in RL."""

    seed: int | None = None
    """Of initialisation, order and sampling; None or negative: 42."""
    deterministic: bool = False
    """Deterministic kernels only; an operation that has none is an error. One CPU rank is repeatable without it."""
    compile: bool = True
    """torch.compile each block; needs a C++ compiler on CPU."""

    ckpt: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    save_ckpt_at_exit: Annotated[bool, NoResult] = True
    """Save when a signal asks to stop; False: stop without."""
    signal_to_handle: Annotated[tuple[str, ...], Field(strict=False), NoResult] = ("SIGUSR1",)
    """Signals that mean save and stop, beside SIGTERM."""
    output_dir: Annotated[str, NoResult] = "./outputs"
    """Folder of all runs; the run id is appended."""
    timestamp: Annotated[str, NoResult] = ""
    """Run id; empty: the local time as YYYYmmddHHMMSS."""

    @field_validator("seed")
    @classmethod
    def _seed_is_not_negative(cls, seed: int | None) -> int:
        return DEFAULT_SEED if seed is None or seed < 0 else seed

    @field_validator("optm_warmup_steps")
    @classmethod
    def _warmup(cls, steps: int | float) -> int | float:
        if steps < 0 or (isinstance(steps, float) and steps > 1 and steps != int(steps)):
            raise ValueError(f"optm_warmup_steps = {steps} must be a count of steps or a fraction up to 1.0")
        return int(steps) if isinstance(steps, float) and steps > 1 else steps

    @field_validator("signal_to_handle")
    @classmethod
    def _signals_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        import signal

        for name in names:
            if name not in signal.Signals.__members__ or name in _UNCATCHABLE:
                raise ValueError(f"{name!r} is not a signal that can ask a process to stop")
        return names

    @model_validator(mode="before")
    @classmethod
    def _infer_policy_type(cls, values: Any) -> Any:
        """A `train_policy` without `type` is GRPO when it has a key that only GRPO knows, as in Cosmos-RL."""
        policy = values.get("train_policy") if isinstance(values, dict) else None
        if isinstance(policy, dict) and "type" not in policy:
            hints = {"temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward"}
            values = {**values, "train_policy": {**policy, "type": "grpo" if hints & set(policy) else "sft"}}
        return values

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        policy = self.train_policy
        if self.train_batch_per_replica % policy.mini_batch:
            raise ValueError(
                f"train_batch_per_replica = {self.train_batch_per_replica} must be a multiple of "
                f"train_policy.mini_batch = {policy.mini_batch}"
            )
        if self.optm_impl == "fused" and self.master_dtype not in {"float32", "bfloat16"}:
            raise ValueError("optm_impl = 'fused' needs master_dtype float32 or bfloat16")
        return self
