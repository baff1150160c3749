"""Rewards are called by the names of their parameters: ours, TRL's, verl's, Cosmos-RL's, and columns of the row."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from PIL import Image

from cosmos_core.data.kinds.prompts import serialise_row_for_rewards
from cosmos_core.errors import RewardError
from cosmos_core.rewards.base import load_reward, make_reward_request
from cosmos_core.rewards.runner import RewardRunner
from cosmos_core.types import Completion, Group, ImageRef, Prompt, Segment

ASKED = [{"role": "user", "content": "2 + 3?"}]
COLUMNS = {"prompt": "2 + 3?", "answer": "5", "task": "math", "level": 3}


def completion(text: str) -> Completion:
    return Completion((Segment((7,) * len(text), True, (-1.0,) * len(text), 0),), "stop", text)


def scores(folder: Path, code: str, *texts: str, columns: dict[str, Any] = COLUMNS) -> list[Any]:
    """What the function `f` of a file gives to completions of one prompt."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    group = Group(Prompt(0, (1,), "<user> 2 + 3?", "5", metadata=columns), tuple(map(completion, texts)), 0)
    fields = [{**make_reward_request(group, k), "custom": {}} for k in range(len(texts))]
    reward = load_reward(f"{folder}/mine.py:f")
    found = reward.score_group(fields) if reward.binding.takes_whole_group else [reward(each) for each in fields]
    return [each[0] if isinstance(each, tuple) else each for each in found]


CONTENTS = "[c[0]['content'] for c in completions]"


@pytest.mark.parametrize(
    "code",
    [
        # ours, in any order
        "def f(prompt, completion): return len(completion) + 10 * prompt.startswith('<user>')",
        "def f(reference, completion): return len(completion) + 10 * (reference == '5')",
        "def f(completion, /, reference): return len(completion) + 10 * (reference == '5')",
        "def f(*, completion, level, strict=True): return len(completion) + 10 * (strict and level == 3)",
        "def f(answer, completion): return len(completion) + 10 * (answer == '5')",
        "def f(num_tokens, **rest): return num_tokens + 10 * (rest['task'] == 'math' and rest['reference'] == '5')",
        "class C:\n    def __call__(self, prompt, completion): return len(completion) + 10\nf = C()",
        "class f:\n    def __init__(self, args=None, **kw): self.by = 10\n"
        "    def __call__(self, completions, **kw): return [len(c) + self.by for c in completions]",
        "from functools import partial\ndef g(by, completion): return len(completion) + by\nf = partial(g, by=10)",
        # in one event loop, to which a client that the function keeps belongs
        "from asyncio import get_running_loop\nloops = set()\nasync def f(completion):\n"
        "    loops.add(get_running_loop())\n    return len(completion) + 10 * len(loops)",
        # Cosmos-RL
        "def f(to_be_evaluated, reference=None, *args, **kw): return len(to_be_evaluated) + 10 * (reference == '5')",
        # TRL
        "def f(completions, **kwargs): return [len(c) + 10 for c in completions]",
        "def f(prompts, completions, **kw): return [len(c) + 10 * (p[0] == '2') for p, c in zip(prompts, completions)]",
        "def f(completion_ids, **kwargs): return [float(len(ids)) + 10 for ids in completion_ids]",
        "def f(completions, answer, **kwargs): return [len(c) + 10 * (a == '5') for c, a in zip(completions, answer)]",
        "def f(prompts, completions, completion_ids, **kwargs):\n"
        "    return [len(ids) + 10 * (t == 'math') for ids, t in zip(completion_ids, kwargs['task'])]",
        "async def f(prompts, completions, task, log_extra=None, **kwargs): return [len(c) + 10 for c in completions]",
        "def f(completions): return (len(c) + 10 for c in completions)",
        # verl
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    ok = data_source == '' and ground_truth == '5' and extra_info == {}\n"
        "    return {'score': len(solution_str) + 10 * ok, 'acc': True, 'pred': 'text'}",
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [len(s) + 10 * (g == '5') for s, g in zip(solution_strs, ground_truths)]",
    ],
)  # fmt: skip
def test_each_name_is_bound_to_what_it_means(code: str, tmp_path: Path) -> None:
    assert scores(tmp_path, code, "a", "four") == [11.0, 14.0]


