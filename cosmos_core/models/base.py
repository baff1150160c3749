"""Interface between the trainer and a model: only the code below it distinguishes text from pixels.

The trainer makes micro-batches, runs them and steps the optimizer; an adapter interprets samples. Algorithms receive
the model outputs that they request as `MicroBatch`es.

Shapes: B samples, S predicted tokens (token models), dots for the dimensions of a latent (diffusion models).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_core.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of an update with the model's outputs for them."""

    samples: Sequence[Any]
    indices: Sequence[int]
    """Position of each sample in the update's samples."""
    outputs: dict[str, Tensor]
    """Requested outputs, a row per sample. Token models: `logprobs` of each token after the first, `entropy`, `is_top`
    (BS), `top_logprobs` and `top_ids` (BSK). Diffusion models: `velocity` with its input `noisy`, and
    `latents` and `noise` (B...) if samples have noise."""
    mask: Tensor
    """Mask of the values that count towards the loss, 1 or 0: BS, or broadcastable to latents."""
    model_loss: Tensor | None = None
    """Auxiliary loss of the model (load balancing of experts), summed over samples with their cost as weight.

    None if the model has no auxiliary loss."""

    @property
    def mask_BS(self) -> Tensor:
        """Return the mask of a token model."""
        return self.mask

    @property
    def logprobs_BS(self) -> Tensor:
        """Return the log-probability of each token after the first."""
        return self.outputs["logprobs"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Model inputs of a micro-batch; each adapter extends this class."""

    samples: Sequence[Any]
    """Samples of the micro-batch; if empty, the rank only takes part in collectives and its outputs are ignored."""
    indices: Sequence[int]
    inputs: dict[str, Tensor]


Wants = Any
"""Outputs that an update requests from the model, in the adapter's own type: `scorer.Wants` for token models,
`denoiser.Wants` for diffusion models. None: the default outputs (`ModelAdapter.default_wants`)."""

Consume = Callable[[Any, dict[str, Tensor]], Tensor | None]
"""Function of a batch and the model's raw outputs that returns the loss of the batch if gradients are enabled."""


class Runner(Protocol):
    """Runs micro-batches through a model: sequentially, or through pipeline stages."""

    def rows(self, size: int) -> int:
        """Return the number of rows per micro-batch if at most `size` rows may be in the model at a time."""
        ...

    def count(self, num_batches: int, size: int) -> int:
        """Return the number of micro-batches to run, including empty ones to add to `num_batches`."""
        ...

    def run(self, batches: Sequence[Callable[[], Any]], consume: Consume, wants: Wants, size: int) -> None:
        """Run each micro-batch forward, and backward where gradients are enabled.

        Args:
            batches: functions that build the micro-batches.
            consume: called with each batch and its outputs, on the ranks that have the last layer.
            wants: the outputs to compute.
            size: maximum number of rows in the model at a time.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch dropout on or off."""
        ...

    def reshard(self) -> None:
        """Free the weights that FSDP keeps gathered after a forward pass without a backward pass."""
        ...


@dataclass(frozen=True, slots=True)
class Export:
    """Result of an export: the checks that it passed, and its adapter folder."""

    checks: tuple[str, ...]
    """Names of the checks that ran."""
    adapter: str = ""
    """Name of the adapter's folder inside the export; empty if there is no adapter."""


class ModelAdapter(Protocol):
    """A model, sharded over the mesh, with its handling of samples: only adapters know tokens, images or latents."""

    model: Any
    """The model's module, or this rank's shard of it."""
    mesh: Mesh | None
    device: torch.device
    """Device of the inputs; weights may be on another device."""
    whole: Any
    """The whole model on the meta device if `model` is sharded; None if `model` is whole."""

    @property
    def runner(self) -> Runner:
        """Return the runner of micro-batches."""
        ...

    @property
    def default_wants(self) -> Wants:
        """Return the default outputs, for updates that do not request any."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer, or None if the model has no tokenizer of its own."""
        ...

    @property
    def vision(self) -> Any:
        """Return the reader of the samples' images; None if no sample shows an image."""
        ...

    def whole_model(self) -> Any:
        """Return the model with all weights; with a mesh, a copy on the first rank's CPU and None on other ranks."""
        ...

    def export(self, target: Path) -> Export | None:
        """Write the model to a folder in its training dtype, and check that it loads and computes the same outputs.

        All ranks must call this. The first rank writes and returns the result; other ranks return None.

        Raises:
            StageFailed: the disk is full, or the exported model differs from the trained one.
        """
        ...

    def cost(self, sample: Any) -> int:
        """Return the cost of a sample in tokens, for micro-batches of similar cost and for throughput."""
        ...

    def group(self, sample: Any) -> Any:
        """Return the group of a sample, an orderable value: a micro-batch holds samples of one group only."""
        ...

    def assigned_batch(self, sample: Any) -> Hashable | None:
        """Return the micro-batch that the feed assigned to a sample; None if the feed assigned none."""
        ...

    def collate(self, samples: Sequence[Any], indices: Sequence[int], filler: Any) -> Any:
        """Collate samples to a `Batch`; without samples, return a batch of `filler` in which nothing is learned."""
        ...

    def gather_outputs(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the outputs of all ranks that work on the same samples."""
        ...

    def micro_batch(self, batch: Any, outputs: dict[str, Tensor]) -> MicroBatch:
        """Return gathered outputs as a `MicroBatch` with one row per sample."""
        ...

    def rows(self, micro: MicroBatch) -> list[dict[str, Tensor]]:
        """Return the outputs of each sample without padding."""
        ...

    def expect(self, batch: Any, loss: Callable[[MicroBatch], Tensor]) -> Any:
        """Return the batch with the derivative of `loss`, so that the forward pass can already compute gradients.

        The derivative must not depend on the outputs.
        """
        ...

    def prove(self) -> None:
        """Compare the outputs of the sharded model with those of one rank, on a few tokens.

        Raises:
            ModelError: the outputs differ, as the model has operations that its parallel plan does not cover.
        """
        ...
