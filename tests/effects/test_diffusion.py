"""Keys of diffusion models: what they read, where training looks, and which family a pipeline is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.data.kinds.media import make_noise_sampler
from cosmos_core.data.media_rows import MediaRow
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.sana import Sana
from tests import tiny_pipelines
from tests.effects.change import SFT, Change, changes

FLOW = {**SFT, "policy.is_diffusers": True}
UNIFORM = {**FLOW, "policy.diffusers.weighting_scheme": "none"}
CLIP = {**FLOW, "policy.diffusers.max_given_frames": 1}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.save("sana", tmp_path_factory.mktemp("pipelines") / "sana")


def row(frames: int = 0) -> MediaRow:
    mean = torch.zeros((4, *((frames,) if frames else ()), 8, 8))
    return MediaRow(0, "a prompt", {"prompt_embeds": torch.ones(2)}, mean, None)


class Rows:
    """What `make_noise_sampler` asks of prepared rows."""

    null_text = {"prompt_embeds": torch.zeros(2)}


class Adapter:
    """What `make_noise_sampler` asks of an adapter."""

    def __init__(self, family: Any) -> None:
        self.family = family


def drawn(recipe: Recipe, pipeline: Path, frames: int = 0) -> list[FlowSample]:
    rows: Any = Rows()
    draws = make_noise_sampler(rows, recipe.policy.diffusers, Adapter(open_pipeline(str(pipeline), recipe.policy)))
    return [draws.sample(row(frames), seed) for seed in range(64)]


@changes(
    Change("policy.diffusers.weighting_scheme", "mode", FLOW),
    Change("policy.diffusers.train_flow_shift", 7.0, FLOW),
    Change("policy.diffusers.logit_mean", 1.0, FLOW),
    Change("policy.diffusers.logit_std", 0.1, FLOW),
)
def test_it_changes_the_noise_levels_that_are_learned(change: Change, pipeline: Path) -> None:
    before, after = (drawn(recipe, pipeline) for recipe in (change.before, change.after))
    assert [sample.sigma for sample in before] != [sample.sigma for sample in after]
    assert all(torch.equal(one.latents, other.latents) for one, other in zip(before, after, strict=True))


@changes(Change("policy.diffusers.prompt_dropout", 0.9, FLOW))
def test_it_changes_how_many_prompts_are_dropped(change: Change, pipeline: Path) -> None:
    before, after = (drawn(recipe, pipeline) for recipe in (change.before, change.after))
    counts = [sum(not sample.text["prompt_embeds"].any() for sample in samples) for samples in (before, after)]
    assert counts[0] < 16 < 48 < counts[1]


@changes(
    (Change("policy.diffusers.max_given_frames", 1, FLOW), ({0, 1, 2}, {0, 1})),
    (Change("policy.diffusers.min_given_frames", 1, CLIP), ({0, 1}, {1})),
)
def test_it_changes_how_many_frames_are_given(
    change: Change, expected: tuple[set[int], set[int]], pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sana, "max_conditioning_frames", 2)
    found = [drawn(recipe, pipeline, 4) for recipe in (change.before, change.after)]
    assert tuple({sample.num_conditioning_frames for sample in samples} for samples in found) == expected


@changes(Change("policy.diffusers.max_prompt_length", 8, FLOW), Change("policy.diffusers.dtype", "bfloat16", FLOW))
def test_it_changes_the_embedding_of_a_prompt(change: Change, pipeline: Path) -> None:
    before, after = (
        open_pipeline(str(pipeline), recipe.policy).text_embedding(["a cat"])["prompt_embeds"]
        for recipe in (change.before, change.after)
    )
    assert (before.shape, before.dtype) != (after.shape, after.dtype)


@changes((Change("policy.diffusers.offload", False, FLOW), ("cpu", "meta")))
def test_it_changes_where_encoders_wait(change: Change, expected: tuple[str, str], pipeline: Path) -> None:
    """The meta device stands for a GPU."""
    found = []
    for recipe in (change.before, change.after):
        family = open_pipeline(str(pipeline), recipe.policy, "meta")
        found.append(next(family.pipeline.text_encoder.parameters()).device.type)
    assert tuple(found) == expected


@changes(Change("policy.model_class", f"{__file__}:Rows", FLOW))
def test_it_changes_the_family_of_a_pipeline(change: Change, pipeline: Path) -> None:
    assert type(open_pipeline(str(pipeline), change.before.policy)).__name__ == "Sana"
    with pytest.raises(Exception, match="must be a subclass of"):
        open_pipeline(str(pipeline), change.after.policy)


@changes(Change("policy.is_diffusers", True))
def test_it_changes_what_the_model_is_taken_for(change: Change) -> None:
    assert [recipe.policy.modality.name for recipe in (change.before, change.after)] == ["causal_lm", "diffusion"]
    assert [recipe.train.train_policy.rows for recipe in (change.before, change.after)] == ["sequences", "media"]
