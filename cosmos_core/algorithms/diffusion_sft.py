"""Supervised flow matching: the network is trained on the velocity between data and noise at random noise levels.

Not here: sampling of noise and noise levels and prompt dropout (`data/flow_sample.py`), and adding noise to latents,
which the model adapter does.

Shapes: B samples, dots for the dimensions of a latent.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.flow import velocity


def flow_error(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared error of the predicted velocity per sample (shape B, at least float32).

    `mask` is 1 for trained frames and 0 for conditioning frames.
    """
    loss_dtype = torch.promote_types(predicted.dtype, torch.float32)
    weights = mask.to(loss_dtype).expand_as(predicted).flatten(1)
    squares = (predicted.to(loss_dtype) - target.to(loss_dtype)).square().flatten(1)
    return (squares * weights).sum(1) / weights.sum(1)


def flow_loss(micro: MicroBatch, num_samples: int) -> Loss:
    """Return the weighted sum of the velocity errors of a micro-batch, divided by `num_samples`.

    `num_samples` is the number of samples of the whole optimizer step. SFT has this loss, and RL algorithms can add it
    as data term, a supervised loss on data rows.
    """
    target = velocity(micro.outputs["latents"], micro.outputs["noise"])
    error_B = flow_error(micro.outputs["velocity"], target, micro.mask)
    weights_B = torch.tensor([sample.weight for sample in micro.samples], dtype=error_B.dtype, device=error_B.device)
    count = torch.tensor(float(len(micro.samples)), dtype=torch.float64, device=error_B.device)
    metric = torch.stack([error_B.detach().double().sum(), count])
    return Loss((weights_B * error_B).sum() / num_samples, {"flow_error": metric})


class DiffusionSft(Algorithm):
    """Supervised flow matching: one optimizer step per train step, with the mean loss over all samples of the step."""

    def updates(self, samples: Sequence[FlowSample], view: TrainerView) -> Iterator[Update]:
        yield Update(samples, lambda micro: flow_loss(micro, len(samples)))

    def measure(self, chunks: Iterable[Sequence[FlowSample]], view: TrainerView, size: int) -> dict[str, float]:
        """Return the mean velocity error of held-out samples, each at the noise level that is stored in the sample."""
        total, count = 0.0, 0
        for samples in chunks:
            for sample, row in zip(samples, view.evaluate(samples, size=size), strict=True):
                total += _error(sample, row["velocity"])
                count += 1
        return {"loss": total / max(1, count), "samples": float(count)}


def _error(sample: FlowSample, predicted: Tensor) -> float:
    """Return the mean squared error of the predicted velocity of one sample over its trained frames."""
    assert sample.noise is not None
    target = velocity(sample.latents, sample.noise).to(predicted)
    first = sample.num_conditioning_frames
    trained_frames: Any = (slice(None), slice(first, None)) if first else slice(None)
    return (predicted[trained_frames] - target[trained_frames]).double().square().mean().item()


ALGORITHM = DiffusionSft
