"""Build a training from a stage (model, feed, algorithm, checkpoints), run the loop and export the result.

The exported model has its training dtype and a merged LoRA adapter; stage kind `export` converts it to other formats.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.data_term import DataTermAlgorithm
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.data.kinds.base import TRAIN_SPLIT, VALIDATION_SPLIT
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepared import DATA_TERM_SPLIT, open_held_out
from cosmos_core.models.base import ModelAdapter
from cosmos_core.models.teacher import TEACHER_WEIGHTS, open_teacher
from cosmos_core.observe.gallery import SAMPLES_FOLDER as DRAWINGS
from cosmos_core.rollout.async_groups import AsyncGroupSource, prompts_by_position
from cosmos_core.rollout.groups import GroupPlan, GroupSource, SyncGroupSource
from cosmos_core.run.lineage import describe_base_model
from cosmos_core.run.stage import Stage
from cosmos_core.train import measure
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.completions import COMPLETIONS_FOLDER, CompletionLog
from cosmos_core.train.diffusion_setup import prepare_algorithm
from cosmos_core.train.feeds import RowFeed, SampleFeed, make_sft_loss, rows_per_step, total_steps
from cosmos_core.train.generation import RolloutSetup, get_transfer_dtype
from cosmos_core.train.logprob_drift import LogprobDriftCheck
from cosmos_core.train.loop import TrainLoop
from cosmos_core.train.mfu import FlopsUtilization
from cosmos_core.train.reference import REFERENCE_WEIGHTS, reference_logprobs
from cosmos_core.train.resume_from import adopt_checkpoint, resume_checkpoint_path
from cosmos_core.train.rollout_feed import (
    PromptOrder,
    RolloutFeed,
    make_group_filter,
    make_sync_source,
    training_sampling,
)
from cosmos_core.train.spread_feed import SplitGroupFeed
from cosmos_core.train.stop import check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.tuning import SpeedTuning
from cosmos_core.train.validation import MetricsFn, Validation
from cosmos_core.train.weight_sets import EMA_WEIGHTS, MovingAverage
from cosmos_core.types import JsonValue, Outcome, Prompt

logger = logging.getLogger(__name__)


class TrainingResult(NamedTuple):
    """Result of a training."""

    adapter: ModelAdapter
    step: int
    metrics: dict[str, float]
    best_step: BestStep | None = None
    """Train step with the best validation metrics; None if no step was validated."""
    notices: tuple[str, ...] = ()
    """Messages about the training rows, such as rows that no train step uses."""


def run(stage: Stage) -> Outcome:
    """Train the model of a stage and export it: the worker program of the stage kinds that train."""
    return export_trained(stage, train(stage))


def train(stage: Stage) -> TrainingResult:
    """Train the model of a stage to its last step."""
    recipe, train_policy = stage.recipe, stage.recipe.train.train_policy
    has_rollouts = train_policy.has_rollouts
    algorithm = make_algorithm(recipe, training_sampling(recipe) if has_rollouts else None)
    trainer = open_trainer(stage)
    algorithm.has_separate_gradients = trainer.has_separate_gradients
    if train_policy.supervised_rows is not None:
        supervised_rows = open_sequences(measure.prepared_folder(stage), DATA_TERM_SPLIT)
        algorithm = DataTermAlgorithm(algorithm, make_sft_loss(supervised_rows, recipe))
    with ExitStack() as exit_stack:
        rollout_setup = RolloutSetup(stage, trainer, exit_stack)
        async_validation = _make_async_validation(stage, rollout_setup)
        sample_feed = _make_feed(stage, trainer, algorithm, rollout_setup, async_validation)
        notices = (sample_feed.unused_rows_notice,) if sample_feed.unused_rows_notice else ()
        for notice in notices:
            logger.warning("%s", notice)
        uses_trainer_weights = has_rollouts and rollout_setup.engine.weight_format == "shared"
        validation = Validation(
            recipe.validation, stage.progress, _make_metrics_fn(stage, trainer, algorithm, rollout_setup),
            async_validation=async_validation,
            publish=rollout_setup.publish if has_rollouts else lambda step: {},
            publish_interval=1 if uses_trainer_weights else recipe.train.sync_weight_interval,
            use_averaged_weights=partial(trainer.use_weights, EMA_WEIGHTS) if recipe.train.ema_enable else None,
        )  # fmt: skip
        loop = TrainLoop(
            stage, trainer, sample_feed, algorithm, _make_checkpointer(stage, exit_stack), validation,
            check_metrics=_make_drift_check(stage),
            moving_average=MovingAverage(trainer.weight_sets, recipe.train) if recipe.train.ema_enable else None,
            mfu_counter=FlopsUtilization(trainer, recipe.train.param_dtype) if recipe.logging.report_mfu else None,
            speed_tuning=_make_speed_tuning(stage, trainer, sample_feed, algorithm),
            first_checkpoint=resume_checkpoint_path(stage),
        )  # fmt: skip
        metrics = loop.run()
        sample_feed.write_pass_rates(stage.path)
    return TrainingResult(trainer.adapter, loop.step, metrics, loop.validation.best_step, notices)


def open_trainer(stage: Stage) -> Trainer:
    """Return the trainer of a stage, with the weight sets and the teacher that the algorithm needs."""
    stage.progress.phase("load")
    # Import only the module for the model's modality, language models or diffusion models.
    module = importlib.import_module(f"cosmos_core.models.open_{stage.recipe.policy.modality.name}")
    num_threads = stage.recipe.train.num_threads if stage.kind.trains_model else None
    trainer = Trainer(
        module.open_model(stage), stage.recipe.train, stage.progress, None if num_threads == "auto" else num_threads
    )
    policy = stage.recipe.train.train_policy
    # Reference log-probabilities that are computed before step 1 need no reference weights: the policy has them.
    if stage.kind.trains_model and not policy.precomputes_reference_logprobs:
        for name in policy.auxiliary_model_names:
            trainer.weight_sets.add(name)
    if teacher := stage.recipe.teacher_for_stage(stage.kind):
        trainer.add_model(TEACHER_WEIGHTS, open_teacher(teacher, stage.recipe, trainer.adapter))
    return trainer


def export_trained(stage: Stage, training_result: TrainingResult) -> Outcome:
    """Export the trained model in its training dtype, verify the export and return it as the stage's outcome."""
    stage.progress.phase("export")
    export_folder = f"safetensors/step_{training_result.step}"
    export = training_result.adapter.export(stage.path / export_folder)
    if export is None:
        return Outcome()
    optional_outputs = (measure.SAMPLES_FILE, DRAWINGS, REFERENCE_WEIGHTS, COMPLETIONS_FOLDER, PASS_RATES_FILE)
    outcome_info: dict[str, JsonValue] = {
        "model": export_folder, "step": training_result.step, "checks": list(export.passed_checks),
        "dtype": stage.recipe.train.param_dtype,
    }  # fmt: skip
    if export.adapter_folder_name:
        outcome_info |= {"adapter": f"{export_folder}/{export.adapter_folder_name}", "base": describe_base_model(stage)}
    if training_result.notices:
        outcome_info["notices"] = list(training_result.notices)
    if training_result.best_step is not None:
        outcome_info["best"] = asdict(training_result.best_step)
    outputs = (export_folder, *(name for name in optional_outputs if (stage.path / name).exists()))
    return Outcome(outputs=outputs, metrics=training_result.metrics, info=outcome_info)


