"""Kind `sample`: which completions are kept, the rows and their columns, and a stage that goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.demo import arithmetic
from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.sample import KeepConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.data import chat, prepare
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.errors import ConfigError, DataError, Preempted, RewardError, StageFailed
from cosmos_core.parallel import exchange
from cosmos_core.run.progress import read_progress
from cosmos_core.run.stage import Stage
from cosmos_core.sample import program
from cosmos_core.sample.endpoint import EndpointClient
from cosmos_core.sample.records import COMPLETIONS_FILE, SampledPrompt, ScoredCompletion, append_records
from cosmos_core.sample.selection import compute_pass_rate, make_metrics, select_completions, select_pair
from cosmos_core.tools.base import ToolCall, parse_tool_calls
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.types import Outcome, Prompt
from cosmos_core.worker.program import _run_with_metrics
from tasks.kinds import all_kinds
from tests.unit.chat_server import chat_server
from tests.unit.test_tools import TOOLS
from tests.unit.test_train import BASE, make_stage

ASKED = [{"role": "user", "content": "?"}]
REWARD = "def first_letter(completion, **_):\n    return (ord(completion[0]) % 5) / 4 if completion else 0.0\n"


def candidate(text: str, reward: float | None, *, is_finished: bool = True, seed: int = 0) -> ScoredCompletion:
    return ScoredCompletion(text, [{"role": "assistant", "content": text}], reward, {}, "", seed, 1, is_finished)


GROUP = SampledPrompt(7, [
    candidate("a", 0.5, seed=3), candidate("b", 1.0, seed=2), candidate("b", 1.0, seed=1), candidate("c", None),
    candidate("d", 1.0, is_finished=False, seed=4), candidate("e", 0.0, seed=5), candidate(" ", 0.0, seed=6),
])  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "texts"),
    [
        ({}, "bae"),
        ({"unique": False, "finished": False}, "bbdae"),
        ({"best": 2}, "ba"),
        ({"max_pass_rate": 0.49}, ""),
        ({"min_pass_rate": 0.5}, "bae"),
        ({"min_pass_rate": 0.51}, ""),
    ],
)
def test_completions_are_kept_by_reward_text_and_difficulty(keep: dict[str, Any], texts: str) -> None:
    rate = compute_pass_rate(GROUP, lambda rewards: 1.0)
    assert rate == 3 / 6
    assert "".join(each.text for each in select_completions(GROUP, KeepConfig(**keep), rate, 0)) == texts


def test_a_limit_chooses_at_random_by_the_seed_and_the_prompt() -> None:
    many = SampledPrompt(1, [candidate(str(i), 1.0, seed=i) for i in range(20)])
    keep = KeepConfig(max_per_prompt=3)
    choices = {tuple(each.text for each in select_completions(many, keep, None, seed)) for seed in range(8)}
    assert len(choices) > 4 and all(len(set(choice)) == 3 for choice in choices)
    chosen = select_completions(many, keep, None, 1)
    assert chosen == select_completions(many, keep, None, 1) != select_completions(replace(many, id=2), keep, None, 1)


def test_a_pair_is_the_best_that_passed_and_the_worst_of_all() -> None:
    passed = select_completions(GROUP, KeepConfig(), None, 0)
    best, worst = select_pair(GROUP, passed, 0.5) or ()
    assert (best.text, worst.text) == ("b", "e")
    assert select_pair(GROUP, passed, 1.0) is None, "the margin is exceeded, not reached"
    same = SampledPrompt(0, [candidate("a", 1.0), candidate("b", 1.0)])
    assert select_pair(same, select_completions(same, KeepConfig(), None, 0), 0.0) is None
    assert select_pair(GROUP, [], 0.0) is None


def test_metrics_compare_the_kept_with_a_random_choice() -> None:
    other = SampledPrompt(8, [candidate("x", 0.0), candidate("y", 0.5)])
    passing = [select_completions(each, KeepConfig(best=1), None, 0) for each in (GROUP, other)]
    pass_rates = [compute_pass_rate(each, lambda rewards: 1.0) for each in (GROUP, other)]
    metrics = make_metrics([GROUP, other], passing, pass_rates, 2)
    assert metrics["sample/reward_random"] == pytest.approx((3.5 / 6 + 0.25) / 2)
    assert metrics["sample/reward_best"] == metrics["sample/reward_kept"] == 0.75
    assert metrics["sample/pass_rate"] == 0.25 and metrics["sample/solved"] == 0.5
    assert (metrics["sample/invalid"], metrics["sample/completions"], metrics["sample/prompts_kept"]) == (1, 9, 2)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Model, prepared prompts and a reward that differs between completions."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "reward.py").write_text(REWARD)
    stage = make_stage(folder / "task", "custom", recipe(folder))
    arithmetic.make(stage, train_rows=6, heldout_rows=2, hidden_size=32, layers=1)
    prepare.run(make_stage(folder / "prompts", "prepare", recipe(folder), folder / "task/model", folder / "task/data"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: {0})  # one process computes rewards
        yield folder


def recipe(folder: Path, train_policy: dict[str, Any] | None = None, **sample: Any) -> Recipe:
    policy = train_policy or {"type": "grpo", "reward_function": f"{folder}/reward.py:first_letter"}
    rollout = {"backend": "hf", "n_generation": 6, "batch_size": 4, "max_response_length": 4}
    train = {**BASE["train"], "train_policy": policy}
    return Recipe.model_validate({**BASE, "train": train, "rollout": rollout, "sample": sample})


def stage_of(task: Path, path: Path, **sample: Any) -> Stage:
    keep = {"finished": False, **sample.pop("keep", {"best": 1})}
    made = recipe(task, **sample, keep=keep)
    return make_stage(path, "sample", made, task / "task/model", task / "prompts/data")


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Outcome]:
    """A stage that has sampled the prompts of the task, with its outcome."""
    stage = stage_of(task, tmp_path_factory.mktemp("whole") / "sample")
    return stage, program.run(stage)


def selecting(whole: tuple[Stage, Outcome], task: Path, path: Path, **sample: Any) -> Stage:
    """A stage that has the completions already, and selects others of them."""
    stage = stage_of(task, path, **sample)
    shutil.copy(whole[0].path / COMPLETIONS_FILE, path / COMPLETIONS_FILE)
    return stage


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rows/train.jsonl").read_text().splitlines()]


def test_the_rows_are_conversations_that_sft_learns(whole: tuple[Stage, Outcome], task: Path, tmp_path: Path) -> None:
    stage, outcome = whole
    found = rows(stage.path)
    assert outcome.metrics["sample/rows"] == len(found) == 6 and outcome.info == {"data": "rows"}
    assert outcome.metrics["sample/reward_kept"] > outcome.metrics["sample/reward_random"]
    records = [json.loads(line) for line in (stage.path / COMPLETIONS_FILE).read_text().splitlines()]
    for row, record in zip(found, records, strict=True):
        user, assistant = row["conversations"]
        best = max(each["reward"] for each in record["candidates"])
        assert row["reward"] == best == (ord(assistant["content"][0]) % 5) / 4
        assert (user["role"], assistant["role"], row["prompt_id"]) == ("user", "assistant", record["id"])
        assert row["seed"] in {each["seed"] for each in record["candidates"] if each["reward"] == best}
        assert row["pass_rate"] == sum(each["reward"] == 1 for each in record["candidates"]) / 6
    sft = recipe(task, {"type": "sft"})
    prepare.run(make_stage(tmp_path / "sft", "prepare", sft, task / "task/model", stage.path / "rows"))
    assert len(open_sequences(tmp_path / "sft/data", "train")) == 6


def test_rows_have_the_system_prompt_of_their_data_set(task: Path, tmp_path: Path) -> None:
    prompts = {"own": "Add.", "none": "", "common": None}
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    datasets = [
        {"name": str(tmp_path / "few.jsonl"), "label": label, "weight": 1.0,
         **({"system_prompt": text} if text is not None else {})}
        for label, text in prompts.items()
    ]  # fmt: skip
    policy = {"type": "grpo", "reward_function": f"{task}/reward.py:first_letter", "system_prompt": "Compute."}
    made = recipe(task, {**policy, "datasets": datasets}, keep={"finished": False, "best": 1})
    data = make_stage(tmp_path / "data", "prepare", made, task / "task/model")
    prepare.run(data)
    stage = make_stage(tmp_path / "sample", "sample", made, task / "task/model", data.path / "data")
    program.run(stage)
    found = [[turn["content"] for turn in row["conversations"] if turn["role"] == "system"] for row in rows(stage.path)]
    assert found == [["Add."], ["Add."], [], [], ["Compute."], ["Compute."]]
    [notice] = made.sample.notices(StageContext(made, all_kinds()["sample"]))
    assert notice == "train.train_policy.datasets.weight has no effect here: kind sample completes each prompt once"
    assert not [*made.sample.notices(StageContext(made, all_kinds()["rl"]))]
    fewer = made.train.train_policy.copy_with(datasets=made.train.train_policy.datasets[:1])
    stage.recipe = made.copy_with(train=made.train.copy_with(train_policy=fewer))
    (stage.path / COMPLETIONS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"datasets has no data set 'none', of which the prepared rows .* has 'own'"):
        program.run(stage)


@pytest.mark.parametrize(("num_requests", "is_told"), [(24, False), (25, True)])
def test_more_requests_than_a_batch_has_are_told(task: Path, num_requests: int, is_told: bool) -> None:
    made = recipe(task, endpoint="http://host/v1", endpoint_model="m", endpoint_requests=num_requests)
    told = [*made.sample.notices(StageContext(made, all_kinds()["sample"]))]
    assert ["has no effect above 24" in each for each in told] == [True] * is_told


def test_a_row_has_the_tools_of_its_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, json.dumps(tools)):
        column = program.make_tools_column(Prompt(0, (1,), "", "", metadata={"tools": given}))
        assert json.loads(column["tools"]) == tools
    assert program.make_tools_column(Prompt(0, (1,), "", "", metadata={"tools": None})) == {}


def test_rows_have_the_tools_of_the_recipe_and_continue_the_open_turn(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(TOOLS)
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "= "}]
    lines = (json.dumps({"messages": each, "answer": "2"}) for each in (turns, turns[:1]))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = MultiTurnRolloutConfig.model_validate({
        "enable": True, "enable_tools": True, "tools": [f"{tmp_path}/mine.py:add"],
        "add_generation_prompt": False, "continue_final_message": True,
    })  # fmt: skip
    schemas = chat.load_tool_schemas(config)  # by a process, which takes longer than the rest
    for module in (chat, program):
        monkeypatch.setattr(module, "load_tool_schemas", lambda asked: schemas if asked == config else [])
    data = tmp_path / "data/data"
    for pairs, key, prompt in (("", "conversations", []), ("best-worst", "chosen", turns[:1])):
        made = recipe(task, pairs=pairs)
        made = made.copy_with(rollout=made.rollout.copy_with(multi_turn_config=config))
        if not pairs:
            prepare.run(make_stage(data.parent, "prepare", made, task / "task/model", tmp_path / "rows.jsonl"))
        stage = make_stage(tmp_path / key, "sample", made, task / "task/model", data)
        append_records(stage.path, [SampledPrompt(i, [candidate("2", 1.0), candidate("3", 0.0)]) for i in range(2)])
        program.run(stage)
        [continued, plain] = rows(stage.path)
        assert [tool["function"]["name"] for tool in json.loads(continued["tools"])] == ["add"]
        assert continued.get("prompt", []) == prompt and (not pairs or continued["rejected"][0]["content"] == "= 3")
        assert continued[key] == [*turns[len(prompt) : 1], {"role": "assistant", "content": "= 2"}]
        assert plain[key] == [*turns[len(prompt) : 1], {"role": "assistant", "content": "2"}]


def test_pairs_are_rows_that_dpo_compares(whole: tuple[Stage, Outcome], task: Path, tmp_path: Path) -> None:
    stage = selecting(whole, task, tmp_path / "sample", pairs="best-worst", min_margin=0.25)
    program.run(stage)
    found = rows(stage.path)
    assert found and all(row["reward"] - row["rejected_reward"] > 0.25 for row in found)
    dpo = recipe(task, {"type": "sft", "trainer_type": "dpo"})
    prepare.run(make_stage(tmp_path / "dpo", "prepare", dpo, task / "task/model", stage.path / "rows"))
    assert len(open_pairs(tmp_path / "dpo/data", "train")) == len(found)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"train_policy": {"type": "sft"}}}, "train_policy.type = 'sft': kind sample completes prompts"),
        ({"policy": {"is_diffusers": True}}, "take a language model"),
        ({"sample": {"endpoint": "http://host/v1", "endpoint_model": "m"},
          "rollout": {"multi_turn_config": {"enable": True}}}, "a server of sample.endpoint completes one turn"),
    ],
)  # fmt: skip
def test_recipes_that_sample_nothing_are_refused(tables: dict[str, Any], message: str) -> None:
    made = Recipe.model_validate({"train": {"train_policy": {"type": "grpo"}}, **tables})
    refusals = "".join(made.sample.unsupported_setting_errors(StageContext(made, all_kinds()["sample"])))
    assert message in refusals
    assert not [*made.sample.unsupported_setting_errors(StageContext(made, all_kinds()["sft"]))]


@pytest.mark.parametrize(("endpoint", "is_refused"), [("", True), ("http://host/v1", False)])
def test_a_temperature_that_vllm_does_not_have_is_refused(endpoint: str, is_refused: bool) -> None:
    made = Recipe.model_validate({
        "train": {"train_policy": {"type": "grpo"}},
        "sample": {"endpoint": endpoint, "endpoint_model": "m" if endpoint else ""},
        "rollout": {"backend": "vllm", "sampling_config": {"temperature": 3.0}},
    })  # fmt: skip
    refusals = "".join(made.rollout.unsupported_setting_errors(StageContext(made, all_kinds()["sample"])))
    assert ("temperature = 3.0: vLLM samples between" in refusals) is is_refused


def contents(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in (COMPLETIONS_FILE, "rows/train.jsonl", "pass_rates.jsonl")]


def test_a_stopped_stage_goes_on_and_ends_with_the_same_bytes(
    whole: tuple[Stage, Outcome], task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a rank that receives what the first rank has read.
    monkeypatch.setattr(program, "broadcast_object", lambda value: exchange._deserialize(exchange._serialize(value)))
    stage = stage_of(task, tmp_path / "stopped")
    stage.stop_requested = True
    with pytest.raises(Preempted, match="the completions of 4 prompts are kept"):
        program.run(stage)
    stage.stop_requested = False
    with (stage.path / COMPLETIONS_FILE).open("a") as file:  # killed while it wrote the next batch
        file.write((whole[0].path / COMPLETIONS_FILE).read_text().splitlines()[4] + '\n{"id": 5, "candi')
    program.run(stage)
    assert contents(stage.path) == contents(whole[0].path)
    (task / "reward.py").rename(task / "moved.py")
    program.run(stage)  # which needs no reward
    (task / "moved.py").rename(task / "reward.py")
    assert contents(stage.path) == contents(whole[0].path), "nothing is sampled twice"
    first, _, *others = (stage.path / COMPLETIONS_FILE).read_text().splitlines(keepends=True)
    (stage.path / COMPLETIONS_FILE).write_text("".join([first, *others]))
    program.run(stage)
    assert contents(stage.path) == contents(whole[0].path), "a lost line is sampled again"


def test_a_selection_without_rows_is_one_line(whole: tuple[Stage, Outcome], task: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"leaves no row of 36 completions: the highest reward is .*lower sample.keep"):
        program.run(selecting(whole, task, tmp_path / "sample", keep={"min_reward": 2.0}))
    with pytest.raises(DataError, match=r"sample.pairs leaves no row of 6 prompts: .* sample.min_margin = 2; lower"):
        program.run(selecting(whole, task, tmp_path / "pairs", pairs="best-worst", min_margin=2.0))


def test_invalid_rewards_are_one_line_and_are_not_taken_again(task: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def broken(**_):\n    raise KeyError('no such key')\n")
    policy = {"type": "grpo", "reward_function": f"{tmp_path}/broken.py:broken"}
    made = recipe(task, policy, keep={"finished": False})
    stage = make_stage(tmp_path / "sample", "sample", made, task / "task/model", task / "prompts/data")
    with pytest.raises(RewardError, match=r"all 24 rewards of the first batch are invalid; the first: .*no such key"):
        program.run(stage)
    assert not (stage.path / COMPLETIONS_FILE).exists()
    (tmp_path / "broken.py").write_text("def broken(**_):\n    raise ConnectionError('it is away')\n")
    with pytest.raises(StageFailed, match="all 36 rewards are invalid; the first: "):
        program.run(stage)
    assert not (stage.path / COMPLETIONS_FILE).exists()


def test_some_invalid_rewards_are_a_warning_of_the_stage(task: Path, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "def half(prompts, completions, **_):\n    return [ValueError('no digit'), *[1.0] * (len(completions) - 1)]\n"
    )
    policy = {"type": "grpo", "reward_function": f"{tmp_path}/half.py:half", "group_reward_calculation": True}
    made = recipe(task, policy, keep={"finished": False})
    stage = make_stage(tmp_path / "sample", "sample", made, task / "task/model", task / "prompts/data")
    num_invalid = _run_with_metrics(stage, program.run).metrics["sample/invalid"]
    expected = f"{num_invalid:.0f} of 36 rewards are invalid, and these completions are left out; the first: "
    progress = read_progress(stage.path)
    assert progress is not None and num_invalid > 0
    assert [text for text in progress.warnings if text.startswith(expected) and "no digit" in text]


def test_an_endpoint_completes_the_prompts(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with chat_server(first=2) as (url, requests):
        stage = stage_of(task, tmp_path / "sample", endpoint=url, endpoint_model="m")
        program.run(stage)
    assert {request["key"] for request in requests} == {"Bearer secret-key"}
    assert len(requests) == 38 and len({request["seed"] for request in requests}) == 36
    assert all(request["max_tokens"] == 4 and request["model"] == "m" for request in requests)
    [first] = [row for row in rows(stage.path) if row["prompt_id"] == 0]
    asked = next(request for request in requests if request["seed"] == first["seed"] % (1 << 31))
    assert first["conversations"][:-1] == asked["messages"] and first["model"] == "m"
    assert first["conversations"][-1]["content"] == str(first["seed"] % (1 << 31) % 10)


def complete_one(task: Path, path: Path, url: str, turns: list[dict[str, Any]] = ASKED, **metadata: Any) -> Any:
    stage = stage_of(task, path, endpoint=url, endpoint_model="m")
    sampling = replace(make_training_sampling(stage.recipe), num_completions=1, **metadata.pop("sampling", {}))
    endpoint = EndpointClient(stage, sampling)
    try:
        return endpoint.complete_prompts([(Prompt(0, (1,), "", "", metadata=metadata), turns)])[0].completions[0]
    finally:
        endpoint.close()


def test_an_endpoint_gets_settings_beyond_the_api_only_if_they_are_set(task: Path, tmp_path: Path) -> None:
    with chat_server(complete=lambda request: "5\ud83d") as (url, requests):
        completion = complete_one(task, tmp_path / "plain", url)
        complete_one(task, tmp_path / "extended", url, sampling={"top_k": 5, "repetition_penalty": 1.5})
    plain, extended = requests
    assert not {"top_k", "repetition_penalty"} & plain.keys()
    assert (extended["top_k"], extended["repetition_penalty"]) == (5, 1.5)
    assert completion.text == "5?", "half a surrogate pair is replaced"


def test_an_endpoint_gets_the_tools_of_a_row_and_its_calls_are_text(task: Path, tmp_path: Path) -> None:
    add = {"name": "add", "parameters": {}}
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    earlier = [{"type": "function", "function": {"name": "add", "arguments": {"b": 2}}}]
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": earlier}]
    reply = {"content": None, "tool_calls": [called]}
    complete = lambda asked: {**reply, "reasoning" if "tools" in asked else "reasoning_content": "5\n"}  # noqa: E731
    with chat_server(complete=complete) as (url, requests):
        completion = complete_one(task, tmp_path / "tools", url, turns, tools=[add])
        assert complete_one(task, tmp_path / "none", url, turns).text == completion.text
    assert completion.text.startswith("<think>\n5\n</think>\n\n<tool_call>\n"), "what the server has parsed is kept"
    assert requests[0]["tools"] == [{"type": "function", "function": add}] and "tools" not in requests[1]
    assert requests[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"b": 2}'
    for reason, text in (("length", "<think>\n5"), ("stop", "<think>\n5\n</think>\n\n")):  # cut off; an empty answer
        with chat_server(complete=lambda asked: {"content": None, "reasoning": "5\n"}, reason=reason) as (url, _):
            assert complete_one(task, tmp_path / reason, url).text == text
    assert parse_tool_calls(completion.text) == [ToolCall("add", {"a": 1})] and completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("server", "error", "message"),
    [
        ({"complete": lambda request: b"<html>"}, StageFailed, "the reply is no JSON: "),
        ({"complete": lambda request: b'{"choices": [{"message": null}]}'}, StageFailed, "the reply has no message: "),
        ({"complete": lambda request: b'{"choices": [{"text": "5"}]}'}, StageFailed, "the reply has no message: "),
        ({"status": 404}, ConfigError, ".*no such model"),
    ],
)
def test_a_server_that_fails_or_refuses_is_one_line(
    server: dict[str, Any], error: type[Exception], message: str, task: Path, tmp_path: Path
) -> None:
    with chat_server(**server) as (url, _), pytest.raises(error, match=rf"sample.endpoint = .*: {message}"):
        complete_one(task, tmp_path / "stage", url)
