"""Invalid rewards of a diffusion model: another attempt may have those that were lost, but not those of a broken
function."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.evaluate import diffusion
from cosmos_core.evaluate.scored_prompts import ScoredPrompt, average_scores
from cosmos_core.rewards.base import invalid_scores_error
from cosmos_core.types import Group, Prompt, Score, ScoredGroup
from tests.unit.test_evaluate_diffusion import evaluation


class Pipelines:
    """A model whose pipeline samples nothing."""

    denoiser_name, folder = "denoiser", None

    @staticmethod
    def load_pipeline(folder: None, dtype: torch.dtype) -> Any:
        return SimpleNamespace(to=lambda device: SimpleNamespace(denoiser=torch.nn.Identity()))


@pytest.mark.parametrize(("is_permanent", "error"), [(False, StageFailed), (True, RewardError)])
@pytest.mark.parametrize("scored", [{}, {"red", "blue sky", "green"}])
def test_lost_rewards_are_asked_for_again_in_another_attempt_and_those_of_a_broken_function_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_permanent: bool, error: type[Exception], scored: set[str]
) -> None:
    """In the first batch, or in the second prompt set."""

    def score(groups: Sequence[Group]) -> list[ScoredGroup]:
        lost = Score(None, {}, "the service is away", is_permanent)
        return [
            ScoredGroup(each, (Score(1.0, {"letters": 1.0}) if each.prompt.text in scored else lost,) * 2)
            for each in groups
        ]

    monkeypatch.setattr(diffusion, "open_pipeline", lambda *_: Pipelines())
    monkeypatch.setattr(diffusion, "open_rewards", lambda *_: nullcontext(score))
    monkeypatch.setattr(diffusion, "_make_pipeline_arguments", lambda model: {})
    samples = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    monkeypatch.setattr(diffusion, "_sample_media", lambda pipeline, arguments, prompts, _: [samples] * len(prompts))
    stage = evaluation(tmp_path, tmp_path)
    with pytest.raises(error, match="the first: the service is away"):
        diffusion.run(stage)
    assert not any(file.read_text() for file in stage.path.glob("unfinished-*/scores.jsonl")), "nothing is taken again"


@pytest.mark.parametrize("is_first_permanent", [False, True])
def test_one_lost_reward_is_asked_for_again_wherever_a_broken_function_stands(is_first_permanent: bool) -> None:
    broken, lost = Score(None, {}, "ValueError: bug", True), Score(None, {}, "the service is away")
    scores = (broken, lost) if is_first_permanent else (lost, broken)

    def scored(*of_prompt: Score) -> ScoredPrompt:
        return ScoredPrompt.from_group("colours", ScoredGroup(Group(Prompt(0, (), "red", ""), (), 0), of_prompt))

    for raised in (lambda: average_scores([scored(*scores)]), lambda: average_scores([*map(scored, scores)])):
        with pytest.raises(StageFailed, match="the first: the service is away"):
            raised()
    assert isinstance(invalid_scores_error("all are invalid", scores), StageFailed)
    with pytest.raises(RewardError, match="the first: ValueError: bug"):
        average_scores([scored(broken)])
