"""Model adapter of diffusion models: the denoiser of a pipeline, which predicts the velocity of latents at a noise
level. `diffusion.py` handles the other components of the pipeline.

Shapes: B samples, dots for the dimensions of a latent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.base import Batch, ExportResult, MicroBatch, ModelAdapter
from cosmos_core.models.diffusion import DiffusionModel, TextInputs
from cosmos_core.models.export_pipeline import export_pipeline
from cosmos_core.models.lora import ADAPTER_FOLDER, has_lora_adapter
from cosmos_core.models.new_interpreter import prestart_interpreter
from cosmos_core.models.sequential_runner import SequentialRunner, forward_context
from cosmos_core.models.verify_pipeline_export import verify_pipeline
from cosmos_core.parallel.fsdp import apply_fsdp, copy_without_weights
from cosmos_core.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """Settings with which a denoiser computes the velocity of each sample."""

    guidance: float = 1.0
    """Scale of classifier-free guidance, by the pipeline's formula, for samples with a negative prompt; 1: off."""


@dataclass(frozen=True, slots=True)
class FlowBatch(Batch):
    samples: Sequence[FlowSample]
    sigma_B: Tensor
    text_inputs: TextInputs
    negative_text_inputs: TextInputs | None
    num_conditioning_B: Tensor | None


