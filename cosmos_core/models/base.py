"""The seam between the trainer and a model: text and pixels differ below it and nowhere above.

The trainer makes micro-batches, runs them and steps the optimizer; an adapter knows what a sample is. Algorithms see
the outputs that they asked for as `MicroBatch`es.

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
    """Some samples of an update and what the model says about them."""

    samples: Sequence[Any]
    indices: Sequence[int]
    """Position of each sample in the update's samples."""
    outputs: dict[str, Tensor]
    """What was wanted, a row per sample. Token models: `logprobs` of each token after the first, `entropy`, `is_top`
    (BS), `top_logprobs` and `top_ids` (BSK). Diffusion models: `velocity`, with `noisy`, the latents that it was
    predicted for, and, where samples have noise, `latents` and `noise` (B...)."""
    mask: Tensor
    """1 where a value counts, 0 elsewhere: BS, or broadcast over latents."""
    model_loss: Tensor | None = None
    """What the model itself wants to be added to the loss, summed over samples with their cost as weight: the
    load-balancing of its experts. None: nothing."""

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
    """A micro-batch as a model takes it; each adapter has a class of its own that adds to it."""

    samples: Sequence[Any]
    """Empty: the rank only takes part in collectives, and what comes out does not count."""
    indices: Sequence[int]
    inputs: dict[str, Tensor]


Wants = Any
"""What an update asks of the model, in a type of the adapter's own: `scorer.Wants` of token models, `denoiser.Wants` of
diffusion models. None: what it gives when nothing more is asked (`ModelAdapter.usual_wants`)."""

Consume = Callable[[Any, dict[str, Tensor]], Tensor | None]
"""Takes a batch and the raw outputs of the model for it; returns its loss, where gradients are wanted."""


class Runner(Protocol):
    """How micro-batches run through a model: one after the other, or through the stages of a pipeline."""

    def rows(self, size: int) -> int:
        """Return the rows of a micro-batch where `size` rows may be in the model at once."""
        ...

    def count(self, num_batches: int, size: int) -> int:
        """Return how many micro-batches to make in place of `num_batches`, with empty ones."""
        ...

    def run(self, batches: Sequence[Callable[[], Any]], consume: Consume, wants: Wants, size: int) -> None:
        """Run each micro-batch forward, and backward where gradients are enabled.

        Args:
            batches: make the micro-batches.
            consume: called with what each gives, where its end is seen.
            wants: the outputs.
            size: rows that may be in the model at once.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch dropout on or off."""
        ...

    def reshard(self) -> None:
        """Free the weights that a forward pass without a backward pass left gathered."""
        ...


@dataclass(frozen=True, slots=True)
class Export:
    """What was written and how it was proven."""

    checks: tuple[str, ...]
    """The checks that ran, by name."""
    adapter: str = ""
    """The folder of the adapter inside; empty: there is none."""


class ModelAdapter(Protocol):
    """A model, split over the mesh, and what it does with samples. It alone knows tokens, images or latents."""

    model: Any
    """The module, or this rank's part of it."""
    mesh: Mesh | None
    device: torch.device
    """Where inputs go; weights may be elsewhere."""
    whole: Any
    """The whole model on the meta device where `model` is a part of it; None: `model` is whole."""

    @property
    def runner(self) -> Runner:
        """Return what runs micro-batches through the model."""
        ...

    @property
    def usual_wants(self) -> Wants:
        """Return what an update wants that says nothing of it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return what turns text into the model's inputs."""
        ...

    @property
    def vision(self) -> Any:
        """Return what reads the images of samples; None: no sample shows one."""
        ...

    def whole_model(self) -> Any:
        """Return the model with all its weights; of a mesh a copy on the first rank's CPU, None on the others."""
        ...

    def export(self, target: Path) -> Export | None:
        """Write the model to a folder in the dtype that it was trained in, and prove that it loads and computes the
        same; all ranks call it, and the first writes. None: another rank did.

        Raises:
            StageFailed: the disk is full, or the folder does not equal the model.
        """
        ...

    def cost(self, sample: Any) -> int:
        """Return what a sample costs, in tokens: micro-batches have samples of like cost, and throughput counts it."""
        ...

    def group(self, sample: Any) -> Any:
        """Return the group of a sample, something that has an order: micro-batches hold samples of one group."""
        ...

    def planned(self, sample: Any) -> Hashable | None:
        """Return the micro-batch that the feed chose for a sample; None: none."""
        ...

    def collate(self, samples: Sequence[Any], indices: Sequence[int], filler: Any) -> Any:
        """Return some samples as a `Batch`; of no samples one with `filler` in it, nothing of which is learned."""
        ...

    def joined(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of all ranks that share the samples."""
        ...

    def micro_batch(self, batch: Any, outputs: dict[str, Tensor]) -> MicroBatch:
        """Return joined outputs with a row per sample."""
        ...

    def rows(self, micro: MicroBatch) -> list[dict[str, Tensor]]:
        """Return the wanted outputs of each sample without padding."""
        ...

    def expect(self, batch: Any, loss: Callable[[MicroBatch], Tensor]) -> Any:
        """Return the batch with the derivative of `loss`, which does not depend on the outputs, so that a forward pass
        can take its gradient on the way."""
        ...

    def prove(self) -> None:
        """Compare what the mesh computes with what one rank would, on a few tokens.

        Raises:
            ModelError: the model does more than its parallel plan covers.
        """
        ...
