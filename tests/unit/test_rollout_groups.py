"""Completions of several segments, the seam of an engine, and the groups of a train step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.errors import ConfigError, RewardError, StageFailed
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.rollout import publish
from cosmos_core.rollout.base import Bucket, EngineSettings, EngineWrapper, LoadReceipt, WeightReceiver, generate
from cosmos_core.rollout.groups import FilteredGroupSource, SyncGroupSource, check_scores
from cosmos_core.rollout.publish import WeightPublisher, make_probe_token_ids
from cosmos_core.rollout.registry import make_engine
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.pass_rates import PassRates
from cosmos_core.train.rollout_feed import RolloutFeed
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup, Segment
from tests.effects.change import GRPO, recipe
from tests.feeds import rollout_feed
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import sequence_logprobs

PROMPTS = [Prompt(i, (i, 7), "", "") for i in range(5)]
SAMPLING = Sampling(num_completions=2)


def turn(token_ids: Sequence[int], version: int = 0) -> Segment:
    return Segment(tuple(token_ids), True, tuple(-token / 8 for token in token_ids), version)


def test_a_tool_result_is_seen_by_the_model_and_not_learned() -> None:
    tool = Segment((90, 91, 92), False, (), 3)
    spoken = Completion((turn((4, 5), 3), tool, turn((6,), 4)), "stop", "x")
    assert spoken.token_ids == (4, 5, 90, 91, 92, 6)
    assert spoken.loss_mask == (1, 1, 0, 0, 0, 1)
    assert spoken.logprobs == (-0.5, -0.625, -0.75)
    assert spoken.num_sampled == 3 and spoken.version == 3
    short = Completion((turn((9,), 5),), "length", "y")
    group = Group(Prompt(0, (1, 2), "", ""), (spoken, short), 5)
    assert group.version == 3
    credited = Grpo(GrpoConfig(unbiased_advantage=True)).credit([ScoredGroup(group, (Score(1.0), Score(0.0)))])
    [sample, other], _ = credited
    assert sample.input_ids.tolist() == [1, 2, 4, 5, 90, 91, 92, 6]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1] and sample.num_learned == 3
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs.tolist() == [-0.5, -0.625, -0.75] and sample.rollout_logprobs.dtype == np.float32
    assert [sample.advantage, other.advantage] == [0.5, -0.5]
    with pytest.raises(AssertionError):
        Segment((1, 2), False, (-0.5, -0.5), 0)


class Shuffling:
    """An engine that completes the newest prompt first, one group at a time, and records what happens to it."""

    weight_format = "checkpoint"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.waiting: list[Group] = []
        self.seeds: list[tuple[int, int, int]] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        self.events.append(f"submit {[prompt.id for prompt in prompts]}")
        self.seeds += [(sampling.seed, step, prompt.id) for prompt in prompts]
        rows = [Completion((turn((k + 1,), step),), "stop", "") for k in range(sampling.num_completions)]
        self.waiting += [Group(prompt, tuple(rows), step) for prompt in prompts]

    def completed(self) -> list[Group]:
        return [self.waiting.pop()] if self.waiting else []

    def wake(self) -> None:
        self.events.append("wake")

    def sleep(self, level: int = 1) -> None:
        self.events.append(f"sleep {level}")


def test_groups_that_come_in_any_order_are_given_in_that_of_the_prompts() -> None:
    engine: Any = Shuffling()
    found = generate(engine, PROMPTS, SAMPLING, 6)
    assert [(group.prompt.id, group.step, group.version) for group in found] == [(i, 6, 6) for i in range(5)]
    assert generate(engine, [], SAMPLING, 6) == []
    again = generate(engine, [PROMPTS[1], PROMPTS[0], PROMPTS[1]], SAMPLING, 6)
    assert [group.prompt.id for group in again] == [1, 0, 1], "a prompt may come twice"


def sync_of(engine: Any, folder: Path, second: Callable[[Group], float | None], size: int, **settings: Any) -> Any:
    """A source of batches of `size` prompts, whose groups have a reward of 1 and a second one."""

    def score(groups: Sequence[Group]) -> list[ScoredGroup]:
        engine.events.append(f"score {len(groups)}")
        return [ScoredGroup(group, (Score(1.0), Score(second(group)))) for group in groups]

    settings.setdefault("get_step_prompts", lambda step: PROMPTS[step:])
    return SyncGroupSource(
        engine=engine,
        score=score,
        sampling=SAMPLING,
        progress=ProgressWriter(folder / "p.json"),
        batch_size=size,
        **settings,
    )


def test_a_step_is_generated_in_batches_and_can_be_stopped_between_them(tmp_path: Path) -> None:
    engine: Any = Shuffling()
    stops: list[int] = []
    source = sync_of(engine, tmp_path, lambda group: None, 2, on_wait=lambda: stops.append(0))
    groups, metrics = source.next_groups(0)
    assert engine.events == ["wake", "submit [0, 1]", "submit [2, 3]", "submit [4]", "sleep 2", "score 5"]
    assert [group.group.prompt.id for group in groups] == [0, 1, 2, 3, 4] and stops == [0, 0, 0, 0]
    assert metrics["reward/mean"] == 1.0 and metrics["reward/invalid"] == 5.0
    assert metrics["completion/length_mean"] == 1.0 and metrics["rollout/version_lag"] == 0.0
    assert source.state_dict() == {}

    def refuse() -> None:
        raise RuntimeError("stopped")

    assert metrics["rollout/groups_of_lag_0"] == 5.0 and metrics["rollout/version_lag_mean"] == 0.0

    source.on_wait = refuse
    with pytest.raises(RuntimeError, match="stopped"):
        source.next_groups(3)
    assert engine.events[-2:] == ["wake", "submit [3, 4]"]


def test_a_step_whose_scores_a_signal_may_have_disturbed_is_not_trained(tmp_path: Path) -> None:
    """A signal to all processes of a job also ends those that a reward has started."""
    asked: list[int] = []
    stop = lambda: asked and pytest.fail("stopped")  # noqa: E731
    sync = sync_of(Shuffling(), tmp_path, lambda group: asked.append(group.prompt.id), 5, on_wait=stop)
    source = FilteredGroupSource(sync, lambda start, count: PROMPTS[start : start + count], 2)
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        source.next_groups(0)
    assert source.state_dict() == {"drawn": 0}


def test_an_engine_keeps_its_weights_where_it_generates_with_them_again(tmp_path: Path) -> None:
    engine: Any = Shuffling()
    source = sync_of(engine, tmp_path, lambda _: 0.0, 1, get_step_prompts=lambda _: PROMPTS[:1], publish_interval=3)
    for step in range(6):
        source.next_groups(step)
    assert [event for event in engine.events if "sleep" in event] == ["sleep 1", "sleep 1", "sleep 2"] * 2


def test_who_stops_while_groups_are_drawn_draws_the_same_prompts_again(tmp_path: Path) -> None:
    engine: Any = Shuffling()

    def refuse() -> None:
        if len(engine.events) > 3:
            raise RuntimeError("stopped")

    sync = sync_of(engine, tmp_path, lambda group: float(group.prompt.id % 2), 2, on_wait=refuse)
    source = FilteredGroupSource(sync, lambda start, count: PROMPTS[start : start + count], 2)
    with pytest.raises(RuntimeError, match="stopped"):
        source.next_groups(0)
    assert engine.events == ["wake", "submit [0, 1]", "score 2", "submit [2]"] and source.state_dict() == {"drawn": 0}
    sync.on_wait = lambda: None
    engine.waiting.clear()
    groups, _ = source.next_groups(0)
    assert [scored.group.prompt.id for scored in groups] == [0, 2] and source.state_dict() == {"drawn": 3}


def test_a_prompt_that_a_step_draws_in_two_epochs_is_completed_in_two_ways(tmp_path: Path) -> None:
    engine: Any = Shuffling()
    sync = sync_of(engine, tmp_path, lambda group: float(len(engine.seeds) <= 9), 9)
    source = FilteredGroupSource(sync, lambda start, count: [PROMPTS[i % 3] for i in range(start, start + count)], 4)
    groups, metrics = source.next_groups(7)
    assert [scored.group.prompt.id for scored in groups] == [2, 0, 1, 2] and metrics["rollout/sampled_groups"] == 12
    assert len(set(engine.seeds)) == 12, "each request of a step has seeds of its own"
    assert [seeds for seeds in engine.seeds if seeds[0] == SAMPLING.seed] == [(SAMPLING.seed, 7, i) for i in range(3)]


def dynamic_feed(folder: Path, difference: float) -> RolloutFeed:
    """Steps of two groups, of which those are of use whose completions differ."""
    config = recipe({
        **GRPO, "train.train_policy.variant": "dapo", "train.train_batch_per_replica": 4, "rollout.n_generation": 2,
    })  # fmt: skip
    sync = sync_of(Shuffling(), folder, lambda group: 1.0 - difference, 2)
    source = FilteredGroupSource(sync, lambda start, count: PROMPTS[start : start + count], 2)
    return rollout_feed(PROMPTS, source, config, algorithm=Grpo(GrpoConfig()))


def test_a_feed_reads_no_prompt_before_it_is_needed(tmp_path: Path) -> None:
    class Unread(list[Prompt]):
        def __iter__(self) -> Iterator[Prompt]:
            raise AssertionError("all prompts are read")

    source = dynamic_feed(tmp_path, 1.0)._group_source
    feed = rollout_feed(Unread(PROMPTS), source, recipe(GRPO), algorithm=Grpo(GrpoConfig()))
    with pytest.raises(AssertionError, match="all prompts are read"):
        feed.find_max_sample_tokens()  # only where settings are measured


def test_prompts_that_end_before_anything_was_learned_fail_the_stage(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="step 1: the rewards inside each of 5 groups are equal"):
        dynamic_feed(tmp_path, 0.0).next_samples()
    feed = dynamic_feed(tmp_path, 0.0)
    feed.step = 1  # something was
    assert feed.next_samples() is None
    assert dynamic_feed(tmp_path, 1.0).next_samples() is not None


def test_pass_rates_count_dropped_groups_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def rates(feed: RolloutFeed, name: str) -> list[dict[str, Any]]:
        (tmp_path / name).mkdir()
        feed.write_pass_rates(tmp_path / name)
        return [json.loads(line) for line in (tmp_path / name / "pass_rates.jsonl").read_text().splitlines()]

    whole, first, second = (dynamic_feed(tmp_path, 0.5) for _ in range(3))
    assert whole.next_samples() and whole.next_samples() and first.next_samples()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next_samples()
    assert rates(whole, "whole") == rates(second, "second")
    lines = rates(first, "first")
    assert [(each["drawn"], each["completions"], each["pass_rate"], each["mean_reward"]) for each in lines] == [
        (1, 2, 0.5, 0.75), (1, 2, 0.5, 0.75), *[(0, 0, None, None)] * (len(PROMPTS) - 2)
    ]  # fmt: skip
    dropped = dynamic_feed(tmp_path, 0.0)
    with pytest.raises(StageFailed):
        dropped.next_samples()
    assert [each["pass_rate"] for each in rates(dropped, "dropped")] == [1.0] * len(PROMPTS)


@pytest.mark.parametrize(("full", "rate"), [(1.0, 1.0), (None, None)])
def test_without_a_full_reward_no_pass_rate_is_known(full: float | None, rate: float | None, tmp_path: Path) -> None:
    rates = PassRates(lambda *score: full)
    rates.add([ScoredGroup(Group(PROMPTS[0], (), 0), (Score(1.0),))])
    rates.write(tmp_path, PROMPTS[:1])
    line = json.loads((tmp_path / "pass_rates.jsonl").read_text())
    assert (line["pass_rate"], line["mean_reward"], line["completions"]) == (rate, 1.0, 1)


def test_a_step_may_lack_the_rows_to_which_the_reward_of_a_filter_applies() -> None:
    def scored(source: str) -> list[ScoredGroup]:
        group = Group(Prompt(0, (1,), "", "", source=source), (Completion((turn((4,)),), "stop", ""),), 0)
        return [ScoredGroup(group, (Score(1.0, {"length": 1.0}),))]

    for source in ("", "words"):
        check_scores(0, scored(source), ["accuracy", "accuracy/strict"])
        with pytest.raises(RewardError, match="no reward reports 'length/strict'; take of 'length'"):
            check_scores(0, scored(source), ["length/strict"])


def test_dynamic_sampling_goes_on_behind_the_prompts_of_a_training_without_it(tmp_path: Path) -> None:
    feed = dynamic_feed(tmp_path, 1.0)
    feed.load_state_dict({"step": 1, "source": {}})
    assert feed.state_dict() == {"step": 1, "source": {"drawn": 2}}
    feed.load_state_dict({"step": 1, "source": {"drawn": 3}})
    assert feed.state_dict() == {"step": 1, "source": {"drawn": 3}}


class Recording:
    """An engine that keeps what it is given, or loses some of it."""

    weight_format = "checkpoint"

    def __init__(self, loses: str = "", off: float = 0.0) -> None:
        self.loses, self.off, self.probed = loses, off, 0
        self.sizes: list[int] = []
        self.taken: dict[str, torch.Tensor] = {}
        self.model: Any = None

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        self.sizes = []
        for bucket in buckets:
            self.sizes.append(sum({t.data_ptr(): t.nbytes for _, t in bucket}.values()))
            self.taken |= {name: tensor for name, tensor in bucket if name != self.loses}
        return LoadReceipt(version, len(self.taken))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self.probed += 1
        return (scored(self.model, token_ids) + self.off).tolist()


def scored(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        return sequence_logprobs(model, ids, torch.ones_like(ids))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def publisher(folder: Path, engine: Any, **settings: Any) -> WeightPublisher:
    model = engine.model = load_model(str(folder), dtype=torch.float32)
    return WeightPublisher(engine, model, lambda ids: scored(model, ids), torch.float32, **settings)


def test_all_weights_are_sent_in_buckets_by_reference_and_tied_ones_by_both_names(folder: Path) -> None:
    engine = Recording()
    sender = publisher(folder, engine, bucket_bytes=100_000)
    metrics = sender.publish(3)
    assert metrics.keys() == {"sync/version", "sync/bytes", "time/sync"} and metrics["sync/version"] == 3.0
    sent = {tensor.data_ptr(): tensor.nbytes for tensor in engine.taken.values()}
    assert metrics["sync/bytes"] == sum(sent.values())
    state = sender.model.state_dict()
    assert engine.taken.keys() == state.keys() and "lm_head.weight" in state
    assert all(engine.taken[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())
    assert len(engine.sizes) > 2 and max(engine.sizes) <= 100_000
    assert sum(engine.sizes) == sum(p.nbytes for p in sender.model.parameters())
    fused = [n for n in state if "layers.0.self_attn." in n and n.endswith("proj.weight")]
    whole = publish._collect_weight_groups(sender.model)
    assert len({id(unit) for unit in whole for name in fused if name in unit.key_by_base_name}) == 1, (
        "they are fused by engines"
    )


def test_a_tensor_that_the_engine_did_not_take_ends_the_stage(folder: Path) -> None:
    sender = publisher(folder, Recording(loses="model.norm.weight"))
    with pytest.raises(StageFailed, match=r"acknowledges 24 tensors of version 1, not 25 of version 1"):
        sender.publish(1)


def test_a_receiver_notices_what_did_not_come_and_what_never_came_before() -> None:
    receiver, tensor = WeightReceiver(), torch.zeros(1)

    def load(*names: str) -> LoadReceipt:
        for _ in receiver.buckets([[(name, tensor) for name in names]]):
            pass
        return receiver.acknowledge(1)

    assert load("a", "b") == LoadReceipt(1, 2)
    with pytest.raises(StageFailed, match="1 tensors did not come, such as b"):
        load("a")
    with pytest.raises(StageFailed, match="1 tensors came for the first time, such as c"):
        load("a", "b", "c")
    assert load("b", "a") == LoadReceipt(1, 2)


def test_the_first_load_after_each_level_of_sleep_is_probed(folder: Path) -> None:
    engine: Any = Recording()
    sender = publisher(folder, engine, probe_interval=100)
    probed = []
    for version, engine.sleep_level in enumerate((0, 1, 1, 2, 2, 0), start=1):
        sender.publish(version)
        probed.append(engine.probed)
    assert probed == [1, 2, 2, 3, 3, 3]
    inner: Any = SimpleNamespace(name="", weight_format="checkpoint", ranks_per_engine=1, sleep_level=2)
    assert EngineWrapper(inner).sleep_level == 2


def test_an_engine_that_its_first_deep_sleep_spoils_is_seen_at_once(folder: Path) -> None:
    engine: Any = Recording()
    sender = publisher(folder, engine, probe_interval=100)
    sender.publish(1)
    engine.sleep_level, engine.off = 2, 5.0
    with pytest.raises(StageFailed, match="did not take all"):
        sender.publish(2)


def test_the_first_load_is_probed_and_then_one_in_so_many_versions(folder: Path) -> None:
    engine = Recording()
    sender = publisher(folder, engine, probe_interval=3)
    probed = []
    for version in range(2, 8):
        sender.publish(version)
        probed.append(engine.probed)
    assert probed == [1, 2, 2, 2, 3, 3]
    for off in (0.01, float("nan")):
        with pytest.raises(StageFailed, match="engine and trainer differ by"):
            publisher(folder, Recording(off=off)).publish(1)
    assert len(set(zip(make_probe_token_ids(260), make_probe_token_ids(260)[1:], strict=False))) == 15


ENGINE = """
class Parrot:
    name, weight_format, ranks_per_engine = "parrot", "shared", 1

    def __init__(self, settings):
        self.said = settings.custom["says"]
        self.length = settings.max_model_len
"""


def test_an_engine_of_a_users_own_is_made_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENGINE)
    model, tokenizer = load_model(str(folder), dtype=torch.float32), load_tokenizer(str(folder))

    def make(backend: str) -> Any:
        rollout = RolloutConfig(backend=backend)
        return make_engine(EngineSettings(model, tokenizer, "", rollout, 64, torch.float32, {"says": "pretty"}))

    engine = make(f"{tmp_path}/mine.py:Parrot")
    assert (engine.name, engine.said, engine.length) == ("parrot", "pretty", 64)
    with pytest.raises(ConfigError, match="has no 'Budgie'"):
        make(f"{tmp_path}/mine.py:Budgie")
