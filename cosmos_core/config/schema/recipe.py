"""Recipe: the settings of one training, in the format of Cosmos-RL, and the rules that involve several tables."""

from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.clean import BENCHMARKS_KEY
from cosmos_core.config.schema.dataset import RowsConfig
from cosmos_core.config.schema.diffusion_sft import DiffusionSftConfig
from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.config.schema.export import ExportConfig
from cosmos_core.config.schema.judge import JudgeConfig
from cosmos_core.config.schema.logging import LoggingConfig
from cosmos_core.config.schema.merge import MergeConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.profiler import ProfilerConfig
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.rl import OverlongRewardConfig, RlConfig
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.sample import SampleStageConfig
from cosmos_core.config.schema.table import Table, add_notice
from cosmos_core.config.schema.train import TrainConfig, infer_training_type
from cosmos_core.config.schema.validation import ValidationConfig
from cosmos_core.types import StageKind


class RewardSettings(NamedTuple):
    """Settings with which the reward functions of a recipe are called."""

    environment_names: tuple[str, ...]
    """Names of the additional environment variables that the processes of reward functions receive."""
    judge: JudgeConfig
    timeout_seconds: float
    """Time limit of one call of a reward function other than `judge`."""
    keyword_values: dict[str, Any]
    """The recipe's values that reward functions can take as keyword arguments (`REWARD_PARAMETERS`)."""
    calls_per_group: bool
    """Whether a user's own reward functions take all completions of a prompt at once."""


class VLAConfig(Table):
    """`[vla]`: vision-language-action models for robots, which are not supported; changed settings of the table are
    refused."""


