"""One rank: the model, its optimizer, and how an update runs through them. The loop calls nothing else of torch.

Shapes: B samples, T tokens, S = T - 1 predicted tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, means
from cosmos_core.algorithms.base import Loss, MicroBatch, Sample, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import rows_of
from cosmos_core.errors import ModelError, StageFailed
from cosmos_core.models.packing import NAME as PACKED
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.processor import Vision
from cosmos_core.models.scorer import Scorer, entropy, is_top
from cosmos_core.models.shapes import kernel_length
from cosmos_core.models.sharded_load import load_sharded
from cosmos_core.parallel.context import apply_cp, joined, piece_of
from cosmos_core.parallel.expert import apply_ep
from cosmos_core.parallel.fsdp import apply_fsdp, fill, without_weights
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.pipeline import apply_pp, clip_over_stages, sum_tied
from cosmos_core.parallel.tensor import apply_tp, prove_split
from cosmos_core.run.progress import Progress
from cosmos_core.train.optim import build_optimizer, clip_gradients, set_learning_rate
from cosmos_core.train.runner import Answer, Batch, Runner, Whole
from cosmos_core.train.stages import Stages

logger = logging.getLogger(__name__)

QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


class Rank:
    """One of the ranks of a mesh, which all call the same methods in the same order; without a mesh the only one."""

    def __init__(
        self,
        model: PreTrainedModel,
        train: TrainConfig,
        pad_id: int,
        progress: Progress,
        mesh: Mesh | None = None,
        vision: Vision | None = None,
    ) -> None:
        """`vision` reads the images of samples; None: no sample shows one."""
        self.model = model
        self.mesh = mesh
        self._train = train
        self._pad_id = pad_id
        self._progress = progress
        self._dtype = getattr(torch, train.logprob_dtype)
        self._vision = vision
        self._device = torch.device(mesh.data.device_type) if mesh else model.device  # weights may be elsewhere
        self._is_packed = (train.sequence_packing and vision is None) or bool(mesh and mesh.context)
        if train.sequence_packing and vision is not None:
            logger.warning("train.sequence_packing: rows are padded, because some show images")
        self.skeleton = without_weights(model) if mesh else None
        """The whole model on the meta device; None: `model` is whole."""
        self._runner = self._runner_of(model)
        self._frozen: tuple[PreTrainedModel, Runner] | None = None
        self.optimizer = build_optimizer(model, train, whole=self.skeleton)

    def prove(self) -> None:
        """Run a few tokens before the first step: a model may do more than what its plan splits.

        Raises:
            ModelError: it does.
        """
        if self.mesh and self.mesh.tensor:
            prove_split(self.model, self._runner.roots, self.mesh.tensor)
            self._runner.reshard()

    def set_learning_rate(self, step: int, total_steps: int) -> dict[str, float]:
        """The rates of train step `step`, counted from 0; returns them as metrics."""
        return set_learning_rate(self.optimizer, step, total_steps, self._train)

    def update(self, update: Update, *, temperature: float, with_entropy: bool) -> dict[str, float]:
        """One optimizer step; its metrics.

        Raises:
            StageFailed: the loss or the gradient is not finite; the weights were not touched.
        """
        self._runner.train(True)
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Loss] = []

        def learn(batch: Batch, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
            loss = update.loss(_micro_batch(batch, logprobs_N, entropy_N))
            losses.append(replace(loss, value=loss.value.detach()))  # the graph must not outlive its backward pass
            return loss.value

        figure = entropy if with_entropy else None
        self._run(self._runner, update.samples, learn, temperature=temperature, figure=figure, expected=update.expected)
        loss, total, values = self._over_ranks(losses)
        norm = self._clipped()
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            raise StageFailed(
                f"loss = {loss}, gradient norm = {norm}: not finite; lower train.optm_lr or look at the data"
            )
        self.optimizer.step()
        return {"loss": loss, "grad_norm": norm, **means(total), **_quantiles(values)}

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
        runner = self._runner
        if model is not None:
            if self._frozen is None or self._frozen[0] is not model:
                self._frozen = (model, self._runner_of(model))
            runner = self._frozen[1]
        place = {id(sample): i for i, sample in enumerate(samples)}
        rows: dict[int, Tensor] = {}

        def keep(batch: Batch, logprobs_N: Tensor, _: Tensor | None) -> None:
            found_BS = _micro_batch(batch, logprobs_N).logprobs_BS
            for row, sample in zip(found_BS, batch.samples, strict=True):
                if id(sample) in place:
                    rows[place[id(sample)]] = row[: len(sample.input_ids) - 1]

        runner.train(False)
        self._run(runner, samples, keep, size, temperature=temperature)
        if self.mesh:
            parts = self.mesh.all_gather_object({i: row.cpu() for i, row in rows.items()})
            rows = {i: row.to(self._device) for part in parts for i, row in part.items()}
        return [rows[i] for i in range(len(samples))]

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], *, size: int) -> tuple[float, float]:
        """Of the learned tokens of all samples, dropout off, `size` rows a forward pass: the sum of their
        log-probabilities, and how many are the likeliest at their place."""
        sums: list[tuple[float, float]] = []

        def add(batch: Batch, logprobs_N: Tensor, top_N: Tensor | None) -> None:
            assert top_N is not None
            sums.append((logprobs_N.sum(dtype=torch.float64).item(), top_N.sum().item()))

        self._runner.train(False)
        self._run(self._runner, samples, add, size, figure=is_top)
        if self.mesh:
            sums = [pair for part in self.mesh.all_gather_object(sums) for pair in part]
        return sum(pair[0] for pair in sums), sum(pair[1] for pair in sums)

    def whole_model(self) -> PreTrainedModel | None:
        """The model with all its weights; of a mesh: a copy on the first rank's CPU, None on the others."""
        if self.skeleton is None:
            return self.model
        return fill(self.skeleton, self.model)

    def _runner_of(self, model: PreTrainedModel) -> Runner:
        """Split the model over the mesh, and read what this rank has of it."""
        mesh = self.mesh
        if mesh and mesh.pipeline:
            apply_pp(model, mesh.sizes, mesh.pipeline.get_local_rank())
        if mesh and mesh.tensor:
            apply_tp(model, mesh.tensor, with_experts=mesh.expert is None)
        if mesh and mesh.expert:
            apply_ep(model, mesh, self._train)
        runner = Stages(model, self._train, mesh) if mesh and mesh.pipeline else Whole(Scorer(model), self._train)
        if mesh:
            for root in runner.roots:
                apply_fsdp(root, root.model, mesh, self._train)
            load_sharded(model)
        if self._is_packed:
            self._pack(model, runner)
        if mesh and mesh.context:
            apply_cp(model, mesh.context, PACKED)
        return runner

    def _pack(self, model: PreTrainedModel, runner: Runner) -> None:
        """Make the model take rows end to end; where it cannot, rows are padded."""
        mesh = self.mesh
        reason = enable_packing(model, runner.roots if mesh else ())
        runner.reshard()
        if reason and mesh and (key := "cp_size" if mesh.context else "pp_size" if mesh.pipeline else ""):
            raise ModelError(f"policy.parallelism.{key} = {getattr(mesh.sizes, key)}: {reason}; set it to 1")
        if reason:
            logger.warning("train.sequence_packing: rows are padded, because %s", reason)
            self._is_packed = False

    def _run(
        self,
        runner: Runner,
        samples: Sequence[Sample],
        answer: Answer,
        size: int | None = None,
        **settings: Any,
    ) -> None:
        """Give `answer` what the model says of each micro-batch of this rank's share of `samples`."""

        def of_all(batch: Batch, logprobs_N: Tensor, figure_N: Tensor | None) -> Tensor | None:
            if batch.is_mine_N is not None:
                assert self.mesh and self.mesh.context
                logprobs_N = joined(logprobs_N, batch.is_mine_N, self.mesh.context, self._dtype)
                if figure_N is not None:
                    figure_N = joined(figure_N, batch.is_mine_N, self.mesh.context, self._dtype)
            return answer(batch, logprobs_N, figure_N) if batch.samples else logprobs_N.sum().mul(0.0)

        most = size or self._train.train_policy.mini_batch
        batches = self._micro_batches(samples, runner.rows(most), is_planned=size is None)
        batches += [()] * (runner.count(len(batches), most) - len(batches))
        unlearned = _unlearned(samples)
        makers = [partial(self._batch, batch, unlearned) for batch in batches]
        runner.run(makers, of_all, settings | {"dtype": self._dtype}, most)
        if not torch.is_grad_enabled():
            runner.reshard()

    def _micro_batches(self, samples: Sequence[Sample], size: int, *, is_planned: bool) -> list[Sequence[Sample]]:
        """Rows of like length together, the longest first: less padding, and the most memory is needed at once.

        Of a mesh, this rank's share of them: every rank gets the same number, empty ones where rows run out.
        """
        ordered = sorted(samples, key=lambda sample: -len(sample.input_ids))
        if is_planned and all(sample.micro_batch is not None for sample in samples):
            return self._planned(ordered)
        if self._vision is None:
            return self._shared(ordered, size)
        return [
            batch or [_unlearned(group)]
            for group in self._vision.groups(ordered)
            for batch in self._shared(group, size)
        ]

    def _shared(self, ordered: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
        """`size` samples together; of a mesh: this rank's share."""
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

    def _batch(self, samples: Sequence[Sample], unlearned: Sample) -> Batch:
        """A micro-batch as the model takes it; an empty one has `unlearned` in it."""
        self._progress.beat()
        own, device = samples or [unlearned], self._device
        filled = partial(kernel_length, device=device, dtype=getattr(torch, self._train.param_dtype))
        rows = rows_of([sample.input_ids for sample in own], self._pad_id, packed=self._is_packed, filled=filled)
        learned = [np.flatnonzero(sample.loss_mask[1:]) for sample in own]
        places = np.concatenate([start + s for start, s in zip(rows.starts, learned, strict=True)])
        inputs = {name: tensor.to(device) for name, tensor in rows.inputs.items()}
        if own[0].images:
            assert self._vision is not None
            del inputs["position_ids"]  # some families place images in two dimensions
            shown = self._vision.inputs(own, rows.inputs["input_ids"])
            inputs |= {name: tensor.to(device, self._image_dtype(tensor)) for name, tensor in shown.items()}
        chosen = torch.from_numpy(places).to(device)
        if not (self.mesh and self.mesh.context):
            return Batch(samples, inputs, chosen, None, learned)
        piece = piece_of(inputs, chosen, self.mesh.context)
        return Batch(samples, piece.inputs, piece.chosen, piece.is_mine_N, learned)

    def _image_dtype(self, tensor: Tensor) -> torch.dtype:
        return self.model.dtype if tensor.is_floating_point() else tensor.dtype

    def _over_ranks(self, losses: Sequence[Loss]) -> tuple[float, Metrics, dict[str, list[Tensor]]]:
        """Loss and figures of all micro-batches of all ranks together; the same on each."""
        if self.mesh:
            losses = [loss for part in self.mesh.all_gather_object([_on_cpu(loss) for loss in losses]) for loss in part]
        total: Metrics = {}
        values: dict[str, list[Tensor]] = {}
        for loss in losses:
            total = add_metrics(total, loss.metrics)
            for name, tensor in loss.values.items():
                values.setdefault(name, []).append(tensor)
        return sum(loss.value.item() for loss in losses), total, values

    def _clipped(self) -> float:
        """Clip the gradients; their norm before that, over all ranks."""
        most = self._train.optm_grad_norm_clip
        if not (self.mesh and self.mesh.pipeline):
            return clip_gradients(self.model.parameters(), most)
        sum_tied(self.model, self.mesh.pipeline)
        return clip_over_stages(self.model, self.mesh.pipeline, most)


def _micro_batch(batch: Batch, logprobs_N: Tensor, entropy_N: Tensor | None = None) -> MicroBatch:
    """What algorithms see: a row a sample."""
    device = logprobs_N.device
    number = np.repeat(np.arange(len(batch.samples)), [len(s) for s in batch.learned])
    places = (torch.from_numpy(number).to(device), torch.from_numpy(np.concatenate(batch.learned)).to(device))
    shape = (len(batch.samples), max(len(sample.input_ids) for sample in batch.samples) - 1)

    def in_rows(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(shape).index_put(places, values_N)

    mask_BS = in_rows(torch.ones_like(logprobs_N, requires_grad=False)).bool()
    return MicroBatch(batch.samples, in_rows(logprobs_N), mask_BS, None if entropy_N is None else in_rows(entropy_N))


def _on_cpu(loss: Loss) -> Loss:
    metrics, values = ({name: t.cpu() for name, t in each.items()} for each in (loss.metrics, loss.values))
    return Loss(loss.value.cpu(), metrics, values)


def _unlearned(samples: Sequence[Sample]) -> Sample:
    """The shortest sample with nothing to learn in it."""
    shortest = min(samples, key=lambda sample: len(sample.input_ids))
    return replace(shortest, loss_mask=np.zeros_like(shortest.loss_mask), rollout_logprobs=None)


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
