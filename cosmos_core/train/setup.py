"""Build a training from a stage (model, feed, algorithm, checkpoints), run the loop and export the result.

The exported model has its training dtype and a merged LoRA adapter; stage kind `export` converts it to other formats.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cosmos_core.algorithms.data_term import DataTermAlgorithm
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.kinds.base import TRAIN_SPLIT, VALIDATION_SPLIT, PreparedRows
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.media_rows import open_media, open_media_prompts
from cosmos_core.data.prepared import DATA_TERM_SPLIT, open_held_out
from cosmos_core.models.base import ModelAdapter
from cosmos_core.models.teacher import TEACHER_WEIGHTS, open_teacher
from cosmos_core.observe.gallery import SAMPLES_FOLDER as GALLERY_FOLDER
from cosmos_core.rollout.groups import SyncGroupSource
from cosmos_core.run.lineage import describe_base_model
from cosmos_core.run.stage import Stage
from cosmos_core.run.workspace import Workspace
from cosmos_core.train import measure
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.completions import COMPLETIONS_FOLDER, CompletionLog
from cosmos_core.train.diffusion_setup import make_data_term
from cosmos_core.train.feeds import RowFeed, SampleFeed, make_sft_loss
from cosmos_core.train.generation import RolloutSetup, get_transfer_dtype
from cosmos_core.train.hooks import Hooks
from cosmos_core.train.logprob_drift import LogprobDriftCheck
from cosmos_core.train.loop import TrainLoop
from cosmos_core.train.mfu import FlopsUtilization
from cosmos_core.train.reference import REFERENCE_WEIGHTS, reference_logprobs
from cosmos_core.train.resume_from import adopt_checkpoint, check_base_model, warn_of_other_step_size
from cosmos_core.train.rollout_feed import (
    PromptOrder,
    RolloutFeed,
    make_group_filter,
    make_sync_source,
    make_training_sampling,
)
from cosmos_core.train.spread_feed import SplitGroupFeed
from cosmos_core.train.stop import check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.tuning import SpeedTuning
from cosmos_core.train.validation import MetricsFn, Validation
from cosmos_core.train.weight_sets import EMA_WEIGHTS, MovingAverage
from cosmos_core.types import JsonValue, Outcome, Sampling

logger = logging.getLogger(__name__)


class TrainingResult(NamedTuple):
    """Trained model of a stage that is not exported yet, with its number of train steps and its metrics."""

    adapter: ModelAdapter
    step: int
    metrics: dict[str, float]
    best_step: BestStep | None = None
    """Train step with the best validation metrics; None if no step was validated."""
    notices: tuple[str, ...] = ()
    """Messages about the training rows, such as rows that no train step uses."""


def run(stage: Stage) -> Outcome:
    """Train the model of a stage and export it: the worker program of the stage kinds that train."""
    return export_trained(stage, train(stage), stage.recipe.train.param_dtype, describe_base_model(stage))


def train(stage: Stage) -> TrainingResult:
    """Train the model of a stage to its last step."""
    with ExitStack() as exit_stack:
        training_setup = _TrainingSetup(stage, exit_stack)
        loop = training_setup.make_loop()
        metrics = loop.run()
        loop.feed.write_pass_rates(stage.path)
    notices = (loop.feed.unused_rows_notice,) if loop.feed.unused_rows_notice else ()
    return TrainingResult(training_setup.trainer.adapter, loop.step, metrics, loop.validation.best_step, notices)


def open_trainer(stage: Stage) -> Trainer:
    """Return the trainer for the model of a stage. It also holds the other weights that the algorithm needs, if any:
    copies of the model's initial weights, for example for a reference policy, and the weights of a teacher model."""
    stage.progress.phase("load")
    # Import only the module for the model's modality, language models or diffusion models.
    open_model = importlib.import_module(f"cosmos_core.models.open_{stage.recipe.policy.modality.name}").open_model
    train_config, algorithm_config = stage.recipe.train, stage.recipe.train.train_policy
    num_threads = train_config.num_threads if stage.kind.trains_model else None
    trainer = Trainer(open_model(stage), train_config, stage.progress, None if num_threads == "auto" else num_threads)
    # Reference log-probabilities before step 1 need no reference weights, because the policy still has these weights.
    if stage.kind.trains_model and not algorithm_config.precomputes_reference_logprobs:
        for name in algorithm_config.auxiliary_model_names:
            trainer.weight_sets.add(name)
    if teacher_config := stage.recipe.teacher_for_stage(stage.kind):
        trainer.add_model(TEACHER_WEIGHTS, open_teacher(teacher_config, stage.recipe, trainer.adapter))
    return trainer


