"""DiffusionNFT and FlowGRPO on tiny pipelines: rollout and training agree, what is learned, credit and the watch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.base import Update, split_equally
from cosmos_core.algorithms.flow_credit import AdvantageSettings, FlowRollout, RewardMonitor, diffusion_advantages
from cosmos_core.algorithms.flow_rl import FlowRl
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.families import open_pipeline
from cosmos_core.rollout.base import EngineDenoiser, EngineSettings, generate
from cosmos_core.rollout.flow_sampler import FlowSamplerEngine
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Score, ScoredGroup
from tests import tiny_pipelines
from tests.unit.trainers import NoView

SIZES: dict[str, dict[str, Any]] = {
    "sd3": {"inference_size": [16, 16]},
    "sana": {"inference_size": [32, 32]},
    "sana_video": {"inference_size": [32, 32], "inference_frames": 5, "is_video": True},
    "cosmos_predict": {"inference_size": [32, 32], "inference_frames": 5, "is_video": True},
}
SOLVERS = {"diffusion_nft": "dpm2", "flow_grpo": "flow"}
full = pytest.mark.full
SOLVED = {("sd3", "flow"), ("sd3", "cps"), ("sana_video", "flow")}
"""The steps of each solver are in `reference/test_flow_steps.py`."""
PAIRS = [
    pytest.param(family, solver, marks=[] if (family, solver) in SOLVED else full)
    for solver in ("flow", "dance", "cps") for family in SIZES
]  # fmt: skip


PROMPTS = ["7 red", "a blue cat"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pipelines, each made when first asked for."""
    return tmp_path_factory.mktemp("models")


_TEXTS: dict[Path, dict[str, dict[str, Tensor]]] = {}


def embeddings(model: Path, family: DiffusionModel) -> dict[str, dict[str, Tensor]]:
    """What the encoders of a pipeline say of the prompts, and of none; each pipeline is asked once."""
    if model not in _TEXTS:
        encoded = {text: family.text_embedding([text]) for text in ("", *PROMPTS)}
        _TEXTS[model] = {text: {key: value[0] for key, value in rows.items()} for text, rows in encoded.items()}
    return _TEXTS[model]


class Run:
    """A training without a stage: rewards are the share of red."""

    def __init__(self, family: str, folder: Path, trainer_type: str, **settings: Any) -> None:
        sample = {"num_steps": 4, "guidance_scale": 1.0, "solver": "dpm2"} | settings.pop("sample", {})
        flow_rl = {"train_on": [0, 1, 2]} | settings.pop("flow_rl", {})
        diffusers = {"max_prompt_length": 24, "sample": sample, "flow_rl": flow_rl, **SIZES[family]}
        diffusers |= settings.pop("diffusers", {})
        rate = settings.pop("optm_lr", 1e-3)
        self.recipe = Recipe.model_validate(
            {
                "policy": {"is_diffusers": True, "diffusers": diffusers},
                "train": {
                    "train_policy": {"type": "grpo", "trainer_type": trainer_type, "mini_batch": 4, **settings},
                    "train_batch_per_replica": 8, "optm_lr": rate, "optm_warmup_steps": 0, "seed": 3,
                },
                "rollout": {"n_generation": 4, "backend": "flow_sampler"},
            },
            context={},
        )  # fmt: skip
        model = folder / family
        if not model.exists():
            tiny_pipelines.save(family, model)
        self.family = open_pipeline(str(model), PolicyConfig(is_diffusers=True, diffusers=diffusers))
        torch.manual_seed(0)
        self.adapter = Denoiser(self.family.load_denoiser(torch.float32), self.family, self.recipe.train)
        self.trainer = Trainer(self.adapter, self.recipe.train, ProgressWriter(folder / "progress.json"))
        for name in self.recipe.train.train_policy.auxiliary_model_names:
            self.trainer.weight_sets.add(name)
        self.sampling = make_training_sampling(self.recipe)
        algorithm = make_algorithm(self.recipe, self.sampling)
        assert isinstance(algorithm, FlowRl)
        texts = embeddings(model, self.family)
        self.algorithm, algorithm.null_text = algorithm, texts[""]
        predict: Any = self.adapter.predict
        source = EngineDenoiser(self.family, predict, self.weights, torch.device("cpu"), null_text=texts[""])
        unused: Any = None
        self.engine = FlowSamplerEngine(
            EngineSettings(unused, unused, "", RolloutConfig(), 1, torch.float32, flow=source)
        )
        self.prompts = [Prompt(i, (), text, "", embedding=texts[text]) for i, text in enumerate(PROMPTS)]

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        self.adapter.runner.train(False)
        with self.trainer.use_weights(name):
            yield

    def draw(self, step: int = 0) -> list[Group]:
        return generate(self.engine, self.prompts, self.sampling, step)

    def updates(self, step: int = 0) -> list[Update]:
        samples, _ = self.algorithm.credit([scored(group) for group in self.draw(step)])
        return list(self.algorithm.updates(samples, self.trainer))

    def step(self, step: int) -> dict[str, float]:
        groups = [scored(group) for group in self.draw(step)]
        samples, metrics = self.algorithm.credit(groups)
        for update in self.algorithm.updates(samples, self.trainer):
            metrics |= self.trainer.update(update)
        self.algorithm.after_train_step(step + 1, self.trainer)
        return metrics | {"reward": mean(score.value or 0.0 for group in groups for score in group.scores)}


