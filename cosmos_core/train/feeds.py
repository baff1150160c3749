"""Where samples come from: a data set (SFT) or rollouts scored by rewards (RL). SFT and RL differ here and nowhere
else.

What a feed gives at a step is a pure function of (seed, step) and, for rollouts, of the weights: a resumed run asks
for the same step and gets the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cosmos_core.algorithms.base import Sample
from cosmos_core.algorithms.grpo import advantages
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.balance import BalancedSteps, Budget
from cosmos_core.data.order import batch_positions, batches_per_epoch, epoch_order
from cosmos_core.data.prepared import Pairs, Prompts, Sequences
from cosmos_core.errors import StageFailed
from cosmos_core.rewards.runner import ScoreGroups
from cosmos_core.rollout.base import Engine
from cosmos_core.rollout.groups import Sync
from cosmos_core.run.progress import Progress
from cosmos_core.types import Completion, Prompt, Sampling, ScoredGroup


class Feed(Protocol):
    """Gives the samples of a train step."""

    total_steps: int
    steps_per_epoch: int

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Samples of train step `step`, counted from 0, and figures about them."""
        ...


def total_steps(recipe: Recipe, rows_per_step: int, num_rows: int) -> int:
    """Train steps of a run: its epochs, at most `max_num_steps`.

    Raises:
        DataError: the rows do not fill one step.
    """
    steps = recipe.train.epoch * batches_per_epoch(rows_per_step, num_rows, _drops_last(recipe))
    return min(steps, recipe.train.max_num_steps or steps)


def _drops_last(recipe: Recipe) -> bool:
    """Whether rows that fill no batch are left out; prompts that fill no train step always are."""
    policy = recipe.train.train_policy
    return isinstance(policy, GrpoConfig) or policy.dataloader_drop_last


def balanced_steps(rows: Sequences | Pairs, recipe: Recipe) -> BalancedSteps | None:
    """Steps of micro-batches filled by tokens; None: a batch is a number of rows."""
    train, policy = recipe.train, recipe.train.train_policy
    if isinstance(policy, GrpoConfig) or not policy.enable_dp_load_balancing:
        return None
    assert train.max_num_steps is not None  # the schema asks for it
    seed, shuffle = train.order_seed, policy.dataloader_shuffle
    return BalancedSteps(
        _pair_lengths(rows, is_packed=train.sequence_packing) if isinstance(rows, Pairs) else rows.lengths,
        lambda epoch: epoch_order(seed, epoch, len(rows), shuffle),
        Budget(
            micro_batch_tokens(recipe),
            policy.load_balanced_pool_size,
            is_packed=train.sequence_packing,
            prefers_closest=policy.load_balanced_batching_strategy == "prefer_closest",
        ),
        batches_per_step=policy.load_balanced_batches_per_optimizer_step,
        num_epochs=train.epoch,
        max_steps=train.max_num_steps,
    )


def _pair_lengths(pairs: Pairs, *, is_packed: bool) -> np.ndarray:
    """Tokens that each pair takes in a micro-batch: both answers are padded to the longer one, unless packed."""
    lengths = np.stack([pairs.chosen.lengths, pairs.rejected.lengths])
    return lengths.sum(0) if is_packed else 2 * lengths.max(0)


def micro_batch_tokens(recipe: Recipe) -> int:
    """The budget of a micro-batch that is filled by tokens."""
    policy = recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    of_a_row = 2 if policy.trainer_type == "dpo" else 1
    rows = policy.mini_batch * of_a_row
    return policy.load_balanced_max_tokens_for_batch or rows * recipe.policy.model_max_length


class SequenceFeed:
    """Prepared sequences in an order that is a pure function of seed, epoch and position."""

    def __init__(self, rows: Sequences, recipe: Recipe) -> None:
        self._rows, self._recipe = rows, recipe
        self._policy = recipe.train.train_policy
        self._batch = recipe.train.train_batch_per_replica
        self._drop_last = _drops_last(recipe)
        self._balanced = balanced_steps(rows, recipe)
        if self._balanced:
            self.steps_per_epoch, self.total_steps = self._balanced.steps_per_epoch, self._balanced.total_steps
            return
        self.steps_per_epoch = batches_per_epoch(self._batch, len(rows), self._drop_last)
        self.total_steps = total_steps(recipe, self._batch, len(rows))

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """The rows of this step."""
        if self._balanced:
            batches = enumerate(self._balanced.micro_batches(step))
            chosen = [self._sample(place, micro_batch=number) for number, batch in batches for place in batch]
            return chosen, {"epoch": self._balanced.epochs_done(step)}
        policy = self._policy
        places = batch_positions(
            self._recipe.train.order_seed,
            step,
            self._batch,
            len(self._rows),
            policy.dataloader_shuffle,
            self._drop_last,
        )
        found = [self._sample(int(place)) for place in places]
        return found, {"epoch": (step + 1) / self.steps_per_epoch}

    def _sample(self, place: int, micro_batch: int | None = None) -> Sample:
        return Sample(*self._rows[place], images=self._rows.images(place), micro_batch=micro_batch)


