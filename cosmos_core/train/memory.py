"""Memory of one optimizer step: the trainer's own update, run on tensors that have shapes but no data.

FakeTensorMode is the meta device with a pretended one: PyTorch chooses the kernels, autograd keeps the tensors and
autocast casts the weights as they would on a CPU, and nothing is computed. Every storage is followed from its
allocation to its end. Left out: scratch space inside a kernel, fragments of an allocator, `train.compile`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.train.trainer import Trainer

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive at the peak of a step; the parts add up to it."""

    weights: int
    """Parameters and buffers in `master_dtype`, tied ones once."""
    gradients: int
    optimizer: int
    reference: int
    """Named weights of the algorithm, such as the reference policy of a KL penalty: a copy of what is trained."""
    casts: int | None
    """Copies of weights in `param_dtype` that autocast made and autograd keeps; None: unknown, with activations."""
    activations: int | None
    """What autograd keeps beside these, and everything short-lived: logits, their gradient, the optimizer's terms."""
    average: int = 0
    """The moving average of the trained weights."""

    @property
    def total(self) -> int:
        """Return the peak; without activations where they are unknown."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + self.average
            + (self.casts or 0)
            + (self.activations or 0)
        )


def held_memory(model: PreTrainedModel, num_named: int) -> Memory:
    """Return what a step holds whatever it computes, with both moments of Adam and `num_named` copies of what is
    trained; activations unknown."""
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Memory(
        weights=_bytes(_state(model)),
        gradients=gradients,
        optimizer=2 * gradients,
        reference=num_named * gradients,
        casts=None,
        activations=None,
    )


def eight_bit_moments(model: PreTrainedModel) -> int:
    """Bytes of both moments as torchao keeps them: a byte a value with a scale for each 256 and a table of codes; as
    wide as the weight where there are few values, or they do not divide."""
    found = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            count = parameter.numel()
            is_small = count < 4096 or count % 256
            found += 2 * (parameter.nbytes if is_small else count + 4 * (count // 256) + 4 * 256)
    return found


def step_memory(trainer: Trainer, algorithm: Algorithm, train: TrainConfig, length: int) -> Memory:
    """Return the peak of a step after the first, every row (each response of a pair) `length` tokens long.

    To be called under the fake mode that made the model.
    Two micro-batches where the step has more than one: the second meets the gradients of the first.
    """
    policy, model = train.train_policy, trainer.adapter.model
    ids, mask = np.zeros(length, np.int64), np.ones(length, np.uint8)
    count, each = min(2 * policy.mini_batch, train.train_batch_per_replica), policy.sequences_per_row
    samples = [Sample(ids, mask, advantage=1.0, reward=1.0) for _ in range(count)]
    if each > 1:
        samples = [
            replace(one, micro_batch=i // policy.mini_batch) for i, one in enumerate(samples) for _ in range(each)
        ]
    live = _LiveBytes()
    with live, live.refusing_values_in(model):
        live.hold("weights", _state(model))
        live.hold("reference", [tensor for named in trainer.named.tensors.values() for tensor in named.values()])
        for parameter in model.parameters():  # those of the step before live until the update drops them
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        live.hold("gradients", _gradients(model))
        for update in algorithm.updates(samples, trainer):
            trainer.update(update)
            live.hold("gradients", _gradients(model))
        state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
        live.hold("optimizer", [value for value in state if isinstance(value, Tensor)])
    return live.peak()


class _LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation returns, and remembers when each began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sizes: list[int] = []
        self._uses: list[str] = []
        self._events: list[tuple[int, int]] = []
        """Number of a storage, and 1 where it began or -1 where it ended, in order."""
        self._is_inside_model = False

    def hold(self, use: str, tensors: Iterable[Tensor]) -> None:
        """Count these storages as `use`, now and in all that was remembered of them."""
        for tensor in tensors:
            self._uses[self._follow(tensor)] = use

    @contextmanager
    def refusing_values_in(self, model: PreTrainedModel) -> Iterator[None]:
        """Let no forward pass of `model` ask for a value: what it would do with it decides about memory."""

        def enter(*_: Any) -> None:
            self._is_inside_model = True

        def leave(*_: Any) -> None:
            self._is_inside_model = False

        body = model.base_model
        hooks = [body.register_forward_pre_hook(enter), body.register_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def peak(self) -> Memory:
        """Return the bytes of each use at the moment of most.

        The optimizer's state is there from the start, as in every step but the first.
        """
        optimizer = sum(size for size, use in zip(self._sizes, self._uses, strict=True) if use == "optimizer")
        events = [(self._uses[number], sign * self._sizes[number]) for number, sign in self._events]
        events = [event for event in events if event[0] != "optimizer"]
        sums = np.cumsum([size for _, size in events])
        found = dict.fromkeys(("weights", "gradients", "reference", "casts", "activations"), 0)
        for use, size in events[: int(sums.argmax()) + 1]:
            found[use] += size
        return Memory(optimizer=optimizer, **found)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on its tensors without data."""
        if func is aten._local_scalar_dense.default and not self._is_inside_model:
            # The loss, the norm and the metrics are asked for their values, which change no memory: each is a finite 1.
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        result = _grouped(*args) if func is aten._grouped_mm.default else func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._follow, result)
        if func is aten._to_copy.default and self._uses[self._follow(args[0])] == "weights":
            self.hold("casts", [result])
        return result

    def _follow(self, tensor: Tensor) -> int:
        """The number of the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = number = len(self._sizes)
            self._sizes.append(storage.nbytes())
            self._uses.append("activations")
            self._events.append((number, 1))
            weakref.finalize(storage, self._events.append, (number, -1)).atexit = False
        return int(self._numbers[storage])


def _grouped(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any) -> Tensor:
    """The experts' product: its own rule for tensors without data knows no dtype but bfloat16."""
    shape = (left.shape[-2], right.shape[-1])
    return left.new_empty((len(offsets), *shape) if left.ndim == right.ndim == 2 and offsets is not None else shape)


def _state(model: PreTrainedModel) -> list[Tensor]:
    """Parameters and buffers, tied ones once."""
    return [*model.parameters(), *model.buffers()]


def _gradients(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
