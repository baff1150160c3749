"""Memory of one optimizer step, traced by running the trainer's update on tensors that have shapes but no data.

FakeTensorMode combines meta tensors with a pretended device. PyTorch selects kernels, autograd saves tensors and
autocast casts weights as on a CPU, but nothing is computed. Each storage is tracked from allocation to release. Not
included: scratch space inside kernels, fragmentation of the allocator, `train.compile`.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.registry import iterate_optimizer_updates
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.train.trainer import Trainer

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of memory at the peak of a train step, with one field per use."""

    weights: int
    """Bytes of parameters and buffers in `master_dtype`; tied parameters count once."""
    gradients: int
    optimizer: int
    reference: int
    """Bytes of copies of the trained parameters that the algorithm needs, such as the reference policy."""
    casts: int | None
    """Bytes of copies of weights in `param_dtype` that autocast makes and autograd keeps; None if the step could not be
    traced."""
    activations: int | None
    """Bytes of activations that autograd saves, and of temporary tensors (logits and their gradient, intermediates of
    the optimizer); None if the step could not be traced."""
    average: int = 0
    """Bytes of the moving average of the trained weights."""

    @property
    def total_bytes(self) -> int:
        """Return the sum of the bytes of all uses; an unknown use counts as 0."""
        return sum(filter(None, astuple(self)))


def estimate_untraced_memory(model: PreTrainedModel, num_weight_sets: int) -> StepMemory:
    """Return the memory of a train step that cannot be traced: weights, gradients, two optimizer moments and
    `num_weight_sets` copies of the trained parameters. Its activations and casts are None, that is, unknown."""
    weight_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    weight_copy_bytes = num_weight_sets * gradient_bytes
    return StepMemory(weight_bytes, gradient_bytes, 2 * gradient_bytes, weight_copy_bytes, casts=None, activations=None)


