"""The training loop: a feed returns samples, an algorithm turns them into updates, and a trainer applies the updates.

Start reading here. The loop depends neither on the algorithm, nor on the source of the samples, nor on the model.
Everything that a step needs is a function of the step number and of the checkpoint's contents, so a run that is killed
and resumed ends with exactly the same weights as an uninterrupted run.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.registry import iterate_optimizer_updates
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.resume import load_checkpoint
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState, capture_rng, restore_rng, seed_rng
from cosmos_core.config.schema.profiler import ProfilerConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import all_reduce_any, is_first_rank
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.feeds import SampleFeed
from cosmos_core.train.measure import VALIDATION_METRIC_PREFIX
from cosmos_core.train.mfu import FlopsUtilization
from cosmos_core.train.profile import StepProfiler
from cosmos_core.train.stop import StopRequested, check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.tuning import SpeedTuning
from cosmos_core.train.validation import Validation
from cosmos_core.train.weight_sets import MovingAverage

logger = logging.getLogger(__name__)

_VERIFICATION_LEAD_SECONDS = 15.0
"""Expected remaining seconds of a training at which the process that will verify the exported model is started early,
because the process takes seconds to import its libraries."""


@dataclass
class TrainLoop:
    """One training, from the step of its newest checkpoint to its last step."""

    workspace: Workspace
    config: TrainConfig
    trainer: Trainer
    feed: SampleFeed
    algorithm: Algorithm
    checkpointer: Checkpointer
    validation: Validation
    """Validation of train steps, which also publishes the weights of train steps to the rollout engines."""
    hooks: Callable[..., None] = lambda hook_name, **hook_data: None
    """Function that calls the user-defined hook named `hook_name` of the recipe, such as a `Hooks` object."""
    profiler_config: ProfilerConfig = field(default_factory=ProfilerConfig)
    moving_average: MovingAverage | None = None
    """Moving average that is validated and finally copied into the model; None: the trained weights are used."""
    check_metrics: Callable[[int, dict[str, float]], dict[str, float]] = lambda step, metrics: {}
    """Function that checks the metrics of a train step, for example for drift between engines and trainer, and returns
    further metrics."""
    mfu_counter: FlopsUtilization | None = None
    """Counter of the model FLOPs utilization (MFU) of train steps; None: MFU is not reported."""
    speed_tuning: SpeedTuning | None = None
    """Measurement that chooses `mini_batch` and `num_threads` if the recipe sets them to `auto`; None: neither is
    `auto`."""
    initial_checkpoint: Path | None = None
    """Folder `.../step_N/policy` of another run's checkpoint, from which a training without its own checkpoint starts;
    None: the training starts from the stage's model."""
    step: int = 0
    """Number of completed train steps."""
    _is_first_attempt: bool = True
    """Whether the training has no checkpoint of its own to resume from."""
    _start_step: int = 0
    """Number of train steps that were completed when this attempt started."""
    _num_updates: int = 0
    """Number of optimizer steps taken; one train step can have several."""
    _last_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest step, and maxima over all steps for names that end in `_max`. Every checkpoint has these
    metrics, so that a run that is killed after its last step reports the same metrics."""

    def __post_init__(self) -> None:
        self.validation.call_hook, self.validation.record_metrics = self.hooks, self._log_validation

    def run(self) -> dict[str, float]:
        """Train to the last step, and return its training and validation metrics; metrics named `..._max` are maxima
        over all steps. Raise Preempted if a signal requests a stop."""
        try:
            return self._restore_and_train()
        except StopRequested:
            raise self._save_and_make_preempted_error() from None

    def _restore_and_train(self) -> dict[str, float]:
        self.trainer.adapter.check_parallel_plan()
        hooks, (start_step, needs_validation) = self.hooks, self._restore_checkpoint()
        hooks("pre_training_hook", start_step=start_step, total_steps=self.feed.total_steps)
        self.validation.publish(start_step)
        if needs_validation:
            self.validation.start_async(start_step)
        elif self.validation.was_validation_interrupted(start_step) and self._validate_last_step():
            self._save_checkpoint()
        if self.validation.compute_metrics and self.validation.config.val_before_train and self._is_first_attempt:
            self._log_step(start_step, self._validation_metrics())
        with StepProfiler(self.workspace.path, self.profiler_config, start_step) as profiler:
            try:
                self._train(profiler)
            except StopRequested:  # save before the profiler writes its trace, because writing may take long
                raise self._save_and_make_preempted_error() from None
        has_new_validation_metrics = self.validation.wait(self.step)
        has_new_validation_metrics |= self._validate_last_step()
        self.checkpointer.wait()
        if has_new_validation_metrics or self.checkpointer.latest_step() != self.step:
            self._save_checkpoint()
            self.checkpointer.wait()
        if self.moving_average:
            self.moving_average.copy_to_policy(self._num_updates)
        hooks("post_training_hook", final_step=self.step, total_steps=self.feed.total_steps, **self._last_metrics)
        return self._last_metrics

    def _train(self, profiler: StepProfiler) -> None:
        """Take the remaining train steps; validate and save at the steps that the recipe sets."""
        train, validation = self.config, self.validation
        save_freq = max(0, train.ckpt.save_freq_in_epoch) * self.feed.steps_per_epoch or train.ckpt.save_freq
        while (metrics := self._train_and_publish_step()) is not None:
            profiler.step(self.step)
            is_last_step, previous_best_step = self.step == self.feed.total_steps, validation.best_step
            is_validation_due = validation.should_validate(self.step, is_last_step=is_last_step)
            is_validation_async = is_validation_due and validation.async_validation is not None and not is_last_step
            is_save_due = self.step % save_freq == 0
            if (is_validation_due or is_save_due) and validation.wait(self.step):
                # The validated step was saved when its validation began, so a new best step needs no other checkpoint.
                previous_best_step = validation.best_step
            if is_validation_async:
                # Save now: later steps change the weights before the validation may select this step as the best.
                is_save_due = True
            elif is_validation_due:
                metrics |= self._validation_metrics(metrics)
            self._log_step(self.step, metrics)
            if is_validation_async:
                validation.start_async(self.step)
            if train.ckpt.enable_checkpoint and (is_save_due or validation.best_step != previous_best_step):
                self._save_checkpoint()

    def _train_and_publish_step(self) -> dict[str, float] | None:
        """Take one train step, publish its weights and return its metrics; None if the data has ended."""
        start_time = time.perf_counter()
        check_stop(self.workspace)
        if (metrics := self._run_train_step()) is None:
            return None
        self.step += 1
        metrics |= self.validation.publish_step(self.step)
        metrics["time/step"] = time.perf_counter() - start_time
        self.hooks("post_training_step_hook", current_step=self.step, total_steps=self.feed.total_steps, **metrics)
        if (self.feed.total_steps - self.step) * metrics["time/step"] < _VERIFICATION_LEAD_SECONDS and is_first_rank():
            self.trainer.adapter.prestart_verification()
        return metrics

    def _validate_last_step(self) -> bool:
        """Validate the last step unless it was already validated, and return whether this validation was necessary."""
        if not self.validation.needs_last_validation(self.step):
            return False
        # The engine may lack the weights of the last step, because weights are sent before the next step.
        self.validation.publish(self.step)
        self._log_validation(self.step, self._validation_metrics())
        return True

    def _validation_metrics(self, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Validate the current step, and return the validation metrics. If a signal requests a stop, log `metrics`, the
        metrics of the train step (None: already logged), and raise StopRequested."""
        try:
            return self.validation.run(self.step)
        except StopRequested:
            if metrics is not None:
                self._log_step(self.step, metrics)
            raise

    def _log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the validation metrics of a step whose training metrics are already logged."""
        self._last_metrics |= metrics
        self.workspace.metrics.log(step, metrics)

    def _run_train_step(self) -> dict[str, float] | None:
        learning_rates = self.trainer.set_learning_rate(self.step, self.feed.total_steps)
        if (samples_and_metrics := self.feed.next_samples()) is None:
            return None
        samples, metrics = samples_and_metrics
        if self.speed_tuning:
            self.workspace.progress.phase("step")
            samples, tuning_metrics = self.speed_tuning.choose(samples)
            metrics |= tuning_metrics
        self.hooks("pre_training_step_hook", current_step=self.step + 1, total_steps=self.feed.total_steps)
        self.workspace.progress.phase("step")
        start_time, compile_seconds_before = time.perf_counter(), self.workspace.progress.compile_seconds
        values_by_metric: defaultdict[str, list[float]] = defaultdict(list)
        num_trained_tokens = 0
        for update in iterate_optimizer_updates(self.algorithm, samples, self.trainer) if samples else ():
            for name, value in self.trainer.update(update).items():
                values_by_metric[name].append(value)
            self._num_updates += 1
            num_trained_tokens += sum(map(self.trainer.adapter.num_tokens, update.samples))
            if self.moving_average:
                self.moving_average.update(self._num_updates)
            if self.mfu_counter:
                self.mfu_counter.count_update(update)
        if not self._num_updates:
            logger.warning(
                "step %d: the algorithm trains on none of %d samples, and no step before has changed the weights",
                self.step + 1, len(samples),
            )  # fmt: skip
        self.algorithm.after_train_step(self.step + 1, self.trainer)
        self.trainer.drop_gradients()  # a colocated engine may need the memory of the gradients
        metrics |= {n: max(v) if n.endswith("_max") else sum(v) / len(v) for n, v in values_by_metric.items()}
        metrics |= self.check_metrics(self.step + 1, metrics)
        compile_seconds = self.workspace.progress.compile_seconds - compile_seconds_before
        train_seconds = time.perf_counter() - start_time - compile_seconds
        if self.mfu_counter:
            metrics["throughput/mfu"] = self.mfu_counter.utilization_since_last(train_seconds)
        return metrics | {
            **learning_rates,
            "tokens": float(sum(map(self.trainer.adapter.num_tokens, samples))),
            "time/train": train_seconds,
            **({"time/compile": compile_seconds} if compile_seconds else {}),
            "throughput/tokens_per_second": num_trained_tokens / max(1e-9, train_seconds),
            "memory/host_gib": psutil.Process().memory_info().rss / 2**30,
            **({"memory/gpu_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}),
        }

    def _save_and_make_preempted_error(self) -> Preempted:
        """Save a checkpoint if the recipe sets `save_ckpt_at_exit`, and return the `Preempted` error with which the
        training ends. Call this only if no weight has changed since the last completed step."""
        stop_message = f"stopped after step {self.step} of {self.feed.total_steps}"
        # The first attempt saves nothing before its first step, so that the next attempt also obeys `val_before_train`.
        has_completed_step = self.step > (self._start_step if self._is_first_attempt else 0)
        if not (self.config.save_ckpt_at_exit and has_completed_step):
            return Preempted(f"{stop_message}; nothing saved")
        self.checkpointer.wait()
        if (validating_step := self.validation.validating_step) not in (None, self.step):
            saved_step = self.checkpointer.latest_step()  # a resumed run validates the saved step again
            stop_message += f", while step {validating_step} was validated"
            return Preempted(f"{stop_message}; the checkpoint is of step {saved_step}")
        if self.checkpointer.latest_step() != self.step:
            self._save_checkpoint()
            self.checkpointer.wait()
        return Preempted(f"{stop_message}; checkpoint saved")

    def _restore_checkpoint(self) -> tuple[int, bool]:
        """Resume from the newest complete checkpoint of this training or, without one, from `initial_checkpoint`.
        Return the number of completed train steps (0: no checkpoint), and whether an asynchronous validation of this
        step was interrupted and must be repeated. Raise ConfigError if `initial_checkpoint` has as many steps as this
        training, or more."""
        train_state, seed = self._make_train_state(), self.config.seed
        assert seed is not None  # the schema replaces a missing seed by its default
        own_checkpoint_step = start_step = self.checkpointer.load_latest(train_state) or 0
        self._is_first_attempt = not own_checkpoint_step
        if not own_checkpoint_step and self.initial_checkpoint:
            start_step = load_checkpoint(self.initial_checkpoint, train_state, self.workspace.progress.beat)
        if start_step:
            self.feed.load_state_dict(train_state.feed or {"step": start_step})
        if start_step > own_checkpoint_step and start_step >= self.feed.total_steps:
            raise ConfigError(
                f"train.resume = '{self.initial_checkpoint}' is at step {start_step} and this training ends at step "
                f"{self.feed.total_steps}; raise train.epoch or train.max_num_steps"
            )
        if start_step:
            if train_state.algorithm:  # the checkpoint of another run may be of an algorithm without a state
                self.algorithm.load_state_dict(train_state.algorithm)
            self._num_updates = int(train_state.loop_state.get("num_updates", start_step))
            if self.speed_tuning:
                self.speed_tuning.restore(train_state.loop_state.get("speed_settings"))
            # Random generators are restored last, because starting an engine advances and reseeds them.
            rng_states = train_state.loop_state["rng"]
            saved_data_parallel_rank = train_state.loop_state.get("seed_rank", self._data_parallel_rank)
            # Seed anew if the mesh changed: with saved states, ranks that share a sample would draw different numbers.
            if all_reduce_any(rng_states is None or saved_data_parallel_rank != self._data_parallel_rank):
                seed_rng(seed, start_step, self._data_parallel_rank)
            else:
                restore_rng(rng_states)
        else:  # opening the model seeded torch equally on all ranks, so only data-parallel ranks above 0 are reseeded
            seed_rng(seed, 0, self._data_parallel_rank, keeps_torch_rng=self._data_parallel_rank == 0)
        self.validation.load_state_dict(start_step, train_state.loop_state if own_checkpoint_step else {})
        if own_checkpoint_step:
            self._last_metrics = dict(train_state.loop_state["metrics"])
            self.workspace.progress.report_checkpoint(own_checkpoint_step)
        if start_step:
            self.hooks("load_checkpoint_hook", step=start_step)
        self.checkpointer.write_best_step(self._best_step_to_save)
        needs_validation = bool(own_checkpoint_step and train_state.loop_state.get("is_unmeasured"))
        removed_metric_prefix = VALIDATION_METRIC_PREFIX if needs_validation else ""
        self.workspace.metrics.remove_lines_after_step(own_checkpoint_step, prefix=removed_metric_prefix)
        self.workspace.progress.step(start_step, self.feed.total_steps)
        self.step = self._start_step = start_step
        return start_step, needs_validation and self.validation.async_validation is not None

    @property
    def _data_parallel_rank(self) -> int:
        """Return the data-parallel rank. Random seeds depend on it, so ranks that share a sample have equal seeds."""
        mesh = self.trainer.adapter.mesh
        return mesh.dp.get_local_rank() if mesh else 0

    def _save_checkpoint(self) -> None:
        self.workspace.progress.phase("save")
        self.hooks("save_checkpoint_hook", step=self.step)
        train_state = self._make_train_state()
        train_state.loop_state = {
            "step": self.step, "total_steps": self.feed.total_steps, "num_updates": self._num_updates,
            "rng": capture_rng(), "seed_rank": self._data_parallel_rank, "metrics": self._last_metrics,
            **self.validation.state_dict(self.step),
            **({"speed_settings": self.speed_tuning.chosen} if self.speed_tuning else {}),
        }  # fmt: skip
        self.workspace.metrics.sync()
        self.checkpointer.save(self.step, train_state, self._best_step_to_save)

    @property
    def _best_step_to_save(self) -> BestStep | None:
        """Return the step with the best validation metrics so far; None if there is none, or if the recipe keeps no
        checkpoints."""
        return self.validation.best_step if self.config.ckpt.enable_checkpoint else None

    def _make_train_state(self) -> TrainState:
        return TrainState(
            self.trainer.adapter.model, self.trainer.optimizer, weight_sets=self.trainer.weight_sets.tensors,
            feed=self.feed.state_dict(), algorithm=self.algorithm.state_dict(),
        )  # fmt: skip

    def _log_step(self, step: int, metrics: dict[str, float]) -> None:
        self._last_metrics = metrics | {
            name: max(value, metrics.get(name, value))
            for name, value in self._last_metrics.items()
            if name.endswith("_max") and not name.startswith(VALIDATION_METRIC_PREFIX)
        }
        self.workspace.metrics.log(step, metrics)
        shown_names = {"loss": "loss", "reward/mean": "reward", "throughput/tokens_per_second": "tokens_per_second"}
        progress_metrics = {name: metrics[key] for key, name in shown_names.items() if key in metrics}
        progress_metrics |= {key: value for key, value in metrics.items() if key.startswith(("time/", "memory/"))}
        self.workspace.progress.step(step, self.feed.total_steps, **progress_metrics)
