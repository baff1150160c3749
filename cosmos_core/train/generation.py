"""Set up the rollout engine of a stage, the publisher that sends weights to the engine, the rewards, and the source of
completions that engines generate while the ranks train."""

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.hf import check_rows, load_tokenizer, model_without_weights
from cosmos_core.models.lora import has_lora_adapter
from cosmos_core.models.open_causal_lm import open_image_reader
from cosmos_core.observe.logs import configure_logging
from cosmos_core.rewards.runner import ScoreGroupsFn
from cosmos_core.rollout.async_groups import AsyncGroupSource, make_prompt_reader
from cosmos_core.rollout.base import Engine, EngineSettings, WeightFormat
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.groups import GroupPlan, GroupSource
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.registry import make_engine
from cosmos_core.rollout.replica import EngineReplica
from cosmos_core.rollout.transfer import DeltaWeightTransfer, NativeWeightTransfer
from cosmos_core.rollout.transport import IpcTransport, NcclTransport
from cosmos_core.run.stage import Stage, load_stage, mask_stage_secrets
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.diffusion_setup import make_engine_denoiser
from cosmos_core.train.feeds import total_steps
from cosmos_core.train.measure import RewardConfig, open_rewards, score_on_first_rank
from cosmos_core.train.rollout_feed import PromptOrder, make_group_filter
from cosmos_core.train.stop import check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Sampling

logger = logging.getLogger(__name__)

_FULL_WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("checkpoint", "module")


