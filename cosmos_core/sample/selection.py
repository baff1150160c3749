"""Selection of the completions that become rows for SFT or DPO, and metrics of the selection."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_core.config.schema.sample import KeepConfig, SampleStageConfig
from cosmos_core.rewards.base import has_full_reward
from cosmos_core.sample.records import SampledPrompt, ScoredCompletion

Message = Mapping[str, Any]


def pass_rate(sampled: SampledPrompt, full: float | None) -> float | None:
    """Return the fraction of valid completions that have the full reward; None if no completion is valid, or the full
    reward is unknown."""
    values = _rewards(sampled.candidates)
    return None if full is None or not values else sum(has_full_reward(value, full) for value in values) / len(values)


def select_completions(
    sampled: SampledPrompt, keep_config: KeepConfig, rate: float | None, seed: int
) -> list[ScoredCompletion]:
    """Return the completions of a prompt to keep, highest reward first.

    `rate` is the pass rate of the prompt; None: the rate is unknown and does not exclude the prompt. `seed` is the seed
    of the random choice of at most `max_per_prompt` completions.
    """
    if rate is not None and not keep_config.min_pass_rate <= rate <= keep_config.max_pass_rate:
        return []
    min_reward = float("-inf") if keep_config.min_reward is None else keep_config.min_reward
    finished = [each for each in _valid_completions(sampled) if each.is_finished or not keep_config.finished]
    eligible = [each for each in finished if each.reward is not None and each.reward >= min_reward]
    eligible.sort(key=_descending)
    if keep_config.unique:
        best_by_text: dict[str, ScoredCompletion] = {}
        for each in eligible:
            best_by_text.setdefault(str(each.turns), each)
        eligible = [*best_by_text.values()]
    eligible = eligible[: keep_config.best or None]
    if keep_config.max_per_prompt and len(eligible) > keep_config.max_per_prompt:
        indices = random.Random(f"{seed}/{sampled.id}").sample(range(len(eligible)), keep_config.max_per_prompt)
        eligible = [eligible[i] for i in sorted(indices)]
    return eligible


def select_pair(
    sampled: SampledPrompt, eligible: Sequence[ScoredCompletion], min_margin: float
) -> tuple[ScoredCompletion, ScoredCompletion] | None:
    """Return the best completion in `eligible` and the worst completion of the prompt; None if `eligible` is empty, or
    if the two rewards do not differ by more than `min_margin`."""
    if not eligible:
        return None
    best, worst_completion = eligible[0], max(_valid_completions(sampled), key=_descending)
    assert best.reward is not None and worst_completion.reward is not None
    return (best, worst_completion) if best.reward - worst_completion.reward > min_margin else None


def rows_of(
    sampled: SampledPrompt,
    prompt: Sequence[Message],
    config: SampleStageConfig,
    eligible: Sequence[ScoredCompletion],
    origin: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the rows of a prompt for its kept completions (`eligible`): conversations, or at most one pair if `config`
    sets `pairs`; columns with the origin of the rows are added."""
    if config.pairs:
        best_and_worst = select_pair(sampled, eligible, config.min_margin)
        if best_and_worst is None:
            return []
        best, worst = best_and_worst
        turns = {"prompt": [*prompt], "chosen": best.turns, "rejected": worst.turns}
        rewards = {"reward": best.reward, "rejected_reward": worst.reward}
        return [{**turns, **rewards, "seed": best.seed, "rejected_seed": worst.seed, **origin}]
    return [
        {"conversations": [*prompt, *each.turns], "reward": each.reward, "seed": each.seed, **origin}
        for each in eligible
    ]


def metrics_of(
    records: Sequence[SampledPrompt],
    eligible: Sequence[Sequence[ScoredCompletion]],
    rates: Sequence[float | None],
    num_rows: int,
) -> dict[str, float]:
    """Return the metrics of a selection.

    `sample/reward_random` is the expected reward of a random completion of each prompt: the baseline for the reward of
    the best completion (`sample/reward_best`) and of the kept completions (`sample/reward_kept`).
    """
    groups = [values for record in records if (values := _rewards(record.candidates))]
    candidates = [each for record in records for each in record.candidates]
    kept_rewards = [reward for completions in eligible for reward in _rewards(completions)]
    known_rates = [rate for rate in rates if rate is not None]
    mean_metrics = {
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
        "sample/prompts_kept": float(sum(bool(each) for each in eligible)),
        "sample/completions": float(len(candidates)),
        "sample/invalid": float(sum(each.reward is None for each in candidates)),
        "sample/rows": float(num_rows),
        **{f"sample/{name}": float(np.mean(values)) for name, values in mean_metrics.items() if values},
    }


def _valid_completions(sampled: SampledPrompt) -> list[ScoredCompletion]:
    """Return the completions of a prompt that have a valid reward and a text."""
    return [each for each in sampled.candidates if each.reward is not None and each.text.strip()]


def _rewards(candidates: Sequence[ScoredCompletion]) -> list[float]:
    return [each.reward for each in candidates if each.reward is not None]


def _descending(candidate: ScoredCompletion) -> tuple[float, int]:
    """Return a sort key: highest reward first, then the order of seeds, so that no completion is favoured."""
    assert candidate.reward is not None
    return -candidate.reward, candidate.seed
