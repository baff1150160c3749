"""Where the scored groups of a train step come from.

`Sync` generates them under the newest weights when they are asked for. A source that runs ahead (prompts submitted for
later steps, groups that come back out of order, a bound on how old they may be) keeps the same protocol: groups carry
their step and the versions of their tokens, and what was submitted and not yet trained is the source's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.rewards.runner import ScoreGroups
from cosmos_core.rollout.base import Engine, generate
from cosmos_core.run.progress import Progress
from cosmos_core.types import Group, JsonValue, Prompt, Sampling, ScoredGroup


class GroupSource(Protocol):
    """Gives the scored groups of each train step."""

    def next(self, step: int) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`, counted from 0, and metrics about them."""
        ...

    def state_dict(self) -> dict[str, JsonValue]:
        """Return what a checkpoint has to keep, so that no prompt is lost or trained twice."""
        ...

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Go on from what `state_dict` returned."""
        ...


@dataclass
class Sync:
    """Generation and training take turns, so every group is of the newest weights."""

    prompts: Callable[[int], Sequence[Prompt]]
    """Gives the prompts of a train step, in order."""
    engine: Engine
    score: ScoreGroups
    sampling: Sampling
    progress: Progress
    batch_size: int
    """Prompts that an engine has at a time."""
    between: Callable[[int], None] = lambda step: None
    """Called with the step after each batch; may raise to stop, because nothing of the step was trained yet."""

    def next(self, step: int) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`, generated and scored now."""
        prompts, num_prompts = self.prompts(step), self.batch_size * num_ranks()
        began = time.perf_counter()
        self.progress.phase("generate")
        self.engine.wake()
        groups: list[Group] = []
        for start in range(0, len(prompts), num_prompts):
            groups += generate(self.engine, prompts[start : start + num_prompts], self.sampling, step)
            self.progress.beat()
            self.between(step)
        self.engine.sleep(level=2)  # the next thing that it sees is the weights of this step's update
        generated = time.perf_counter()
        self.progress.phase("score")
        scored = self.score(groups)
        num_tokens = sum(completion.num_sampled for group in groups for completion in group.completions)
        metrics = {
            **group_metrics(scored),
            "rollout/version_lag": float(max(step - group.version for group in groups)),
            "time/generate": generated - began,
            "time/score": time.perf_counter() - generated,
            "throughput/generated_tokens_per_second": num_tokens / max(1e-9, generated - began),
        }
        return scored, metrics

    def state_dict(self) -> dict[str, JsonValue]:
        """Return nothing: prompts and seeds are functions of the step."""
        return {}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Take nothing; see `state_dict`."""


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return means over valid completions, the number of invalid ones, and lengths in sampled tokens."""
    scores = [score for group in groups for score in group.scores]
    values = np.array([score.value for score in scores if score.value is not None], dtype=np.float64)
    completions = [completion for group in groups for completion in group.group.completions]
    lengths = [completion.num_sampled for completion in completions]
    metrics = {
        "reward/invalid": float(len(scores) - len(values)),
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_max": float(np.max(lengths)),
        "completion/truncated": float(np.mean([completion.finish_reason == "length" for completion in completions])),
    }
    if len(values):
        metrics |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
    for name in sorted({name for score in scores for name in score.metrics}):
        metrics[f"reward/{name}"] = float(np.mean([score.metrics[name] for score in scores if name in score.metrics]))
    return metrics
