"""Source of samples for train steps whose number of completions is not a multiple of the group size.

Advantages are computed for a whole group when the first of its completions is needed. Completions that a step does not
use are queued for the next step and saved in checkpoints. A completion that is not trained, such as one without a valid
reward or one that is truncated, keeps its position, so the partition into steps does not depend on validity; a step
without a trained completion has no update.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cosmos_core.data.sample import Sample, batch_within_token_limit
from cosmos_core.errors import ConfigError
from cosmos_core.train.rollout_feed import RolloutFeed
from cosmos_core.types import ImageRef, ScoredGroup


class SampleQueue:
    """Queue of completions that have an advantage but were not used by a train step yet."""

    def __init__(self) -> None:
        self._queued_samples: list[tuple[int, Sample | None]] = []
        """For each queued completion, the version of the weights that generated it, and its training sample; None: the
        completion is not trained on, for example because it has no valid reward."""
        self._group_metrics: dict[str, float] = {}
        """Metrics of the groups whose completions were added last."""

    def __len__(self) -> int:
        return len(self._queued_samples)

    def add(self, groups: Sequence[ScoredGroup], samples: Sequence[Any], group_metrics: dict[str, float]) -> None:
        """Add all completions of `groups` to the queue, each with its training sample, and save `group_metrics` as the
        metrics of the groups added last. `samples` either name their completions by `completion_index`, or are one per
        completion, or one per completion with a valid reward; raise ConfigError otherwise."""
        rewards = [(group.group.version, score.value) for group in groups for score in group.scores]
        self._group_metrics = group_metrics
        indices = [sample.completion_index for sample in samples if isinstance(sample, Sample)]
        if len(indices) != len(samples) or None in indices:
            indices = [i for i, (_, value) in enumerate(rewards) if value is not None or len(samples) == len(rewards)]
            if len(samples) != len(indices) or not all(isinstance(sample, Sample) for sample in samples):
                raise ConfigError(
                    f"the algorithm makes {len(samples)} samples of {len(indices)} completions with valid rewards, so "
                    f"that a group cannot be spread over train steps; make train.train_batch_per_replica a multiple of "
                    f"rollout.n_generation"
                )
        sample_by_index = dict(zip(indices, samples, strict=True))
        self._queued_samples += [(version, sample_by_index.get(i)) for i, (version, _) in enumerate(rewards)]

    def take_samples(self, num_completions: int, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Remove the first `num_completions` completions from the queue, and return their samples with metrics. Rewards
        in the metrics are those of the groups that were added last, because a group is spread over several steps."""
        taken_samples = self._queued_samples[:num_completions]
        del self._queued_samples[:num_completions]
        version_lags = [step - version for version, _ in taken_samples]
        lag_metrics = {}
        if version_lags:
            max_version_lag, mean_version_lag = float(max(version_lags)), float(np.mean(version_lags))
            lag_metrics = {"rollout/version_lag": max_version_lag, "rollout/version_lag_mean": mean_version_lag}
        return [sample for _, sample in taken_samples if sample is not None], self._group_metrics | lag_metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the queued completions, and the metrics of the groups added last, as JSON values and tensors for a
        checkpoint."""
        queue_state = [[version, sample and _sample_to_state(sample)] for version, sample in self._queued_samples]
        return {"entries": queue_state, "metrics": self._group_metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the queue that `state_dict` returned."""
        self._queued_samples = [(int(version), entry and _restore_sample(entry)) for version, entry in state["entries"]]
        self._group_metrics = dict(state["metrics"])


class SplitGroupFeed(RolloutFeed):
    """`RolloutFeed` that spreads the completions of a group over train steps."""

    @cached_property
    def _sample_queue(self) -> SampleQueue:
        return SampleQueue()

    def next_samples(self) -> tuple[list[Any], dict[str, float]] | None:
        """Return the samples and metrics of a train step, without samples if all groups were dropped; None if the data
        has ended. The last train step can have fewer completions than the others."""
        if self.step == self.total_steps or self._has_ended:
            return None
        num_missing_completions = max(0, self._group_plan.completions_per_step - len(self._sample_queue))
        groups, metrics = self._next_groups(-(-num_missing_completions // self._group_plan.group_size))
        if not (groups or self._sample_queue) and (not metrics or (self._group_source.is_exhausted and self.step > 0)):
            return None
        if groups or not self._sample_queue:
            samples, algorithm_metrics = self._assign_credit(groups, metrics)
            group_metrics = {k: v for k, v in metrics.items() if k.startswith(("reward/", "completion/"))}
            self._sample_queue.add(groups, samples, group_metrics | algorithm_metrics)
        samples, sample_metrics = self._sample_queue.take_samples(self._group_plan.completions_per_step, self.step)
        self.step += 1
        if self._has_ended:
            self.total_steps = self.step
        max_tokens = getattr(self._train_policy, "max_token_len_per_mini_batch", None)
        return batch_within_token_limit(samples, max_tokens), metrics | sample_metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"carried": self._sample_queue.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "carried" in state:
            self._sample_queue.load_state_dict(state["carried"])
        super().load_state_dict(state)

    @property
    def _has_ended(self) -> bool:
        return super()._has_ended and not self._sample_queue


def _sample_to_state(sample: Sample) -> dict[str, Any]:
    field_values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    field_values["images"] = [
        {**asdict(image), "content": image.content and torch.frombuffer(bytearray(image.content), dtype=torch.uint8)}
        for image in sample.images
    ]
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in field_values.items()}


def _restore_sample(state: dict[str, Any]) -> Sample:
    field_values: dict[str, Any] = {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
    image_refs = [
        ImageRef(**{**image, "content": None if image["content"] is None else image["content"].numpy().tobytes()})
        for image in state["images"]
    ]
    return Sample(**{**field_values, "images": tuple(image_refs)})
