"""Model FLOPs utilization (MFU) of train steps, relative to the measured matmul rate: key `logging.report_mfu`."""

import torch

from cosmos_core.algorithms.base import Update
from cosmos_core.models.flops import TrainFlops, measure_matmul_flops
from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.train.trainer import Trainer


class FlopsUtilization:
    """Counter of the model FLOPs of training, compared with the matmul rate of all ranks."""

    def __init__(self, trainer: Trainer, dtype: str) -> None:
        """Measure the matmul rate of the trainer's device in `dtype`."""
        adapter = trainer.adapter
        self._count_tokens = adapter.num_tokens
        self._train_flops = TrainFlops(adapter.meta_copy if adapter.meta_copy is not None else adapter.model)
        self._matmul_flops_per_second = measure_matmul_flops(adapter.device, getattr(torch, dtype)) * num_ranks()
        self._num_flops = 0.0

    def count_update(self, update: Update) -> None:
        """Count the model FLOPs of one optimizer step, including those of its supervised loss, if it has one."""
        for counted_update in filter(None, (update, update.data)):
            self._num_flops += self._train_flops.total_flops(list(map(self._count_tokens, counted_update.samples)))

    def utilization_since_last(self, elapsed_seconds: float) -> float:
        """Return the utilization as a fraction: the FLOPs counted since the previous call, divided by the FLOPs that
        the matmul rate allows in `elapsed_seconds`."""
        num_flops, self._num_flops = self._num_flops, 0.0
        return num_flops / max(1e-9, elapsed_seconds) / self._matmul_flops_per_second
