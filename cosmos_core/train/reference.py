"""Log-probabilities of preference rows under the reference policy, which is the model that the stage starts from.

The log-probabilities are computed once, before the first step, and saved in `<stage>/reference/`. For pairs, training
then needs no copy of the reference weights, several epochs cost one pass, and a resumed stage uses the same bits. For
held-out rows, later stages can validate against the same reference.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.base import REFERENCE_BATCH_ROWS, PreparedRows
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import all_reduce_any, broadcast_object, is_first_rank
from cosmos_core.run.files import read_json, sha256, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.train.trainer import Trainer

REFERENCE_WEIGHTS = "reference"
"""Name of the set of weights of the reference policy, and of the folder in the stage with the log-probabilities under
these weights."""
_SAVE_INTERVAL_SECONDS = 60.0
_LOGPROB_COLUMNS = ("chosen", "rejected")
"""Names of the columns with the log-probabilities of a row's two samples; a row with a label has a labelled and a
mismatched sample under the same names."""

logger = logging.getLogger(__name__)


def compute_pair_logprobs(trainer: Trainer, rows: PreparedRows, positions: Sequence[int], recipe: Recipe) -> np.ndarray:
    """Return the summed log-probabilities of both samples of each row at `positions`: shape (N, 2), float64."""
    samples_per_pass = recipe.train.rows_per_pass * recipe.train.train_policy.num_sequences_per_row
    sample_outputs = trainer.evaluate(rows.samples(positions), size=samples_per_pass)
    logprob_sums = [row["logprobs"].sum(dtype=torch.float64) for row in sample_outputs]
    return torch.stack(logprob_sums).cpu().numpy().reshape(-1, 2)


def reference_logprobs(
    stage: Stage, trainer: Trainer, rows: PreparedRows, split_name: str, positions: np.ndarray
) -> np.ndarray | None:
    """Return the log-probabilities of all rows under the reference policy, shape (rows, 2), NaN outside `positions`;
    None if the algorithm needs no reference policy. Reuse values that an earlier attempt saved. If a signal requests a
    stop, save the values and raise `Preempted`."""
    if not stage.recipe.train.train_policy.saves_reference_logprobs:
        return None
    stage.progress.phase(REFERENCE_WEIGHTS)
    file = stage.path / REFERENCE_WEIGHTS / f"{split_name}.json"
    cache_key = {"fingerprint": stage.checkpoint_fingerprint, "rows": sha256(rows.path)}
    logprobs: np.ndarray = broadcast_object(
        torch.from_numpy(_read_saved_logprobs(file, cache_key, len(rows))) if is_first_rank() else torch.empty(0)
    ).numpy()
    last_save_time = time.monotonic()
    for start in range(0, len(positions), REFERENCE_BATCH_ROWS):
        stage.progress.advance(start, len(positions))
        chunk_positions = positions[start : start + REFERENCE_BATCH_ROWS]
        if not np.isnan(logprobs[chunk_positions]).any():
            continue
        if all_reduce_any(stage.stop_requested):
            _save_logprobs(file, cache_key, logprobs)
            raise Preempted(f"stopped with the reference log-probabilities of {start} of {len(positions)} rows")
        logprobs[chunk_positions] = compute_pair_logprobs(trainer, rows, chunk_positions.tolist(), stage.recipe)
        if time.monotonic() - last_save_time > _SAVE_INTERVAL_SECONDS:
            _save_logprobs(file, cache_key, logprobs)
            last_save_time = time.monotonic()
    _save_logprobs(file, cache_key, logprobs)
    return logprobs


def load_earlier_reference(stage: Stage, rows: PreparedRows, split_name: str) -> np.ndarray | None:
    """Return the reference log-probabilities that a training in an input stage saved for the same rows; None if the
    algorithm needs none. Raise `ConfigError` if no input stage saved any."""
    if not stage.recipe.train.train_policy.saves_reference_logprobs:
        return None
    cache_key = {"rows": sha256(rows.path)}
    for stage_result in stage.inputs.values():
        logprobs_file = Path(stage_result["path"]) / REFERENCE_WEIGHTS / f"{split_name}.json"
        if not np.isnan(logprobs := _read_saved_logprobs(logprobs_file, cache_key, len(rows))).any():
            return logprobs
    raise ConfigError(
        f"stage {stage.name!r} has no log-probabilities of its held-out rows under a reference; name the stage that "
        f"trained with the same rows and validation.enable = true in `after`, or take a loss without a reference "
        f"(train.train_policy.dpo.reference_free = true)"
    )


def _read_saved_logprobs(logprobs_file: Path, cache_key: dict[str, str], num_rows: int) -> np.ndarray:
    saved_values = read_json(logprobs_file)
    if not isinstance(saved_values, dict) or any(saved_values.get(name) != value for name, value in cache_key.items()):
        return np.full((num_rows, 2), np.nan)
    return np.array([saved_values[name] for name in _LOGPROB_COLUMNS], dtype=np.float64).T


def _save_logprobs(logprobs_file: Path, cache_key: dict[str, str], logprobs: np.ndarray) -> None:
    if not is_first_rank():
        return
    logprobs_file.parent.mkdir(exist_ok=True)
    logprob_columns: dict[str, Any] = {
        name: [None if np.isnan(v) else v for v in logprobs[:, i].tolist()] for i, name in enumerate(_LOGPROB_COLUMNS)
    }
    write_json(logprobs_file, cache_key | logprob_columns)
    logger.info("reference log-probabilities of %d rows in %s", int((~np.isnan(logprobs[:, 0])).sum()), logprobs_file)