def export_trained(stage: Workspace, training_result: TrainingResult, dtype: str, base_model: str) -> Outcome:
    """Export the trained model in its training `dtype`, verify the export and return it as the stage's outcome.
    `base_model`: name of the model that the training started from, for the outcome of an adapter."""
    stage.progress.phase("export")
    export_folder = f"safetensors/step_{training_result.step}"
    export_result = training_result.adapter.export(stage.path / export_folder)
    if export_result is None:
        return Outcome()
    optional_outputs = (measure.SAMPLES_FILE, GALLERY_FOLDER, REFERENCE_WEIGHTS, COMPLETIONS_FOLDER, PASS_RATES_FILE)
    outcome_info: dict[str, JsonValue] = {
        "model": export_folder,
        "step": training_result.step,
        "checks": list(export_result.passed_checks),
        "dtype": dtype,
    }
    if export_result.adapter_folder_name:
        outcome_info |= {"adapter": f"{export_folder}/{export_result.adapter_folder_name}", "base": base_model}
    if training_result.notices:
        outcome_info["notices"] = list(training_result.notices)
    if training_result.best_step is not None:
        outcome_info["best"] = asdict(training_result.best_step)
    output_names = (export_folder, *(name for name in optional_outputs if (stage.path / name).exists()))
    return Outcome(outputs=output_names, metrics=training_result.metrics, info=outcome_info)


