"""Scores of the samples of a diffusion model by prompt, and their conversion to metrics and to a table of items."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.evaluate.results import build_table_from_rows
from cosmos_core.run.files import parse_json_objects, write_text
from cosmos_core.types import Prompt, ScoredGroup

_SCORES_FILE = "scores.jsonl"


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Rewards of the images or videos that a diffusion model sampled for one prompt."""

    set_name: str
    id: int
    """Position of the prompt in its prompt set."""
    rewards: list[dict[str, float]]
    """Valid rewards of each sample of the prompt, by the name of the reward function."""
    num_invalid: int
    """Number of samples of the prompt for which a reward is invalid."""
    error: str
    """Reason why an invalid reward of the prompt is invalid, one that may be valid in another attempt before others;
    empty if all rewards are valid."""
    is_permanent_error: bool = False
    """True if the reward to which `error` belongs would be invalid again in another attempt, as after an exception of
    the reward function."""

    @classmethod
    def from_group(cls, set_name: str, scored_group: ScoredGroup) -> "ScoredPrompt":
        """Return the rewards of the samples in a scored group, which are the samples of one prompt."""
        errors = [(score.error, score.is_permanent_error) for score in scored_group.scores if score.value is None]
        rewards = [dict(score.metrics) for score in scored_group.scores]
        reward_error, is_permanent_error = min(errors, key=lambda error: error[1], default=("", False))
        return cls(set_name, scored_group.group.prompt.id, rewards, len(errors), reward_error, is_permanent_error)

    def mean_rewards(self) -> dict[str, float]:
        """Return the mean of each reward over the prompt's samples for which it is valid, by reward function."""
        reward_names = dict.fromkeys(name for sample_rewards in self.rewards for name in sample_rewards)
        return {n: float(np.mean([rewards[n] for rewards in self.rewards if n in rewards])) for n in reward_names}


def read_scores(folder: Path) -> list[ScoredPrompt]:
    """Return the scored prompts that an earlier attempt of the stage wrote to the file of scores in `folder`. Remove a
    truncated line at the end of the file."""
    scores_file = folder / _SCORES_FILE
    json_lines = scores_file.read_text(encoding="utf-8", errors="replace").split("\n") if scores_file.exists() else []
    scored_prompts = [ScoredPrompt(**score_fields) for score_fields in parse_json_objects(json_lines)]
    write_text(scores_file, _to_json_lines(scored_prompts))
    return scored_prompts


def append_scores(folder: Path, scored_prompts: Sequence[ScoredPrompt]) -> None:
    """Append the rewards of prompts to the file of scores in `folder`, and sync the file to disk."""
    with open(folder / _SCORES_FILE, "a", encoding="utf-8") as file:
        file.write(_to_json_lines(scored_prompts))
        file.flush()
        os.fsync(file.fileno())


def average_scores(scored_prompts: Sequence[ScoredPrompt]) -> dict[str, float]:
    """Return the mean of each reward over each prompt set, as metrics with standard errors. Raise an error for a prompt
    set without a valid reward: `StageFailed` if another attempt can succeed, otherwise `RewardError`."""
    metrics: dict[str, float] = {}
    for set_name in dict.fromkeys(item.set_name for item in scored_prompts):
        scores_of_set = [item for item in scored_prompts if item.set_name == set_name]
        prompt_rewards = [item.mean_rewards() for item in scores_of_set]
        reward_names = dict.fromkeys(reward_name for mean_rewards in prompt_rewards for reward_name in mean_rewards)
        if not reward_names:
            decisive = min(scores_of_set, key=lambda item: item.is_permanent_error)
            error_text = f"no sample of prompt set {set_name!r} has a valid reward; the first: {decisive.error}"
            raise RewardError(error_text) if decisive.is_permanent_error else StageFailed(error_text)
        for reward_name in reward_names:
            mean_rewards = [item[reward_name] for item in prompt_rewards if reward_name in item]
            metrics[f"evaluation/{set_name}/{reward_name}"] = float(np.mean(mean_rewards))
            if len(mean_rewards) > 1:
                standard_error = float(np.std(mean_rewards, ddof=1)) / math.sqrt(len(mean_rewards))
                metrics[f"evaluation/{set_name}/{reward_name}_stderr"] = standard_error
        metrics[f"evaluation/{set_name}/invalid"] = float(sum(item.num_invalid for item in scores_of_set))
    return metrics


def to_item_table(scored_prompts: Sequence[ScoredPrompt], prompt_sets: Mapping[str, Sequence[Prompt]]) -> pa.Table:
    """Return a table of evaluated items with one row per prompt; the name of the prompt set is the task, and the mean
    rewards of the prompt are the metrics."""
    item_rows: list[dict[str, Any]] = []
    for scored_prompt in scored_prompts:
        prompt = prompt_sets[scored_prompt.set_name][scored_prompt.id]
        hash_columns = {"doc_hash": _hash_json([prompt.text, prompt.metadata]), "prompt_hash": _hash_json(prompt.text)}
        item_id_columns = {"task": scored_prompt.set_name, "doc_id": scored_prompt.id}
        item_rows.append({**scored_prompt.mean_rewards(), **item_id_columns, **hash_columns, "response": ""})
    return build_table_from_rows(item_rows)


def _hash_json(json_value: object) -> str:
    return hashlib.sha256(json.dumps(json_value, sort_keys=True, default=str).encode()).hexdigest()


def _to_json_lines(scored_prompts: Sequence[ScoredPrompt]) -> str:
    return "".join(json.dumps(asdict(scored_prompt)) + "\n" for scored_prompt in scored_prompts)
