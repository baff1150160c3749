"""Losses of preference pairs, values and gradients, against plain transcriptions of their papers as TRL has them, in
float64: `DPOTrainer._compute_loss`, `CPOTrainer.cpo_loss` (SimPO) and `ORPOTrainer.odds_ratio_loss`.

P pairs, T tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cosmos_core.algorithms.dpo import Dpo
from cosmos_core.config.schema.dpo import DpoConfig, DpoLossConfig
from cosmos_core.data.sample import Sample
from tests.unit.trainers import NoView, micro_batch

NUM_PAIRS, WIDTH = 5, 7
REFERENCE_FREE = ("sft", "simpo", "orpo")


def batch(seed: int) -> tuple[list[Sample], Tensor, Tensor]:
    """Chosen and rejected responses in turn, with odd masks: holes, a single token, none at all."""
    generator = np.random.default_rng(seed)
    masks = (generator.random((2 * NUM_PAIRS, WIDTH)) < 0.5).astype(np.uint8)
    masks[0], masks[1], masks[2] = 1, [0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]
    masks[4] = seed % 2
    references = -5 * generator.random(2 * NUM_PAIRS)
    samples = [
        Sample(np.arange(WIDTH + 1), np.concatenate([[0], mask]).astype(np.uint8), reference_logprob=float(reference))
        for mask, reference in zip(masks, references, strict=True)
    ]
    logprobs_BT = torch.tensor(-3 * generator.random(masks.shape) - 1e-3, requires_grad=True)
    return samples, logprobs_BT, torch.tensor(masks).bool()


def expected(name: str, logprobs_BT: Tensor, mask_BT: Tensor, reference_B: Tensor, config: DpoLossConfig) -> Tensor:
    beta, smoothing = config.beta, config.label_smoothing
    logps_B = torch.stack([row_T[mask_T].sum() for row_T, mask_T in zip(logprobs_BT, mask_BT, strict=True)])
    length_B = mask_BT.sum(1).clamp(min=1)
    scores_B = logps_B - reference_B
    (c, r), (c_mean, r_mean) = ((x[::2], x[1::2]) for x in (scores_B, scores_B / length_B))
    p, q = (logps_B / length_B)[::2], (logps_B / length_B)[1::2]
    sft = -logprobs_BT[::2][mask_BT[::2]].mean()

    def cdpo(x: Tensor) -> Tensor:
        return -logsigmoid(x) * (1 - smoothing) - logsigmoid(-x) * smoothing

    def log_odds(x: Tensor) -> Tensor:
        return x - torch.log1p(-torch.exp(x))

    losses = {
        "sigmoid": lambda: cdpo(beta * (c - r)),
        "robust": lambda: (
            (-(1 - smoothing) * logsigmoid(beta * (c - r)) + smoothing * logsigmoid(-beta * (c - r)))
            / (1 - 2 * smoothing)
        ),
        "bco_pair": lambda: -logsigmoid(beta * c) - logsigmoid(-beta * r),
        "hinge": lambda: torch.relu(1 - beta * (c - r)),
        "ipo": lambda: (c_mean - r_mean - 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * (c - r)),
        "sigmoid_norm": lambda: -logsigmoid(beta * (c_mean - r_mean)),
        "simpo": lambda: cdpo(beta * (p - q - config.simpo_gamma / beta)),
        "orpo": lambda: sft - beta * logsigmoid(log_odds(p) - log_odds(q)),
        "sft": lambda: sft,
    }
    return losses[name]().mean()


def loss_and_gradient(samples: list[Sample], logprobs_BT: Tensor, mask_BT: Tensor, config: DpoLossConfig, size: int):
    """Of a step in micro-batches of `size` pairs."""
    (update,) = Dpo(DpoConfig(type="sft", dpo=config)).updates(samples, NoView())
    total = 0.0
    for start in range(0, len(samples), 2 * size):
        rows = slice(start, start + 2 * size)
        indices = range(len(samples))[rows]
        micro = micro_batch(samples[rows], logprobs_BT[rows], mask_BT[rows], indices)
        total = total + update.loss(micro).value
    return total, torch.autograd.grad(total, logprobs_BT)[0]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.full] * (n > 0)) for n in range(4)])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            (name, {})
            for name in ("sigmoid", "bco_pair", "sft", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm")
        ),
        *((name, {"label_smoothing": 0.2}) for name in ("sigmoid", "robust", "simpo")),
        ("simpo", {"beta": 2.0, "simpo_gamma": 1.4}),
        ("orpo", {"beta": 0.5}),
        ("hinge", {"beta": 1.5}),
    ],
)
def test_loss_and_gradient_equal_those_of_the_peers(name: str, settings: dict[str, float], seed: int) -> None:
    config = DpoLossConfig(loss_type=(name,), **{"beta": 0.3, **settings})
    samples, logprobs_BT, mask_BT = batch(seed)
    reference_B = torch.tensor([sample.reference_logprob for sample in samples], dtype=torch.float64)
    wanted = expected(name, logprobs_BT, mask_BT, reference_B, config)
    (gradient,) = torch.autograd.grad(wanted, logprobs_BT)
    gradient = torch.where(mask_BT, gradient, 0.0)
    for size in (NUM_PAIRS, 2, 1):
        found, own = loss_and_gradient(samples, logprobs_BT, mask_BT, config, size)
        assert found.item() == pytest.approx(wanted.item(), abs=1e-9)
        torch.testing.assert_close(own, gradient, rtol=0, atol=1e-9)


def test_a_list_is_the_weighted_sum_of_its_losses() -> None:
    samples, logprobs_BT, mask_BT = batch(0)
    weights = {"sigmoid": 1.0, "simpo": 0.5, "orpo": 0.25}
    config = DpoLossConfig(loss_type=tuple(weights), loss_weights=tuple(weights.values()))
    whole, _ = loss_and_gradient(samples, logprobs_BT, mask_BT, config, 2)
    alone = [
        loss_and_gradient(samples, logprobs_BT, mask_BT, DpoLossConfig(loss_type=(name,)), 2)[0] for name in weights
    ]
    assert whole.item() == pytest.approx(sum(w * each.item() for w, each in zip(weights.values(), alone, strict=True)))


def test_a_response_that_is_certain_has_a_finite_gradient() -> None:
    samples, logprobs_BT, mask_BT = batch(1)
    with torch.no_grad():
        logprobs_BT[0] = 0.0
    loss, gradient = loss_and_gradient(samples, logprobs_BT, mask_BT, DpoLossConfig(loss_type=("orpo",)), NUM_PAIRS)
    assert math.isfinite(loss.item()) and gradient.isfinite().all()


def test_only_losses_with_a_reference_ask_for_one() -> None:
    for name in ("sigmoid", "ipo", "simpo", "orpo", "sft"):
        config = DpoConfig(type="sft", trainer_type="dpo", dpo=DpoLossConfig(loss_type=(name,)))
        assert config.auxiliary_model_names == (() if name in REFERENCE_FREE else ("reference",))
    both = DpoConfig(type="sft", trainer_type="dpo", dpo=DpoLossConfig(loss_type=("simpo", "sigmoid")))
    assert both.auxiliary_model_names == ("reference",)
