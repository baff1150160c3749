"""Scored groups of completions as a feed of a training, and the order in which prompts are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.data.order import batch_positions, epoch_order
from cosmos_core.errors import ProgramError
from cosmos_core.rollout.groups import (
    Filter,
    FilteredGroupSource,
    GroupSource,
    StepGroups,
    SyncGroupSource,
    check_scores,
)
from cosmos_core.train.feeds import Feed, rows_per_step, total_steps, unused_rows
from cosmos_core.types import Prompt, Sampling, ScoredGroup


class RolloutFeed(Feed):
    """Scored groups of completions, turned into samples by the algorithm's credit rule."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        source: GroupSource,
        algorithm: Algorithm,
        recipe: Recipe,
        log: Callable[[int, Sequence[ScoredGroup]], None] = lambda step, groups: None,
    ) -> None:
        """`log` is called with each train step, counted from 1, and the groups that it learns from first."""
        self._source, self._algorithm, self._log, self._steps = source, algorithm, log, step_groups(recipe)
        self._policy = recipe.train.train_policy
        self.steps_per_epoch = max(1, len(prompts) * self._steps.size // self._steps.batch)
        self.total_steps = total_steps(recipe, len(prompts))
        self.notice = unused_rows(recipe, len(prompts))

    def next(self) -> tuple[list[Any], dict[str, float]] | None:
        """See `Feed.next`; a source that drops groups may end before the last step that the prompts could fill, and of
        groups whose rewards are equal an algorithm may learn nothing.

        Raises:
            RewardError: no completion has a valid reward, because a function raises.
            ProgramError: no completion has one for another reason, or none of a full step's groups is of use.
        """
        if self._source.is_over or self.step == self.total_steps:
            return None
        groups, metrics = self._source.next(self.step)
        if self._source.is_over and (groups or self.step > 0):
            if not groups:
                return None
            self.total_steps = self.step + 1
        found, credited = self._credited(groups, metrics)
        self.step += 1
        return found, metrics | credited

    def _credited(self, groups: Sequence[ScoredGroup], metrics: dict[str, float]) -> tuple[list[Any], dict[str, float]]:
        """Return the samples that the algorithm makes of the groups of this step, and metrics."""
        if not groups:
            raise ProgramError(
                f"step {self.step + 1}: the rewards inside each of {metrics['rollout/sampled_groups']:.0f} groups are "
                f"equal; raise train.train_policy.max_retry_for_on_policy, or take other prompts or rewards"
            )
        check_scores(self.step, groups)
        found = self._algorithm.credit(groups)
        self._log(self.step + 1, groups)
        return found

    def state_dict(self) -> dict[str, Any]:
        """See `Feed.state_dict`."""
        return super().state_dict() | {"source": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Feed.load_state_dict`; the checkpoint may be of a training that took its prompts step by step."""
        super().load_state_dict(state)
        self._source.load_state_dict({"drawn": self._steps.first(self.step), **state.get("source", {})})


class PromptOrder:
    """The prompts in an order that is a pure function of seed, epoch and position."""

    def __init__(self, prompts: Sequence[Prompt], recipe: Recipe) -> None:
        self._prompts, self._train = prompts, recipe.train
        self._batch = rows_per_step(recipe)

    def __call__(self, step: int) -> Sequence[Prompt]:
        """Return the prompts of train step `step`, counted from 0."""
        shuffle = self._train.train_policy.dataloader_shuffle
        positions = batch_positions(self._train.order_seed, step, self._batch, len(self._prompts), shuffle)
        return [self._prompts[int(i)] for i in positions]

    def take(self, start: int, count: int, end: int | None = None) -> list[Prompt]:
        """Return `count` prompts from position `start` of all epochs on; fewer where these end, or at `end`."""
        num_prompts, shuffle = len(self._prompts), self._train.train_policy.dataloader_shuffle
        found = []
        last = self._train.epoch * num_prompts
        for position in range(start, min(start + count, last, last if end is None else end)):
            epoch, i = divmod(position, num_prompts)
            found.append(self._prompts[int(epoch_order(self._train.order_seed, epoch, num_prompts, shuffle)[i])])
        return found


def group_filter(recipe: Recipe) -> Filter | None:
    """Return what drops groups of no use; None: all are trained on."""
    sampling = recipe.train.train_policy.dynamic_sampling
    return None if sampling is None else Filter(*sampling)


def in_turns(sync: SyncGroupSource, order: PromptOrder, recipe: Recipe) -> GroupSource:
    """Return what generates when it is asked, with others in place of groups that are dropped."""
    chosen = group_filter(recipe)
    if chosen is None and not recipe.spreads_groups:
        return sync
    return FilteredGroupSource(sync, order.take, rows_per_step(recipe), chosen)


def step_groups(recipe: Recipe) -> StepGroups:
    """Return which groups train steps need."""
    return StepGroups(recipe.train.train_batch_per_replica, recipe.rollout.n_generation)


def training_sampling(recipe: Recipe) -> Sampling:
    """Return how training completions are drawn."""
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
        flow=recipe.train.train_policy.flow_sampling(recipe.policy.diffusers),
        policy_temperature=policy.temperature if isinstance(policy, RlConfig) else None,
        may_be_outdated=recipe.train.sync_weight_interval > 1
        or recipe.spreads_groups
        or (recipe.mode == "disaggregated" and recipe.train.train_policy.lookahead[0] > 0),
    )
