"""The learning-rate schedule by hand-computed numbers, the parameter groups, and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError
from cosmos_core.train.optim import build_optimizer, clip_gradients, learning_rate_factor, set_learning_rate

RATIO = {"optm_warmup_steps": 2, "optm_decay_type": "linear", "optm_decay_ratio": 0.4, "optm_min_lr_factor": 0.2}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # A decay runs over all steps after the warm-up.
        ({"optm_warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        ({"optm_warmup_steps": 2, "optm_decay_type": "none"}, [0.5, 1, 1, 1, 1, 1]),
        ({"optm_warmup_steps": 2, "optm_decay_type": "linear"}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (
            {"optm_warmup_steps": 2, "optm_decay_type": "sqrt"},
            [0.5, 1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(3) / 2],
        ),
        (
            {"optm_warmup_steps": 2, "optm_decay_type": "cosine"},
            [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2],
        ),
        ({"optm_warmup_steps": 0, "optm_decay_type": "linear"}, [1, 2 / 3, 1 / 3]),
        # The warm-up rises from the start factor, and its first step is one increment above it.
        ({"optm_warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"optm_warmup_steps": 4, "optm_warmup_start_factor": 0.2}, [0.4, 0.6, 0.8, 1, 1]),
        ({"optm_warmup_steps": 0.5}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),  # a float is a fraction of all steps
        ({"optm_warmup_steps": 1.0}, [0.25, 0.5, 0.75, 1]),
        ({"optm_warmup_steps": 1}, [1, 1, 1, 1]),
        ({"optm_warmup_steps": 20}, [0.25, 0.5, 0.75, 1]),  # longer than the run
        # The decay ratio leaves a stable part, and the floor is the minimum factor.
        (RATIO, [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
        # A decay that would begin inside of the warm-up is shortened to what is left.
        (
            {"optm_warmup_steps": 6, "optm_decay_type": "linear", "optm_decay_ratio": 0.8},
            [1 / 6, 1 / 3, 0.5, 2 / 3, 5 / 6, 1, 1, 0.75, 0.5, 0.25],
        ),
    ],
)
def test_the_schedule_of_the_learning_rate(settings: dict[str, Any], expected: list[float]) -> None:
    train = TrainConfig.model_validate(settings)
    factors = [learning_rate_factor(step, len(expected), train) for step in range(len(expected))]
    assert factors == pytest.approx(expected, abs=1e-12)


def test_after_the_last_step_the_factor_stays_at_its_minimum() -> None:
    train = TrainConfig.model_validate(RATIO)
    assert [learning_rate_factor(step, 10, train) for step in (10, 99)] == pytest.approx([0.2, 0.2])


def test_every_group_gets_the_learning_rate_of_the_step() -> None:
    model = torch.nn.Linear(2, 2)
    train = TrainConfig(optm_lr=0.1, optm_warmup_steps=4)
    optimizer = build_optimizer(model, train)
    assert set_learning_rate(optimizer, 0, 10, train) == pytest.approx({"lr": 0.025})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.025])


class Nested(torch.nn.Module):
    """Two layers, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "layers": torch.nn.Sequential()})
        self.model["layers"].extend([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self.lm_head = torch.nn.Linear(2, 3, bias=False)
        self.lm_head.weight = self.model["embed"].weight


def rates_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


def test_each_weight_has_the_rate_of_the_deepest_path_that_leads_to_it() -> None:
    model = Nested()
    rates = {"global": 0.1, "model": 0.2, "model.layers.1": 0.4}
    train = TrainConfig(optm_lr=rates, optm_warmup_steps=4)
    optimizer = build_optimizer(model, train)
    first, last = (
        {f"model.layers.{i}.{name}": rate for name in ("weight", "bias")} for i, rate in ((0, 0.2), (1, 0.4))
    )
    assert rates_of(model, optimizer) == {"model.embed.weight": 0.2, **first, **last}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"model.layers.1": 0.4}, {"model.layers.1": 0.1}),
        ({"lm_head": 0.4, "model.layers.0": 0.2}, {"lm_head": 0.1, "model.layers.0": 0.05}),
    ],
)
def test_rates_by_module_follow_one_schedule_and_are_all_reported(
    rates: dict[str, float], expected: dict[str, float]
) -> None:
    model = Nested()
    train = TrainConfig(optm_lr={"global": 0.8, **rates}, optm_warmup_steps=4)
    optimizer = build_optimizer(model, train)
    found = set_learning_rate(optimizer, 0, 10, train)
    assert found == pytest.approx({"lr": 0.2, **{f"lr/{path}": rate for path, rate in expected.items()}})
    assert rates_of(model, optimizer)["model.layers.1.bias"] == pytest.approx(expected.get("model.layers.1", 0.2))
    assert rates_of(model, optimizer)["model.embed.weight"] == pytest.approx(expected.get("lm_head", 0.2))