def estimate_8bit_moment_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of both Adam moments of a model in torchao's 8-bit format: one byte per value, a scale per block
    of 256 values, and a table of codes per parameter. Moments of parameters that are small or not divisible into blocks
    have the dtype of the parameter."""
    num_bytes = 0
    for parameter in (p for p in model.parameters() if p.requires_grad):
        num_elements = parameter.numel()
        is_unquantized = num_elements < 4096 or num_elements % 256
        num_bytes += 2 * (parameter.nbytes if is_unquantized else num_elements + 4 * (num_elements // 256) + 4 * 256)
    return num_bytes


def trace_step_memory(trainer: Trainer, algorithm: Algorithm, train: TrainConfig, sequence_length: int) -> StepMemory:
    """Return the peak memory of any train step but the first, for sequences of `sequence_length` tokens.

    Call this function under the FakeTensorMode that created the model. It runs two micro-batches if the step has more
    than one, because the second micro-batch runs while the gradients of the first exist.
    """
    policy, model = train.train_policy, trainer.adapter.model
    token_ids, loss_mask = np.zeros(sequence_length, np.int64), np.ones(sequence_length, np.uint8)
    num_rows, num_sequences = min(2 * train.rows_per_pass, train.train_batch_per_replica), policy.num_sequences_per_row
    row_numbers = [i for i in range(num_rows) for _ in range(num_sequences)]
    batch_numbers = [i // train.rows_per_pass if num_sequences > 1 else None for i in row_numbers]
    samples = [Sample(token_ids, loss_mask, advantage=1.0, reward=1.0, micro_batch=number) for number in batch_numbers]
    byte_counter = _LiveByteCounter()
    with byte_counter, byte_counter.forbid_reading_tensor_values(model):
        byte_counter.assign_memory_use("weights", (*model.parameters(), *model.buffers()))
        weight_sets = trainer.weight_sets.tensors.values()
        byte_counter.assign_memory_use("reference", [tensor for weights in weight_sets for tensor in weights.values()])
        # Allocate gradients: in every step but the first, the gradients of the previous step exist until the update.
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        byte_counter.assign_memory_use("gradients", _get_gradients(model))
        for update in iterate_optimizer_updates(algorithm, samples, trainer):
            trainer.update(update)
            byte_counter.assign_memory_use("gradients", _get_gradients(model))
        optimizer_state_values = [value for state in trainer.optimizer.state.values() for value in state.values()]
        byte_counter.assign_memory_use("optimizer", [v for v in optimizer_state_values if isinstance(v, Tensor)])
    return byte_counter.find_peak_memory()


class _LiveByteCounter(TorchDispatchMode):
    """`TorchDispatchMode` that records when the storages of the results of torch operations are allocated and
    released."""

    def __init__(self) -> None:
        super().__init__()
        self._storage_numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._storage_sizes: list[int] = []
        self._memory_use_by_storage: list[str] = []
        self._allocation_events: list[tuple[int, int]] = []
        """Allocations and releases in order of time: number of the storage, and 1 for allocated or -1 for released."""
        self._is_inside_model = False

    def assign_memory_use(self, memory_use: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors`, also in events that are already recorded, for the field `memory_use` of
        `StepMemory`."""
        for tensor in tensors:
            self._memory_use_by_storage[self._track_storage(tensor)] = memory_use

    @contextmanager
    def forbid_reading_tensor_values(self, model: PreTrainedModel) -> Iterator[None]:
        """Return a context manager in which `model` must not read the values of tensors, which fake tensors lack."""

        def set_inside_model(is_inside_model: bool, *_: Any) -> None:
            self._is_inside_model = is_inside_model

        base, on_enter, on_exit = (model.base_model, partial(set_inside_model, True), partial(set_inside_model, False))
        hook_handles = [base.register_forward_pre_hook(on_enter), base.register_forward_hook(on_exit, always_call=True)]
        try:
            yield
        finally:
            for hook in hook_handles:
                hook.remove()

    def find_peak_memory(self) -> StepMemory:
        """Return the bytes of each use at the moment of peak memory. The optimizer's state counts from the start, as in
        every step but the first."""
        sizes_and_memory_uses = zip(self._storage_sizes, self._memory_use_by_storage, strict=True)
        optimizer_bytes = sum(size for size, memory_use in sizes_and_memory_uses if memory_use == "optimizer")
        byte_changes = [
            (self._memory_use_by_storage[i], sign * self._storage_sizes[i]) for i, sign in self._allocation_events
        ]
        byte_changes = [byte_change for byte_change in byte_changes if byte_change[0] != "optimizer"]
        cumulative_bytes = np.cumsum([size for _, size in byte_changes])
        bytes_by_memory_use = dict.fromkeys(("weights", "gradients", "reference", "casts", "activations"), 0)
        for memory_use, size in byte_changes[: int(cumulative_bytes.argmax()) + 1]:
            bytes_by_memory_use[memory_use] += size
        return StepMemory(optimizer=optimizer_bytes, **bytes_by_memory_use)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and not self._is_inside_model:
            # The values of the loss, the norm and the metrics do not affect memory: return a finite 1 for each.
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        output = _make_grouped_mm_output(*args) if func is aten._grouped_mm.default else func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._track_storage, output)
        if func is aten._to_copy.default and self._memory_use_by_storage[self._track_storage(args[0])] == "weights":
            self.assign_memory_use("casts", [output])
        return output

    def _track_storage(self, tensor: Tensor) -> int:
        """Return the index of a tensor's storage, and track the storage if it is new."""
        storage = tensor.untyped_storage()
        if storage not in self._storage_numbers:
            self._storage_numbers[storage] = storage_number = len(self._storage_sizes)
            self._storage_sizes.append(storage.nbytes())
            self._memory_use_by_storage.append("activations")
            self._allocation_events.append((storage_number, 1))
            finalizer = weakref.finalize(storage, self._allocation_events.append, (storage_number, -1))
            finalizer.atexit = False
        return int(self._storage_numbers[storage])


def _make_grouped_mm_output(token_inputs: Tensor, weights: Tensor, group_ends: Tensor | None = None, *_: Any) -> Tensor:
    """Return an uninitialised tensor with the shape of the result of `_grouped_mm`. The meta kernel of PyTorch for this
    operation accepts only bfloat16."""
    leading_shape = () if group_ends is None or not token_inputs.ndim == weights.ndim == 2 else (len(group_ends),)
    return token_inputs.new_empty((*leading_shape, token_inputs.shape[-2], weights.shape[-1]))


def _get_gradients(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
