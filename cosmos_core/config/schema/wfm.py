"""The deprecated `--wfm-mode` schema of Cosmos-RL, with its own defaults: the keys that have a counterpart today as
tables, the others as a list with the reason why they have none."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cosmos_core.config.schema.table import (
    DType,
    Frames,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Rows,
    Steps,
    Table,
)

_BetaDecay = Annotated[float, Field(ge=0, lt=1)]
_OneFactor = Annotated[tuple[NonNegativeFloat], Field(strict=False)]
_OneCount = Annotated[tuple[NonNegativeInt], Field(strict=False)]


class _Tokenizer(Table):
    chunk_duration: Frames = 81
    load_mean_std: bool = False
    compile_encode: bool = False
    temporal_window: Frames = 16


class _Ema(Table):
    enabled: bool = True


class _Sde(Table):
    p_mean: float = math.log(4)
    p_std: NonNegativeFloat = 1.2


class _RewardSwitch(Table):
    enabled: bool = False


class _RemoteReward(Table):
    enabled: bool = True
    reward_fn: Annotated[str, Field(min_length=1)] = "dance_grpo"
    score_key: str = "overall_reward"
    scale: float = 1.0
    reward_clip_min: float = -5.0
    reward_clip_max: float = 5.0


class _Rewards(Table):
    adv_clip_min: float = -5.0
    adv_clip_max: float = 5.0
    aesthetic: _RewardSwitch = _RewardSwitch()
    image_reward: _RewardSwitch = _RewardSwitch()
    fake_reward: _RewardSwitch = _RewardSwitch()
    remote_reward: _RemoteReward = _RemoteReward()

    @model_validator(mode="after")
    def _remote_alone(self) -> _Rewards:
        for name in ("aesthetic", "image_reward", "fake_reward"):
            if getattr(self, name).enabled:
                raise ValueError(
                    f"{name}.enabled = true has no counterpart: images and videos are scored by the reward service; "
                    f"leave it out and name a function of the service in remote_reward.reward_fn"
                )
        if not self.remote_reward.enabled:
            raise ValueError("remote_reward.enabled = false leaves no reward to learn from; leave it out")
        return self


class _Rl(Table):
    enabled: bool = True
    num_rollout: PositiveInt = 8
    sample_steps: PositiveInt = 10
    train_on: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] = tuple(range(8))
    update_ref_every_iter: NonNegativeInt = 16
    on_policy: bool = True
    solver_option: Literal["2ab", "2mid", "1euler"] = "2ab"
    s_churn: NonNegativeFloat = 1.0
    guidance: NonNegativeFloat = 0.0
    min_num_conditional_frames: NonNegativeInt = 1
    max_num_conditional_frames: NonNegativeInt = 1
    clip_ratio: NonNegativeFloat = 1e-4
    kl_beta: NonNegativeFloat = 0.01
    data_beta: NonNegativeFloat = 0.0
    data_on_first_only: bool = False
    use_rl_sigma_and_noise: bool = True
    use_same_seed: bool = True
    exp_reward: bool = False
    reward_config: _Rewards = _Rewards()

    @model_validator(mode="after")
    def _ranges(self) -> _Rl:
        if max(self.train_on) >= self.sample_steps:
            raise ValueError(
                f"train_on = {list(self.train_on)} must be below sample_steps = {self.sample_steps}: steps are counted "
                f"from 0"
            )
        if self.min_num_conditional_frames > self.max_num_conditional_frames:
            raise ValueError(
                f"min_num_conditional_frames = {self.min_num_conditional_frames} must not be above "
                f"max_num_conditional_frames = {self.max_num_conditional_frames}"
            )
        return self


class _Model(Table):
    fsdp_shard_size: Ranks = 8
    dp_replicate_size: Ranks = 1
    precision: DType = "bfloat16"
    use_torch_compile: bool = False
    loss_scale: PositiveFloat = 10.0
    resolution: str = "480"
    tokenizer: _Tokenizer = _Tokenizer()
    ema: _Ema = _Ema()
    sde: _Sde = _Sde()
    rl: _Rl = _Rl()


class _ModelParallel(Table):
    tensor_model_parallel_size: Ranks = 1
    context_parallel_size: Ranks = 1
    expert_model_parallel_size: Ranks = 1
    pipeline_model_parallel_size: Ranks = 1


class _Optimizer(Table):
    optim_type: Literal["fusedadam", "adamw"] = "fusedadam"
    lr: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 1e-4
    betas: Annotated[tuple[_BetaDecay, _BetaDecay], Field(strict=False)] = (0.9, 0.99)
    eps: PositiveFloat = 1e-8


class _Scheduler(Table):
    """One cycle: each list has one item."""

    scheduler_type: Literal["lambda_linear"] = "lambda_linear"
    warm_up_steps: _OneCount = (1000,)
    cycle_lengths: Annotated[tuple[PositiveInt], Field(strict=False)] = (10_000_000_000_000,)
    f_start: _OneFactor = (1e-6,)
    f_max: Annotated[tuple[PositiveFloat], Field(strict=False)] = (1.0,)
    f_min: _OneFactor = (1.0,)

    @model_validator(mode="before")
    @classmethod
    def _one_cycle(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, list) and len(value) > 1:
                raise ValueError(f"{name} = {value} has {len(value)} cycles; a schedule has one here, keep the first")
        return values

    @model_validator(mode="after")
    def _peak(self) -> _Scheduler:
        for name in ("f_start", "f_min"):
            if getattr(self, name)[0] > self.f_max[0]:
                raise ValueError(f"{name} = {list(getattr(self, name))} must not be above f_max = {list(self.f_max)}")
        return self


class _Loader(Table):
    batch_size: Rows = 1
    num_workers: int = 0


class _WebVideos(Table):
    num_video_frames: Frames | None = None


class _WebLoader(_Loader):
    dataset: _WebVideos = _WebVideos()


class _Videos(_Loader):
    """Keys of both types in one table: those of `web` are below `dataloader`."""

    dataset_dir: str = ""
    drop_last: bool = True
    num_frames: Frames | None = None
    video_size: Annotated[tuple[PositiveInt, PositiveInt] | None, Field(strict=False)] = None
    dataloader: _WebLoader = _WebLoader()


class _Dataloader(Table):
    type: Literal["web", "local"] = "web"
    video_dataloader: _Videos = _Videos()

    def chosen(self) -> tuple[_Loader, str]:
        """The loader that `type` chooses, and the prefix of its keys."""
        if self.type == "web":
            return self.video_dataloader.dataloader, "video_dataloader.dataloader."
        return self.video_dataloader, "video_dataloader."


_OF_A_SAMPLE = {
    "step_size", "n_x0_level", "n_viz_sample", "n_sample_to_save", "guidance", "is_x0", "is_sample", "save_s3",
    "is_ema", "use_negative_prompt", "show_all_frames", "fps",
}  # fmt: skip


class _GradClipArgs(Table):
    clip_norm: PositiveFloat = 1.0
    force_finite: bool = True


class _GradClip(Table):
    name: Literal["grad_clip"]
    args: _GradClipArgs = _GradClipArgs()


class _SampleArgs(Table):
    model_config = ConfigDict(extra="allow")  # how a sample is drawn and shown

    every_n: Steps | None = None
    num_sampling_step: PositiveInt | None = None

    @model_validator(mode="after")
    def _known(self) -> _SampleArgs:
        for name in sorted((self.model_extra or {}).keys() - _OF_A_SAMPLE):
            raise ValueError(f"{name!r} is no argument of this callback; leave it out")
        return self


class _Samples(Table):
    name: Literal["every_n_sample_reg"]
    args: _SampleArgs = _SampleArgs()


class _Callback(Table):
    name: Literal[
        "compile_tokenizer", "dataloader_speed", "device_monitor", "ema_model", "every_n", "every_n_sample_ema",
        "frame_loss_log", "heart_beat", "iter_speed", "iteration_logger", "low_prec", "manual_gc", "param_count",
        "progress_bar", "reward_callback", "verify_data_batch_keys", "wandb", "wandb_10x",
    ]  # fmt: skip
    args: dict[str, Any] = {}
    step_size: Any = None


class _Cudnn(Table):
    deterministic: bool = False


class _Trainer(Table):
    max_iter: Steps = 25
    grad_accum_iter: PositiveInt = 1
    seed: int = 0
    logging_iter: PositiveInt | None = None
    run_validation: bool = False
    validation_iter: Steps = 100
    cudnn: _Cudnn = _Cudnn()
    callbacks: Annotated[
        tuple[Annotated[_GradClip | _Samples | _Callback, Field(discriminator="name")], ...], Field(strict=False)
    ] = ()

    def callback(self, name: str) -> Any:
        """The callback of that name; None: there is none."""
        return next((callback for callback in self.callbacks if callback.name == name), None)


class _ObjectStore(Table):
    enabled: bool = False
    bucket: str = ""


class _Checkpoint(Table):
    load_path: str = ""
    model_id: str | None = None
    save_iter: Steps = 1000
    dcp_async_mode_enabled: bool = False
    save_to_object_store: _ObjectStore = _ObjectStore()
    load_from_object_store: _ObjectStore = _ObjectStore()

    @model_validator(mode="after")
    def _stores(self) -> _Checkpoint:
        if self.load_from_object_store.enabled:
            raise ValueError(
                "load_from_object_store.enabled = true has no counterpart: models come from a folder or the Hub; leave "
                "it out and name one in load_path"
            )
        if self.save_to_object_store.enabled and not self.save_to_object_store.bucket:
            raise ValueError("save_to_object_store.enabled = true needs a bucket; name it or leave it out")
        return self


class _Job(Table):
    project: str | None = None
    group: str | None = None
    name: str | None = None
    timestamp: str | None = None
    wandb_mode: Literal["online", "offline", "disabled"] = "online"


class WfmConfig(Table):
    """The root, as far as it has a counterpart."""

    model: _Model = _Model()
    optimizer: _Optimizer = _Optimizer()
    scheduler: _Scheduler = _Scheduler()
    dataloader_train: _Dataloader = _Dataloader()
    dataloader_val: _Dataloader = _Dataloader()
    trainer: _Trainer = _Trainer()
    model_parallel: _ModelParallel = _ModelParallel()
    checkpoint: _Checkpoint = _Checkpoint()
    job: _Job = _Job()


_BASE_LOADER = "use_cache cache_size concat_size cache_augment_fn cache_replay_name webdataset shuffle pin_memory"
_DATASET = (
    "dataset_name is_train resolution augmentor_name object_store detshuffle caption_type embedding_type "
    "dataset_resolution_type len_t5 t5_dim chunk_size min_fps_thres max_fps_thres long_caption_ratio "
    "medium_caption_ratio short_caption_ratio user_caption_ratio use_native_fps video_decoder_name"
)
_LOADER = {
    "image_dataloader": f"{_BASE_LOADER} type ratio dataset_dir image_size offline_text_embedding text_encoder_type "
    "batch_size num_workers drop_last",
    "image_dataloader.dataloader": f"{_BASE_LOADER} batch_size num_workers drop_last",
    "image_dataloader.dataloader.dataset": _DATASET,
    "video_dataloader": f"{_BASE_LOADER} type ratio offline_text_embedding text_encoder_type",
    "video_dataloader.dataloader": f"{_BASE_LOADER} drop_last",
    "video_dataloader.dataloader.dataset": _DATASET,
}

WITHOUT_COUNTERPART: dict[str, dict[str, str]] = {
    "the model's own files say it": {
        "model": "text_encoder_class sigma_data state_ch state_t scaling rectified_flow_t_scaling_factor use_rf_ckpts "
        "sigma_conditional conditioning_strategy denoise_replace_gt_frames",
        "model.sde": "sigma_min sigma_max",
        "model.conditioner": "name type output_key input_key dropout_rate",
        "model.text_encoder_config": "compute_online embedding_concat_strategy n_layers_per_group ckpt_path "
        "tokenizer_type encoder_model_config",
        "model.net": "max_img_h max_img_w max_frames in_channels out_channels patch_spatial patch_temporal "
        "model_channels num_blocks num_heads concat_padding_mask pos_emb_cls pos_emb_learnable pos_emb_interpolation "
        "use_adaln_lora adaln_lora_dim atten_backend extra_per_block_abs_pos_emb rope_h_extrapolation_ratio "
        "rope_w_extrapolation_ratio rope_t_extrapolation_ratio sac_config rope_enable_fps_modulation "
        "use_crossattn_projection crossattn_proj_in_channels crossattn_emb_channels",
    },
    "the loss and the sampler fix it": {
        "model": "loss_reduce adjust_video_noise rectified_flow_loss_weight_uniform high_sigma_strategy "
        "high_sigma_ratio low_sigma_ratio min_num_conditional_frames max_num_conditional_frames",
        "model.rl": "s_t_min s_t_max s_noise",
    },
    "the average follows train.ema_decay": {"model.ema": "rate iteration_shift"},
    "rewards are named one by one": {
        "model.rl.reward_config": "ALL_REWARD_MODELS",
        "model.rl.reward_config.aesthetic": "model_path",
        "model.rl.reward_config.image_reward": "model_path",
        "model.rl.reward_config.fake_reward": "reward_fn scale",
    },
    "set REMOTE_REWARD_TOKEN, REMOTE_REWARD_ENQUEUE_URL and REMOTE_REWARD_FETCH_URL in the environment": {
        "model.rl.reward_config.remote_reward": "token enqueue_url fetch_url",
    },
    "clips are read from one folder, each by its own file": {
        "model": "input_data_key input_caption_key input_image_key resize_online",
        **{
            f"{split}.{table}": names
            for split in ("dataloader_train", "dataloader_val")
            for table, names in _LOADER.items()
        },
        "dataloader_val.video_dataloader": f"{_LOADER['video_dataloader']} num_workers drop_last num_frames video_size",
        "dataloader_val.video_dataloader.dataloader": f"{_LOADER['video_dataloader.dataloader']} num_workers",
        "dataloader_val.video_dataloader.dataloader.dataset": f"{_DATASET} num_video_frames",
    },
    "the trainer decides it": {
        "": "upload_reproducible_setup",
        "optimizer": "master_weights capturable",
        "scheduler": "verbosity_interval",
        "trainer": "use_s3 distributed_parallelism grad_scaler_args max_val_iter timeout_period memory_format",
        "trainer.ddp": "find_unused_parameters static_graph broadcast_buffers",
        "trainer.cudnn": "benchmark",
        "trainer.straggler_detection": "enabled report_freq profile_freq max_diff raise_error analyze_forward "
        "analyze_backward analyze_optimizer analyze_dataloading",
        "model_parallel": "pipeline_parallel_size pipeline_model_parallel_comm_backend "
        "virtual_pipeline_model_parallel_size sequence_parallel data_parallel_size "
        "hierarchical_context_parallel_sizes expert_tensor_parallel_size moe_extended_tp perform_initialization "
        "use_cpu_initialization fp16 bf16 params_dtype timers finalize_model_grads_func grad_scale_func no_sync_func "
        "grad_sync_func param_sync_func deterministic_mode enable_autocast autocast_dtype "
        "num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion "
        "async_tensor_model_parallel_allreduce use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad "
        "tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag "
        "tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs cross_entropy_loss_fusion cross_entropy_fusion_impl "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend pipeline_dtype "
        "variable_seq_lengths overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p "
        "deallocate_pipeline_outputs defer_embedding_wgrad_compute wgrad_deferral_limit "
        "pipeline_model_parallel_split_rank overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage "
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "barrier_with_L1_time",
    },
    "set [profiler]": {
        "trainer.profiling": "enable_profiling enable_memory_snapshot save_s3 profile_freq target_ranks record_shape "
        "profile_memory with_stack with_modules",
    },
    "`cosmos resume` goes on from a checkpoint, all of it": {
        "checkpoint": "type load_training_state only_load_scheduler_state strict_resume jit verbose "
        "keys_not_to_resume broadcast_via_filesystem load_ema_to_reg dcp_allow_mismatched_size",
    },
    "secrets are read from the environment": {
        "checkpoint.save_to_object_store": "credentials",
        "checkpoint.load_from_object_store": "credentials bucket",
    },
}
"""Why a key has no counterpart, to the keys: table to names. What is below a key is free."""
