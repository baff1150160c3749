"""A trainer of a causal language model without a stage, trainings that stop, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.algorithms.sft import Sft
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.sft import SftConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.errors import Preempted
from cosmos_core.models.balance import load_balancing_settings
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.processor import ImageReader
from cosmos_core.models.scorer import LOGPROBS_ONLY, LogprobScorer, RequestedOutputs
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import train
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Sampling


def trainer_of(  # noqa: PLR0913 - each with a default
    model: PreTrainedModel,
    train: TrainConfig,
    pad_id: int,
    progress: ProgressWriter,
    mesh: Mesh | None = None,
    vision: ImageReader | None = None,
    balance: float = 0.0,
) -> Trainer:
    adapter = CausalLM(model, train, InputProcessing(pad_id, vision), mesh, load_balancing_settings(model, balance))
    return Trainer(adapter, train, progress)


def score_in(trainer: Trainer, dtype: torch.dtype) -> None:
    """Compute log-probabilities in a dtype that no recipe may ask for, such as float64."""
    adapter: Any = trainer.adapter
    for part in (adapter, *adapter.runner.root_modules):
        part._logprob_dtype = dtype
    if hasattr(adapter.runner, "_run_forward"):
        adapter.runner._run_forward = partial(adapter.runner.root_modules[0].score_batch, dtype=dtype)


def logprobs(trainer: Trainer, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
    return [row["logprobs"] for row in trainer.evaluate(samples, RequestedOutputs(temperature))]


def likelihood(trainer: Trainer, samples: Sequence[Sample], *, size: int) -> tuple[float, float]:
    """Return the sum of the log-probabilities of the learned tokens, and how many are the likeliest."""
    rows = trainer.evaluate(samples, RequestedOutputs(is_argmax=True), size=size)
    logprob = sum(row["logprobs"].sum(dtype=torch.float64).item() for row in rows)
    return logprob, sum(row["is_argmax"].sum().item() for row in rows)


def train_until(stage: Stage, step: int) -> None:
    """Train a stage that is asked to stop when the metrics of a step are logged."""
    stage.metrics.line_callbacks.append(lambda line: setattr(stage, "stop_requested", line["step"] == step))
    with pytest.raises(Preempted, match=f"stopped after step {step} .*checkpoint saved"):
        train(stage)
    stage.stop_requested = False
    stage.metrics.line_callbacks.clear()
    torch.manual_seed(999)  # another process would have other random states


def curve(stage: Stage) -> list[dict[str, float]]:
    """The metrics, without times."""
    lines = read_metrics(stage.path / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time", "throughput", "memory"))} for line in lines]


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    weights = other.state_dict()
    assert one.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def sft() -> Sft:
    return Sft(SftConfig(type="sft"))


def grpo(config: GrpoConfig, sampling: Sampling | None = None) -> Grpo:
    return Grpo(config, {}, sampling)


class NoView:
    """For algorithms that ask the trainer for nothing."""

    def evaluate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("asked for outputs")

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        raise AssertionError("asked for other weights")

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        raise AssertionError("asked for other weights")


class Given:
    """A view whose outputs are given, by the name of the weights."""

    def __init__(self, **logprobs: Sequence[Tensor]) -> None:
        self._logprobs = logprobs
        self.resets: list[tuple[str, bool]] = []
        self.entropies: Sequence[Tensor] | None = None

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        self.resets.append((weights, optimizer))

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        raise AssertionError("asked for other weights")

    def evaluate(
        self,
        samples: Sequence[Any],
        wants: RequestedOutputs = LOGPROBS_ONLY,
        *,
        weights: str = "policy",
        size: int | None = None,
    ) -> list[dict[str, Tensor]]:
        rows = [{"logprobs": row} for row in self._logprobs[weights]]
        return [row | {"entropy": entropy} for row, entropy in zip(rows, self.entropies or (), strict=False)] or rows


def micro_batch(
    samples: Sequence[Sample], logprobs_BS: Tensor, mask_BS: Tensor, indices: Sequence[int] = (), **outputs: Tensor
) -> MicroBatch:
    return MicroBatch(samples, indices or range(len(samples)), {"logprobs": logprobs_BS, **outputs}, mask_BS)


def sequence_logprobs(
    model: PreTrainedModel,
    input_ids_BT: Tensor,
    attention_mask_BT: Tensor,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the log-probability of tokens 1..T-1 given those before them: BS.

    Padding may be on either side. Where a token or the one before it is padding the value is 0.
    """
    is_real_BT = attention_mask_BT.bool()
    is_scored_BS = is_real_BT[:, 1:] & is_real_BT[:, :-1]
    inputs = {
        "input_ids": input_ids_BT,
        "attention_mask": attention_mask_BT,
        "position_ids": (attention_mask_BT.long().cumsum(-1) - 1).clamp(min=0),
    }
    chosen_N = is_scored_BS.flatten().nonzero().squeeze(-1)
    outputs = LogprobScorer(model)(inputs, chosen_N, output_request=RequestedOutputs(temperature), dtype=dtype)
    logprobs_N = outputs["logprobs"]
    return logprobs_N.new_zeros(is_scored_BS.numel()).index_put((chosen_N,), logprobs_N).view(is_scored_BS.shape)