def _make_feed(
    stage: Stage, trainer: Trainer, algorithm: Algorithm, rollout_setup: RolloutSetup,
    validation: AsyncValidation | None,
) -> SampleFeed:  # fmt: skip
    """Return the source of the samples of each train step. The policy must still have its initial weights, because this
    function may compute log-probabilities under the reference policy, which has the same weights."""
    recipe, folder = stage.recipe, measure.prepared_folder(stage)
    train_policy, prepared_rows = recipe.train.train_policy, load_row_kind(recipe.train.train_policy.rows)
    if not train_policy.has_rollouts:
        rows = prepared_rows.open(folder, TRAIN_SPLIT, recipe.policy, trainer.adapter)
        feed = RowFeed(rows, recipe)
        if train_policy.precomputes_reference_logprobs:
            rows.reference_logprobs = reference_logprobs(stage, trainer, rows, TRAIN_SPLIT, feed.trained_row_numbers)
        return feed
    prompts = prepared_rows.open_prompts(folder, TRAIN_SPLIT, train_policy, recipe.policy)
    if recipe.policy.is_diffusers:
        prepare_algorithm(stage, trainer, algorithm)
    prompt_order = PromptOrder(prompts, recipe)
    if recipe.num_engines:
        group_source = _make_async_source(stage, prompts, prompt_order, rollout_setup, validation)
    else:
        sync_source = SyncGroupSource(
            prompt_order, rollout_setup.engine, rollout_setup.make_scorer(measure.training_rewards(recipe)),
            training_sampling(recipe), stage.progress, recipe.rollout.batch_size, on_wait=partial(check_stop, stage),
            publish_interval=recipe.train.sync_weight_interval,
        )  # fmt: skip
        group_source = make_sync_source(sync_source, prompt_order, recipe)
    feed_class = SplitGroupFeed if recipe.may_split_groups else RolloutFeed
    completion_log = CompletionLog(stage.path / COMPLETIONS_FOLDER, should_write=recipe.logging.log_completions)
    return feed_class(prompts, group_source, algorithm, recipe, completion_log)


