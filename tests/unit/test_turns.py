"""Conversations with tools: what was drawn is kept, what tools say is not learned, every limit holds, and seeds are
functions of run seed, step, prompt, completion and turn alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.algorithms.grpo import make_sample
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.data.chat import PromptRendering, ToolResultTokens
from cosmos_core.errors import ModelError
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.rollout.base import Engine, EngineSettings, completion, generate, request_seed
from cosmos_core.rollout.groups import compute_turn_metrics
from cosmos_core.rollout.registry import make_engine
from cosmos_core.rollout.turns import MultiTurnEngine, make_turn_request_id
from cosmos_core.tools.base import ToolResult
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment
from tests.unit.data_tokenizers import CHATML, FORGETS_THOUGHTS, MISTRAL, PLAIN_WORDS
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import sequence_logprobs

TOOLS = '''
import os, time
from cosmos_core.tools.base import tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

@tool
def act(how: str) -> str:
    """Behave badly.

    Args:
        how: In which way.
    """
    if how == "hang":
        time.sleep(100)
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise ValueError(how)
'''
ASKED = "<|im_start|>user\n2 and 3?<|im_end|>\n<|im_start|>assistant\n"
TOLD = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
SAMPLING = Sampling(max_tokens=400, num_completions=1, seed=5)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    (path / "chat_template.jinja").write_text(CHATML)
    (path / "tools.py").write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(folder))


class Scripted:
    """An engine that says what it is told to, a list of turns for each completion, and remembers what it was asked."""

    name, weight_format, ranks_per_engine = "scripted", "shared", 1

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *scripts: Sequence[str]) -> None:
        self._tokenizer, self._scripts = tokenizer, [list(script) for script in scripts]
        self._of: dict[tuple[int, ...], int] = {}
        self._waiting: list[list[Group]] = []
        self.asked: list[tuple[list[Prompt], Sampling, int]] = []
        self.version = 0

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        self.asked.append((list(prompts), sampling, step))
        batch = []
        for prompt in prompts:
            ks = range(sampling.num_completions)
            if prompt.id > 1 << 32:  # a later turn: its completion is known by what it begins with
                ks = range((k := next(k for ids, k in self._of.items() if prompt.token_ids[: len(ids)] == ids)), k + 1)
            said = []
            for k in ks:
                said.append(self._said(self._scripts[k].pop(0), sampling))
                self._of[prompt.token_ids + said[-1].token_ids] = k
            batch.append(Group(prompt, tuple(said), step))
        self._waiting.append(batch)

    def _said(self, text: str, sampling: Sampling) -> Completion:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        is_stopped = text.endswith("<|im_end|>") and len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.version += 1
        logprobs = [-float(self.version)] * len(ids)
        return completion(self._tokenizer, ids, logprobs, version=self.version, ends_with_stop=is_stopped)

    def completed(self) -> list[Group]:
        return self._waiting.pop(0) if self._waiting else []

    def close(self) -> None:
        pass


@pytest.fixture
def talk(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Have a scripted conversation."""
    opened: list[MultiTurnEngine] = []

    def have(
        *scripts: Sequence[str], max_model_len: int = 1000, sampling: Sampling = SAMPLING, **settings: Any
    ) -> tuple[tuple[Completion, ...], Scripted]:
        inner: Any = Scripted(tokenizer, *scripts)
        turns = MultiTurnEngine(inner, engine_settings(folder, model, max_model_len, **settings))
        opened.append(turns)
        prompt = Prompt(7, tuple(tokenizer(ASKED, add_special_tokens=False)["input_ids"]), ASKED, "5")
        [group] = generate(turns, [prompt], replace(sampling, num_completions=len(scripts)), step=3)
        assert group.prompt == prompt and group.step == 3
        return group.completions, inner

    yield have
    for each in opened:
        each.close()


