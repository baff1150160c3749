"""Held-out figures: loss and perplexity of sequences, reward and accuracy of generated answers.

Used during training, and by a stage of its own (`validate.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cosmos_core.algorithms.aggregate import means
from cosmos_core.algorithms.base import Sample
from cosmos_core.algorithms.dpo import Compared, Denominators, preference_loss
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.prepared import (
    Pairs,
    Prompts,
    Sequences,
    has_split,
    open_pairs,
    open_prompts,
    open_sequences,
    rows_kind,
)
from cosmos_core.errors import DataError
from cosmos_core.parallel.mesh import broadcast_object, is_first, num_ranks
from cosmos_core.rewards.runner import RewardRunner, ScoreGroups
from cosmos_core.rollout.base import Engine, generate
from cosmos_core.run.progress import Progress
from cosmos_core.run.stage import Stage
from cosmos_core.train.rank import Rank
from cosmos_core.train.reference import PIECE, pair_logprobs
from cosmos_core.types import Sampling, ScoredGroup

SAMPLES = "samples.jsonl"
_NUM_SAMPLES = 24


def sequence_figures(rank: Rank, rows: Sequences, recipe: Recipe, progress: Progress) -> dict[str, float]:
    """Token-mean loss in nats, perplexity, and the share of tokens that are the likeliest, of all held-out labels."""
    size = recipe.validation.batch_size or recipe.train.train_policy.mini_batch
    loss_sum, num_top, num_tokens = 0.0, 0.0, 0
    for start in range(0, len(rows), size):
        progress.beat()
        places = range(start, min(start + size, len(rows)))
        samples = [Sample(*rows[i], images=rows.images(i)) for i in places]
        logprob, top = rank.evaluate(samples, size=size)
        loss_sum, num_top = loss_sum - logprob, num_top + top
        num_tokens += sum(sample.num_learned for sample in samples)
    loss = loss_sum / max(1, num_tokens)
    return {
        "validation/loss": loss,
        "validation/perplexity": math.exp(min(loss, 700.0)),
        "validation/token_accuracy": num_top / max(1, num_tokens),
        "validation/tokens": float(num_tokens),
    }


def pair_figures(
    rank: Rank, pairs: Pairs, reference: np.ndarray | None, recipe: Recipe, progress: Progress
) -> dict[str, float]:
    """Loss, mean rewards, and the share of pairs whose chosen answer has the higher one, of all held-out pairs.

    `reference` are their log-probabilities under it; None: there is none.
    """
    policy = recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    size = recipe.validation.batch_size or policy.mini_batch
    found = []
    for start in range(0, len(pairs), PIECE):
        progress.beat()
        found.append(pair_logprobs(rank, pairs, np.arange(start, min(start + PIECE, len(pairs))), size))
    logprobs = np.concatenate(found)
    against = np.zeros_like(logprobs) if reference is None else reference
    columns = [torch.from_numpy(column) for column in (*logprobs.T, *against.T)]
    chosen_tokens = float(sum(pairs.chosen[i][1][1:].sum() for i in range(len(pairs))))
    loss, metrics = preference_loss(Compared(*columns), policy.dpo, Denominators(len(pairs), chosen_tokens))
    figures = {"loss": loss.item(), **means(metrics), "pairs": float(len(pairs))}
    return {f"validation/{name}": value for name, value in figures.items()}


def answer_figures(groups: Sequence[ScoredGroup], full_reward: float) -> dict[str, float]:
    """Mean reward, accuracy and length over valid answers.

    Accuracy is the share of answers with the full reward: every reward function gave 1.
    """
    values = np.array([s.value for g in groups for s in g.scores if s.value is not None], dtype=np.float64)
    num_answers = sum(len(group.scores) for group in groups)
    if not len(values):
        raise DataError(
            f"all {num_answers} held-out answers have an invalid reward; first: {groups[0].scores[0].error}"
        )
    lengths = [completion.num_sampled for group in groups for completion in group.group.completions]
    return {
        "validation/reward": float(values.mean()),
        "validation/accuracy": float((values >= full_reward - 1e-9).mean()),
        "validation/invalid": float(num_answers - len(values)),
        "validation/length_mean": float(np.mean(lengths)),
        "validation/prompts": float(len(groups)),
    }


class Answers:
    """Generates and scores answers to held-out prompts."""

    def __init__(self, prompts: Prompts, engine: Engine, score: ScoreGroups, stage: Stage) -> None:
        self._prompts, self._engine, self._score, self._stage = prompts, engine, score, stage
        self._sampling = validation_sampling(stage.recipe)
        self._full = sum(reward_weights(stage.recipe).values())

    def measure(self, step: int) -> dict[str, float]:
        """Figures after `step` steps; some answers are added to `samples.jsonl`."""
        size = num_ranks() * (self._stage.recipe.validation.batch_size or self._stage.recipe.rollout.batch_size)
        groups: list[ScoredGroup] = []
        self._engine.wake()
        for start in range(0, len(self._prompts), size):
            self._stage.progress.beat()
            answered = generate(self._engine, self._prompts[start : start + size], self._sampling, step)
            groups += self._score(answered)
        self._engine.sleep()
        if is_first():
            add_samples(self._stage.path / SAMPLES, step, groups[:_NUM_SAMPLES])
        return answer_figures(groups, self._full)


def add_samples(path: Path, step: int, groups: Sequence[ScoredGroup]) -> None:
    """Put the first answer of each group under `step`; what an interrupted run wrote from that step on is replaced."""
    kept = []
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] < step]
    for group in groups:
        answer, score = group.group.completions[0], group.scores[0]
        prompt = group.group.prompt
        record = {
            "step": step,
            "prompt": prompt.text,
            "reference": prompt.reference,
            "completion": answer.text,
            "reward": score.value,
        }
        kept.append(json.dumps(record, ensure_ascii=False))
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def validation_sampling(recipe: Recipe) -> Sampling:
    """How held-out answers are drawn: `[validation]`, with `[rollout]` where it is silent."""
    validation, rollout = recipe.validation, recipe.rollout
    assert recipe.train.seed is not None
    return Sampling(
        temperature=validation.temperature,
        top_p=rollout.sampling_config.top_p if validation.top_p is None else validation.top_p,
        top_k=rollout.sampling_config.top_k if validation.top_k is None else validation.top_k,
        repetition_penalty=validation.repetition_penalty,
        max_tokens=validation.max_response_length or rollout.max_response_length,
        num_completions=validation.n_generation,
        seed=recipe.train.seed,
    )


def reward_weights(recipe: Recipe) -> dict[str, float]:
    """The rewards of validation, or those of training where it names none."""
    policy = recipe.train.train_policy
    return recipe.validation.reward_function or (policy.reward_function if isinstance(policy, GrpoConfig) else {})


@contextmanager
def open_rewards(stage: Stage, weights: dict[str, float]) -> Iterator[ScoreGroups]:
    """Scores groups by these rewards, in killable children of the first rank; all ranks get the scores."""
    if not is_first():
        yield lambda groups: broadcast_object([])
        return
    policy = stage.recipe.train.train_policy
    seconds = policy.reward_timeout_seconds if isinstance(policy, GrpoConfig) else GrpoConfig().reward_timeout_seconds
    with RewardRunner(weights, timeout_seconds=seconds, custom=stage.recipe.custom, beat=stage.progress.beat) as runner:
        yield lambda groups: broadcast_object(runner.score_groups(groups))


def held_out(folder: Path) -> Prompts | Pairs | Sequences:
    """The held-out rows of prepared data.

    Raises:
        DataError: there are none.
    """
    if not has_split(folder, "validation"):
        raise DataError(
            f"{folder} has no held-out rows; name validation.dataset, or split some off with "
            f"train.train_policy.dataset.test_size"
        )
    kind = rows_kind(folder, "validation")
    if kind == "prompts":
        return open_prompts(folder, "validation")
    return open_pairs(folder, "validation") if kind == "pairs" else open_sequences(folder, "validation")