class RolloutSetup:
    """Rollout engine and rewards of a stage, each opened at its first use and closed with the caller's `exit_stack`."""

    def __init__(self, stage: Stage, trainer: Trainer, exit_stack: ExitStack) -> None:
        self._stage, self._trainer, self.exit_stack = stage, trainer, exit_stack
        self._scorer_by_key: dict[Hashable, ScoreGroupsFn] = {}
        self._published_weights_version = 0

    @cached_property
    def engine(self) -> Engine:
        """Return the rollout engine with the weights of the stage's model. If the engines run in separate processes,
        return the `EngineFleet` that represents all of them."""
        stage, adapter = self._stage, self._trainer.adapter
        stage.progress.phase("load")
        engine: Engine
        if stage.kind.feed == "rollouts" and stage.recipe.num_engines:
            engine = _make_engine_fleet(stage.recipe.rollout, stage.recipe.mode, stage.engines, stage.progress.beat)
            engine.send_missing_weights = lambda: self.send_missing_weights(self._published_weights_version)
        else:
            is_diffusion = stage.recipe.policy.is_diffusers
            engine_settings = EngineSettings(
                adapter.model, adapter.tokenizer, stage.model, stage.recipe.rollout,
                stage.recipe.policy.model_max_length, getattr(torch, stage.recipe.train.param_dtype),
                stage.recipe.custom, vision=adapter.image_reader, beat=stage.progress.beat,
                flow=make_engine_denoiser(stage.prepared_folder, self._trainer) if is_diffusion else None,
                meta_copy=None if is_diffusion else adapter.meta_copy,
            )  # fmt: skip
            engine = make_engine(engine_settings)
        self.exit_stack.callback(engine.close)
        logger.info("rollout engine: %s", engine.name)
        is_adapter_merged = has_lora_adapter(adapter.model) and engine.weight_format in _FULL_WEIGHT_FORMATS
        if stage.kind.feed == "rollouts" and is_adapter_merged:
            logger.warning(
                "policy.lora: the adapter travels merged, with all weights, because this engine does not take an "
                "adapter of this model alone"
            )
        return engine

    @property
    def engine_fleet(self) -> EngineFleet:
        """Return `engine` with the type of a fleet, for a stage whose rollout engines run in separate processes."""
        assert isinstance(self.engine, EngineFleet)
        return self.engine

    @cached_property
    def _weight_publisher(self) -> WeightPublisher:
        adapter = self._trainer.adapter
        return WeightPublisher(
            self.engine, adapter.model, self._compute_trainer_logprobs,
            getattr(torch, self._stage.recipe.train.param_dtype), meta_copy=adapter.meta_copy,
            transfer_dtype=self._transfer_dtype, probe_interval=self._stage.recipe.rollout.probe_interval,
        )  # fmt: skip

    @property
    def _transfer_dtype(self) -> torch.dtype | None:
        """Return the dtype that weights are cast to before they are sent; None: no cast. Weights wider than
        `param_dtype`, vLLM's dtype, are cast. LoRA factors are not cast, because they are first scaled in float32."""
        train, configured_dtype = self._stage.recipe.train, get_transfer_dtype(self._stage.recipe.train)
        needs_cast = self.engine.weight_format == "checkpoint" and train.master_dtype == "float32" != train.param_dtype
        return getattr(torch, train.param_dtype) if configured_dtype is None and needs_cast else configured_dtype

    def publish(self, weights_version: int) -> dict[str, float]:
        """Send the current weights to the engine as version `weights_version`, and return metrics of the transfer."""
        self._published_weights_version = weights_version
        return self._weight_publisher.publish(weights_version)

    def make_scorer(self, rewards: RewardConfig, max_tokens: int | None = None) -> ScoreGroupsFn:
        """Return a function that scores groups of completions by `rewards`. All ranks must call it together, since the
        first rank scores and broadcasts the scores. `max_tokens`: as for `make_local_scorer`."""
        return score_on_first_rank(self.make_local_scorer(rewards, max_tokens))

    def make_local_scorer(self, rewards: RewardConfig, max_tokens: int | None = None) -> ScoreGroupsFn:
        """Return a function that scores groups of completions by `rewards` on the first rank. `max_tokens`: maximum
        number of tokens of a completion; None: that of training completions."""
        max_tokens = max_tokens or self._stage.recipe.rollout.max_response_length
        scorer_key = (repr(rewards), max_tokens) if isinstance(rewards, dict) else rewards
        if scorer_key not in self._scorer_by_key:
            scorer = open_rewards(self._stage.recipe.reward_settings, rewards, self._stage.progress.beat, max_tokens)
            self._scorer_by_key[scorer_key] = self.exit_stack.enter_context(scorer)
        return self._scorer_by_key[scorer_key]

    def make_async_source(
        self, prompt_order: PromptOrder, sampling: Sampling, validation: AsyncValidation | None
    ) -> GroupSource:
        """Return a source of groups of completions that disaggregated engines generate while the ranks train. While the
        source waits for completions, it polls `validation`, which runs during the training (None: there is none)."""
        stage, recipe, train = self._stage, self._stage.recipe, self._stage.recipe.train

        def poll_validation() -> None:
            check_stop(stage)
            if validation is not None:
                validation.poll()

        group_plan = GroupPlan(train.train_batch_per_replica, recipe.group_size)
        group_filter, sleeps_in_training = make_group_filter(train.train_policy), recipe.mode == "colocated_separated"
        max_version_lag, num_extra_prompts, max_steps_ahead = train.train_policy.rollout_lookahead
        if sleeps_in_training:  # generate nothing ahead: sleeping engines would lose requests in flight
            max_version_lag, num_extra_prompts, max_steps_ahead = train.sync_weight_interval - 1, 0, 1
        num_steps = total_steps(train, recipe.group_size, prompt_order.num_prompts)
        take_prompts = make_prompt_reader(prompt_order, prompt_order.prompts_per_step, num_steps)
        if recipe.may_split_groups or group_filter:
            end_prompt_position = None if group_filter else group_plan.get_first_position(num_steps)
            take_prompts = partial(prompt_order.take_prompts, end_position=end_prompt_position)
        group_source = AsyncGroupSource(
            self.engine_fleet, take_prompts, self.make_local_scorer(recipe.training_rewards),
            sampling, stage.progress, group_plan=group_plan, max_lag=max_version_lag,
            send_missing_weights=self.send_missing_weights, on_wait=poll_validation,
            num_extra_prompts=num_extra_prompts, max_steps_ahead=max_steps_ahead, group_filter=group_filter,
            sleeps_in_training=sleeps_in_training,
        )  # fmt: skip
        self.exit_stack.callback(group_source.close)
        return group_source

    def send_missing_weights(self, weights_version: int) -> dict[str, float]:
        """Send the current weights, as version `weights_version`, to engines that have no weights yet, such as
        restarted ones."""
        with self.engine_fleet.loading_new_engines():
            return self._weight_publisher.publish(weights_version)

    def _compute_trainer_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        token_id_array = np.array(token_ids, dtype=np.int64)
        [sample_output] = self._trainer.evaluate([Sample(token_id_array, np.ones(len(token_id_array), dtype=np.uint8))])
        return sample_output["logprobs"]


