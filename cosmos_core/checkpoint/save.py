"""Checkpoints of a training: one transaction each, written while training goes on, the newest few kept.

`step_<N>/policy/` holds safetensors shards (torch.distributed.checkpoint), `extra.json`, and `manifest.json`, written
last. One rank; nothing here decides when to save.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from cosmos_core.checkpoint import resume
from cosmos_core.checkpoint.best import BEST, Best
from cosmos_core.checkpoint.disk import saving
from cosmos_core.checkpoint.resume import EXTRA, MANIFEST, saved_steps, step_folder
from cosmos_core.checkpoint.state import TrainState, named_tensors
from cosmos_core.parallel.fsdp import on_first
from cosmos_core.parallel.mesh import from_first, is_alone, is_first
from cosmos_core.run.files import read_json, replaced_folder, sha256, write_json, write_text

# DCP builds the whole of a file in memory before it writes it.
_FILE_BYTES = 2 << 30
_UNFINISHED = re.compile(r"\.(step_\d+)\.\d+\.(tmp|old)")

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and finds the checkpoints in one folder; the only writer there."""

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        max_keep: int,
        asynchronous: bool,
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        """`max_keep` -1 keeps all. The thread that wrote a checkpoint calls `on_saved(step)` when it is complete."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._max_keep = max_keep
        self._on_saved = on_saved
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            _settle_unfinished(folder)

    def save(self, step: int, state: TrainState, best: Best | None = None) -> None:
        """Save the state after `step` steps; `best` is kept and named from then on.

        Asynchronous: returns once the state is copied, after the save before is done.

        Raises:
            StageFailed: this save, or the asynchronous one before, met a full or broken disk.
        """
        self.wait()
        tensors = {name: tensor.detach() for name, tensor in named_tensors(state).items()}
        if not is_alone():
            tensors = on_first(tensors)
            if not is_first():
                return
        extra = json.dumps(state.extra)
        if self._writer is None:
            self._write(step, tensors, extra, best)
        else:
            # The snapshot: the optimizer changes the live tensors in place while the writer reads.
            copies = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            self._pending = self._writer.submit(self._write, step, copies, extra, best)

    def wait(self) -> None:
        """Return when nothing is being written, on every rank.

        Raises:
            StageFailed: the last asynchronous save failed.
        """
        self._drain()
        from_first(None)  # a rank that went on to its end would take the writing one with it

    def latest(self) -> int | None:
        """The newest step that can be continued from; None when there is none."""
        return from_first(resume.newest_whole(self._folder, self._fingerprint) if is_first() else None)

    def load_latest(self, state: TrainState) -> int | None:
        """Fill `state` from the newest whole checkpoint and return its step; None when there is none.

        Raises:
            ModelError: the checkpoint is of another model, or of Cosmos-RL.
        """
        return resume.load_latest(self._folder, state, self._fingerprint)

    def name_best(self, best: Best | None) -> None:
        """Say in `best.json`, beside the folder of checkpoints, which step it is; None: there is none."""
        file = self._folder.parent / BEST
        if best is not None and is_first():
            write_json(file, asdict(best))
        elif is_first():
            file.unlink(missing_ok=True)

    def close(self) -> None:
        """`wait`, then end the writer thread."""
        try:
            self._drain()
        finally:
            if self._writer is not None:
                self._writer.shutdown()

    def _drain(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: dict[str, torch.Tensor], extra: str, best: Best | None) -> None:
        target = step_folder(self._folder, step)
        with (
            saving(f"checkpoint {target.name} in {self._folder}", self._what_is_left),
            replaced_folder(target) as building,
        ):
            policy = building / "policy"
            policy.mkdir()
            _write_tensors(policy, tensors)
            write_text(policy / EXTRA, extra)
            written = sorted(policy.iterdir())
            manifest = {
                "step": step,
                "fingerprint": self._fingerprint,
                "created": time.time(),
                "versions": {"torch": torch.__version__, "numpy": np.__version__},
                "files": {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in written},
            }
            write_json(policy / MANIFEST, manifest)
        logger.info("saved checkpoint %s", target)
        with saving(f"{BEST} in {self._folder.parent}", self._what_is_left):
            self.name_best(best)
        self._prune(step, best)
        if self._on_saved is not None:
            self._on_saved(step)

    def _prune(self, newest: int, best: Best | None) -> None:
        """Delete what `max_keep` does not cover, when the checkpoint just written reads back whole.

        A later step is one that was passed over at the start; another configuration's checkpoints are not ours.
        Neither is counted or deleted.
        """
        if self._max_keep == -1:
            return
        ours = [step for step in saved_steps(self._folder) if step <= newest and self._is_ours(step)]
        too_many = [step for step in ours[: -self._max_keep] if best is None or step != best.step]
        if too_many and resume.problem(self._folder, newest, self._fingerprint) is None:
            for step in too_many:
                # Renamed first: a kill half-way must not leave a step that looks damaged.
                doomed = self._folder / f".step_{step}.{os.getpid()}.tmp"
                os.rename(step_folder(self._folder, step), doomed)
                shutil.rmtree(doomed)

    def _is_ours(self, step: int) -> bool:
        manifest = read_json(step_folder(self._folder, step) / "policy" / MANIFEST)
        return isinstance(manifest, dict) and manifest.get("fingerprint") == self._fingerprint

    def _what_is_left(self) -> str:
        whole = resume.newest_whole(self._folder, self._fingerprint)
        return "there is no earlier checkpoint" if whole is None else f"the checkpoint of step {whole} is intact"


def _write_tensors(policy: Path, tensors: dict[str, torch.Tensor]) -> None:
    file_of, index, size = {}, 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            index, size = index + 1, 0
        file_of[name] = index
        size += tensor.nbytes
    writer = dcp.HuggingFaceStorageWriter(str(policy), fqn_to_index_mapping=file_of, save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)


def _settle_unfinished(folder: Path) -> None:
    """Finish what a killed writer left: half-built folders go, a checkpoint moved aside for a new one comes back."""
    for path in list(folder.iterdir()):
        match = _UNFINISHED.fullmatch(path.name)
        if match and match[2] == "old" and not (folder / match[1]).exists():
            os.rename(path, folder / match[1])
        elif match:
            shutil.rmtree(path)