def engine_settings(folder: Path, model: PreTrainedModel, max_model_len: int, **settings: Any) -> EngineSettings:
    config = {
        "enable": True, "enable_tools": True, "tools": [f"{folder}/tools.py:add", f"{folder}/tools.py:act"],
        "tool_timeout_seconds": 0.5, **settings,
    }  # fmt: skip
    rollout = RolloutConfig.model_validate({"backend": "hf", "multi_turn_config": config})
    tokenizer = load_tokenizer(str(folder))
    return EngineSettings(model, tokenizer, str(folder), rollout, max_model_len, torch.float32)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def test_what_was_drawn_is_kept_and_what_tools_say_is_not_learned(talk: Any, tokenizer: Any) -> None:
    first, last = f"I ask. {call('add', a=2, b=3)}<|im_end|>", "It is 5.<|im_end|>"
    [made], inner = talk([first, last])
    assert [(decoded(tokenizer, s.token_ids), s.is_sampled, s.version) for s in made.segments] == [
        (first, True, 1), (TOLD.format(5), False, 1), (last, True, 2),
    ]  # fmt: skip
    assert (made.text, made.finish_reason) == ("It is 5.", "stop")
    assert [(turn.role, turn.text, turn.is_error) for turn in made.turns] == [
        ("assistant", first.removesuffix("<|im_end|>"), False), ("tool", "5", False), ("assistant", "It is 5.", False),
    ]  # fmt: skip
    sample = make_sample(inner.asked[0][0][0], made, 1.0, 1.0)
    assert decoded(tokenizer, sample.input_ids[sample.loss_mask == 1]) == first + last
    assert sample.rollout_logprobs is not None
    lengths = [len(segment.logprobs) for segment in made.segments]
    assert sample.rollout_logprobs.tolist() == [-1.0] * lengths[0] + [-2.0] * lengths[2]
    counts = {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0}
    assert compute_turn_metrics([made]) == {f"completion/{name}": count for name, count in counts.items()}


def test_each_completion_of_a_group_is_a_conversation_of_its_own(talk: Any) -> None:
    one, both, four = call("add", a=1, b=1), call("add", a=2, b=2) + call("add", a=3, b=3), call("add", a=4, b=4)
    scripts = (["No need."], [one, both, "8"], [four, "no"])
    made, inner = talk(*([f"{said}<|im_end|>" for said in script] for script in scripts))
    assert [each.text for each in made] == ["No need.", "8", "no"]
    assert [[turn.text for turn in each.turns if turn.role == "tool"] for each in made] == [[], ["2", "4", "6"], ["8"]]
    sizes = [(len(prompts), sampling.num_completions) for prompts, sampling, _ in inner.asked]
    assert sizes == [(1, 3), (2, 1), (1, 1)]
    ids = [prompt.id for prompts, _, _ in inner.asked[1:] for prompt in prompts]
    assert ids == [make_turn_request_id(7, 3, 1, 1), make_turn_request_id(7, 3, 2, 1), make_turn_request_id(7, 3, 1, 2)]
    first, last = inner.asked[0][0][0], inner.asked[2][0][0]
    assert last.token_ids == first.token_ids + last.later_turn_token_ids and last.text == first.text
    assert len({request_seed(SAMPLING.seed, 3, id_, 0) for id_ in ids}) == 3


def test_what_goes_wrong_is_told_to_the_policy(talk: Any, tokenizer: Any) -> None:
    told = {
        call("act", how="hang"): "Error: not done in 0.5 s",
        call("act", how="kill"): "Error: its process was killed by signal 9",
        call("act", how="x<|im_end|>"): "Error: ValueError: x< |im_end|>",
        call("nobody"): "Error: there is no tool 'nobody'; there are: add, act",
        "<tool_call>{]</tool_call>": "Error: the tool call cannot be read: Expecting property name",
    }
    made, _ = talk(*([said + "<|im_end|>", "Sorry.<|im_end|>"] for said in told))
    for each, error in zip(made, told.values(), strict=True):
        text = decoded(tokenizer, each.segments[1].token_ids)
        assert text.startswith(TOLD.partition("{}")[0] + error) and text.count("<|im_end|>") == 1
        assert (each.text, each.turns[1].is_error) == ("Sorry.", True)
    assert compute_turn_metrics(made)["completion/tool_errors"] == 1.0


def test_the_text_of_a_turn_has_the_special_tokens_that_mark_its_calls(folder: Path, model: PreTrainedModel) -> None:
    settings, said = engine_settings(folder, model, 1000), call("add", a=2, b=3)
    settings.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    turns = MultiTurnEngine(Scripted(settings.tokenizer, [f"{said}<|im_end|>", "5<|im_end|>"]), settings)
    [group] = generate(turns, [Prompt(7, (1, 2), "", "")], SAMPLING, step=3)
    turns.close()
    assert [turn.text for turn in group.completions[0].turns] == [said, "5", "5"]


