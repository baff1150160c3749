"""Build a training from a stage (model, feed, algorithm, checkpoints), run the loop and export the result.

The result is the model in its training dtype with the LoRA adapter merged, verified by loading it, and the separate
adapter. Stage kind `export` converts the model to the published form.
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
from cosmos_core.algorithms.data_term import WithDataTerm
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.schema.dataset import PASS_RATES
from cosmos_core.data.kinds.base import TRAIN, VALIDATION
from cosmos_core.data.kinds.registry import row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepared import DATA_TERM, open_held_out
from cosmos_core.models.base import ModelAdapter
from cosmos_core.models.teacher import TEACHER, open_teacher
from cosmos_core.observe.gallery import FOLDER as DRAWINGS
from cosmos_core.rollout.async_groups import AsyncGroupSource, steps_of
from cosmos_core.rollout.groups import GroupSource, StepGroups, SyncGroupSource
from cosmos_core.run.lineage import base_of
from cosmos_core.run.stage import Stage
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.completions import FOLDER as COMPLETIONS
from cosmos_core.train.completions import CompletionLog
from cosmos_core.train.diffusion_setup import prepare_algorithm
from cosmos_core.train.feeds import Feed, RowFeed, rows_per_step, sft_rows, total_steps
from cosmos_core.train.generation import Generation, transfer_dtype_of
from cosmos_core.train.logprob_drift import LogprobDrift
from cosmos_core.train.loop import Loop
from cosmos_core.train.measure import (
    SAMPLES,
    Completions,
    max_held_out_tokens,
    prepared_folder,
    reward_weights,
    row_metrics,
    trained_rewards,
)
from cosmos_core.train.mfu import Utilization
from cosmos_core.train.named_weights import EMA_WEIGHTS, MovingAverage
from cosmos_core.train.reference import REFERENCE_WEIGHTS as REFERENCE
from cosmos_core.train.reference import reference_logprobs
from cosmos_core.train.resume_from import adopt_checkpoint, named_checkpoint
from cosmos_core.train.rollout_feed import (
    PromptOrder,
    RolloutFeed,
    group_filter,
    sync_source,
    training_sampling,
)
from cosmos_core.train.spread_feed import SpreadRolloutFeed
from cosmos_core.train.stop import check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.validation import MetricsFn, Validation
from cosmos_core.types import JsonValue, Outcome, Prompt

logger = logging.getLogger(__name__)


class TrainingResult(NamedTuple):
    """Result of a training, in memory."""

    adapter: ModelAdapter
    step: int
    metrics: dict[str, float]
    best: BestStep | None = None
    """Train step with the best validation metrics; None if no step was validated."""
    notices: tuple[str, ...] = ()
    """Messages about the training rows, such as rows that no train step uses."""


def run(stage: Stage) -> Outcome:
    """Train the model of a stage and export it: the worker program of the stage kinds that train."""
    return export_trained(stage, train(stage))


def train(stage: Stage) -> TrainingResult:
    """Train the model of a stage to its last step."""
    recipe, policy = stage.recipe, stage.recipe.train.train_policy
    has_rollouts = policy.has_rollouts
    algorithm = make_algorithm(recipe, training_sampling(recipe) if has_rollouts else None)
    trainer = open_trainer(stage)
    algorithm.has_separate_gradients = trainer.has_separate_gradients
    if policy.supervised_rows is not None:
        algorithm = WithDataTerm(algorithm, sft_rows(open_sequences(prepared_folder(stage), DATA_TERM), recipe))
    with ExitStack() as stack:
        generation = Generation(stage, trainer, stack)
        async_validation = _make_async_validation(stage, generation)
        feed = _make_feed(stage, trainer, algorithm, generation, async_validation)
        notices = (feed.unused_rows_notice,) if feed.unused_rows_notice else ()
        for notice in notices:
            logger.warning("%s", notice)
        uses_trainer_weights = has_rollouts and generation.engine.weight_format == "shared"
        validation = Validation(
            recipe.validation, stage.progress, _make_metrics_fn(stage, trainer, algorithm, generation),
            async_validation=async_validation,
            publish=generation.publish if has_rollouts else _no_metrics,
            publish_every=1 if uses_trainer_weights else recipe.train.sync_weight_interval,
            average=partial(trainer.weights, EMA_WEIGHTS) if recipe.train.ema_enable else None,
        )  # fmt: skip
        loop = Loop(
            stage, trainer, feed, algorithm, _make_checkpointer(stage, stack), validation,
            watch=_make_drift_check(stage),
            average=MovingAverage(trainer.named_weights, recipe.train) if recipe.train.ema_enable else None,
            utilization=Utilization(trainer, recipe.train.param_dtype) if recipe.logging.report_mfu else None,
            begin_from=named_checkpoint(stage),
        )  # fmt: skip
        metrics = loop.run()
        feed.write_records(stage.path)
    return TrainingResult(trainer.adapter, loop.step, metrics, loop.validation.best, notices)


def open_trainer(stage: Stage) -> Trainer:
    """Return the trainer of a stage's model, with the named weights and the teacher that the algorithm needs."""
    stage.progress.phase("load")
    # Only the module of the model's modality is imported.
    module = importlib.import_module(f"cosmos_core.models.open_{stage.recipe.policy.modality.name}")
    trainer = Trainer(module.open_model(stage), stage.recipe.train, stage.progress)
    policy = stage.recipe.train.train_policy
    # No reference weights if rows are scored before step 1, while the policy equals the reference policy.
    if stage.kind.trains_model and not policy.scores_rows_once:
        for name in policy.named_weights:
            trainer.named_weights.add(name)
    if teacher := stage.recipe.teacher_of(stage.kind):
        trainer.add_model(TEACHER, open_teacher(teacher, stage.recipe, trainer.adapter))
    return trainer


