"""Model FLOPs utilization (MFU) of train steps, relative to the measured matmul rate: key `logging.report_mfu`."""

import torch

from cosmos_core.algorithms.base import Update
from cosmos_core.models.flops import TrainFlops, measure_matmul_flops
from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.train.trainer import Trainer


class Utilization:
    """Counter of model FLOPs, compared with the matmul rate of all ranks. Forward passes without a gradient are not
    counted."""

    def __init__(self, trainer: Trainer, dtype: str) -> None:
        """Measure the matmul rate of the trainer's device in `dtype`."""
        adapter = trainer.adapter
        self._cost = adapter.num_tokens
        self._train_flops = TrainFlops(adapter.meta_copy if adapter.meta_copy is not None else adapter.model)
        self._matmul_flops = measure_matmul_flops(adapter.device, getattr(torch, dtype)) * num_ranks()
        self._counted_flops = 0.0

    def add(self, update: Update) -> None:
        """Count the FLOPs of an update, including the supervised loss on data rows that it may have."""
        for each in filter(None, (update, update.data)):
            self._counted_flops += self._train_flops.total([self._cost(sample) for sample in each.samples])

    def utilization_since_last(self, seconds: float) -> float:
        """Return the utilization of the last `seconds`, which began with the previous call, as a fraction."""
        counted_flops, self._counted_flops = self._counted_flops, 0.0
        return counted_flops / max(1e-9, seconds) / self._matmul_flops
