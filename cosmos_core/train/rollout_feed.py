"""Source of training samples from scored groups of completions, and the order of the prompts."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Algorithm, metric_weights
from cosmos_core.algorithms.registry import credit_groups
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.order import batch_row_numbers, mixture_or_num_rows, rows_at_positions
from cosmos_core.errors import ProgramError, RewardError
from cosmos_core.parallel.mesh import is_first_rank
from cosmos_core.rewards.base import full_reward
from cosmos_core.rollout.groups import (
    FilteredGroupSource,
    GroupFilter,
    GroupPlan,
    GroupSource,
    SyncGroupSource,
    check_scores,
)
from cosmos_core.train.feeds import SampleFeed, rows_per_step, total_steps, unused_rows_message
from cosmos_core.train.pass_rates import PassRates
from cosmos_core.types import Prompt, Sampling, ScoredGroup

logger = logging.getLogger(__name__)


class RolloutFeed(SampleFeed):
    """Source of training samples that an algorithm makes of scored groups of completions."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        group_source: GroupSource,
        algorithm: Algorithm,
        train_config: TrainConfig,
        rollout: RolloutConfig,
    ) -> None:
        self._group_source, self._algorithm = group_source, algorithm
        self._group_plan = group_plan = GroupPlan(train_config.train_batch_per_replica, rollout.n_generation)
        self._train_policy, self._prompts = train_config.train_policy, prompts
        get_full_reward = partial(full_reward, self._train_policy.remote_reward_config or self._train_policy.rewards)
        self._pass_rates = PassRates(get_full_reward)
        self.steps_per_epoch = max(1, len(prompts) * group_plan.group_size // group_plan.completions_per_step)
        self.total_steps = total_steps(train_config, rollout.n_generation, len(prompts))
        self._max_response_length = rollout.max_response_length
        self.unused_rows_notice = unused_rows_message(train_config, rollout.n_generation, len(prompts))
        self.log_groups: Callable[[int, Sequence[ScoredGroup]], None] = lambda step, groups: None
        """Function that logs the groups of a train step; it is called with the number of the step, counted from 1."""

    def find_max_sample_tokens(self) -> int | None:
        max_prompt_length = max((len(prompt.token_ids) for prompt in self._prompts), default=0)
        return max_prompt_length + self._max_response_length if max_prompt_length else None

    def next_samples(self) -> tuple[list[Any], dict[str, float]] | None:
        """Return the samples of the next train step and their metrics; None if the data has ended. If groups are
        dropped, the data can end before the last planned step. A step whose groups were all dropped has no samples; for
        the first step, raise `ProgramError` instead. Raise the errors of `check_scores`."""
        if self._has_ended or self.step == self.total_steps:
            return None
        scored_groups, metrics = self._next_groups()
        if self._group_source.is_exhausted and (scored_groups or self.step > 0):
            if not scored_groups:
                return None
            self.total_steps = self.step + 1
        samples, algorithm_metrics = self._assign_credit(scored_groups, metrics)
        self.step += 1
        return samples, metrics | algorithm_metrics

    def _next_groups(self, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of the next train step and their metrics, and add all sampled groups to the pass rates."""
        groups_and_metrics = self._group_source.next_groups(self.step, num_groups)
        self._pass_rates.add(self._group_source.sampled_groups)
        return groups_and_metrics

    def write_pass_rates(self, stage_folder: Path) -> None:
        if is_first_rank():
            self._pass_rates.write(stage_folder, self._prompts)

    def _assign_credit(
        self, scored_groups: Sequence[ScoredGroup], metrics: dict[str, float]
    ) -> tuple[list[Any], dict[str, float]]:
        """Return the samples that the algorithm makes of the scored groups of a train step, and their metrics; no
        samples if all groups of the step were dropped."""
        if not scored_groups:
            num_groups, remedy = metrics["rollout/sampled_groups"], "take other prompts or rewards"
            problem = f"step {self.step + 1}: the rewards inside each of {num_groups:.0f} groups are equal"
            if not self._group_source.is_exhausted:
                remedy = f"raise train.train_policy.max_retry_for_on_policy, or {remedy}"
            if self.step == 0:  # rewards that are all equal in the first step probably never differ
                raise ProgramError(f"{problem}; {remedy}")
            logger.warning("%s, so nothing is learned; %s", problem, remedy)
            return [], {}
        check_scores(self.step, scored_groups)
        samples_and_metrics = credit_groups(self._algorithm, scored_groups)
        self.log_groups(self.step + 1, scored_groups)
        return samples_and_metrics

    def state_dict(self) -> dict[str, Any]:
        pass_rates = {"pass_rates": counts} if (counts := self._pass_rates.state_dict()) else {}
        return super().state_dict() | {"source": self._group_source.state_dict(), **pass_rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the feed's state. If it lacks the state of the source that generates the groups, the prompts of
        completed steps count as used."""
        super().load_state_dict(state)
        self._pass_rates.load_state_dict(state.get("pass_rates", {}))
        default_source_state = {"drawn": self._group_plan.get_first_position(self.step)}
        self._group_source.load_state_dict({**default_source_state, **state.get("source", {})})
        self.total_steps = self.step if self._has_ended else self.total_steps

    @property
    def _has_ended(self) -> bool:
        return self._group_source.is_exhausted


class PromptOrder:
    """Sequence of prompts whose order is a pure function of seed, epoch and position."""

    def __init__(self, prompts: Sequence[Prompt], train_config: TrainConfig, group_size: int) -> None:
        self._prompts, self._train_config = prompts, train_config
        self.num_prompts, self.prompts_per_step = len(prompts), rows_per_step(train_config, group_size)

    def __call__(self, step: int) -> Sequence[Prompt]:
        """Return the prompts of train step `step`, counted from 0."""
        seed, shuffle = self._train_config.order_seed, self._train_config.train_policy.dataloader_shuffle
        row_numbers = batch_row_numbers(seed, step, self.prompts_per_step, mixture_or_num_rows(self._prompts), shuffle)
        return [self._prompts[int(i)] for i in row_numbers]

    def take_prompts(self, start_position: int, num_prompts: int, end_position: int | None = None) -> list[Prompt]:
        """Return `num_prompts` prompts from `start_position` on, counted over all epochs; fewer at `end_position`
        (None: the end of the last epoch)."""
        order_seed, shuffle = self._train_config.order_seed, self._train_config.train_policy.dataloader_shuffle
        total_num_prompts = self._train_config.epoch * len(self._prompts)
        end_position = total_num_prompts if end_position is None else min(end_position, total_num_prompts)
        row_positions = range(start_position, min(start_position + num_prompts, end_position))
        row_numbers = rows_at_positions(order_seed, row_positions, mixture_or_num_rows(self._prompts), shuffle)
        return [self._prompts[i] for i in row_numbers]


def make_group_filter(algorithm_config: AlgorithmConfig) -> GroupFilter | None:
    """Return the filter that drops groups without a learning signal, whose completions have equal rewards; None: all
    groups are trained on. Raise `RewardError` if the filter compares a metric that no reward function reports."""
    if algorithm_config.dynamic_sampling is None:
        return None
    group_filter = GroupFilter(*algorithm_config.dynamic_sampling)
    reward_names = dict.fromkeys(name.partition("/")[0] for name in metric_weights(algorithm_config))
    for metric in group_filter.metrics:
        if metric.partition("/")[0] not in reward_names:
            raise RewardError(
                f"train.train_policy.filter_reward_metric: no reward reports {metric!r}; take of "
                f"{', '.join(reward_names)}"
            )
    return group_filter


def make_sync_source(
    sync_source: SyncGroupSource, prompt_order: PromptOrder, group_filter: GroupFilter | None, *, may_split_groups: bool
) -> GroupSource:
    """Return a source that generates groups of completions when a train step needs them. With `group_filter`, each
    group that the filter drops is replaced by another group. `may_split_groups`: whether the completions of a group can
    be trained on in different steps."""
    if group_filter is None and not may_split_groups:
        return sync_source
    return FilteredGroupSource(sync_source, prompt_order.take_prompts, prompt_order.prompts_per_step, group_filter)


def make_training_sampling(recipe: Recipe) -> Sampling:
    """Return the settings with which the engine samples completions for training."""
    sampling_config, algorithm_config = recipe.rollout.sampling_config, recipe.train.train_policy
    order_seed = recipe.rollout.seed if recipe.rollout.seed is not None else recipe.train.seed
    assert order_seed is not None
    return Sampling(
        temperature=sampling_config.temperature,
        top_p=sampling_config.top_p,
        top_k=sampling_config.top_k,
        repetition_penalty=sampling_config.repetition_penalty,
        max_tokens=recipe.rollout.max_response_length,
        num_completions=recipe.rollout.n_generation,
        seed=order_seed,
        flow=algorithm_config.flow_sampling_settings(recipe.policy.diffusers),
        policy_temperature=algorithm_config.temperature if isinstance(algorithm_config, RlConfig) else None,
        may_use_old_weights=recipe.train.sync_weight_interval > 1
        or recipe.may_split_groups
        or (recipe.mode == "disaggregated" and algorithm_config.rollout_lookahead[0] > 0),
    )
