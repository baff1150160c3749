"""Validation on disaggregated engines while the trainer continues.

Held-out prompts are sent as ordinary requests, but only to engines with the weights of the validated step. These
engines get no newer weights until all held-out completions are done. Meanwhile, the training uses completions of the
validated weights, for at most `allowed_outdated_steps` steps. The seeds and metrics are those of a synchronous
validation.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from cosmos_core.cluster.group import RanksMustRestart
from cosmos_core.errors import ERRORS_BY_NAME, CosmosError, serialise_error
from cosmos_core.parallel.mesh import broadcast_object, is_first_rank
from cosmos_core.rollout.engine_pool import WeightsUnavailable
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.train.measure import CompletionValidation
from cosmos_core.types import Group, ScoredGroup

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class AsyncValidation:
    """Runner of one asynchronous validation at a time; all ranks call its methods together."""

    def __init__(
        self, completion_validation: CompletionValidation, engine_fleet: EngineFleet,
        send_missing_weights: Callable[[int], object], send_heartbeat: Callable[[], None],
    ) -> None:  # fmt: skip
        """Prepare validations. `send_missing_weights(version)` sends the current weights, as version `version`, to the
        engines of `engine_fleet` that have no weights yet."""
        self._completion_validation, self._engine_fleet = completion_validation, engine_fleet
        self._send_missing_weights, self._send_heartbeat = send_missing_weights, send_heartbeat
        self.step: int | None = None
        """Train step whose weights are being validated; None: no validation is running."""
        self.on_validation_end: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
        """Function called on every rank with the step and the metrics when a validation has ended."""
        self._done_event = threading.Event()
        self._metrics: dict[str, float] = {}
        self._error_class_and_message: tuple[str, str] | None = None
        """Class name and message of the error of a failed validation, in a form that can be broadcast."""

    def start_async(self, step: int) -> None:
        """Start to validate the weights after `step` train steps; the engines must have these weights already."""
        assert self.step is None, "one validation at a time"
        self.step = step
        self._done_event.clear()
        self._error_class_and_message = None
        if is_first_rank():
            prompts, sampling, seed_step = self._completion_validation.validation_requests
            engine_fleet, weights_version = self._engine_fleet, self._engine_fleet.version
            group_futures = [engine_fleet.request(p, sampling, seed_step, version=weights_version) for p in prompts]
            threading.Thread(
                target=self._score_completions, args=(step, group_futures), daemon=True, name="validation"
            ).start()

    def poll(self) -> None:
        """If the validation has ended, call `on_validation_end` with its metrics; if it failed, raise its error. Raise
        RanksMustRestart if no engine has the validated weights any more."""
        if self.step is None:
            return
        validation_outcome = (
            (self._done_event.is_set(), self._metrics, self._error_class_and_message) if is_first_rank() else None
        )
        is_finished, metrics, error_class_and_message = broadcast_object(validation_outcome)  # type: ignore[misc]
        if not is_finished:
            return
        step, self.step = self.step, None
        if error_class_and_message is not None:
            error_class_name, error_message = error_class_and_message
            if error_class_name == WeightsUnavailable.__name__:
                raise RanksMustRestart(f"validation of step {step}: {error_message}")
            raise ERRORS_BY_NAME[error_class_name](error_message)
        self.on_validation_end(step, metrics)

    def wait(self, step: int, on_wait: Callable[[], None]) -> None:
        """Wait until no validation is running, and send the weights of step `step` to restarted engines. `on_wait` is
        called repeatedly, and can raise an error to stop waiting."""
        while self.step is not None:
            if is_first_rank():
                self._done_event.wait(_POLL_SECONDS)
            self._send_heartbeat()
            self.poll()
            if self.step is None:  # do not call `on_wait`: its error would keep the caller from logging the train step
                return
            on_wait()
            if broadcast_object(self._engine_fleet.needs_weights if is_first_rank() else None):
                self._send_missing_weights(step)

    def _score_completions(self, step: int, group_futures: Sequence[Future[Group]]) -> None:
        """Score the held-out completions for the validation of step `step`, in a thread of the first rank: each group
        as soon as its future in `group_futures` is done."""
        start_time = time.perf_counter()
        try:
            scored_groups: dict[Future[Group], ScoredGroup] = {}
            pending_futures = set(group_futures)
            while pending_futures:
                done_futures, pending_futures = wait(pending_futures, return_when=FIRST_COMPLETED)
                ordered_futures = [future for future in group_futures if future in done_futures]
                new_scored_groups = self._completion_validation.score([future.result() for future in ordered_futures])
                scored_groups |= dict(zip(ordered_futures, new_scored_groups, strict=True))
            metrics = self._completion_validation.log_metrics(step, [scored_groups[future] for future in group_futures])
            self._metrics = {**metrics, "time/validate": time.perf_counter() - start_time}
        except WeightsUnavailable as error:
            self._error_class_and_message = WeightsUnavailable.__name__, str(error)
        except CosmosError as error:
            self._error_class_and_message = serialise_error(error)
        except Exception as error:
            logger.exception("validation of step %d", step)
            error_class_name, error_message = serialise_error(error)
            self._error_class_and_message = error_class_name, f"validation of step {step}: {error_message}"
        self._done_event.set()
