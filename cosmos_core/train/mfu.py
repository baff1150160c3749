"""MFU: the share of the devices' own rate of matrix products that train steps reach; `logging.report_mfu`."""

from __future__ import annotations

import torch

from cosmos_core.algorithms.base import Update
from cosmos_core.models.flops import TrainFlops, matmul_rate
from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.train.trainer import Trainer


class Utilization:
    """Counts the FLOPs of updates against the rate of all ranks, which is measured when it is made.

    FLOPs are those of the model, all ranks together; passes without a gradient are not counted.
    """

    def __init__(self, trainer: Trainer, dtype: str) -> None:
        """`dtype`: what matrices are multiplied in."""
        adapter = trainer.adapter
        self._cost = adapter.cost
        self._flops = TrainFlops(adapter.whole if adapter.whole is not None else adapter.model)
        self._rate = matmul_rate(adapter.device, getattr(torch, dtype)) * num_ranks()
        self._counted = 0.0

    def add(self, update: Update) -> None:
        """Count an update."""
        for each in (update, update.data):
            if each is not None:
                self._counted += self._flops.of([self._cost(sample) for sample in each.samples])

    def reached(self, seconds: float) -> float:
        """Return the fraction of the rate that what was counted since the last call reached in that time."""
        counted, self._counted = self._counted, 0.0
        return counted / max(1e-9, seconds) / self._rate
