"""What the loop and an algorithm say to each other; the loop never asks which algorithm is running.

A feed gives samples, an algorithm turns them into `Update`s (one optimizer step each), and the trainer runs an
update's micro-batches through the model and its `loss`. An algorithm of a user's own is a subclass of `Algorithm` in a
file that `train.train_policy.trainer_type = "file.py:Class"` names.

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
    """What a micro-batch adds to its update."""

    value: Tensor
    """Already divided by the update's denominator: micro-batches are summed, never averaged."""
    metrics: Metrics
    values: dict[str, Tensor] = field(default_factory=dict)
    """Values of each token whose quantiles are reported: name to a flat tensor."""


LossFunction = Callable[[MicroBatch], Loss]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    samples: Sequence[Any]
    loss: LossFunction
    """Knows its denominator, which was fixed over all samples before the first backward."""
    wants: AnyWants = None
    """What the model computes for the loss, in the adapter's own type; None: log-probabilities of a token model, the
    velocity of a diffusion model."""
    has_constant_gradient: bool = False
    """Whether the derivative of the loss by each log-probability is the same whatever the log-probabilities are: it
    saves a second run of the head."""
    compares: tuple[str, ...] = ()
    """Named weights under which the wanted outputs are computed too, before the policy's and without gradient; a
    micro-batch has them as `NAME/OUTPUT`, such as `old/velocity`."""
    data: Update | None = None
    """A data term: other samples with a loss of their own, in the same optimizer step."""


class View(Protocol):
    """What an algorithm may ask the trainer for."""

    def evaluate(
        self, samples: Sequence[Any], wants: AnyWants = None, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the wanted outputs of each sample under named weights, without gradient and dropout.

        `size` samples per forward pass; None: `mini_batch`.
        """
        ...

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        """Make named weights what the policy is now; `optimizer`: and forget the optimizer's moments."""
        ...

    def follow(self, weights: str, fraction: float) -> None:
        """Move named weights towards the policy: weights + fraction * (policy - weights)."""
        ...


class Algorithm:
    """A credit rule and a loss. What it needs of the rest is declared by its parameter class, `AlgorithmConfig`."""

    teacher: DistillationConfig | None = None
    """What is said of the model that `View.evaluate` asks as `teacher`; None: there is none."""

    max_tokens: int
    """The most tokens of a sequence, `policy.model_max_length`."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """How a diffusion model draws and is trained."""
    null_text: Mapping[str, Tensor] | None = None
    """Of a diffusion model, the embedding of the empty prompt."""
    data_term: Callable[[int, int], Update] | None = None
    """Of a diffusion model gives the data term of a train step and of an optimizer step, both counted from 0: real data
    that is learned beside rollouts; None: none is. That of text is `data_term.WithDataTerm`."""

    def __init__(self, config: Any, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        """Take the parameters; the recipe's `[custom]` table, for an algorithm of a user's own; and how completions are
        drawn, None without rollouts."""
        self.config: AlgorithmConfig = config
        self.custom, self.sampling = custom, sampling

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        """Return what is learned of scored groups, and metrics about it."""
        raise AssertionError(f"{type(self).__name__} does not learn from rollouts")

    def updates(self, samples: Sequence[Any], view: View) -> Iterator[Update]:
        """Yield the optimizer steps of one train step; `view` has the weights of the moment of the call."""
        raise AssertionError(f"{type(self).__name__} has no updates")

    def measure(self, chunks: Iterable[Sequence[Any]], view: View, size: int) -> dict[str, float]:
        """Return metrics of held-out samples: token-mean loss in nats, perplexity, and the share of labels that are the
        likeliest token. `size` samples per forward pass."""
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
        """Return what a checkpoint has to keep: JSON values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""


def equal_batches(num_samples: int, size: int | None) -> list[slice]:
    """Return the optimizer batches of a train step: as few as hold at most `size` samples each (None: all), of sizes
    that differ by at most 1. A remainder alone would be a whole step of the optimizer for a few samples."""
    count = -(-num_samples // (size or max(1, num_samples)))
    bounds = [-(-i * num_samples // count) for i in range(count + 1)] if count else []
    return [slice(*each) for each in pairwise(bounds)]


def aligned(rows: Sequence[Tensor], like_BS: Tensor) -> Tensor:
    """Return rows of different lengths as one padded rectangle of the shape, dtype and device of `like_BS`, with the
    dimensions that each token of a row has."""
    out_BS = like_BS.new_zeros((*like_BS.shape, *rows[0].shape[1:]))
    for b, row in enumerate(rows):
        out_BS[b, : len(row)] = row
    return out_BS


def weights_by_metric(config: AlgorithmConfig) -> dict[str, float]:
    """Return the weight of each reward function, a reward service's too, by the name that scores have for its value."""
    if config.remote_rewards is not None:
        return {name: function.weight for function, name in config.remote_rewards.metric_names.items()}
    names = metric_names(config.rewards)
    return {names[reward]: weight for reward, weight in config.rewards.items()}