class Denoiser(ModelAdapter):
    """Interface of the trainer to the denoiser of a diffusion pipeline, the network that predicts the velocity. The
    network is replicated or sharded over the device mesh."""

    default_output_request: RequestedOutputs = RequestedOutputs()

    def __init__(
        self, model: Any, family: DiffusionModel, train_config: TrainConfig, mesh: Mesh | None = None,
        model_class: str | None = None,
    ) -> None:  # fmt: skip
        """Prepare the denoiser `model`, which can include a LoRA adapter, for training, sharded over the mesh. `family`
        is the rest of its pipeline. `model_class` is the import path of a user-defined family; None: the family is
        built in."""
        self.model, self.family, self.mesh, self._model_class = model, family, mesh, model_class
        self.device = torch.device(mesh.dp.device_type) if mesh else next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.meta_copy = copy_without_weights(model) if mesh else None
        self._train_config = train_config
        if mesh and mesh.cp:
            family.shard_tokens(model, mesh.cp)
        fsdp_root = FsdpRoot(model)
        if mesh:
            apply_fsdp(fsdp_root, model, mesh, train_config)
        self.runner = SequentialRunner(fsdp_root, self._compute_outputs, train_config, self.device)

    def predict(
        self,
        latents: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        num_conditioning_B: Tensor | None = None,
        *,
        negative_text: Mapping[str, Tensor] | None = None,
        guidance: float = 1.0,
    ) -> Tensor:
        """Return the velocity for a batch of latents at their noise levels, in the dtype of the latents.

        With `negative_text`, the embedding of a negative prompt, the velocity has classifier-free guidance of the scale
        `guidance`. `num_conditioning_B` is the number of clean conditioning frames of each sample. Samplers call
        this method under `torch.no_grad`. With a mesh, all ranks must call this method.
        """
        [root] = self.runner.root_modules

        def predict_with_text(text_inputs: Mapping[str, Tensor]) -> Tensor:
            device_inputs = {name: value.to(self.device) for name, value in text_inputs.items()}
            with forward_context(self._train_config, self.device):
                return self.family.predict(root, latents, sigma_B, device_inputs, num_conditioning_B, dtype=self.dtype)

        if negative_text is None:
            return predict_with_text(text)
        return self.family.apply_guidance(predict_with_text(text), predict_with_text(negative_text), guidance)

    def export(self, export_folder: Path) -> ExportResult | None:
        model = self.gather_whole_model()
        if model is None:
            return None
        export_pipeline(self.family, model, export_folder)
        passed_checks = verify_pipeline(self.family, model, export_folder, model_class=self._model_class)
        return ExportResult(tuple(passed_checks), ADAPTER_FOLDER if has_lora_adapter(model) else "")

    def prestart_verification(self) -> None:
        prestart_interpreter(verify_pipeline.__module__)

    def num_tokens(self, sample: FlowSample) -> int:
        """Return the size of a sample, by which micro-batches of similar cost are formed: the number of elements of one
        channel of its latents."""
        return sample.latents[0].numel()

    def batching_key(self, sample: FlowSample) -> Any:
        """Return a key that is equal for samples that can be stacked: their latents and text inputs have equal shapes,
        and either all or none of them have a negative prompt."""
        text_shapes = tuple(sorted((name, tuple(text_input.shape)) for name, text_input in sample.text.items()))
        return tuple(sample.latents.shape), text_shapes, sample.negative_text is None

    def collate(self, samples: Sequence[FlowSample], indices: Sequence[int], padding_sample: FlowSample) -> FlowBatch:
        """Stack samples, or `padding_sample` if `samples` is empty, and add the noise of the samples to their latents.
        Either all samples have noise, or all latents are noisy already."""
        collated_samples = samples or [padding_sample]
        latents = self._stack_latents([sample.latents for sample in collated_samples])
        sigma_B = torch.tensor([sample.sigma for sample in collated_samples], dtype=torch.float64, device=self.device)
        given_frame_counts = [sample.num_conditioning_frames for sample in collated_samples]
        num_conditioning_B = torch.tensor(given_frame_counts, device=self.device) if any(given_frame_counts) else None
        inputs = {"noisy": latents}
        noise_by_sample = [noise for sample in collated_samples if (noise := sample.noise) is not None]
        if noise_by_sample:
            noise = self._stack_latents(noise_by_sample)
            noisy_latents = self.family.add_noise(latents, noise, sigma_B.to(latents.dtype), num_conditioning_B)
            inputs = {"noisy": noisy_latents, "latents": latents, "noise": noise}
        negative_texts = [sample.negative_text for sample in collated_samples if sample.negative_text is not None]
        negative_text_inputs = self._stack_text_inputs(negative_texts) if negative_texts else None
        text_inputs = self._stack_text_inputs([sample.text for sample in collated_samples])
        return FlowBatch(samples, indices, inputs, sigma_B, text_inputs, negative_text_inputs, num_conditioning_B)

    def make_micro_batch(self, batch: FlowBatch, outputs: dict[str, Tensor]) -> MicroBatch:
        trained_frames_mask = self.family.trained_frames_mask(batch.inputs["noisy"], batch.num_conditioning_B)
        if trained_frames_mask is None:
            trained_frames_mask = batch.inputs["noisy"].new_ones(())
        return MicroBatch(batch.samples, batch.indices, outputs | batch.inputs, trained_frames_mask)

    def split_outputs(self, micro_batch: MicroBatch) -> list[dict[str, Tensor]]:
        return [{"velocity": velocity} for velocity in micro_batch.outputs["velocity"]]

    def _compute_outputs(self, batch: FlowBatch, output_request: RequestedOutputs) -> dict[str, Tensor]:
        guidance = output_request.guidance
        velocity = self.predict(
            batch.inputs["noisy"], batch.sigma_B, batch.text_inputs, batch.num_conditioning_B,
            negative_text=batch.negative_text_inputs if guidance != 1.0 else None, guidance=guidance
        )  # fmt: skip
        return {"velocity": velocity}

    def _stack_latents(self, latents_by_sample: Sequence[Tensor]) -> Tensor:
        """Stack latents in float32, or in float64 if the weights of the network are float64."""
        return torch.stack(list(latents_by_sample)).to(self.device, torch.promote_types(self.dtype, torch.float32))

    def _stack_text_inputs(self, text_inputs: Sequence[Mapping[str, Tensor]]) -> TextInputs:
        return {name: torch.stack([text[name] for text in text_inputs]).to(self.device) for name in text_inputs[0]}


class FsdpRoot(nn.Module):
    """Root module for FSDP: it wraps the denoiser of a diffusion model, whose forward pass runs through this module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """Call the denoiser and return a clone of its output, because FSDP cannot attach hooks to a view."""
        return (self.model(**inputs)[0].clone(),)

    def probe_hidden_states(self) -> None:
        """Do nothing: `apply_fsdp` requires this method, but only language models call it."""
