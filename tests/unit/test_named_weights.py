"""The moving average of weights, by hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.train.weight_sets import MovingAverage, WeightSets


def move(model: torch.nn.Linear, value: float) -> torch.nn.Linear:
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def single_weight(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    return move(torch.nn.Linear(1, 1, bias=False, dtype=dtype), 1.0)


def averages(values: list[float], **settings: object) -> list[float]:
    """The average after each step, whose weight is given; before the first it is 1."""
    model = single_weight()
    named = WeightSets(model)
    average = MovingAverage(named, TrainConfig.model_validate({"ema_enable": True, **settings}))
    found = []
    for count, value in enumerate(values, start=1):
        move(model, value)
        average.update(count)
        found.append(named.tensors["ema"]["weight"].item())
    return found


def reference(values: list[float], decay: float, interval: int) -> list[float]:
    """EMAModuleWrapper.step of DiffusionNFT and Flow-GRPO, which are called after the step has been counted."""
    average, found = 1.0, []
    for step, value in enumerate(values, start=1):
        if (step + 1) % interval == 0:
            average += (1 - min((1 + step) / (10 + step), decay)) * (value - average)
        found.append(average)
    return found


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("interval", [0, 1, 2, 3])
def test_the_average_is_that_of_the_reference_implementations(decay: float, interval: int) -> None:
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)).tolist()
    found = averages(values, ema_decay=decay, ema_update_step_interval=interval)
    assert found == pytest.approx(reference(values, decay, max(1, interval)), abs=1e-6)


def test_the_decay_rises_with_the_step_up_to_its_bound() -> None:
    # Decays 2/11, 3/12 of (1 + n) / (10 + n), then the bound of 0.3 below 4/13.
    assert averages([0.0, 0.0, 0.0], ema_decay=0.3) == pytest.approx([2 / 11, 2 / 44, 2 / 44 * 0.3])


def test_the_model_has_the_averages_inside_the_block_and_its_own_weights_after_it() -> None:
    model = single_weight()
    named = WeightSets(model)
    average = MovingAverage(named, TrainConfig(ema_enable=True))
    move(model, 2.0)
    average.update(1)
    with named.use_weights("ema"):
        assert model.weight.item() == pytest.approx(2 - 2 / 11)
    assert model.weight.item() == 2.0
    with pytest.raises(KeyError), named.use_weights("ema"):
        raise KeyError
    assert model.weight.item() == 2.0
    named.copy_to_policy("ema")
    assert model.weight.item() == pytest.approx(2 - 2 / 11)


@pytest.mark.parametrize(("num_updates", "is_told"), [(2, True), (3, False)])
def test_a_training_that_is_too_short_for_its_average_says_so(
    num_updates: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = single_weight()
    average = MovingAverage(WeightSets(model), TrainConfig(ema_enable=True, ema_update_step_interval=4))
    for count in range(1, num_updates + 1):
        move(model, 2.0)
        average.update(count)
    average.copy_to_policy(num_updates)
    assert (model.weight.item() == 1.0) == is_told
    assert ("ema_update_step_interval = 4: 2 optimizer steps never updated" in caplog.text) == is_told


def test_an_average_of_bfloat16_weights_moves_by_less_than_they_can() -> None:
    model = single_weight(torch.bfloat16)
    named = WeightSets(model)
    average = MovingAverage(named, TrainConfig(ema_enable=True, ema_decay=0.9999))
    move(model, 2.0)
    average.update(100_000)
    assert named.tensors["ema"]["weight"].item() == pytest.approx(1.0001, abs=1e-6)


def test_an_old_policy_follows_weights_in_bfloat16() -> None:
    model = single_weight(torch.bfloat16)
    named = WeightSets(model)
    named.add("old")
    assert named.equals_policy("old")
    move(model, 2.0)
    for _ in range(2000):
        named.move_towards_policy("old", 0.001)
    assert 2 - named.tensors["old"]["weight"].item() == pytest.approx(0.999**2000, rel=1e-3)
    assert not named.equals_policy("old")


def test_frozen_weights_have_no_average() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    model[1].requires_grad_(False)
    named = WeightSets(model)
    MovingAverage(named, TrainConfig(ema_enable=True))
    assert list(named.tensors["ema"]) == ["0.weight", "0.bias"]


def test_the_reference_is_what_the_policy_was() -> None:
    model = single_weight()
    named = WeightSets(model)
    named.add("reference")
    with named.use_weights("reference"):
        assert model.weight.item() == 1.0
    move(model, 2.0)
    with named.use_weights("reference"):
        assert model.weight.item() == 1.0
    assert (model.weight.item(), named.tensors["reference"]["weight"].item()) == (2.0, 1.0)
    named.copy_from_policy("reference")
    with named.use_weights("reference"):
        assert model.weight.item() == 2.0
