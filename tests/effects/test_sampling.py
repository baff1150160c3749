"""Keys of generation: what an engine is asked, for how many prompts at a time, and what advantages come of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.rollout.groups import SyncGroupSource
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.measure import make_completion_settings
from cosmos_core.train.rollout_feed import RolloutFeed, make_training_sampling
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup, Segment
from tests.effects.change import GRPO, Change, changes, difference
from tests.feeds import filtered, prompt_order, rollout_feed

SMALL = {**GRPO, "train.train_batch_per_replica": 8, "rollout.n_generation": 2}
PROMPTS = [Prompt(i, (i,), "", "") for i in range(10)]


class Engine:
    """Answers with one token, and remembers what it was asked."""

    def __init__(self) -> None:
        self.validation_requests: list[tuple[list[int], Sampling]] = []
        self.done: list[Group] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        self.validation_requests.append(([prompt.id for prompt in prompts], sampling))
        turns = [Segment((k,), True, (-1.0,), step) for k in range(sampling.num_completions)]
        self.done = [Group(p, tuple(Completion((turn,), "stop", "") for turn in turns), step) for p in prompts]

    def completed(self) -> list[Group]:
        done, self.done = self.done, []
        return done

    def wake(self) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        pass


def score(groups: Sequence[Group]) -> list[ScoredGroup]:
    """1 for the first answer of a group, 0 for the others."""
    return [ScoredGroup(g, tuple(Score(float(not k)) for k in range(len(g.completions)))) for g in groups]


def rollouts(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What is seen of all steps of a feed."""
    engine: Any = Engine()
    prompts: Any = PROMPTS
    progress = ProgressWriter(folder / "progress.json")
    sampling = make_training_sampling(recipe)
    order = prompt_order(prompts, recipe)
    source = SyncGroupSource(order, engine, score, sampling, progress, recipe.rollout.batch_size)
    feed = rollout_feed(prompts, source, recipe, sampling=sampling)
    samples = [found[0] for found in iter(feed.next_samples, None)]
    return {
        "calls": [len(ids) for ids, _ in engine.validation_requests],
        "ids": [id_ for ids, _ in engine.validation_requests for id_ in ids],
        "sampling": engine.validation_requests[0][1],
        "steps": feed.total_steps,
        "advantages": sorted({round(sample.advantage, 4) for sample in samples[0]}),
    }


@changes(
    (Change("rollout.sampling_config.temperature", 0.7, SMALL), {"temperature": 0.7}),
    (Change("rollout.sampling_config.top_p", 0.9, SMALL), {"top_p": 0.9}),
    (Change("rollout.sampling_config.top_k", 20, SMALL), {"top_k": 20}),
    (Change("rollout.sampling_config.repetition_penalty", 1.1, SMALL), {"repetition_penalty": 1.1}),
    (Change("rollout.max_response_length", 64, SMALL), {"max_tokens": 64}),
    (Change("rollout.n_generation", 4, SMALL), {"num_completions": 4}),
    (Change("rollout.seed", 7, SMALL), {"seed": 7}),
    (Change("train.seed", 8, SMALL), {"seed": 8}),
)
def test_it_changes_what_the_engine_is_asked(change: Change, expected: dict[str, Any], tmp_path: Path) -> None:
    before, after = (_values(rollouts(side, tmp_path)["sampling"]) for side in (change.before, change.after))
    assert difference(before, after) == expected


@changes(
    (Change("validation.temperature", 0.7, GRPO), {"temperature": 0.7}),
    (Change("validation.top_p", 0.9, GRPO), {"top_p": 0.9}),
    (Change("validation.top_k", 20, GRPO), {"top_k": 20}),
    (Change("validation.repetition_penalty", 1.1, GRPO), {"repetition_penalty": 1.1}),
    (Change("validation.max_response_length", 64, GRPO), {"max_tokens": 64}),
    (Change("validation.n_generation", 4, GRPO), {"num_completions": 4}),
)
def test_it_changes_how_held_out_answers_are_drawn(change: Change, expected: dict[str, Any]) -> None:
    before, after = (make_completion_settings(side).sampling for side in (change.before, change.after))
    assert difference(_values(before), _values(after)) == expected


@changes(
    (Change("rollout.batch_size", 3, SMALL), {"calls": [3, 1, 3, 1]}),
    (Change("train.train_policy.unbiased_advantage", True, SMALL), {"advantages": [-0.5, 0.5]}),
    (Change("train.train_policy.dataloader_shuffle", False, SMALL), {"ids": [0, 1, 2, 3, 4, 5, 6, 7]}),
)
def test_it_changes_the_rollouts_of_a_run(change: Change, expected: dict[str, Any], tmp_path: Path) -> None:
    before, after = (rollouts(side, tmp_path) for side in (change.before, change.after))
    assert before["calls"] == [1] * 8 and before["advantages"] == [-1.0, 1.0]
    assert difference(before, after) == expected


