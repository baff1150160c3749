"""Supervised flow matching: the network is trained on the velocity between data and noise at random noise levels.

Noise, noise levels and prompt dropout are sampled in `data/flow_sample.py`; the model adapter adds the noise.

Shapes: B samples, dots for the dimensions of a latent.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.flow import compute_velocity, mean_per_sample


def compute_velocity_error(predicted_velocity: Tensor, target_velocity: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared velocity error per sample (B, at least float32); `mask` is 0 for conditioning frames."""
    loss_dtype = torch.promote_types(predicted_velocity.dtype, torch.float32)
    return mean_per_sample((predicted_velocity.to(loss_dtype) - target_velocity.to(loss_dtype)).square(), mask)


def compute_flow_loss(micro_batch: MicroBatch, num_samples: int) -> Loss:
    """Return the sum of the velocity errors of a micro-batch's samples, weighted by noise level and divided by
    `num_samples`, the number of samples of the whole optimizer step. SFT has this loss, and RL algorithms can add it as
    data term."""
    target_velocity = compute_velocity(micro_batch.outputs["latents"], micro_batch.outputs["noise"])
    velocity_error_B = compute_velocity_error(micro_batch.outputs["velocity"], target_velocity, micro_batch.mask)
    sample_weights_B = torch.tensor(
        [sample.weight for sample in micro_batch.samples], dtype=velocity_error_B.dtype, device=velocity_error_B.device
    )
    sample_count = torch.tensor(float(len(micro_batch.samples)), dtype=torch.float64, device=velocity_error_B.device)
    flow_error_metric = torch.stack([velocity_error_B.detach().double().sum(), sample_count])
    return Loss((sample_weights_B * velocity_error_B).sum() / num_samples, {"flow_error": flow_error_metric})


class DiffusionSft(Algorithm):
    """Supervised flow matching: one optimizer step per train step, with the mean loss over all samples of the step."""

    def updates(self, samples: Sequence[FlowSample], view: TrainerView) -> Iterator[Update]:
        yield Update(samples, lambda micro_batch: compute_flow_loss(micro_batch, len(samples)))

    def measure(self, chunks: Iterable[Sequence[FlowSample]], view: TrainerView, size: int) -> dict[str, float]:
        """Return the mean velocity error of held-out samples, each at the noise level that is stored in the sample."""
        loss_sum, num_samples = 0.0, 0
        for samples in chunks:
            for sample, row in zip(samples, view.evaluate(samples, size=size), strict=True):
                assert sample.noise is not None
                velocity_residual = row["velocity"] - compute_velocity(sample.latents, sample.noise).to(row["velocity"])
                # Leave out the conditioning frames, which a clip may have at its start; latents of an image have none.
                loss_sum += velocity_residual[:, sample.num_conditioning_frames :].double().square().mean().item()
                num_samples += 1
        return {"loss": loss_sum / max(1, num_samples), "samples": float(num_samples)}


ALGORITHM = DiffusionSft
