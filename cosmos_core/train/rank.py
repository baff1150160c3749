"""One rank: the model, its optimizer, and how an update runs through them. The loop calls nothing else of torch.

Shapes: B samples, T tokens, S = T - 1 predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, means
from cosmos_core.algorithms.base import MicroBatch, Sample, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import pad_sequences
from cosmos_core.errors import StageFailed
from cosmos_core.models.hf import sequence_logprobs
from cosmos_core.run.progress import Progress
from cosmos_core.train.optim import build_optimizer, clip_gradients, set_learning_rate

QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


class Rank:
    """World size 1: every method is a call in this process."""

    def __init__(self, model: PreTrainedModel, train: TrainConfig, pad_id: int, progress: Progress) -> None:
        self.model = model
        self.optimizer = build_optimizer(model, train)
        self._train = train
        self._pad_id = pad_id
        self._progress = progress
        self._dtype = getattr(torch, train.logprob_dtype)

    def set_learning_rate(self, step: int, total_steps: int) -> float:
        """The rate of train step `step`, counted from 0; returns it."""
        return set_learning_rate(self.optimizer, step, total_steps, self._train)

    def update(self, update: Update, *, temperature: float, with_entropy: bool) -> dict[str, float]:
        """One optimizer step; its metrics.

        Raises:
            StageFailed: the loss or the gradient is not finite; the weights were not touched.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total: Metrics = {}
        loss_sum = 0.0
        values: dict[str, list[Tensor]] = {}
        for samples in self._micro_batches(update.samples):
            self._progress.beat()
            logprobs_BS, mask_BS, entropy_BS = self._forward(
                self.model, samples, temperature, with_entropy=with_entropy
            )
            loss = update.loss(MicroBatch(samples, logprobs_BS, mask_BS, entropy_BS))
            loss.value.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.value.item()
            total = add_metrics(total, loss.metrics)
            for name, tensor in loss.values.items():
                values.setdefault(name, []).append(tensor)
        norm = clip_gradients(self.model.parameters(), self._train.optm_grad_norm_clip)
        if not torch.isfinite(torch.tensor([loss_sum, norm])).all():
            raise StageFailed(
                f"loss = {loss_sum}, gradient norm = {norm}: not finite; lower train.optm_lr or look at the data"
            )
        self.optimizer.step()
        return {"loss": loss_sum, "grad_norm": norm, **means(total), **_quantiles(values)}

    @torch.no_grad()
    def logprobs(
        self, samples: Sequence[Sample], temperature: float, model: PreTrainedModel | None = None
    ) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sample under the present weights (or those of `model`), dropout
        off."""
        model = model or self.model
        model.eval()
        rows: list[Tensor] = []
        for batch in self._micro_batches(samples):
            self._progress.beat()
            logprobs_BS, _, _ = self._forward(model, batch, temperature, with_entropy=False)
            rows += [row[: len(sample.input_ids) - 1] for row, sample in zip(logprobs_BS, batch, strict=True)]
        return rows

    def _micro_batches(self, samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
        size = self._train.train_policy.mini_batch
        for start in range(0, len(samples), size):
            yield samples[start : start + size]

    def _forward(
        self, model: PreTrainedModel, samples: Sequence[Sample], temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        batch = pad_sequences([(sample.input_ids, sample.loss_mask) for sample in samples], self._pad_id)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        arguments = {"temperature": temperature, "dtype": self._dtype}
        with compute_dtype(self._train, model.device):
            if with_entropy:
                logprobs_BS, entropy_BS = sequence_logprobs(
                    model, batch["input_ids_BT"], batch["attention_mask_BT"], with_entropy=True, **arguments
                )
            else:
                entropy_BS = None
                logprobs_BS = sequence_logprobs(model, batch["input_ids_BT"], batch["attention_mask_BT"], **arguments)
        return logprobs_BS, batch["loss_mask_BT"][:, 1:], entropy_BS


def compute_dtype(train: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """`param_dtype` for the forward pass; backward follows it."""
    if train.param_dtype == train.master_dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, train.param_dtype))


def _quantiles(values: dict[str, list[Tensor]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, parts in values.items():
        flat = torch.cat(parts).float()
        if flat.numel():
            ordered = flat.sort().values
            found |= {
                f"{name}_{key}": ordered[min(len(ordered) - 1, int(q * len(ordered)))].item()
                for key, q in QUANTILES.items()
            }
    return found
