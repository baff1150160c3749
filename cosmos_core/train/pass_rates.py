"""Pass rates of prompts: how often a training sampled each prompt, and how its completions were rewarded.

`<stage>/pass_rates.jsonl` has one line per training prompt, also for prompts that were never sampled. Groups that were
dropped by dynamic sampling (DAPO) are counted too. The counts are in checkpoints, so a resumed training writes the same
file. A later stage can read the file by the key `train.train_policy.dataset.pass_rates`.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from operator import add
from pathlib import Path
from typing import Any

from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.rewards.base import has_full_reward
from cosmos_core.run.files import raise_disk_full, write_text
from cosmos_core.types import Prompt, ScoredGroup


class PassRates:
    """Counts of sampled groups and rewards by prompt. `get_full_reward` returns the reward of a correct completion,
    from the name of the data set and the metrics of a score; None: unknown."""

    def __init__(self, get_full_reward: Callable[..., float | None]) -> None:
        self._get_full_reward = get_full_reward
        self._prompt_counts: dict[str, list[float]] = {}

    def add(self, scored_groups: Sequence[ScoredGroup]) -> None:
        """Count the groups `scored_groups`, which were sampled for a train step, and their completions with a valid
        reward."""
        for group in scored_groups:
            prompt = group.group.prompt
            rewards = [(score.value, score.metrics) for score in group.scores if score.value is not None]
            reward_pairs = [(value, self._get_full_reward(prompt.source, metrics)) for value, metrics in rewards]
            full_reward_flags = [has_full_reward(value, full) for value, full in reward_pairs if full is not None]
            added_counts = (
                1, len(rewards), sum(value for value, _ in rewards), sum(full_reward_flags), len(full_reward_flags)
            )  # fmt: skip
            earlier_counts = self._find_counts(prompt)
            self._prompt_counts[_make_prompt_key(prompt)] = list(map(add, earlier_counts, added_counts))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of each prompt for a checkpoint, as JSON values."""
        return dict(self._prompt_counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts of each prompt that `state_dict` returned."""
        # Old checkpoints lack the fifth count, of completions for which it is known whether their reward is full. Use
        # the second, of valid rewards, because it was known for all of these.
        self._prompt_counts = {name: [*counts, *counts[1:2]][:5] for name, counts in state.items()}

    def _find_counts(self, prompt: Prompt) -> list[float]:
        """Return the counts of a prompt's groups and rewards, or zeros. A checkpoint of an older version has them under
        the number of the row, without the checksum of `_make_prompt_key`."""
        key, old_key = _make_prompt_key(prompt), str(prompt.id)
        return self._prompt_counts.get(key) or self._prompt_counts.get(old_key) or [0.0] * 5

    def write(self, stage_folder: Path, prompts: Sequence[Prompt]) -> None:
        """Write `pass_rates.jsonl` with a line per prompt; an unknown pass rate or mean reward is null."""
        json_lines = []
        for prompt in prompts:
            prompt_counts = self._find_counts(prompt)
            num_sampled_groups, num_valid_rewards, reward_sum, num_full_rewards, num_known_full_rewards = prompt_counts
            has_pass_rate = num_known_full_rewards and self._get_full_reward(prompt.source) is not None
            pass_rate_record = {
                "prompt": prompt.text,
                "pass_rate": num_full_rewards / num_known_full_rewards if has_pass_rate else None,
                "mean_reward": reward_sum / num_valid_rewards if num_valid_rewards else None,
                "drawn": int(num_sampled_groups),
                "completions": int(num_valid_rewards),
            }
            json_lines.append(json.dumps(pass_rate_record, ensure_ascii=False) + "\n")
        with raise_disk_full(stage_folder):
            write_text(stage_folder / PASS_RATES_FILE, "".join(json_lines))


def _make_prompt_key(prompt: Prompt) -> str:
    """Return the number of a prompt's row with a checksum of its text and reference, because `train.resume = PATH` can
    continue with other rows, to which the counts of a checkpoint do not belong."""
    return f"{prompt.id}:{zlib.crc32(f'{prompt.text}{prompt.reference}'.encode()):08x}"
