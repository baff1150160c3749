"""Reward functions that judge all completions of a prompt at once, and those that groups are filtered by."""

from dataclasses import replace

from cosmos_core.rewards.runner import RewardRunner
from cosmos_core.rollout.groups import GroupFilter, compute_group_metrics
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment, Turn

GROUP_BEHAVIOURS = '''
import asyncio, os, time

async def best(to_be_evaluated, reference, num_tokens, custom):
    """Return 1 for the longest completion of a prompt."""
    assert isinstance(custom, dict) and len(num_tokens) == len(reference) == len(to_be_evaluated)
    if "hang" in to_be_evaluated:
        time.sleep(1000)
    if "raise" in to_be_evaluated:
        raise KeyError("no such")
    if "exit" in to_be_evaluated:
        os._exit(3)
    if "few" in to_be_evaluated:
        return [1.0]
    await asyncio.sleep(0)
    values = [float(len(each) == max(map(len, to_be_evaluated))) for each in to_be_evaluated]
    return [None if each == "unknown" else (value, {"of": len(values)}) for each, value in zip(to_be_evaluated, values)]

def asked(to_be_evaluated, reference, turns):
    """Return how often each completion asked a tool."""
    return [sum(turn["role"] == "tool" for turn in each) for each in turns]
'''


def group_of(*texts):
    segment = Segment((1,), True, (-0.5,), 0)
    return Group(Prompt(0, (1,), "p", "right"), tuple(Completion((segment,), "stop", text) for text in texts), 0)


def test_a_function_of_a_group_sees_the_turns_of_each_completion(tmp_path):
    file = tmp_path / "groups.py"
    file.write_text(GROUP_BEHAVIOURS)
    group = group_of("a", "b", "c")
    turns = [(Turn("assistant", "a"), *[Turn("tool", "4")] * count) for count in range(3)]
    completions = tuple(replace(each, turns=of) for each, of in zip(group.completions, turns, strict=True))
    with RewardRunner({f"{file}:asked": 1.0}, timeout_seconds=5, num_workers=1, scores_whole_groups=True) as runner:
        [scored] = runner.score_groups([replace(group, completions=completions)])
    assert [score.value for score in scored.scores] == [0.0, 1.0, 2.0]


def test_the_mean_of_all_is_not_that_of_a_reward_of_this_name():
    group = group_of("a", "b")
    metrics = {"mean": 10.0, "std": 20.0, "invalid": 7.0, "own": 2.0}
    found = compute_group_metrics([ScoredGroup(group, (Score(3.0, metrics), Score(5.0, metrics)))])
    assert [found[f"reward/{name}"] for name in ("mean", "std", "invalid", "own")] == [4.0, 1.0, 0.0, 2.0]


def test_a_function_of_a_group_is_called_once_and_what_fails_costs_that_group_alone(tmp_path):
    file = tmp_path / "groups.py"
    file.write_text(GROUP_BEHAVIOURS)
    texts = [("a", "right", "ccc"), ("hang", "right"), *((each, "b") for each in ("raise", "exit", "few"))]
    texts.append(("unknown", "right"))
    weights = {f"{file}:best": 2.0, "exact_match": 1.0}
    with RewardRunner(weights, timeout_seconds=1.0, num_workers=1, retries=0, scores_whole_groups=True) as runner:
        scored = runner.score_groups([group_of(*each) for each in texts])
        (alone,) = runner.score([{"to_be_evaluated": "right", "reference": "right"}])
    assert [[score.value for score in each.scores] for each in scored] == [
        [0.0, 3.0, 0.0], [None] * 2, [None] * 2, [None] * 2, [None] * 2, [None, 1.0],
    ]  # fmt: skip
    assert alone.value == 3.0
    assert scored[0].scores[1].metrics == {"best": 1.0, "best/of": 3.0, "exact_match": 1.0}
    assert scored[1].scores[1].metrics == {"exact_match": 1.0}
    errors = [each.scores[0].error.removeprefix("best: ").partition(" (")[0] for each in scored]
    assert errors == [
        "", "not done in 1 s", "KeyError: 'no such'", "its process exited with code 3",
        "ValueError: returned 1 values for 2 completions; the rule is a list with one for each",
        "ValueError: returned nothing; the rule is a number, or",
    ]  # fmt: skip
    assert [each.scores[0].is_permanent_error for each in scored] == [False, False, True, False, True, True]


UNREADABLE = """
class Mute(Exception):
    def __str__(self):
        raise RuntimeError("it has no text")

class Several:
    def item(self):
        raise RuntimeError("several numbers")

class Lists:
    def __call__(self, completions):
        return [Several() if text == "several" else 1.0 for text in completions]

lists = Lists()

def mute(completion):
    if completion == "mute":
        raise Mute
    return 1.0
"""


def test_a_result_or_an_error_that_cannot_be_read_costs_its_own_completion(tmp_path):
    file = tmp_path / "unreadable.py"
    file.write_text(UNREADABLE)
    with RewardRunner({f"{file}:lists": 1.0, f"{file}:mute": 1.0}, timeout_seconds=5, num_workers=1) as runner:
        [scored] = runner.score_groups([group_of("several", "mute", "c")])
    assert [score.value for score in scored.scores] == [None, None, 2.0]
    assert "RuntimeError: several numbers" in scored.scores[0].error
    assert "Mute without a message" in scored.scores[1].error


def test_a_reward_of_weight_zero_is_a_metric_to_filter_groups_by(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def act(completion, reference):\n    return float(completion)\n")
    with RewardRunner({f"{file}:act": 0.0, "exact_match": 1.0}, timeout_seconds=5, num_workers=1) as runner:
        scores = runner.score([{"to_be_evaluated": text, "reference": "7"} for text in ("7", "raise")])
    assert (scores[0].value, scores[0].metrics) == (1.0, {"act": 7.0, "exact_match": 1.0})
    assert (scores[1].value, scores[1].metrics, scores[1].error) == (0.0, {"exact_match": 0.0}, "")
    # what has not the metric says nothing of whether the others differ in it
    assert not GroupFilter(("act",)).has_learning_signal(ScoredGroup(group_of("7", "raise"), tuple(scores)))
    assert GroupFilter().has_learning_signal(ScoredGroup(group_of("7", "raise"), tuple(scores)))


def test_a_group_whose_rewards_do_not_report_the_metric_is_filtered_by_its_reward() -> None:
    """As in a mixture of data sets with rewards of their own."""

    def is_kept(*scores: Score) -> bool:
        return GroupFilter(("act", "tone")).has_learning_signal(ScoredGroup(group_of("a", "b"), scores))

    assert is_kept(Score(1.0, {"math": 1.0}), Score(0.0, {"math": 0.0}))
    assert not is_kept(Score(1.0, {"math": 1.0}), Score(1.0, {"math": 0.0}))
    assert is_kept(Score(1.0, {"act": 1.0}), Score(1.0, {"act": 0.0}))
    assert not is_kept(Score(1.0, {"act": 1.0}), Score(0.0, {"act": 1.0}))