class _TrainingSetup:
    """Trainer, algorithm and rollout engine of a stage, from which the training loop is built. `exit_stack` closes what
    must be closed after the training."""

    def __init__(self, stage: Stage, exit_stack: ExitStack) -> None:
        self._stage, self._recipe, self._exit_stack = stage, stage.recipe, exit_stack
        self._train_config, self._train_policy = stage.recipe.train, stage.recipe.train.train_policy
        self._sampling = make_training_sampling(stage.recipe) if self._train_policy.has_rollouts else None
        self.algorithm = make_algorithm(stage.recipe, self._sampling)
        self.trainer = open_trainer(stage)
        self.algorithm.has_separate_gradients = self.trainer.has_separate_gradients
        if self._train_policy.supervised_rows is not None:
            rows = open_sequences(stage.prepared_folder, DATA_TERM_SPLIT)
            make_sft_update = make_sft_loss(rows, self._train_config, self._train_policy.supervised_rows)
            self.algorithm = DataTermAlgorithm(self.algorithm, make_sft_update)
        self._rollout_setup = RolloutSetup(stage, self.trainer, exit_stack)

    def make_loop(self) -> TrainLoop:
        """Return the training loop with the feed, the checkpointer and the validation of the stage."""
        stage, train_config, trainer = self._stage, self._train_config, self.trainer
        async_validation = self._make_async_validation()
        sample_feed = self._make_feed(async_validation)
        if sample_feed.unused_rows_notice:
            logger.warning("%s", sample_feed.unused_rows_notice)
        validation = self._make_validation(async_validation)
        initial_checkpoint = Path(train_config.resume) if isinstance(train_config.resume, str) else None
        if initial_checkpoint:
            check_base_model(initial_checkpoint, stage.path, stage.model)
            warn_of_other_step_size(initial_checkpoint, train_config, self._recipe.group_size)
        reports_mfu, should_stop = self._recipe.logging.report_mfu, self._recipe.rollout.stop_on_alarm
        speed_tuning = None
        if "auto" in {train_config.num_threads, self._train_policy.mini_batch}:
            speed_tuning = SpeedTuning(trainer, sample_feed, self.algorithm, train_config, stage)
        return TrainLoop(
            stage, train_config, trainer, sample_feed, self.algorithm, self._make_checkpointer(), validation,
            hooks=Hooks(stage), profiler_config=self._recipe.profiler,
            check_metrics=_make_drift_check(train_config, self._sampling, trainer, should_stop=should_stop),
            moving_average=MovingAverage(trainer.weight_sets, train_config) if train_config.ema_enable else None,
            mfu_counter=FlopsUtilization(trainer, train_config.param_dtype) if reports_mfu else None,
            speed_tuning=speed_tuning, initial_checkpoint=initial_checkpoint,
        )  # fmt: skip

    def _make_validation(self, async_validation: AsyncValidation | None) -> Validation:
        train_config, rollout_setup = self._train_config, self._rollout_setup
        has_rollouts = self._train_policy.has_rollouts
        uses_trainer_weights = has_rollouts and rollout_setup.engine.weight_format == "shared"
        return Validation(
            self._recipe.validation, self._stage, self._make_metrics_fn(), async_validation=async_validation,
            publish=rollout_setup.publish if has_rollouts else lambda step: {},
            publish_interval=1 if uses_trainer_weights else train_config.sync_weight_interval,
            use_averaged_weights=partial(self.trainer.use_weights, EMA_WEIGHTS) if train_config.ema_enable else None,
        )  # fmt: skip

    def _make_feed(self, validation: AsyncValidation | None) -> SampleFeed:
        """Return the source of the samples of each train step. Call this method while the policy still has its initial
        weights: for some losses, it computes log-probabilities under the reference policy, which has the same
        weights."""
        recipe, prepared_folder, adapter = self._recipe, self._stage.prepared_folder, self.trainer.adapter
        row_kind = load_row_kind(self._train_policy.rows)
        if self._sampling is None:
            rows = row_kind.open(prepared_folder, TRAIN_SPLIT, recipe.policy, adapter)
            num_dp_ranks = recipe.policy.parallelism.num_dp_ranks
            feed = RowFeed(rows, self._train_config, recipe.policy.model_max_length, num_dp_ranks)
            if self._train_policy.precomputes_reference_logprobs:
                self._compute_reference_logprobs(rows, TRAIN_SPLIT, feed.trained_row_numbers)
            return feed
        prompts = row_kind.open_prompts(prepared_folder, TRAIN_SPLIT, self._train_policy, recipe.policy)
        if recipe.policy.is_diffusers:
            diffusers, train_config = recipe.policy.diffusers, self._train_config
            self.algorithm.null_text = open_media_prompts(prepared_folder, TRAIN_SPLIT).null_text
            # With `data_beta`, the prepared folder has rows of images or clips, because the schema requires them.
            if diffusers.flow_rl.data_beta:
                media = open_media(prepared_folder, TRAIN_SPLIT)
                self.algorithm.data_term = make_data_term(media, diffusers, train_config, self._sampling, self.trainer)
        prompt_order = PromptOrder(prompts, self._train_config, recipe.group_size)
        if recipe.num_engines:
            group_source = self._rollout_setup.make_async_source(prompt_order, self._sampling, validation)
        else:
            sync_source = SyncGroupSource(
                prompt_order, self._rollout_setup.engine, self._rollout_setup.make_scorer(recipe.training_rewards),
                self._sampling, self._stage.progress, recipe.rollout.batch_size,
                on_wait=partial(check_stop, self._stage), publish_interval=self._train_config.sync_weight_interval,
            )  # fmt: skip
            group_filter = make_group_filter(self._train_policy)
            group_source = make_sync_source(
                sync_source, prompt_order, group_filter, may_split_groups=recipe.may_split_groups
            )
        feed_class = SplitGroupFeed if recipe.may_split_groups else RolloutFeed
        rollout_feed = feed_class(prompts, group_source, self.algorithm, self._train_config, recipe.rollout)
        log_folder = self._stage.path / COMPLETIONS_FOLDER
        rollout_feed.log_groups = CompletionLog(log_folder, should_write=recipe.logging.log_completions)
        return rollout_feed

    def _compute_reference_logprobs(self, rows: PreparedRows, split_name: str, row_numbers: np.ndarray) -> None:
        """Set `rows.reference_logprobs` to the log-probabilities of the rows at `row_numbers` under the reference
        policy, if the loss needs them."""
        if self._train_policy.saves_reference_logprobs:
            fingerprint = self._stage.checkpoint_fingerprint
            rows.reference_logprobs = reference_logprobs(
                self._stage, self.trainer, rows, split_name, row_numbers, fingerprint
            )

    def _make_metrics_fn(self) -> MetricsFn | None:
        """Return the function that computes the metrics of held-out rows, or of completions of held-out prompts, after
        a train step; None: the training is not validated."""
        recipe, stage, trainer, algorithm = self._recipe, self._stage, self.trainer, self.algorithm
        if not recipe.validation.enable:
            return None
        rows, prompts = open_held_out(stage.prepared_folder, self._train_policy, recipe.policy, trainer.adapter)
        compute_metrics: MetricsFn = lambda step: {}  # noqa: E731
        if prompts is not None:
            completion_settings, rollout_setup = measure.make_completion_settings(recipe), self._rollout_setup
            score = rollout_setup.make_scorer(completion_settings.rewards, completion_settings.sampling.max_tokens)
            validation = measure.CompletionValidation(prompts, rollout_setup.engine, score, completion_settings, stage)
            has_rollouts = self._train_policy.has_rollouts
            compute_metrics = _make_validate_fn(validation, rollout_setup, has_rollouts=has_rollouts)
        if rows is None:
            return compute_metrics
        if rows.has_sample_pairs:
            self._compute_reference_logprobs(rows, VALIDATION_SPLIT, np.arange(len(rows)))
        batch_size = recipe.held_out_rows_per_pass
        return lambda step: measure.row_metrics(stage, trainer, algorithm, rows, batch_size) | compute_metrics(step)

    def _make_async_validation(self) -> AsyncValidation | None:
        """Return the validation that runs while the training continues; None: the training waits for validations. An
        asynchronous validation needs disaggregated engines, checkpoints to resume from if the engines die, and no
        moving average."""
        recipe, train_config, stage = self._recipe, self._train_config, self._stage
        has_async_engines = self._train_policy.has_rollouts and recipe.mode == "disaggregated"
        can_validate_async = has_async_engines and train_config.ckpt.enable_checkpoint and not train_config.ema_enable
        if not (recipe.validation.enable and can_validate_async):
            return None
        prompts = open_held_out(stage.prepared_folder, self._train_policy, recipe.policy).prompts
        assert prompts is not None
        completion_settings, rollout_setup = measure.make_completion_settings(recipe), self._rollout_setup
        scorer = rollout_setup.make_local_scorer(completion_settings.rewards, completion_settings.sampling.max_tokens)
        engine_fleet = rollout_setup.engine_fleet
        prompt_validation = measure.CompletionValidation(prompts, engine_fleet, scorer, completion_settings, stage)
        return AsyncValidation(prompt_validation, engine_fleet, rollout_setup.send_missing_weights, stage.progress.beat)

    def _make_checkpointer(self) -> Checkpointer:
        checkpoint_config, stage = self._train_config.ckpt, self._stage
        checkpointer = Checkpointer(
            stage.path / "checkpoints", fingerprint=stage.checkpoint_fingerprint, max_keep=checkpoint_config.max_keep,
            is_async=checkpoint_config.save_mode == "async", on_saved=stage.progress.report_checkpoint,
            send_heartbeat=stage.progress.beat,
        )  # fmt: skip
        self._exit_stack.callback(checkpointer.close)
        if self._train_config.resume is True:
            adopt_checkpoint(stage, stage.checkpoint_fingerprint)
        return checkpointer


def _make_validate_fn(
    completion_validation: measure.CompletionValidation, rollout_setup: RolloutSetup, *, has_rollouts: bool
) -> MetricsFn:
    if has_rollouts:
        return completion_validation.validate

    rollout_setup.engine.sleep(level=2)  # free the engine's memory until the next validation

    def validate(step: int) -> dict[str, float]:
        rollout_setup.publish(step)  # train steps publish no weights, because only validations use the engine
        return completion_validation.validate(step, sleep_level=2)

    return validate


def _make_drift_check(
    train_config: TrainConfig, sampling: Sampling | None, trainer: Trainer, *, should_stop: bool
) -> Callable[[int, dict[str, float]], dict[str, float]]:
    """Return a function that checks for log-probability drift between engines and trainer, and returns metrics; for a
    training without text completions, the function does nothing and returns none."""
    if sampling is None or sampling.flow is not None:
        return lambda step, metrics: {}
    dtype = getattr(torch, train_config.param_dtype)
    return LogprobDriftCheck(
        dtype, get_transfer_dtype(train_config), sampling, should_stop=should_stop, has_dropout=trainer.has_dropout
    ).check_step
