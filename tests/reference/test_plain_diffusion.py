"""SFT and DiffusionNFT as stages run them end with the weights of plain loops that encode, draw and learn by
themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import train
from tests import tiny_pipelines
from tests.reference import diffusion_runs, plain_diffusion_nft, plain_diffusion_sft

STEPS = 4
NFT_STEPS = 2  # of two updates each; later a pixel may round to another byte, and its reward jumps
TOLERANCE = 1e-6
SFT = plain_diffusion_sft.Settings(
    batch=3, learning_rate=1e-3, adam_epsilon=1e-4, weight_decay=0.1, clip_norm=0.5, prompt_dropout=0.3, max_tokens=16,
    seed=11,
)  # fmt: skip
NFT = plain_diffusion_nft.Settings(
    prompts_per_step=2, completions=3, num_steps=4, num_levels=3, size=16, batch=3, per_update=3, beta=0.8,
    kl_beta=0.05, learning_rate=1e-3, adam_epsilon=1e-4, clip_norm=0.5, max_tokens=16, seed=11,
)  # fmt: skip
PROMPTS = ["7 red", "blue cat", "a dog", "white", "left out"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.save("sd3", tmp_path_factory.mktemp("model"))


def trained(stage: Stage) -> nn.Module:
    found: nn.Module = train(stage).adapter.model
    return found


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest of any weight."""
    weights = other.state_dict()
    assert one.state_dict().keys() == weights.keys()
    return max((weight - weights[name]).abs().max().item() for name, weight in one.state_dict().items())


def test_sft_ends_with_the_weights_of_the_plain_loop(model: Path, tmp_path: Path) -> None:
    rows = diffusion_runs.write_images(tmp_path / "images", 9, 16)
    stage, plain = diffusion_runs.sft(tmp_path, model, rows, SFT, size=16, steps=STEPS)
    plain.prepare()
    losses = [plain.step(step) for step in range(STEPS)]
    ours = trained(stage)
    assert [line["loss"] for line in read_metrics(stage.path / "metrics.jsonl")] == pytest.approx(losses, rel=1e-5)
    assert difference(ours, plain.model) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("change", [{"prompt_dropout": 0.0}, {"clip_norm": 0.4}])
def test_the_comparison_of_sft_would_see_another_setting(model: Path, tmp_path: Path, change: dict[str, float]) -> None:
    rows = diffusion_runs.write_images(tmp_path / "images", 9, 16)
    _, plain = diffusion_runs.sft(tmp_path, model, rows, replace(SFT, **change), size=16, steps=STEPS)
    ours = plain_diffusion_sft.Training(model, rows, SFT)
    ours.prepare()
    plain.known = ours.known
    for step in range(STEPS):
        ours.step(step), plain.step(step)
    assert difference(ours.model, plain.model) > 5 * TOLERANCE


@pytest.mark.full
def test_the_plain_loop_that_encodes_in_the_step_is_the_same(model: Path, tmp_path: Path) -> None:
    rows = diffusion_runs.write_images(tmp_path / "images", 9, 16)
    once, always = (plain_diffusion_sft.Training(model, rows, SFT) for _ in range(2))
    once.prepare()
    assert [once.step(step) for step in range(2)] == pytest.approx([always.step(step) for step in range(2)], rel=1e-5)


def test_nft_ends_with_the_weights_of_the_plain_loop(model: Path, tmp_path: Path) -> None:
    stage, plain = diffusion_runs.nft(tmp_path, model, PROMPTS, NFT, steps=NFT_STEPS)
    rewards = [plain.step(step) for step in range(NFT_STEPS)]
    ours = trained(stage)
    lines = read_metrics(stage.path / "metrics.jsonl")
    assert [line["reward/mean"] for line in lines] == pytest.approx(rewards, abs=1e-5), "other images"
    assert difference(ours, plain.model) <= TOLERANCE
    assert difference(plain.reference, plain.model) > 1000 * TOLERANCE, "nothing was learned"


@pytest.mark.full
@pytest.mark.parametrize("change", [{"kl_beta": 0.1}, {"per_update": 6}])
def test_the_comparison_of_nft_would_see_another_setting(model: Path, tmp_path: Path, change: dict[str, float]) -> None:
    _, plain = diffusion_runs.nft(tmp_path, model, PROMPTS, NFT, steps=NFT_STEPS)
    other = plain_diffusion_nft.Training(model, PROMPTS, plain.reward, replace(NFT, **change))
    for training in (plain, other):
        with torch.random.fork_rng():
            for step in range(NFT_STEPS):
                training.step(step)
    assert difference(plain.model, other.model) > 5 * TOLERANCE
