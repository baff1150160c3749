"""Interface between the trainer and a model; only implementations of the interface distinguish text from pixels.

The trainer makes micro-batches, runs them and steps the optimizer; an adapter interprets samples. Algorithms receive
the model outputs that they request as `MicroBatch`es.

Shapes: B samples, S predicted tokens (token models), dots for the dimensions of a latent (diffusion models).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cosmos_core.parallel.mesh import Mesh


def has_dropout(model: nn.Module) -> bool:
    """Return whether a model in training mode sets random activations or attention weights to zero."""
    rates = (
        module.p if isinstance(module, nn.Dropout) else module.__dict__.get("attention_dropout")
        for module in model.modules()
    )  # fmt: skip
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples of an update (one optimizer step), with the model's outputs for these samples."""

    samples: Sequence[Any]
    indices: Sequence[int]
    """Position of each sample among the samples of the update."""
    outputs: dict[str, Tensor]
    """Requested model outputs by name, with one row per sample.

    Token models: `logprobs` of each token after the first, `entropy`, `is_top` (BS), `top_logprobs`, `top_ids` (BSK).
    Diffusion models: `velocity` with its input `noisy`, and `latents` and `noise` (B...) if samples have noise.
    """
    mask: Tensor
    """Mask of the values that count towards the loss, 1 or 0: shape BS, or broadcastable to latents."""
    model_loss: Tensor | None = None
    """Auxiliary loss of the model (load balancing of experts), summed over samples with their costs as weights.

    None: the model has no auxiliary loss.
    """

    @property
    def mask_BS(self) -> Tensor:
        """Return the mask of the tokens that count towards the loss, for a token model."""
        return self.mask

    @property
    def logprobs_BS(self) -> Tensor:
        """Return the log-probability of each token after the first of its row, for a token model."""
        return self.outputs["logprobs"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Model inputs of a micro-batch; each adapter extends this class."""

    samples: Sequence[Any]
    """Samples of the micro-batch; if empty, this rank only takes part in collectives, and its outputs are ignored."""
    indices: Sequence[int]
    inputs: dict[str, Tensor]


Wants = Any
"""Type of the outputs that an update requests from the model: `scorer.Wants` for token models, `denoiser.Wants` for
diffusion models, or None for the default outputs (`ModelAdapter.default_wants`)."""

Consume = Callable[[Any, dict[str, Tensor]], Tensor | None]
"""Function of a batch and the model's raw outputs that returns the loss of the batch if gradients are enabled."""


class Runner(Protocol):
    """Runs micro-batches through a model: sequentially, or through pipeline stages."""

    def rows(self, size: int) -> int:
        """Return the number of rows per micro-batch if at most `size` rows may be in the model at the same time."""
        ...

    def count(self, num_batches: int, size: int) -> int:
        """Return the number of micro-batches to run for `num_batches` micro-batches of samples.

        The result is larger if the runner needs additional empty micro-batches. `size` is as for `rows`.
        """
        ...

    def run(self, batches: Sequence[Callable[[], Any]], consume: Consume, wants: Wants, size: int) -> None:
        """Run each micro-batch forward, and backward where gradients are enabled.

        Args:
            batches: functions that build the micro-batches.
            consume: function that is called with each batch and its outputs, on the ranks that have the last layer.
            wants: outputs to compute.
            size: maximum number of rows in the model at the same time.
        """
        ...

    def train(self, mode: bool) -> None:
        """Switch the model to training mode, with dropout, or (`mode` False) to evaluation mode."""
        ...

    def reshard(self) -> None:
        """Free the weights that FSDP keeps gathered after a forward pass without a backward pass."""
        ...


@dataclass(frozen=True, slots=True)
class Export:
    """Result of writing a model: the checks that the written model passed, and its adapter folder."""

    checks: tuple[str, ...]
    """Names of the checks that the written model passed."""
    adapter: str = ""
    """Name of the adapter's folder inside the export; empty if there is no adapter."""


class ModelAdapter(Protocol):
    """A model, sharded over the mesh, that converts samples to model inputs and outputs to micro-batches.

    Only adapters know tokens, images or latents.
    """

    model: Any
    """Module of the model, or this rank's shard of the module."""
    mesh: Mesh | None
    device: torch.device
    """Device of the model inputs; weights may be on another device."""
    meta_copy: Any
    """Unsharded copy of the model on the meta device, if `model` is sharded; None: `model` is not sharded."""
    has_model_loss: bool
    """Whether the model adds a loss of its own to each update (`MicroBatch.model_loss`)."""

    @property
    def runner(self) -> Runner:
        """Return the runner of micro-batches through this model."""
        ...

    @property
    def default_wants(self) -> Wants:
        """Return the outputs that are computed for updates that request none."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the model; None: the model has no tokenizer."""
        ...

    @property
    def vision(self) -> Any:
        """Return the object that converts images of samples to model inputs; None: samples have no images."""
        ...

    def whole_model(self) -> Any:
        """Return the unsharded model; with a mesh, a copy on the CPU of the first rank, and None on other ranks."""
        ...

    def export(self, target: Path) -> Export | None:
        """Write the model to a folder in its training dtype, and check that the written model has the same outputs.

        All ranks must call this method. The first rank writes and returns the result; other ranks return None.

        Raises:
            StageFailed: the disk is full, or the exported model differs from the trained one.
        """
        ...

    def num_tokens(self, sample: Any) -> int:
        """Return the cost of a sample in tokens, used to build micro-batches of similar cost and to report speed."""
        ...

    def batching_key(self, sample: Any) -> Any:
        """Return the group of a sample, an orderable value: a micro-batch holds samples of one group only."""
        ...

    def assigned_batch(self, sample: Any) -> Hashable | None:
        """Return the id of the micro-batch that the feed (the source of samples) assigned to a sample; None: none."""
        ...

    def arrange(
        self, samples: Sequence[Any], ordered: Sequence[int], size: int, num_ranks: int
    ) -> list[list[int]] | None:
        """Return micro-batches, as positions of samples, that take less computation than `size` samples of similar cost
        each; None: there are none.

        `ordered` are the positions to arrange, all of one group, by descending cost. The `num_ranks` data-parallel
        ranks get the micro-batches in turn.
        """
        ...

    def collate(self, samples: Sequence[Any], indices: Sequence[int], filler: Any) -> Any:
        """Collate samples to a `Batch`; without samples, return a batch of the sample `filler` with an empty loss mask.

        `indices`: position of each sample among the samples of the update.
        """
        ...

    def gather_outputs(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the outputs of all ranks that process the same samples, and return the full outputs."""
        ...

    def micro_batch(self, batch: Any, outputs: dict[str, Tensor]) -> MicroBatch:
        """Return gathered outputs as a `MicroBatch` with one row per sample."""
        ...

    def rows(self, micro: MicroBatch) -> list[dict[str, Tensor]]:
        """Return the outputs of each sample of a micro-batch without padding."""
        ...

    def attach_loss_derivative(self, batch: Any, loss: Callable[[MicroBatch], Tensor]) -> Any:
        """Return the batch with the derivative of `loss`, with which the forward pass already computes gradients.

        `loss` must have a derivative that does not depend on the outputs.
        """
        ...

    def check_parallel_plan(self) -> None:
        """Check on a few tokens that the model has no operations that its parallel plan does not cover.

        Raises:
            ModelError: ranks compute different values, because of such an operation.
        """
        ...
