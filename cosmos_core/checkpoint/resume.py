"""Selection of the newest complete checkpoint of a training, and loading of checkpoints.

Reading a checkpoint never runs code: tensors are safetensors, everything else is JSON. The native format of torch's
distributed checkpoint (DCP) has pickled metadata, so the safetensors storage of DCP is used instead.
"""

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from cosmos_core.checkpoint.rank_files import FIRST_RANK_JSON_FILE, json_file_name
from cosmos_core.checkpoint.state import TrainState, allocate_tensors, load_tensors, restore_json_values
from cosmos_core.errors import ModelError
from cosmos_core.models.disk import unwrap_checkpoint_errors
from cosmos_core.parallel.mesh import broadcast_object, first_error_of_ranks, is_first_rank, num_ranks, rank_number
from cosmos_core.run.files import read_json_object, sha256

MANIFEST_FILE = "manifest.json"
FINGERPRINT_MISMATCH_REASON = "it belongs to another configuration"
_REMEDY = "name another one, or none"
_STEP_FOLDER_PATTERN = re.compile(r"step_(\d+)")

logger = logging.getLogger(__name__)
# Hide DCP's warning at each load: ranks read tensors without collectives on purpose (`no_dist=True`).
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of train step `step` in `folder`."""
    return folder / f"step_{step}"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoint folders in `folder`, complete or not, in ascending order."""
    folder_names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name_match[1]) for name_match in map(_STEP_FOLDER_PATTERN.fullmatch, folder_names) if name_match)


def resume_obstacle(folder: Path, step: int, fingerprint: str | None, *, skips_hash: bool = False) -> str | None:
    """Return the reason why training cannot resume from the checkpoint of a step in `folder`; None: it can.
    `fingerprint` is that of the configuration to which the checkpoint must belong; None: any. `skips_hash`: compare
    only the sizes of the files, for example because this process has already computed their digests."""
    policy_folder = step_folder(folder, step) / "policy"
    manifest = read_manifest(policy_folder)
    if not manifest:
        return f"{MANIFEST_FILE} is missing or damaged: it was not written to the end"
    if fingerprint is not None and manifest.get("fingerprint") != fingerprint:
        return FINGERPRINT_MISMATCH_REASON
    if manifest.get("step") != step:
        return f"{MANIFEST_FILE} is of step {manifest.get('step')}"
    file_records, num_saved_ranks = manifest.get("files"), manifest.get("ranks", 1)
    is_manifest_complete = (
        isinstance(file_records, dict)
        and FIRST_RANK_JSON_FILE in file_records
        and all(isinstance(record, dict) and record.keys() >= {"size", "sha256"} for record in file_records.values())
    )
    if not is_manifest_complete or not isinstance(num_saved_ranks, int) or num_saved_ranks < 1:
        return f"{MANIFEST_FILE} is damaged: it does not say how many ranks saved which files, of which size and digest"
    problems = (_find_file_problem(policy_folder / n, r, skips_hash=skips_hash) for n, r in manifest["files"].items())
    return next(filter(None, problems), None)


def read_manifest(policy_folder: Path) -> dict[str, Any]:
    """Return the content of the file `manifest.json` in the folder `policy_folder` of a checkpoint; empty if the file
    is missing or damaged."""
    return read_json_object(policy_folder / MANIFEST_FILE)


def newest_complete_step(folder: Path, steps: Sequence[int], check_resume: Callable[[int], str | None]) -> int | None:
    """Return the newest of `steps`, which ascend, whose checkpoint in `folder` is intact, so that `check_resume(step)`
    returns no reason against it; None: there is none. For each damaged newer checkpoint, the first rank logs a warning
    with the reason, or raises a `ModelError` if the checkpoint has pickled shards of Cosmos-RL, which are not read."""
    for step in reversed(steps):
        if is_first_rank():
            refuse_pickled_shards(step_folder(folder, step) / "policy")
        obstacle = check_resume(step)
        if obstacle is None:
            return step
        if is_first_rank():
            logger.warning("checkpoint %s is passed over: %s", step_folder(folder, step), obstacle)
    return None


def newest_complete_step_on_ranks(folder: Path, fingerprint: str, send_heartbeat: Callable[[], None]) -> int | None:
    """Return the step of the newest intact checkpoint in `folder` of the configuration with `fingerprint`, the same on
    all ranks, which call this function together; None: there is none. `send_heartbeat` is called before each file is
    hashed."""
    steps = broadcast_object(saved_steps(folder))
    check_resume = partial(resume_obstacle_on_ranks, folder, fingerprint=fingerprint, send_heartbeat=send_heartbeat)
    return newest_complete_step(folder, steps, check_resume)


def resume_obstacle_on_ranks(
    folder: Path, step: int, fingerprint: str | None, send_heartbeat: Callable[[], None]
) -> str | None:
    """Return the result of `resume_obstacle` for the checkpoint of a step, the same on all ranks, which call this
    function together. Each rank hashes only some of the files, because a single rank would take longer than the timeout
    of a collective. `send_heartbeat` is called before each."""
    reason = broadcast_object(resume_obstacle(folder, step, fingerprint, skips_hash=True) if is_first_rank() else None)
    policy_folder = step_folder(folder, step) / "policy"
    return reason or first_error_of_ranks(find_damaged_file(policy_folder, rank_number(), num_ranks(), send_heartbeat))