def test_trl_functions_are_given_messages_where_the_row_has_messages(tmp_path: Path) -> None:
    code = f"def f(prompts, completions): return [len(c) * ('role' in p[0]) for p, c in zip(prompts, {CONTENTS})]"
    assert scores(tmp_path, code, "a", "four", columns={"prompt": ASKED}) == [1.0, 4.0]


def test_classes_are_given_text_as_in_ms_swift_whatever_the_prompt_is(tmp_path: Path) -> None:
    code = (
        "class f:\n    def __call__(self, completions, n, **kw): return [str(a) in c for c, a in zip(completions, n)]"
    )
    assert scores(tmp_path, code, "it is 5", "6", columns={"messages": ASKED, "prompt": ASKED, "n": 5}) == [1.0, 0.0]


def test_a_function_of_trl_itself_works(tmp_path: Path) -> None:
    code = "from trl.rewards import think_format_reward as f"
    assert scores(tmp_path, code, "<think>a</think>b", "b", columns={"prompt": ASKED}) == [1.0, 0.0]


def test_a_function_may_score_in_processes_that_call_its_own_file(tmp_path: Path) -> None:
    code = """
    from multiprocessing import Pool
    def work(text): return len(text) + 0.5
    def f(completions):
        with Pool(1) as pool:
            return pool.map(work, completions)
    """
    (tmp_path / "mine.py").write_text(dedent(code))
    group = Group(Prompt(0, (1,), "p", "a", metadata=COLUMNS), (completion("a"), completion("four")), 0)
    with RewardRunner({f"{tmp_path}/mine.py:f": 1.0}, timeout_seconds=300, num_workers=1, retries=0) as runner:
        [scored] = runner.score_groups([group])
    assert [score.value for score in scored.scores] == [1.5, 4.5], scored.scores[0].error


def test_what_a_function_of_lists_leaves_out_adds_nothing(tmp_path: Path) -> None:
    code = "def f(completions, task, **kwargs): return [None if t == 'math' else 1.0 for t in task]"
    assert scores(tmp_path, code, "a") == [None]
    weights = {f"{tmp_path}/mine.py:f": 1.0, "exact_match": 1.0}
    group = Group(Prompt(0, (1,), "p", "a", metadata=COLUMNS), (completion("a"),), 0)
    for left_out, expected in (("exact_match", (None, {})), ("", (1.0, {"exact_match": 1.0}))):
        chosen = {name: weight for name, weight in weights.items() if name != left_out}
        with RewardRunner(chosen, timeout_seconds=5, num_workers=1) as runner:
            [[score]] = [each.scores for each in runner.score_groups([group])]
        assert (score.value, score.metrics) == expected
    assert not score.error


def test_verl_rows_keep_the_answer_below_a_column(tmp_path: Path) -> None:
    code = "def f(solution_str, ground_truth, extra_info): return ground_truth == 7 and extra_info['index'] == 4"
    row = {"data_source": "d", "reward_model": {"ground_truth": 7}, "extra_info": {"index": 4}}
    assert scores(tmp_path, code, "a", columns=row) == [1.0]


