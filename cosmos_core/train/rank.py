"""One rank: the model, its optimizer, and how an update runs through them. The loop calls nothing else of torch.

Shapes: B samples, T tokens, S = T - 1 predicted tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, means
from cosmos_core.algorithms.base import MicroBatch, Sample, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import rows_of
from cosmos_core.errors import StageFailed
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.scorer import Scorer
from cosmos_core.run.progress import Progress
from cosmos_core.train.optim import build_optimizer, clip_gradients, set_learning_rate

logger = logging.getLogger(__name__)

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
        self._is_packed = train.sequence_packing
        self.scorer = self._scorer(model)
        self._frozen: Scorer | None = None

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
        settings: dict[str, Any] = {
            "temperature": temperature, "with_entropy": with_entropy, "expected": update.expected,
        }  # fmt: skip
        for samples in self._micro_batches(update.samples):
            self._progress.beat()
            loss = update.loss(self._forward(self.scorer, samples, **settings))
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
        self,
        samples: Sequence[Sample],
        temperature: float,
        model: PreTrainedModel | None = None,
        *,
        size: int | None = None,
    ) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sample under the present weights (or those of `model`), dropout
        off; 0 where the loss mask is. `size` rows a forward pass; None: `mini_batch`."""
        scorer = self.scorer
        if model is not None:
            if self._frozen is None or self._frozen.model is not model:
                self._frozen = self._scorer(model)
            scorer = self._frozen
        scorer.model.eval()
        rows: dict[int, Tensor] = {}
        for batch in self._micro_batches(samples, size):
            self._progress.beat()
            found = self._forward(scorer, batch, temperature=temperature)
            for row, sample in zip(found.logprobs_BS, batch, strict=True):
                rows[id(sample)] = row[: len(sample.input_ids) - 1]
        return [rows[id(sample)] for sample in samples]

    def _scorer(self, model: PreTrainedModel) -> Scorer:
        if self._is_packed and (reason := enable_packing(model)):
            logger.warning("train.sequence_packing: rows are padded, because %s", reason)
            self._is_packed = False
        return Scorer(model)

    def _micro_batches(self, samples: Sequence[Sample], size: int | None = None) -> Iterator[Sequence[Sample]]:
        """Rows of like length together, the longest first: less padding, and the most memory is needed at once."""
        ordered = sorted(samples, key=lambda sample: -len(sample.input_ids))
        size = size or self._train.train_policy.mini_batch
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]

    def _forward(
        self,
        scorer: Scorer,
        samples: Sequence[Sample],
        *,
        temperature: float,
        with_entropy: bool = False,
        expected: float | None = None,
    ) -> MicroBatch:
        device = scorer.model.device
        rows = rows_of([sample.input_ids for sample in samples], self._pad_id, packed=self._is_packed)
        learned = [np.flatnonzero(sample.loss_mask[1:]) for sample in samples]
        chosen = torch.from_numpy(np.concatenate([start + s for start, s in zip(rows.starts, learned, strict=True)]))
        inputs = {name: tensor.to(device) for name, tensor in rows.inputs.items()}
        with compute_dtype(self._train, device):
            logprobs_N, entropy_N = scorer(
                inputs, chosen.to(device), temperature=temperature, dtype=self._dtype, with_entropy=with_entropy,
                expected=expected,
            )  # fmt: skip
        number = np.repeat(np.arange(len(samples)), [len(s) for s in learned])
        places = (torch.from_numpy(number).to(device), torch.from_numpy(np.concatenate(learned)).to(device))
        shape = (len(samples), max(len(sample.input_ids) for sample in samples) - 1)

        def spread(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(shape).index_put(places, values_N)

        mask_BS = spread(torch.ones_like(logprobs_N, requires_grad=False)).bool()
        return MicroBatch(samples, spread(logprobs_N), mask_BS, None if entropy_N is None else spread(entropy_N))


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
