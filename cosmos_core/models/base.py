"""Interface between the trainer and a model. The trainer does not know whether a model processes text or images.

The trainer forms micro-batches, runs them and steps the optimizer. A model adapter converts samples to model inputs.
Algorithms receive the model outputs that they request as `MicroBatch` objects.

Shapes: B samples, S predicted tokens (token models), dots for the dimensions of a latent (diffusion models).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cosmos_core.parallel.fsdp import gather_full_model, reshard
from cosmos_core.parallel.mesh import Mesh


def has_dropout(model: nn.Module) -> bool:
    """Return True if a model in training mode has dropout, or has routers that choose experts at random."""
    # Look for dropout rates in attributes, because some model families call `nn.functional.dropout` without a module.
    return any(
        isinstance(value, float)
        and value > 0
        and ("drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout)))
        for module in model.modules()
        for name, value in vars(module).items()
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one micro-batch of an update (an optimizer step), with the outputs of the model for these samples."""

    samples: Sequence[Any]
    indices: Sequence[int]
    """Index of each sample of the micro-batch among all samples of the update (the optimizer step)."""
    outputs: dict[str, Tensor]
    """Requested model outputs by name, each with one row per sample. Token models: `logprobs` of each token after the
    first, `entropy`, `is_argmax` (BS), `top_logprobs`, `top_ids` (BSK). Diffusion models: `velocity` with its input
    `noisy`, and `latents` and `noise` (B...) if samples have noise."""
    mask: Tensor
    """Mask of the values that count in the loss, 1 or 0, of shape BS (token models) or broadcastable to latents."""
    auxiliary_loss: Tensor | None = None
    """Auxiliary loss of the model (load balancing of experts), summed over the samples of the micro-batch, each
    weighted by its number of tokens; None: the model has no such loss."""

    @property
    def mask_BS(self) -> Tensor:
        """Return the mask of the tokens that count in the loss of a token model."""
        return self.mask

    @property
    def logprobs_BS(self) -> Tensor:
        """Return the log-probabilities of a token model, one for each token after the first of its row."""
        return self.outputs["logprobs"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Model inputs of a micro-batch; each `ModelAdapter` has its own subclass."""

    samples: Sequence[Any]
    """Samples of the micro-batch. If empty, this rank only participates in collectives, and the outputs are ignored."""
    indices: Sequence[int]
    inputs: dict[str, Tensor]


OutputSpec = Any
"""Type of a request for model outputs in an update (an optimizer step): `scorer.RequestedOutputs` for token models,
`denoiser.RequestedOutputs` for diffusion models, or None for `ModelAdapter.default_output_request`."""

LossFn = Callable[[Any, dict[str, Tensor]], Tensor | None]
"""Function from a micro-batch and the raw outputs of the model, by name, to the loss of the micro-batch; it returns
None in forward passes without gradients."""


class MicroBatchRunner(Protocol):
    """Base class for running micro-batches through a model, sequentially or through pipeline stages."""

    root_modules: Sequence[nn.Module]
    """Root modules of FSDP, which wrap the model (or its pipeline stages) and are called in its place."""

    def rows_per_micro_batch(self, max_rows: int) -> int:
        """Return the number of rows of each micro-batch; `max_rows` is the maximum number of rows in the model at the
        same time."""
        return max_rows

    def num_micro_batches(self, num_batches: int, max_rows: int) -> int:
        """Return the number of micro-batches that `run` needs for `num_batches` micro-batches with samples. A runner of
        pipeline stages needs more, empty ones, because its schedule requires a certain number in each pass of about
        `max_rows` rows; other runners need none."""
        return num_batches

    def run(
        self, batch_builders: Sequence[Callable[[], Any]], loss_fn: LossFn, output_request: OutputSpec, max_rows: int
    ) -> None:
        """Run the forward pass of micro-batches and, if gradients are enabled, the backward pass.

        `batch_builders` are functions that build the micro-batches. `output_request` says which outputs are computed.
        On ranks that have the last layer, `loss_fn` is called with each batch and its outputs. `max_rows` is the
        maximum number of rows in the model at the same time.
        """

    def train(self, is_training: bool) -> None:
        """Switch the model to training mode (with dropout) if `is_training` is True, otherwise to evaluation mode."""
        for root_module in self.root_modules:
            root_module.train(is_training)

    def reshard(self) -> None:
        """Free the gathered weights that FSDP keeps after a forward pass without a backward pass."""
        for root_module in self.root_modules:
            reshard(root_module)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Result of `ModelAdapter.export`, which writes a model to a folder and verifies it."""

    passed_checks: tuple[str, ...]
    """Texts about the checks that the written model passed, such as `reload: bit-identical`."""
    adapter_folder_name: str = ""
    """Name of the subfolder with the LoRA adapter of the written model; empty if the model has no adapter."""


class ModelAdapter(Protocol):
    """Base class of adapters between the trainer and a model, which convert samples to model inputs, and model outputs
    to values per sample. The model is sharded over the mesh. Only subclasses handle tokens, images or latents."""

    model: Any
    """Module of the model; with a mesh, this rank's shard of it."""
    mesh: Mesh | None
    device: torch.device
    """Device of the model inputs; the weights can be on another device."""
    meta_copy: Any
    """Copy of the model on the meta device with the shapes of all weights, if `model` is sharded; otherwise None."""
    runner: MicroBatchRunner
    default_output_request: OutputSpec
    """Model outputs to compute for an update (an optimizer step) that does not request others."""
    has_auxiliary_loss: bool = False
    """Whether the model adds an auxiliary loss (`MicroBatch.auxiliary_loss`) to the loss of each optimizer step."""
    tokenizer: Any = None
    """Tokenizer of the model; None: the model has no tokenizer."""
    image_reader: Any = None
    """Converter of the images of samples to model inputs; None: samples have no images."""

    def gather_whole_model(self) -> Any:
        """Return the model with all weights. With a mesh, the first rank returns a copy on the CPU, others None."""
        return self.model if self.meta_copy is None else gather_full_model(self.meta_copy, self.model)

    def export(self, export_folder: Path) -> ExportResult | None:
        """Write the model to a folder in its training dtype, and verify that the written model has the same outputs;
        raise StageFailed if the disk is full, or if the outputs differ. All ranks must call this method. The first rank
        writes and returns the result; other ranks return None."""

    def prestart_verification(self) -> None:
        """Start the process that will verify the export, because the process takes seconds to import its libraries."""

    def num_tokens(self, sample: Any) -> int:
        """Return the size of a sample in tokens, by which micro-batches of similar cost are formed and tokens per
        second are counted."""

    def batching_key(self, sample: Any) -> Any:
        """Return a sortable key of a sample. Only samples with equal keys can be in the same micro-batch."""

    def assigned_batch_id(self, sample: Any) -> Hashable | None:
        """Return the id of the micro-batch to which the feed (the source of training samples) has assigned a sample;
        None: the trainer assigns the sample to a micro-batch."""
        return None

    def arrange_micro_batches(
        self, samples: Sequence[Any], sorted_indices: Sequence[int], max_rows: int, num_ranks: int
    ) -> list[list[int]] | None:
        """Return micro-batches, as lists of indices in `samples` (the samples of the update), or None: the trainer then
        forms its usual ones, each of `max_rows` samples of similar cost. Return a list only if its micro-batches need
        less computation than the usual ones. `sorted_indices` are the indices of the samples to arrange, which have
        equal batching keys, in the order of descending cost. The `num_ranks` data-parallel ranks get the micro-batches
        in turn."""
        return None

    def collate(self, samples: Sequence[Any], indices: Sequence[int], padding_sample: Any) -> Any:
        """Collate samples to a `Batch`; `indices` are their indices among the samples of the update. If `samples` is
        empty, collate `padding_sample` for its shapes only: its outputs are ignored."""

    def gather_outputs(self, batch: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the full outputs of a micro-batch, gathered from all ranks that process the same samples."""
        return outputs

    def make_micro_batch(self, batch: Any, outputs: dict[str, Tensor]) -> MicroBatch:
        """Convert `outputs`, the result of `gather_outputs`, to a `MicroBatch` with one row per sample."""

    def split_outputs(self, micro_batch: MicroBatch) -> list[dict[str, Tensor]]:
        """Return the outputs of each sample of a micro-batch, without padding."""

    def attach_loss_derivative(self, batch: Any, loss: Callable[[MicroBatch], Tensor]) -> Any:
        """Return `batch` with the derivative of the function `loss` with respect to the outputs of the model in an
        additional field, so that the forward pass can already compute gradients. The derivative must not depend on the
        values of the outputs. By default, return `batch` unchanged."""
        return batch

    def check_parallel_plan(self) -> None:
        """Run a few tokens through the model to check that its tensor-parallel plan covers all its operations; raise
        ModelError if an operation outside the plan makes ranks compute different gradients. By default, do nothing."""
        return
