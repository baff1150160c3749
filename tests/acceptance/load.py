"""Loading a model of 2 GB on four ranks takes each of them the memory of its shard."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

import torch

from tests.acceptance.page import Proof, table
from tests.distributed import loading
from tests.local_ranks import LocalGroup

logger = logging.getLogger(__name__)

RANKS = 4
SLACK = 0.3
"""GB beside the shard."""
_LAYERS = {torch.bfloat16: 75, torch.float32: 35}
_MESHES = {
    "dp_shard_size = 4": {"dp_shard_size": 4},
    "tp_size = 2, dp_shard_size = 2": {"tp_size": 2, "dp_shard_size": 2},
}


def prove(folder: Path) -> Proof:
    """Load checkpoints in both dtypes on both meshes, with weights in float32."""
    began, rows, met = time.monotonic(), [], True
    loading.save_large(folder / "warm", 1, torch.float32)
    for dtype, layers in _LAYERS.items():
        name = str(dtype).removeprefix("torch.")
        _, size = loading.save_large(folder / name, layers, dtype)
        for mesh, sizes in _MESHES.items():
            program = partial(loading.peaks, folder / name, sizes, folder / "warm", folder)
            peaks: list[loading.Peak] = LocalGroup(RANKS).run(program)
            worst = max(peaks, key=lambda peak: peak.most - peak.shard)
            beside = (worst.most - worst.shard) / 1e9
            met = met and beside < SLACK
            rows.append([name, f"{size / 1e9:.2f}", mesh, f"{worst.shard / 1e9:.2f}", f"{worst.most / 1e9:.2f}",
                         f"**{beside:.3f}**"])  # fmt: skip
            logger.info(" | ".join(rows[-1]))
    header = ["checkpoint", "GB", "mesh", "shard in float32, GB", "RssAnon at its peak, GB", "beside the shard, GB"]
    return Proof(
        title="Loading a model on four ranks",
        is_met=met,
        claim=(
            f"Anonymous memory of each of {RANKS} ranks (RssAnon, every millisecond) while a sharded checkpoint of "
            f"2 GB is loaded into float32 weights, above what the rank had after its imports, stays below its shard "
            f"plus {SLACK} GB. The rank that is worst:"
        ),
        commands=["python -m tests.acceptance load"],
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )
