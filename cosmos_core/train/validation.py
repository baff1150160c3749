"""Validation during a training: which steps are validated, with which weights, and which step is the best so far."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cosmos_core.checkpoint.best import BestStep, select_best_step
from cosmos_core.config.schema.validation import ValidationConfig
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.stop import check_stop
from cosmos_core.types import JsonValue

MetricsFn = Callable[[int], dict[str, float]]
"""Function that returns the metrics of held-out rows or prompts, named `validation/...`, after a number of train
steps."""


@dataclass
class Validation:
    """Validations of one training: when they are due, and the best step so far. The object also publishes weights to
    the rollout engines, because validations decide which weights the engines need."""

    config: ValidationConfig
    workspace: Workspace
    compute_metrics: MetricsFn | None = None
    """Function that computes the metrics of held-out rows or prompts; None: no validation during training."""
    async_validation: AsyncValidation | None = None
    """Runner of the validations that do not stop the training, which are all except the first and the last; None: the
    training waits for each validation."""
    publish: Callable[[int], dict[str, float]] = lambda step: {}
    """Function that sends the weights of train step N to the rollout engines and returns metrics of the transfer."""
    publish_interval: int = 1
    """Number of train steps between two calls of `publish`, which is also called when a training starts or resumes."""
    use_averaged_weights: Callable[[], AbstractContextManager[None]] | None = None
    """Function that returns a context manager in which the model has its averaged weights; None: no averaging."""
    call_hook: Callable[..., None] = lambda hook_name, **hook_data: None
    record_metrics: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    """Function that logs the validation metrics of a step; `TrainLoop` sets this function and `call_hook`."""
    best_step: BestStep | None = None
    """Train step with the best validation metrics; None if no step was validated yet."""
    _last_validated_step: int = -1
    """Newest step that was validated; -1 if no step was validated. After a start from the checkpoint of another run,
    the step of this checkpoint counts as validated."""
    _training_start_step: int | None = 0
    """Step at which a training without a checkpoint of its own began; None: the training was resumed."""
    _current_step: int = 0
    _is_publish_postponed: bool = False
    """Whether publishing was postponed because engines still validate the weights of another step."""

    def __post_init__(self) -> None:
        if self.async_validation is not None:
            self.async_validation.on_validation_end = self._finish_async_validation

    @property
    def validating_step(self) -> int | None:
        """Return the step that is being validated while the training continues; None: no step."""
        return None if self.async_validation is None else self.async_validation.step

    def should_validate(self, step: int, *, is_last_step: bool) -> bool:
        """Return whether a validation after train step `step` is due; the last step is always validated."""
        return self.compute_metrics is not None and (step % self.config.freq == 0 or is_last_step)

    def needs_last_validation(self, step: int) -> bool:
        """Return whether the weights after `step`, the last train step, must still be validated. Return False if
        validation is disabled or there was no train step."""
        return self.compute_metrics is not None and step != 0 and self._last_validated_step != step

    def was_validation_interrupted(self, step: int) -> bool:
        """Return whether `step`, from which this attempt resumes, is due for a validation that an earlier attempt has
        not finished. Always False for asynchronous validations."""
        return self.async_validation is None and self._last_validated_step < step and step % self.config.freq == 0

    def publish_step(self, step: int) -> dict[str, float]:
        """Send the weights of a step to the rollout engines if this is due and no validation needs other weights.
        Return metrics of the transfer; empty if nothing was sent."""
        self._current_step = step
        if step % self.publish_interval:
            return {}
        self._is_publish_postponed = False
        if self.async_validation is not None:
            self.async_validation.poll()
            self._is_publish_postponed = self.async_validation.step is not None
        return {} if self._is_publish_postponed else self.publish(step)

    def run(self, step: int) -> dict[str, float]:
        """Validate the weights after train step `step`, and return the metrics. Raise StopRequested after a signal."""
        assert self.compute_metrics is not None
        self.workspace.progress.phase("validate")
        start_time = time.perf_counter()
        self._begin_validation(step)
        if self.use_averaged_weights is None:
            metrics = self.compute_metrics(step)
        else:
            with self.use_averaged_weights():
                self.publish(step)
                metrics = self.compute_metrics(step)
            self.publish(step)
        self._finish_validation(step, metrics)
        return {**metrics, "time/validate": time.perf_counter() - start_time}

    def start_async(self, step: int) -> None:
        """Start a validation of the current weights that runs while the training continues."""
        assert self.async_validation is not None
        self._begin_validation(step)
        self.async_validation.start_async(step)

    def wait(self, step: int) -> bool:
        """Wait until no asynchronous validation is running, and return whether one was. Raise StopRequested after a
        signal."""
        if self.async_validation is None or self.validating_step is None:
            return False
        self.workspace.progress.phase("validate")
        self.async_validation.wait(step, partial(check_stop, self.workspace))
        return True

    def state_dict(self, step: int) -> dict[str, JsonValue]:
        """Return the state of the validations to save in a checkpoint of train step `step`."""
        return {
            "best": asdict(self.best_step) if self.best_step else None,
            "measured_at": self._last_validated_step,
            "is_unmeasured": self.async_validation is not None and self.async_validation.step == step,
        }

    def load_state_dict(self, step: int, state: dict[str, Any]) -> None:
        """Restore the state of the validations in a checkpoint of train step `step`; `state` is empty for a checkpoint
        of another run."""
        self.best_step = BestStep(**state["best"]) if state.get("best") else None
        self._current_step, self._last_validated_step = step, int(state.get("measured_at", step))
        self._training_start_step = None if state else step

    def _begin_validation(self, step: int) -> None:
        """Call the user's hook `pre_validation_hook`, and publish the weights to validate unless the engines have them
        already."""
        self.call_hook("pre_validation_hook", current_step=step)
        if step % self.publish_interval:
            self.publish(step)

    def _finish_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.call_hook("post_validation_hook", current_step=step, **metrics)
        self._last_validated_step = step
        if step != self._training_start_step:  # weights from before the training are never the best
            self.best_step = select_best_step(self.best_step, step, metrics)

    def _finish_async_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a finished validation, and publish the current weights if publishing was postponed."""
        self._finish_validation(step, metrics)
        self.record_metrics(step, metrics)
        if self._is_publish_postponed:
            self._is_publish_postponed = False
            self.publish(self._current_step)
