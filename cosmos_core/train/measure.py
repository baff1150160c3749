"""Validation metrics of held-out rows (metrics of the algorithm) and of held-out prompts (rewards of completions).

Used during training and by stages of kind `validate` (`validate.py`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.flow_credit import compute_diversity
from cosmos_core.config.schema.recipe import Recipe, RewardSettings
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.data.kinds.base import REFERENCE_BATCH_ROWS, PreparedRows
from cosmos_core.environment import mask_secrets
from cosmos_core.observe import gallery
from cosmos_core.parallel.mesh import broadcast_object, is_first_rank, num_ranks, wait_for_ranks
from cosmos_core.rewards.base import RewardConfig, full_reward, has_full_reward, invalid_scores_error
from cosmos_core.rewards.exchange import read_service_endpoints
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.runner import RewardRunner, ScoreGroupsFn
from cosmos_core.rollout.base import Engine, generate
from cosmos_core.rollout.groups import compute_dataset_means, compute_reward_means, compute_turn_metrics
from cosmos_core.run.files import parse_json_objects, raise_disk_full, write_text
from cosmos_core.run.progress import has_step
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.diffusion_setup import make_evaluation_sampling
from cosmos_core.train.stop import check_stop
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Group, Prompt, Sampling, Score, ScoredGroup

SAMPLES_FILE = "samples.jsonl"
VALIDATION_METRIC_PREFIX = "validation/"
_MAX_SAVED_SAMPLES = 24
_STEP_OF_VALIDATION_SEEDS = 0
"""Value that replaces the step number in the seeds of held-out completions. All validations use the same seeds, so that
the results of two validations differ only by the weights."""


def row_metrics(
    workspace: Workspace, trainer: Trainer, algorithm: Algorithm, rows: PreparedRows, batch_size: int
) -> dict[str, float]:
    """Return the algorithm's metrics over all held-out rows, with `batch_size` rows in a forward pass. Raise
    StopRequested if a signal requests a stop."""
    mesh = trainer.adapter.mesh
    rows_per_chunk = REFERENCE_BATCH_ROWS if rows.has_sample_pairs else batch_size * (mesh.dp.size() if mesh else 1)

    def read_sample_chunks() -> Iterator[list[Any]]:
        for start in range(0, len(rows), rows_per_chunk):
            workspace.progress.advance(start, len(rows))
            check_stop(workspace)
            yield rows.samples(range(start, min(start + rows_per_chunk, len(rows))))

    metrics = algorithm.measure(read_sample_chunks(), trainer, batch_size)
    return {VALIDATION_METRIC_PREFIX + name: value for name, value in metrics.items()}


def completion_metrics(
    groups: Sequence[ScoredGroup], get_full_reward: Callable[[str, Mapping[str, float]], float | None]
) -> dict[str, float]:
    """Return mean reward, accuracy and length over valid completions, and the mean of each reward function. Raise
    `RewardError` or `StageFailed` if no completion has a valid reward.

    Accuracy is the fraction of completions with the full reward, that is, every reward function returned 1 and no
    penalty applied. With several completions of a prompt, `pass@k` is the unbiased estimate of how often at least one
    of k completions has the full reward (see `pass_at_k`). `get_full_reward` returns the full reward from the name of a
    completion's data set and the metrics of its score. If it returns None, the full reward is unknown, and the
    completion is left out of accuracy and pass@k.
    """
    reward_values = np.array([s.value for g in groups for s in g.scores if s.value is not None], dtype=np.float64)
    num_completions = sum(len(group.scores) for group in groups)
    if not len(reward_values):
        scores = [score for group in groups for score in group.scores]
        raise invalid_scores_error(f"all {num_completions} held-out completions have an invalid reward", scores)
    completions = [completion for group in groups for completion in group.group.completions]
    completion_lengths = [completion.num_sampled for completion in completions if completion.diffusion_sample is None]
    correctness_metrics: dict[str, float] = {}
    correct_flags_by_prompt = [
        [
            has_full_reward(score.value, full_reward)
            for score in group.scores
            if score.value is not None
            and (full_reward := get_full_reward(group.group.prompt.source, score.metrics)) is not None
        ]
        for group in groups
    ]
    if any(correct_flags_by_prompt):  # without a valid completion that has a known full reward, there is no accuracy
        accuracy = float(np.concatenate(correct_flags_by_prompt).mean())
        correctness_metrics = {"validation/accuracy": accuracy, **_estimate_pass_at_k(correct_flags_by_prompt)}
    return {
        **{
            VALIDATION_METRIC_PREFIX + n.partition("/")[2]: value
            for n, value in compute_turn_metrics(completions).items()
        },
        "validation/reward": float(reward_values.mean()),
        **_estimate_standard_error(groups),
        "validation/invalid": float(num_completions - len(reward_values)),
        **({"validation/length_mean": float(np.mean(completion_lengths))} if completion_lengths else {}),
        "validation/prompts": float(len(groups)),
        **correctness_metrics,
        **{f"validation/reward/{name}": mean for name, mean in compute_reward_means(groups).items()},
        **{f"validation/reward/{source}/mean": mean for source, mean in compute_dataset_means(groups).items()},
    }


def _estimate_standard_error(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the standard error of the mean reward, by metric name; empty if fewer than two prompts have a valid
    reward. The mean reward of a prompt is one sample, because completions of a prompt are not independent."""
    group_means = [np.mean(rewards) for g in groups if (rewards := [s.value for s in g.scores if s.value is not None])]
    if len(group_means) < 2:
        return {}
    return {"validation/reward_stderr": float(np.std(group_means, ddof=1) / math.sqrt(len(group_means)))}


