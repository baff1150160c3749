"""How micro-batches run through a model: one after the other here, through the stages of a pipeline in `stages.py`.

Shape legend: N learned tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cosmos_core.algorithms.base import Sample
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.models.offload import activations_on_cpu
from cosmos_core.models.scorer import Scorer
from cosmos_core.parallel.fsdp import reshard


class Batch(NamedTuple):
    """A micro-batch as a model takes it."""

    samples: Sequence[Sample]
    """Empty: the rank only takes part in what others do, and what comes out does not count."""
    inputs: dict[str, Tensor]
    chosen_N: Tensor
    """Places of the learned tokens that this rank scores."""
    is_mine_N: Tensor | None
    """Which of all learned tokens these are; None: all."""
    learned: list[np.ndarray]
    """Places of the learned tokens in each sample's S."""


Answer = Callable[[Batch, dict[str, Tensor]], Tensor | None]
"""Takes the scorer's outputs for a micro-batch; returns its loss, where gradients are wanted."""


class Runner(Protocol):
    """A model that micro-batches run through."""

    @property
    def roots(self) -> Sequence[Any]:
        """The modules that are called, each with the model, or what it needs of it, inside."""
        ...

    def rows(self, size: int) -> int:
        """Rows of a micro-batch where `size` rows may be in the model at once."""
        ...

    def count(self, num_batches: int, size: int) -> int:
        """How many micro-batches to make of so many, with empty ones."""
        ...

    def run(self, batches: Sequence[Callable[[], Batch]], answer: Answer, settings: dict[str, Any], size: int) -> None:
        """Run each micro-batch forward, and backward where gradients are enabled.

        Args:
            batches: make the micro-batches.
            answer: called with what each gives, where its end is seen.
            settings: of the scorer.
            size: rows that may be in the model at once.
        """
        ...

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        ...

    def reshard(self) -> None:
        """Drop what a forward pass without a backward pass left whole."""
        ...


class Whole:
    """The whole model on every rank, or what FSDP leaves of it."""

    def __init__(self, scorer: Scorer, train: TrainConfig) -> None:
        self._scorer, self._train = scorer, train

    @property
    def roots(self) -> Sequence[Scorer]:
        """The only one."""
        return [self._scorer]

    def rows(self, size: int) -> int:
        """All of them."""
        return size

    def count(self, num_batches: int, size: int) -> int:
        """No more."""
        return num_batches

    def run(self, batches: Sequence[Callable[[], Batch]], answer: Answer, settings: dict[str, Any], size: int) -> None:
        """One after the other."""
        for make in batches:
            batch = make()
            with forward_context(self._train, batch.chosen_N.device):
                found = self._scorer(batch.inputs, batch.chosen_N, **settings)
            loss = answer(batch, found)
            if loss is not None and torch.is_grad_enabled():
                loss.backward()  # type: ignore[no-untyped-call]

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        self._scorer.train(mode)

    def reshard(self) -> None:
        """Of FSDP."""
        reshard(self._scorer)


@contextmanager
def forward_context(train: TrainConfig, device: torch.device) -> Iterator[None]:
    """`param_dtype` for a forward pass, which the backward pass follows, and where its activations wait for that."""
    has_own_dtype = train.param_dtype != train.master_dtype
    with (
        torch.autocast(device.type, dtype=getattr(torch, train.param_dtype), enabled=has_own_dtype),
        activations_on_cpu() if train.activation_offload and torch.is_grad_enabled() else nullcontext(),
    ):
        yield