def _make_async_source(
    stage: Stage,
    prompts: Sequence[Prompt],
    prompt_order: PromptOrder,
    rollout_setup: RolloutSetup,
    validation: AsyncValidation | None = None,
) -> GroupSource:
    """Return a source of groups of completions that disaggregated engines generate while the ranks train."""

    def check_validation() -> None:
        check_stop(stage)
        if validation is not None:
            validation.poll()

    recipe, train_policy = stage.recipe, stage.recipe.train.train_policy
    group_plan = GroupPlan(recipe.train.train_batch_per_replica, recipe.rollout.n_generation)
    group_filter, sleeps_in_training = make_group_filter(recipe), recipe.mode == "colocated_separated"
    max_lag, num_extra_prompts, max_steps_ahead = train_policy.rollout_lookahead
    if sleeps_in_training:  # engines that sleep during training would lose requests in flight
        max_lag, num_extra_prompts, max_steps_ahead = recipe.train.sync_weight_interval - 1, 0, 1
    num_steps = total_steps(recipe, len(prompts))
    take_prompts = prompts_by_position(prompt_order, rows_per_step(recipe), num_steps)
    if recipe.may_split_groups or group_filter:
        end_position = None if group_filter else group_plan.first_position(num_steps)
        take_prompts = partial(prompt_order.take_prompts, end_position=end_position)
    group_source = AsyncGroupSource(
        rollout_setup.engine_fleet, take_prompts, rollout_setup.make_local_scorer(measure.training_rewards(recipe)),
        training_sampling(recipe), stage.progress, group_plan=group_plan, max_lag=max_lag,
        send_missing_weights=rollout_setup.send_missing_weights, on_wait=check_validation,
        num_extra_prompts=num_extra_prompts, max_steps_ahead=max_steps_ahead, filter=group_filter,
        sleeps_in_training=sleeps_in_training,
    )  # fmt: skip
    rollout_setup.exit_stack.callback(group_source.close)
    return group_source


def _make_metrics_fn(
    stage: Stage, trainer: Trainer, algorithm: Algorithm, rollout_setup: RolloutSetup
) -> MetricsFn | None:
    """Return the function that validates on held-out rows or on completions of held-out prompts; None: disabled."""
    recipe = stage.recipe
    if not recipe.validation.enable:
        return None
    rows, prompts = open_held_out(
        measure.prepared_folder(stage), recipe.train.train_policy, recipe.policy, trainer.adapter
    )
    compute_metrics = _completion_metrics_fn(prompts, rollout_setup, stage) if prompts is not None else lambda step: {}
    if rows is None:
        return compute_metrics
    if rows.has_sample_pairs:
        rows.reference_logprobs = reference_logprobs(stage, trainer, rows, VALIDATION_SPLIT, np.arange(len(rows)))
    return lambda step: measure.row_metrics(stage, trainer, algorithm, rows) | compute_metrics(step)