class PairFeed:
    """Prepared pairs: of each the chosen sample and behind it the rejected one, in the same micro-batch."""

    def __init__(self, pairs: Pairs, recipe: Recipe) -> None:
        self._pairs, self._recipe = pairs, recipe
        self._lengths = _pair_lengths(pairs, is_packed=False)
        self._batch, self._drop_last = recipe.train.train_batch_per_replica, _drops_last(recipe)
        self._balanced = balanced_steps(pairs, recipe)
        if self._balanced:
            self.steps_per_epoch, self.total_steps = self._balanced.steps_per_epoch, self._balanced.total_steps
        else:
            self.steps_per_epoch = batches_per_epoch(self._batch, len(pairs), self._drop_last)
            self.total_steps = total_steps(recipe, self._batch, len(pairs))
        self.reference: np.ndarray | None = None
        """Log-probability of each chosen and rejected answer; None: there is no reference."""

    @property
    def places(self) -> np.ndarray:
        """The pairs that any step trains on, in the order of the file."""
        steps = range(self.total_steps)
        return np.unique([place for step in steps for batch in self._micro_batches(step) for place in batch])

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """The pairs of this step."""
        found = []
        for number, batch in enumerate(self._micro_batches(step)):
            for place in batch:
                for answer, rows in enumerate((self._pairs.chosen, self._pairs.rejected)):
                    reference = 0.0 if self.reference is None else float(self.reference[place, answer])
                    found.append(Sample(*rows[place], reference_logprob=reference, micro_batch=number))
        epoch = self._balanced.epochs_done(step) if self._balanced else (step + 1) / self.steps_per_epoch
        return found, {"epoch": epoch}

    def _micro_batches(self, step: int) -> list[list[int]]:
        """Pairs of like length together, in micro-batches small enough that each data-parallel rank gets one."""
        if self._balanced:
            return self._balanced.micro_batches(step)
        policy, mesh = self._recipe.train.train_policy, self._recipe.policy.parallelism
        places = batch_positions(
            self._recipe.train.order_seed,
            step,
            self._batch,
            len(self._pairs),
            policy.dataloader_shuffle,
            self._drop_last,
        )
        ordered = sorted(places.tolist(), key=lambda place: -self._lengths[place])
        num_ranks = mesh.dp_replicate_size * abs(mesh.dp_shard_size)
        size = min(policy.mini_batch, -(-len(ordered) // num_ranks))
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]


class RolloutFeed:
    """Prompts answered by an engine under the present weights, scored, and turned into samples with advantages."""

    def __init__(
        self,
        prompts: Prompts,
        engine: Engine,
        score: ScoreGroups,
        recipe: Recipe,
        progress: Progress,
        *,
        between: Callable[[int], None],
    ) -> None:
        """`between(step)` is called between generating and scoring, and may raise to stop: nothing was trained yet."""
        policy = recipe.train.train_policy
        assert isinstance(policy, GrpoConfig)
        self._prompts, self._policy, self._seed = prompts, policy, recipe.train.order_seed
        self._num_prompts = recipe.train.train_batch_per_replica // recipe.rollout.n_generation
        self._source = Sync(
            self._of_step, engine, score, training_sampling(recipe), progress, recipe.rollout.batch_size, between
        )
        self.steps_per_epoch = batches_per_epoch(self._num_prompts, len(prompts), _drops_last(recipe))
        self.total_steps = total_steps(recipe, self._num_prompts, len(prompts))
        self.last: list[ScoredGroup] = []
        """The groups of the newest step."""

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Generate, score, credit."""
        self.last, metrics = self._source.next(step)
        found, counts = samples_of(self.last, normalise_std=not self._policy.unbiased_advantage)
        if not found:
            reason = self.last[0].scores[0].error
            raise StageFailed(f"step {step + 1}: all {counts['invalid']} rewards are invalid; the first: {reason}")
        metrics["reward/constant_groups"] = counts["constant_groups"] / max(1, counts["groups"])
        return found, metrics

    def _of_step(self, step: int) -> list[Prompt]:
        places = batch_positions(
            self._seed, step, self._num_prompts, len(self._prompts), self._policy.dataloader_shuffle
        )
        return [self._prompts[int(place)] for place in places]


def training_sampling(recipe: Recipe) -> Sampling:
    """How training completions are drawn."""
    config = recipe.rollout.sampling_config
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
    )


def samples_of(groups: Sequence[ScoredGroup], *, normalise_std: bool) -> tuple[list[Sample], dict[str, int]]:
    """Completions with a valid score as samples; an invalid one is left out, and its group compared without it."""
    credit, counts = advantages(
        [[score.value for score in group.scores] for group in groups], normalise_std=normalise_std
    )
    found = []
    for group, values in zip(groups, credit, strict=True):
        for completion, score, value in zip(group.group.completions, group.scores, values, strict=True):
            if value is not None and score.value is not None:
                found.append(_sample(group.group.prompt, completion, value, score.value))
    return found, counts


def _sample(prompt: Prompt, completion: Completion, advantage: float, reward: float) -> Sample:
    """Return a sample in which the tokens that the policy drew are learned, and no tool result."""
    ids = np.array([*prompt.token_ids, *completion.token_ids], dtype=np.int64)
    mask = np.array([*(0 for _ in prompt.token_ids), *completion.loss_mask], dtype=np.uint8)
    return Sample(ids, mask, advantage, reward, np.array(completion.logprobs, dtype=np.float32))
