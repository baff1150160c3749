"""Selection of the completions that become rows for SFT or DPO, and metrics of the selection."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_core.config.schema.sample import KeepConfig, SampleStageConfig
from cosmos_core.rewards.base import has_full_reward
from cosmos_core.sample.records import SampledPrompt, ScoredCompletion

Message = Mapping[str, Any]


def pass_rate(sampled_prompt: SampledPrompt, full: float | None) -> float | None:
    """Return the fraction of valid completions with the full reward; None if none is valid, or the reward is
    unknown."""
    values = _valid_rewards(sampled_prompt.candidates)
    return None if full is None or not values else sum(has_full_reward(value, full) for value in values) / len(values)


def select_completions(
    sampled_prompt: SampledPrompt, keep_config: KeepConfig, rate: float | None, seed: int
) -> list[ScoredCompletion]:
    """Return the completions of a prompt to keep, highest reward first. `rate` is the pass rate of the prompt; None:
    the rate is unknown and does not exclude the prompt. `seed` is the seed of the random choice of at most
    `max_per_prompt` completions."""
    if rate is not None and not keep_config.min_pass_rate <= rate <= keep_config.max_pass_rate:
        return []
    min_reward = float("-inf") if keep_config.min_reward is None else keep_config.min_reward
    valid = [each for each in _valid_completions(sampled_prompt) if each.is_finished or not keep_config.finished]
    eligible = [each for each in valid if each.reward is not None and each.reward >= min_reward]
    eligible.sort(key=_descending_reward_key)
    if keep_config.unique:
        best_by_text: dict[str, ScoredCompletion] = {}
        for each in eligible:
            best_by_text.setdefault(str(each.turns), each)
        eligible = [*best_by_text.values()]
    eligible = eligible[: keep_config.best or None]
    if keep_config.max_per_prompt and len(eligible) > keep_config.max_per_prompt:
        indices = random.Random(f"{seed}/{sampled_prompt.id}").sample(range(len(eligible)), keep_config.max_per_prompt)
        eligible = [eligible[i] for i in sorted(indices)]
    return eligible


def select_pair(
    sampled_prompt: SampledPrompt, eligible: Sequence[ScoredCompletion], min_margin: float
) -> tuple[ScoredCompletion, ScoredCompletion] | None:
    """Return the best completion in `eligible` and the worst completion of the prompt; None if `eligible` is empty, or
    if the two rewards do not differ by more than `min_margin`."""
    if not eligible:
        return None
    best, worst = eligible[0], max(_valid_completions(sampled_prompt), key=_descending_reward_key)
    assert best.reward is not None and worst.reward is not None
    return (best, worst) if best.reward - worst.reward > min_margin else None


def rows_of(
    sampled_prompt: SampledPrompt,
    prompt: Sequence[Message],
    config: SampleStageConfig,
    eligible: Sequence[ScoredCompletion],
    provenance_columns: Mapping[str, Any],
    open_turn: Message | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a prompt for its kept completions (`eligible`): conversations, or at most one pair if `config`
    sets `pairs`; columns with the origin of the rows are added. The first turn of a completion continues `open_turn`;
    None: it is a turn of its own."""

    def turns_of(completion: ScoredCompletion) -> list[Message]:
        if open_turn is None:
            return [*completion.turns]
        first, *others = completion.turns
        return [{**open_turn, "content": open_turn["content"] + first["content"]}, *others]

    if config.pairs:
        if (pair := select_pair(sampled_prompt, eligible, config.min_margin)) is None:
            return []
        best, worst = pair
        return [{
            "prompt": [*prompt], "chosen": turns_of(best), "rejected": turns_of(worst), "reward": best.reward,
            "rejected_reward": worst.reward, "seed": best.seed, "rejected_seed": worst.seed, **provenance_columns,
        }]  # fmt: skip
    return [
        {"conversations": [*prompt, *turns_of(each)], "reward": each.reward, "seed": each.seed, **provenance_columns}
        for each in eligible
    ]


def metrics_of(
    records: Sequence[SampledPrompt],
    eligible: Sequence[Sequence[ScoredCompletion]],
    pass_rates: Sequence[float | None],
    num_rows: int,
) -> dict[str, float]:
    """Return the metrics of a selection.

    `sample/reward_random` is the expected reward of a random completion of each prompt: the baseline for the reward of
    the best completion (`sample/reward_best`) and of the kept completions (`sample/reward_kept`).
    """
    reward_groups = [values for record in records if (values := _valid_rewards(record.candidates))]
    candidates = [item for record in records for item in record.candidates]
    kept_rewards = [reward for completions in eligible for reward in _valid_rewards(completions)]
    known_rates = [known_rate for known_rate in pass_rates if known_rate is not None]
    mean_metrics = {
        "reward_random": [float(np.mean(values)) for values in reward_groups],
        "reward_best": [max(values) for values in reward_groups],
        "reward_kept": kept_rewards,
        "pass_rate": known_rates,
        "solved": [float(known_rate > 0) for known_rate in known_rates],
        "length": [float(item.num_tokens) for item in candidates],
        "truncated": [float(not item.is_finished) for item in candidates],
    }
    return {
        "sample/prompts": float(len(records)),
        "sample/prompts_kept": float(sum(bool(item) for item in eligible)),
        "sample/completions": float(len(candidates)),
        "sample/invalid": float(sum(item.reward is None for item in candidates)),
        "sample/rows": float(num_rows),
        **{f"sample/{name}": float(np.mean(values)) for name, values in mean_metrics.items() if values},
    }


def _valid_completions(sampled_prompt: SampledPrompt) -> list[ScoredCompletion]:
    """Return the completions of a prompt that have a valid reward and a text."""
    return [each for each in sampled_prompt.candidates if each.reward is not None and each.text.strip()]


def _valid_rewards(candidates: Sequence[ScoredCompletion]) -> list[float]:
    return [candidate.reward for candidate in candidates if candidate.reward is not None]


def _descending_reward_key(candidate: ScoredCompletion) -> tuple[float, int]:
    """Return a sort key: highest reward first, then the order of seeds, so that no completion is favoured."""
    assert candidate.reward is not None
    return -candidate.reward, candidate.seed
