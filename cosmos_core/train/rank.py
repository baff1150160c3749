"""One rank: the model, its optimizer, and how an update runs through them. The loop calls nothing else of torch.

Shapes: B samples, T tokens, S = T - 1 predicted tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, means
from cosmos_core.algorithms.base import MicroBatch, Sample, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import rows_of
from cosmos_core.errors import ModelError, StageFailed
from cosmos_core.models.packing import NAME as PACKED
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.scorer import Scorer, entropy, is_top
from cosmos_core.parallel.context import joined, piece_of, share_attention
from cosmos_core.parallel.fsdp import fill, reshard, shard, without_weights
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.tensor import split
from cosmos_core.run.progress import Progress
from cosmos_core.train.optim import build_optimizer, clip_gradients, set_learning_rate

logger = logging.getLogger(__name__)

QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


class Rank:
    """One of the ranks of a mesh, which all call the same methods in the same order; without a mesh the only one."""

    def __init__(
        self, model: PreTrainedModel, train: TrainConfig, pad_id: int, progress: Progress, mesh: Mesh | None = None
    ) -> None:
        self.model = model
        self.mesh = mesh
        self._train = train
        self._pad_id = pad_id
        self._progress = progress
        self._dtype = getattr(torch, train.logprob_dtype)
        self._is_packed = train.sequence_packing or bool(mesh and mesh.context)
        self._skeleton = without_weights(model) if mesh else None
        self.scorer = self._scorer(model)
        self._frozen: Scorer | None = None
        self.optimizer = build_optimizer(model, train)

    def set_learning_rate(self, step: int, total_steps: int) -> dict[str, float]:
        """The rates of train step `step`, counted from 0; returns them as metrics."""
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
            if not samples:
                self._follow(update.samples)
                continue
            loss = update.loss(self._forward(self.scorer, samples, **settings))
            loss.value.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.value.item()
            total = add_metrics(total, loss.metrics)
            for name, tensor in loss.values.items():
                values.setdefault(name, []).append(tensor)
        loss_sum, total, values = self._over_ranks(loss_sum, total, values)
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
        place = {id(sample): i for i, sample in enumerate(samples)}
        rows: dict[int, Tensor] = {}
        for batch in self._micro_batches(samples, size):
            self._progress.beat()
            found = self._forward(scorer, batch or [_unlearned(samples)], temperature=temperature)
            for row, sample in zip(found.logprobs_BS, batch, strict=False):
                rows[place[id(sample)]] = row[: len(sample.input_ids) - 1]
        if self.mesh:
            reshard(scorer)
            parts = self.mesh.gathered({i: row.cpu() for i, row in rows.items()})
            rows = {i: row.to(scorer.model.device) for part in parts for i, row in part.items()}
        return [rows[i] for i in range(len(samples))]

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], *, size: int) -> tuple[float, float]:
        """Of the learned tokens of all samples, dropout off, `size` rows a forward pass: the sum of their
        log-probabilities, and how many are the likeliest at their place."""
        self.scorer.model.eval()
        logprob, num_top = 0.0, 0.0
        for batch in self._micro_batches(samples, size):
            self._progress.beat()
            logprobs_N, top_N, _ = self._scored(self.scorer, batch or [_unlearned(samples)], figure=is_top)
            assert top_N is not None
            logprob += logprobs_N.sum(dtype=torch.float64).item()
            num_top += top_N.sum().item()
        if self.mesh:
            reshard(self.scorer)
            parts = self.mesh.gathered((logprob, num_top))
            logprob, num_top = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return logprob, num_top

    def whole_model(self) -> PreTrainedModel | None:
        """The model with all its weights; of a mesh: a copy on the first rank's CPU, None on the others."""
        if self._skeleton is None:
            return self.model
        return fill(self._skeleton, self.model)

    def _scorer(self, model: PreTrainedModel) -> Scorer:
        if self.mesh and self.mesh.tensor:
            split(model, self.mesh.tensor)
        if self._is_packed and (reason := enable_packing(model)):
            if self.mesh and self.mesh.context:
                raise ModelError(f"policy.parallelism.cp_size = {self.mesh.context.size()}: {reason}; set it to 1")
            logger.warning("train.sequence_packing: rows are padded, because %s", reason)
            self._is_packed = False
        scorer = Scorer(model)
        if self.mesh and self.mesh.context:
            share_attention(model, self.mesh.context, PACKED)
        if self.mesh:
            shard(scorer, model, self.mesh)
        return scorer

    def _micro_batches(self, samples: Sequence[Sample], size: int | None = None) -> list[Sequence[Sample]]:
        """Rows of like length together, the longest first: less padding, and the most memory is needed at once.

        Of a mesh, this rank's share of them: every rank gets the same number, empty ones where rows run out.
        """
        ordered = sorted(samples, key=lambda sample: -len(sample.input_ids))
        if size is None and all(sample.micro_batch is not None for sample in samples):
            return self._planned(ordered)
        size = size or self._train.train_policy.mini_batch
        most = len(ordered)
        if self.mesh:
            most = -(-len(ordered) // self.mesh.data.size())
            ordered = self.mesh.share(ordered)
        return [ordered[start : start + size] for start in range(0, most, size)]

    def _planned(self, ordered: Sequence[Sample]) -> list[Sequence[Sample]]:
        """The micro-batches that the feed put together; `_micro_batches`."""
        together: dict[int | None, list[Sample]] = {}
        for sample in ordered:
            together.setdefault(sample.micro_batch, []).append(sample)
        batches: list[Sequence[Sample]] = list(together.values())
        if not self.mesh:
            return batches
        most = -(-len(batches) // self.mesh.data.size())
        share = self.mesh.share(batches)
        return [*share, *[()] * (most - len(share))]

    def _follow(self, samples: Sequence[Sample]) -> None:
        """Take part in what the other ranks do with a micro-batch, and add nothing."""
        found = self._forward(self.scorer, [_unlearned(samples)], temperature=1.0)
        found.logprobs_BS.sum().mul(0.0).backward()  # type: ignore[no-untyped-call]

    def _over_ranks(
        self, loss: float, total: Metrics, values: dict[str, list[Tensor]]
    ) -> tuple[float, Metrics, dict[str, list[Tensor]]]:
        """Loss and figures of all ranks together; the same on each."""
        if not self.mesh:
            return loss, total, values
        cpu = {name: metric.cpu() for name, metric in total.items()}
        parts = self.mesh.gathered((loss, cpu, {name: torch.cat(found).cpu() for name, found in values.items()}))
        total, values = {}, {}
        for _, metrics, flat in parts:
            total = add_metrics(total, metrics)
            for name, tensor in flat.items():
                values.setdefault(name, []).append(tensor)
        return sum(part[0] for part in parts), total, values

    def _scored(
        self, scorer: Scorer, samples: Sequence[Sample], **settings: Any
    ) -> tuple[Tensor, Tensor | None, list[np.ndarray]]:
        """What the scorer says with these settings of the learned tokens, and their places in each sample's S."""
        device = scorer.model.device
        rows = rows_of([sample.input_ids for sample in samples], self._pad_id, packed=self._is_packed)
        learned = [np.flatnonzero(sample.loss_mask[1:]) for sample in samples]
        chosen = torch.from_numpy(np.concatenate([start + s for start, s in zip(rows.starts, learned, strict=True)]))
        inputs = {name: tensor.to(device) for name, tensor in rows.inputs.items()}
        settings |= {"dtype": self._dtype}
        with compute_dtype(self._train, device):
            if not (self.mesh and self.mesh.context):
                return *scorer(inputs, chosen.to(device), **settings), learned
            piece = piece_of(inputs, chosen.to(device), self.mesh.context)
            logprobs, figure = scorer(piece.inputs, piece.chosen, **settings)
        logprobs_N = joined(logprobs, piece.is_mine_N, self.mesh.context, self._dtype)
        figure_N = None if figure is None else joined(figure, piece.is_mine_N, self.mesh.context, self._dtype)
        return logprobs_N, figure_N, learned

    def _forward(
        self,
        scorer: Scorer,
        samples: Sequence[Sample],
        *,
        temperature: float,
        with_entropy: bool = False,
        expected: float | None = None,
    ) -> MicroBatch:
        logprobs_N, entropy_N, learned = self._scored(
            scorer, samples, temperature=temperature, figure=entropy if with_entropy else None, expected=expected
        )
        device = logprobs_N.device
        number = np.repeat(np.arange(len(samples)), [len(s) for s in learned])
        places = (torch.from_numpy(number).to(device), torch.from_numpy(np.concatenate(learned)).to(device))
        shape = (len(samples), max(len(sample.input_ids) for sample in samples) - 1)

        def spread(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(shape).index_put(places, values_N)

        mask_BS = spread(torch.ones_like(logprobs_N, requires_grad=False)).bool()
        return MicroBatch(samples, spread(logprobs_N), mask_BS, None if entropy_N is None else spread(entropy_N))


def _unlearned(samples: Sequence[Sample]) -> Sample:
    """The shortest sample with nothing to learn in it."""
    shortest = min(samples, key=lambda sample: len(sample.input_ids))
    return replace(shortest, loss_mask=np.zeros_like(shortest.loss_mask), rollout_logprobs=None)


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
