"""Steps of a sampler against the papers' formulas, written out for single numbers in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cosmos_core.models import flow, flow_steps
from cosmos_core.models.flow_steps import DpmSolver2M, NoiseLevels, compute_step_distribution, log_prob

TABLE = flow.euler_schedule(6, 3.0).tolist()


def of_paper(name: str, x: float, v: float, i: int, eta: float) -> tuple[float, float]:
    """Mean and standard deviation of one element after step `i`."""
    s, later = TABLE[i], TABLE[i + 1]
    ds, clean, noise = later - s, x - s * v, x + (1 - s) * v
    if name == "flow":
        std = eta * math.sqrt(s / (1 - (TABLE[1] if s == 1 else s)))
        mean = x * (1 + std**2 / (2 * s) * ds) + v * (1 + std**2 * (1 - s) / (2 * s)) * ds
        return mean, std * math.sqrt(-ds)
    if name == "dance":
        return x + v * ds + 0.5 * eta**2 * (x - (1 - s) * clean) / s**2 * ds, eta * math.sqrt(-ds)
    if name == "cps":
        q = later * math.sin(eta * math.pi / 2)
        return (1 - later) * clean + math.sqrt(later**2 - q**2) * noise, q
    ratio = (1 - s) / (1 - later)
    std = eta * later / s * math.sqrt(s**2 - ratio**2 * later**2)
    return (1 - later) * clean + math.sqrt(later**2 - std**2) * noise, std


@pytest.mark.parametrize("name", ["flow", "dance", "cps", "ddim"])
@pytest.mark.parametrize("i", [0, 1, 4])
def test_a_stochastic_step_and_its_log_probability_are_those_of_the_paper(name: str, i: int) -> None:
    generator = torch.Generator().manual_seed(i)
    x, v, later = (torch.randn(3, 2, 2, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    sigma, last, second = torch.tensor(TABLE, dtype=torch.float64)[[i, i + 1, 1]]
    found = compute_step_distribution(name, x, v, NoiseLevels(sigma.expand(3), last.expand(3), second), 0.6)
    probabilities_B = log_prob(found, later)
    for b in range(3):
        expected, terms = [], []
        for one, velocity, end in zip(
            x[b].flatten().tolist(), v[b].flatten().tolist(), later[b].flatten().tolist(), strict=True
        ):
            mean, std = of_paper(name, one, velocity, i, 0.6)
            expected.append(mean)
            density = -((end - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
            terms.append(-((end - mean) ** 2) if name == "cps" else density)
        assert found.mean[b].flatten().tolist() == pytest.approx(expected, abs=1e-9)
        assert found.std[b].item() == pytest.approx(std, abs=1e-9)
        assert probabilities_B[b].item() == pytest.approx(sum(terms) / len(terms), abs=1e-9)
        rate = std if name == "cps" else std / math.sqrt(TABLE[i] - TABLE[i + 1])
        assert found.noise_rate[b].item() == pytest.approx(rate)


@pytest.mark.parametrize(
    ("first", "second", "inside"), [(1.0, 0.9, 0.9), (0.9997, 0.9, 0.9), (0.998, 0.9, 0.9), (0.995, 0.993, 0.995)]
)
def test_a_long_first_step_takes_its_noise_from_the_second_level(first: float, second: float, inside: float) -> None:
    x, v = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    levels = NoiseLevels(*(torch.tensor([s], dtype=torch.float64) for s in (first, second, second)))
    expected = 0.7 * math.sqrt(first / (1 - inside)) * math.sqrt(first - second)
    assert compute_step_distribution("flow", x, v, levels, 0.7).std.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["flow", "dance", "cps", "ddim"])
def test_without_noise_a_stochastic_step_is_that_of_euler(name: str) -> None:
    x, v = torch.randn(2, 3, 2, 2, dtype=torch.float64), torch.randn(2, 3, 2, 2, dtype=torch.float64)
    sigma, last = torch.tensor([0.8, 0.4], dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64)
    found = compute_step_distribution(name, x, v, NoiseLevels(sigma, last, torch.tensor(0.9, dtype=torch.float64)), 0.0)
    assert torch.allclose(found.mean, flow_steps.euler_step(x, v, sigma, last), atol=1e-12)
    assert not found.std.any()


@pytest.mark.parametrize("name", ["flow", "dance", "ddim"])
def test_steps_keep_the_distribution_of_the_path(name: str) -> None:
    """Data of variance 0.25 has the velocity (s - (1 - s) 0.25) x / ((1 - s)^2 0.25 + s^2) exactly, so that many small
    stochastic steps must end with that variance."""
    generator = torch.Generator().manual_seed(0)
    table = flow.flow_schedule(200).clamp(max=0.995)
    x = torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    for i in range(200):
        s, later = table[i], table[i + 1]
        if s == later:
            continue
        v = (s - (1 - s) * 0.25) * x / ((1 - s) ** 2 * 0.25 + s**2)
        found = compute_step_distribution(name, x, v, NoiseLevels(s, later, table[1]), 0.4)
        x = found.mean + found.std * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    assert x.std().item() == pytest.approx(0.5, abs=0.02)


def test_half_precision_is_raised_before_a_step_is_computed() -> None:
    x, v = torch.randn(1, 4).bfloat16(), torch.randn(1, 4).bfloat16()
    levels = NoiseLevels(*(torch.tensor(s, dtype=torch.float64) for s in (0.9, 0.8, 0.95)))
    assert compute_step_distribution("flow", x, v, levels, 0.7).mean.dtype == torch.float32


def of_dpm(sigmas: Tensor, x: float, velocities: list[float]) -> float:
    """Latents after all steps, for velocities that were given beforehand."""
    table, before = sigmas.tolist(), None
    for i, v in enumerate(velocities):
        s, later = table[i], table[i + 1]
        clean = x - s * v
        if before is None or later == 0 or table[i - 1] == 1:
            x_next = (1 - later) * clean + later * (x + (1 - s) * v)
        else:
            lam, lam_next, lam_before = (math.log((1 - t) / t) for t in (s, later, table[i - 1]))
            h, h0 = lam_next - lam, lam - lam_before
            d1 = (clean - before) / (h0 / h)
            shrink = math.exp(-h) - 1
            x_next = later / s * x - (1 - later) * shrink * clean - 0.5 * (1 - later) * shrink * d1
        before, x = clean, x_next
    return x


@pytest.mark.parametrize("schedule", ["flow", "dpm"])
def test_dpm2_is_that_of_the_paper(schedule: str) -> None:
    sigmas = flow.SIGMA_SCHEDULES[schedule](7, 3.0)
    velocities = torch.randn(7, 5, dtype=torch.float64)
    x = torch.randn(5, dtype=torch.float64)
    expected = [of_dpm(sigmas, one, velocities[:, n].tolist()) for n, one in enumerate(x.tolist())]
    solver = DpmSolver2M(sigmas)
    for i, v in enumerate(velocities):
        x = solver.step(x[None], v[None], i)[0]
    assert x.tolist() == pytest.approx(expected, abs=1e-9)


def test_dpm2_is_that_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0, euler_at_final=True
    )
    scheduler.set_timesteps(10)
    x = theirs = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    solver = DpmSolver2M(scheduler.sigmas.double())
    for i, t in enumerate(scheduler.timesteps):
        v = torch.sin(x + i)
        x = solver.step(x, v, i)
        theirs = scheduler.step(torch.sin(theirs + i), t, theirs, return_dict=False)[0]
    assert torch.allclose(x, theirs.double(), atol=1e-5)
