"""Calls each reward on prompts of the rows with made-up completions, so that `cosmos check` says what step 1 would.

A reward that scores none of them is refused; one that scores some is mentioned. Services are not called (`check.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cosmos_core.data.prepared import has_split, open_prompts, rows_kind
from cosmos_core.errors import RewardError
from cosmos_core.rewards.base import metric_names
from cosmos_core.run.stage import CHECKED_PROMPTS, Stage
from cosmos_core.train.drawing import REFERENCE_KEYS
from cosmos_core.train.measure import open_rewards
from cosmos_core.types import Completion, Drawn, Group, JsonValue, Prompt, ScoredGroup, Segment

SPLITS = ("train", "validation")
_NUM_PROMPTS = 2
_MADE_UP = "2 + 2 = 4, so it is \\boxed{4}."


def first_prompts(folder: Path) -> dict[str, JsonValue]:
    """Return the first prompts to complete of each split of prepared rows, as JSON has them."""
    found: dict[str, JsonValue] = {}
    for name in SPLITS:
        if has_split(folder, name) and rows_kind(folder, name) == "prompts":
            prompts = open_prompts(folder, name)
            first = [prompts[i] for i in range(min(_NUM_PROMPTS, len(prompts)))]
            found[name] = [{"text": p.text, "reference": p.reference, "metadata": p.metadata} for p in first]
    return found


def call_rewards(stage: Stage, weights: Mapping[str, float], splits: Sequence[str], num_frames: int | None) -> str:
    """Return the names of the rewards, and which of them score only some completions.

    Args:
        stage: the stage that scores with them.
        weights: the rewards.
        splits: of these the prompts are taken.
        num_frames: of a made-up video, 1 for an image; None: a text.

    Raises:
        RewardError: a reward cannot be loaded, or scores no completion.
    """
    said = f"rewards {', '.join(weights)}"
    groups = _groups(stage, splits, num_frames)
    with open_rewards(stage, dict.fromkeys(weights, 1.0)) as score:
        scored = score(groups) if groups else []
    notices = [_judged(reward, name, scored) for reward, name in metric_names(weights).items()] if scored else []
    return "; ".join([said, *filter(None, notices)])


def _judged(reward: str, name: str, groups: Sequence[ScoredGroup]) -> str:
    """Return what is to be said of a reward that has not scored all completions."""
    scores = [score for group in groups for score in group.scores]
    missing = [score for score in scores if name not in score.metrics]
    error = next((score.error for score in missing if f"{name}: " in score.error), "")
    if not missing:
        return ""
    if not error:
        return f"{reward} returned None for {len(missing)} of {len(scores)} completions, where it adds nothing"
    if len(missing) < len(scores):
        return f"{reward} has no score for {len(missing)} of {len(scores)} made-up completions ({error})"
    raise RewardError(
        f"the reward {reward!r} has no score for any of {len(scores)} made-up completions of rows, so no step could "
        f"learn: {error}"
    )


def _groups(stage: Stage, splits: Sequence[str], num_frames: int | None) -> list[Group]:
    known = _prompts(stage)
    size = stage.recipe.policy.diffusers.inference_size
    groups = []
    for name in splits:
        for i, row in enumerate(known.get(name) or known.get(SPLITS[0]) or []):
            columns, reference = row["metadata"], row["reference"]
            if num_frames is None:
                completions = (_text(_MADE_UP), _text(reference))
            else:
                reference = next((str(columns[name]) for name in _reference_columns(stage) if name in columns), "")
                completions = (_drawing((*((num_frames,) if num_frames > 1 else ()), *size, 3)),) * 2
            groups.append(Group(Prompt(i, (0,), row["text"], reference, metadata=columns), completions, 0))
    return groups


def _reference_columns(stage: Stage) -> tuple[str, ...]:
    named = getattr(stage.recipe.train.train_policy, "response_column_name", "")
    return (named,) if named else REFERENCE_KEYS


def _prompts(stage: Stage) -> dict[str, list[dict[str, Any]]]:
    if (file := stage.path / CHECKED_PROMPTS).exists():
        found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return first_prompts(stage.data) if stage.data is not None else {}  # type: ignore[return-value]


def _text(text: str) -> Completion:
    length = len(text.split()) + 1
    return Completion((Segment((0,) * length, True, (-1.0,) * length, 0),), "stop", text)


def _drawing(shape: tuple[int, ...]) -> Completion:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Completion((), "stop", "", drawn=Drawn(pixels, None, (), 0))