def scored(group: Group) -> ScoredGroup:
    values = [c.diffusion_sample.pixels[..., 0].float().mean().item() / 255 for c in group.completions]  # type: ignore[union-attr]
    return ScoredGroup(group, tuple(Score(value, {"red": value}) for value in values))


@pytest.mark.parametrize(("family", "solver"), PAIRS)
def test_rollout_and_training_say_the_same_of_each_step(family: str, solver: str, models: Path) -> None:
    """The same timestep, latents in full precision, the same distribution: before the first update the ratio is 1."""
    run = Run(family, models, "flow_grpo", sample={"solver": solver, "noise_level": 0.5}, kl_beta=0.01)
    del run.prompts[1:]
    metrics = run.step(0)
    assert metrics["ratio_deviation"] < 1e-5
    assert metrics["kl"] == 0.0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("sample", "flow_rl", "count"),
    [
        ({"guidance_scale": 3.0}, {}, 12),
        pytest.param({}, {"guard": True}, 12, marks=full),
        pytest.param({}, {"window_size": 1}, 4, marks=full),
        ({}, {"window_size": 2, "window_range": [0, 3], "window_moves_every": 1}, 8),
        pytest.param({}, {"use_same_seed": False, "train_on": [1, 3]}, 4, marks=full),
    ],
    ids=["guided", "guard", "fast", "mix", "own noise"],
)
def test_variants_of_flow_grpo_say_the_same_of_each_step(
    sample: dict[str, Any], flow_rl: dict[str, Any], count: int, models: Path
) -> None:
    run = Run("sd3", models, "flow_grpo", sample={"solver": "flow", **sample}, flow_rl=flow_rl)
    del run.prompts[1:]
    for step in range(2 if "window_moves_every" in flow_rl else 1):
        [update] = run.updates(step)
        assert len(update.samples) == count
        metrics = run.trainer.update(update)
        assert metrics["ratio_deviation"] < 1e-4 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("trainer_type", ["flow_grpo", pytest.param("diffusion_nft", marks=full)])
def test_frames_that_are_given_are_given_in_training_too(trainer_type: str, models: Path) -> None:
    run = Run("cosmos_predict", models, trainer_type, sample={"solver": "flow"},
              flow_rl={"min_conditional_frames": 1, "max_conditional_frames": 1})  # fmt: skip
    clip = torch.randn(run.family.latent_shape(32, 32, 5))
    run.prompts = [replace(prompt, conditioning_clip=clip) for prompt in run.prompts]
    samples, _ = run.algorithm.credit([scored(group) for group in run.draw()])
    assert all(torch.equal(sample.latents[:, :1], clip[:, :1]) for sample in samples)
    [update] = run.algorithm.updates(samples, run.trainer)
    assert {sample.num_conditioning_frames for sample in update.samples} == {1}
    metrics = run.trainer.update(update)
    assert metrics["grad_norm"] > 0 and metrics.get("ratio_deviation", 0.0) < 1e-5