def export_trained(stage: Stage, trained: TrainingResult) -> Outcome:
    """Export the trained model in its training dtype, verify the export and return it as the stage's outcome."""
    stage.progress.phase("export")
    folder = f"safetensors/step_{trained.step}"
    export = trained.adapter.export(stage.path / folder)
    if export is None:
        return Outcome()
    extra_outputs = [
        name for name in (SAMPLES, DRAWINGS, REFERENCE, COMPLETIONS, PASS_RATES) if (stage.path / name).exists()
    ]
    info: dict[str, JsonValue] = {
        "model": folder, "step": trained.step, "checks": list(export.checks), "dtype": stage.recipe.train.param_dtype,
    }  # fmt: skip
    if export.adapter:
        info |= {"adapter": f"{folder}/{export.adapter}", "base": base_of(stage)}
    if trained.notices:
        info["notices"] = list(trained.notices)
    if trained.best is not None:
        info["best"] = asdict(trained.best)
    return Outcome(outputs=(folder, *extra_outputs), metrics=trained.metrics, info=info)


def _make_feed(
    stage: Stage, trainer: Trainer, algorithm: Algorithm, generation: Generation, validation: AsyncValidation | None
) -> Feed:
    """Return the feed of a stage; call it before the first train step, while the policy equals the reference policy."""
    recipe, folder = stage.recipe, prepared_folder(stage)
    policy, prepared_rows = recipe.train.train_policy, row_kind(recipe.train.train_policy.rows)
    if not policy.has_rollouts:
        rows = prepared_rows.open(folder, TRAIN, recipe.policy, trainer.adapter)
        feed = RowFeed(rows, recipe)
        if policy.scores_rows_once:
            rows.reference = reference_logprobs(stage, trainer, rows, TRAIN, feed.trained_row_numbers)
        return feed
    prompts = prepared_rows.prompts(folder, TRAIN, policy, recipe.policy)
    if recipe.policy.is_diffusers:
        prepare_algorithm(stage, trainer, algorithm)
    order = PromptOrder(prompts, recipe)
    if recipe.num_engines:
        source = _make_async_source(stage, prompts, order, generation, validation)
    else:
        sync_groups = SyncGroupSource(
            order, generation.engine, generation.score(trained_rewards(recipe)), training_sampling(recipe),
            stage.progress, recipe.rollout.batch_size, on_wait=partial(check_stop, stage),
            publish_every=recipe.train.sync_weight_interval,
        )  # fmt: skip
        source = sync_source(sync_groups, order, recipe)
    feed_class = SpreadRolloutFeed if recipe.may_split_groups else RolloutFeed
    log = CompletionLog(stage.path / COMPLETIONS, writes=recipe.logging.log_completions)
    return feed_class(prompts, source, algorithm, recipe, log)


