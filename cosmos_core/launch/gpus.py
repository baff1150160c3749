"""Allocate the GPUs of this machine to the stages that run at the same time.

A stage locks each of its GPUs, and its worker inherits the lock: a GPU is free again when the last process of the stage
has ended for any reason. Stages without a mesh (prepare, export, custom) see all GPUs and hold none.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.machine_properties import map_device_entries_to_uuids
from cosmos_core.run.files import user_cache_folder
from cosmos_core.run.lock import FileLock
from cosmos_core.run.state import update_state
from cosmos_core.types import StageKind

logger = logging.getLogger(__name__)

_VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_local_gpus(stage_kind: StageKind, recipe: Recipe) -> int:
    """Return the number of GPUs on this machine that a stage needs; 0 on a Ray cluster, where Ray allocates them."""
    num_reserved_gpus = count_reserved_gpus(stage_kind, recipe)
    uses_ray = num_reserved_gpus > 1 or (stage_kind.feed == "rollouts" and recipe.num_engines > 0)
    return 0 if os.environ.get("RAY_ADDRESS") and uses_ray else num_reserved_gpus


def count_reserved_gpus(stage_kind: StageKind, recipe: Recipe) -> int:
    """Return the number of GPUs that the placement of a stage assigns to its ranks and engines, on any machine; 0 for a
    stage without a mesh and without an engine. Without GPUs, each rank and each engine process counts as a GPU."""
    if stage_kind.has_engine:  # a diffusion model has one sampling process, on one GPU
        return recipe.rollout.parallelism.tp_size if recipe.policy.modality.has_text_engines else 1
    if stage_kind.reads_key("export.formats") and recipe.export.quantized_formats:
        return 1
    return recipe.num_gpus(has_rollouts=stage_kind.feed == "rollouts") if stage_kind.has_mesh else 0


def hold_stage_gpus(
    stage_kind: StageKind, recipe: Recipe, stage_path: Path
) -> AbstractContextManager[tuple[dict[str, str], Sequence[int]]]:
    """Return a context manager that holds the GPUs of a stage, as `hold_gpus` does; while it waits for GPUs, it writes
    the reason to the state file in `stage_path`. Raises `Preempted` if the run was stopped while waiting."""

    def report_waiting(waiting_reason: str) -> None:
        update_state(stage_path, state="waiting", error=waiting_reason)
        sleep_unless_stopping(1)

    # A disaggregated stage takes all free GPUs, so that `cosmos scale` can start more engines.
    holds_all_free_gpus = stage_kind.feed == "rollouts" and recipe.mode == "disaggregated"
    return hold_gpus(count_local_gpus(stage_kind, recipe), report_waiting, should_hold_all_free=holds_all_free_gpus)


@contextmanager
def hold_gpus(
    num_gpus: int, report_waiting: Callable[[str], None], *, should_hold_all_free: bool = False
) -> Iterator[tuple[dict[str, str], Sequence[int]]]:
    """Hold `num_gpus` GPUs (all GPUs if there are fewer) during the block; yield the environment variable that selects
    them and the lock descriptors that the worker inherits.

    With `should_hold_all_free`, hold all free GPUs. On a machine without GPUs, yield empty values. `report_waiting` is
    called with the reason, repeatedly, and may raise to stop waiting."""
    gpu_uuid_by_device = map_device_entries_to_uuids() if num_gpus else {}
    if gpu_uuid_by_device and (lock_error := _find_lock_error()):
        logger.warning("stages that run at once may take the same GPUs: %s", lock_error)
        gpu_uuid_by_device = {}
    if not gpu_uuid_by_device:
        yield {}, ()
        return
    num_machine_gpus = len(gpu_uuid_by_device)
    min_gpus = min(num_gpus, num_machine_gpus)
    max_gpus = num_machine_gpus if should_hold_all_free else min_gpus
    while not (gpu_locks := _lock_free_gpus(gpu_uuid_by_device, min_gpus, max_gpus)):
        report_waiting(f"waits for {num_gpus} of the {num_machine_gpus} GPUs of this machine, which other stages have")
    with ExitStack() as exit_stack:
        for gpu_lock in gpu_locks.values():
            exit_stack.callback(gpu_lock.release)
        yield {_VISIBLE_DEVICES_VARIABLE: ",".join(gpu_locks)}, [gpu_lock.descriptor for gpu_lock in gpu_locks.values()]


def _lock_free_gpus(gpu_uuid_by_device: Mapping[str, str], min_gpus: int, max_gpus: int) -> dict[str, FileLock]:
    """Lock the first free GPUs, at most `max_gpus`, and return the locks; none if fewer than `min_gpus` are free."""
    gpu_locks: dict[str, FileLock] = {}
    for device_entry, uuid in gpu_uuid_by_device.items():
        gpu_lock = FileLock(user_cache_folder() / "gpus" / f"{uuid.replace('/', '-')}.lock")
        if len(gpu_locks) < max_gpus and gpu_lock.try_acquire():
            gpu_locks[device_entry] = gpu_lock
        else:
            gpu_lock.release()
    if len(gpu_locks) >= min_gpus:
        return gpu_locks
    for gpu_lock in gpu_locks.values():
        gpu_lock.release()
    return {}


def _find_lock_error() -> str:
    """Return the error that prevents this user from locking files in the cache folder; empty if locks work."""
    try:
        with FileLock(user_cache_folder() / "gpus" / "tried.lock") as lock:
            lock.try_acquire()
            return ""
    except (OSError, ConfigError) as error:
        return str(error)
