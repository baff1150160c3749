"""Checkpoints of a training: written atomically in the background, with a limit on their number.

`step_<N>/policy/` holds a safetensors file and a JSON file per rank, and `manifest.json`, which is written last. Each
rank writes its shard of every tensor, hashes the bytes while writing, and sends the digests to the first rank, which
commits the checkpoint. The caller decides when to save.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cosmos_core.checkpoint import resume
from cosmos_core.checkpoint.best import BEST_STEP_FILE, BestStep
from cosmos_core.checkpoint.rank_files import LocalTensor, select_owned_tensors, write_rank_files
from cosmos_core.checkpoint.resume import MANIFEST_FILE, saved_steps, step_folder
from cosmos_core.checkpoint.state import TrainState, json_values, named_tensors
from cosmos_core.errors import StageFailed
from cosmos_core.models.disk import translate_disk_errors
from cosmos_core.parallel import exchange
from cosmos_core.parallel.mesh import broadcast_object, is_first_rank, is_single_rank
from cosmos_core.run.files import replace_folder, write_json

_UNFINISHED_FOLDER_REGEX = re.compile(r"\.(step_\d+)\.(?:\d+|parts)\.(tmp|old)")
_SLOWEST_RANK_TIMEOUT = timedelta(hours=6)
"""Timeout of the collective in which ranks wait for the slowest rank to finish its files of a checkpoint."""

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writer and reader of all checkpoints of a training, in a folder to which no other process writes. All public
    methods are collective: every rank calls them."""

    def __init__(
        self,
        checkpoint_folder: Path,
        *,
        fingerprint: str,
        max_keep: int,
        is_async: bool,
        on_saved: Callable[[int], None] | None = None,
        send_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the folder, and clean up files that a killed process left in it. `fingerprint` is that of the
        configuration, recorded in each manifest. `max_keep`: maximum number of checkpoints; -1: no limit. `is_async`:
        whether a background thread writes checkpoints. When a checkpoint is complete, the first rank calls `on_saved`
        with its step. `send_heartbeat` is called before each file of a loaded checkpoint is hashed."""
        self._folder, self._fingerprint, self._max_keep = checkpoint_folder, fingerprint, max_keep
        self._on_saved, self._send_heartbeat = on_saved, send_heartbeat
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if is_async else None
        self._pending_save: Future[None] | None = None
        # Steps whose files this process wrote or verified; hashing them again at a stop could exceed the grace period.
        self._intact_steps: set[int] = set()
        should_pin_memory = is_async and torch.cuda.is_available()
        self._stager: Any = DefaultStager(StagingOptions(use_shared_memory=False)) if should_pin_memory else None
        # Collectives of the writer threads overlap with those of the training, so they need a separate process group.
        is_distributed = not is_single_rank()
        self._process_group = dist.new_group(backend="gloo", timeout=_SLOWEST_RANK_TIMEOUT) if is_distributed else None
        if is_first_rank():
            checkpoint_folder.mkdir(parents=True, exist_ok=True)
            for path in list(checkpoint_folder.iterdir()):
                name_match = _UNFINISHED_FOLDER_REGEX.fullmatch(path.name)
                if name_match and name_match[2] == "old" and not (checkpoint_folder / name_match[1]).exists():
                    # Restore a complete checkpoint that the killed process had moved away to replace it.
                    os.rename(path, checkpoint_folder / name_match[1])
                elif name_match:
                    shutil.rmtree(path, ignore_errors=True)

    def save(self, step: int, train_state: TrainState, best_step: BestStep | None = None) -> None:
        """Save the training state after `step` steps. Also write `best_step`, the best step so far, to `best.json`; the
        checkpoint of that step is not deleted. In asynchronous mode, return after the previous save has ended and the
        state is copied. Raise `StageFailed` if this save, or the previous asynchronous one, failed because a disk is
        full or broken."""
        self.wait()
        if is_first_rank():
            shutil.rmtree(self._temporary_folder(step), ignore_errors=True)
        tensors = select_owned_tensors({name: tensor.detach() for name, tensor in named_tensors(train_state).items()})
        state_json = json.dumps(json_values(train_state))
        if self._executor is None:
            self._write_files(step, tensors, state_json, best_step)
        else:  # the writer thread gets copies, because the optimizer changes the tensors in place
            host_tensors = self._copy_to_host(tensors)
            self._pending_save = self._executor.submit(self._write_files, step, host_tensors, state_json, best_step)

    def wait(self) -> None:
        """Wait until no rank is writing a checkpoint; raise a `StageFailed` if the last asynchronous save failed."""
        self._wait_for_pending_save()
        broadcast_object(None)  # a barrier: if one rank exited now, ranks that are still writing files would be killed

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, from which training can resume; None: no checkpoint."""
        return broadcast_object(self._newest_complete_step() if is_first_rank() else None)

    def load_latest(self, train_state: TrainState) -> int | None:
        """Load the newest complete checkpoint into `train_state` and return its step; None: no checkpoint. Raise a
        `ModelError` if it is of another model, or was written by Cosmos-RL."""
        step = resume.newest_complete_step_on_ranks(self._folder, self._fingerprint, self._send_heartbeat)
        if step is not None:
            resume.load_state(train_state, step_folder(self._folder, step) / "policy")
            self._intact_steps.add(step)
        return step

    def write_best_step(self, best_step: BestStep | None) -> None:
        """Write `best_step` to the file `best.json` next to the folder of the checkpoints; remove this file if
        `best_step` is None, or if the checkpoint of the best step is gone."""
        best_step_file = self._folder.parent / BEST_STEP_FILE
        if best_step is not None and is_first_rank() and step_folder(self._folder, best_step.step).exists():
            write_json(best_step_file, asdict(best_step))
        elif is_first_rank():
            best_step_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for a pending asynchronous save of a checkpoint on this rank, then stop the thread that writes
        checkpoints."""
        try:
            self._wait_for_pending_save()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            if self._stager is not None:
                self._stager.close()

    def _wait_for_pending_save(self) -> None:
        pending_save, self._pending_save = self._pending_save, None
        if pending_save is not None:
            pending_save.result()

    def _write_files(
        self, step: int, tensors: dict[str, LocalTensor], state_json: str, best_step: BestStep | None
    ) -> None:
        """Write this rank's files of a checkpoint, and wait until the files of all ranks are on the disk. The first
        rank then commits the checkpoint, records the best step, deletes old checkpoints, and calls `on_saved`. If the
        disk of a rank is full or broken, all ranks raise the same `StageFailed`."""
        temporary_folder, checkpoint_name = self._temporary_folder(step), f"checkpoint step_{step} in {self._folder}"
        file_records, error_message = dict[str, dict[str, object]](), ""
        try:
            with translate_disk_errors(checkpoint_name, self._describe_newest_complete):
                file_records = write_rank_files(temporary_folder, tensors, state_json)
        except StageFailed as error:
            error_message = str(error)
        records_and_error_by_rank = [(file_records, error_message)]
        if self._process_group is not None:
            records_and_error_by_rank = exchange.all_gather((file_records, error_message), self._process_group)
        try:
            if error_message := next((rank_error for _, rank_error in records_and_error_by_rank if rank_error), ""):
                raise StageFailed(error_message)
            if not is_first_rank():
                return
            with translate_disk_errors(checkpoint_name, self._describe_newest_complete):
                self._commit_checkpoint(step, [rank_records for rank_records, _ in records_and_error_by_rank])
        finally:
            if is_first_rank():
                shutil.rmtree(temporary_folder, ignore_errors=True)
        with translate_disk_errors(f"{BEST_STEP_FILE} in {self._folder.parent}", self._describe_newest_complete):
            self.write_best_step(best_step)
        self._delete_old_checkpoints(step, best_step)
        if self._on_saved is not None:
            self._on_saved(step)

    def _copy_to_host(self, tensors: dict[str, LocalTensor]) -> dict[str, LocalTensor]:
        """Return copies of the tensors in host memory. Copies from a GPU are made on a separate stream into pinned
        memory, which the next save reuses."""
        if self._stager is None:
            return {name: shard._replace(tensor=shard.tensor.to("cpu", copy=True)) for name, shard in tensors.items()}
        torch.cuda.current_stream().synchronize()  # the stager's stream would not wait for the current stream
        host_tensors = self._stager.stage({name: shard.tensor for name, shard in tensors.items()}).result()
        return {name: shard._replace(tensor=host_tensors[name]) for name, shard in tensors.items()}

    def _commit_checkpoint(self, step: int, records_by_rank: list[dict[str, Any]]) -> None:
        """Move the files of all ranks into the folder of the checkpoint, and write its manifest. `records_by_rank` has,
        for each rank, the size and digest of its files by name."""
        final_folder = step_folder(self._folder, step)
        with replace_folder(final_folder) as temporary_folder:
            policy_folder = temporary_folder / "policy"
            self._temporary_folder(step).rename(policy_folder)
            manifest = {
                "step": step,
                "fingerprint": self._fingerprint,
                "created": time.time(),
                "versions": {"torch": torch.__version__, "numpy": np.__version__},
                "ranks": len(records_by_rank),
                "files": {name: file_record for records in records_by_rank for name, file_record in records.items()},
            }
            write_json(policy_folder / MANIFEST_FILE, manifest)
        self._intact_steps.add(step)
        logger.info("saved checkpoint %s", final_folder)

    def _temporary_folder(self, step: int) -> Path:
        return self._folder / f".step_{step}.parts.tmp"

    def _delete_old_checkpoints(self, newest_step: int, best_step: BestStep | None) -> None:
        """Delete the oldest checkpoints beyond `max_keep`, except that of the best step. Delete nothing if the new
        checkpoint, of step `newest_step`, is not complete. Checkpoints of later steps and of other configurations are
        neither counted nor deleted."""
        if self._max_keep == -1:
            return
        policy_folders = {
            n: step_folder(self._folder, n) / "policy" for n in saved_steps(self._folder) if n <= newest_step
        }
        manifests = {n: resume.read_manifest(p) for n, p in policy_folders.items()}
        steps_of_this_training = [n for n, each in manifests.items() if each.get("fingerprint") == self._fingerprint]
        old_steps = steps_of_this_training[: -self._max_keep]
        deleted_steps = [step for step in old_steps if best_step is None or step != best_step.step]
        if not deleted_steps or resume.resume_obstacle(self._folder, newest_step, self._fingerprint, skips_hash=True):
            return
        for step in deleted_steps:
            # The rename is atomic, so a killed process leaves no partially deleted checkpoint.
            deleted_folder = self._folder / f".step_{step}.{os.getpid()}.tmp"
            try:
                os.rename(step_folder(self._folder, step), deleted_folder)
                shutil.rmtree(deleted_folder)
            except OSError as error:  # raised, for example as EBUSY on NFS, if other processes still read files
                logger.warning("checkpoint step_%d in %s cannot be deleted: %s", step, self._folder, error)

    def _newest_complete_step(self) -> int | None:
        def check_resume(step: int) -> str | None:
            return resume.resume_obstacle(self._folder, step, self._fingerprint, skips_hash=step in self._intact_steps)

        return resume.newest_complete_step(self._folder, saved_steps(self._folder), check_resume)

    def _describe_newest_complete(self) -> str:
        step = self._newest_complete_step()
        return "there is no earlier checkpoint" if step is None else f"the checkpoint of step {step} is intact"
