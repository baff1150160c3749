"""How rollouts of diffusion models are drawn, and what is learned of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.base import Update
from cosmos_core.algorithms.flow_rl import FlowRl
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.media_rows import MediaRow
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.flow import euler_schedule
from cosmos_core.rollout.base import EngineDenoiser, EngineSettings, generate
from cosmos_core.rollout.flow_sampler import FlowSamplerEngine
from cosmos_core.train.diffusion_setup import make_data_term
from cosmos_core.train.measure import make_completion_settings
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.types import Group, Prompt, Sampling, Score, ScoredGroup
from tests.effects.change import Change, changes
from tests.unit.test_flow_sampler import Denoiser, Films

TYPE = "train.train_policy.trainer_type"
ROLLOUT = "policy.diffusers.sample"
FLOW_RL = "policy.diffusers.flow_rl"
NFT: dict[str, Any] = {
    "train.train_policy.type": "grpo", TYPE: "diffusion_nft", "train.train_policy.reward_function": {"a.py:one": 1.0,
    "b.py:two": 1.0}, "policy.is_diffusers": True, "policy.diffusers.inference_size": [4, 4],
    "policy.diffusers.inference_frames": 2, f"{ROLLOUT}.num_steps": 6, f"{ROLLOUT}.eval_num_steps": 6,
    f"{ROLLOUT}.guidance_scale": 1.0, "rollout.n_generation": 2, "train.train_batch_per_replica": 4,
}  # fmt: skip
GRPO = {**NFT, TYPE: "flow_grpo"}
DDRL = {**NFT, TYPE: "ddrl"}
WINDOW = {**GRPO, f"{FLOW_RL}.window_size": 2}


class Bent(Denoiser):
    """Its paths are no straight lines, so that solvers differ."""

    def __call__(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> Tensor:
        bend = torch.sin(3 * latents) * sigma_B.float().reshape(-1, *[1] * (latents.ndim - 1))
        return bend + text["colour"].reshape(len(latents), 3, *[1] * (latents.ndim - 2))


def groups_of(recipe: Recipe, sampling: Sampling, step: int = 0) -> list[Group]:
    denoiser = Bent()
    null = {"colour": torch.full((3,), 0.5)}
    source = EngineDenoiser(Films(), denoiser, denoiser.weights, torch.device("cpu"), null_text=null)  # type: ignore[arg-type]
    settings = EngineSettings(None, None, "", recipe.rollout, 1, torch.float32, flow=source)  # type: ignore[arg-type]
    given = torch.ones(3, sampling.flow.num_frames, 4, 4) if sampling.flow else None
    prompts = [
        Prompt(i, (), str(i), "", embedding={"colour": torch.full((3,), 0.1 * i)}, conditioning_clip=given)
        for i in range(2)
    ]
    return generate(FlowSamplerEngine(settings), prompts, sampling, step)


def drawn(recipe: Recipe, sampling: Sampling) -> list[Any]:
    """Everything that is kept of the rollouts of some train steps."""
    found: list[Any] = []
    for step in range(4):
        for group in groups_of(recipe, sampling, step):
            for completion in group.completions:
                each = completion.diffusion_sample
                assert each is not None
                tensors = (each.latents, each.latents_before, each.transition_means)
                found += [each.sigmas, each.steps, *(None if t is None else t.flatten().tolist() for t in tensors)]
    return found


@changes(
    Change(f"{ROLLOUT}.num_steps", 5, GRPO),
    Change(f"{ROLLOUT}.guidance_scale", 2.0, GRPO),
    Change(f"{ROLLOUT}.noise_level", 0.3, GRPO),
    Change(f"{ROLLOUT}.deterministic_sampling", True, {**NFT, f"{ROLLOUT}.solver": "cps"}),
    Change(f"{ROLLOUT}.solver", "euler", NFT),
    Change(f"{ROLLOUT}.sigma_schedule", "flow", GRPO),
    Change("policy.diffusers.inference_frames", 3, NFT),
    Change(f"{FLOW_RL}.train_on", [1], GRPO),
    Change(f"{FLOW_RL}.window_size", 2, GRPO),
    Change(f"{FLOW_RL}.window_range", [2, 4], WINDOW),
    Change(f"{FLOW_RL}.window_moves_every", 1, WINDOW),
    Change(f"{FLOW_RL}.guard", True, GRPO),
    Change(f"{FLOW_RL}.use_same_seed", False, GRPO),
    Change(f"{FLOW_RL}.max_conditional_frames", 1, {**GRPO, f"{FLOW_RL}.min_conditional_frames": 0}),
    Change(f"{FLOW_RL}.min_conditional_frames", 1, {**GRPO, f"{FLOW_RL}.max_conditional_frames": 1}),
)
def test_it_changes_how_rollouts_are_drawn(change: Change) -> None:
    assert drawn(change.before, make_training_sampling(change.before)) != drawn(
        change.after, make_training_sampling(change.after)
    )


@changes(Change(f"{ROLLOUT}.eval_num_steps", 5, NFT))
def test_it_changes_how_held_out_prompts_are_drawn(change: Change) -> None:
    before, after = (drawn(each, make_completion_settings(each).sampling) for each in (change.before, change.after))
    assert before != after


class Follows:
    """A view that notes how far the old policy follows."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        self.fractions.append(fraction)

    def evaluate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("asked for outputs")

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        raise AssertionError("asked for other weights")


