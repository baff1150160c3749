"""Log of training completions: a few completions per train step are written to disk, and warnings report collapse.

    <stage>/completions/step_000012.jsonl     a completion per line, with its rewards; `cosmos samples` shows the lines
    <stage>/completions/step_000012/0-1.png   an image (or 0-1.mp4, a video) of a completion; grid.png shows all

A reward can rise because the policy exploits the reward. A warning is logged at early signs: groups of equal rewards,
one reward that rises while other rewards fall, and completions that are all truncated or become short, repetitive or
low in entropy.
`measure.py` logs held-out completions.
"""

import json
import logging
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.observe import gallery
from cosmos_core.parallel.mesh import is_first
from cosmos_core.rollout.groups import reward_means
from cosmos_core.run.files import raise_disk_full, write_text
from cosmos_core.types import Completion, ScoredGroup

logger = logging.getLogger(__name__)

FOLDER = "completions"
_NUM_GROUPS, _NUM_COMPLETIONS = 4, 8
"""Number of groups logged per train step, and number of text completions logged per group."""
_NUM_LOGGED_GROUPS, _NUM_LOGGED_IMAGES = 2, 4
"""Number of groups logged per train step, and number of images or videos logged per group."""
_MAX_CHARACTERS = 20_000
_MAX_STEPS = 1_000
_MAX_IMAGE_BYTES = 1 << 30
"""Maximum size in bytes of the image and video files of all steps; files of the newest step are always kept."""
_WINDOW = 8  # number of compared steps; by chance, the last 4 values all exceed the first 4 with probability 1/70
_NGRAM = 4


