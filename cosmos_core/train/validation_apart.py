"""Validation by engines apart from the trainer, which goes on training meanwhile.

Held-out prompts are requests like others, for engines with the weights of the validated step alone. These get no newer
ones until all is done, so the training goes on as far as `allowed_outdated_steps` lets it with completions of those
weights. Seeds are those of every other validation, so the metrics are those that a trainer which waits would have.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from cosmos_core.cluster.group import RanksAgain
from cosmos_core.errors import BY_NAME, CosmosError, by_name
from cosmos_core.parallel.mesh import broadcast_object, is_first
from cosmos_core.rollout.fleet import Fleet
from cosmos_core.rollout.members import LostWeights
from cosmos_core.train.measure import Completions
from cosmos_core.types import Group, ScoredGroup

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5


class Ended(NamedTuple):
    """A validation that is done."""

    step: int
    metrics: dict[str, float]


class ValidationApart:
    """One validation at a time; all ranks call its methods together."""

    def __init__(
        self, completions: Completions, fleet: Fleet, resync: Callable[[int], object], beat: Callable[[], None]
    ) -> None:
        """`completions` scores on the first rank alone; `resync` sends the present weights, as those of a step, to
        engines that have none."""
        self._completions, self._fleet, self._resync, self._beat = completions, fleet, resync, beat
        self.step: int | None = None
        """What is being validated; None: nothing is."""
        self.on_end: Callable[[Ended], None] = lambda ended: None
        """Called on every rank, when it is seen that one is done."""
        self._done = threading.Event()
        self._metrics: dict[str, float] = {}
        self._problem: tuple[str, str] | None = None
        """Name of the class of an error and its message, as all ranks can read them."""

    def begin(self, step: int) -> None:
        """Have the policy of `step` train steps validated, whose weights the engines have."""
        assert self.step is None, "one validation at a time"
        self.step = step
        self._done.clear()
        self._problem = None
        if is_first():
            prompts, sampling, of_seeds = self._completions.asked
            asked = [self._fleet.request(prompt, sampling, of_seeds, version=self._fleet.version) for prompt in prompts]
            threading.Thread(target=self._run, args=(step, asked), daemon=True, name="validation").start()

    def check(self) -> None:
        """See whether it is done.

        Raises:
            RanksAgain: the engines that had these weights have died.
            CosmosError: it failed.
        """
        if self.step is None:
            return
        own = (self._done.is_set(), self._metrics, self._problem) if is_first() else None
        is_done, metrics, problem = broadcast_object(own)  # type: ignore[misc]
        if not is_done:
            return
        step, self.step = self.step, None
        if problem is not None:
            name, message = problem
            if name == LostWeights.__name__:
                raise RanksAgain(f"validation of step {step}: {message}")
            raise BY_NAME[name](message)
        self.on_end(Ended(step, metrics))

    def wait(self, present: int, between: Callable[[], None]) -> None:
        """Return when nothing is being validated; `between` is called meanwhile, and may raise. `present`: the step of
        the present weights, which an engine that died gets."""
        while self.step is not None:
            if is_first():
                self._done.wait(_POLL_SECONDS)
            self._beat()
            self.check()
            between()
            if self.step is not None and broadcast_object(self._fleet.is_stale if is_first() else None):
                self._resync(present)

    def _run(self, step: int, asked: Sequence[Future[Group]]) -> None:
        """Score groups as they come; on the first rank."""
        began = time.perf_counter()
        try:
            scored: dict[Future[Group], ScoredGroup] = {}
            waiting = set(asked)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                ordered = [each for each in asked if each in done]
                groups = self._completions.scored([each.result() for each in ordered])
                scored |= dict(zip(ordered, groups, strict=True))
            metrics = self._completions.told(step, [scored[each] for each in asked])
            self._metrics = {**metrics, "time/validate": time.perf_counter() - began}
        except LostWeights as error:
            self._problem = LostWeights.__name__, str(error)
        except CosmosError as error:
            self._problem = by_name(error)
        except Exception as error:
            logger.exception("validation of step %d", step)
            name, message = by_name(error)
            self._problem = name, f"validation of step {step}: {message}"
        self._done.set()


def is_possible(recipe: Any) -> bool:
    """Return whether validation can go beside the training: engines are apart, a checkpoint says where to go on if
    they die, and it is the trained weights that are measured."""
    train = recipe.train
    return bool(
        train.train_policy.has_rollouts
        and recipe.mode == "disaggregated"
        and train.ckpt.enable_checkpoint
        and not train.ema_enable
    )