def test_a_number_beyond_every_float_costs_one_score_and_numbers_of_numpy_are_metrics(tmp_path: Path) -> None:
    huge, good = scores(tmp_path, "def f(completions): return [10 ** 400, 1.0]", "a", "b")
    assert "the rule is a finite number" in str(huge) and good == 1.0
    (tmp_path / "other.py").write_text(
        "from numpy import bool_, float32, nan\ndef f(completion):\n"
        "    return {'score': 1, 'acc': float32(0.5), 'ok': bool_(True), 'f1': nan, 'pred': 'x'}"
    )
    assert load_reward(f"{tmp_path}/other.py:f")({"to_be_evaluated": "a"}) == (1.0, {"acc": 0.5, "ok": 1.0})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(text, answer): return 1", "takes text, answer: no parameter is the completion"),
        ("def f(prompt, response, **others): return 1", "takes prompt, response, others: no parameter is"),
        ("def f(*args): return 1", "takes args: no parameter is the completion"),
        ("def f(prompt): return 1", "no parameter is the completion"),
        ("def f(): return 1", "takes nothing"),
        ("def f(completion, config): return 1", "wants 'config', which is not offered"),
        (
            "def f(completions, trainer_state, **kwargs): return [1]",
            "'trainer_state', which is not offered: rewards run in",
        ),
        ("class f:\n    def __init__(self, model): pass", "cannot be made: TypeError: .*'model'; name an object of it"),
        ("f = dict.fromkeys", "no parameter is the completion|has no signature"),
    ],
)
def test_what_cannot_be_bound_is_refused_with_the_signature_wanted(code: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(RewardError, match=reason) as refusal:
        load_reward(f"{tmp_path}/mine.py:f")
    assert str(refusal.value).startswith("reward '"), "it may be a reward of training, validation or a service"
    signature, other_remedies = "def f(completion, reference, **others)", ("not offered", "name an object")
    expected_remedies = [remedy for remedy in other_remedies if remedy in reason] or [signature]
    assert [remedy for remedy in (*other_remedies, signature) if remedy in str(refusal.value)] == expected_remedies


def test_a_name_that_no_column_has_is_named_with_the_columns(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"nothing is called 'solution' \(columns of the row: prompt, answer, task, level"
    ):
        scores(tmp_path, "def f(completion, solution): return 1", "a")


def test_the_columns_of_a_row_are_kept_as_json_without_media() -> None:
    media = {"image": {"bytes": b"x"}, "img": Image.new("RGB", (2, 2))}
    raw = {"a": b"x", "b": 1}
    row = {"question": "2 + 3?", "answer": "5", "level": 3, "raw": raw, "f": [b"x", media["img"], 2], **media}
    system = {"role": "system", "content": "Be brief."}
    found = json.loads(serialise_row_for_rewards(row, [system, *ASKED]))
    assert found == {"question": "2 + 3?", "answer": "5", "level": 3, "raw": {"b": 1}, "f": [2], "prompt": "2 + 3?"}
    trl = {"prompt": [system, *ASKED], "question": "2 + 3?"}
    assert json.loads(serialise_row_for_rewards(trl, [system, *ASKED]))["prompt"] == [system, *ASKED]
    talk = {"messages": [*ASKED, {"role": "assistant", "content": "5"}]}
    assert json.loads(serialise_row_for_rewards(talk, ASKED))["prompt"] == ASKED


def test_a_function_that_declares_images_gets_those_of_the_prompt_and_others_get_none(tmp_path: Path) -> None:
    Image.new("RGB", (5, 3), "red").save(tmp_path / "red.png")
    content = (tmp_path / "red.png").read_bytes()
    Image.new("RGB", (7, 2), "blue").save(tmp_path / "blue.png")
    refs = [
        ImageRef(None, content, hashlib.sha256(content).hexdigest()),
        ImageRef(str(tmp_path / "blue.png"), None, hashlib.sha256((tmp_path / "blue.png").read_bytes()).hexdigest()),
    ]
    code = """
    def sizes(completion, images): return sum(image.width for image in images)
    def listed(completions, images, **columns): return [each[1].height + 10.0 * len(each) for each in images]
    def blind(completion, **others): return float("images" in others)
    """
    (tmp_path / "mine.py").write_text(dedent(code))
    group = Group(Prompt(0, (1,), "p", "a", tuple(refs), metadata=COLUMNS), (completion("a"), completion("four")), 0)
    weights = {f"{tmp_path}/mine.py:{name}": 1.0 for name in ("sizes", "listed", "blind")}
    with RewardRunner(weights, timeout_seconds=300, num_workers=1) as runner:
        [scored] = runner.score_groups([group])
    assert [score.metrics for score in scored.scores] == [{"sizes": 12.0, "listed": 22.0, "blind": 0.0}] * 2
    own_column = {**COLUMNS, "images": ["a.png"]}
    code = "def f(completion, images): return len(images[0]) if images else 0"
    assert scores(tmp_path / "own", code, "a", columns=own_column) == [5.0]
    assert scores(tmp_path / "none", code, "a") == [0.0]
    code = "def f(completion, **others): return len(others['images'][0])"
    assert scores(tmp_path / "others", code, "a", columns=own_column) == [5.0]


@pytest.mark.parametrize("name", ["completions", "solution_strs"])
def test_a_column_never_takes_the_place_of_the_completions(tmp_path: Path, name: str) -> None:
    columns = {**COLUMNS, name: ["of another model"]}
    code = f"def f({name}, **kwargs): return [float(len(c)) for c in {name}]"
    assert scores(tmp_path, code, "a", "four", columns=columns) == [1.0, 4.0]