class CompletionLog:
    """Logger that writes completions of each train step on the first rank and warns of signs of reward hacking or
    collapse."""

    def __init__(self, folder: Path, *, writes: bool, max_image_bytes: int = _MAX_IMAGE_BYTES) -> None:
        """Log completions to `folder`; if `writes` is False, only log warnings."""
        self._folder, self._writes, self._max_image_bytes = folder, writes, max_image_bytes
        self._rewards: deque[Mapping[str, float]] = deque(maxlen=_WINDOW)
        self._shapes: deque[Mapping[str, float]] = deque(maxlen=_WINDOW // 2)
        self._first: list[Mapping[str, float]] = []
        self._given_warnings: set[str] = set()

    def __call__(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Log the scored groups that train step `step`, counted from 1, uses."""
        if not is_first():
            return
        if self._writes:
            with raise_disk_full(self._folder.parent):
                self._write(step, groups)
        self._watch(step, groups)

    def _write(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        has_images = groups[0].group.completions[0].diffusion_sample is not None
        num_groups, count = (_NUM_LOGGED_GROUPS, _NUM_LOGGED_IMAGES) if has_images else (_NUM_GROUPS, _NUM_COMPLETIONS)
        chosen = [(group, _spread_by_reward(group, count)) for group in _groups_to_log(groups)[:num_groups]]
        lines = [_line(step, group, k) for group, indices in chosen for k in indices]
        file = self._folder / f"step_{step:06d}.jsonl"
        if has_images:
            image_samples = [gallery.samples_of_group(group, indices) for group, indices in chosen]
            names = gallery.save_rows(file.with_suffix(""), image_samples)
            for line, name in zip(lines, (name for row in names for name in row), strict=True):
                line["media"] = f"{self._folder.name}/{file.stem}/{name}"
        write_text(file, "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines), durable=False)
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Delete the logged files of steps after `step`, which were written before the run was resumed, and the oldest
        files beyond the limits on number and size."""
        num_bytes = 0
        steps = sorted(self._folder.glob("step_*.jsonl"), reverse=True)
        old_files = [file for file in steps if int(file.stem[5:]) <= step]
        for i, file in enumerate(old_files):
            num_bytes += sum(each.stat().st_size for each in file.with_suffix("").glob("*"))
            if i == _MAX_STEPS or (i and num_bytes > self._max_image_bytes):
                old_files = old_files[:i]
                break
        for file in set(steps) - set(old_files):
            file.unlink()
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)

    def _watch(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        values = [[score.value for score in scored_group.scores if score.value is not None] for scored_group in groups]
        # Without reward functions every score is 0, so equal rewards are no sign of a problem.
        has_rewards = any(score.metrics for scored_group in groups for score in scored_group.scores)
        is_constant = has_rewards and max(map(len, values)) > 1 and all(len(set(each)) <= 1 for each in values)
        self._warn_once(
            "constant", is_constant,
            f"step {step}: the completions of each of {len(groups)} groups have equal rewards, of which nothing is "
            f"learned; take other prompts, rewards or a higher temperature",
        )  # fmt: skip
        completions = [each for scored_group in groups for each in scored_group.group.completions]
        self._warn_once(
            "truncated", all(each.finish_reason == "length" for each in completions),
            f"step {step}: all {len(completions)} completions end at the maximum length, none with the end token; "
            f"raise rollout.max_response_length (with mask_truncated_completions nothing is learned of them)",
        )  # fmt: skip
        self._rewards.append({name: mean for name, mean in reward_means(groups).items() if "/" not in name})
        opposed = _opposed_message(self._rewards)
        self._warn_once("opposed", bool(opposed), f"steps {step - _WINDOW + 1} to {step}: {opposed}; a reward may be "
                   f"exploited: cosmos samples --step {step} --best")  # fmt: skip
        shape = _text_statistics(completions)
        if not shape:
            return
        self._shapes.append(shape)
        if len(self._first) < _WINDOW // 2:
            self._first.append(shape)
            return
        for name, problem in _collapse_messages(_mean(self._first), _mean(self._shapes)).items():
            self._warn_once(name, bool(problem), f"step {step}: {problem}; look at them: cosmos samples --step {step}")

    def _warn_once(self, name: str, is_problem: bool, message: str) -> None:
        """Log a warning when a condition becomes true, and not again before the condition has been false."""
        if is_problem and name not in self._given_warnings:
            logger.warning("%s", message)
        (self._given_warnings.add if is_problem else self._given_warnings.discard)(name)


def _groups_to_log(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return the few groups to log: those with the best and the worst completion, then the first groups of the step."""
    ranked = sorted(range(len(groups)), key=lambda i: max(map(_rank, groups[i].scores)))
    values = [[score.value for score in group.scores if score.value is not None] for group in groups]
    lowest = min(range(len(groups)), key=lambda i: min(values[i], default=0))
    return [groups[i] for i in list(dict.fromkeys([ranked[-1], lowest, *range(len(groups))]))[:_NUM_GROUPS]]


def _spread_by_reward(scored_group: ScoredGroup, max_indices: int) -> list[int]:
    """Return the indices of at most `max_indices` completions, evenly spaced from the best to the worst reward."""
    ranked = sorted(range(len(scored_group.scores)), key=lambda k: -_rank(scored_group.scores[k]))
    indices = np.linspace(0, len(ranked) - 1, min(len(ranked), max_indices)).round().astype(int)
    return [ranked[i] for i in indices]


def _rank(score: Any) -> float:
    return -np.inf if score.value is None else float(score.value)


def _line(step: int, scored_group: ScoredGroup, k: int) -> dict[str, Any]:
    completion, score = scored_group.group.completions[k], scored_group.scores[k]
    turns = [{"role": turn.role, "text": turn.text[:_MAX_CHARACTERS]} for turn in completion.turns]
    return {
        "step": step,
        "prompt": scored_group.group.prompt.text[-_MAX_CHARACTERS:],
        "reference": scored_group.group.prompt.reference[:_MAX_CHARACTERS],
        "completion": completion.text[:_MAX_CHARACTERS],
        "reward": score.value,
        "metrics": score.metrics,
        "tokens": completion.num_sampled,
        "finish_reason": completion.finish_reason,
        **({"error": score.error} if score.error else {}),
        **({"turns": turns} if turns else {}),
    }


def _opposed_message(step_means: Sequence[Mapping[str, float]]) -> str:
    """Return a message if exactly one reward rose while others fell, else an empty string. A reward rose or fell if all
    values of the later half of the window lie beyond all values of the earlier half."""
    if len(step_means) < _WINDOW:
        return ""
    half, changes = _WINDOW // 2, {}
    for name in set.intersection(*(set(each) for each in step_means)):
        values = [each[name] for each in step_means]
        first_half, second_half = values[:half], values[half:]
        if min(second_half) > max(first_half) or max(second_half) < min(first_half):
            changes[name] = (float(np.mean(first_half)), float(np.mean(second_half)))
    up = {name: (low, high) for name, (low, high) in changes.items() if high > low}
    down = {name: each for name, each in changes.items() if name not in up}
    if len(up) != 1 or not down:
        return ""
    fallen = [f"{name!r} fell from {high:.3g} to {low:.3g}" for name, (high, low) in sorted(down.items())]
    [(name, (low, high))] = up.items()
    return f"reward {name!r} rose from {low:.3g} to {high:.3g} while {' and '.join(fallen)}"


def _text_statistics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean number of sampled tokens, fraction of repeated 4-grams and entropy of text completions. The
    entropy is estimated as the mean of -log p of the sampled tokens. The result is empty for images and videos."""
    texts = [each for each in completions if each.diffusion_sample is None and each.num_sampled]
    if not texts:
        return {}
    logprobs = np.concatenate([each.logprobs for each in texts])
    finite = logprobs[np.isfinite(logprobs)]
    return {
        "length": float(np.mean([each.num_sampled for each in texts])),
        "repetition": float(np.mean([_repetition(each.token_ids) for each in texts])),
        "entropy": float(-finite.mean()) if len(finite) else float("nan"),
    }


def _repetition(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _mean(shapes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([shape[name] for shape in shapes])) for name in shapes[0]}


def _collapse_messages(first: Mapping[str, float], current: Mapping[str, float]) -> dict[str, str]:
    """Return messages about length, repetition and entropy; a message is empty if the value has not collapsed."""
    is_short = current["length"] < first["length"] / 4
    is_repetitive = current["repetition"] > max(0.5, first["repetition"] + 0.25)
    is_nearly_certain = current["entropy"] < first["entropy"] / 10
    return {
        "length": f"completions have {current['length']:.3g} tokens, {first['length']:.3g} at first"
        if is_short else "",
        "repetition": f"{current['repetition']:.0%} of what completions say is repeated" if is_repetitive else "",
        "entropy": f"the entropy per token is {current['entropy']:.2g}, {first['entropy']:.2g} at first: completions "
        f"of a prompt are nearly the same" if is_nearly_certain else ""
    }  # fmt: skip
