"""Turns that are not learned, marks of the template, end tokens that begin the next turn, and turns that quote one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.data.conversation import tokenise_conversation
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.messages import SkippedRow, read_conversation
from cosmos_core.data.prepare import run
from cosmos_core.data.rendering import RefusedRow
from cosmos_core.errors import DataError
from tests.unit.chat_families import FAMILIES, Family
from tests.unit.data_tokenizers import CHATML, FORGETS_THOUGHTS, TRIMS_THE_END, byte_tokenizer, learned
from tests.unit.test_data_prepare import make_stage, sft
from tests.unit.test_data_templates import expected_mask, turns

FOUR = turns("One?", "First.", "Two?", "Second.")
NO = [{"weight": 0}, {"loss": False}, {"train": False}, {"loss_mask": 0}, {"trainable": False}, {"train": 0.0}]


def masked(tokenizer: Any, conversation: Any, end_ids: tuple[int, ...] = ()) -> list[str]:
    return learned(tokenizer, *tokenise_conversation(tokenizer, conversation, "row", None, end_ids))


@pytest.mark.parametrize("key", [*NO, {"weight": 1, "loss": False}], ids=str)
@pytest.mark.parametrize("template", [CHATML, TRIMS_THE_END, FORGETS_THOUGHTS], ids=["chatml", "trims", "forgets"])
def test_a_turn_that_says_so_is_not_learned_in_each_format_of_rows(key: dict[str, Any], template: str) -> None:
    openai = [FOUR[0], {**FOUR[1], **key}, *FOUR[2:]]
    sharegpt = [{"from": t.pop("role"), "value": t.pop("content"), **t} for t in map(dict, openai)]
    tokenizer = byte_tokenizer(template)
    for row in ({"messages": openai}, {"conversations": sharegpt}, {"messages": json.dumps(openai)}):
        read = read_conversation(row, "row")
        assert not isinstance(read, str) and all(set(turn) <= {"role", "content", "weight"} for turn in read)
        assert [text[-17:] for text in masked(tokenizer, read)] == ["Second.<|im_end|>"]


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({**FOUR[1], "loss": 0.5}, "loss = 0.5; a turn is learned (1) or not (0)"),
        ({**FOUR[1], "train": "false"}, "train = false; a turn is learned (1) or not (0)"),
        ({**FOUR[1], "loss_mask": [0, 1]}, "loss_mask = [0, 1]; a turn is learned (1) or not (0)"),
        ({**FOUR[1], "loss_scale": 0}, "'loss_scale' is not read"),
        ({**FOUR[1], "learn": False}, "'learn' is not read"),
        ({**FOUR[1], "is_masked": 1}, "'is_masked' is not read"),
        ({**FOUR[1], "compute_loss": "False"}, "'compute_loss' is not read"),
        ({**FOUR[1], "mask": [0, 1]}, "'mask' is not read"),
        ({**FOUR[1], "skip": True}, "'skip' is not read"),
        ({**FOUR[1], "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}, "'train_detail' is not"),
        ({**FOUR[0], "train": True}, "train = True, but only turns of the assistant are learned"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a", "loss": False}]}, "the content has 'loss'"),
    ],
    ids=["half", "text", "list", "scale", "learn", "masked", "word", "flags", "skip", "detail", "user", "part"],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(turn: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        read_conversation({"messages": [FOUR[0], turn]}, "row")
    assert told in str(caught.value) and str(caught.value).startswith("row, turn 2 of 'messages'")


def test_keys_that_arrow_fills_in_and_a_weight_of_one_say_nothing() -> None:
    filled = [{**FOUR[0], "loss": None, "weight": 1, "train": False}, {**FOUR[1], "loss": None, "train": True}]
    assert masked(byte_tokenizer(CHATML), read_conversation({"messages": filled}, "row")) == ["First.<|im_end|>"]


def marked(inside: str, *, only: str = "true", head: str = "") -> str:
    return head + (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and " + only + " %}"
        "{% generation %}" + inside + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )


CONTENT, WITHOUT_THOUGHTS = "{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"
LAST = marked(CONTENT, only="loop.last")
LEAVES_OUT = marked("{{ m.content.split('</think>')[-1] }}").replace(
    "{% generation %}", "{{ m.content.split('</think>')[0] + '</think>' if '</think>' in m.content }}{% generation %}"
)


@pytest.mark.parametrize("length", [4, pytest.param(80, marks=pytest.mark.full), 200], ids=str)
@pytest.mark.parametrize(
    "template", [marked(CONTENT), LAST, LEAVES_OUT, marked(CONTENT, head="{{ messages | length }}\n")],
    ids=["all", "last", "thoughts", "no prefix"],
)  # fmt: skip
def test_marks_of_the_template_win_and_keep_the_end_token(template: str, length: int) -> None:
    tokenizer = byte_tokenizer(template, num_merges=0)
    conversation = turns(*(f"{i}?" if i % 2 else f"<think>{i}</think>Yes é {i}." for i in range(1, length + 1)))
    ids, mask = tokenise_conversation(tokenizer, conversation, "row")
    told = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    end, theirs = tokenizer.eos_token_id, list(told["assistant_masks"])
    expected = [bit or (i == end and theirs[at - 1]) for at, (i, bit) in enumerate(zip(ids, theirs, strict=True))]
    assert ids == told["input_ids"] and mask == expected and sum(mask)


MARKS = "{{ m.content.split('</think>')[0] }}</think>{% generation %}{{ m.content.split('</think>')[1] }}"
MARKS += "{% endgeneration %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(m) %}" + MARKS + "{% endmacro %}" + CHATML.replace("{{ m.content }}", "{{ say(m) }}"),
        CHATML.replace("{{ m.content }}", "{% set text %}" + MARKS + "{% endset %}{{ text }}"),
        CHATML.replace("{{ m.content }}", MARKS.replace("generation %", "generation +%").replace("{%", "{%+")),
        CHATML.replace("{{ m.content }}", MARKS.replace("generation %", "generation -%").replace("{%", "{%-")),
        CHATML.replace("{{ m.content }}", MARKS + "{{ ' ' }}"),
        CHATML.replace("{{ m.content }}", MARKS).replace("{% generation %}", "\n {% generation %}\n{%- if true %}\n")
        .replace("{% endgeneration %}", "\n  {%- endif %}{% endgeneration %}\n"),
    ],
    ids=["macro", "set", "plus", "minus", "space", "lines"],
)  # fmt: skip
def test_marks_win_wherever_the_template_writes_them(template: str) -> None:
    template = template.replace("{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'user' %}{{ m.content }}{% else %}")
    template = template.replace("<|im_end|>\n{% endfor", "{% endif %}<|im_end|>\n{% endfor")
    conversation = turns("One?", "<think>hm</think>First.", "Two?", "<think>so</think>Second.")
    found = [text.replace(" <", "<") for text in masked(byte_tokenizer(template), conversation)]
    assert found == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_a_mark_in_a_comment_of_the_template_is_no_mark() -> None:
    template = "{# no {% generation %} here #}" + CHATML
    assert masked(byte_tokenizer(template), FOUR) == ["First.<|im_end|>", "Second.<|im_end|>"]


def test_marks_decide_within_the_turns_that_are_learned() -> None:
    conversation = [FOUR[0], {**FOUR[1], "weight": 0}, *FOUR[2:]]
    for template in (marked(CONTENT), LAST):
        assert masked(byte_tokenizer(template), conversation) == ["Second.<|im_end|>"]
    with pytest.raises(SkippedRow, match="the chat template marks nothing to learn"):
        masked(byte_tokenizer(LAST), [*FOUR[:3], {**FOUR[3], "weight": 0}, *FOUR[:1]][:3])


def test_pairs_learn_the_completions_alone_where_marks_leave_out_turns(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": FOUR[:3], "chosen": FOUR[3:], "rejected": "No."}))
    for template in (LAST, LEAVES_OUT, CHATML, FORGETS_THOUGHTS):
        tokenizer = byte_tokenizer(template)
        tokenizer.save_pretrained(tmp_path / "model")
        run(make_stage(tmp_path / "s", tmp_path / "model", sft(data, trainer_type="dpo")))
        pairs = open_pairs(tmp_path / "s" / "data", "train")
        found = [learned(tokenizer, *(each.tolist() for each in rows[0])) for rows in (pairs.chosen, pairs.rejected)]
        assert [len(texts) for texts in found] == [1, 1]
        assert found[0][0].endswith("Second.<|im_end|>") and found[1][0].endswith("No.<|im_end|>")


# As GLM-4: the first token of the next turn ends a turn, and nothing follows the last one.
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ m.content }}{% else %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As GLM-4.5: the thoughts of earlier turns are gone, so that no beginning is a beginning of the whole.
GLM_45 = GLM.replace(
    "{{ m.content }}{% else %}",
    "{{ '<think></think>\n' if not loop.last else '<think>hm</think>\n' }}{{ m.content }}{% else %}",
)
MARKED_GLM = GLM.replace("{{ m.content }}{% else %}", "{% generation %}{{ m.content }}{% endgeneration %}{% else %}")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


@pytest.mark.parametrize("template", [GLM, GLM_45, MARKED_GLM], ids=["4", "4.5", "marked"])
def test_a_token_of_the_next_turn_that_ends_generation_is_learned(template: str, tmp_path: Path) -> None:
    special = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
    tokenizer = byte_tokenizer(template, end_token="<|endoftext|>", special=special)
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    tokenizer.save_pretrained(tmp_path / "model")
    ends = [tokenizer.eos_token_id, user, observation]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    conversation = [FOUR[0], {**CALL, "content": "Look."}, {"role": "tool", "content": "3"}, FOUR[1], *FOUR[2:]]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": conversation}))
    run(make_stage(tmp_path / "s", tmp_path / "model", sft(tmp_path / "rows.jsonl")))
    texts = learned(tokenizer, *(each.tolist() for each in open_sequences(tmp_path / "s" / "data", "train")[0]))
    for text, end in zip(texts, ("Look.<|observation|>", "First.<|user|>", "Second."), strict=True):
        assert text.endswith(end)
    assert masked(tokenizer, FOUR)[0].endswith("First.")


def quoting(family: Family) -> list[dict[str, str]]:
    """A first answer that repeats what the template writes between it and the second, control tokens included."""
    whole = [piece for piece in family.pieces(FOUR) if piece[0]]
    first, second = [i for i, (text, _) in enumerate(whole) if "First." in text or "Second." in text]
    tail = whole[first][0].split("First.")[1]
    between = tail + "".join(text for text, _ in whole[first + 1 : second]) + whole[second][0].split("Second.")[0]
    return turns("One?", f"It writes {between}and so on.", "Two?", "Second.")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_turn_that_quotes_the_next_one_is_masked_rightly_or_refused(family: Family) -> None:
    tokenizer = byte_tokenizer(family.template, end_token=family.end_token, special=family.special)
    conversation = quoting(family)
    try:
        ids, mask = tokenise_conversation(tokenizer, conversation, "row")
    except DataError as error:
        assert "one of them quotes the text between two turns" in str(error)
        return
    assert mask == expected_mask(tokenizer, family, conversation, ids)


def test_a_turn_that_quotes_the_next_one_is_refused_where_the_template_is_not_append_only() -> None:
    quoted = "<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    for text in (f"a{quoted}b", quoted, f"{quoted}{quoted}"):
        conversation = turns("One?", text, "Two?", "Second.")
        with pytest.raises(DataError, match="quotes the text between two turns"):
            masked(byte_tokenizer(FORGETS_THOUGHTS), conversation)
        assert masked(byte_tokenizer(TRIMS_THE_END), conversation) == [f"{text}<|im_end|>", "Second.<|im_end|>"]


TAKES_THOUGHTS_OUT = (  # as Qwen3.5 without thinking
    "{% for m in messages %}{% set parts = m.content.split('</think>') %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ parts[0][8:-1] if parts[1:] }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def test_thoughts_in_the_text_are_learned_where_the_generation_prompt_closes_empty_ones() -> None:
    thought = turns("One?", "<think>\nhm\n</think>\n\nFirst.", "Two?", "<think>\nmm\n</think>\n\nSecond.")
    found = masked(byte_tokenizer(TAKES_THOUGHTS_OUT), thought)
    assert found == ["First.<|im_end|>", "mm\n</think>\n\nSecond.<|im_end|>"]
    assert masked(byte_tokenizer(TAKES_THOUGHTS_OUT), FOUR) == ["First.<|im_end|>", "Second.<|im_end|>"]


WRITES_RESULTS_IN_THE_TURN = (  # as Gemma 4
    "{% for m in messages %}{% set i = loop.index %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}look_up{{ messages[i].content if messages[i:] }}{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_result_of_a_tool_is_not_learned_where_the_template_writes_it_into_the_turn_of_the_call() -> None:
    called = {**FOUR[1], "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}
    told = [FOUR[0], called, {"role": "tool", "content": "7"}, FOUR[3]]
    with pytest.raises(RefusedRow, match="with a tool's result that the chat template writes before the text"):
        masked(byte_tokenizer(WRITES_RESULTS_IN_THE_TURN), told)
    written_apart = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ 'look_up' if m.tool_calls }}")
    assert masked(byte_tokenizer(written_apart), told) == ["First.look_up<|im_end|>", "Second.<|im_end|>"]
