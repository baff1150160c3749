"""Feeds of a recipe, as `train/setup.py` makes them."""

from collections.abc import Sequence
from typing import Any, TypeVar

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.rollout.groups import GroupSource, SyncGroupSource
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.rollout_feed import PromptOrder, RolloutFeed, make_group_filter, make_sync_source
from cosmos_core.types import Prompt, Sampling

RowFeedT = TypeVar("RowFeedT", bound=RowFeed)
RolloutFeedT = TypeVar("RolloutFeedT", bound=RolloutFeed)


def row_feed(rows: Any, recipe: Recipe, feed: type[RowFeedT] = RowFeed) -> RowFeedT:  # type: ignore[assignment]
    """The feed of a training on rows."""
    return feed(rows, recipe.train, recipe.policy.model_max_length, recipe.policy.parallelism.num_dp_ranks)


def rollout_feed(
    prompts: Sequence[Prompt], source: GroupSource, recipe: Recipe, *, sampling: Sampling | None = None,
    algorithm: Algorithm | None = None, feed: type[RolloutFeedT] = RolloutFeed,  # type: ignore[assignment]
) -> RolloutFeedT:  # fmt: skip
    """The feed of a training on rollouts."""
    return feed(prompts, source, algorithm or make_algorithm(recipe, sampling), recipe.train, recipe.rollout)


def prompt_order(prompts: Sequence[Prompt], recipe: Recipe) -> PromptOrder:
    """The order of the prompts of a training."""
    return PromptOrder(prompts, recipe.train, recipe.group_size)


def filtered(sync: SyncGroupSource, order: PromptOrder, recipe: Recipe) -> GroupSource:
    """The source of a training whose engine is in its ranks."""
    group_filter = make_group_filter(recipe.train.train_policy)
    return make_sync_source(sync, order, group_filter, may_split_groups=recipe.may_split_groups)
