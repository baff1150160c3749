"""Log-probabilities of preference pairs under the reference, which is the model that the stage starts from.

They are computed once, with the trained model itself before its first step, and kept in `<stage>/reference/`: there is
never a second model in memory, several epochs cost one pass, a mesh needs nothing of its own, and a stage that is
resumed goes on with the same bits. Stages behind find them there, to measure against the same reference.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_core.algorithms.base import Sample
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.prepared import Pairs
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.parallel.mesh import any_on_ranks, broadcast_object, is_first
from cosmos_core.run.files import read_json, sha256, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.train.rank import Rank

FOLDER = "reference"
PIECE = 256
"""Pairs that are computed together. What each is padded to depends on the others, so pieces are always the same."""
_SAVE_SECONDS = 60.0

logger = logging.getLogger(__name__)


def pair_logprobs(rank: Rank, pairs: Pairs, places: np.ndarray, size: int) -> np.ndarray:
    """Sums over the learned tokens of the chosen and rejected answers at `places`, under the present weights: N x 2,
    float64; `size` pairs a forward pass."""
    samples = [Sample(*rows[int(i)]) for i in places for rows in (pairs.chosen, pairs.rejected)]
    sums = [row.sum(dtype=torch.float64) for row in rank.logprobs(samples, 1.0, size=2 * size)]
    return torch.stack(sums).cpu().numpy().reshape(-1, 2)


def reference_logprobs(stage: Stage, rank: Rank, pairs: Pairs, split: str, places: np.ndarray) -> np.ndarray | None:
    """As `pair_logprobs`, under the present weights, which nobody has trained yet: a row for each pair, NaN where
    `places` does not ask for it; None: there is no reference. What an earlier attempt has computed is taken from its
    file.

    Raises:
        Preempted: a signal came; what is done is kept.
    """
    if _is_free(stage.recipe):
        return None
    stage.progress.phase(FOLDER)
    file = stage.path / FOLDER / f"{split}.json"
    key = {"fingerprint": stage.fingerprint, "rows": sha256(pairs.path)}
    found = broadcast_object(_saved(file, key, len(pairs)) if is_first() else np.zeros(0))
    policy, saved = stage.recipe.train.train_policy, time.monotonic()
    for start in range(0, len(places), PIECE):
        piece = places[start : start + PIECE]
        if not np.isnan(found[piece]).any():
            continue
        if any_on_ranks(stage.stop_requested):
            _save(file, key, found)
            raise Preempted(f"stopped with the reference log-probabilities of {start} of {len(places)} pairs")
        found[piece] = pair_logprobs(rank, pairs, piece, policy.mini_batch)
        if time.monotonic() - saved > _SAVE_SECONDS:
            _save(file, key, found)
            saved = time.monotonic()
    _save(file, key, found)
    return found


def handed_on(stage: Stage, pairs: Pairs, split: str) -> np.ndarray | None:
    """What the training of a stage before this one found for these pairs; None: there is no reference.

    Raises:
        ConfigError: none did.
    """
    if _is_free(stage.recipe):
        return None
    key = {"rows": sha256(pairs.path)}
    for result in stage.inputs.values():
        found = _saved(Path(result["path"]) / FOLDER / f"{split}.json", key, len(pairs))
        if not np.isnan(found).any():
            return found
    raise ConfigError(
        f"stage {stage.name!r} has no log-probabilities of its held-out pairs under a reference; name the stage that "
        f"trained by DPO on the same data in `after`, or set train.train_policy.dpo.reference_free = true"
    )


def _is_free(recipe: Recipe) -> bool:
    policy = recipe.train.train_policy
    return isinstance(policy, GrpoConfig) or policy.dpo.reference_free


def _saved(file: Path, key: dict[str, str], count: int) -> np.ndarray:
    kept = read_json(file)
    if not isinstance(kept, dict) or any(kept.get(name) != value for name, value in key.items()):
        return np.full((count, 2), np.nan)
    return np.array([kept["chosen"], kept["rejected"]], dtype=np.float64).T


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
