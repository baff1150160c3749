"""The adapter of diffusion models: latents at a noise level in, velocities out. What is trained is the denoiser of a
pipeline; everything else of it is `diffusion.py`.

Shapes: B samples, dots for the dimensions of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.base import Batch, Export, MicroBatch
from cosmos_core.models.diffusion import DiffusionModel, Text
from cosmos_core.models.export_pipeline import export_pipeline
from cosmos_core.models.lora import FOLDER as ADAPTER
from cosmos_core.models.lora import is_adapted
from cosmos_core.models.prove_pipeline import prove_pipeline
from cosmos_core.models.sequential import Sequential, forward_context
from cosmos_core.parallel.fsdp import apply_fsdp, fill, without_weights
from cosmos_core.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Wants:
    """What to compute for each sample."""

    guidance: float = 1.0
    """Scale of classifier-free guidance, by the rule of the pipeline, for samples that have a negative text."""


@dataclass(frozen=True, slots=True)
class FlowBatch(Batch):
    """A micro-batch of latents at their noise levels."""

    samples: Sequence[FlowSample]
    sigma_B: Tensor
    text: Text
    negative: Text | None
    num_given_B: Tensor | None


class Denoiser:
    """A `models.base.ModelAdapter`: the denoiser of a pipeline, replicated or sharded over the mesh."""

    model_class: str | None = None
    """The user's own family, as the recipe names it; None: one of ours."""

    def __init__(self, model: Any, family: DiffusionModel, train: TrainConfig, mesh: Mesh | None = None) -> None:
        """`model` is the denoiser that `family.load_denoiser` gave, with its adapter."""
        self.model, self.family, self.mesh = model, family, mesh
        self.device = torch.device(mesh.data.device_type) if mesh else next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.whole = without_weights(model) if mesh else None
        self._train = train
        if mesh and mesh.context:
            family.shard_tokens(model, mesh.context)
        root = Called(model)
        if mesh:
            apply_fsdp(root, model, mesh, train)
        self.runner = Sequential(root, self._forward, train, self.device)

    @property
    def usual_wants(self) -> Wants:
        """See `ModelAdapter.usual_wants`: the velocity, without guidance."""
        return Wants()

    @property
    def tokenizer(self) -> Any:
        """See `ModelAdapter.tokenizer`: the family reads text."""
        return None

    @property
    def vision(self) -> Any:
        """See `ModelAdapter.vision`: no sample shows an image to read."""
        return None

    def whole_model(self) -> Any:
        """See `ModelAdapter.whole_model`."""
        return self.model if self.whole is None else fill(self.whole, self.model)

    def predict(
        self,
        latents: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        num_given_B: Tensor | None = None,
        *,
        negative: Mapping[str, Tensor] | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Return the velocity for a batch of latents at their noise levels, in the dtype of the latents; with
        `negative` text guided by that scale. Samplers call it, under `torch.no_grad`; with a mesh all ranks do."""
        [root] = self.runner.roots

        def velocity(condition: Mapping[str, Tensor]) -> Tensor:
            on_device = {name: value.to(self.device) for name, value in condition.items()}
            with forward_context(self._train, self.device):
                return self.family.predict(root, latents, sigma_B, on_device, num_given_B, dtype=self.dtype)

        conditional = velocity(text)
        return conditional if negative is None else self.family.guided(conditional, velocity(negative), guidance)

    def export(self, target: Path) -> Export | None:
        """See `ModelAdapter.export`."""
        model = self.whole_model()
        if model is None:
            return None
        export_pipeline(self.family, model, target)
        checks = prove_pipeline(self.family, model, target, model_class=self.model_class)
        return Export(tuple(checks), ADAPTER if is_adapted(model) else "")

    def cost(self, sample: FlowSample) -> int:
        """See `ModelAdapter.cost`: positions of the latent."""
        return sample.latents[0].numel()

    def group(self, sample: FlowSample) -> Any:
        """See `ModelAdapter.group`: latents and texts of one shape go together, guided samples apart."""
        texts = tuple(sorted((name, tuple(value.shape)) for name, value in sample.text.items()))
        return tuple(sample.latents.shape), texts, sample.noise is None, sample.negative is None

    def planned(self, sample: FlowSample) -> Hashable | None:
        """See `ModelAdapter.planned`."""
        return None

    def collate(self, samples: Sequence[FlowSample], indices: Sequence[int], filler: FlowSample) -> FlowBatch:
        """See `ModelAdapter.collate`: noise is put onto the latents here."""
        own = samples or [filler]
        latents = self._stacked([sample.latents for sample in own])
        sigma_B = torch.tensor([sample.sigma for sample in own], dtype=torch.float64, device=self.device)
        given = [sample.num_given for sample in own]
        num_given_B = torch.tensor(given, device=self.device) if any(given) else None
        inputs = {"noisy": latents}
        if own[0].noise is not None:
            noise = self._stacked([sample.noise for sample in own if sample.noise is not None])
            noisy = self.family.add_noise(latents, noise, sigma_B.to(latents.dtype), num_given_B)
            inputs = {"noisy": noisy, "latents": latents, "noise": noise}
        negative = None
        if own[0].negative is not None:
            negative = self._text([sample.negative for sample in own if sample.negative is not None])
        return FlowBatch(
            samples, indices, inputs, sigma_B, self._text([sample.text for sample in own]), negative, num_given_B
        )

    def joined(self, batch: FlowBatch, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `ModelAdapter.joined`: ranks that share a sample all have the whole velocity of it."""
        return outputs

    def micro_batch(self, batch: FlowBatch, outputs: dict[str, Tensor]) -> MicroBatch:
        """See `ModelAdapter.micro_batch`."""
        mask = self.family.learned_mask(batch.inputs["noisy"], batch.num_given_B)
        if mask is None:
            mask = batch.inputs["noisy"].new_ones(())
        return MicroBatch(batch.samples, batch.indices, outputs | batch.inputs, mask)

    def rows(self, micro: MicroBatch) -> list[dict[str, Tensor]]:
        """See `ModelAdapter.rows`."""
        return [{"velocity": velocity} for velocity in micro.outputs["velocity"]]

    def expect(self, batch: FlowBatch, loss: Callable[[MicroBatch], Tensor]) -> FlowBatch:
        """See `ModelAdapter.expect`: nothing is gained here, so the loss is differentiated as any other."""
        return batch

    def prove(self) -> None:
        """See `ModelAdapter.prove`: replicas and shards compute what one rank does."""

    def _forward(self, batch: FlowBatch, wants: Wants) -> dict[str, Tensor]:
        velocity = self.predict(
            batch.inputs["noisy"], batch.sigma_B, batch.text, batch.num_given_B,
            negative=batch.negative if wants.guidance != 1.0 else None, guidance=wants.guidance,
        )  # fmt: skip
        return {"velocity": velocity}

    def _stacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Latents are float32 whatever the network computes in; of a network in float64, which tests have, float64."""
        return torch.stack(list(tensors)).to(self.device, torch.promote_types(self.dtype, torch.float32))

    def _text(self, texts: Sequence[Mapping[str, Tensor]]) -> Text:
        return {name: torch.stack([text[name] for text in texts]).to(self.device) for name in texts[0]}


class Called(nn.Module):
    """The denoiser as a module that FSDP wraps: it is called, and nothing else of it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """Call the denoiser; what it returns is no view, which FSDP could not watch."""
        return (self.model(**inputs)[0].clone(),)

    def probe(self) -> None:
        """Do nothing: FSDP is told of a method of this name for token models."""
