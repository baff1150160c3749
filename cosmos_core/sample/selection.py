"""Selection of the completions that become rows for SFT or DPO, and metrics of the selection."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_core.config.schema.sample import KeepConfig, SampleStageConfig
from cosmos_core.rewards.base import has_full_reward
from cosmos_core.sample.records import Candidate, Sampled

Message = Mapping[str, Any]


def pass_rate(sampled: Sampled, full: float | None) -> float | None:
    """Return the fraction of valid completions that have the full reward `full`; None if no completion is valid, or
    `full` is None."""
    values = _rewards(sampled.candidates)
    return None if full is None or not values else sum(has_full_reward(value, full) for value in values) / len(values)


def select_completions(sampled: Sampled, keep: KeepConfig, rate: float | None, seed: int) -> list[Candidate]:
    """Return the completions of a prompt to keep, highest reward first.

    `rate` is the pass rate of the prompt; None: the rate is unknown and does not exclude the prompt. `seed` is the seed
    of the random choice of at most `max_per_prompt` completions.
    """
    if rate is not None and not keep.min_pass_rate <= rate <= keep.max_pass_rate:
        return []
    least = float("-inf") if keep.min_reward is None else keep.min_reward
    passing = [
        each
        for each in _scored_with_text(sampled)
        if each.reward is not None and each.reward >= least and (each.is_finished or not keep.finished)
    ]
    passing.sort(key=_descending)
    if keep.unique:
        best_by_text: dict[str, Candidate] = {}
        for each in passing:
            best_by_text.setdefault(str(each.turns), each)
        passing = [*best_by_text.values()]
    passing = passing[: keep.best or None]
    if keep.max_per_prompt and len(passing) > keep.max_per_prompt:
        indices = random.Random(f"{seed}/{sampled.id}").sample(range(len(passing)), keep.max_per_prompt)
        passing = [passing[i] for i in sorted(indices)]
    return passing


def select_pair(
    sampled: Sampled, passing: Sequence[Candidate], min_margin: float
) -> tuple[Candidate, Candidate] | None:
    """Return the best completion in `passing` and the worst completion of the prompt; None if `passing` is empty, or if
    the two rewards do not differ by more than `min_margin`."""
    if not passing:
        return None
    best, worst = passing[0], max(_scored_with_text(sampled), key=_descending)
    assert best.reward is not None and worst.reward is not None
    return (best, worst) if best.reward - worst.reward > min_margin else None


def rows_of(
    sampled: Sampled,
    prompt: Sequence[Message],
    config: SampleStageConfig,
    passing: Sequence[Candidate],
    origin: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the rows of a prompt for its kept completions (`passing`): conversations, or at most one pair if `config`
    sets `pairs`; the columns `origin` are added to each row."""
    if config.pairs:
        best_and_worst = select_pair(sampled, passing, config.min_margin)
        if best_and_worst is None:
            return []
        best, worst = best_and_worst
        return [
            {
                "prompt": [*prompt],
                "chosen": best.turns,
                "rejected": worst.turns,
                "reward": best.reward,
                "rejected_reward": worst.reward,
                "seed": best.seed,
                "rejected_seed": worst.seed,
                **origin,
            }
        ]
    return [
        {"conversations": [*prompt, *each.turns], "reward": each.reward, "seed": each.seed, **origin}
        for each in passing
    ]


def metrics_of(
    records: Sequence[Sampled], passing: Sequence[Sequence[Candidate]], rates: Sequence[float | None], num_rows: int
) -> dict[str, float]:
    """Return the metrics of a selection.

    `sample/reward_random` is the expected reward of a random completion of each prompt: the baseline for the reward of
    the best completion (`sample/reward_best`) and of the kept completions (`sample/reward_kept`).
    """
    groups = [values for record in records if (values := _rewards(record.candidates))]
    candidates = [each for record in records for each in record.candidates]
    kept_rewards = [each.reward for each_passing in passing for each in each_passing if each.reward is not None]
    known_rates = [rate for rate in rates if rate is not None]
    means = {
        "reward_random": [float(np.mean(values)) for values in groups],
        "reward_best": [max(values) for values in groups],
        "reward_kept": kept_rewards,
        "pass_rate": known_rates,
        "solved": [float(rate > 0) for rate in known_rates],
        "length": [float(each.num_tokens) for each in candidates],
        "truncated": [float(not each.is_finished) for each in candidates],
    }
    return {
        "sample/prompts": float(len(records)),
        "sample/prompts_kept": float(sum(bool(each) for each in passing)),
        "sample/completions": float(len(candidates)),
        "sample/invalid": float(sum(each.reward is None for each in candidates)),
        "sample/rows": float(num_rows),
        **{f"sample/{name}": float(np.mean(values)) for name, values in means.items() if values},
    }


def _scored_with_text(sampled: Sampled) -> list[Candidate]:
    """Return the completions of a prompt that have a valid reward and a text."""
    return [each for each in sampled.candidates if each.reward is not None and each.text.strip()]


def _rewards(candidates: Sequence[Candidate]) -> list[float]:
    return [each.reward for each in candidates if each.reward is not None]


def _descending(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key for completions: highest reward first, and in the order of the seeds for equal rewards, so that
    the order of generation favours no completion."""
    assert candidate.reward is not None
    return -candidate.reward, candidate.seed
