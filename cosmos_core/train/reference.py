"""Log-probabilities of preference pairs under the reference policy, which is the model that the stage starts from.

They are computed once, before the first step, and saved in `<stage>/reference/`. Training then needs no copy of the
reference weights, several epochs cost one pass, and a resumed stage uses the same bits. Later stages read the files to
validate against the same reference.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.prepared import Pairs
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import any_on_ranks, broadcast_object, is_first
from cosmos_core.run.files import read_json, sha256, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import pair_samples
from cosmos_core.train.trainer import Trainer

NAME = "reference"
"""Name of the weights, and of the folder in the stage."""
CHUNK = 256
"""Number of pairs that are computed together; constant, because padding and so the result depend on the chunk."""
_SAVE_SECONDS = 60.0

logger = logging.getLogger(__name__)


def asks_once(recipe: Recipe) -> bool:
    """Return whether the algorithm needs the reference log-probabilities of each row only once, before the first
    step."""
    policy = recipe.train.train_policy
    return policy.scores_rows_once and NAME in policy.named_weights


def pair_logprobs(trainer: Trainer, pairs: Pairs, positions: np.ndarray, size: int) -> np.ndarray:
    """Return the log-probabilities of both responses of the pairs at `positions` under the current policy.

    The result has shape (N, 2), chosen then rejected, float64, summed over the trained tokens. A forward pass has
    `size` pairs.
    """
    samples = [sample for i in positions for sample in pair_samples(pairs, int(i), None)]
    rows = trainer.evaluate(samples, size=2 * size)
    sums = [row["logprobs"].sum(dtype=torch.float64) for row in rows]
    return torch.stack(sums).cpu().numpy().reshape(-1, 2)


def reference_logprobs(
    stage: Stage, trainer: Trainer, pairs: Pairs, split: str, positions: np.ndarray
) -> np.ndarray | None:
    """Return the reference log-probabilities of all pairs, shape (pairs, 2), NaN outside `positions`.

    None: the algorithm does not need them. Values that an earlier attempt has computed are read from its file.

    Raises:
        Preempted: a signal requested a stop; computed values are saved.
    """
    if not asks_once(stage.recipe):
        return None
    stage.progress.phase(NAME)
    file = stage.path / NAME / f"{split}.json"
    key = {"fingerprint": stage.checkpoint_fingerprint, "rows": sha256(pairs.path)}
    saved_before = torch.from_numpy(_saved(file, key, len(pairs))) if is_first() else torch.empty(0)
    logprobs = broadcast_object(saved_before).numpy()
    policy, saved = stage.recipe.train.train_policy, time.monotonic()
    for start in range(0, len(positions), CHUNK):
        stage.progress.advance(start, len(positions))
        chunk = positions[start : start + CHUNK]
        if not np.isnan(logprobs[chunk]).any():
            continue
        if any_on_ranks(stage.stop_requested):
            _save(file, key, logprobs)
            raise Preempted(f"stopped with the reference log-probabilities of {start} of {len(positions)} pairs")
        logprobs[chunk] = pair_logprobs(trainer, pairs, chunk, policy.mini_batch)
        if time.monotonic() - saved > _SAVE_SECONDS:
            _save(file, key, logprobs)
            saved = time.monotonic()
    _save(file, key, logprobs)
    return logprobs


def handed_on(stage: Stage, pairs: Pairs, split: str) -> np.ndarray | None:
    """Return the log-probabilities of these pairs that an earlier stage's training saved; None if none are needed.

    Raises:
        ConfigError: no input stage has saved them.
    """
    if not asks_once(stage.recipe):
        return None
    key = {"rows": sha256(pairs.path)}
    for result in stage.inputs.values():
        logprobs = _saved(Path(result["path"]) / NAME / f"{split}.json", key, len(pairs))
        if not np.isnan(logprobs).any():
            return logprobs
    raise ConfigError(
        f"stage {stage.name!r} has no log-probabilities of its held-out pairs under a reference; name the stage that "
        f"trained on the same pairs in `after`, or set train.train_policy.dpo.reference_free = true"
    )


def _saved(file: Path, key: dict[str, str], count: int) -> np.ndarray:
    content = read_json(file)
    if not isinstance(content, dict) or any(content.get(name) != value for name, value in key.items()):
        return np.full((count, 2), np.nan)
    return np.array([content["chosen"], content["rejected"]], dtype=np.float64).T


def _save(file: Path, key: dict[str, str], found: np.ndarray) -> None:
    if not is_first():
        return
    file.parent.mkdir(exist_ok=True)
    columns: dict[str, Any] = {
        name: [None if np.isnan(value) else value for value in found[:, i].tolist()]
        for i, name in enumerate(("chosen", "rejected"))
    }
    write_json(file, key | columns)
    logger.info("reference log-probabilities of %d pairs in %s", int((~np.isnan(found[:, 0])).sum()), file)
