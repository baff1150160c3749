"""The loop. The first file to read: a feed gives samples, an algorithm turns them into updates, a trainer applies them.

It does not know which algorithm runs, where samples come from, or what the model is. Everything that a step needs is
a function of the step number and of what a checkpoint holds, so a run that was killed anywhere and resumed ends with
the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.checkpoint.best import Best, best_of
from cosmos_core.checkpoint.resume import load_from
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState, capture_rng, restore_rng, seed_rng
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.run.stage import Stage
from cosmos_core.train.ema import NAME as EMA
from cosmos_core.train.ema import MovingAverage
from cosmos_core.train.feeds import Feed
from cosmos_core.train.hooks import Hooks
from cosmos_core.train.measure import PREFIX
from cosmos_core.train.mfu import Utilization
from cosmos_core.train.profile import StepProfiler
from cosmos_core.train.stop import StopAsked, check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.validation_apart import Ended, ValidationApart
from cosmos_core.types import JsonValue

Measure = Callable[[int], dict[str, float]]
"""Held-out metrics after that many steps, named `validation/...`."""


@dataclass
class Loop:
    """One training, from whatever step its newest checkpoint is at to its last."""

    stage: Stage
    trainer: Trainer
    feed: Feed
    algorithm: Algorithm
    checkpointer: Checkpointer
    publish: Callable[[int], dict[str, float]] = lambda step: {}
    """Sends the weights of the policy at step N to whoever generates; returns metrics about it."""
    publish_every: int = 1
    """Train steps between two of them; a training that begins or goes on begins with one."""
    measure: Measure | None = None
    """None: no validation during training."""
    apart: ValidationApart | None = None
    """Measures while the training goes on, in the place of `measure` but for the first and the last time."""
    average: MovingAverage | None = None
    """What is measured and, in the end, left in the model; None: the weights themselves."""
    watch: Callable[[int, dict[str, float]], dict[str, float]] = lambda step, metrics: {}
    """Judges the metrics of a train step, such as whether engines agree with the trainer; returns metrics about it."""
    utilization: Utilization | None = None
    """Counts the share of the devices' rate that train steps reach; None: not reported."""
    begin_from: Path | None = None
    """The folder `.../step_N/policy` of another run, for a training that has no checkpoint of its own yet."""
    best: Best | None = None
    """The best step by validation; None: none was validated yet."""
    step: int = 0
    """Train steps that are complete."""
    _num_updates: int = 0
    """Optimizer steps taken, of which a train step may have several."""
    _hooks: Hooks = field(init=False)
    _measured_at: int = -1
    """The newest step that was validated, or that another run has left behind; -1: none."""
    _is_held: bool = False
    """Weights were not published, because engines still measure those of another step."""
    _last: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest step, `..._max` of all steps; in every checkpoint, so that a run killed after its last
    step reports the same."""

    def __post_init__(self) -> None:
        self._hooks = Hooks(self.stage)
        if self.apart is not None:
            self.apart.on_end = self._validated

    def run(self) -> dict[str, float]:
        """Train to the end; return the metrics of the last step and its validation, of all steps for `..._max`.

        Raises:
            Preempted: a signal asked to stop.
        """
        self.trainer.adapter.prove()
        hooks, (start, is_unmeasured) = self._hooks, self._restore()
        hooks("pre_training_hook", start_step=start, total_steps=self.feed.total_steps)
        self.publish(start)
        if is_unmeasured:
            self._begin_validation()
        elif self._was_cut_off(start) and self._measure_last():
            self._save()
        if self.measure and self.stage.recipe.validation.val_before_train and start == 0:
            self._log(0, self._measured(0))
        with StepProfiler(self.stage, start) as profiler:
            self._train(profiler)
        is_told = self._settle()
        is_told = self._measure_last() or is_told
        self.checkpointer.wait()
        if is_told or self.checkpointer.latest() != self.step:
            self._save()
            self.checkpointer.wait()
        if self.average:
            self.trainer.named.copy_to_policy(EMA)
        hooks("post_training_hook", final_step=self.step, total_steps=self.feed.total_steps, **self._last)
        return self._last

    def _train(self, profiler: StepProfiler) -> None:
        """Take the steps that are left, measuring and saving as the recipe asks."""
        train, validation = self.stage.recipe.train, self.stage.recipe.validation
        save_freq = max(0, train.ckpt.save_freq_in_epoch) * self.feed.steps_per_epoch or train.ckpt.save_freq
        while (metrics := self._next()) is not None:
            profiler.step(self.step)
            is_last, best_before = self.step == self.feed.total_steps, self.best
            is_due = self.measure is not None and (self.step % validation.freq == 0 or is_last)
            saves = self.step % save_freq == 0
            if (is_due or saves) and self._settle():
                best_before = self.best  # what a checkpoint has is known when it is saved
            if is_due and self.apart and not is_last:
                saves = True  # it may be the best, which will be known when its weights are gone
            elif is_due:
                measured = self._measured(self.step, metrics)
                metrics |= measured
                self.best = best_of(self.best, self.step, measured)
            self._log(self.step, metrics)
            if is_due and self.apart and not is_last:
                self._begin_validation()
            if train.ckpt.enable_checkpoint and (saves or self.best != best_before):
                self._save()

    def _next(self) -> dict[str, float] | None:
        """Take one train step and publish its weights; return its metrics, None: the data has ended."""
        began = time.perf_counter()
        try:
            check_stop(self.stage)
            metrics = self._step()
        except StopAsked:
            raise self._preempted() from None
        if metrics is None:
            return None
        self.step += 1
        if self.step % self.publish_every == 0:
            metrics |= self._published()
        metrics["time/step"] = time.perf_counter() - began
        self._hooks("post_training_step_hook", current_step=self.step, total_steps=self.feed.total_steps, **metrics)
        return metrics

    def _published(self) -> dict[str, float]:
        """Publish the present weights, unless engines still measure others."""
        self._is_held = False
        if self.apart is not None:
            self.apart.check()
            self._is_held = self.apart.step is not None
        return {} if self._is_held else self.publish(self.step)

    def _begin_validation(self) -> None:
        """Have the present weights measured while the training goes on."""
        assert self.apart is not None
        self._hooks("pre_validation_hook", current_step=self.step)
        if self.step % self.publish_every:
            self.publish(self.step)
        self.apart.begin(self.step)

    def _validated(self, ended: Ended) -> None:
        """Take what was measured of an earlier step."""
        self._hooks("post_validation_hook", current_step=ended.step, **ended.metrics)
        self.best, self._measured_at = best_of(self.best, ended.step, ended.metrics), ended.step
        self._last |= ended.metrics
        self.stage.metrics.log(ended.step, ended.metrics)
        if self._is_held:
            self._is_held = False
            self.publish(self.step)

    def _settle(self) -> bool:
        """Wait for the validation of an earlier step; return whether there was one."""
        if self.apart is None or self.apart.step is None:
            return False
        self.stage.progress.phase("validate")
        try:
            self.apart.wait(self.step, lambda: check_stop(self.stage))
        except StopAsked:
            raise self._preempted() from None
        return True

    def _measure_last(self) -> bool:
        """Validate the last step where the data ended before anybody could know that it was; return whether it did."""
        if self.measure is None or self.step == 0 or self._measured_at == self.step:
            return False
        self.publish(self.step)  # the engine may have given up its weights for those of a step that never came
        measured = self._measured(self.step)
        self.best = best_of(self.best, self.step, measured)
        self._last |= measured
        self.stage.metrics.log(self.step, measured)
        return True

    def _step(self) -> dict[str, float] | None:
        learning_rates = self.trainer.set_learning_rate(self.step, self.feed.total_steps)
        given = self.feed.next()
        if given is None:
            return None
        samples, metrics = given
        self._hooks("pre_training_step_hook", current_step=self.step + 1, total_steps=self.feed.total_steps)
        self.stage.progress.phase("step")
        began, compiled = time.perf_counter(), self.stage.progress.compile_seconds
        updates = []
        for update in self.algorithm.updates(samples, self.trainer) if samples else ():
            updates.append(self.trainer.update(update))
            self._num_updates += 1
            if self.average:
                self.average.update(self._num_updates)
            if self.utilization:
                self.utilization.add(update)
        self.trainer.drop_gradients()  # an engine may need their memory now
        metrics |= _over_updates(updates)
        metrics |= self.watch(self.step + 1, metrics)
        compiling = self.stage.progress.compile_seconds - compiled
        seconds = time.perf_counter() - began - compiling
        if self.utilization:
            metrics["throughput/mfu"] = self.utilization.reached(seconds)
        num_tokens = sum(self.trainer.adapter.cost(sample) for sample in samples)
        return metrics | {
            **learning_rates,
            "tokens": float(num_tokens),
            "time/train": seconds,
            **({"time/compile": compiling} if compiling else {}),
            "throughput/tokens_per_second": num_tokens / max(1e-9, seconds),
        }

    def _preempted(self) -> Preempted:
        """Save, where the recipe asks for it: nothing of the next step has changed a weight."""
        done = f"stopped after step {self.step} of {self.feed.total_steps or 'an unknown number'}"
        if not (self.stage.recipe.train.save_ckpt_at_exit and self.step > 0):
            return Preempted(f"{done}; nothing saved")
        self.checkpointer.wait()
        if self.apart and self.apart.step is not None and self.apart.step != self.step:
            saved = self.checkpointer.latest()  # of the step that is being measured, to be measured again
            return Preempted(f"{done}, while step {self.apart.step} was validated; the checkpoint is of step {saved}")
        if self.checkpointer.latest() != self.step:
            self._save()
            self.checkpointer.wait()
        return Preempted(f"{done}; checkpoint saved")

    def _restore(self) -> tuple[int, bool]:
        """Continue from the newest whole checkpoint; return its number of steps, and whether its weights were still
        being measured.

        Raises:
            ConfigError: the checkpoint of another run has as many steps as this training, or more.
        """
        state, total = self._state(), self.feed.total_steps
        own = self.checkpointer.load_latest(state) or 0
        start = own or (load_from(self.begin_from, state) if self.begin_from else 0)
        if start > own and total is not None and start >= total:
            raise ConfigError(
                f"train.resume = '{self.begin_from}' is at step {start} and this training ends at step "
                f"{total}; raise train.epoch or train.max_num_steps"
            )
        if start:
            self.feed.load_state_dict(state.feed or {"step": start})
            self.algorithm.load_state_dict(state.algorithm)
            self._num_updates = int(str(state.extra.get("num_updates", start)))
            # Last of all set-up: starting an engine draws from and reseeds every generator.
            self._restore_rng(start, state.extra["rng"])
        else:  # opening the model has seeded those of torch
            seed_rng(self.stage.seed, 0, self._data_rank, keeps_torch=True)
        self._measured_at = start
        if own:
            self._last = {str(key): float(value) for key, value in _table(state.extra["metrics"]).items()}
            self.best = Best(**_table(state.extra["best"])) if state.extra.get("best") else None
            self._measured_at = int(str(state.extra.get("measured_at", own)))
            self.stage.progress.saved(own)
        if start:
            self._hooks("load_checkpoint_hook", step=start)
        self.checkpointer.name_best(self._kept)
        is_unmeasured = bool(own and state.extra.get("is_unmeasured"))
        self.stage.metrics.cut_back(start, again=PREFIX if is_unmeasured else "")
        self.stage.progress.step(start, total)
        self.step = start
        return start, is_unmeasured and self.apart is not None

    def _restore_rng(self, step: int, saved: JsonValue) -> None:
        if saved is not None:
            restore_rng(_table(saved))
        else:
            seed_rng(self.stage.seed, step, self._data_rank)

    @property
    def _data_rank(self) -> int:
        """The number of this rank in seeds: ranks that share a sample draw alike."""
        mesh = self.trainer.adapter.mesh
        return mesh.data.get_local_rank() if mesh else 0

    def _save(self) -> None:
        self.stage.progress.phase("save")
        self._hooks("save_checkpoint_hook", step=self.step)
        state = self._state()
        metrics: dict[str, JsonValue] = {**self._last}
        state.extra = {
            "step": self.step, "total_steps": self.feed.total_steps, "rng": capture_rng(), "metrics": metrics,
            "num_updates": self._num_updates,
            "best": asdict(self.best) if self.best else None,
            "measured_at": self._measured_at,
            "is_unmeasured": self.apart is not None and self.apart.step == self.step,
        }  # fmt: skip
        self.stage.metrics.sync()
        self.checkpointer.save(self.step, state, self._kept)

    @property
    def _kept(self) -> Best | None:
        """The best step, if it was saved for being that."""
        return self.best if self.stage.recipe.train.ckpt.enable_checkpoint else None

    def _state(self) -> TrainState:
        return TrainState(
            self.trainer.adapter.model,
            self.trainer.optimizer,
            named_weights=self.trainer.named.tensors,
            feed=self.feed.state_dict(),
            algorithm=self.algorithm.state_dict(),
        )

    def _was_cut_off(self, start: int) -> bool:
        """Return whether a stop was asked for while the step that the training goes on from was validated."""
        return self.apart is None and self._measured_at < start and start % self.stage.recipe.validation.freq == 0

    def _measured(self, step: int, metrics: dict[str, float] | None = None) -> dict[str, float]:
        """Return what is measured of a step, whose own metrics are told where a stop cuts that off."""
        assert self.measure is not None
        self.stage.progress.phase("validate")
        began = time.perf_counter()
        self._hooks("pre_validation_hook", current_step=step)
        if step % self.publish_every:
            self.publish(step)
        try:
            if self.average is None:
                measured = self.measure(step)
            else:
                with self.trainer.weights(EMA):
                    self.publish(step)
                    measured = self.measure(step)
                self.publish(step)
        except StopAsked:
            if metrics is not None:
                self._log(step, metrics)
            raise self._preempted() from None
        self._hooks("post_validation_hook", current_step=step, **measured)
        self._measured_at = step
        return {**measured, "time/validate": time.perf_counter() - began}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        largest = {name: value for name, value in self._last.items() if name.endswith("_max")}
        self._last = metrics | {name: max(value, metrics.get(name, value)) for name, value in largest.items()}
        self.stage.metrics.log(step, metrics)
        shown = {"loss": "loss", "reward/mean": "reward", "throughput/tokens_per_second": "tokens_per_second"}
        self.stage.progress.step(
            step, self.feed.total_steps, **{name: metrics[key] for key, name in shown.items() if key in metrics}
        )


def _over_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates of a step, the largest of those that are maxima."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        values = [metrics[name] for metrics in updates if name in metrics]
        found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found


def _table(value: JsonValue) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value