def _estimate_pass_at_k(correct_flags: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return pass@k for k = 2, 4, 8, ... over the prompts with at least k valid completions. `correct_flags` has, for
    each prompt, one boolean per valid completion: whether the completion has the full reward."""
    valid_and_correct_counts = [(len(prompt_flags), sum(prompt_flags)) for prompt_flags in correct_flags]
    metrics = {}
    for k in (2**i for i in range(1, max(valid_and_correct_counts)[0].bit_length())):
        pass_rates = [pass_at_k(k, count, num_correct) for count, num_correct in valid_and_correct_counts if count >= k]
        metrics[f"validation/pass@{k}"] = float(np.mean(pass_rates))
    return metrics


def pass_at_k(k: int, num_completions: int, num_correct: int) -> float:
    """Return the probability that `k` random completions of `num_completions` include one of the `num_correct` correct
    completions. It is 1 - C(n - c, k) / C(n, k) for c correct of n completions (Chen et al., arXiv 2107.03374)."""
    return 1.0 - math.comb(num_completions - num_correct, k) / math.comb(num_completions, k)


@dataclass(frozen=True)
class CompletionSettings:
    """Settings with which completions of held-out prompts are generated and scored."""

    sampling: Sampling
    rewards: RewardConfig
    """Reward functions with their weights, or a remote service; empty if images are only generated for the gallery."""
    batch_size: int
    """Number of prompts that each rank completes at a time."""


class CompletionValidation:
    """Validation that generates completions of held-out prompts and scores them."""

    def __init__(
        self, prompts: Sequence[Prompt], engine: Engine, score: ScoreGroupsFn, completion_settings: CompletionSettings,
        workspace: Workspace,
    ) -> None:  # fmt: skip
        self._prompts = prompts
        self._engine, self.score, self._workspace = engine, score, workspace
        self._sampling, self._batch_size = completion_settings.sampling, completion_settings.batch_size
        self._get_full_reward = partial(full_reward, completion_settings.rewards)
        self._has_rewards = bool(completion_settings.rewards) or self._sampling.flow is None

    def validate(self, step: int, *, sleep_level: Literal[1, 2] = 1) -> dict[str, float]:
        """Return the validation metrics after `step` train steps, add some completions to `samples.jsonl`, and let the
        engine sleep. Without rewards, only images for the gallery are generated. Raise `StopRequested` if a signal
        requests a stop."""
        if not self._has_rewards:
            self._prompts = self._prompts[: gallery.MAX_SAVED_PROMPTS]
        batch_size = num_ranks() * self._batch_size
        scored_groups: list[ScoredGroup] = []
        self._engine.wake()
        for start in range(0, len(self._prompts), batch_size):
            self._workspace.progress.advance(start, len(self._prompts))
            prompt_batch = self._prompts[start : start + batch_size]
            scored_groups += self.score(generate(self._engine, prompt_batch, self._sampling, _STEP_OF_VALIDATION_SEEDS))
            check_stop(self._workspace)
        self._engine.sleep(level=sleep_level)
        return self.log_metrics(step, scored_groups)

    @property
    def validation_requests(self) -> tuple[Sequence[Prompt], Sampling, int]:
        """Return the held-out prompts, their sampling settings, and the step number from which seeds are derived."""
        return self._prompts, self._sampling, _STEP_OF_VALIDATION_SEEDS

    def log_metrics(self, step: int, scored_groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return the validation metrics of scored groups; the first rank also adds some of the groups to
        `samples.jsonl`."""
        if is_first_rank():
            with raise_disk_full(self._workspace.path):
                samples_file, logged_groups = self._workspace.path / SAMPLES_FILE, scored_groups[:_MAX_SAVED_SAMPLES]
                add_samples(samples_file, step, logged_groups, has_rewards=self._has_rewards)
        metrics = completion_metrics(scored_groups, self._get_full_reward) if self._has_rewards else {}
        if self._sampling.flow is not None and self._sampling.num_completions > 1:
            metrics[f"{VALIDATION_METRIC_PREFIX}diversity"] = compute_diversity(scored_groups)
        return metrics


def add_samples(samples_file: Path, step: int, groups: Sequence[ScoredGroup], *, has_rewards: bool = True) -> None:
    """Replace the lines of `step` and later steps in `samples_file`, which an interrupted attempt left, by the first
    completion of each group. Write images or videos of the groups to a folder of the step. `has_rewards`: whether the
    groups are scored."""
    json_lines = []
    if samples_file.exists():
        saved_records = parse_json_objects(samples_file.read_text(encoding="utf-8", errors="replace").split("\n"))
        kept_records = [line for line in saved_records if has_step(line) and line["step"] < step]
        json_lines = [json.dumps(line, ensure_ascii=False) for line in kept_records]
    group_media = [gallery.collect_samples(group, range(len(group.scores)), is_scored=has_rewards) for group in groups]
    media_samples = [row for row in group_media if row]  # leave out text completions, which have no media
    media_files = gallery.save_step_samples(samples_file.parent, step, media_samples) if media_samples else []
    for group_index, group in enumerate(groups):
        completion, score, prompt = group.group.completions[0], group.scores[0], group.group.prompt
        sample_record: dict[str, Any] = {
            "step": step,
            "prompt": prompt.text,
            "reference": prompt.reference,
            "completion": completion.text,
            "reward": score.value if has_rewards else None,
        }
        if group_index < len(media_files):
            sample_record["media"] = media_files[group_index]
            sample_record |= {"rewards": [score.value for score in group.scores]} if has_rewards else {}
        if completion.turns:
            sample_record["turns"] = [asdict(turn) for turn in completion.turns]
        json_lines.append(json.dumps(sample_record, ensure_ascii=False))
    write_text(samples_file, "".join(line + "\n" for line in json_lines))


def make_completion_settings(recipe: Recipe) -> CompletionSettings:
    """Return the settings of held-out completions; keys unset in `[validation]` are taken from `[rollout]`."""
    validation_config, rollout_config = recipe.validation, recipe.rollout
    assert recipe.train.seed is not None
    sampling = Sampling(
        temperature=validation_config.temperature,
        top_p=rollout_config.sampling_config.top_p if validation_config.top_p is None else validation_config.top_p,
        top_k=rollout_config.sampling_config.top_k if validation_config.top_k is None else validation_config.top_k,
        repetition_penalty=validation_config.repetition_penalty,
        max_tokens=recipe.max_held_out_tokens,
        num_completions=validation_config.n_generation,
        seed=recipe.train.seed,
        flow=make_evaluation_sampling(recipe.policy.diffusers) if recipe.policy.is_diffusers else None,
    )
    return CompletionSettings(
        sampling, recipe.held_out_rewards, validation_config.batch_size or rollout_config.batch_size
    )


@contextmanager
def open_rewards(
    reward_settings: RewardSettings, rewards: RewardConfig, on_wait: Callable[[], None], max_tokens: int | None = None
) -> Iterator[ScoreGroupsFn]:
    """Open rewards in a context manager, and yield a function that scores groups of completions on the first rank only;
    see `score_on_first_rank`. Raise `RewardError` if a reward cannot be loaded, or if the environment variables name no
    reward service for remote rewards.

    Reward functions run in killable child processes of the first rank, and remote rewards in a service. Without rewards
    every score is 0. `max_tokens`: maximum number of tokens of a completion, which is passed to reward functions; None:
    as in training. `on_wait`: heartbeat function that is called during waits.
    """
    if isinstance(rewards, RemoteRewardConfig):
        yield RemoteRewards(rewards, read_service_endpoints(), on_wait=on_wait).score_groups
        return
    if not rewards or not is_first_rank():  # score nothing: `bypass_reward` is set, or the first rank scores
        yield lambda groups: [ScoredGroup(group, (Score(0.0),) * len(group.completions)) for group in groups]
        return
    judge_settings = reward_settings.judge if "judge" in rewards else None
    secret_variable_names = (*reward_settings.environment_names, *((judge_settings.key_env,) if judge_settings else ()))
    mask_secrets(secret_variable_names)
    with RewardRunner(
        rewards,
        timeout_seconds=reward_settings.timeout_seconds,
        timeout_by_reward={"judge": judge_settings.timeout_seconds} if judge_settings else {},
        request_constants=reward_settings.keyword_values | ({} if max_tokens is None else {"max_tokens": max_tokens}),
        env_variable_names=secret_variable_names,
        on_wait=on_wait,
        scores_whole_groups=reward_settings.calls_per_group,
    ) as reward_runner:
        yield reward_runner.score_groups


def score_on_first_rank(score_groups: ScoreGroupsFn) -> ScoreGroupsFn:
    """Return a function that scores groups on the first rank and broadcasts the scores; all ranks call it together."""

    def score_and_broadcast(groups: Sequence[Group]) -> list[ScoredGroup]:
        scores_by_group = [scored_group.scores for scored_group in score_groups(groups)] if is_first_rank() else []
        wait_for_ranks(lambda: None)  # wait first, because scoring may take longer than the broadcast's timeout
        scores_by_group = broadcast_object(scores_by_group)
        return [ScoredGroup(group, scores) for group, scores in zip(groups, scores_by_group, strict=True)]

    return score_and_broadcast