def _make_async_source(
    stage: Stage,
    prompts: Sequence[Prompt],
    order: PromptOrder,
    generation: Generation,
    validation: AsyncValidation | None = None,
) -> GroupSource:
    """Return an asynchronous source: disaggregated engines generate groups of completions while the ranks train."""

    def check_validation() -> None:
        check_stop(stage)
        if validation is not None:
            validation.check()

    recipe, policy = stage.recipe, stage.recipe.train.train_policy
    groups_per_step = StepGroups(recipe.train.train_batch_per_replica, recipe.rollout.n_generation)
    filter_settings, sleeps_in_training = group_filter(recipe), recipe.mode == "colocated_separated"
    max_lag, num_extra_prompts, max_steps_ahead = policy.lookahead
    if sleeps_in_training:  # engines that sleep during training would lose requests in flight
        max_lag, num_extra_prompts, max_steps_ahead = recipe.train.sync_weight_interval - 1, 0, 1
    num_steps = total_steps(recipe, len(prompts))
    take_prompts = steps_of(order, rows_per_step(recipe), num_steps)
    if recipe.may_split_groups or filter_settings:
        take_prompts = partial(order.take_prompts, end=None if filter_settings else groups_per_step.first(num_steps))
    source = AsyncGroupSource(
        generation.engine_fleet, take_prompts, generation.make_local_scorer(trained_rewards(recipe)),
        training_sampling(recipe), stage.progress, steps=groups_per_step, max_lag=max_lag, resync=generation.resync,
        on_wait=check_validation, num_extra_prompts=num_extra_prompts, max_steps_ahead=max_steps_ahead,
        filter=filter_settings, sleeps_in_training=sleeps_in_training,
    )  # fmt: skip
    generation.call_before_close(source.close)
    return source


def _make_metrics_fn(stage: Stage, trainer: Trainer, algorithm: Algorithm, generation: Generation) -> MetricsFn | None:
    """Return the validation of the training, on held-out rows or on completions of held-out prompts; None: disabled."""
    recipe = stage.recipe
    if not recipe.validation.enable:
        return None
    rows, prompts = open_held_out(prepared_folder(stage), recipe.train.train_policy, recipe.policy, trainer.adapter)
    completion_metrics = _no_metrics if prompts is None else _completion_metrics_fn(prompts, generation, stage)
    if rows is None:
        return completion_metrics
    if rows.has_reference_pair:
        rows.reference = reference_logprobs(stage, trainer, rows, VALIDATION, np.arange(len(rows)))
    return lambda step: row_metrics(stage, trainer, algorithm, rows) | completion_metrics(step)


def _make_async_validation(stage: Stage, generation: Generation) -> AsyncValidation | None:
    """Return the validation that runs while the training continues; None: the training waits for each validation. It
    needs disaggregated engines, checkpoints to resume from if the engines die, and no moving average to validate."""
    recipe, train = stage.recipe, stage.recipe.train
    has_async_engines = train.train_policy.has_rollouts and recipe.mode == "disaggregated"
    is_supported = has_async_engines and train.ckpt.enable_checkpoint and not train.ema_enable
    if not (recipe.validation.enable and is_supported):
        return None
    prompts = open_held_out(prepared_folder(stage), recipe.train.train_policy, recipe.policy).prompts
    assert prompts is not None
    score = generation.make_local_scorer(reward_weights(recipe), max_held_out_tokens(recipe))
    completions = Completions(prompts, generation.engine_fleet, score, stage)
    return AsyncValidation(completions, generation.engine_fleet, generation.resync, stage.progress.beat)


def _completion_metrics_fn(prompts: Sequence[Prompt], generation: Generation, stage: Stage) -> MetricsFn:
    """Return a function that validates on completions of held-out prompts."""
    score = generation.score(reward_weights(stage.recipe), max_held_out_tokens(stage.recipe))
    completions = Completions(prompts, generation.engine, score, stage)
    if stage.recipe.train.train_policy.has_rollouts:
        return completions.measure

    generation.engine.sleep(level=2)  # the engine is unused until a validation publishes weights

    def measure(step: int) -> dict[str, float]:
        generation.publish(step)  # only validations use the engine, so train steps publish no weights
        return completions.measure(step, sleep_level=2)

    return measure


def _no_metrics(step: int) -> dict[str, float]:
    return {}


def _make_drift_check(stage: Stage) -> Callable[[int, dict[str, float]], dict[str, float]]:
    """Return a function that checks for log-probability drift between engines and trainer, if the stage has engines."""
    recipe, train = stage.recipe, stage.recipe.train
    if not train.train_policy.has_rollouts or recipe.policy.is_diffusers:
        return lambda step, metrics: {}
    dtype, sampling = getattr(torch, train.param_dtype), training_sampling(recipe)
    return LogprobDrift(dtype, transfer_dtype_of(train), sampling, stops=recipe.rollout.stop_on_alarm).check


def _make_checkpointer(stage: Stage, stack: ExitStack) -> Checkpointer:
    ckpt = stage.recipe.train.ckpt
    checkpointer = Checkpointer(
        stage.path / "checkpoints", fingerprint=stage.checkpoint_fingerprint, max_keep=ckpt.max_keep,
        asynchronous=ckpt.save_mode == "async", on_saved=stage.progress.report_checkpoint, beat=stage.progress.beat,
    )  # fmt: skip
    stack.callback(checkpointer.close)
    if stage.recipe.train.resume is True:
        adopt_checkpoint(stage)
    return checkpointer
