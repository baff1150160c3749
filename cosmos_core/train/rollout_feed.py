"""Feed of scored groups of completions, and the order of the prompts."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.data.order import batch_positions, epoch_order, rows_of
from cosmos_core.errors import ProgramError
from cosmos_core.parallel.mesh import is_first
from cosmos_core.rewards.base import full_value
from cosmos_core.rollout.groups import (
    Filter,
    FilteredGroupSource,
    GroupSource,
    StepGroups,
    SyncGroupSource,
    check_scores,
)
from cosmos_core.train.feeds import Feed, rows_per_step, total_steps, unused_rows_message
from cosmos_core.train.pass_rates import PassRates
from cosmos_core.types import Prompt, Sampling, ScoredGroup


class RolloutFeed(Feed):
    """Feed of scored groups of completions, which the algorithm turns into samples."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        source: GroupSource,
        algorithm: Algorithm,
        recipe: Recipe,
        log: Callable[[int, Sequence[ScoredGroup]], None] = lambda step, groups: None,
    ) -> None:
        """Build the feed; `log` is called with each train step, counted from 1, and the step's groups."""
        self._source, self._algorithm, self._log = source, algorithm, log
        self._steps = StepGroups(recipe.train.train_batch_per_replica, recipe.rollout.n_generation)
        self._policy, self._prompts = recipe.train.train_policy, prompts
        self._rates = PassRates(partial(full_value, self._policy.remote_rewards or self._policy.rewards))
        self.steps_per_epoch = max(1, len(prompts) * self._steps.size // self._steps.batch)
        self.total_steps = total_steps(recipe, len(prompts))
        self.unused_rows_notice = unused_rows_message(recipe, len(prompts))

    def next_samples(self) -> tuple[list[Any], dict[str, float]] | None:
        """Return the samples of the next train step, and metrics about the samples; None if the data has ended, which a
        source that drops groups may do before the last planned step.

        Raises:
            RewardError: no completion has a valid reward because a reward function raises.
            ProgramError: no completion has a valid reward for another reason, or all groups of a step were dropped.
        """
        if self._source.is_exhausted or self.step == self.total_steps:
            return None
        groups, metrics = self._next_groups()
        if self._source.is_exhausted and (groups or self.step > 0):
            if not groups:
                return None
            self.total_steps = self.step + 1
        samples, credit_metrics = self._credit_groups(groups, metrics)
        self.step += 1
        return samples, metrics | credit_metrics

    def _next_groups(self, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of the next train step and metrics, and add all sampled groups to the pass rates."""
        groups_and_metrics = self._source.next_groups(self.step, num_groups)
        self._rates.add(self._source.sampled)
        return groups_and_metrics

    def write_records(self, folder: Path) -> None:
        """Write the pass rates of the prompts."""
        if is_first():
            self._rates.write(folder, self._prompts)

    def _credit_groups(
        self, groups: Sequence[ScoredGroup], metrics: dict[str, float]
    ) -> tuple[list[Any], dict[str, float]]:
        """Return the samples that the algorithm makes of the scored groups of a train step, and its metrics."""
        if not groups:
            raise ProgramError(
                f"step {self.step + 1}: the rewards inside each of {metrics['rollout/sampled_groups']:.0f} groups are "
                f"equal; raise train.train_policy.max_retry_for_on_policy, or take other prompts or rewards"
            )
        check_scores(self.step, groups)
        samples_and_metrics = self._algorithm.credit(groups)
        self._log(self.step + 1, groups)
        return samples_and_metrics

    def state_dict(self) -> dict[str, Any]:
        rates = self._rates.state_dict()
        return super().state_dict() | {"source": self._source.state_dict(), **({"pass_rates": rates} if rates else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the feed's state; without the state of the group source, the prompts of each completed step count as
        used."""
        super().load_state_dict(state)
        self._rates.load_state_dict(state.get("pass_rates", {}))
        self._source.load_state_dict({"drawn": self._steps.first(self.step), **state.get("source", {})})


class PromptOrder:
    """Sequence of prompts whose order is a pure function of seed, epoch and position."""

    def __init__(self, prompts: Sequence[Prompt], recipe: Recipe) -> None:
        self._prompts, self._train = prompts, recipe.train
        self._prompts_per_step = rows_per_step(recipe)

    def __call__(self, step: int) -> Sequence[Prompt]:
        """Return the prompts of train step `step`, counted from 0."""
        seed, shuffle = self._train.order_seed, self._train.train_policy.dataloader_shuffle
        positions = batch_positions(seed, step, self._prompts_per_step, rows_of(self._prompts), shuffle)
        return [self._prompts[int(i)] for i in positions]

    def take_prompts(self, start: int, count: int, end: int | None = None) -> list[Prompt]:
        """Return `count` prompts from position `start` on, counted over all epochs; fewer if the last epoch ends or
        position `end` is reached."""
        rows, shuffle = rows_of(self._prompts), self._train.train_policy.dataloader_shuffle
        last_position = self._train.epoch * len(self._prompts)
        prompts = []
        for position in range(start, min(start + count, last_position, last_position if end is None else end)):
            epoch, i = divmod(position, len(self._prompts))
            prompts.append(self._prompts[int(epoch_order(self._train.order_seed, epoch, rows, shuffle)[i])])
        return prompts


def group_filter(recipe: Recipe) -> Filter | None:
    """Return the filter that drops groups without a learning signal; None: all groups are trained on."""
    dynamic_sampling = recipe.train.train_policy.dynamic_sampling
    return None if dynamic_sampling is None else Filter(*dynamic_sampling)


def sync_source(sync_groups: SyncGroupSource, order: PromptOrder, recipe: Recipe) -> GroupSource:
    """Return a source that generates groups on demand and replaces the groups that the recipe's filter drops."""
    filter_settings = group_filter(recipe)
    if filter_settings is None and not recipe.may_split_groups:
        return sync_groups
    return FilteredGroupSource(sync_groups, order.take_prompts, rows_per_step(recipe), filter_settings)


def training_sampling(recipe: Recipe) -> Sampling:
    """Return the sampling settings of training completions."""
    config, policy = recipe.rollout.sampling_config, recipe.train.train_policy
    seed = recipe.rollout.seed if recipe.rollout.seed is not None else recipe.train.seed
    assert seed is not None
    return Sampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        repetition_penalty=config.repetition_penalty,
        max_tokens=recipe.rollout.max_response_length,
        num_completions=recipe.rollout.n_generation,
        seed=seed,
        flow=policy.flow_sampling(recipe.policy.diffusers),
        policy_temperature=policy.temperature if isinstance(policy, RlConfig) else None,
        may_be_outdated=recipe.train.sync_weight_interval > 1
        or recipe.may_split_groups
        or (recipe.mode == "disaggregated" and policy.lookahead[0] > 0),
    )