class Recipe(Table):
    """Root table of a recipe."""

    distillation: DistillationConfig = DistillationConfig()
    """Settings of the distillation from a teacher."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Settings of the optimizer, data, precision and checkpoints of the training."""
    policy: PolicyConfig = PolicyConfig()
    """Settings of the model and its device mesh."""
    rollout: RolloutConfig = RolloutConfig()
    """Settings of the generation of completions in training."""
    validation: ValidationConfig = ValidationConfig()
    """Settings of the validation on held-out rows."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Settings of a stage of kind `evaluate`, which runs public benchmarks or samples prompt sets."""
    export: ExportConfig = ExportConfig()
    """Settings of a stage of kind `export`: the formats in which it writes its model."""
    logging: LoggingConfig = LoggingConfig()
    """Settings of metric sinks, such as Weights & Biases."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Settings of the traces of train steps by torch.profiler."""
    judge: JudgeConfig = JudgeConfig()
    """Settings of the language model that the reward `judge` queries."""
    merge: MergeConfig = MergeConfig()
    """Settings of a stage of kind `merge`, which combines models."""
    sample: SampleStageConfig = SampleStageConfig()
    """Settings of a stage of kind `sample`, which keeps completions as rows."""
    vla: VLAConfig = VLAConfig()
    """Settings of vision-language-action models for robots, which are not supported; changed settings are refused."""
    custom: dict[str, Any] = {}
    """Table of free keys for user code, which stages, rewards, algorithms and engines receive.
    `dataset.annotation_path` is a file of rows in the format of LLaVA, `dataset.media_path` the folder of their images;
    `vision.min_pixels` and `vision.max_pixels` bound the size of the images."""
    mode: Literal["disaggregated", "colocated", "colocated_separated"] = "colocated"
    """Where rollout engines run. `colocated`: in the trainer's processes, alternating with training. `disaggregated`:
    `rollout.parallelism.n_init_replicas` engines in separate processes and on separate GPUs, which generate while the
    ranks train. `colocated_separated`: in separate processes on the trainer's GPUs, alternating with training. A recipe
    for Cosmos-RL has the key `redis`, or `n_init_replicas` of both trainer and rollouts; if it leaves `mode` out, this
    is `disaggregated`, as in Cosmos-RL, or with a notice `colocated` if the machine has too few GPUs."""
    redis: str | int = ""
    """Port of the Redis server of Cosmos-RL's controller; a recipe with this key is one for Cosmos-RL, see `mode`."""

    @property
    def has_cosmos_rl_keys(self) -> bool:
        """Return True if the recipe was written for Cosmos-RL, by the keys that only such recipes have."""
        meshes = (self.policy.parallelism, self.rollout.parallelism)
        return bool(self.redis) or all("n_init_replicas" in mesh.model_fields_set for mesh in meshes)

    @property
    def has_validation_completions(self) -> bool:
        """Return whether held-out rows are prompts that the model completes, not texts whose loss is measured."""
        has_rewards = self.validation.reward_function or self.validation.remote_reward_config
        return self.train.train_policy.has_rollouts or bool(has_rewards)

    @property
    def group_size(self) -> int:
        """Return the number of samples that a train step gets from each row: its completions, or 1 in SFT."""
        return self.rollout.n_generation if self.train.train_policy.has_rollouts else 1

    @property
    def may_split_groups(self) -> bool:
        """Return whether the completions of one prompt can be trained on in several train steps, because the number of
        completions per train step is no multiple of the group size."""
        return self.train.train_batch_per_replica % self.group_size != 0

    @property
    def held_out_rows_per_pass(self) -> int:
        """Return the number of held-out rows per forward pass."""
        return self.validation.batch_size or self.train.rows_per_pass

    @property
    def max_held_out_tokens(self) -> int:
        """Return the maximum number of tokens of a completion in validation."""
        return self.validation.max_response_length or self.rollout.max_response_length

    @property
    def training_rewards(self) -> dict[str, float] | RemoteRewardConfig:
        """Return what scores the completions in training: the weights of reward functions by name, or the settings of a
        reward service."""
        train_policy = self.train.train_policy
        return train_policy.remote_reward_config or train_policy.rewards

    @property
    def held_out_rewards(self) -> dict[str, float] | RemoteRewardConfig:
        """Return what scores the completions in validation, by default as in training: the weights of reward functions
        by name, or the settings of a reward service."""
        validation, train_policy = self.validation, self.train.train_policy
        return validation.remote_reward_config or validation.reward_function or train_policy.validation_rewards

    @property
    def num_engines(self) -> int:
        """Return the number of rollout engines in separate processes; 0 if there are none."""
        return self.rollout.parallelism.n_init_replicas if self.mode != "colocated" else 0

    def num_gpus(self, *, has_rollouts: bool) -> int:
        """Return the number of GPUs that a stage uses for its ranks and, if it generates rollouts (`has_rollouts`), for
        engines with their own GPUs."""
        mesh = self.policy.parallelism
        num_gpu_engines = self.num_engines if has_rollouts and self.mode == "disaggregated" else 0
        return mesh.world_size * mesh.n_init_replicas + num_gpu_engines * self.rollout.parallelism.tp_size

    @property
    def datasets(self) -> dict[str, RowsConfig]:
        """Return the data sets of training, supervised and held-out rows and of benchmarks, by their recipe key."""
        train_policy = self.train.train_policy
        datasets: dict[str, RowsConfig] = {key: table.dataset for key, table in train_policy.tables_by_dataset.items()}
        if train_policy.supervised_rows:
            datasets["train.train_policy.data_term"] = train_policy.supervised_rows.dataset
        datasets["validation.dataset"] = self.validation.dataset
        for i, benchmark in enumerate(train_policy.clean.decontaminate_against if train_policy.clean else ()):
            datasets[f"{BENCHMARKS_KEY}.{i}"] = benchmark.dataset
        return datasets

    @property
    def teacher(self) -> DistillationConfig | None:
        """Return the settings of the teacher whose outputs the algorithm needs; None: no teacher."""
        return self.distillation if self.distillation.enable and isinstance(self.train.train_policy, RlConfig) else None

    def teacher_for_stage(self, stage_kind: StageKind) -> DistillationConfig | None:
        """Return the settings of the teacher if a stage of this kind queries it; None: no teacher."""
        return self.teacher if stage_kind.feed == "rollouts" else None

    def explain_missing_image_support(self, stage_kind: StageKind) -> str:
        """Return the reason why a stage of this kind cannot read rows with images; empty if it can."""
        for key in ("tp_size", "cp_size", "pp_size", "ep_size"):
            if (num_axis_ranks := getattr(self.policy.parallelism, key)) > 1:
                return (
                    f"policy.parallelism.{key} = {num_axis_ranks}: this version shards models that are shown images by "
                    f"dp_shard_size and dp_replicate_size alone; set {key} = 1"
                )
        if self.train.train_policy.has_token_based_batches:
            return (
                "train.train_policy.enable_dp_load_balancing = true: rows with images go apart from rows without, "
                "whatever their length; set it to false"
            )
        if self.teacher_for_stage(stage_kind):
            return (
                "distillation.enable = true: this version shows images to the policy alone, not to a teacher; set it "
                "to false, or take rows without images"
            )
        return ""

    @property
    def reward_settings(self) -> RewardSettings:
        """Return the settings with which reward functions are called, in training and in validation."""
        train_policy = self.train.train_policy
        keyword_values = {
            "custom": self.custom,
            "max_tokens": self.rollout.max_response_length,
            "judge_config": self.judge.model_dump(),
            "overlong": OverlongRewardConfig().model_dump(),
        }
        timeout_seconds, calls_per_group = 10.0, False
        if isinstance(train_policy, RlConfig):
            keyword_values["overlong"] = train_policy.overlong_reward.model_dump()
            timeout_seconds = train_policy.reward_timeout_seconds
            calls_per_group = train_policy.group_reward_calculation
        return RewardSettings(self.reward_env_names, self.judge, timeout_seconds, keyword_values, calls_per_group)

    @property
    def uses_judge(self) -> bool:
        """Return whether training or validation uses the reward `judge`."""
        train_policy = self.train.train_policy
        return "judge" in {*train_policy.rewards, *(self.validation.reward_function or train_policy.validation_rewards)}

    @property
    def reward_env_names(self) -> tuple[str, ...]:
        """Return the names of additional environment variables that processes of reward functions receive."""
        training_names = getattr(self.train.train_policy, "reward_env", ())
        return tuple(dict.fromkeys((*training_names, *self.validation.reward_env)))

    @property
    def completed_splits(self) -> tuple[str, ...]:
        """Return those of the splits `train` and `validation` whose prompts the engines of this recipe complete."""
        # The server at `sample.endpoint` has its own limit of the prompt length, so leave out the training prompts.
        train_splits = ("train",) * (self.train.train_policy.has_rollouts and not self.sample.endpoint)
        return train_splits + ("validation",) * (self.validation.enable and self.has_validation_completions)

    @property
    def secret_env_names(self) -> tuple[str, ...]:
        """Return the names of environment variables whose values are secret: those of rewards, and the judge's key."""
        return (*self.reward_env_names, self.judge.key_env) if self.uses_judge else self.reward_env_names

    @model_validator(mode="before")
    @classmethod
    def _select_sft_algorithm(cls, recipe_values: Any) -> Any:
        """Replace the algorithm `sft` by `diffusion_sft` (flow matching) if the model is a diffusion model."""
        recipe_tables: Any = recipe_values if isinstance(recipe_values, dict) else {}
        policy, train_table = recipe_tables.get("policy"), recipe_tables.get("train")
        policy_table = train_table.get("train_policy") if isinstance(train_table, dict) else None
        is_diffusion_model = isinstance(policy, dict) and policy.get("is_diffusers") is True
        if not (is_diffusion_model and isinstance(policy_table, dict) and infer_training_type(policy_table) == "sft"):
            return recipe_values
        name = policy_table.get("trainer_type", "sft")
        if name != "sft" and not (isinstance(name, str) and ":" in name):
            return recipe_values
        policy_table = {**policy_table, "type": "sft"}
        algorithm_table: Any = {**policy_table, "trainer_type": "diffusion_sft"}
        # Validate the table of a user's class as `DiffusionSftConfig`, because `SftConfig` would be selected by `type`.
        if name != "sft":
            with suppress(ValidationError):  # ignore an error: validation of `train` reports it with the full key
                algorithm_table = DiffusionSftConfig.model_validate(policy_table)
        return {**recipe_values, "train": {**train_table, "train_policy": algorithm_table}}

    @model_validator(mode="after")
    def _convert_replicas_to_data_parallel(self, info: ValidationInfo) -> Self:
        """Replace `n_init_replicas` copies of the trainer by data-parallel replicas of one mesh, and multiply the
        number of rows of a train step by `n_init_replicas`."""
        mesh, train_config = self.policy.parallelism, self.train
        num_replicas, train_policy = mesh.n_init_replicas, train_config.train_policy
        if num_replicas == 1:
            return self
        num_dp_replicas = mesh.dp_replicate_size * num_replicas
        rows_per_step = train_config.train_batch_per_replica * num_replicas
        change_text = f"dp_replicate_size = {num_dp_replicas}, and a train step has {rows_per_step} rows"
        add_notice(info, f"policy.parallelism.n_init_replicas = {num_replicas}: {change_text}")
        if isinstance(train_policy, RlConfig) and (batch_size := train_policy.batch_size_per_optimize):
            train_policy = train_policy.copy_with(batch_size_per_optimize=batch_size * num_replicas)
        mesh = mesh.copy_with(n_init_replicas=1, dp_replicate_size=num_dp_replicas)
        train_config = train_config.copy_with(train_batch_per_replica=rows_per_step, train_policy=train_policy)
        return self.copy_with(policy=self.policy.copy_with(parallelism=mesh), train=train_config)

    @model_validator(mode="after")
    def _select_flow_sampler_backend(self) -> Self:
        """Select the backend `flow_sampler` for a diffusion model, which generates on the ranks that train it."""
        if not self.policy.is_diffusers or self.rollout.backend not in {"vllm", "hf"}:
            return self
        return self.copy_with(rollout=self.rollout.copy_with(backend="flow_sampler"))

    @model_validator(mode="after")
    def _check_exclusive_settings(self) -> Self:
        """Refuse settings that pipeline parallelism, LoRA in RL, or a mixture of data sets does not support. Cosmos-RL
        has the same rules for pipeline parallelism."""
        mesh, train_config, train_policy = self.policy.parallelism, self.train, self.train.train_policy
        batch_size = train_config.train_batch_per_replica
        pp_setting_text = f"policy.parallelism.pp_size = {mesh.pp_size}"
        if mesh.pp_size > 1 and batch_size % mesh.pp_micro_batch_size:
            rule = f"must be a multiple of pp_micro_batch_size = {mesh.pp_micro_batch_size}"
            raise ValueError(f"{pp_setting_text}: train.train_batch_per_replica = {batch_size} {rule}")
        if mesh.pp_size > 1 and train_config.fsdp_offload:
            raise ValueError(f"{pp_setting_text} excludes train.fsdp_offload; set train.fsdp_offload = false")
        has_lora_in_rl = self.policy.lora is not None and isinstance(train_policy, RlConfig)
        if has_lora_in_rl and not self.policy.is_diffusers and train_config.compile:
            raise ValueError("policy.lora with GRPO excludes train.compile; set train.compile = false")
        if has_lora_in_rl and not self.policy.is_diffusers and mesh.tp_size > 1:
            remedy = "set it to 1 and raise dp_shard_size"
            raise ValueError(f"policy.lora with GRPO excludes policy.parallelism.tp_size = {mesh.tp_size}; {remedy}")
        if train_policy.datasets and self.policy.is_diffusers:
            raise ValueError("train.train_policy.datasets mixes rows of text; name one data set of media in dataset")
        validates_with_service = self.validation.use_remote_reward
        trains_with_service = isinstance(train_policy, RlConfig) and train_policy.use_remote_reward
        if validates_with_service is not None and validates_with_service != trains_with_service:
            raise ValueError(
                f"validation.use_remote_reward = {str(validates_with_service).lower()} must equal "
                f"train.train_policy.use_remote_reward = {str(trains_with_service).lower()}; leave it out to inherit"
            )
        return self

    def should_compile_blocks(self, device: str) -> bool:
        """Return whether torch.compile is applied to the blocks of the model on a device of type `cuda` or `cpu`."""
        if self.train.compile is not None or device != "cuda":
            return bool(self.train.compile)
        mesh, policy = self.policy.parallelism, self.policy
        if policy.is_diffusers:
            return mesh.cp_size == 1
        return mesh.tp_size == 1 and (policy.lora is None or not isinstance(self.train.train_policy, RlConfig))

    @field_validator("train")
    @classmethod
    def _derive_distillation_settings(cls, train: TrainConfig, info: ValidationInfo) -> TrainConfig:
        distillation_config, train_policy = info.data.get("distillation"), train.train_policy
        if distillation_config is None or not distillation_config.enable or not isinstance(train_policy, RlConfig):
            return train
        return train.copy_with(train_policy=train_policy.with_bypassed_rewards().copy_with(rollout_as_token_ids=True))

    @field_validator("validation")
    @classmethod
    def _inherit_remote_rewards(cls, validation: ValidationConfig, info: ValidationInfo) -> ValidationConfig:
        """Copy the settings of the reward service from training to validation if `[validation]` leaves them out."""
        train_config = info.data.get("train")
        train_policy = train_config.train_policy if train_config else None
        if not isinstance(train_policy, RlConfig):
            return validation
        is_remote, remote_reward = validation.use_remote_reward, validation.remote_reward or train_policy.remote_reward
        uses_reward_service = train_policy.use_remote_reward if is_remote is None else is_remote
        return validation.copy_with(use_remote_reward=uses_reward_service, remote_reward=remote_reward)