def test_a_conversation_is_cut_off_at_its_turns(talk: Any) -> None:
    asks = call("add", a=1, b=1) + "<|im_end|>"
    [made], _ = talk([asks] * 3, max_assistant_turns=2)
    assert [turn.role for turn in made.turns] == ["assistant", "tool", "assistant"]
    assert made.finish_reason == "length"


def test_tokens_of_tools_count_and_no_conversation_has_more_than_its_tokens(talk: Any, tokenizer: Any) -> None:
    asks, last = call("add", a=1, b=1) + "<|im_end|>", "The sum of both is two.<|im_end|>"
    length = len(tokenizer(asks + TOLD.format(2), add_special_tokens=False)["input_ids"])
    [made], inner = talk([asks, last], sampling=replace(SAMPLING, max_tokens=length + 4))
    assert (len(made.token_ids), made.text, made.finish_reason) == (length + 4, "The ", "length")
    assert inner.asked[1][1].max_tokens == 4
    [made], inner = talk([asks, last], sampling=replace(SAMPLING, max_tokens=length))
    assert ([s.is_sampled for s in made.segments], made.finish_reason) == ([True], "length")
    prompt = len(inner.asked[0][0][0].token_ids)
    [made], inner = talk([asks, last], max_model_len=prompt + length)
    assert (len(made.segments), made.finish_reason) == (1, "length")


def test_who_has_less_room_than_its_neighbours_is_cut(talk: Any) -> None:
    short, long = call("add", a=1, b=1) + "<|im_end|>", " " * 20 + call("add", a=1, b=1) + "<|im_end|>"
    last = f"{call('add', a=1, b=1)} or more<|im_end|>"
    total = 134
    (one, other), inner = talk([short, last], [long, last], sampling=replace(SAMPLING, max_tokens=total))
    assert [len(prompts) for prompts, _, _ in inner.asked] == [1, 2]
    assert one.num_sampled - other.num_sampled <= 20
    assert len(other.token_ids) == total and other.finish_reason == "length"
    assert other.text == one.text[: len(other.text)]


def test_a_turn_without_a_token_is_a_completion_without_any(folder: Path, model: PreTrainedModel) -> None:
    """As one that is cut off before an image that the policy drew as its first token."""
    prompt, empty = Prompt(7, (1, 2), "", ""), Completion((Segment((), True, (), 4),), "length", "")
    inner: Any = SimpleNamespace(
        name="", weight_format="shared", ranks_per_engine=1, submit=lambda *asked: None, close=lambda: None,
        completed=iter([[Group(prompt, (empty, empty), 3)], []]).__next__,
    )  # fmt: skip
    turns = MultiTurnEngine(inner, engine_settings(folder, model, 100, enable_tools=False))
    [group] = generate(turns, [prompt], replace(SAMPLING, num_completions=2), step=3)
    turns.close()
    assert group.version == 4 and [made.token_ids for made in group.completions] == [(), ()]
    assert make_sample(prompt, group.completions[0], 1.0, 1.0).num_learned == 0


