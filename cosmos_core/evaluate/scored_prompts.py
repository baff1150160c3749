"""Scores of the samples of a diffusion model by prompt, and their conversion to metrics and to a table of items."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cosmos_core.errors import RewardError
from cosmos_core.run.files import json_objects, write_text
from cosmos_core.types import Prompt, ScoredGroup

_FILE = "scores.jsonl"


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Rewards of the samples of one prompt."""

    set_name: str
    id: int
    """Position of the prompt in its set."""
    rewards: list[dict[str, float]]
    """Valid rewards of each sample, by name."""
    num_invalid: int
    """Number of samples for which a reward is invalid."""
    error: str
    """Reason of the first invalid reward; empty if all rewards are valid."""

    @classmethod
    def of(cls, set_name: str, group: ScoredGroup) -> "ScoredPrompt":
        """Return the rewards of a scored group."""
        errors = [score.error for score in group.scores if score.value is None]
        rewards = [dict(score.metrics) for score in group.scores]
        return cls(set_name, group.group.prompt.id, rewards, len(errors), errors[0] if errors else "")

    def means(self) -> dict[str, float]:
        """Return the mean of each reward over the samples for which it is valid."""
        names = dict.fromkeys(name for values in self.rewards for name in values)
        return {n: float(np.mean([values[n] for values in self.rewards if n in values])) for n in names}


def read_scores(folder: Path) -> list[ScoredPrompt]:
    """Return the scores that an earlier attempt of the stage wrote, and remove a truncated line at the end."""
    path = folder / _FILE
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    scored_prompts = [ScoredPrompt(**each) for each in json_objects(lines)]
    write_text(path, _lines(scored_prompts))
    return scored_prompts


def append_scores(folder: Path, scored_prompts: Sequence[ScoredPrompt]) -> None:
    """Append scores to the file, and sync the file to disk."""
    with open(folder / _FILE, "a", encoding="utf-8") as file:
        file.write(_lines(scored_prompts))
        file.flush()
        os.fsync(file.fileno())


def metrics_of(scored_prompts: Sequence[ScoredPrompt]) -> dict[str, float]:
    """Return the mean of each reward of each prompt set, with standard error, and the number of invalid samples.

    Raises:
        RewardError: no sample of a prompt set has a valid reward.
    """
    metrics: dict[str, float] = {}
    for set_name in dict.fromkeys(each.set_name for each in scored_prompts):
        of_set = [each for each in scored_prompts if each.set_name == set_name]
        means = [each.means() for each in of_set]
        names = dict.fromkeys(name for values in means for name in values)
        if not names:
            raise RewardError(f"no sample of prompt set {set_name!r} has a valid reward; the first: {of_set[0].error}")
        for name in names:
            values = [each[name] for each in means if name in each]
            metrics[f"evaluation/{set_name}/{name}"] = float(np.mean(values))
            if len(values) > 1:
                error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
                metrics[f"evaluation/{set_name}/{name}_stderr"] = error
        metrics[f"evaluation/{set_name}/invalid"] = float(sum(each.num_invalid for each in of_set))
    return metrics


def item_table(scored_prompts: Sequence[ScoredPrompt], prompt_sets: Mapping[str, Sequence[Prompt]]) -> pa.Table:
    """Return a table with the columns task (name of the prompt set), doc_id, doc_hash (of prompt and metadata),
    prompt_hash, response (empty) and one column for each reward, with null if no sample of the prompt has a valid
    reward."""
    means = [each.means() for each in scored_prompts]
    prompts = [prompt_sets[each.set_name][each.id] for each in scored_prompts]
    columns = dict.fromkeys(name for values in means for name in values)
    return pa.table({
        "task": pa.array([each.set_name for each in scored_prompts], pa.string()),
        "doc_id": pa.array([each.id for each in scored_prompts], pa.int64()),
        "doc_hash": pa.array([_hash([prompt.text, prompt.metadata]) for prompt in prompts], pa.string()),
        "prompt_hash": pa.array([_hash(prompt.text) for prompt in prompts], pa.string()),
        "response": pa.array([""] * len(scored_prompts), pa.string()),
        **{name: pa.array([values.get(name) for values in means], pa.float64()) for name in columns},
    })  # fmt: skip


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _lines(scored_prompts: Sequence[ScoredPrompt]) -> str:
    return "".join(json.dumps(asdict(each)) + "\n" for each in scored_prompts)