def test_a_path_that_leads_to_nothing_that_is_trained_is_refused_with_the_nearest() -> None:
    model = Nested()
    with pytest.raises(ConfigError, match=r"rate of 'model\.layer\.1'; .* did you mean 'model\.layers\.1'\?"):
        build_optimizer(model, TrainConfig(optm_lr={"global": 0.1, "model.layer.1": 0.2}))
    model.model["layers"][1].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no weight is trained with the rate of 'model\.layers\.1'.* is trained$"):
        build_optimizer(model, TrainConfig(optm_lr={"global": 0.1, "model.layers.1": 0.2}))


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_one_step_is_adams_closed_form_with_decay_on_matrices_only(name: str, implementation: str) -> None:
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    train = TrainConfig.model_validate(
        {"optm_name": name, "optm_impl": implementation, "optm_lr": 0.1, "optm_weight_decay": 0.5, "epsilon": 1e-8}
    )
    optimizer = build_optimizer(model, train)
    model.weight.grad, model.bias.grad = torch.full((1, 1), -3.0), torch.full((1,), -3.0)
    optimizer.step()
    # The first Adam step is lr * sign(gradient). AdamW shrinks the weight by lr * decay = 5 % besides; Adam adds
    # decay * weight = 1 to the gradient, which keeps its sign.
    assert model.bias.item() == pytest.approx(2.1, abs=1e-6)
    assert model.weight.item() == pytest.approx(2.0 * 0.95 + 0.1 if name == "AdamW" else 2.1, abs=1e-6)


@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
@torch.compiler.set_stance("force_eager")  # the arithmetic is the same, and compiling it takes a minute
def test_the_first_step_with_moments_in_eight_bits_is_the_closed_form(name: str) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    model = torch.nn.Linear(64, 64)  # torchao keeps smaller moments in float32
    with torch.no_grad():
        model.weight.fill_(2.0)
    train = TrainConfig.model_validate(
        {"optm_name": name, "optm_lr": 0.4, "optm_warmup_steps": 4, "optm_weight_decay": 0.5, "epsilon": 1e-8}
    )
    optimizer = build_optimizer(model, train)
    assert set_learning_rate(optimizer, 0, 10, train) == pytest.approx({"lr": 0.1})
    model.weight.grad, model.bias.grad = torch.full((64, 64), -3.0), None
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"].codes.dtype == torch.uint8
    expected = 2.0 * 0.95 + 0.1 if name == "AdamW8bit" else 2.1
    torch.testing.assert_close(model.weight.detach(), torch.full((64, 64), expected), rtol=0, atol=1e-6)


def tiny_llama() -> torch.nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, head_dim=4, attention_bias=True)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_all_else_whatever_is_reloaded() -> None:
    rates = {"global": 0.02, "lm_head": 0.01}
    train = TrainConfig.model_validate(
        {"optm_name": "Muon", "optm_lr": rates, "optm_weight_decay": 0.1, "optm_warmup_steps": 4}
    )
    model, other = tiny_llama(), tiny_llama()
    optimizer = build_optimizer(model, train)
    named = dict(other.named_parameters())
    muon = {name: p for name, p in named.items() if p.ndim == 2 and "layers." in name}
    rest = {name: p for name, p in named.items() if name not in muon}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < set(rest)
    plain = [
        torch.optim.Muon(list(muon.values()), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [p], "lr": 0.01 if name == "lm_head.weight" else 0.02, "weight_decay": 0.1 * (p.ndim > 1)}
             for name, p in rest.items()], betas=train.optm_betas, eps=train.epsilon, fused=True,
        ),
    ]  # fmt: skip
    peaks = [[group["lr"] for group in each.param_groups] for each in plain]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:  # a checkpoint is read into an optimizer that was made anew
            saved = optimizer.state_dict()
            optimizer = build_optimizer(model, train)
            optimizer.load_state_dict(saved)
        set_learning_rate(optimizer, step, 20, train)
        for each, rates in zip(plain, peaks, strict=True):
            for group, rate in zip(each.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate_factor(step, 20, train)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            named[name].grad = parameter.grad.clone()
        for each in (optimizer, *plain):
            each.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", [pytest.param("AdamW8bit", marks=pytest.mark.full), "AdamW"])
def test_what_an_optimizer_has_gathered_can_be_forgotten(name: str) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(2.0)
    train = TrainConfig.model_validate({"optm_name": name, "optm_lr": 0.1, "optm_warmup_steps": 0, "epsilon": 1e-8})
    optimizer = build_optimizer(model, train)
    for gradient in (5.0, -3.0):  # the first step after the second is one of -lr * sign(gradient), as the first was
        model.weight.grad, model.bias.grad = torch.full((64, 64), gradient), None
        before = model.weight.detach().clone()
        optimizer.step()
        moved = before * (1 - 0.1 * train.optm_weight_decay) - model.weight.detach()
        torch.testing.assert_close(moved, torch.full((64, 64), math.copysign(0.1, gradient)), rtol=0, atol=1e-6)
        optimizer.state.clear()


def test_frozen_parameters_are_not_in_the_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    model[1].requires_grad_(False)
    optimizer = build_optimizer(model, TrainConfig())
    kept = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(p) for p in kept] == [id(model[0].weight), id(model[0].bias)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_gradients_are_scaled_to_the_bound_and_the_norm_before_is_returned() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(iter(parameters), 2.5) == pytest.approx(5.0)
    assert [p.grad.item() for p in parameters[:2] if p.grad is not None] == pytest.approx([1.5, 2.0], rel=1e-5)
    assert clip_gradients(parameters, 100.0) == pytest.approx(2.5, rel=1e-5)
    assert parameters[0].grad.item() == pytest.approx(1.5, rel=1e-5)


@pytest.mark.parametrize(("first", "bound"), [(3.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_a_bound_of_zero_only_measures_and_a_norm_that_is_not_finite_leaves_the_gradients(
    first: float, bound: float
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([first, 4.0])
    norm = clip_gradients([parameter], bound)
    assert norm == 5.0 if first == 3.0 else not math.isfinite(norm)
    assert parameter.grad[1].item() == 4.0
