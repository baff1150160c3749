"""The GPUs of this machine, divided among the stages that run on it at the same time.

A stage holds a lock for each of its GPUs, which its worker inherits: they are free again when the last of its processes
has ended, however that came about. Stages without a mesh (prepare, export, a custom one) see all GPUs and hold none,
and of other users of the machine nothing is known.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.facts import gpu_entries
from cosmos_core.run.files import user_cache
from cosmos_core.run.lock import Lock
from cosmos_core.types import StageKind

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def num_gpus(kind: StageKind, recipe: Recipe) -> int:
    """Return the GPUs of this machine that a stage needs; those of a Ray cluster are for Ray to give."""
    total = recipe.num_gpus(has_rollouts=kind.feed == "rollouts") if kind.has_mesh else 0
    return 0 if os.environ.get("RAY_ADDRESS") and total > 1 else total


@contextmanager
def held(count: int, while_waiting: Callable[[str], None]) -> Iterator[tuple[dict[str, str], Sequence[int]]]:
    """Hold so many GPUs, or all where there are fewer; give the variable that shows them to a worker, and the
    descriptors that it is to inherit. On a machine without GPUs, nothing.

    `while_waiting` is called with the reason, again and again, and may raise to give up.
    """
    entries = gpu_entries() if count else []
    if entries and (reason := _refusal()):
        logger.warning("stages that run at once may take the same GPUs: %s", reason)
        entries = []
    if not entries:
        yield {}, ()
        return
    with ExitStack() as stack:
        while not (locks := _locks(entries, min(count, len(entries)))):
            while_waiting(f"waits for {count} of the {len(entries)} GPUs of this machine, which other stages have")
        for lock in locks.values():
            stack.callback(lock.release)
        yield {_VISIBLE: ",".join(locks)}, [lock.descriptor for lock in locks.values()]


def _locks(entries: Sequence[str], count: int) -> dict[str, Lock]:
    """Lock so many GPUs, the first that are free; none, where there are not so many."""
    found: dict[str, Lock] = {}
    for entry in entries:
        if len(found) == count:
            break
        lock = Lock(user_cache() / "gpus" / f"{platform.node()}-{entry.replace('/', '-')}.lock")
        if lock.try_acquire():
            found[entry] = lock
        else:
            lock.release()
    if len(found) < count:
        for lock in found.values():
            lock.release()
        return {}
    return found


def _refusal() -> str:
    """Say why no lock can be held here, or nothing."""
    try:
        with Lock(user_cache() / "gpus" / f"{platform.node()}.lock") as lock:
            lock.try_acquire()
    except OSError as error:
        return str(error)
    return ""
