"""The trainer: a model adapter, its optimizer and named weights, and how an update runs through them.

It does not know what a sample is. Micro-batches are made here, by the adapter's cost; each data-parallel rank runs its
share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, means
from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError, ProgramError
from cosmos_core.models.base import MicroBatch, ModelAdapter, Wants
from cosmos_core.parallel.mesh import all_gather_object
from cosmos_core.parallel.pipeline import clip_over_stages, sum_tied
from cosmos_core.run.progress import Progress
from cosmos_core.train.named_weights import NamedWeights
from cosmos_core.train.optim import build_optimizer, clip_gradients, forget_moments, set_learning_rate

QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}

Consume = Callable[[MicroBatch], Tensor | None]


class Plan(NamedTuple):
    """One micro-batch of a data-parallel rank."""

    indices: Sequence[int]
    """Positions of its samples; empty: the rank only takes part in what others do."""
    filler: int
    """Position of the sample that stands in an empty one."""


class Trainer:
    """One rank of a mesh, all of which call the same methods in the same order; without a mesh the only one."""

    def __init__(self, adapter: ModelAdapter, train: TrainConfig, progress: Progress) -> None:
        self.adapter = adapter
        self.named = NamedWeights(adapter.model)
        self.optimizer = build_optimizer(adapter.model, train, whole=adapter.whole)
        self._models: dict[str, ModelAdapter] = {}
        self._train, self._progress = train, progress

    def add_model(self, name: str, adapter: ModelAdapter) -> None:
        """Let `evaluate` ask another model, such as a teacher of another architecture."""
        adapter.model.requires_grad_(False)
        self._models[name] = adapter

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Let the model compute with named weights inside the block; `policy` are its own.

        What FSDP has gathered of other weights, and keeps for a backward pass that does not come, is given up.
        """
        with self.named.use(name):
            self.adapter.runner.reshard()
            try:
                yield
            finally:
                self.adapter.runner.reshard()

    def set_learning_rate(self, step: int, total_steps: int | None) -> dict[str, float]:
        """Set the rates of train step `step`, counted from 0, and return them as metrics."""
        return set_learning_rate(self.optimizer, step, total_steps, self._train)

    def update(self, update: Update) -> dict[str, float]:
        """Take one optimizer step; return its metrics.

        Raises:
            ProgramError: the loss or the gradient is not finite; the weights were not touched.
        """
        self.adapter.runner.train(True)
        self.optimizer.zero_grad(set_to_none=True)
        samples = [*update.samples, *(update.data.samples if update.data else ())]
        num_tokens = sum(self.adapter.cost(sample) for sample in samples)
        losses = self._backward(update, num_tokens)
        if update.data is not None:
            if self.adapter.mesh and self.adapter.mesh.pipeline:
                raise ConfigError("policy.parallelism.pp_size excludes a data term; set it to 1")
            losses += self._backward(update.data, num_tokens)
        loss, total, values = self._over_ranks(losses)
        norm = self._clipped()
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            raise ProgramError(
                f"loss = {loss}, gradient norm = {norm}: not finite; lower train.optm_lr or look at the data"
            )
        self.optimizer.step()
        return {"loss": loss, "grad_norm": norm, **means(total), **_quantiles(values)}

    def drop_gradients(self) -> None:
        """Free the gradients, which nothing needs after the last update of a train step."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(
        self, samples: Sequence[Any], wants: Wants = None, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the wanted outputs of each sample under named weights or another model, without dropout; all ranks
        get those of all samples. `size` samples per forward pass; None: `mini_batch`."""
        adapter = self._models.get(weights, self.adapter)
        found: dict[int, dict[str, Tensor]] = {}

        def keep(micro: MicroBatch) -> None:
            found.update(zip(micro.indices, adapter.rows(micro), strict=True))

        adapter.runner.train(False)
        with self.weights("policy" if weights in self._models else weights):
            self._run(adapter, samples, keep, wants, size=size)
        if adapter.mesh:
            on_cpu = {i: {name: row.cpu() for name, row in rows.items()} for i, rows in found.items()}
            found = {i: rows for of_rank in adapter.mesh.all_gather_object(on_cpu) for i, rows in of_rank.items()}
            found = {i: {name: row.to(adapter.device) for name, row in rows.items()} for i, rows in found.items()}
        return [found[i] for i in range(len(samples))]

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        """Make named weights what the policy is now; `optimizer`: and forget the optimizer's moments."""
        self.named.reset(weights)
        if optimizer:
            forget_moments(self.optimizer)

    def follow(self, weights: str, fraction: float) -> None:
        """Move named weights towards the policy: weights + fraction * (policy - weights)."""
        self.named.lerp(weights, fraction)

    def _unmoved(self, names: Sequence[str]) -> list[str]:
        """Return the named weights that are the policy's own at this moment, on all ranks: what they give is what the
        policy gives, such as an old policy that follows at once. Dropout would make a difference."""
        if not names or any(isinstance(module, nn.Dropout) and module.p for module in self.adapter.model.modules()):
            return []
        found = [name for name in names if self.named.equals_policy(name)]
        of_ranks = all_gather_object(found)
        return [name for name in found if all(name in each for each in of_ranks)]

    @torch.no_grad()
    def _compared(self, update: Update, names: Sequence[str]) -> dict[int, dict[str, Tensor]]:
        """Return the outputs under named weights that the update compares with, for the samples of this rank."""
        found: dict[int, dict[str, Tensor]] = {}
        if not names:
            return found
        self.adapter.runner.train(False)
        for weights in names:

            def keep(micro: MicroBatch, weights: str = weights) -> None:
                for i, row in zip(micro.indices, self.adapter.rows(micro), strict=True):
                    found.setdefault(i, {}).update({f"{weights}/{name}": value for name, value in row.items()})

            with self.weights(weights):
                self._run(self.adapter, update.samples, keep, update.wants)
        self.adapter.runner.train(True)
        return found

    def _backward(self, update: Update, num_tokens: int) -> list[Loss]:
        """Add the gradient of an update; return the loss of each micro-batch of this rank. What the model adds to the
        loss is divided by the tokens of the whole optimizer step, those of a data term too."""
        losses: list[Loss] = []
        unmoved = self._unmoved(update.compares)
        compared = self._compared(update, [name for name in update.compares if name not in unmoved])

        def learn(micro: MicroBatch) -> Tensor:
            if update.compares:
                others = [
                    compared.get(i, {}) | {f"{name}/{key}": v.detach() for name in unmoved for key, v in row.items()}
                    for i, row in zip(micro.indices, self.adapter.rows(micro), strict=True)
                ]
                stacked = {name: torch.stack([other[name] for other in others]) for name in others[0]}
                micro = replace(micro, outputs=micro.outputs | stacked)
            loss = update.loss(micro)
            metrics, added = loss.metrics, torch.zeros_like(loss.value)
            if micro.model_loss is not None:
                added = micro.model_loss / num_tokens
                own = torch.tensor([micro.model_loss.item(), sum(map(self.adapter.cost, micro.samples))])
                metrics = metrics | {"model_loss": own.double()}
            # The graph must not outlive its backward pass.
            losses.append(replace(loss, value=loss.value.detach(), metrics=metrics))
            return loss.value + added

        known = (lambda micro: update.loss(micro).value) if update.has_constant_gradient else None
        self._run(self.adapter, update.samples, learn, update.wants, known=known)
        return losses

    def _run(
        self,
        adapter: ModelAdapter,
        samples: Sequence[Any],
        consume: Consume,
        wants: Wants,
        *,
        size: int | None = None,
        known: Callable[[MicroBatch], Tensor] | None = None,
    ) -> None:
        """Give `consume` each micro-batch of this rank; `known`: the loss, if its derivative is known beforehand."""

        def on_outputs(batch: Any, outputs: dict[str, Tensor]) -> Tensor | None:
            outputs = adapter.joined(batch, outputs)
            if batch.samples:
                return consume(adapter.micro_batch(batch, outputs))
            zero = next(iter(outputs.values())).new_zeros(())
            return sum((v.sum().mul(0.0) for v in outputs.values() if v.requires_grad), zero)

        def collate(plan: Plan) -> Any:
            self._progress.beat()
            batch = adapter.collate([samples[i] for i in plan.indices], plan.indices, samples[plan.filler])
            return adapter.expect(batch, known) if known and batch.samples else batch

        wants = adapter.usual_wants if wants is None else wants
        most = size or self._train.train_policy.mini_batch
        plans = self._plans(adapter, samples, adapter.runner.rows(most), is_planned=size is None)
        empty = Plan((), _cheapest(adapter, samples, range(len(samples))))
        plans += [empty] * (adapter.runner.count(len(plans), most) - len(plans))
        adapter.runner.run([partial(collate, plan) for plan in plans], on_outputs, wants, most)
        if not torch.is_grad_enabled():
            adapter.runner.reshard()

    def _plans(self, adapter: ModelAdapter, samples: Sequence[Any], size: int, *, is_planned: bool) -> list[Plan]:
        """Return the micro-batches of this rank: samples of like cost together, the dearest first, because that needs
        least padding, and the most memory at once. Every rank gets as many, empty ones where samples run out."""
        ordered = sorted(range(len(samples)), key=lambda i: -adapter.cost(samples[i]))
        planned = [adapter.planned(sample) for sample in samples]
        if is_planned and None not in planned:
            together: dict[Any, list[int]] = {}
            for i in ordered:
                together.setdefault(planned[i], []).append(i)
            batches = list(together.values())
        else:
            is_planned, batches = False, [[i] for i in ordered]
        groups: dict[Any, list[list[int]]] = {}
        for batch in batches:
            groups.setdefault(adapter.group(samples[batch[0]]), []).append(batch)
        plans: list[Plan] = []
        for group in sorted(groups):
            filler = _cheapest(adapter, samples, [i for batch in groups[group] for i in batch])
            own = _own(adapter, groups[group], 1 if is_planned else size)
            plans += [Plan([i for batch in each for i in batch], filler) for each in own]
        return plans

    def _over_ranks(self, losses: Sequence[Loss]) -> tuple[float, Metrics, dict[str, list[Tensor]]]:
        """Return loss and metrics of all micro-batches of all ranks together; the same on each."""
        mesh = self.adapter.mesh
        if mesh:
            of_ranks = mesh.all_gather_object([_on_cpu(loss) for loss in losses])
            losses = [Loss(*fields) for each in of_ranks for fields in each]
        total: Metrics = {}
        values: dict[str, list[Tensor]] = {}
        for loss in losses:
            total = add_metrics(total, loss.metrics)
            for name, tensor in loss.values.items():
                values.setdefault(name, []).append(tensor)
        return sum(loss.value.item() for loss in losses), total, values

    def _clipped(self) -> float:
        """Clip the gradients; return their norm before that, over all ranks."""
        mesh, model, most = self.adapter.mesh, self.adapter.model, self._train.optm_grad_norm_clip
        if not (mesh and mesh.pipeline):
            return clip_gradients(model.parameters(), most)
        sum_tied(model, mesh.pipeline)
        return clip_over_stages(model, mesh.pipeline, most)


def _own(adapter: ModelAdapter, ordered: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return `size` of `ordered` together, those of this data-parallel rank; each rank gets as many."""
    most = len(ordered)
    if adapter.mesh:
        most = -(-len(ordered) // adapter.mesh.data.size())
        ordered = adapter.mesh.select_own(ordered)
    return [ordered[start : start + size] for start in range(0, most, size)]


def _cheapest(adapter: ModelAdapter, samples: Sequence[Any], indices: Sequence[int]) -> int:
    return min(indices, key=lambda i: adapter.cost(samples[i]))


def _on_cpu(loss: Loss) -> tuple[Tensor, Metrics, dict[str, Tensor]]:
    metrics, values = ({name: t.cpu() for name, t in each.items()} for each in (loss.metrics, loss.values))
    return loss.value.cpu(), metrics, values


def _quantiles(values: dict[str, list[Tensor]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, tensors in values.items():
        flat = torch.cat(tensors).float()
        if flat.numel():
            ordered = flat.sort().values
            found |= {
                f"{name}_{key}": ordered[min(len(ordered) - 1, int(q * len(ordered)))].item()
                for key, q in QUANTILES.items()
            }
    return found
