"""Log of training completions: a few completions per train step are written to disk, and warnings report collapse.

    <stage>/completions/step_000012.jsonl     a completion per line, with its rewards; `cosmos samples` shows the lines
    <stage>/completions/step_000012/0-1.png   an image (or 0-1.mp4, a video) of a completion; grid.png shows all

A reward can rise because the policy exploits the reward. A warning is logged at early signs: groups of equal rewards,
one reward that rises while other rewards fall, and completions that are all truncated or become short, repetitive or
low in entropy.
"""

import json
import logging
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.observe import gallery
from cosmos_core.parallel.mesh import is_first_rank
from cosmos_core.rollout.groups import compute_reward_means
from cosmos_core.run.files import raise_disk_full, write_text
from cosmos_core.types import Completion, ScoredGroup

logger = logging.getLogger(__name__)

COMPLETIONS_FOLDER = "completions"
_NUM_LOGGED_GROUPS, _NUM_LOGGED_COMPLETIONS = 4, 8
_NUM_LOGGED_IMAGE_GROUPS, _NUM_LOGGED_IMAGES = 2, 4
"""Number of logged groups of images or videos per train step, and number of logged images or videos per group."""
_MAX_TEXT_CHARACTERS = 20_000
_MAX_LOGGED_STEPS = 1_000
_MAX_IMAGE_BYTES = 1 << 30
"""Maximum size in bytes of the image and video files of all steps; files of the newest step are always kept."""
# Compare 8 steps: by chance, the last 4 of 8 values all exceed the first 4 with a probability of only 1/70.
_NUM_COMPARED_STEPS = 8
_NGRAM_SIZE = 4
_TextMeans = Mapping[str, float]


