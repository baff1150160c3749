"""`[train]`: optimizer, learning rate schedule, batch size and precision; its tables have separate files."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cosmos_core.config.schema.algorithm import DEFAULT_MINI_BATCH, AlgorithmConfig, find_algorithm_name, policy_types
from cosmos_core.config.schema.checkpoint import CheckpointConfig
from cosmos_core.config.schema.ddrl import DdrlConfig
from cosmos_core.config.schema.diffusion_nft import DiffusionNftConfig
from cosmos_core.config.schema.diffusion_sft import DiffusionSftConfig
from cosmos_core.config.schema.dpo import DpoConfig
from cosmos_core.config.schema.field_metadata import (
    EnabledBy,
    FieldUnit,
    OmittedIfEmpty,
    ReferenceKind,
    ResultNeutral,
    SupportedValues,
)
from cosmos_core.config.schema.flow_grpo import FlowGrpoConfig
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.hooks import HooksConfig
from cosmos_core.config.schema.kto import KtoConfig
from cosmos_core.config.schema.precision import FP4Config, FP8Config
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.sft import SftConfig
from cosmos_core.config.schema.table import StageContext, Table, add_notice, short_toml
from cosmos_core.config.schema.value_types import Auto, DType, Fraction, RowCount, StepCount, StringList

DEFAULT_SEED = 42
_BetaDecay = Annotated[float, Field(ge=0, lt=1)]
_OptimizerImpl = Literal["fused", "foreach", "for-loop"]
_NO_LOSS_SCALING_ADVICE = "this version does not scale losses, so gradients vanish; use 'bfloat16'"
# Signals that cannot ask for a stop: SIGKILL and SIGSTOP cannot be handled, and every child that ends sends SIGCHLD.
_UNCATCHABLE_SIGNALS = {"SIGKILL", "SIGSTOP", "SIGCHLD"}
_GRPO_ONLY_KEYS = {"temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward"}

AlgorithmTable = Annotated[
    Annotated[SftConfig, Tag("sft")]
    | Annotated[DiffusionSftConfig, Tag("diffusion_sft")]
    | Annotated[DpoConfig, Tag("dpo")]
    | Annotated[KtoConfig, Tag("kto")]
    | Annotated[GrpoConfig, Tag("grpo")]
    | Annotated[DiffusionNftConfig, Tag("diffusion_nft")]
    | Annotated[FlowGrpoConfig, Tag("flow_grpo")]
    | Annotated[DdrlConfig, Tag("ddrl")],
    Discriminator(find_algorithm_name),
]


class TrainConfig(Table):
    """`[train]`: settings of optimizer, learning rate schedule, batch size and precision."""

    epoch: Annotated[PositiveInt, FieldUnit("epochs")] = 1
    """Number of passes over the training rows."""
    max_num_steps: StepCount | None = None
    """Maximum number of train steps, over which the learning rate schedule then extends; None: until the epochs end."""
    train_batch_per_replica: RowCount = 8
    """Number of rows per step: with SFT rows per optimizer step, all ranks together (Cosmos-RL: per data-parallel
    rank); with GRPO completions per train step."""
    sequence_packing: bool | None = None
    """Concatenate the rows of a micro-batch without padding, with attention only within each row; changes speed and
    memory, not results. A model that cannot separate packed rows falls back to padding, with a warning. None: enabled
    if the model supports it, except with torch.compile on a CPU, where attention to packed rows breaks every graph."""

    num_threads: Annotated[PositiveInt | Auto | None, FieldUnit("threads"), OmittedIfEmpty] = None
    """Number of CPU threads of each rank in forward and backward passes of the training. `auto`: the fastest number up
    to `pipeline.threads`, measured as `mini_batch` is, on ranks without a GPU. None: `pipeline.threads`."""

    optm_name: Literal["AdamW", "Adam", "AdamW8bit", "Adam8bit", "Muon"] = "AdamW"
    """Optimizer: a class of torch.optim, or its counterpart of torchao with 8-bit moments, which is always compiled (on
    CPU it needs a C++ compiler). `Muon` updates the matrices of the layers, at the size of AdamW's updates; embeddings,
    head, vectors and fused experts are updated by AdamW."""
    optm_lr: PositiveFloat | Annotated[tuple[PositiveFloat, ...], Field(strict=False)] | dict[str, PositiveFloat] = 1e-6
    """Peak learning rate: one number, or a table of rates by module path, where the deepest path that contains a
    parameter applies and `global` is the rate of all other parameters; a list has one rate per model part, and there is
    one model part."""
    optm_impl: _OptimizerImpl | Annotated[tuple[_OptimizerImpl, ...], Field(strict=False)] = "fused"
    """Implementation of the optimizer in torch (torchao has only one), or a list with one per model part, and there is
    one model part; `fused` on CPU needs float32 or bfloat16 as `master_dtype`."""
    optm_weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled (AdamW) or as L2 penalty (Adam); not applied to one-dimensional weights."""
    optm_betas: Annotated[tuple[_BetaDecay, _BetaDecay], Field(strict=False)] = (0.9, 0.999)
    """Decay rates of Adam's first and second moment."""
    epsilon: PositiveFloat = 1e-6
    """Epsilon in the denominator of Adam's update."""
    optm_warmup_steps: Annotated[int | float, FieldUnit("train steps or fraction")] = 20
    """Length of the warm-up of the learning rate: a number of steps, or, as a float up to 1.0, a fraction of all."""
    optm_warmup_start_factor: Annotated[Fraction, EnabledBy("optm_warmup_steps")] = 0.0
    """Factor of the learning rate at the start of the warm-up; the first step has one increment more, so that its
    factor is never 0."""
    optm_decay_ratio: Annotated[Fraction | None, EnabledBy("optm_decay_type")] = None
    """Fraction of all steps in which the learning rate decays; None: all steps after the warm-up."""
    optm_decay_type: Literal["none", "linear", "cosine", "sqrt"] | None = None
    """Shape of the decay of the learning rate; None or `none`: constant learning rate."""
    optm_min_lr_factor: Annotated[Fraction, EnabledBy("optm_decay_type")] = 0.0
    """Factor of the learning rate at the end of the decay."""
    optm_grad_norm_clip: float = 1.0
    """Maximum global gradient norm, to which gradients are clipped; 0 or less: the norm is only measured."""
    ema_enable: bool = False
    """Keep a moving average of the trained weights in float32, which is validated and exported."""
    ema_decay: Annotated[Fraction, EnabledBy("ema_enable")] = 0.9999
    """Largest decay of the moving average; after n optimizer steps min((1 + n) / (10 + n), `ema_decay`)."""
    ema_update_step_interval: Annotated[NonNegativeInt, FieldUnit("optimizer steps"), EnabledBy("ema_enable")] = 0
    """Number N of optimizer steps between two updates of the moving average; the first update follows after N - 1
    steps, as in Flow-GRPO and DiffusionNFT. 0 and 1: every step."""

    master_dtype: Annotated[
        DType, SupportedValues(("float32", "bfloat16"), "float16 cannot hold optimizer state; use 'float32'")
    ] = "float32"
    """Dtype of the weights and of the optimizer state."""
    param_dtype: Annotated[DType, SupportedValues(("float32", "bfloat16"), _NO_LOSS_SCALING_ADVICE)] = "bfloat16"
    """Dtype of the forward and backward pass, and of the export; an `export` stage whose recipe leaves it out has the
    dtype of the stage whose model it exports."""
    transfer_dtype: DType | None = None
    """Dtype of weights in the transfer to the rollout engine, which casts them to its own dtype; None: `master_dtype`,
    or `param_dtype` if vLLM would cast all weights to that. With `rollout.backend = "hf"` in the trainer's processes no
    weights are transferred."""
    logprob_dtype: DType = "float32"
    """Dtype to which logits are cast before log-softmax in RL."""
    fsdp_reduce_dtype: DType = "float32"
    """Dtype in which gradients are summed over ranks."""
    fsdp_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, where the optimizer step also runs; the parameters
    of each block are gathered from there. Not yet run on a GPU."""
    fsdp_reshard_after_forward: Literal["always", "never", "default"] = "default"
    """Whether the gathered parameters of a block are freed after its forward pass; `default`: unless there is pipeline
    parallelism."""
    fp8: FP8Config = FP8Config()
    """Settings of linear layers in 8-bit floating point."""
    fp4: FP4Config = FP4Config()
    """Settings of linear layers in 4-bit floating point, which are not supported; changed settings are refused."""

    seed: Annotated[int | None, AfterValidator(lambda seed: DEFAULT_SEED if seed is None or seed < 0 else seed)] = None
    """Seed of initialisation, order of rows and sampling; None or negative: 42."""
    deterministic: bool = False
    """Use only deterministic kernels; an operation without one is an error. A CPU training on one rank is repeatable
    without it."""
    compile: bool | None = None
    """Compile each block with torch.compile, except with `tp_size` above 1, where torch 2.13 cannot compile for rows of
    any length; on CPU it needs a C++ compiler. None: true on a GPU, unless another setting excludes it; false on CPU,
    where packed rows were measured to be faster without it (for the first hundred steps, and in float32 always)."""
    async_tp_enabled: bool = False
    """Overlap the communication of tensor parallelism with compute."""
    activation_offload: bool = False
    """Keep activations (with recomputation: the inputs of blocks) in host memory until the backward pass. Not yet run
    on a GPU."""

    sync_weight_interval: StepCount = 1
    """Number of train steps between two transfers of weights to the rollout engines; weights are also transferred when
    a training starts or resumes, and before each validation. Above 1, rollouts therefore depend on the step at which a
    training resumes, and on `validation.freq`. Engines that use the trainer's own weights (`hf` on one rank,
    `flow_sampler`) always have the newest."""
    train_policy: AlgorithmTable = Field(default_factory=GrpoConfig)
    """Algorithm and its rows: `type` is `sft` or `grpo`, `trainer_type` the algorithm."""
    coalesce_weight_sync: bool = False
    """Skip a transfer of weights to the engines while the previous transfer is in progress."""

    ckpt: CheckpointConfig = CheckpointConfig()
    """Settings of checkpoints and of the publication of the model."""
    hooks: HooksConfig = HooksConfig()
    """User functions that are called at points of a training."""
    resume: Annotated[bool | str, ResultNeutral, ReferenceKind.PATH] = False
    """Checkpoint from which training starts: true for the newest checkpoint below `output_dir` of a run with the same
    settings and inputs, on any device mesh, or the path of a `.../step_N/policy` folder; false: none. `cosmos resume`
    continues a run itself."""
    save_ckpt_at_exit: Annotated[bool, ResultNeutral] = True
    """Save a checkpoint when a signal requests a stop; False: stop without saving."""
    signal_to_handle: Annotated[StringList, ResultNeutral] = ("SIGUSR1",)
    """Signals that request saving and stopping, in addition to SIGTERM."""
    output_dir: Annotated[str, ResultNeutral] = "./outputs"
    """Folder of all runs; the run id is appended."""
    timestamp: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$"), ResultNeutral] = ""
    """Id of the run; empty: the local time as YYYYmmddHHMMSS."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if isinstance(self.optm_lr, tuple):
            yield f"train.optm_lr = {short_toml(self.optm_lr)}: a model is one part here; give rates by module path"
        if isinstance(self.optm_impl, tuple):
            yield f"train.optm_impl = {short_toml(self.optm_impl)}: this version has one optimizer; give one name"
        if self.optm_name.endswith("8bit") and stage.recipe.policy.parallelism.world_size > 1:
            yield f"train.optm_name = {self.optm_name!r}: this version has 8-bit moments on one rank alone; use 'AdamW'"
        if self.optm_name == "Muon" and stage.recipe.policy.parallelism.world_size > 1:
            yield "train.optm_name = 'Muon' needs whole matrices, which this version has on one rank alone; use 'AdamW'"
        if self.master_dtype == "bfloat16" and self.param_dtype == "float32":
            yield "train.param_dtype = 'float32' is wider than train.master_dtype = 'bfloat16'; make them equal"
        if not self.train_policy.allows_validation_completions and stage.recipe.validation.reward_function:
            reason = f"held-out rows are {self.train_policy.rows}, and nothing is generated"
            yield f"validation.reward_function: {reason}; leave it out"

    @field_validator("transfer_dtype")
    @classmethod
    def _default_to_master_dtype(cls, transfer_dtype: DType | None, info: ValidationInfo) -> DType | None:
        return info.data.get("master_dtype") if transfer_dtype is None else transfer_dtype

    @field_validator("train_policy")
    @classmethod
    def _derive_policy_settings(cls, train_policy: AlgorithmConfig, info: ValidationInfo) -> AlgorithmConfig:
        """Set `mini_batch`, if the recipe leaves it out, to a divisor of the batch size, and increase
        `allowed_outdated_steps` to at least the interval between weight syncs minus 1."""
        batch_size, sync_interval = info.data.get("train_batch_per_replica"), info.data.get("sync_weight_interval", 1)
        if batch_size and "mini_batch" not in train_policy.model_fields_set:
            train_policy = train_policy.copy_with(mini_batch=math.gcd(batch_size, DEFAULT_MINI_BATCH))
        if (
            isinstance(train_policy, RlConfig)
            and not train_policy.on_policy
            and train_policy.allowed_outdated_steps + 1 < sync_interval
        ):
            min_outdated_steps = sync_interval - 1
            setting_text = f"train.train_policy.allowed_outdated_steps = {train_policy.allowed_outdated_steps}"
            add_notice(info, f"{setting_text}: {min_outdated_steps}, which is sync_weight_interval - 1")
            train_policy = train_policy.copy_with(allowed_outdated_steps=min_outdated_steps)
        return train_policy

    @field_validator("coalesce_weight_sync")
    @classmethod
    def _disable_coalesced_sync(cls, coalesces_sync: bool, info: ValidationInfo) -> bool:
        train_policy = info.data.get("train_policy")
        if not coalesces_sync or not isinstance(train_policy, RlConfig):
            return coalesces_sync
        if train_policy.on_policy or not train_policy.allowed_outdated_steps:
            add_notice(info, "train.coalesce_weight_sync: false, because rollouts may not be outdated")
            return False
        return True

    @field_validator("resume")
    @classmethod
    def _normalise_resume_setting(cls, resume_setting: bool | str) -> bool | str:
        return False if resume_setting in {"", "None", "False"} else resume_setting

    @field_validator("optm_lr", "optm_impl")
    @classmethod
    def _unwrap_single_item(cls, item_or_list: Any) -> Any:
        """Return the item of a list with one item, because Cosmos-RL has a list with one value per model part; return
        any other value unchanged. Raise `ValueError` for an empty list, or a table without the key `global`."""
        if isinstance(item_or_list, dict) and "global" not in item_or_list:
            raise ValueError(f"optm_lr = {item_or_list} must have the key 'global', the rate of all modules not named")
        if item_or_list == ():
            raise ValueError("it is an empty list; give one value per model part")
        return item_or_list[0] if isinstance(item_or_list, tuple) and len(item_or_list) == 1 else item_or_list

    @field_validator("optm_warmup_steps")
    @classmethod
    def _normalise_warmup_steps(cls, num_steps: int | float) -> int | float:
        if num_steps < 0 or (isinstance(num_steps, float) and num_steps > 1 and num_steps != int(num_steps)):
            raise ValueError(f"optm_warmup_steps = {num_steps} must be a count of steps or a fraction up to 1.0")
        return int(num_steps) if isinstance(num_steps, float) and num_steps > 1 else num_steps

    @field_validator("signal_to_handle")
    @classmethod
    def _check_signal_names(cls, signal_names: tuple[str, ...]) -> tuple[str, ...]:
        import signal

        for name in signal_names:
            if name not in signal.Signals.__members__ or name in _UNCATCHABLE_SIGNALS:
                raise ValueError(f"{name!r} is not a signal that can ask a process to stop")
        return signal_names

    @property
    def order_seed(self) -> int:
        """Return the seed of the order of rows: `train_policy.dataloader_seed` or, if that is None, `seed`."""
        seed = self.seed if self.train_policy.dataloader_seed is None else self.train_policy.dataloader_seed
        assert seed is not None
        return seed

    @property
    def rows_per_pass(self) -> int:
        """Return the number of rows per forward pass, `train_policy.mini_batch`. If that is `auto`, return the default
        number, which applies until the training has measured the fastest."""
        mini_batch = self.train_policy.mini_batch
        return math.gcd(self.train_batch_per_replica, DEFAULT_MINI_BATCH) if mini_batch == "auto" else mini_batch

    @model_validator(mode="before")
    @classmethod
    def _infer_policy_type(cls, train_table: Any) -> Any:
        """Set a missing `type` of `train_policy` as Cosmos-RL does: `grpo` if the table has a key that only GRPO has,
        otherwise `sft`."""
        policy_table = train_table.get("train_policy") if isinstance(train_table, dict) else None
        if policy_table is not None and not isinstance(policy_table, dict | Table):
            raise ValueError(f"train_policy = {policy_table!r}: must be a table")
        if isinstance(policy_table, dict) and policy_table.get("type") == "dpo":
            raise ValueError("train_policy.type = 'dpo': write type = 'sft' and trainer_type = 'dpo'")
        if isinstance(policy_table, dict) and "type" not in policy_table:
            train_table = {**train_table, "train_policy": {**policy_table, "type": infer_training_type(policy_table)}}
        elif isinstance(policy_table, dict) and policy_table["type"] not in policy_types():
            known_types = ", ".join(map(repr, policy_types()))
            raise ValueError(f"train_policy.type = {policy_table['type']!r}: must be one of {known_types}")
        return train_table

    @model_validator(mode="after")
    def _check_exclusive_settings(self) -> Self:
        train_policy = self.train_policy
        if self.train_batch_per_replica % self.rows_per_pass:
            rule = f"must be a multiple of train_policy.mini_batch = {train_policy.mini_batch}"
            raise ValueError(f"train_batch_per_replica = {self.train_batch_per_replica} {rule}")
        optimizer_batch_size = train_policy.batch_size_per_optimize if isinstance(train_policy, RlConfig) else None
        if optimizer_batch_size is not None and self.train_batch_per_replica % optimizer_batch_size:
            rule = f"must be a multiple of train_policy.batch_size_per_optimize = {optimizer_batch_size}"
            raise ValueError(f"train_batch_per_replica = {self.train_batch_per_replica} {rule}")
        if self.optm_impl == "fused" and self.master_dtype == "float16":
            raise ValueError("optm_impl = 'fused' needs master_dtype float32 or bfloat16")
        if self.async_tp_enabled and self.compile is False:
            raise ValueError("async_tp_enabled = true needs compile = true; set compile = true or leave it out")
        if train_policy.has_token_based_batches and self.max_num_steps is None:
            reason = "batches differ in rows, so the length of an epoch is unknown"
            remedy = "set train.max_num_steps"
            raise ValueError(f"train_policy.enable_dp_load_balancing = true needs max_num_steps: {reason}; {remedy}")
        if isinstance(train_policy, RlConfig) and train_policy.on_policy and self.sync_weight_interval != 1:
            rule = f"needs sync_weight_interval = 1, not {self.sync_weight_interval}"
            raise ValueError(f"train_policy.on_policy = true {rule}: rollouts of older weights are off-policy")
        return self


def infer_training_type(policy_table: Mapping[str, Any]) -> Any:
    """Return the `type` of a `train_policy` table. If it is missing, return `grpo` if the table has a key that only
    GRPO has, otherwise `sft`."""
    return policy_table.get("type", "grpo" if _GRPO_ONLY_KEYS & set(policy_table) else "sft")