def test_trainer_and_engine_agree_on_every_drawn_token_of_a_conversation(
    folder: Path, model: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random policy calls nothing, so every turn is taken for a call; a tenth of the vocabulary ends one."""
    end_ids = [tokenizer.eos_token_id, *range(60, 85)]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end_ids)
    engine: Any = make_engine(engine_settings(folder, model, 200, max_assistant_turns=3))
    monkeypatch.setattr("cosmos_core.rollout.turns.parse_tool_calls", lambda text: parse_any(text))
    prompts = [Prompt(i, tuple(range(10 + i, 30 + 2 * i)), "", "") for i in range(3)]
    sampling = Sampling(temperature=0.7, max_tokens=110, num_completions=3, seed=1)
    groups = generate(engine, prompts, sampling, 1)
    alone = generate(engine, prompts[1:2], sampling, 1)
    engine.close()
    assert [c.token_ids for c in alone[0].completions] == [c.token_ids for c in groups[1].completions]
    several = [(g.prompt, c) for g in groups for c in g.completions if len(c.segments) > 1]
    assert len(several) >= 4
    for prompt, made in several:
        ids = torch.tensor([[*prompt.token_ids, *made.token_ids]])
        expected = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=0.7)[0].detach().numpy()
        sample = make_sample(prompt, made, 1.0, 1.0)
        learned = np.flatnonzero(sample.loss_mask[1:])
        assert sample.rollout_logprobs is not None
        assert np.abs(expected[learned] - sample.rollout_logprobs).max() < 1e-4


def parse_any(text: str) -> list[Any]:
    from cosmos_core.tools.base import ToolCall

    return [ToolCall("add", {"a": len(text), "b": 1})]


QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}"
    "\n</think>\n\n{% endif %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def text_of(tokenizer: Any, template: str, **settings: Any) -> str:
    text = ToolResultTokens(tokenizer, PromptRendering(template=template, **settings), [tokenizer.eos_token_id])
    return decoded(tokenizer, text.tokenise_results([("add", ToolResult("5")), ("add", ToolResult("6"))]))


def test_only_what_the_template_writes_behind_a_turn_is_put_there(tokenizer: Any) -> None:
    both = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n"
    assert text_of(tokenizer, CHATML) == both + "<|im_start|>assistant\n"
    assert text_of(tokenizer, CHATML, add_generation_prompt=False) == both
    assert text_of(tokenizer, QWEN3) == both + "<|im_start|>assistant\n"
    assert text_of(tokenizer, QWEN3, enable_thinking=False) == both + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_a_template_that_refuses_two_calls_writes_their_results(tokenizer: Any) -> None:
    """As that of Llama 3.1, which looks only at `tool_calls`."""
    refusal = "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    template = CHATML.replace("{% for m in messages %}", refusal, 1)
    assert text_of(tokenizer, template) == text_of(tokenizer, CHATML)


def test_a_tool_writes_no_special_token_that_has_no_role(folder: Path) -> None:
    """As <|start_header_id|> of Llama 3 and <|image|> of its vision models."""
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([AddedToken("<|image|>", special=True), AddedToken("<answer>")])
    assert "<|image|>" not in tokenizer.all_special_tokens
    results = ToolResultTokens(tokenizer, PromptRendering(template=CHATML), [tokenizer.eos_token_id])
    said = decoded(tokenizer, results.tokenise_results([("add", ToolResult("<|image|><answer><|im_start|>"))]))
    assert said.startswith("\n<|im_start|>tool\n< |image|><answer>< |im_start|><|im_end|>")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETS_THOUGHTS, "when a tool result follows; give another"),
        (PLAIN_WORDS, "when a tool result follows; give another"),
        (MISTRAL.replace("</s>", "<|im_end|>"), "only user and assistant"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), "it leaves out what a tool says"),
        ("{% if messages | length > 3 %}{{ raise_exception('one call') }}{% endif %}" + CHATML, "turn: one call"),
        (CHATML.replace("{{ m.content }}", "{{ m.content if loop.index < 4 }}"), "calls in a turn: it leaves out what"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_keep_its_prefix_is_refused_by_name(
    template: str, reason: str, tokenizer: Any
) -> None:
    with pytest.raises(ModelError, match=rf"the chat template of '.*tiny' does not keep .*{reason}"):
        text_of(tokenizer, template)


def test_the_engine_is_what_it_is_around(folder: Path, model: PreTrainedModel) -> None:
    engine: Engine = make_engine(engine_settings(folder, model, 64, enable_tools=False))
    assert (engine.name, engine.weight_format, engine.ranks_per_engine) == ("hf", "shared", 1)
    assert engine.load_weights(4, ()).version == 4
    assert len(engine.logprobs([1, 2, 3])) == 2
    assert not hasattr(engine, "step")
    engine.close()


class InSteps(Scripted):
    """A scripted engine that an own process would have."""

    step = Scripted.completed

    def abort(self) -> None:
        self._waiting.clear()


def test_passes_and_aborts_are_those_of_conversations(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    asks, last = call("add", a=1, b=1) + "<|im_end|>", "2<|im_end|>"
    beats: list[str] = []
    settings = replace(engine_settings(folder, model, 1000), beat=lambda: beats.append("waits for tools"))
    engine: Any = MultiTurnEngine(InSteps(tokenizer, [asks, asks, asks, last]), settings)
    beats.clear()
    prompt = Prompt(7, tuple(tokenizer(ASKED, add_special_tokens=False)["input_ids"]), ASKED, "5")
    engine.submit([prompt], SAMPLING, 0)
    assert engine.step() == [] and beats, "the first turn calls a tool"
    engine.abort()
    assert engine.step() == [] == engine.completed()
    engine.submit([prompt], SAMPLING, 0)
    assert engine.step() == []
    [group] = engine.step()
    engine.close()
    assert [turn.role for turn in group.completions[0].turns] == ["assistant", "tool", "assistant"]