class CompletionLog:
    """Log of completions of each train step on the first rank, with warnings of reward hacking and of collapse."""

    def __init__(self, log_folder: Path, *, should_write: bool, max_image_bytes: int = _MAX_IMAGE_BYTES) -> None:
        """Log completions to `log_folder`; if `should_write` is False, only log warnings. `max_image_bytes`: maximum
        size of all image and video files together."""
        self._log_folder, self._should_write, self._max_image_bytes = log_folder, should_write, max_image_bytes
        self._recent_reward_means: deque[Mapping[str, float]] = deque(maxlen=_NUM_COMPARED_STEPS)
        self._recent_text_statistics: deque[Mapping[str, float]] = deque(maxlen=_NUM_COMPARED_STEPS // 2)
        self._initial_text_statistics: list[Mapping[str, float]] = []
        self._active_warning_names: set[str] = set()

    def __call__(self, step: int, scored_groups: Sequence[ScoredGroup]) -> None:
        """Log completions of the scored groups on which train step `step`, counted from 1, trains."""
        if not is_first_rank():
            return
        if self._should_write:
            with raise_disk_full(self._log_folder.parent):
                self._write_completions(step, scored_groups)
        self._warn_of_collapse(step, scored_groups)

    def _write_completions(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        has_images = groups[0].group.completions[0].diffusion_sample is not None
        image_limits = (_NUM_LOGGED_IMAGE_GROUPS, _NUM_LOGGED_IMAGES)
        max_groups, group_size = image_limits if has_images else (_NUM_LOGGED_GROUPS, _NUM_LOGGED_COMPLETIONS)
        logged_groups = [(group, _select_indices(group, group_size)) for group in _select_groups(groups)[:max_groups]]
        records = [_make_completion_record(step, group, index) for group, indices in logged_groups for index in indices]
        log_file = self._log_folder / f"step_{step:06d}.jsonl"
        if has_images:
            image_samples = [gallery.collect_samples(group, indices) for group, indices in logged_groups]
            media_file_names = gallery.save_samples(log_file.with_suffix(""), image_samples)
            for record, name in zip(records, chain(*media_file_names), strict=True):
                record["media"] = f"{self._log_folder.name}/{log_file.stem}/{name}"
        write_text(log_file, "".join(json.dumps(record, ensure_ascii=True) + "\n" for record in records), fsync=False)
        self._remove_old_files(step)

    def _remove_old_files(self, step: int) -> None:
        """Delete logged files of steps after `step`, which were written before the run was resumed from an earlier
        step, and the oldest files beyond the maximum number of steps or size."""
        num_kept_steps = image_bytes = 0
        for file in sorted(self._log_folder.glob("step_*.jsonl"), reverse=True):
            if int(file.stem[5:]) <= step and num_kept_steps < _MAX_LOGGED_STEPS:
                image_bytes += sum(media_file.stat().st_size for media_file in file.with_suffix("").glob("*"))
                if not num_kept_steps or image_bytes <= self._max_image_bytes:
                    num_kept_steps += 1
                    continue
            file.unlink()
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)

    def _warn_of_collapse(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        rewards_by_group = [[score.value for score in group.scores if score.value is not None] for group in groups]
        # Without reward functions every score is 0, so equal rewards are no sign of a problem.
        has_rewards = any(score.metrics for scored_group in groups for score in scored_group.scores)
        has_several_rewards = has_rewards and max(map(len, rewards_by_group)) > 1
        are_rewards_equal = has_several_rewards and all(len(set(values)) <= 1 for values in rewards_by_group)
        self._warn_once(
            "constant", are_rewards_equal,
            f"step {step}: the completions of each of {len(groups)} groups have equal rewards, of which nothing is "
            f"learned; take other prompts, rewards or a higher temperature",
        )  # fmt: skip
        completions = [completion for scored_group in groups for completion in scored_group.group.completions]
        turn_limit_remedy = " or rollout.multi_turn_config.max_assistant_turns" if completions[0].turns else ""
        self._warn_once(
            "truncated", all(completion.finish_reason == "length" for completion in completions),
            f"step {step}: all {len(completions)} completions end at the maximum length, none with the end token; "
            f"raise rollout.max_response_length{turn_limit_remedy} (with mask_truncated_completions nothing is "
            f"learned of them)",
        )  # fmt: skip
        self._recent_reward_means.append(
            {name: mean for name, mean in compute_reward_means(groups).items() if "/" not in name}
        )
        opposed_rewards_message = _describe_opposed_rewards(self._recent_reward_means)
        self._warn_once(
            "opposed", bool(opposed_rewards_message),
            f"steps {step - _NUM_COMPARED_STEPS + 1} to {step}: {opposed_rewards_message}; a reward may be exploited: "
            f"cosmos samples --step {step} --best",
        )  # fmt: skip
        text_statistics = _compute_text_statistics(completions)
        if not text_statistics:
            return
        self._recent_text_statistics.append(text_statistics)
        if len(self._initial_text_statistics) < _NUM_COMPARED_STEPS // 2:
            self._initial_text_statistics.append(text_statistics)
            return
        initial_means, recent_means = (
            {name: float(np.mean([each[name] for each in step_statistics])) for name in text_statistics}
            for step_statistics in (self._initial_text_statistics, self._recent_text_statistics)
        )
        for name, has_collapsed, message in _check_for_collapse(initial_means, recent_means):
            self._warn_once(name, has_collapsed, f"step {step}: {message}; look at them: cosmos samples --step {step}")

    def _warn_once(self, warning_name: str, is_condition_met: bool, warning_message: str) -> None:
        """Log a warning when a condition becomes true, and not again before the condition has been false."""
        if is_condition_met and warning_name not in self._active_warning_names:
            logger.warning("%s", warning_message)
        (self._active_warning_names.add if is_condition_met else self._active_warning_names.discard)(warning_name)


def _select_groups(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return a few groups to log: those with the best and the worst completion, then the first groups of the step."""
    group_indices_by_reward = sorted(range(len(groups)), key=lambda i: max(map(_reward_sort_key, groups[i].scores)))
    rewards_by_group = [[score.value for score in group.scores if score.value is not None] for group in groups]
    worst_group_index = min(range(len(groups)), key=lambda i: min(rewards_by_group[i], default=0))
    ordered_group_indices = dict.fromkeys([group_indices_by_reward[-1], worst_group_index, *range(len(groups))])
    return [groups[i] for i in list(ordered_group_indices)[:_NUM_LOGGED_GROUPS]]


def _select_indices(scored_group: ScoredGroup, max_completions: int) -> list[int]:
    """Return the indices of at most `max_completions` completions of a group, evenly spaced from the best to the worst
    reward."""
    ranked_indices = sorted(range(len(scored_group.scores)), key=lambda k: -_reward_sort_key(scored_group.scores[k]))
    positions = np.linspace(0, len(ranked_indices) - 1, min(len(ranked_indices), max_completions)).round().astype(int)
    return [ranked_indices[i] for i in positions]


def _reward_sort_key(score: Any) -> float:
    return -np.inf if score.value is None else float(score.value)


def _make_completion_record(step: int, scored_group: ScoredGroup, completion_index: int) -> dict[str, Any]:
    completion, score = scored_group.group.completions[completion_index], scored_group.scores[completion_index]
    turn_records = [{"role": turn.role, "text": turn.text[:_MAX_TEXT_CHARACTERS]} for turn in completion.turns]
    return {
        "step": step,
        "prompt": scored_group.group.prompt.text[-_MAX_TEXT_CHARACTERS:],
        "reference": scored_group.group.prompt.reference[:_MAX_TEXT_CHARACTERS],
        "completion": completion.text[:_MAX_TEXT_CHARACTERS],
        "reward": score.value,
        "metrics": score.metrics,
        "tokens": completion.num_sampled,
        "finish_reason": completion.finish_reason,
        **({"error": score.error} if score.error else {}),
        **({"turns": turn_records} if turn_records else {}),
    }


def _describe_opposed_rewards(means_by_step: Sequence[Mapping[str, float]]) -> str:
    """Return a message if exactly one reward rose and others fell, else an empty string. A reward rose or fell if all
    means of the later half of the steps are above or below all means of the earlier half."""
    if len(means_by_step) < _NUM_COMPARED_STEPS:
        return ""
    num_steps_before, mean_changes = _NUM_COMPARED_STEPS // 2, {}
    for name in set.intersection(*map(set, means_by_step)):
        step_means = [reward_means[name] for reward_means in means_by_step]
        means_before, means_after = step_means[:num_steps_before], step_means[num_steps_before:]
        if min(means_after) > max(means_before) or max(means_after) < min(means_before):
            mean_changes[name] = (float(np.mean(means_before)), float(np.mean(means_after)))
    rising_rewards = [(name, old, new) for name, (old, new) in mean_changes.items() if new > old]
    falling_rewards = sorted((name, old, new) for name, (old, new) in mean_changes.items() if new <= old)
    if len(rising_rewards) != 1 or not falling_rewards:
        return ""
    [(name, mean_before, mean_after)] = rising_rewards
    falling_text = " and ".join(f"{reward!r} fell from {old:.3g} to {new:.3g}" for reward, old, new in falling_rewards)
    return f"reward {name!r} rose from {mean_before:.3g} to {mean_after:.3g} while {falling_text}"


def _compute_text_statistics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return mean length, fraction of repeated 4-grams and entropy of text completions; empty for images and videos."""
    completions = [c for c in completions if c.diffusion_sample is None and c.num_sampled]
    if not completions:
        return {}
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    finite_logprobs = logprobs[np.isfinite(logprobs)]
    return {
        "length": float(np.mean([completion.num_sampled for completion in completions])),
        "repetition": float(np.mean([_repeated_ngram_fraction(completion.token_ids) for completion in completions])),
        "entropy": float(-finite_logprobs.mean()) if len(finite_logprobs) else float("nan"),
    }


def _repeated_ngram_fraction(token_ids: Sequence[int]) -> float:
    ngrams = [tuple(token_ids[i : i + _NGRAM_SIZE]) for i in range(len(token_ids) - _NGRAM_SIZE + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _check_for_collapse(initial_means: _TextMeans, recent_means: _TextMeans) -> Iterator[tuple[str, bool, str]]:
    """Compare the mean length, repetition and entropy of completions in recent steps with those in the first steps. For
    each of the three, yield its name, whether completions have collapsed, and a warning."""
    length_comparison = f"{recent_means['length']:.3g} tokens, {initial_means['length']:.3g} at first"
    yield "length", recent_means["length"] < initial_means["length"] / 4, f"completions have {length_comparison}"
    is_repetitive = recent_means["repetition"] > max(0.5, initial_means["repetition"] + 0.25)
    yield "repetition", is_repetitive, f"{recent_means['repetition']:.0%} of what completions say is repeated"
    entropy_comparison = f"{recent_means['entropy']:.2g}, {initial_means['entropy']:.2g} at first"
    entropy_message = f"the entropy per token is {entropy_comparison}: completions of a prompt are nearly the same"
    yield "entropy", recent_means["entropy"] < initial_means["entropy"] / 10, entropy_message