def scored(group: Group, scale: float) -> ScoredGroup:
    """The first reward has ten times the spread of the second, which prefers the other image."""
    values = [(0.0, 0.3 * scale), (10.0 * scale, 0.0)]
    return ScoredGroup(group, tuple(Score(one + two, {"one": one, "two": two}) for one, two in values))


def learned(recipe: Recipe) -> list[Any]:
    """Loss, metrics and what the old policy does over four train steps with an outcome that is made up."""
    sampling = make_training_sampling(recipe)
    algorithm = make_algorithm(recipe, sampling)
    assert isinstance(algorithm, FlowRl)
    view, found = Follows(), []
    for step in range(4):
        groups = groups_of(recipe, sampling, step)
        samples, metrics = algorithm.credit([scored(group, g + 1.0) for g, group in enumerate(groups)])
        found.append(metrics)
        for update in algorithm.updates(samples, view):
            found.append((len(update.samples), _loss(update)))
        algorithm.after_train_step(step + 1, view)
    return [*found, view.fractions]


def _loss(update: Update) -> float:
    generator = torch.Generator().manual_seed(0)
    latents = torch.stack([sample.latents for sample in update.samples])
    velocities = [torch.randn(latents.shape, generator=generator) for _ in range(2)]
    outputs = {"velocity": velocities[0], "old/velocity": velocities[1], "latents": latents, "noisy": latents + 0.1}
    micro = MicroBatch(update.samples, range(len(update.samples)), outputs, torch.ones(()))
    return round(update.loss(micro).value.item(), 6)


@changes(
    Change(f"{ROLLOUT}.global_std", False, NFT),
    Change(f"{FLOW_RL}.exp_reward", True, NFT),
    Change("policy.diffusers.nft_beta", 0.1, NFT),
    Change("policy.diffusers.timesteps_fraction", 0.5, NFT),
    Change("policy.diffusers.weight_copy_decay_type", 1, NFT),
    Change("train.train_policy.advantage_low", -0.1, NFT),
    Change("train.train_policy.advantage_high", 0.5, NFT),
    Change("train.train_policy.advantage_mode", "positive_only", NFT),
    Change("train.train_policy.normalise_each_reward", True, NFT),
    Change("train.train_policy.least_diversity", 1.0, NFT),
    Change("train.train_policy.epsilon_low", 1e-2, GRPO),
    Change("train.train_policy.epsilon_high", 1e-2, GRPO),
)
def test_it_changes_what_is_learned_of_rollouts(change: Change) -> None:
    assert learned(change.before) != learned(change.after)


class Rows(list[MediaRow]):
    null_text = {"colour": torch.zeros(3)}


@changes(Change("train.train_policy.learns_data", True, {**NFT, f"{FLOW_RL}.data_beta": 0.01}))
def test_it_changes_which_rows_are_prepared(change: Change) -> None:
    assert (change.before.train.train_policy.rows, change.after.train.train_policy.rows) == ("media_prompts", "media")


@changes(
    (Change(f"{FLOW_RL}.data_beta", 0.02, {**DDRL, f"{FLOW_RL}.data_beta": 0.01}), 2.0),
    (Change(f"{FLOW_RL}.use_rl_sigma_and_noise", False, {**DDRL, f"{FLOW_RL}.data_beta": 0.01}), None),
    (Change(f"{FLOW_RL}.data_on_first_only", True, {**DDRL, f"{FLOW_RL}.data_beta": 0.01}), None),
)
def test_it_changes_what_is_learned_of_real_data(change: Change, expected: float | None) -> None:
    """Beside the weight: the noise levels of the rollouts, the first of them, or others for each image."""
    rows = Rows(MediaRow(i, "", Rows.null_text, torch.full((3, 2, 4, 4), float(i)), None) for i in range(4))
    family = Films()
    family.dropped_text, family.train_shift, family.max_conditioning_frames = lambda text: text, 1.0, 0  # type: ignore[attr-defined]
    trainer: Any = SimpleNamespace(adapter=SimpleNamespace(family=family))
    losses, levels = [], []
    for recipe in (change.before, change.after):
        update = _make_data_term(rows, recipe, trainer)(0, (3, 1), 0)
        noise = torch.stack([sample.noise for sample in update.samples])
        latents = torch.stack([sample.latents for sample in update.samples])
        outputs = {"velocity": torch.zeros_like(noise), "latents": latents, "noise": noise}
        if recipe is change.before:
            assert [int(image.flatten()[0]) for image in latents] == [3] * 5 + [1] * 5, "the rows of the prompts"
        losses.append(update.loss(MicroBatch(update.samples, range(2), outputs, torch.ones(()))).value.item())
        levels.append([sample.sigma for sample in update.samples])
    table = euler_schedule(6, 3.0).tolist()
    assert levels[0] == 2 * table[:5]
    if expected:
        assert losses[1] == pytest.approx(expected * losses[0])
    elif change.key.endswith("first_only"):
        assert levels[1] == 2 * table[:1]
    else:
        assert len(levels[1]) == 2 and not set(levels[1]) & set(table)
        later = _make_data_term(rows, change.after, trainer)(0, (3, 1), 1)
        assert not {sample.sigma for sample in later.samples} & set(levels[1]), "another update, other rows and levels"


def _make_data_term(rows: Any, recipe: Recipe, trainer: Any) -> Callable[[int, Sequence[int], int], Update]:
    return make_data_term(rows, recipe.policy.diffusers, recipe.train, make_training_sampling(recipe), trainer)
