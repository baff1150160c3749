"""Base class of DiffusionNFT and FlowGRPO: advantages, monitoring of rewards, and batches of optimizer steps.

All random numbers of training are functions of the run's seed, the train step, the prompt and the completion, so that
they depend neither on the parallel layout nor on resuming.

Shapes: B samples, dots for the dimensions of a latent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.base import Algorithm, TrainerView, Update, metric_weights, split_equally
from cosmos_core.algorithms.flow_credit import (
    AdvantageSettings,
    FlowRollout,
    RewardMonitor,
    diffusion_advantages,
    make_noise,
)
from cosmos_core.config.schema.flow_rl import FlowPolicyConfig
from cosmos_core.rollout.base import request_seed
from cosmos_core.types import Sampling, ScoredGroup

_TRAINING_SEED_OFFSET = 1 << 20
"""Number that is added to the index of a completion in its group to derive the seed for training on this completion, so
that this seed differs from that of the rollout."""
_MAX_EXPONENT = 100.0
"""Upper bound of -A in -exp(-A), with which the setting `exp_reward` replaces an advantage A, so that exp does not
overflow. Losses clip advantages at about 5."""


@dataclass(frozen=True, slots=True)
class SeededSample:
    """Sample with the attributes of `data.flow_sample.FlowSample`, whose noise is created on access instead of stored,
    because a train step has many times more noise than latents."""

    latents: Tensor
    sigma: float
    text: Mapping[str, Tensor]
    rollout: FlowRollout
    seed: int
    num_conditioning_frames: int = 0
    negative_text: Mapping[str, Tensor] | None = None

    @property
    def noise(self) -> Tensor:
        """Return the noise that is added to the latents of the sample; it depends only on `seed` and their shape."""
        return make_noise(self.latents.shape, self.seed)


class FlowRl(Algorithm):
    """Base class for RL on images and videos; subclasses define the optimizer steps by `make_optimizer_update`."""

    config: FlowPolicyConfig
    keeps_equal_reward_groups: ClassVar[bool] = False
    """Whether the algorithm also trains on groups of completions whose rewards are all equal."""

    def __init__(self, config: Any, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        super().__init__(config, custom, sampling)
        reward_weights = metric_weights(config)
        monitored_rewards = [name for name, weight in reward_weights.items() if not weight]
        self._reward_monitor = RewardMonitor(config.least_diversity, monitored_rewards)
        self._reward_weights = {name: weight for name, weight in reward_weights.items() if weight}
        self._train_step = self._num_updates = 0
        self._prompt_ids: list[int] = []
        """Ids of the prompts of the current train step, one for each group of completions."""

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Any], dict[str, float]]:
        """Return the completions that have a valid reward, with their advantages, and metrics of the groups. Groups
        whose rewards are all equal are included only if `keeps_equal_reward_groups` is set."""
        if groups:
            self._train_step = groups[0].group.step
            self._prompt_ids = [group.group.prompt.id for group in groups]
        advantage_settings = AdvantageSettings(
            std_scope="batch" if self.diffusers.sample.global_std else "group",
            divides_by_std=not self.config.unbiased_advantage,
            reward_weights=self._reward_weights if self.config.normalise_each_reward else {},
            keeps_equal_reward_groups=self.keeps_equal_reward_groups,
        )
        advantages, metrics = diffusion_advantages([group.scores for group in groups], advantage_settings)
        if self.diffusers.flow_rl.exp_reward:
            advantages = [[None if a is None else -math.exp(min(-a, _MAX_EXPONENT)) for a in row] for row in advantages]
        assert self.sampling is not None
        rollouts = []
        for group, row in zip((scored_group.group for scored_group in groups), advantages, strict=True):
            for k, (completion, value) in enumerate(zip(group.completions, row, strict=True), _TRAINING_SEED_OFFSET):
                if value is not None and completion.diffusion_sample is not None:
                    seed = request_seed(self.sampling.seed, group.step, group.prompt.id, k)
                    rollouts.append(FlowRollout(completion.diffusion_sample, group.prompt, value, seed))
        return rollouts, metrics | self._reward_monitor.metrics(groups)

    def updates(self, samples: Sequence[FlowRollout], view: TrainerView) -> Iterator[Update]:
        """Yield the optimizer steps of a train step, each for at most `batch_size_per_optimize` completions. Batches
        without a learning signal, for which `make_optimizer_update` returns None, are skipped."""
        for batch_slice in split_equally(len(samples), self.config.batch_size_per_optimize):
            if (update := self.make_optimizer_update(samples[batch_slice])) is not None:
                if self.data_term is not None:
                    data_term_update = self.data_term(self._train_step, self._prompt_ids, self._num_updates)
                    update = replace(update, data=data_term_update)
                yield update
                self._num_updates += 1

    def make_optimizer_update(self, rollouts: Sequence[FlowRollout]) -> Update | None:
        """Return the optimizer step that trains on `rollouts`; None if the rollouts give no learning signal."""
        raise NotImplementedError(type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "watch": self._reward_monitor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_updates = int(state.get("num_updates", 0))
        self._reward_monitor.load_state_dict(state.get("watch", {}))

    @property
    def _reference_weight_names(self) -> tuple[str, ...]:
        return ("reference",) if "reference" in self.config.auxiliary_model_names else ()


def sum_metrics(**values_B: Tensor) -> Metrics:
    """Return for each keyword argument, a tensor with one value per sample, the metric [sum, count] of the same name;
    callers add these metrics over micro-batches and ranks."""
    flat_values_by_metric = {name: value_B.detach().double().flatten() for name, value_B in values_B.items()}
    return {name: torch.stack([v.sum(), v.new_tensor(float(v.numel()))]) for name, v in flat_values_by_metric.items()}
