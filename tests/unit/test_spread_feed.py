"""Train steps of other numbers of completions than whole groups have: each is trained once, resumed at any step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.checkpoint.state import TrainState, json_values, named_tensors, restore_json_values
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.order import epoch_order
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.rollout.groups import FilteredGroupSource, GroupFilter, GroupPlan, SyncGroupSource
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.feeds import unused_rows_message
from cosmos_core.train.rollout_feed import RolloutFeed, make_training_sampling
from cosmos_core.train.spread_feed import SampleQueue, SplitGroupFeed
from cosmos_core.types import Completion, Group, ImageRef, Prompt, Sampling, Score, ScoredGroup, Segment
from tests.effects.change import GRPO, recipe
from tests.feeds import filtered, prompt_order, rollout_feed
from tests.unit.replicas import Drawing, Threaded, fleet_of, source_of, weights
from tests.unit.test_rollout_groups import Shuffling, sync_of

PROMPTS = [Prompt(i, (i, 7), "", "") for i in range(5)]
SEED = {**GRPO, "train.seed": 3, "rollout.backend": "hf"}
SHAPES = [(2, 6), (6, 4), (3, 4), (7, 4), (11, 3)]
APART = {(3, 4), (11, 3)}
"""Of each kind one: steps that are smaller than a group, and larger."""
IN_TURNS = {(2, 6), (7, 4)}
PLACES = [
    pytest.param(*shape, is_separate, marks=[] if shape in (APART if is_separate else IN_TURNS) else pytest.mark.full)
    for is_separate in (False, True) for shape in SHAPES
]  # fmt: skip


class Numbering(Drawing):
    """An engine whose completions say which they are: prompt, number in the group, step, version."""

    def completed(self) -> list[Group]:
        if not self.waiting:
            return []
        prompt, sampling, step = self.waiting.pop(0)
        rows = [(prompt.id, k, step, self.version) for k in range(sampling.num_completions)]
        drawn = [Completion((Segment(row, True, (-1.0,) * 4, self.version),), "stop", "") for row in rows]
        return [Group(prompt, tuple(drawn), step)]


def score(groups: Sequence[Group]) -> list[ScoredGroup]:
    """Every seventh completion has no valid reward."""
    values = lambda group: [(5 * group.prompt.id + k) % 7 for k in range(len(group.completions))]  # noqa: E731
    return [ScoredGroup(each, tuple(Score(float(v)) if v else Score(None) for v in values(each))) for each in groups]


@dataclass
class Step:
    completions: list[tuple[int, ...]]
    advantages: list[float]
    metrics: dict[str, float]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a feed through a checkpoint's JSON and tensors."""
    live = TrainState(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), feed=state)
    tensors, values = named_tensors(live), json.loads(json.dumps(json_values(live)))
    restore_json_values(live, values, {name: tensor.clone() for name, tensor in tensors.items()})
    return live.feed


def steps_of(batch: int, size: int, folder: Path, *, is_separate: bool, cut: bool, **settings: Any) -> list[Step]:
    """All steps; with `cut` each by a process of its own, which knows what the checkpoint of the one before says."""
    tables = {**SEED, "train.train_batch_per_replica": batch, "rollout.n_generation": size, "train.epoch": 2}
    tables |= settings
    config, found = recipe(tables), list[Step]()
    state: dict[str, Any] | None = None
    with ExitStack() as stack:
        while True:
            feed, publish = _feed(config, folder, stack, is_separate=is_separate, step=len(found))
            if state is not None:
                feed.load_state_dict(saved(state))
            while (given := feed.next_samples()) is not None:
                samples, metrics = given
                rows = [tuple(int(token) for token in sample.input_ids[2:]) for sample in samples]
                found.append(Step(rows, [sample.advantage for sample in samples], metrics))
                publish(len(found))
                if cut:
                    state = feed.state_dict()
                    break
            if given is None:
                return found
            stack.close()


def _feed(config: Any, folder: Path, stack: ExitStack, *, is_separate: bool, step: int) -> tuple[SplitGroupFeed, Any]:
    order, sampling = prompt_order(PROMPTS, config), make_training_sampling(config)
    assert sampling.may_use_old_weights
    groups = GroupPlan(config.train.train_batch_per_replica, config.rollout.n_generation)
    if not is_separate:
        engine: Any = Numbering()
        engine.version = step
        sync = SyncGroupSource(order, engine, score, sampling, ProgressWriter(folder / "p.json"), 2)
        publish = lambda version: setattr(engine, "version", version)  # noqa: E731
        source = filtered(sync, order, config)
        return rollout_feed(PROMPTS, source, config, algorithm=Grpo(GrpoConfig()), feed=SplitGroupFeed), publish
    fleet = stack.enter_context(fleet_of(Threaded(Numbering)))
    fleet.load_weights(step, weights(step))
    source = source_of(
        fleet, folder, take_prompts=order.take_prompts, group_plan=groups, score=score, max_lag=0, max_steps_ahead=1
    )
    source.sampling = sampling
    stack.callback(source.close)
    feed = rollout_feed(PROMPTS, source, config, algorithm=Grpo(GrpoConfig()), feed=SplitGroupFeed)
    return feed, lambda version: fleet.load_weights(version, weights(version))