def test_flow_grpo_learns_nothing_of_a_step_without_any_difference(models: Path) -> None:
    run = Run("sd3", models, "flow_grpo", sample={"solver": "flow"})
    groups = [ScoredGroup(group, (Score(1.0),) * 4) for group in run.draw()]
    samples, metrics = run.algorithm.credit(groups)
    assert samples == [] and metrics["reward/constant_groups"] == 1.0
    assert list(run.algorithm.updates(samples, run.trainer)) == []


def test_nft_learns_groups_of_equal_rewards_with_an_optimality_of_one_half(models: Path) -> None:
    """As the reference implementation, whose losses are a mean over all samples."""
    run = Run("sd3", models, "diffusion_nft", diffusers={"timesteps_fraction": 1.0})
    groups = [scored(group) for group in run.draw()]
    groups[1] = ScoredGroup(groups[1].group, (Score(1.0), Score(1.0), Score(None, error="x"), Score(1.0)))
    samples, metrics = run.algorithm.credit(groups)
    assert [sample.advantage for sample in samples[4:]] == [0.0] * 3 and all(s.advantage for s in samples[:4])
    assert metrics["reward/constant_groups"] == 0.5
    [update] = run.algorithm.updates(samples, run.trainer)
    assert len(update.samples) == 7 * 4
    assert run.trainer.update(update)["optimality"] == pytest.approx(0.5, abs=1e-3)


def reference_decay(step: int, kind: int) -> float:
    """`return_decay` of DiffusionNFT, which is asked with the number of optimizer steps taken."""
    flat, uprate, uphold = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}[kind]
    return 0.0 if step < flat else min((step - flat) * uprate, uphold)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("per_step", [2, pytest.param(1, marks=full)])
