"""Interface between the training loop and an algorithm; the loop is independent of the algorithm.

A feed (the source of training samples) returns samples, an algorithm groups the samples into `Update`s of one optimizer
step each, and the trainer runs the micro-batches of an update through the model and through the function `Update.loss`.
A user-defined algorithm is a subclass of `Algorithm`; `train.train_policy.trainer_type = "file.py:Class"` selects it.

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
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch, OutputSpec
from cosmos_core.models.scorer import RequestedOutputs
from cosmos_core.rewards.base import metric_names
from cosmos_core.types import Sampling, ScoredGroup


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss and metrics of one micro-batch."""

    value: Tensor
    """Loss of the micro-batch, divided by the denominator of the whole optimizer step, so that the losses of
    micro-batches are summed."""
    metrics: Metrics
    """Metrics of the micro-batch by name, as `[sum, count]` or as numbers; the mean of a number over micro-batches is
    reported."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Per-token values whose quantiles are reported, by metric name; each tensor has one dimension."""

    def __post_init__(self) -> None:
        """Convert each metric that is a number to `[number, 1]`, so that the number is averaged over micro-batches."""
        metrics = {name: _to_sum_and_count(name, value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)


@dataclass(frozen=True, slots=True)
class Update:
    """Samples and loss of one optimizer step."""

    samples: Sequence[Any]
    loss: Callable[[MicroBatch], Loss]
    """Function that returns the loss of a micro-batch. This loss is divided by the denominator of the whole optimizer
    step, such as its number of trained tokens, so that the losses of micro-batches are summed."""
    request: OutputSpec = None
    """Model outputs that the loss needs, as an instance of the `OutputSpec` class of the model's adapter; None:
    log-probabilities for a token model, the velocity for a diffusion model."""
    has_constant_gradient: bool = False
    """Whether the derivative of the loss with respect to the log-probabilities is independent of their values, so that
    the backward pass need not run the output head a second time."""
    extra_weights: tuple[str, ...] = ()
    """Names of other versions of the weights, such as `old` for the old policy, with which the model's outputs are also
    computed, without gradient and before those of the policy. The names of these outputs in a `MicroBatch` are
    `NAME/OUTPUT`, such as `old/velocity`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the optimizer step that do not depend on the model's outputs."""
    data: Update | None = None
    """Samples and loss of a data term (supervised loss on rows of a data set) for the same optimizer step; None: no
    term."""


class TrainerView(Protocol):
    """Methods of the trainer that algorithms call."""

    def evaluate(
        self, samples: Sequence[Any], request: OutputSpec = None, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, Tensor]]:
        """Return the requested model outputs of each sample, computed without gradient and dropout.

        Args:
            samples: samples to run through the model.
            request: outputs to compute; None: the default outputs of the adapter.
            weights: name of the weights to use, such as `policy`, `reference` or `teacher`.
            size: number of samples in a forward pass; None: `mini_batch`.
        """

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        """Copy the policy's weights to the model that `weights` names, such as `reference`; with `optimizer`, also
        reset the moments of the optimizer."""

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        """Move the weights W of the model that `weights` names, such as `old`, towards those of the policy: W +
        `fraction` * (policy - W)."""