def _make_async_validation(stage: Stage, rollout_setup: RolloutSetup) -> AsyncValidation | None:
    """Return the validation that runs while the training continues; None: the training waits for validations. It needs
    disaggregated engines, checkpoints to resume from if the engines die, and no moving average to validate."""
    recipe, train_config = stage.recipe, stage.recipe.train
    has_async_engines = train_config.train_policy.has_rollouts and recipe.mode == "disaggregated"
    can_run_async = has_async_engines and train_config.ckpt.enable_checkpoint and not train_config.ema_enable
    if not (recipe.validation.enable and can_run_async):
        return None
    prompts = open_held_out(measure.prepared_folder(stage), recipe.train.train_policy, recipe.policy).prompts
    assert prompts is not None
    score = rollout_setup.make_local_scorer(measure.held_out_rewards(recipe), measure.max_held_out_tokens(recipe))
    engine_fleet = rollout_setup.engine_fleet
    completions = measure.CompletionValidation(prompts, engine_fleet, score, stage)
    return AsyncValidation(completions, engine_fleet, rollout_setup.send_missing_weights, stage.progress.beat)


def _completion_metrics_fn(prompts: Sequence[Prompt], rollout_setup: RolloutSetup, stage: Stage) -> MetricsFn:
    score = rollout_setup.make_scorer(measure.held_out_rewards(stage.recipe), measure.max_held_out_tokens(stage.recipe))
    completions = measure.CompletionValidation(prompts, rollout_setup.engine, score, stage)
    if stage.recipe.train.train_policy.has_rollouts:
        return completions.validate

    rollout_setup.engine.sleep(level=2)  # the engine is unused until the next validation

    def validate(step: int) -> dict[str, float]:
        rollout_setup.publish(step)  # train steps publish no weights, because only validations use the engine
        return completions.validate(step, sleep_level=2)

    return validate


def _make_drift_check(stage: Stage) -> Callable[[int, dict[str, float]], dict[str, float]]:
    """Return a function that checks for log-probability drift between engines and trainer, if the stage has engines."""
    recipe, train_config = stage.recipe, stage.recipe.train
    if not train_config.train_policy.has_rollouts or recipe.policy.is_diffusers:
        return lambda step, metrics: {}
    dtype, sampling = getattr(torch, train_config.param_dtype), training_sampling(recipe)
    should_stop = recipe.rollout.stop_on_alarm
    return LogprobDriftCheck(dtype, get_transfer_dtype(train_config), sampling, should_stop=should_stop).check_step


def _make_speed_tuning(stage: Stage, trainer: Trainer, feed: SampleFeed, algorithm: Algorithm) -> SpeedTuning | None:
    """Return the measurement of the settings that the recipe sets to `auto`; None: there are none."""
    train = stage.recipe.train
    if "auto" not in {train.num_threads, train.train_policy.mini_batch}:
        return None
    return SpeedTuning(trainer, feed, algorithm, train, stage.progress, lambda: stage.stop_requested)


def _make_checkpointer(stage: Stage, exit_stack: ExitStack) -> Checkpointer:
    checkpoint_config = stage.recipe.train.ckpt
    checkpointer = Checkpointer(
        stage.path / "checkpoints", fingerprint=stage.checkpoint_fingerprint, max_keep=checkpoint_config.max_keep,
        is_async=checkpoint_config.save_mode == "async", on_saved=stage.progress.report_checkpoint,
        heartbeat=stage.progress.beat,
    )  # fmt: skip
    exit_stack.callback(checkpointer.close)
    if stage.recipe.train.resume is True:
        adopt_checkpoint(stage)
    return checkpointer