def find_damaged_file(policy_folder: Path, rank: int, num_ranks: int, send_heartbeat: Callable[[], None]) -> str | None:
    """Return a text about the first file of a checkpoint whose size or digest differs from the manifest; None: no file
    differs. Rank `rank` checks only every `num_ranks`-th file, and calls `send_heartbeat` before each."""
    if (file_records := read_manifest(policy_folder).get("files")) is None:
        return f"{MANIFEST_FILE} is gone"
    for name, file_record in sorted(file_records.items())[rank::num_ranks]:
        send_heartbeat()
        if file_problem := _find_file_problem(policy_folder / name, file_record, skips_hash=False):
            return file_problem
    return None


def _read_step_number(policy_folder: Path) -> int:
    if match := _STEP_FOLDER_PATTERN.fullmatch(policy_folder.parent.name):
        return int(match[1])
    raise ModelError(f"checkpoint {policy_folder}: it is in no folder step_N, which names its step; {_REMEDY}")


def check_checkpoint(policy_folder: Path) -> None:
    """Raise the `ModelError` of `load_checkpoint` if a file of the checkpoint is missing or of another size; files are
    not hashed, and tensors are not compared with a model."""
    step = _read_step_number(policy_folder)
    refuse_pickled_shards(policy_folder)
    if obstacle := resume_obstacle(policy_folder.parent.parent, step, None, skips_hash=True):
        raise ModelError(f"checkpoint {policy_folder}: {obstacle}; {_REMEDY}")


def load_checkpoint(
    policy_folder: Path, train_state: TrainState, send_heartbeat: Callable[[], None] = lambda: None
) -> int:
    """Load the checkpoint in `policy_folder` (`.../step_N/policy`) into `train_state` on every rank, and return its
    step N. The checkpoint can be of a run with other settings. Call `send_heartbeat` before each file is hashed. Raise
    `ModelError` if the checkpoint is damaged, of another model, written by Cosmos-RL, or deleted meanwhile."""
    step = _read_step_number(policy_folder)
    refuse_pickled_shards(policy_folder)
    if obstacle := resume_obstacle_on_ranks(policy_folder.parent.parent, step, None, send_heartbeat):
        raise ModelError(f"checkpoint {policy_folder}: {obstacle}; {_REMEDY}")
    try:
        load_state(train_state, policy_folder)
    except Exception as error:  # another run that still trains may have deleted its checkpoint
        if policy_folder.is_dir():
            raise
        raise ModelError(f"checkpoint {policy_folder}: {policy_folder.parent.name} is gone; {_REMEDY}") from error
    return step


def load_state(train_state: TrainState, policy_folder: Path) -> None:
    """Load the intact checkpoint in the folder `policy_folder` into `train_state` on every rank.
    `train_state.loop_state` becomes the values that this rank saved or, if the number of ranks has changed, those of
    the first rank with `rng` set to None. The random generators are not changed: call `restore_rng` after everything
    that reseeds them, such as the start of a rollout engine."""
    storage_reader = dcp.HuggingFaceStorageReader(str(policy_folder))
    saved_metadata: dict[str, Any] = storage_reader.read_metadata().state_dict_metadata
    shapes_and_dtypes = {name: (entry.size, entry.properties.dtype) for name, entry in saved_metadata.items()}
    tensors = allocate_tensors(train_state, shapes_and_dtypes)
    with unwrap_checkpoint_errors():
        dcp.load(tensors, storage_reader=storage_reader, no_dist=True)
    load_tensors(train_state, tensors)
    restore_json_values(train_state, _read_json_values(policy_folder), tensors)


def _read_json_values(policy_folder: Path) -> dict[str, Any]:
    """Return the JSON values that this rank saved in a checkpoint. If the number of ranks has changed, return the first
    rank's values without the states of its random generators."""
    num_saved_ranks, num_current_ranks = read_manifest(policy_folder).get("ranks", 1), num_ranks()
    rank_json_file = json_file_name(rank_number() if num_saved_ranks == num_current_ranks else 0)
    # A verified digest shows that the file is undamaged, so parsing it needs no error handling.
    saved_json_values: dict[str, Any] = json.loads((policy_folder / rank_json_file).read_bytes())
    if num_saved_ranks != num_current_ranks:
        log_message = "%s was saved by %d ranks, here are %d: random numbers begin anew"
        logger.info(log_message, policy_folder, num_saved_ranks, num_current_ranks)
        saved_json_values["rng"] = None
    return saved_json_values


def refuse_pickled_shards(policy_folder: Path) -> None:
    """Raise a `ModelError` if a folder holds a checkpoint of Cosmos-RL, whose pickled `.pth` files could run code when
    read."""
    if policy_folder.is_dir() and (pickled_shards := sorted(policy_folder.glob("*.pth"))):
        raise ModelError(
            f"{pickled_shards[0]} is a pickled checkpoint of Cosmos-RL, which could run any code when read; "
            "start from the safetensors folder of that run: policy.model_name_or_path = '.../safetensors/step_N'"
        )


def _find_file_problem(file: Path, file_record: dict[str, Any], *, skips_hash: bool) -> str | None:
    if os.path.isfile(file):  # unlike Path.is_file, os.path.isfile returns False for an invalid file name
        with suppress(FileNotFoundError):  # another run that still trains may delete its checkpoint now
            if (size := file.stat().st_size) != file_record["size"]:
                return f"{file.name} has {size} bytes instead of {file_record['size']}"
            return None if skips_hash or sha256(file) == file_record["sha256"] else f"{file.name} was altered"
    return f"{file.name} is gone"