@pytest.mark.parametrize(("batch", "size"), SHAPES)
def test_a_group_belongs_to_the_first_step_that_has_one_of_its_completions(batch: int, size: int) -> None:
    steps = GroupPlan(batch, size)
    for step in range(40):
        stream = range(step * batch, (step + 1) * batch)
        new = sorted({i // size for i in stream} - {i // size for i in range(step * batch)})
        assert [steps.get_step_of_group(position) for position in new] == [step] * len(new)
        assert list(range(steps.get_first_position(step), steps.get_first_position(step + 1))) == new
        assert steps.num_groups(step) == len(new)


@pytest.mark.parametrize(("batch", "size", "is_separate"), PLACES)
def test_every_completion_is_trained_once_and_a_kill_at_any_step_changes_nothing(
    batch: int, size: int, is_separate: bool, tmp_path: Path
) -> None:
    whole = steps_of(batch, size, tmp_path, is_separate=is_separate, cut=False)
    order = [PROMPTS[int(i)] for epoch in range(2) for i in epoch_order(3, epoch, len(PROMPTS), True)]
    stream = [(prompt.id, k, position) for position, prompt in enumerate(order) for k in range(size)]
    is_valid = lambda prompt, k: (5 * prompt + k) % 7 > 0  # noqa: E731
    assert len(whole) == -(-len(stream) // batch)
    for number, step in enumerate(whole):
        mine = [each for each in stream[number * batch : (number + 1) * batch] if is_valid(*each[:2])]
        assert [(prompt, k) for prompt, k, *_ in step.completions] == [each[:2] for each in mine]
        began = [position * size // batch for _, _, position in mine]  # the step that generates the group
        assert [(at, version) for _, _, at, version in step.completions] == [(at, at) for at in began]
        expected = []
        for prompt, k, _ in mine:
            rewards = np.array([(5 * prompt + j) % 7 for j in range(size) if is_valid(prompt, j)], dtype=np.float64)
            expected.append(((5 * prompt + k) % 7 - rewards.mean()) / (rewards.std() + 1e-6))
        assert step.advantages == pytest.approx(expected, abs=1e-9)
        assert step.metrics["rollout/version_lag"] >= max((number - at for at in began), default=0)
        assert "reward/mean" in step.metrics
    cut = steps_of(batch, size, tmp_path, is_separate=is_separate, cut=True)
    assert [(step.completions, step.advantages) for step in cut] == [(s.completions, s.advantages) for s in whole]
    assert [step.metrics["reward/mean"] for step in cut] == [step.metrics["reward/mean"] for step in whole]


def test_steps_of_dynamic_sampling_are_full_of_groups_of_use(tmp_path: Path) -> None:
    settings = {"train.train_policy.variant": "dapo", "train.epoch": 1}
    whole = steps_of(3, 2, tmp_path, is_separate=False, cut=False, **settings)
    cut = steps_of(3, 2, tmp_path, is_separate=False, cut=True, **settings)
    assert [step.completions for step in cut] == [step.completions for step in whole]
    seen = [row[:2] for step in whole for row in step.completions]
    order = [int(i) for i in epoch_order(3, 0, len(PROMPTS), True)]
    kept = [i for i in order if all((5 * i + k) % 7 for k in range(2))]  # two valid rewards, which differ
    assert seen == [(i, k) for i in kept for k in range(2)]
    assert [len(step.completions) for step in whole] == [3] * (len(seen) // 3) + [len(seen) % 3] * bool(len(seen) % 3)


def test_the_last_step_that_is_asked_for_leaves_the_rest(tmp_path: Path) -> None:
    found = steps_of(6, 4, tmp_path, is_separate=True, cut=False, **{"train.max_num_steps": 2})
    assert len(found) == 2 and len({row[0] for step in found for row in step.completions}) == 3


@pytest.mark.parametrize("excludes", [False, True])
def test_a_truncated_completion_that_is_not_trained_keeps_its_position(excludes: bool) -> None:
    """Two groups of three, of which the middle completion of the first is truncated and one reward is invalid."""
    reasons, values = (("stop", "length", "stop"), ("stop", "stop", "stop")), ((0.0, 1.0, 2.0), (None, 1.0, 3.0))
    groups = []
    for g in range(2):
        segments = [Segment((10 * g + k, 1), True, (-1.0, -1.0), 0) for k in range(3)]
        made = tuple(Completion((segment,), why, "") for segment, why in zip(segments, reasons[g], strict=True))
        groups.append(ScoredGroup(Group(PROMPTS[g], made, 0), tuple(map(Score, values[g]))))
    carried = SampleQueue()
    carried.add(groups, *Grpo(GrpoConfig(mask_truncated_completions=excludes)).credit(groups))
    steps = [[int(each.input_ids[2]) for each in carried.take_samples(2, 0)[0]] for _ in range(3)]
    assert steps == ([[0], [2], [11, 12]] if excludes else [[0, 1], [2], [11, 12]])


@pytest.mark.parametrize(("feed", "last_steps"), [(RolloutFeed, [2, 2]), (SplitGroupFeed, [4, 2])])
def test_a_training_has_no_step_behind_the_last_prompt_unless_completions_are_left(
    feed: type[RolloutFeed], last_steps: list[int], tmp_path: Path
) -> None:
    """A training that starts there from the checkpoint of another run would do nothing."""
    config = recipe({**GRPO, "train.train_batch_per_replica": 3, "rollout.n_generation": 2})
    source = FilteredGroupSource(sync_of(Shuffling(), tmp_path, lambda group: 0.0, 2), lambda start, count: [], 2)
    found = rollout_feed(PROMPTS, source, config, algorithm=Grpo(GrpoConfig()), feed=feed)
    for entries, last_step in zip(([[0, None]], []), last_steps, strict=True):
        found.total_steps = 4
        found.load_state_dict({"step": 2, "source": {"drawn": 5}, "carried": {"entries": entries, "metrics": {}}})
        assert found.total_steps == last_step


def test_samples_that_cannot_be_told_apart_are_refused_with_the_remedy() -> None:
    group = Group(PROMPTS[0], (Completion((Segment((1,), True, (-1.0,), 0),), "stop", ""),) * 3, 0)
    with pytest.raises(ConfigError, match=r"1 samples of 3 completions .* a multiple of rollout\.n_generation"):
        SampleQueue().add([ScoredGroup(group, (Score(1.0),) * 3)], [None], {})


def test_batches_are_steps_of_their_own_size() -> None:
    sampling: Sampling = make_training_sampling(recipe({**SEED, "train.train_batch_per_replica": 32}))
    assert not sampling.may_use_old_weights
    assert [b - a for a, b in pairwise(GroupPlan(32, 16).get_first_position(step) for step in range(4))] == [2, 2, 2]


def test_samples_that_show_images_are_kept_as_they_are() -> None:
    images = (ImageRef(None, b"\x00\xff\x10", "s"), ImageRef("a.png", None, "t"))
    ids, mask = np.array([3, 4, 5]), np.array([0, 0, 1], dtype=np.uint8)
    sample = Sample(ids, mask, 0.5, 1.0, np.array([np.nan], dtype=np.float32), images=images)
    group = Group(PROMPTS[0], (Completion((Segment((5,), True, (-1.0,), 7),), "stop", ""),) * 2, 7)
    carried, again = SampleQueue(), SampleQueue()
    carried.add([ScoredGroup(group, (Score(1.0), Score(None)))], [sample], {"reward/mean": 1.0})
    again.load_state_dict(saved(carried.state_dict()))
    [found], said = again.take_samples(2, 9)
    assert found.images == images and (found.advantage, found.reward, found.micro_batch) == (0.5, 1.0, None)
    for name in ("input_ids", "loss_mask", "rollout_logprobs"):
        first, second = getattr(found, name), getattr(sample, name)
        assert first.dtype == second.dtype and np.array_equal(first, second, equal_nan=True)
    assert said == {"reward/mean": 1.0, "rollout/version_lag": 2.0, "rollout/version_lag_mean": 2.0}


def test_prompts_that_fill_no_step_are_left_out_unless_a_filter_takes_them_in_the_next_epoch() -> None:
    settings = {**SEED, "train.train_batch_per_replica": 8, "rollout.n_generation": 4}
    assert "1 of 5 rows fill no batch of 2" in unused_rows_message(recipe(settings).train, 4, 5)
    assert unused_rows_message(recipe({**settings, "train.train_policy.variant": "dapo"}).train, 4, 5) == ""


@pytest.mark.parametrize(("batch", "feed"), [(4, RolloutFeed), (3, SplitGroupFeed)])
def test_a_later_step_without_any_difference_learns_nothing_and_the_next_one_goes_on(
    batch: int, feed: type[RolloutFeed], tmp_path: Path
) -> None:
    """With dynamic sampling and a limit of retries; of the prompts only the last has completions that differ."""
    config = recipe({
        **GRPO, "train.train_policy.variant": "dapo", "train.train_policy.max_retry_for_on_policy": 1,
        "train.train_batch_per_replica": batch, "rollout.n_generation": 2, "train.epoch": 2,
    })  # fmt: skip
    sync = sync_of(Shuffling(), tmp_path, lambda group: float(group.prompt.id < 4), 2)
    source = FilteredGroupSource(sync, lambda start, count: (2 * PROMPTS)[start : start + count], 2, GroupFilter((), 1))
    steps = rollout_feed(PROMPTS, source, config, algorithm=Grpo(GrpoConfig()), feed=feed)
    with pytest.raises(StageFailed, match="step 1: the rewards inside each of 4 groups are equal; raise train"):
        steps.next_samples()
    steps.load_state_dict({"step": 1, "source": {"drawn": 0}})
    (nothing, metrics), (samples, _) = steps.next_samples() or ([], {}), steps.next_samples() or ([], {})
    assert nothing == [] and metrics["rollout/sampled_groups"] == 4.0 and metrics["rollout/filtered_positive"] == 1.0
    assert [sample.input_ids[0] for sample in samples] == [4, 4] and steps.step == 3
