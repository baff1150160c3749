"""Selection of the completions that become rows for SFT or DPO, and metrics of the selection."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cosmos_core.config.schema.sample import KeepConfig, SampleStageConfig
from cosmos_core.rewards.base import has_full_reward
from cosmos_core.sample.records import SampledPrompt, ScoredCompletion

Message = Mapping[str, Any]


def compute_pass_rate(
    sampled_prompt: SampledPrompt, get_full_reward: Callable[[Mapping[str, float]], float | None]
) -> float | None:
    """Return the fraction of a prompt's completions whose reward is the full reward; invalid rewards do not count.
    `get_full_reward` maps the values of the reward functions for a completion to the full reward, or to None if it is
    unknown. Return None if the full reward is unknown for all completions."""
    full_reward_flags = [
        has_full_reward(completion.reward, full_reward)
        for completion in sampled_prompt.candidates
        if completion.reward is not None and (full_reward := get_full_reward(completion.rewards)) is not None
    ]
    return sum(full_reward_flags) / len(full_reward_flags) if full_reward_flags else None


def select_completions(
    sampled_prompt: SampledPrompt, keep_config: KeepConfig, pass_rate: float | None, seed: int
) -> list[ScoredCompletion]:
    """Return the completions of a prompt that `keep_config` selects, highest reward first; empty if the prompt's
    `pass_rate` is known and outside of the range of `keep_config`. `seed` is the seed of the random choice of at most
    `max_per_prompt` completions."""
    if pass_rate is not None and not keep_config.min_pass_rate <= pass_rate <= keep_config.max_pass_rate:
        return []
    min_reward = float("-inf") if keep_config.min_reward is None else keep_config.min_reward
    valid_completions = _list_valid_completions(sampled_prompt)
    completions = [each for each in valid_completions if each.is_finished or not keep_config.finished]
    completions = [each for each in completions if each.reward is not None and has_full_reward(each.reward, min_reward)]
    completions.sort(key=_descending_reward_key)
    if keep_config.unique:
        best_completion_by_text: dict[str, ScoredCompletion] = {}
        for completion in completions:
            best_completion_by_text.setdefault(str(completion.turns), completion)
        completions = [*best_completion_by_text.values()]
    completions = completions[: keep_config.best or None]
    max_completions = keep_config.max_per_prompt
    if max_completions and len(completions) > max_completions:
        selected_indices = random.Random(f"{seed}/{sampled_prompt.id}").sample(range(len(completions)), max_completions)
        completions = [completions[i] for i in sorted(selected_indices)]
    return completions


def select_pair(
    sampled_prompt: SampledPrompt, kept_completions: Sequence[ScoredCompletion], min_margin: float
) -> tuple[ScoredCompletion, ScoredCompletion] | None:
    """Return the completion with the highest reward of `kept_completions`, and the one with the lowest reward of all
    valid completions of the prompt. Return None if no completion is kept, or if the two rewards do not differ by more
    than `min_margin`."""
    if not kept_completions:
        return None
    chosen, rejected = kept_completions[0], max(_list_valid_completions(sampled_prompt), key=_descending_reward_key)
    assert chosen.reward is not None and rejected.reward is not None
    return None if has_full_reward(min_margin, chosen.reward - rejected.reward) else (chosen, rejected)


def make_rows(
    sampled_prompt: SampledPrompt,
    prompt: Sequence[Message],
    sample_config: SampleStageConfig,
    kept_completions: Sequence[ScoredCompletion],
    origin_columns: Mapping[str, Any],
    unfinished_turn: Message | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of a prompt for its kept completions: conversations, or at most one pair if `sample_config`
    sets `pairs`. Each row has `origin_columns`. `unfinished_turn` is the start of each completion's first turn."""

    def make_turns(completion: ScoredCompletion) -> list[Message]:
        if unfinished_turn is None:
            return [*completion.turns]
        first_turn, *later_turns = completion.turns
        return [{**unfinished_turn, "content": unfinished_turn["content"] + first_turn["content"]}, *later_turns]

    if sample_config.pairs:
        if (pair := select_pair(sampled_prompt, kept_completions, sample_config.min_margin)) is None:
            return []
        chosen, rejected = pair
        return [{
            "prompt": [*prompt], "chosen": make_turns(chosen), "rejected": make_turns(rejected),
            "reward": chosen.reward, "rejected_reward": rejected.reward,
            "seed": chosen.seed, "rejected_seed": rejected.seed, **origin_columns,
        }]  # fmt: skip
    return [
        {"conversations": [*prompt, *make_turns(each)], "reward": each.reward, "seed": each.seed, **origin_columns}
        for each in kept_completions
    ]


def make_metrics(
    records: Sequence[SampledPrompt],
    kept_completions: Sequence[Sequence[ScoredCompletion]],
    pass_rates: Sequence[float | None],
    num_rows: int,
) -> dict[str, float]:
    """Return metrics about the completions of all prompts and about the kept ones, as `sample/NAME`.

    `sample/reward_random` is the expected reward of a random completion of each prompt: the baseline for the reward of
    the best completion (`sample/reward_best`) and of the kept completions (`sample/reward_kept`).
    """
    rewards_by_prompt = [rewards for record in records if (rewards := _list_valid_rewards(record.candidates))]
    candidates = [completion for record in records for completion in record.candidates]
    rewards_of_kept = [reward for completions in kept_completions for reward in _list_valid_rewards(completions)]
    known_pass_rates = [pass_rate for pass_rate in pass_rates if pass_rate is not None]
    values_by_metric = {
        "reward_random": [float(np.mean(rewards)) for rewards in rewards_by_prompt],
        "reward_best": [max(rewards) for rewards in rewards_by_prompt],
        "reward_kept": rewards_of_kept,
        "pass_rate": known_pass_rates,
        "solved": [float(pass_rate > 0) for pass_rate in known_pass_rates],
        "length": [float(completion.num_tokens) for completion in candidates],
        "truncated": [float(not completion.is_finished) for completion in candidates],
    }
    return {
        "sample/prompts": float(len(records)),
        "sample/prompts_kept": float(sum(bool(completions) for completions in kept_completions)),
        "sample/completions": float(len(candidates)),
        "sample/invalid": float(sum(completion.reward is None for completion in candidates)),
        "sample/rows": float(num_rows),
        **{f"sample/{name}": float(np.mean(values)) for name, values in values_by_metric.items() if values},
    }


def _list_valid_completions(sampled_prompt: SampledPrompt) -> list[ScoredCompletion]:
    return [each for each in sampled_prompt.candidates if each.reward is not None and each.text.strip()]


def _list_valid_rewards(completions: Sequence[ScoredCompletion]) -> list[float]:
    return [candidate.reward for candidate in completions if candidate.reward is not None]


def _descending_reward_key(candidate: ScoredCompletion) -> tuple[float, int]:
    """Return a sort key for completions: highest reward first, equal rewards in the order of their seeds, which favours
    no completion."""
    assert candidate.reward is not None
    return -candidate.reward, candidate.seed
