"""The loop. The first file to read: a feed gives samples, an algorithm turns them into updates, a rank applies them.

It does not know which algorithm runs, where samples come from, or what the model is. Everything that a step needs is
a function of the step number and of what a checkpoint holds, so a run that was killed anywhere and resumed ends with
the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.checkpoint.best import Best, best_of
from cosmos_core.checkpoint.resume import load_from
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState, capture_rng, restore_rng, seed_rng
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import any_on_ranks
from cosmos_core.run.stage import Stage
from cosmos_core.train.ema import MovingAverage
from cosmos_core.train.feeds import Feed
from cosmos_core.train.rank import Rank
from cosmos_core.types import JsonValue

Measure = Callable[[int], dict[str, float]]
"""Held-out figures after that many steps, named `validation/...`."""


@dataclass
class Loop:
    """One training, from whatever step its newest checkpoint is at to its last."""

    stage: Stage
    rank: Rank
    feed: Feed
    algorithm: Algorithm
    checkpointer: Checkpointer
    weights_changed: Callable[[int], dict[str, float]] = lambda step: {}
    """Tells whoever generates that the weights have seen `step` steps; returns figures about it."""
    measure: Measure | None = None
    """None: no validation during training."""
    average: MovingAverage | None = None
    """What is measured and, in the end, left in the model; None: the weights themselves."""
    begin_from: Path | None = None
    """The folder `.../step_N/policy` of another run, for a training that has no checkpoint of its own yet."""
    best: Best | None = None
    """The best step by validation; None: none was validated yet."""
    _last: dict[str, float] = field(default_factory=dict)
    """Figures of the newest step, `..._max` of all steps; in every checkpoint, so that a run killed after its last
    step reports the same."""

    def run(self) -> dict[str, float]:
        """Train to the end; the figures of the last step and its validation, the largest of all steps for `..._max`."""
        self.rank.prove()
        start = self._restore()
        train, validation = self.stage.recipe.train, self.stage.recipe.validation
        self.weights_changed(start)
        if self.measure and validation.val_before_train and start == 0:
            self._log(0, self._measured(0))
        save_freq = max(0, train.ckpt.save_freq_in_epoch) * self.feed.steps_per_epoch or train.ckpt.save_freq
        for step in range(start, self.feed.total_steps):
            began = time.perf_counter()
            self.stop_if_asked(step)
            metrics = self._step(step)
            done = step + 1
            metrics |= self.weights_changed(done)
            metrics["time/step"] = time.perf_counter() - began
            best_before = self.best
            if self.measure and (done % validation.freq == 0 or done == self.feed.total_steps):
                figures = self._measured(done)
                metrics |= figures
                self.best = best_of(self.best, done, figures)
            self._log(done, metrics)
            if train.ckpt.enable_checkpoint and (done % save_freq == 0 or self.best != best_before):
                self._save(done)
        self.checkpointer.wait()
        if self.checkpointer.latest() != self.feed.total_steps:
            self._save(self.feed.total_steps)
            self.checkpointer.wait()
        if self.average:
            self.average.copy_to_model()
        return self._last

    def stop_if_asked(self, step: int) -> None:
        """Save and end if a signal asked to; `step` steps are complete and nothing of the next has changed a weight.

        Raises:
            Preempted: a signal asked to stop.
        """
        if not any_on_ranks(self.stage.stop_requested):
            return
        if self.stage.recipe.train.save_ckpt_at_exit and step > 0:
            self.checkpointer.wait()
            if self.checkpointer.latest() != step:
                self._save(step)
                self.checkpointer.wait()
            raise Preempted(f"stopped after step {step} of {self.feed.total_steps}; checkpoint saved")
        raise Preempted(f"stopped after step {step} of {self.feed.total_steps}; nothing saved")

    def _step(self, step: int) -> dict[str, float]:
        learning_rates = self.rank.set_learning_rate(step, self.feed.total_steps)
        samples, metrics = self.feed.samples(step)
        self.stage.progress.phase("step")
        began = time.perf_counter()
        logprobs = partial(self.rank.logprobs, temperature=self.algorithm.temperature)
        figures = [
            self.rank.update(update, temperature=self.algorithm.temperature, with_entropy=self.algorithm.with_entropy)
            for update in self.algorithm.updates(samples, logprobs)
        ]
        metrics |= _over_updates(figures)
        if self.average:
            self.average.update(step)
        seconds = time.perf_counter() - began
        num_tokens = sum(len(sample.input_ids) for sample in samples)
        return metrics | {
            **learning_rates,
            "tokens": float(num_tokens),
            "time/train": seconds,
            "throughput/tokens_per_second": num_tokens / max(1e-9, seconds),
        }

    def _restore(self) -> int:
        """Continue from the newest whole checkpoint; the number of steps that it has seen.

        Raises:
            ConfigError: the checkpoint of another run has as many steps as this training, or more.
        """
        state = self._state()
        own = self.checkpointer.load_latest(state) or 0
        start = own or (load_from(self.begin_from, state) if self.begin_from else 0)
        if start > own and start >= self.feed.total_steps:
            raise ConfigError(
                f"train.resume = '{self.begin_from}' has seen {start} steps and this training ends at step "
                f"{self.feed.total_steps}; raise train.epoch or train.max_num_steps"
            )
        if start:
            # Last of all set-up: starting an engine draws from and reseeds every generator.
            self._restore_rng(start, state.extra["rng"])
        if own:
            self._last = {str(key): float(value) for key, value in _table(state.extra["metrics"]).items()}
            self.best = Best(**_table(state.extra["best"])) if state.extra.get("best") else None
            self.stage.progress.saved(own)
        self.checkpointer.name_best(self._kept)
        self.stage.metrics.cut_back(start)
        self.stage.progress.step(start, self.feed.total_steps)
        return start

    def _restore_rng(self, step: int, saved: JsonValue) -> None:
        if saved is not None:
            restore_rng(_table(saved))
        else:  # ranks that share a sample draw alike
            mesh = self.rank.mesh
            seed_rng(self.stage.seed, step, mesh.data.get_local_rank() if mesh else 0)

    def _save(self, step: int) -> None:
        self.stage.progress.phase("save")
        state = self._state()
        metrics: dict[str, JsonValue] = {**self._last}
        state.extra = {
            "step": step, "total_steps": self.feed.total_steps, "rng": capture_rng(), "metrics": metrics,
            "best": asdict(self.best) if self.best else None,
        }  # fmt: skip
        self.stage.metrics.sync()
        self.checkpointer.save(step, state, self._kept)

    @property
    def _kept(self) -> Best | None:
        """The best step, if it was saved for being that."""
        return self.best if self.stage.recipe.train.ckpt.enable_checkpoint else None

    def _state(self) -> TrainState:
        named_weights = {"ema": self.average.tensors} if self.average else {}
        return TrainState(self.rank.model, self.rank.optimizer, named_weights=named_weights)

    def _measured(self, step: int) -> dict[str, float]:
        assert self.measure is not None
        self.stage.progress.phase("validate")
        began = time.perf_counter()
        if self.average is None:
            figures = self.measure(step)
        else:
            with self.average.in_the_model():
                self.weights_changed(step)
                figures = self.measure(step)
            self.weights_changed(step)
        return {**figures, "time/validate": time.perf_counter() - began}

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        largest = {name: value for name, value in self._last.items() if name.endswith("_max")}
        self._last = metrics | {name: max(value, metrics.get(name, value)) for name, value in largest.items()}
        self.stage.metrics.log(step, metrics)
        shown = {"loss": "loss", "reward/mean": "reward", "throughput/tokens_per_second": "tokens_per_second"}
        self.stage.progress.step(
            step, self.feed.total_steps, **{name: metrics[key] for key, name in shown.items() if key in metrics}
        )


def _over_updates(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Several updates a step: the mean of each figure, the largest of those that are maxima."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in figures for name in part):
        values = [part[name] for part in figures if name in part]
        found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found


def _table(value: JsonValue) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value