def get_transfer_dtype(train: TrainConfig) -> torch.dtype | None:
    """Return the dtype `train.transfer_dtype`; None if weights are sent to engines in their training dtype."""
    return None if train.transfer_dtype in (None, train.master_dtype) else getattr(torch, train.transfer_dtype)


def _make_engine_fleet(
    rollout_config: RolloutConfig, rollout_mode: str, engine_handles: list[Any], send_heartbeat: Callable[[], None]
) -> EngineFleet:
    is_on_trainer_gpu = rollout_mode == "colocated_separated"
    return EngineFleet(
        lambda: engine_handles,
        max_groups=rollout_config.max_prompts_in_flight,
        timeout_seconds=rollout_config.engine_timeout_seconds,
        weight_sync_mode=rollout_config.async_r2r_sync,
        sleeps_in_training=is_on_trainer_gpu,
        weight_transfer=_make_weight_transfer(rollout_config, is_on_trainer_gpu=is_on_trainer_gpu),
        send_heartbeat=send_heartbeat,
    )


def _make_weight_transfer(
    rollout_config: RolloutConfig, *, is_on_trainer_gpu: bool
) -> NativeWeightTransfer | DeltaWeightTransfer | None:
    """Return the object that sends all weights to the rollout engines from GPU to GPU (CUDA IPC or NCCL), or sends only
    the values that have changed; None: all weights are sent through host memory."""
    if rollout_config.weight_transfer == "delta":
        return DeltaWeightTransfer()
    if rollout_config.weight_transfer == "host" or rollout_config.native_transfer_conflicts:
        return None  # `cosmos check` reports why native transfer is impossible
    if not torch.cuda.is_available():
        logger.warning("rollout.weight_transfer = 'native' needs GPUs: weights travel through host memory")
        return None
    weight_transport = IpcTransport() if is_on_trainer_gpu else NcclTransport()
    return NativeWeightTransfer(weight_transport, rollout_config.parallelism.tp_size)


def open_replica(stage_folder: Path) -> EngineReplica:
    """Open a rollout engine of the stage with folder `stage_folder` in this process, in which no trainer runs."""
    is_on_trainer_gpu = load_stage(stage_folder).recipe.mode == "colocated_separated"
    return EngineReplica(partial(_open_separate_engine, stage_folder), should_wait_for_trainer=is_on_trainer_gpu)


def _open_separate_engine(stage_folder: Path, send_heartbeat: Callable[[], None]) -> Engine:
    configure_logging("WARNING")
    stage = load_stage(stage_folder)
    mask_stage_secrets(stage)
    return open_engine(stage, send_heartbeat)


def open_engine(stage: Stage, send_heartbeat: Callable[[], None]) -> Engine:
    """Return the rollout engine of a stage in a process without a trainer; it calls `send_heartbeat` during waits."""
    policy_config = stage.recipe.policy
    tokenizer = load_tokenizer(stage.model, policy_config.model_revision, policy_config.chat_template)
    master_dtype = getattr(torch, stage.recipe.train.master_dtype)
    with torch.device("meta"):
        model = model_without_weights(stage.model, revision=policy_config.model_revision, dtype=master_dtype)
    if stage.kind.trains_model:
        # The engine must know the shapes of the adapter, so that later only the adapter's weights are sent.
        mark_trained_weights(model, policy_config)
    elif stage.data is not None:  # check the prompts, since no trainer has done it
        check_rows(model.config, stage.data, lambda: model, completed_splits=["train"])
    if generation_config := load_generation_config(stage.model, policy_config.model_revision):
        model.generation_config = generation_config
    engine_settings = EngineSettings(
        model, tokenizer, stage.model, stage.recipe.rollout, policy_config.model_max_length,
        getattr(torch, stage.recipe.train.param_dtype), stage.recipe.custom, is_separate=True,
        vision=open_image_reader(stage), beat=send_heartbeat,
    )  # fmt: skip
    return make_engine(engine_settings)