FOURS = {**GRPO, "train.train_batch_per_replica": 8, "rollout.n_generation": 4}


@changes(
    (Change("train.train_policy.algo", "rloo", FOURS), {"advantages": [-0.3333, 1.0]}),
    (Change("train.train_policy.max_token_len_per_mini_batch", 6, FOURS), {"micro_batches": [2, 2, 2, 2]}),
    (Change("train.train_policy.min_filter_prefix_tokens", 1, FOURS), {"learned": [1] * 8}),
    (Change("train.train_policy.mask_truncated_completions", True, FOURS), {"learned": [2] * 6}),
)
def test_it_changes_the_samples_of_completions(change: Change, expected: dict[str, Any]) -> None:
    """Two groups of four completions: a token that all share and one of their own, behind a prompt of one token. The
    third is cut off."""
    found: list[dict[str, Any]] = []
    for side in (change.before, change.after):
        turns = [Segment((7, 10 + k), True, (-1.0, -1.0), 0) for k in range(4)]
        ends: list[Any] = ["stop", "stop", "length", "stop"]
        drawn = tuple(Completion((turn,), end, "") for turn, end in zip(turns, ends, strict=True))
        groups = [Group(p, drawn, 0) for p in PROMPTS[:2]]
        samples, _ = make_algorithm(side).credit(score(groups))
        batches = [sample.micro_batch for sample in samples if sample.micro_batch is not None]
        found.append({
            "advantages": sorted({round(sample.advantage, 4) for sample in samples}),
            "micro_batches": sorted(Counter(batches).values()),
            "learned": [sample.num_learned for sample in samples],
        })  # fmt: skip
    assert difference(*found) == expected


IN_ORDER = {**SMALL, "train.train_policy.dataloader_shuffle": False}
DAPO = {
    **IN_ORDER, "train.train_policy.variant": "dapo",
    "train.train_policy.reward_function": ["exact_match", "mine.py:odd"],
}  # fmt: skip


@changes(
    (Change("train.train_policy.variant", "dapo", IN_ORDER), [[0, 2, 4, 6], [8]]),
    (Change("train.train_policy.filter_reward_metric", ["odd"], DAPO), [[1, 3, 5, 7], [9]]),
    (Change("train.train_policy.max_retry_for_on_policy", 1, DAPO), [[0, 2, 4], [6, 8]]),
)
def test_it_changes_which_groups_are_trained(change: Change, expected: list[list[int]], tmp_path: Path) -> None:
    """Of four groups a step; completions differ in the reward of even prompts, in the metric `odd` of the others."""
    assert trained(change.after, tmp_path) == expected
    assert trained(change.before, tmp_path) == (
        [[0, 1, 2, 3], [4, 5, 6, 7]] if change.key.endswith("variant") else [[0, 2, 4, 6], [8]]
    )


def trained(recipe: Recipe, folder: Path) -> list[list[int]]:
    """The prompts of each train step. Another feed takes over after each, as a resumed run does."""

    def by_parity(groups: Sequence[Group]) -> list[ScoredGroup]:
        return [
            ScoredGroup(
                g, tuple(Score(float(k * (1 - g.prompt.id % 2)), {"odd": k * (g.prompt.id % 2)}) for k in (0, 1))
            )
            for g in groups
        ]

    def feed() -> RolloutFeed:
        prompts: Any = PROMPTS
        engine: Any = Engine()
        order, sampling = prompt_order(prompts, recipe), make_training_sampling(recipe)
        sync = SyncGroupSource(
            order, engine, by_parity, sampling, ProgressWriter(folder / "progress.json"), recipe.rollout.batch_size
        )
        return rollout_feed(prompts, filtered(sync, order, recipe), recipe, sampling=sampling)

    steps: list[list[int]] = []
    state: dict[str, Any] = {"step": 0, "source": {"drawn": 0}}
    while True:
        own = feed()
        own.load_state_dict(state)
        found = own.next_samples()
        if found is None:
            return steps
        steps.append(sorted({int(sample.input_ids[0]) for sample in found[0]}))
        state = own.state_dict()


@changes(Change("train.train_policy.dataloader_seed", 3, SMALL))
def test_it_changes_the_order_of_the_prompts(change: Change, tmp_path: Path) -> None:
    before, after = (rollouts(side, tmp_path)["ids"] for side in (change.before, change.after))
    assert before != after
    assert len(set(before)) == len(set(after)) == 8


def _values(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}
