"""Trainer: takes optimizer steps on a model, and evaluates the model, also with other weights such as a moving average.

The trainer does not depend on the type of samples: it sorts them into micro-batches by the cost that the model adapter
returns for each sample.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, compute_means
from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.algorithms.registry import make_algorithm_error
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ProgramError
from cosmos_core.models.base import MicroBatch, ModelAdapter, OutputSpec, has_dropout
from cosmos_core.parallel.mesh import all_gather_object
from cosmos_core.parallel.pipeline import clip_gradients_over_stages, sum_tied_gradients
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.optim import build_optimizer, clip_gradients, set_learning_rate
from cosmos_core.train.weight_sets import WeightSets

QUANTILE_FRACTIONS = {"p50": 0.5, "p95": 0.95, "max": 1.0}


class SpeedSettings(NamedTuple):
    """Settings that change how fast outputs and gradients are computed, but not their values except for rounding."""

    rows_per_pass: int
    """Number of rows per forward pass, unless the caller of `evaluate` sets another number."""
    num_threads: int
    """Number of CPU threads with which torch computes."""


class Trainer:
    """Trainer of one rank. All ranks of a mesh call the same methods in the same order."""

    def __init__(
        self, adapter: ModelAdapter, train: TrainConfig, progress_writer: ProgressWriter, num_threads: int | None = None
    ) -> None:
        """Make the trainer of a model, with `num_threads` CPU threads; None: as many as this process has."""
        self.adapter = adapter
        self.weight_sets = WeightSets(adapter.model)
        self.optimizer = build_optimizer(adapter.model, train, full_model=adapter.meta_copy)
        self._extra_models: dict[str, ModelAdapter] = {}
        self._train_config, self._progress_writer = train, progress_writer
        self.max_batch_tokens = 0
        """Number of tokens of the largest micro-batch of this rank so far, without padding; callers can reset it."""
        self.speed_settings = SpeedSettings(train.rows_per_pass, num_threads or torch.get_num_threads())

    @property
    def has_separate_gradients(self) -> bool:
        """Return whether the gradient of a sample depends on no other sample of the update and on no random number."""
        return not self.adapter.has_auxiliary_loss and not self.has_dropout

    @property
    def samples_per_pass(self) -> int:
        """Return the number of samples in a forward pass of `mini_batch` rows; if `mini_batch` is `auto`, of the number
        of rows before it is tuned."""
        return self._train_config.rows_per_pass * self._train_config.train_policy.num_sequences_per_row

    def add_model(self, name: str, adapter: ModelAdapter) -> None:
        """Add another model, such as a teacher with another architecture, that `evaluate` can run by name."""
        adapter.model.requires_grad_(False)
        self._extra_models[name] = adapter

    @contextmanager
    def use_weights(self, name: str) -> Iterator[None]:
        """Return a context manager in which the model computes with the copy of its weights that is named `name`, such
        as `reference`; `policy` means the trained weights. Parameters that FSDP has gathered from the previous weights
        are freed on entry and on exit."""
        with self.weight_sets.use_weights(name):
            self.adapter.runner.reshard()
            try:
                yield
            finally:
                self.adapter.runner.reshard()

    def set_learning_rate(self, step: int, total_steps: int) -> dict[str, float]:
        """Set the learning rates of train step `step`, counted from 0, and return the learning rates as metrics."""
        return set_learning_rate(self.optimizer, step, total_steps, self._train_config)

    def update(self, update: Update) -> dict[str, float]:
        """Take one optimizer step, and return its metrics. Raise ProgramError if the loss or gradient is not finite."""
        loss, metric_totals, values_by_metric = self._reduce_losses(self.compute_gradients(update))
        model, mesh, max_norm = self.adapter.model, self.adapter.mesh, self._train_config.optm_grad_norm_clip
        if mesh and mesh.pp:
            sum_tied_gradients(model, mesh.pp)
            grad_norm = clip_gradients_over_stages(model, mesh.pp, max_norm)
        else:
            grad_norm = clip_gradients(model.parameters(), max_norm)
        if not torch.isfinite(torch.tensor([loss, grad_norm])).all():
            raise ProgramError(
                f"loss = {loss}, gradient norm = {grad_norm}: not finite; lower train.optm_lr or look at the data"
            )
        self.optimizer.step()
        metrics = {**compute_means(metric_totals), **_compute_quantiles(values_by_metric), **update.metrics}
        return {"loss": loss, "grad_norm": grad_norm, **{name: float(value) for name, value in metrics.items()}}

    def compute_gradients(self, update: Update) -> list[Loss]:
        """Replace the gradients by those of `update`, one optimizer step, and return the loss of each micro-batch of
        this rank."""
        self.adapter.runner.train(True)
        self.drop_gradients()
        samples = [*update.samples, *(update.data.samples if update.data else ())]
        num_tokens = sum(self.adapter.num_tokens(sample) for sample in samples)
        return [loss for each in filter(None, (update, update.data)) for loss in self._backward(each, num_tokens)]

    def drop_gradients(self) -> None:
        """Free the memory of the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(
        self, samples: Sequence[Any], request: OutputSpec = None, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return on all ranks the outputs that `request` selects for each sample, without dropout. `weights` names a
        copy of the model's weights or a model added by `add_model`. `size`: number of samples in a forward pass; None:
        `mini_batch`."""
        adapter = self._extra_models.get(weights, self.adapter)
        weight_set = "policy" if weights in self._extra_models else weights
        outputs = self._compute_local_outputs(adapter, samples, request, weight_set, num_rows_per_pass=size)
        if adapter.mesh:
            cpu_outputs = {i: {name: row.cpu() for name, row in rows.items()} for i, rows in outputs.items()}
            outputs_by_rank = adapter.mesh.all_gather_object(cpu_outputs)
            outputs = {i: rows for rank_outputs in outputs_by_rank for i, rows in rank_outputs.items()}
            outputs = {i: {name: row.to(adapter.device) for name, row in rows.items()} for i, rows in outputs.items()}
        return [outputs[i] for i in range(len(samples))]

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        """Overwrite the copy of the weights named `weights` with the policy's weights. With `optimizer`, also reset the
        moments of the optimizer."""
        self.weight_sets.copy_from_policy(weights)
        if optimizer:
            self.optimizer.state.clear()  # resets the moments, because the optimizer creates missing ones as zeros

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        """Move W, the copy of the weights named `weights`, towards the policy's weights: W + fraction * (policy -
        W)."""
        self.weight_sets.move_towards_policy(weights, fraction)

    @property
    def has_dropout(self) -> bool:
        """Return whether the model has dropout; the value is the same on all ranks, also of a pipeline."""
        adapter = self.adapter  # on a pipeline rank, only `adapter.meta_copy` has all modules
        return has_dropout(adapter.meta_copy if adapter.mesh else adapter.model)

    def _find_sets_equal_to_policy(self, weight_set_names: Sequence[str]) -> list[str]:
        """Return those of the named copies of the weights that equal the policy's weights on all ranks, so that their
        outputs need no forward pass; none if the model has dropout, with which outputs differ."""
        if not weight_set_names or self.has_dropout:
            return []
        equal_set_names_by_rank = all_gather_object(list(filter(self.weight_sets.equals_policy, weight_set_names)))
        return [name for name in weight_set_names if all(name in rank_names for rank_names in equal_set_names_by_rank)]

    def _compute_local_outputs(
        self, adapter: ModelAdapter, samples: Sequence[Any], request: OutputSpec, weight_set: str,
        num_rows_per_pass: int | None = None,
    ) -> dict[int, dict[str, Tensor]]:  # fmt: skip
        """Return the outputs that `request` selects of this rank's samples, by the positions of the samples, under the
        copy of the weights named `weight_set`, without dropout. `num_rows_per_pass`: as for `evaluate`."""
        outputs: dict[int, dict[str, Tensor]] = {}

        def store_outputs(micro_batch: MicroBatch) -> None:
            outputs.update(zip(micro_batch.indices, adapter.split_outputs(micro_batch), strict=True))

        adapter.runner.train(False)
        with self.use_weights(weight_set):
            self._run_micro_batches(adapter, samples, store_outputs, request, num_rows_per_pass=num_rows_per_pass)
        return outputs

    @torch.no_grad()
    def _compute_reference_outputs(self, update: Update, weight_sets: Sequence[str]) -> dict[int, dict[str, Tensor]]:
        """Return the outputs of this rank's samples, by the positions of the samples, under the copies of the weights
        named `weight_sets`, with which the loss compares the policy."""
        outputs: dict[int, dict[str, Tensor]] = {}
        for weight_set in weight_sets:
            for i, row in self._compute_local_outputs(self.adapter, update.samples, update.request, weight_set).items():
                outputs.setdefault(i, {}).update({f"{weight_set}/{name}": value for name, value in row.items()})
        self.adapter.runner.train(True)
        return outputs

    def _backward(self, update: Update, num_tokens: int) -> list[Loss]:
        """Accumulate the gradient of an update, and return the loss of each micro-batch of this rank. A loss that the
        model computes, such as a router loss, is divided by `num_tokens`, the tokens of the whole optimizer step."""
        losses: list[Loss] = []
        weight_sets_equal_to_policy = self._find_sets_equal_to_policy(update.extra_weights)
        differing_weight_sets = [name for name in update.extra_weights if name not in weight_sets_equal_to_policy]
        reference_outputs = self._compute_reference_outputs(update, differing_weight_sets)

        def compute_loss(micro_batch: MicroBatch) -> Tensor:
            if update.extra_weights:
                reference_rows = [
                    reference_outputs.get(i, {})
                    | {f"{name}/{key}": v.detach() for name in weight_sets_equal_to_policy for key, v in row.items()}
                    for i, row in zip(micro_batch.indices, self.adapter.split_outputs(micro_batch), strict=True)
                ]
                padded_rows = {n: pad_sequence([row[n] for row in reference_rows], True) for n in reference_rows[0]}
                micro_batch = replace(micro_batch, outputs=micro_batch.outputs | padded_rows)
            loss = self._call_loss(update, micro_batch)
            metrics, scaled_auxiliary_loss = loss.metrics, torch.zeros_like(loss.value)
            if micro_batch.auxiliary_loss is not None:
                scaled_auxiliary_loss = micro_batch.auxiliary_loss / num_tokens
                num_batch_tokens = sum(map(self.adapter.num_tokens, micro_batch.samples))
                loss_and_num_tokens = torch.tensor([micro_batch.auxiliary_loss.item(), num_batch_tokens])
                metrics = metrics | {"model_loss": loss_and_num_tokens.double()}
            # Detach the loss, because the autograd graph must not outlive its backward pass.
            losses.append(replace(loss, value=loss.value.detach(), metrics=metrics))
            return loss.value + scaled_auxiliary_loss

        loss_fn = (lambda batch: self._call_loss(update, batch).value) if update.has_constant_gradient else None
        self._run_micro_batches(self.adapter, update.samples, compute_loss, update.request, loss_fn=loss_fn)
        return losses

    def _call_loss(self, update: Update, micro_batch: MicroBatch) -> Loss:
        loss: Any = update.loss(micro_batch)
        if not isinstance(loss, Loss):
            problem = f"it returned a {type(loss).__name__}, not a Loss of cosmos_core.algorithms.base"
            raise make_algorithm_error(self._train_config.train_policy, update.loss, problem)
        return loss

    def _run_micro_batches(
        self,
        adapter: ModelAdapter,
        samples: Sequence[Any],
        process_outputs: Callable[[MicroBatch], Tensor | None],
        request: OutputSpec,
        *,
        num_rows_per_pass: int | None = None,
        loss_fn: Callable[[MicroBatch], Tensor] | None = None,
    ) -> None:
        """Run the model on each micro-batch of this rank, and pass the outputs to `process_outputs`, which returns the
        loss or None. `loss_fn` returns a loss whose derivative does not depend on the outputs, so that the derivative
        can be computed before the forward pass; None: there is no such loss."""

        def process_batch_outputs(batch: Any, outputs: dict[str, Tensor]) -> Tensor | None:
            outputs = adapter.gather_outputs(batch, outputs)
            if batch.samples:
                return process_outputs(adapter.make_micro_batch(batch, outputs))
            zero_loss = next(iter(outputs.values())).new_zeros(())
            return sum((output.sum().mul(0.0) for output in outputs.values() if output.requires_grad), zero_loss)

        def collate(indices: Sequence[int], padding_sample_position: int) -> Any:
            self._progress_writer.beat()
            num_tokens = sum(adapter.num_tokens(samples[i]) for i in indices)
            self.max_batch_tokens = max(self.max_batch_tokens, num_tokens)
            batch = adapter.collate([samples[i] for i in indices], indices, samples[padding_sample_position])
            return adapter.attach_loss_derivative(batch, loss_fn) if loss_fn and batch.samples else batch

        request = adapter.default_output_request if request is None else request
        rows_per_pass = num_rows_per_pass or self.speed_settings.rows_per_pass
        max_rows = adapter.runner.rows_per_micro_batch(rows_per_pass)
        batch_plans = self._plan_micro_batches(adapter, samples, max_rows, is_default_size=num_rows_per_pass is None)
        shortest_sample = _find_shortest_sample(adapter, samples, range(len(samples)))
        num_batches = adapter.runner.num_micro_batches(len(batch_plans), rows_per_pass)
        batch_plans += [((), shortest_sample)] * (num_batches - len(batch_plans))
        collate_functions = [partial(collate, *plan) for plan in batch_plans]
        with _use_threads(self.speed_settings.num_threads):
            adapter.runner.run(collate_functions, process_batch_outputs, request, rows_per_pass)
        if not torch.is_grad_enabled():
            adapter.runner.reshard()

    def _plan_micro_batches(
        self, adapter: ModelAdapter, samples: Sequence[Any], max_rows: int, *, is_default_size: bool
    ) -> list[tuple[Sequence[int], int]]:
        """Return for each micro-batch of this rank the positions of its samples, at most `max_rows`, and the position
        of the sample that the micro-batch computes as a placeholder if it is empty. Samples are sorted by decreasing
        cost, so that a micro-batch needs little padding. All ranks get the same number of micro-batches; with an empty
        one, a rank only joins collectives. `is_default_size`: whether no caller has set the number of rows."""
        assigned_batch_ids = [adapter.assigned_batch_id(sample) for sample in samples]
        has_batch_ids = is_default_size and None not in assigned_batch_ids
        batches_by_id: dict[Any, list[int]] = {}
        for i in sorted(range(len(samples)), key=lambda i: -adapter.num_tokens(samples[i])):
            batches_by_id.setdefault(assigned_batch_ids[i] if has_batch_ids else i, []).append(i)
        grouped_batches: dict[Any, list[list[int]]] = {}
        for batch in batches_by_id.values():
            grouped_batches.setdefault(adapter.batching_key(samples[batch[0]]), []).append(batch)
        num_ranks, can_rearrange = adapter.mesh.dp.size() if adapter.mesh else 1, is_default_size and not has_batch_ids
        batch_plans: list[tuple[Sequence[int], int]] = []
        for batching_key in sorted(grouped_batches):
            compatible_batches, positions = grouped_batches[batching_key], list(chain(*grouped_batches[batching_key]))
            padding_sample_position = _find_shortest_sample(adapter, samples, positions)
            arranged_batches = (
                adapter.arrange_micro_batches(samples, positions, max_rows, num_ranks) if can_rearrange else None
            )
            chunk_size = 1 if has_batch_ids or arranged_batches else max_rows
            local_chunks = _select_local_chunks(adapter, arranged_batches or compatible_batches, chunk_size)
            batch_plans += [(list(chain(*chunk)), padding_sample_position) for chunk in local_chunks]
        return batch_plans

    def _reduce_losses(self, losses: Sequence[Loss]) -> tuple[float, Metrics, dict[str, list[Tensor]]]:
        """Return the loss, summed over the micro-batches of all ranks, the summed metrics, and the values of those
        metrics that are reported as quantiles."""
        mesh = self.adapter.mesh
        if mesh:
            local_losses = [(loss.value, loss.metrics, loss.values) for loss in losses]
            losses_by_rank = mesh.all_gather_object(tree_map_only(Tensor, Tensor.cpu, local_losses))
            losses = [Loss(*loss_fields) for loss_fields in chain(*losses_by_rank)]
        metric_totals: Metrics = {}
        values_by_metric: dict[str, list[Tensor]] = {}
        for loss in losses:
            metric_totals = add_metrics(metric_totals, loss.metrics)
            for name, tensor in loss.values.items():
                values_by_metric.setdefault(name, []).append(tensor)
        return sum(loss.value.item() for loss in losses), metric_totals, values_by_metric


def _select_local_chunks(adapter: ModelAdapter, batches: Sequence[Any], chunk_size: int) -> list[Sequence[Any]]:
    """Return the elements of `batches` that this data-parallel rank computes, in chunks of at most `chunk_size`.
    Each rank gets equally many chunks; the last chunk can be empty."""
    num_batches = len(batches)
    if adapter.mesh:
        num_batches = -(-len(batches) // adapter.mesh.dp.size())
        batches = adapter.mesh.select_local_items(batches)
    return [batches[start : start + chunk_size] for start in range(0, num_batches, chunk_size)]


@contextmanager
def _use_threads(num_threads: int) -> Iterator[None]:
    """Let torch compute with `num_threads` CPU threads for the duration of a `with` block."""
    previous_num_threads = torch.get_num_threads()
    if num_threads == previous_num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous_num_threads)


def _find_shortest_sample(adapter: ModelAdapter, samples: Sequence[Any], indices: Sequence[int]) -> int:
    return min(indices, key=lambda i: adapter.num_tokens(samples[i]))


def _compute_quantiles(values_by_metric: dict[str, list[Tensor]]) -> dict[str, float]:
    quantiles: dict[str, float] = {}
    for name, tensors in values_by_metric.items():
        values = torch.cat(tensors).float().sort().values
        for quantile_name, fraction in QUANTILE_FRACTIONS.items() if len(values) else ():
            quantiles[f"{name}_{quantile_name}"] = values[min(len(values) - 1, int(fraction * len(values)))].item()
    return quantiles
