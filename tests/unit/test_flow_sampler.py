"""Rollouts of diffusion models, with a toy denoiser whose images have the colour of their prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.errors import DataError
from cosmos_core.models import flow
from cosmos_core.models.flow_steps import NoiseLevels, compute_step_distribution, log_prob
from cosmos_core.rollout.base import EngineDenoiser, EngineSettings, generate
from cosmos_core.rollout.flow_path import (
    ConditioningFrames,
    choose_stochastic_steps,
    denoise,
    draw_num_conditioning_frames,
)
from cosmos_core.rollout.flow_sampler import FlowSamplerEngine, decode_latents, to_uint8_pixels
from cosmos_core.types import FlowSampling, Group, Prompt, Sampling, StepWindow

COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0)}


class Toy:
    """Its velocity leads to the colour of the prompt, whatever the noise."""

    is_video = False
    max_conditioning_frames = 0
    timestep_shift = 3.0
    component_offload = SimpleNamespace(keep_on_device=nullcontext)

    def set_scheduler_timestep(self, num_steps: int) -> Tensor:
        return flow.euler_schedule(num_steps, self.timestep_shift)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return (3, frames, height, width) if frames > 1 else (3, height, width)

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def apply_guidance(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return unconditional + scale * (conditional - unconditional)

    def pipeline_with_logprob(self, sample: Callable[..., Any], predict: Callable[..., Tensor], *args: Any) -> Any:
        return sample(predict, *args)


class Films(Toy):
    is_video = True
    max_conditioning_frames = 2


class Denoiser:
    """Counts and remembers what it is asked."""

    def __init__(self) -> None:
        self.sigmas: list[list[float]] = []
        self.used: list[str] = []

    def __call__(
        self, latents: Tensor, sigma_B: Tensor, text: dict[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> Tensor:
        self.sigmas.append(sigma_B.tolist())
        target = text["colour"].reshape(len(latents), 3, *[1] * (latents.ndim - 2))
        velocity = (latents - target) / sigma_B.float().reshape(-1, *[1] * (latents.ndim - 1))
        if num_conditioning_B is None:
            return velocity
        return ConditioningFrames(torch.zeros(()), num_conditioning_B).insert_frames(velocity)

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        self.used.append(name)
        yield


def engine(
    denoiser: Denoiser,
    mini_batch: int | None = None,
    is_video: bool = False,
    beat: Callable[[], None] = lambda: None,
    **source: Any,
) -> FlowSamplerEngine:
    found = EngineDenoiser(Films() if is_video else Toy(), denoiser, denoiser.weights, torch.device("cpu"), **source)  # type: ignore[arg-type]
    rollout = RolloutConfig(n_generation_mini_batch=mini_batch)
    return FlowSamplerEngine(EngineSettings(None, None, "", rollout, 1, torch.float32, flow=found, beat=beat))  # type: ignore[arg-type]


def prompts() -> list[Prompt]:
    return [
        Prompt(i, (), name, name, embedding={"colour": torch.tensor(colour)})
        for i, (name, colour) in enumerate(COLOURS.items())
    ]


def sampling(**settings: Any) -> Sampling:
    return Sampling(num_completions=4, seed=7, flow=FlowSampling(**{"num_steps": 5, "size": (4, 4)} | settings))


def latents(groups: list[Group]) -> Tensor:
    return torch.stack([completion.diffusion_sample.latents for group in groups for completion in group.completions])


@pytest.mark.parametrize("settings", [{}, {"solver": "dpm2"}, {"stochastic_solver": "cps"}, {"num_frames": 3}])
def test_each_prompt_gets_images_of_its_own_colour(settings: dict[str, Any]) -> None:
    groups = generate(engine(Denoiser(), is_video="num_frames" in settings), prompts(), sampling(**settings), step=0)
    assert [group.prompt.text for group in groups] == list(COLOURS)
    for group in groups:
        assert len(group.completions) == 4
        for completion in group.completions:
            shape = (3, 4, 4, 3) if "num_frames" in settings else (4, 4, 3)
            pixels = completion.diffusion_sample.pixels
            expected = ((torch.tensor(COLOURS[group.prompt.text]) + 1) * 127.5).expand(shape)
            assert pixels.dtype == torch.uint8 and torch.equal(pixels.float(), expected)
            if "num_frames" not in settings:
                assert completion.media.getpixel((0, 0)) == tuple(pixels[0, 0].tolist())


def test_samples_do_not_depend_on_the_batch_that_they_are_drawn_in() -> None:
    settings = sampling(stochastic_solver="flow", trained_steps=(0, 2))
    whole = generate(engine(Denoiser()), prompts(), settings, step=3)
    one = generate(engine(Denoiser(), mini_batch=1), prompts()[1:2], settings, step=3)
    for ours, other in zip(whole[1].completions, one[0].completions, strict=True):
        assert torch.allclose(ours.diffusion_sample.latents_before, other.diffusion_sample.latents_before, atol=1e-6)
        assert ours.diffusion_sample.log_probs == pytest.approx(other.diffusion_sample.log_probs, abs=1e-6)


def test_a_rank_draws_no_more_completions_of_a_prompt_at_once_than_the_recipe_says() -> None:
    ranks = SimpleNamespace(
        dp=SimpleNamespace(size=lambda: 2),
        select_local_items=lambda items: items[::2],
        all_gather_object=lambda samples: [samples, samples],
    )
    for count, sizes in ((1, {1}), (3, {3, 1}), (None, {4})):
        denoiser = Denoiser()
        generate(engine(denoiser, mini_batch=count, mesh=ranks), prompts()[:2], sampling(), step=0)
        assert {len(levels) for levels in denoiser.sigmas} == sizes, "two prompts of four completions on two ranks"


def test_texts_of_other_numbers_of_tokens_are_drawn_in_batches_of_their_own() -> None:
    ragged = [
        replace(prompt, embedding=prompt.embedding | {"tokens": torch.zeros(count, 2)})
        for prompt, count in zip(prompts(), (3, 5, 3), strict=True)
    ]
    denoiser = Denoiser()
    groups = generate(engine(denoiser), ragged, sampling(stochastic_solver="flow"), step=3)
    even = generate(engine(Denoiser()), prompts(), sampling(stochastic_solver="flow"), step=3)
    assert [group.prompt.text for group in groups] == list(COLOURS)
    assert torch.allclose(latents(groups), latents(even), atol=1e-6)
    assert [len(levels) for levels in denoiser.sigmas] == [8] * 5 + [4] * 5


def test_each_completion_step_and_seed_has_noise_of_its_own() -> None:
    kept = {"stochastic_solver": "flow", "trained_steps": (0,)}
    first, again, later = (generate(engine(Denoiser()), prompts(), sampling(**kept), step) for step in (0, 0, 1))
    starts = [c.diffusion_sample.latents_before[0] for group in (*first, *later) for c in group.completions]
    assert len({tuple(start.flatten().tolist()) for start in starts}) == len(starts)
    assert torch.equal(latents(first), latents(again))
    shared = generate(engine(Denoiser()), prompts(), sampling(**kept, has_common_initial_noise=True), step=0)
    for group in shared:
        assert len({tuple(c.diffusion_sample.latents_before[0].flatten().tolist()) for c in group.completions}) == 1
        assert len({tuple(c.diffusion_sample.latents_after[0].flatten().tolist()) for c in group.completions}) == 4


def test_the_denoiser_is_asked_at_the_levels_of_the_table_under_the_named_weights() -> None:
    denoiser, beats = Denoiser(), list[float]()
    found = engine(denoiser, beat=lambda: beats.append(0.0))
    groups = generate(found, prompts(), sampling(weights_name="old"), step=0)
    assert len(beats) == len(denoiser.sigmas), "a pass over a clip may take longer than a stage may be silent"
    table = flow.euler_schedule(5, 3.0).tolist()
    assert [levels[0] for levels in denoiser.sigmas] == table[:-1]
    assert groups[0].completions[0].diffusion_sample.sigmas == tuple(table)
    assert denoiser.used == ["old"]


@pytest.mark.parametrize("kernel", ["flow", "dance", "cps"])
def test_what_is_kept_of_a_step_gives_its_log_probability_again(kernel: str) -> None:
    settings = {
        "stochastic_solver": kernel,
        "trained_steps": (0, 1, 3),
        "keeps_transition_means": True,
        "noise_scale": 0.5,
    }
    denoiser = Denoiser()
    [group, *_] = generate(engine(denoiser), prompts(), sampling(**settings), step=0)
    table = flow.euler_schedule(5, 3.0)
    for completion in group.completions:
        drawn = completion.diffusion_sample
        assert drawn.steps == (0, 1, 3)
        for n, i in enumerate(drawn.steps):
            x = drawn.latents_before[n][None]
            v = denoiser(x, table[i].expand(1), {"colour": torch.tensor([COLOURS["red"]])})
            step = compute_step_distribution(kernel, x, v, NoiseLevels(table[i], table[i + 1], table[1]), 0.5)
            assert drawn.latents_before.dtype == drawn.latents_after.dtype == torch.float32
            assert torch.allclose(step.mean[0], drawn.transition_means[n], atol=1e-6)
            assert log_prob(step, drawn.latents_after[n][None]).item() == pytest.approx(drawn.log_probs[n], abs=1e-6)


def test_a_window_of_stochastic_steps_is_drawn_or_moves() -> None:
    fast = FlowSampling(num_steps=10, stochastic_solver="flow", window=StepWindow(2, 0, 5))
    firsts = {choose_stochastic_steps(fast, 0, step)[0] for step in range(40)}
    assert firsts == {0, 1, 2, 3} and all(len(choose_stochastic_steps(fast, 0, step)) == 2 for step in range(40))
    assert choose_stochastic_steps(fast, 0, 5) == choose_stochastic_steps(fast, 0, 5)
    mix = replace(fast, window=StepWindow(4, 0, 9, steps_per_move=3))
    assert [choose_stochastic_steps(mix, 0, step)[0] for step in (0, 2, 3, 17, 18)] == [0, 0, 1, 5, 0]
    assert choose_stochastic_steps(replace(fast, window=None), 0, 0) == range(9)
    assert choose_stochastic_steps(replace(fast, stochastic_solver=""), 0, 0) == range(0)


def test_only_stochastic_steps_are_kept_and_the_others_are_deterministic() -> None:
    settings = FlowSampling(
        num_steps=6, stochastic_solver="flow", trained_steps=(0, 1, 2, 3), window=StepWindow(1, 2, 3)
    )
    sigmas, noise = flow.flow_schedule(6), torch.randn(1, 3, 2, 2)
    v = torch.randn(1, 3, 2, 2)
    path = denoise(lambda x, s: v, noise, sigmas, settings, [torch.Generator().manual_seed(0)], range(2, 3))
    assert path.steps == (2,)
    assert torch.allclose(path.latents_before[0], noise + v * (sigmas[2] - 1).float(), atol=1e-6)
    assert torch.allclose(path.latents, path.latents_after[0] - v * sigmas[3].float(), atol=1e-6)


def test_steps_are_kept_in_the_order_that_they_are_taken_in_whatever_order_they_are_named_in() -> None:
    sigmas, noise = flow.flow_schedule(6), torch.randn(1, 3, 2, 2)
    settings = FlowSampling(num_steps=6, stochastic_solver="flow", trained_steps=(3, 1, 1))
    mixed, ordered = (
        denoise(lambda x, s: x * 0.1, noise, sigmas, each, [torch.Generator().manual_seed(0)], range(5))
        for each in (settings, replace(settings, trained_steps=(1, 3)))
    )
    assert mixed.steps == ordered.steps == (1, 3)
    assert torch.equal(torch.stack(mixed.latents_before), torch.stack(ordered.latents_before))


def test_guidance_asks_for_the_empty_prompt_too() -> None:
    null = {"colour": torch.zeros(3)}
    groups = generate(engine(Denoiser(), null_text=null), prompts(), sampling(guidance_scale=1.5), step=0)
    expected = 1.5 * torch.tensor(COLOURS["green"]).reshape(3, 1, 1).expand(3, 4, 4)
    assert torch.allclose(groups[1].completions[0].diffusion_sample.latents, expected, atol=1e-4)


def test_given_frames_are_no_part_of_a_log_probability() -> None:
    asked = [replace(prompts()[0], conditioning_clip=torch.rand(3, 4, 4, 4))]
    settings: dict[str, Any] = {"num_frames": 4, "conditioning_frame_range": (2, 2), "stochastic_solver": "flow"}
    settings |= {"trained_steps": (1,), "keeps_transition_means": True, "noise_scale": 0.5}
    [group] = generate(engine(Denoiser(), is_video=True), asked, sampling(**settings), 0)
    table = flow.euler_schedule(5, 3.0)
    for completion in group.completions:
        drawn = completion.diffusion_sample
        zero = torch.zeros_like(drawn.latents_before)
        std = compute_step_distribution("flow", zero, zero, NoiseLevels(table[1], table[2], table[1]), 0.5).std.item()
        squared = (drawn.latents_after - drawn.transition_means)[0, :, 2:].square().mean().item()
        expected = -squared / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
        assert drawn.log_probs == pytest.approx([expected], abs=1e-5)


@pytest.mark.parametrize("kernel", ["", "flow"])
def test_given_frames_stay_as_they_are_and_the_others_are_drawn(kernel: str) -> None:
    clip = torch.rand(3, 4, 4, 4)
    asked = [replace(prompt, conditioning_clip=clip) for prompt in prompts()]
    films = engine(Denoiser(), is_video=True)
    settings = sampling(
        num_frames=4, conditioning_frame_range=(1, 5), stochastic_solver=kernel, trained_steps=(0, 1), solver="dpm2"
    )
    longer = [replace(prompts()[0], conditioning_clip=torch.rand(3, 6, 4, 4))]
    with pytest.raises(DataError, match=r"a clip has latents of shape \(3, 6, 4, 4\) and what is drawn \(3, 4, 4, 4\)"):
        generate(films, longer, settings, 0)
    counts = set()
    for step in range(4):
        for group in generate(films, asked, settings, step):
            [count] = {completion.diffusion_sample.num_conditioning_frames for completion in group.completions}
            counts.add(count)
            for completion in group.completions:
                latents = completion.diffusion_sample.latents
                assert torch.allclose(latents[:, :count], clip[:, :count], atol=1e-5)
                colour = torch.tensor(COLOURS[group.prompt.text]).reshape(3, 1, 1, 1)
                assert torch.allclose(latents[:, count:], colour.expand_as(latents[:, count:]), atol=1e-4)
    assert counts == {1, 2}  # the network takes no more
    assert draw_num_conditioning_frames((0, 0), 2, 0, 0, 0) == 0
    drawn = [each.diffusion_sample for group in generate(films, prompts(), settings, 0) for each in group.completions]
    assert all(each.num_conditioning_frames == 0 for each in drawn)


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [3]), ("cuda", [1, 1, 1])])
def test_samples_are_decoded_one_by_one_on_a_gpu(device: str, sizes: list[int]) -> None:
    seen: list[int] = []

    def decode(latents: torch.Tensor) -> torch.Tensor:
        seen.append(len(latents))
        return latents[:, :3]

    latents = torch.linspace(-1, 1, 3 * 4 * 2 * 2).reshape(3, 4, 2, 2)  # a path is on the CPU wherever it was drawn
    stays: list[int] = []

    @contextmanager
    def keep_on_device() -> Iterator[None]:
        yield
        stays.append(len(seen))

    model = SimpleNamespace(decode=decode, component_offload=SimpleNamespace(keep_on_device=keep_on_device))
    pixels = decode_latents(model, latents, torch.device(device))
    assert torch.equal(pixels, to_uint8_pixels(latents[:, :3])) and seen == sizes
    assert stays == [len(sizes)], "with policy.diffusers.offload the VAE moves once for all samples"
