"""Noise levels, densities, weights and tables of rectified flows, against formulas in plain Python and diffusers."""

from __future__ import annotations

import math

import pytest
import torch

from cosmos_core.models import flow


def test_latents_velocity_and_estimates_agree_with_each_other() -> None:
    x0, noise = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    sigma_B = torch.tensor([0.25, 0.9], dtype=torch.float64)
    x, v = flow.add_noise(x0, noise, sigma_B), flow.compute_velocity(x0, noise)
    assert torch.allclose(x[1], 0.1 * x0[1] + 0.9 * noise[1], atol=1e-15)
    assert torch.allclose(flow.estimate_clean_latents(x, v, sigma_B), x0, atol=1e-14)
    assert torch.allclose(flow.estimate_noise(x, v, sigma_B), noise, atol=1e-14)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "sigma_sqrt", "cosmap", "none"])
def test_densities_are_those_of_the_formulas(scheme: str) -> None:
    drawn_N = flow.sample_noise_levels(
        64, scheme, torch.Generator().manual_seed(3), logit_mean=0.3, logit_std=0.7, shift=3.0
    )
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn if scheme == "logit_normal" else torch.rand
    for drawn, z in zip(drawn_N.tolist(), draw(64, generator=generator, dtype=torch.float64).tolist(), strict=True):
        if scheme == "logit_normal":
            u = 1 / (1 + math.exp(-(0.3 + 0.7 * z)))
        elif scheme == "mode":
            u = 1 - z - 1.29 * (math.cos(math.pi * z / 2) ** 2 - 1 + z)
        else:
            u = z
        assert drawn == pytest.approx(3 * u / (1 + 2 * u), abs=1e-12)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "sigma_sqrt", "cosmap", "none"])
def test_densities_and_weights_are_those_of_diffusers(scheme: str) -> None:
    training_utils = pytest.importorskip("diffusers.training_utils")
    torch.manual_seed(0)
    theirs_N = training_utils.compute_density_for_timestep_sampling(scheme, 4000, 0.0, 1.0, 1.29)
    ours_N = flow.sample_noise_levels(4000, scheme, torch.Generator().manual_seed(0)).float()
    for q in (0.1, 0.5, 0.9):
        assert ours_N.quantile(q).item() == pytest.approx(theirs_N.quantile(q).item(), abs=0.03)
    sigma_B = torch.tensor([0.1, 0.5, 0.97], dtype=torch.float64)
    weights_B = training_utils.compute_loss_weighting_for_sd3(scheme, sigma_B)
    assert torch.allclose(flow.compute_loss_weights(sigma_B, scheme), weights_B.double(), atol=1e-12)


def test_tables_are_those_of_the_schedulers() -> None:
    diffusers = pytest.importorskip("diffusers")
    euler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    dpm = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    flows = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    unipc = diffusers.UniPCMultistepScheduler(**flows, flow_shift=3.0)
    karras = diffusers.UniPCMultistepScheduler(
        use_karras_sigmas=True, use_flow_sigmas=True, prediction_type="flow_prediction", sigma_max=200.0, sigma_min=0.01
    )
    for name, scheduler in {"euler": euler, "dpm": dpm, "unipc": unipc, "karras": karras}.items():
        for num_steps in (1, 4, 10):
            scheduler.set_timesteps(num_steps)
            ours_N = flow.SIGMA_SCHEDULES[name](num_steps, 3.0)
            assert torch.allclose(ours_N, scheduler.sigmas.double(), atol=1e-6), name


def test_the_plain_table_goes_from_1_to_0_and_is_shifted() -> None:
    table_N = flow.flow_schedule(4, 3.0)
    assert table_N.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0], abs=1e-12)


def test_no_sample_outweighs_those_at_the_lowest_level_of_diffusers() -> None:
    weights_B = flow.compute_loss_weights(torch.tensor([0.0, 1e-6, 1e-3, 0.5], dtype=torch.float64), "sigma_sqrt")
    assert weights_B.tolist() == pytest.approx([1e6, 1e6, 1e6, 4.0])
