"""Interface between the training loop and an algorithm; the loop is independent of the algorithm.

A feed returns samples, an algorithm turns them into `Update`s (one optimizer step each), and the trainer runs the
micro-batches of an update through the model and the update's `loss`. A user-defined algorithm is a subclass of
`Algorithm` in a file that `train.train_policy.trainer_type = "file.py:Class"` names.

Shapes: B samples, S predicted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.base import Wants as AnyWants
from cosmos_core.models.scorer import Wants
from cosmos_core.rewards.base import metric_names
from cosmos_core.types import Sampling, ScoredGroup


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss and metrics of one micro-batch."""

    value: Tensor
    """Loss, already divided by the update's denominator: values of micro-batches are summed, never averaged."""
    metrics: Metrics
    values: dict[str, Tensor] = field(default_factory=dict)
    """Per-token values whose quantiles are reported: name to a flat tensor."""


LossFunction = Callable[[MicroBatch], Loss]


@dataclass(frozen=True, slots=True)
class Update:
    """Samples and loss of one optimizer step."""

    samples: Sequence[Any]
    loss: LossFunction
    """Returns the loss of a micro-batch; its denominator is fixed over all samples before the first backward pass."""
    wants: AnyWants = None
    """Outputs that the model computes for the loss, in the adapter's own type.

    None: log-probabilities for a token model, the velocity for a diffusion model.
    """
    has_constant_gradient: bool = False
    """Whether the derivative of the loss with respect to the log-probabilities does not depend on them.

    This saves a second run of the output head.
    """
    compares: tuple[str, ...] = ()
    """Named weights under which the outputs are also computed, before the policy's and without gradient.

    A micro-batch has these outputs as `NAME/OUTPUT`, for example `old/velocity`.
    """
    data: Update | None = None
    """A data term: other samples with their own loss in the same optimizer step."""


class View(Protocol):
    """Methods of the trainer that an algorithm may call."""

    def evaluate(
        self, samples: Sequence[Any], wants: AnyWants = None, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the requested outputs of each sample under named weights, without gradient and dropout.

        `size`: samples in a forward pass; None: `mini_batch`.
        """
        ...

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        """Set named weights to the policy's current weights; `optimizer`: also reset the optimizer's moments."""
        ...

    def follow(self, weights: str, fraction: float) -> None:
        """Move named weights towards the policy: weights + fraction * (policy - weights)."""
        ...


class Algorithm:
    """Base class of algorithms: a credit rule and a loss. The parameter class `AlgorithmConfig` declares other
    requirements."""

    teacher: DistillationConfig | None = None
    """Settings of the teacher, the model that `View.evaluate` runs as `teacher`; None: there is no teacher."""

    max_tokens: int
    """Maximum number of tokens in a sequence, `policy.model_max_length`."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Settings for sampling from and training a diffusion model."""
    null_text: Mapping[str, Tensor] | None = None
    """Diffusion models: the embedding of the empty prompt."""
    data_term: Callable[[int, int], Update] | None = None
    """Diffusion models: returns the data term, real data that is trained on together with rollouts; None: no data term.

    Its arguments are the numbers of the train step and of the optimizer step, counted from 0. For text models see
    `data_term.WithDataTerm`.
    """

    def __init__(self, config: Any, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        """Store the settings.

        Args:
            config: the parameters of the algorithm.
            custom: the recipe's `[custom]` table, for user-defined algorithms.
            sampling: the sampling settings of completions; None: no rollouts.
        """
        self.config: AlgorithmConfig = config
        self.custom, self.sampling = custom, sampling

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples to train on, made of scored groups, and metrics about them."""
        raise AssertionError(f"{type(self).__name__} does not learn from rollouts")

    def updates(self, samples: Sequence[Any], view: View) -> Iterator[Update]:
        """Yield the optimizer steps of one train step; `view` evaluates with the weights at the time of the call."""
        raise AssertionError(f"{type(self).__name__} has no updates")

    def measure(self, chunks: Iterable[Sequence[Any]], view: View, size: int) -> dict[str, float]:
        """Return metrics of held-out samples: loss in nats per token, perplexity, and top-1 accuracy of the labels.

        `size`: samples in a forward pass.
        """
        loss_sum, num_top, num_tokens = 0.0, 0.0, 0
        for samples in chunks:
            rows = view.evaluate(samples, Wants(is_top=True), size=size)
            loss_sum -= sum(row["logprobs"].sum(dtype=torch.float64).item() for row in rows)
            num_top += sum(row["is_top"].sum().item() for row in rows)
            num_tokens += sum(sample.num_learned for sample in samples)
        loss = loss_sum / max(1, num_tokens)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "token_accuracy": num_top / max(1, num_tokens),
            "tokens": float(num_tokens),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, as JSON values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def equal_batches(num_samples: int, size: int | None) -> list[slice]:
    """Return the optimizer batches of a train step, as few as possible with at most `size` samples each (None: one
    batch).

    Their sizes differ by at most 1, because a small remainder would get a whole optimizer step for a few samples.
    """
    count = -(-num_samples // (size or max(1, num_samples)))
    bounds = [-(-i * num_samples // count) for i in range(count + 1)] if count else []
    return [slice(*each) for each in pairwise(bounds)]


def align_rows(rows: Sequence[Tensor], like_BS: Tensor) -> Tensor:
    """Return rows of different lengths padded to the shape of `like_BS`, in its dtype and on its device.

    Further dimensions of a row's tokens are kept.
    """
    out_BS = like_BS.new_zeros((*like_BS.shape, *rows[0].shape[1:]))
    for b, row in enumerate(rows):
        out_BS[b, : len(row)] = row
    return out_BS


def weights_by_metric(config: AlgorithmConfig) -> dict[str, float]:
    """Return the weight of each local or remote reward function, by the name of its metric in scores."""
    if config.remote_rewards is not None:
        return {name: function.weight for function, name in config.remote_rewards.metric_names.items()}
    names = metric_names(config.rewards)
    return {names[reward]: weight for reward, weight in config.rewards.items()}