def test_the_old_policy_follows_as_in_the_reference_implementation(kind: int, per_step: int) -> None:
    policy = {"is_diffusers": True, "diffusers": {"weight_copy_decay_type": kind}}
    trained = {"type": "grpo", "trainer_type": "diffusion_nft", "batch_size_per_optimize": 4 // per_step}
    trained["mini_batch"] = 2
    recipe = Recipe.model_validate({"policy": policy, "train": {"train_policy": trained}}, context={})
    fractions: list[float] = []

    class View(NoView):
        def move_towards_policy(self, weights: str, fraction: float) -> None:
            fractions.append(fraction)

    drawn = DiffusionSample(torch.zeros(1), torch.zeros(2), (1.0, 0.5, 0.0), 0)
    rollouts = [FlowRollout(drawn, Prompt(0, (), "", "", embedding={}), 1.0, k) for k in range(4)]
    algorithm, resumed = make_algorithm(recipe), make_algorithm(recipe)
    for step in range(300):
        if step == 7:
            resumed.load_state_dict(algorithm.state_dict())
            algorithm = resumed
        assert len(list(algorithm.updates(rollouts, View()))) == per_step
        algorithm.after_train_step(step + 1, View())
    assert fractions == pytest.approx([1 - reference_decay((s + 1) * per_step, kind) for s in range(300)], abs=1e-12)


def test_rewards_of_a_service_are_normalised_and_watched_by_their_own_names(models: Path) -> None:
    functions = [{"name": "hps"}, {"name": "judge", "weight": 0.0}]
    run = Run("sd3", models, "diffusion_nft", normalise_each_reward=True, use_remote_reward=True,
              remote_reward={"reward_fns": functions})  # fmt: skip
    scores_of_group = tuple(Score(0.0, {"hps": float(k), "judge": 0.5}) for k in range(4))
    metered = [ScoredGroup(group, scores_of_group) for group in run.draw()]
    samples, metrics = run.algorithm.credit(metered)
    assert len(samples) == 8 and metrics["watch/judge"] == 0.5
    assert sorted({round(sample.advantage, 2) for sample in samples}) == [-1.34, -0.45, 0.45, 1.34]


@pytest.mark.parametrize("family", ["sd3", *(pytest.param(each, marks=full) for each in SIZES if each != "sd3")])
def test_nft_asks_at_the_noise_levels_of_the_sampler(family: str, models: Path) -> None:
    run = Run(family, models, "diffusion_nft", diffusers={"timesteps_fraction": 0.99}, kl_beta=1e-4)
    seen: list[float] = []
    prepare = run.family.nft_prepare_transformer_input

    def remembered(latents: Tensor, sigma_B: Tensor, *args: Any) -> dict[str, Any]:
        seen.extend(sigma_B.tolist())
        return prepare(latents, sigma_B, *args)

    run.family.nft_prepare_transformer_input = remembered  # type: ignore[method-assign]
    groups = run.draw()
    table = groups[0].completions[0].diffusion_sample.sigmas[:-1]  # type: ignore[union-attr]
    asked = set(seen)  # as the network gets them
    assert asked == set(torch.tensor(table).tolist()) and len(asked) == 4
    samples, _ = run.algorithm.credit([scored(group) for group in groups])
    [update] = run.algorithm.updates(samples, run.trainer)
    assert {sample.sigma for sample in update.samples} == set(table)
    seen.clear()
    metrics = run.trainer.update(update)
    assert set(seen) == asked
    assert metrics["old_deviation"] == metrics["kl"] == 0.0  # old policy and reference are the policy yet
    assert metrics["grad_norm"] > 0


def test_weights_that_are_the_policys_own_need_no_pass(models: Path) -> None:
    """An old policy that follows at once is the policy until the optimizer steps; one that lags is asked."""
    few = {"sample": {"num_steps": 2}, "flow_rl": {"train_on": [0]}}
    run, kinds = Run("sd3", models, "diffusion_nft", kl_beta=0.1, **few), []
    del run.prompts[1:]
    run.adapter.model.register_forward_hook(lambda *_: kinds.append(torch.is_grad_enabled()))

    def passes(step: int) -> tuple[int, int]:
        updates = run.updates(step)
        kinds.clear()
        for update in updates:
            run.trainer.update(update)
        run.algorithm.after_train_step(step + 1, run.trainer)
        return kinds.count(True), kinds.count(False)

    learned, compared = passes(0)
    assert learned and not compared, "old policy and reference are the policy"
    assert passes(1) == (learned, learned), "the reference is another by now"
    with torch.no_grad():
        next(iter(run.trainer.weight_sets.tensors["old"].values())).add_(0.01)
    assert passes(2) == (learned, 2 * learned)
    with torch.no_grad():
        run.adapter.model.add_module("dropout", torch.nn.Dropout(0.1))
    assert passes(3) == (learned, 2 * learned), "with dropout the policy's outputs are its own alone"


@pytest.mark.parametrize(
    ("trainer_type", "rate", "steps", "num_steps"),
    [("diffusion_nft", 5e-3, 6, 3), pytest.param("flow_grpo", 1e-3, 12, 4, marks=full)],
)
def test_the_reward_rises(trainer_type: str, rate: float, steps: int, num_steps: int, models: Path) -> None:
    sample = {"solver": SOLVERS[trainer_type], "noise_level": 0.7, "num_steps": num_steps}
    run = Run("sd3", models, trainer_type, sample=sample, optm_lr=rate)
    del run.prompts[num_steps - 2 :]
    rewards = [run.step(step)["reward"] for step in range(steps)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.005, rewards


def scores(*rows: Sequence[float | None], **named: Sequence[Sequence[float]]) -> list[tuple[Score, ...]]:
    return [
        tuple(Score(value, {name: values[g][k] for name, values in named.items()}) for k, value in enumerate(row))
        for g, row in enumerate(rows)
    ]


def test_advantages_have_the_mean_of_their_prompt_and_the_spread_of_the_step() -> None:
    values, metrics = diffusion_advantages(scores([1.0, 3.0], [5.0, 5.0], [0.0, None]), AdvantageSettings())
    std = torch.tensor([1.0, 3.0, 5.0, 5.0, 0.0], dtype=torch.float64).std(correction=0).item() + 1e-4
    assert values[0] == pytest.approx([-1 / std, 1 / std])
    assert values[1:] == [[None, None], [None, None]]
    assert metrics["reward/constant_groups"] == pytest.approx(2 / 3)
    of_group, _ = diffusion_advantages(scores([1.0, 3.0], [5.0, 9.0]), AdvantageSettings("group"))
    assert of_group == [pytest.approx([-1 / 1.0001, 1 / 1.0001]), pytest.approx([-2 / 2.0001, 2 / 2.0001])]
    plain, _ = diffusion_advantages(scores([1.0, 3.0]), AdvantageSettings(divides_by_std=False))
    assert plain == [[-1.0, 1.0]]


def test_the_exponential_of_a_large_advantage_is_a_number(models: Path) -> None:
    run = Run("sd3", models, "flow_grpo", flow_rl={"exp_reward": True}, unbiased_advantage=True)
    [group, _] = run.draw()
    values = (0.0, 5000.0, 0.0, 5000.0)
    rollouts, _ = run.algorithm.credit([ScoredGroup(group, tuple(Score(value, {}) for value in values))])
    assert [rollout.advantage < -5 for rollout in rollouts] == [True, False, True, False]


def test_the_data_term_learns_the_rows_of_the_prompts_that_a_step_was_left_with(models: Path) -> None:
    """Dynamic sampling drops groups, so the number of a step does not tell which prompts are left."""
    run, asked = Run("sd3", models, "flow_grpo"), list[Any]()
    run.algorithm.data_term = lambda *given: asked.append(given)  # type: ignore[func-returns-value, assignment]
    rows = zip(run.draw(), (7, 2), strict=True)
    left = [scored(replace(group, prompt=replace(group.prompt, id=row), step=4)) for group, row in rows]
    samples, _ = run.algorithm.credit(left)
    assert len(list(run.algorithm.updates(samples, run.trainer))) == 1
    assert asked == [(4, [7, 2], 0)]


def test_rewards_that_are_normalised_each_do_not_drown_each_other() -> None:
    groups = scores([100.1, 200.0], big=[[100.0, 200.0]], small=[[0.1, 0.0]])
    together, _ = diffusion_advantages(groups, AdvantageSettings("group"))
    each, _ = diffusion_advantages(groups, AdvantageSettings("group", reward_weights={"big": 1.0, "small": 1.0}))
    assert together[0][1] == pytest.approx(1.0, abs=1e-3)
    assert each[0] == pytest.approx([-0.5 / (0.5 + 1e-6) + 0.05 / (0.05 + 1e-4)] * 1 + [1 - 0.05 / 0.0501], abs=2e-3)


def test_an_alarm_is_raised_when_samples_become_alike_or_a_watched_reward_falls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def groups(spread: float, reward: float, judge: float) -> list[ScoredGroup]:
        pixels = torch.zeros(1, 1, 3, dtype=torch.uint8)
        drawn = (DiffusionSample(pixels, torch.full((4,), value), (1.0, 0.0), 0) for value in (0.0, spread))
        completions = tuple(Completion((), "stop", "", diffusion_sample=each) for each in drawn)
        return [ScoredGroup(Group(Prompt(0, (), "", ""), completions, 0), (Score(reward, {"judge": judge}),) * 2)]

    watch = RewardMonitor(0.5, ["judge"], num_steps_in_baseline=1)
    assert watch.metrics(groups(1.0, 0.5, 0.9))["watch/alarm"] == 0.0
    assert watch.metrics(groups(0.8, 0.9, 0.8)) == {
        "watch/diversity": pytest.approx(0.8), "watch/relative_diversity": pytest.approx(0.8),
        "watch/judge": pytest.approx(0.8), "watch/alarm": 0.0,
    }  # fmt: skip
    assert watch.metrics(groups(0.4, 0.9, 0.8))["watch/alarm"] == 1.0
    assert "diversity 1 at first, 0.4 now" in caplog.text
    other = RewardMonitor(0.5, ["judge"], num_steps_in_baseline=1)
    other.load_state_dict(watch.state_dict())
    assert other.metrics(groups(0.9, 0.9, 0.3))["watch/alarm"] == 1.0
    assert other.metrics(groups(0.9, 0.4, 0.3))["watch/alarm"] == 0.0  # nothing is gained by it


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(1152, 576, [576, 576]), (577, 576, [289, 288]), (7, None, [7]), (0, 4, []), (0, None, [])],
)
def test_what_is_left_of_a_train_step_is_spread_over_its_optimizer_steps(
    count: int, size: int | None, sizes: list[int]
) -> None:
    batches = split_equally(count, size)
    assert [batch.stop - batch.start for batch in batches] == sizes
    assert [i for batch in batches for i in range(batch.start, batch.stop)] == list(range(count))