class Algorithm:
    """Base class of algorithms, which compute the advantages of rollouts and the losses of optimizer steps. An
    algorithm has a class for its settings, a subclass of `AlgorithmConfig`, which declares what the trainer has to
    provide, such as rollouts or a reference policy."""

    teacher: DistillationConfig | None = None
    """Settings of distillation from a teacher, whose weights `TrainerView.evaluate` calls `teacher`; None: no
    teacher."""
    max_tokens: int
    """Maximum number of tokens of a sample (`policy.model_max_length`)."""
    diffusers: DiffusersConfig = DiffusersConfig()
    """Settings for sampling from and training a diffusion model."""
    has_separate_gradients: bool = False
    """Whether the gradient of a sample depends neither on other samples nor on random numbers, so that samples with a
    gradient of 0 can be skipped; False with dropout, or if the model has an auxiliary loss (mixture of experts)."""
    null_text: Mapping[str, Tensor] | None = None
    """Embedding of the empty prompt for classifier-free guidance, as tensors by name; None for language models."""
    data_term: Callable[[int, Sequence[int], int], Update] | None = None
    """Function that returns the data term (supervised loss on data rows) that a diffusion model adds to an optimizer
    step. Its arguments are the number of the train step, the ids of the prompts of this train step, and the number of
    the optimizer step; steps are counted from 0. None: no such loss. Text models use `data_term.DataTermAlgorithm`
    instead."""

    def __init__(self, config: Any, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        """Store `config`, the parameters of the algorithm; `custom`, the recipe's table `[custom]` for user-defined
        algorithms; and `sampling`, the sampling settings of completions (None: the training has no rollouts)."""
        self.config: AlgorithmConfig = config
        self.custom, self.sampling = custom, sampling

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        """Compute the advantages of completions from their rewards. Return the completions to train on as samples, and
        metrics. Each of `groups` has the scored completions of one prompt."""
        raise AssertionError(f"{type(self).__name__} does not learn from rollouts")

    def updates(self, samples: Sequence[Any], view: TrainerView) -> Iterator[Update]:
        """Yield an `Update` for each optimizer step of one train step, which trains on `samples`. `view` computes
        outputs of the current weights: each optimizer step is taken before the next is requested."""
        raise AssertionError(f"{type(self).__name__} has no updates")

    def after_train_step(self, step: int, view: TrainerView) -> None:
        """Hook that the trainer calls at the end of train step `step`, counted from 1, even if it had no samples and no
        optimizer step. By default, reset the reference policy every `reference_reset_interval` train steps."""
        config = self.config
        if isinstance(config, GrpoConfig) and (interval := config.reference_reset_interval) and step % interval == 0:
            view.reset("reference", optimizer=config.reset_optimizer_with_reference)

    def measure(self, chunks: Iterable[Sequence[Any]], view: TrainerView, size: int) -> dict[str, float]:
        """Return metrics of held-out samples: loss in nats per token, perplexity, and top-1 accuracy of the tokens.
        `chunks`: lists of samples that are evaluated together; `size`: number of samples in a forward pass."""
        loss_sum, num_correct_tokens, num_tokens = 0.0, 0.0, 0
        sums_by_dataset: dict[str, tuple[float, int]] = {}
        for samples in chunks:
            outputs = view.evaluate(samples, RequestedOutputs(is_argmax=True), size=size)
            losses = [-row["logprobs"].sum(dtype=torch.float64).item() for row in outputs]
            loss_sum += sum(losses)
            for sample, sample_loss in zip(samples, losses, strict=True):
                if dataset := getattr(sample, "source", ""):
                    dataset_loss, token_count = sums_by_dataset.get(dataset, (0.0, 0))
                    sums_by_dataset[dataset] = dataset_loss + sample_loss, token_count + sample.num_learned
            num_correct_tokens += sum(row["is_argmax"].sum().item() for row in outputs)
            num_tokens += sum(sample.num_learned for sample in samples)
        loss = loss_sum / max(1, num_tokens)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "token_accuracy": num_correct_tokens / max(1, num_tokens),
            "tokens": float(num_tokens),
            **{f"loss/{dataset}": total / max(1, count) for dataset, (total, count) in sums_by_dataset.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the algorithm that checkpoints store, as JSON values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def _to_sum_and_count(name: str, value: Any) -> Tensor:
    if isinstance(value, list | tuple):
        value = torch.stack([_to_scalar(name, number) for number in value]) if value else torch.zeros(0)
    if isinstance(value, Tensor) and value.shape == (2,):
        return value
    number = _to_scalar(name, value)
    return torch.stack([number, torch.ones_like(number)])


def _to_scalar(name: str, value: Any) -> Tensor:
    try:
        metric_value = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} = {value!r} is no number; give a number, or [sum, count]") from error
    if metric_value.numel() != 1:
        shape = tuple(metric_value.shape)
        raise TypeError(f"metric {name!r} has the shape {shape}; give a number, or [sum, count] as token_metric does")
    return metric_value.reshape(())


def split_equally(num_samples: int, size: int | None) -> list[slice]:
    """Divide the `num_samples` samples of a train step into its optimizer steps, and return one slice for each. A slice
    has at most `size` samples; None: one slice has all samples. Sizes differ by at most 1, because otherwise a few
    remaining samples could get an optimizer step of their own."""
    num_batches = -(-num_samples // (size or max(1, num_samples)))
    batch_boundaries = [-(-i * num_samples // num_batches) for i in range(num_batches + 1)] if num_batches else []
    return [slice(*slice_bounds) for slice_bounds in pairwise(batch_boundaries)]


def metric_weights(config: AlgorithmConfig) -> dict[str, float]:
    """Return the weight of each local or remote reward function, by the function's name in `Score.metrics`."""
    if config.remote_reward_config is not None:
        return {name: reward_fn.weight for reward_fn, name in config.remote_reward_config.metric_names.items()}
    return {name: config.rewards[reward_name] for reward_name, name in metric_names(config.rewards).items()}
