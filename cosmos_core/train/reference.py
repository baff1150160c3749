"""Log-probabilities of preference rows under the reference policy, which is the model that the stage starts from.

The log-probabilities are computed once, before the first step, and saved in `<stage>/reference/`. For pairs, training
then needs no copy of the reference weights, several epochs cost one pass, and a resumed stage uses the same bits. For
held-out rows, later stages can validate against the same reference.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_core.data.kinds.base import REFERENCE_BATCH_ROWS, PreparedRows
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import all_reduce_any, broadcast_object, is_first_rank
from cosmos_core.run.files import read_json, sha256, write_json
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.trainer import Trainer

REFERENCE_WEIGHTS = "reference"
"""Name under which the trainer keeps a copy of the weights of the reference policy; also the name of the stage's folder
with log-probabilities under these weights."""
_SAVE_INTERVAL_SECONDS = 60.0
_LOGPROB_COLUMNS = ("chosen", "rejected")
"""Keys in the saved JSON file for the log-probabilities of the first and the second sample of each row. Rows with a
label (KTO) use the same keys; their second sample has the response of another row."""

logger = logging.getLogger(__name__)


def compute_pair_logprobs(trainer: Trainer, rows: PreparedRows, row_positions: Sequence[int]) -> np.ndarray:
    """Return the summed log-probabilities of both samples of each row at `row_positions`: shape (N, 2), float64."""
    sample_outputs = trainer.evaluate(rows.samples(row_positions), size=trainer.samples_per_pass)
    logprob_sums = [row["logprobs"].sum(dtype=torch.float64) for row in sample_outputs]
    return torch.stack(logprob_sums).cpu().numpy().reshape(-1, 2)


def reference_logprobs(
    workspace: Workspace, trainer: Trainer, rows: PreparedRows, split_name: str, positions: np.ndarray, fingerprint: str
) -> np.ndarray:
    """Return the log-probabilities of all rows under the reference policy, shape (rows, 2), NaN outside `positions`.
    Reuse values that an earlier attempt with this `fingerprint` saved. If a signal requests a stop, save the values and
    raise `Preempted`."""
    workspace.progress.phase(REFERENCE_WEIGHTS)
    logprobs_file = workspace.path / REFERENCE_WEIGHTS / f"{split_name}.json"
    required_fields = {"fingerprint": fingerprint, "rows": sha256(rows.path)}
    saved_logprobs = _read_saved_logprobs(logprobs_file, required_fields, len(rows)) if is_first_rank() else np.empty(0)
    logprobs: np.ndarray = broadcast_object(torch.from_numpy(saved_logprobs)).numpy()
    last_save_time = time.monotonic()
    for start in range(0, len(positions), REFERENCE_BATCH_ROWS):
        workspace.progress.advance(start, len(positions))
        chunk_positions = positions[start : start + REFERENCE_BATCH_ROWS]
        if not np.isnan(logprobs[chunk_positions]).any():
            continue
        if all_reduce_any(workspace.stop_requested):
            _save_logprobs(logprobs_file, required_fields, logprobs)
            raise Preempted(f"stopped with the reference log-probabilities of {start} of {len(positions)} rows")
        logprobs[chunk_positions] = compute_pair_logprobs(trainer, rows, chunk_positions.tolist())
        if time.monotonic() - last_save_time > _SAVE_INTERVAL_SECONDS:
            _save_logprobs(logprobs_file, required_fields, logprobs)
            last_save_time = time.monotonic()
    _save_logprobs(logprobs_file, required_fields, logprobs)
    return logprobs


def load_earlier_reference(input_folders: Iterable[Path], rows: PreparedRows, split_name: str) -> np.ndarray:
    """Return the reference log-probabilities that a training saved for the same rows in one of the folders of the input
    stages. Raise `ConfigError` if no folder has them."""
    required_fields = {"rows": sha256(rows.path)}
    for folder in input_folders:
        logprobs_file = folder / REFERENCE_WEIGHTS / f"{split_name}.json"
        if not np.isnan(logprobs := _read_saved_logprobs(logprobs_file, required_fields, len(rows))).any():
            return logprobs
    raise ConfigError(
        "no stage in `after` has log-probabilities of the held-out rows under a reference; name the stage that "
        "trained with the same rows and validation.enable = true there, or take a loss without a reference "
        "(train.train_policy.dpo.reference_free = true)"
    )


def _read_saved_logprobs(logprobs_file: Path, required_fields: dict[str, str], num_rows: int) -> np.ndarray:
    saved_json = read_json(logprobs_file)
    if not isinstance(saved_json, dict) or any(
        saved_json.get(name) != value for name, value in required_fields.items()
    ):
        return np.full((num_rows, 2), np.nan)
    return np.array([saved_json[name] for name in _LOGPROB_COLUMNS], dtype=np.float64).T


def _save_logprobs(logprobs_file: Path, required_fields: dict[str, str], logprobs: np.ndarray) -> None:
    if not is_first_rank():
        return
    logprobs_file.parent.mkdir(exist_ok=True)
    logprob_columns: dict[str, Any] = {
        name: [None if np.isnan(v) else v for v in logprobs[:, i].tolist()] for i, name in enumerate(_LOGPROB_COLUMNS)
    }
    write_json(logprobs_file, required_fields | logprob_columns)
    logger.info("reference log-probabilities of %d rows in %s", int((~np.isnan(logprobs[:, 0])).sum()), logprobs_file)
