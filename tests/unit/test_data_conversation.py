"""Which tokens are learned, for chat templates of every habit; expected texts are written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizer

from cosmos_core.data.chat import PromptRendering
from cosmos_core.data.conversation import (
    render_prompt,
    tokenise_conversation,
    tokenise_prompt_and_completion,
    truncate_tokens,
)
from cosmos_core.data.messages import SkippedRow, read_conversation
from cosmos_core.data.rendering import RefusedRow
from cosmos_core.errors import DataError
from tests.unit.data_tokenizers import (
    CHATML,
    FORGETS_THOUGHTS,
    LLAMA3,
    PLAIN_WORDS,
    TRIMS_THE_END,
    byte_tokenizer,
    learned,
    unlearned,
)

TWO_TURNS = [
    {"role": "user", "content": "What is the answer?"},
    {"role": "assistant", "content": "The answer is 42."},
    {"role": "user", "content": "Sure? \n"},
    {"role": "assistant", "content": "  Yes é😀!\n\n Quite."},
]
THOUGHTS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nmm\n</think>\n\nsecond"},
]


def masked(tokenizer: Any, messages: Any) -> tuple[list[str], list[str]]:
    ids, mask = tokenise_conversation(tokenizer, messages, "row")
    return learned(tokenizer, ids, mask), unlearned(tokenizer, ids, mask)


@pytest.mark.parametrize("template", [CHATML, TRIMS_THE_END])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_answers_and_their_end_tokens_are_learned_and_nothing_else(template, trim_offsets):
    yes, no = masked(byte_tokenizer(template, trim_offsets=trim_offsets), TWO_TURNS)
    assert yes == ["The answer is 42.<|im_end|>", "  Yes é😀!\n\n Quite.<|im_end|>"]
    gap = "\n" if template is CHATML else "\n\n"
    assert no[:2] == [
        f"<|im_start|>user\nWhat is the answer?<|im_end|>{gap}<|im_start|>assistant\n",
        f"{gap}<|im_start|>user\nSure? \n<|im_end|>{gap}<|im_start|>assistant\n",
    ]


def test_spaces_around_the_text_of_a_row_reach_its_tokens() -> None:
    assert read_conversation({"messages": TWO_TURNS}, "row") == TWO_TURNS
    pair = read_conversation({"prompt": "  2 + 2 =\n", "response": " 4 "}, "row")
    yes, no = masked(byte_tokenizer(CHATML), pair)
    assert no[0].endswith("user\n  2 + 2 =\n<|im_end|>\n<|im_start|>assistant\n") and yes == [" 4 <|im_end|>"]


# As DeepSeek R1 and others do: the prompt opens the thoughts, and those of earlier turns are forgotten.
ASKS_FOR_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_thoughts_that_the_generation_prompt_opens_are_learned_from_behind_it():
    yes, no = masked(byte_tokenizer(ASKS_FOR_THOUGHTS), THOUGHTS)
    assert yes == ["first<|im_end|>", "mm\n</think>\n\nsecond<|im_end|>"]
    assert no[1] == "\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("question", ["", "a", "n", "m", "k", ">", "assistant", "think", "end|>\n"])
def test_a_question_that_is_a_piece_of_the_template_changes_no_mask(question):
    turns = [{"role": "user", "content": question}, THOUGHTS[1]] * 2
    yes, _ = masked(byte_tokenizer(FORGETS_THOUGHTS), turns)
    assert yes == ["first<|im_end|>", "<think>\nhm\n</think>\n\nfirst<|im_end|>"]
    yes, _ = masked(byte_tokenizer(ASKS_FOR_THOUGHTS), turns)
    assert yes == ["first<|im_end|>", "hm\n</think>\n\nfirst<|im_end|>"]


GREETING = [{"role": "assistant", "content": "Hi."}, *TWO_TURNS[:2]]
NO_QUESTION = "{{ raise_exception('no question') }}"
WANTS_A_QUESTION = f"{{% if 'user' not in messages | map(attribute='role') %}}{NO_QUESTION}{{% endif %}}{CHATML}"
SAYS_WHO = "{% if messages[0].role != 'system' %}<|im_start|>system\nassistant user<|im_end|>\n{% endif %}" + CHATML
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]], ids=["", "system"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hi.<|im_end|>", "The answer is 42.<|im_end|>"]),
        (LLAMA3, ["Hi.<|eot_id|>", "The answer is 42.<|eot_id|>"]),
        (TRIMS_THE_END, ["Hi.<|im_end|>", "The answer is 42.<|im_end|>"]),
        (FORGETS_THOUGHTS, ["Hi.<|im_end|>", EMPTY + "The answer is 42.<|im_end|>"]),
        (PLAIN_WORDS, ["Hi.\n\n", "The answer is 42.\n\n"]),
        (WANTS_A_QUESTION, ["Hi.<|im_end|>", "The answer is 42.<|im_end|>"]),
        (SAYS_WHO, ["Hi.<|im_end|>", "The answer is 42.<|im_end|>"]),
        (ASKS_FOR_THOUGHTS, ["Hi.<|im_end|>", "The answer is 42.<|im_end|>"]),
    ],
    ids=["chatml", "llama3", "trims", "forgets", "plain", "wants a question", "says who", "asks for thoughts"],
)
def test_a_conversation_that_the_assistant_begins_learns_its_answers(template, expected, system):
    end = "<|eot_id|>" if template is LLAMA3 else "<|im_end|>"
    assert masked(byte_tokenizer(template, end_token=end), [*system, *GREETING])[0] == expected


def test_a_beginning_of_the_assistant_that_the_template_hides_is_skipped():
    repeats = "{{ messages[0].content }}\n" + CHATML
    assert masked(byte_tokenizer(repeats), TWO_TURNS[:2])[0] == ["The answer is 42.<|im_end|>"]
    with pytest.raises(SkippedRow, match=r"row 3: skipped, that begins with the assistant, in a way that the chat te"):
        tokenise_conversation(byte_tokenizer(repeats), GREETING, "row 3")


def test_two_assistant_turns_in_a_row_are_both_learned():
    turns = [*TWO_TURNS[:2], {"role": "assistant", "content": "More."}]
    assert masked(byte_tokenizer(CHATML), turns)[0] == ["The answer is 42.<|im_end|>", "More.<|im_end|>"]


# No beginning of a conversation is a beginning of the whole, so that the marks decide.
MARKED = (
    "{{ messages | length }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("answer", ["Yes 😀", "好的。", "", "é", "plain", " \n"])
def test_marks_that_exclude_the_end_token_lose_no_byte_and_no_end(answer):
    turns = [*TWO_TURNS[:2], {"role": "user", "content": "So?"}, {"role": "assistant", "content": answer}]
    marked, plain = byte_tokenizer(MARKED, num_merges=0), byte_tokenizer(CHATML, num_merges=0)
    expected = ["The answer is 42.<|im_end|>", f"{answer}<|im_end|>"]
    assert masked(marked, turns)[0] == expected == masked(plain, turns)[0]


CALL = {"name": "add", "arguments": {"a": 20, "b": 22}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = [
    {"role": "user", "content": "20 + 22?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]


def trl_template(name):
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this TRL has no template {name}")
    return file.read_text()


def test_tool_calls_are_learned_and_tools_are_handed_to_the_template_of_qwen3():
    tokenizer = byte_tokenizer(trl_template("qwen3"))
    yes, no = masked(tokenizer, CALLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call><|im_end|>'
    assert yes == [call, "<think>\n\n</think>\n\nIt is 42.<|im_end|>"]
    assert no[1] == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ids, mask = tokenise_conversation(tokenizer, CALLS, "row", [TOOL])
    assert json.dumps(TOOL) in unlearned(tokenizer, ids, mask)[0]
    assert learned(tokenizer, ids, mask) == yes
    assert json.dumps(TOOL) in render_prompt(tokenizer, CALLS[:1], "row", PromptRendering(tools=(TOOL,)))


def test_a_tool_call_that_the_template_leaves_out_is_refused():
    with pytest.raises(RefusedRow, match="with a tool call that the chat template leaves out"):
        tokenise_conversation(byte_tokenizer(CHATML), CALLS, "row")


def test_a_template_that_reorders_turns_is_an_error_that_names_row_and_remedy():
    reverses = "{% for m in messages | reverse %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(DataError, match=r"^train.jsonl:7: the assistant's turns cannot be found.*generation"):
        tokenise_conversation(byte_tokenizer(reverses), TWO_TURNS, "train.jsonl:7")


def test_a_template_that_writes_nothing_for_string_content_is_an_error():
    parts_only = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    with pytest.raises(DataError, match=r"row: the chat template leaves out the user's text 'What is the answer"):
        tokenise_conversation(byte_tokenizer(parts_only), TWO_TURNS, "row")


# Templates of real models as TRL keeps them, each with TRL's own version that marks what the assistant writes. TRL
# also learns the line break after the end token; Qwen2.5's mark starts one line break early. Both are set aside.
REAL_TEMPLATES = ["cohere", "cohere2", "gemma3", "lfm2", "llama3", "phi3", "qwen2_5", "qwen2_5_vl", "qwen3"]


@pytest.mark.parametrize("name", [*REAL_TEMPLATES, "qwen3_vl", "qwen3_instruct_2507"])
def test_real_templates_agree_with_the_marks_of_trl(name):
    messages, template, training = TWO_TURNS[:2], trl_template(name), trl_template(f"{name}_training")
    ids, mask = tokenise_conversation(byte_tokenizer(template), messages, "row")
    oracle = byte_tokenizer(template)
    oracle.chat_template = training
    expected = oracle.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == expected["input_ids"]
    ours, theirs = learned(oracle, ids, mask), learned(oracle, ids, expected["assistant_masks"])
    assert [text.strip("\n") for text in ours] == [text.strip("\n") for text in theirs]
    assert "42." in ours[0] and len(ours) == 1


def test_tokens_are_those_of_the_whole_rendering_tokenised_once():
    tokenizer = byte_tokenizer(CHATML)
    ids, _ = tokenise_conversation(tokenizer, TWO_TURNS, "row")
    assert ids == list(tokenizer.apply_chat_template(TWO_TURNS)["input_ids"])


def test_a_token_across_the_border_of_prompt_and_answer_is_learned():
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.add_tokens(["t:The"])
    ids, mask = tokenise_conversation(tokenizer, TWO_TURNS[:2], "row")
    assert learned(tokenizer, ids, mask) == ["t:The answer is 42."]


def test_plain_text_is_learned_whole_with_an_end_token():
    tokenizer = byte_tokenizer(None)
    ids, mask = tokenise_conversation(tokenizer, "Hello there", "row")
    assert tokenizer.decode(ids) == "Hello there<|im_end|>"
    assert mask == [1] * len(ids)


def test_a_text_that_begins_with_the_first_token_gets_no_second_one():
    tokenizer = byte_tokenizer(LLAMA3, end_token="<|eot_id|>")
    first_token = [("<s>", tokenizer.bos_token_id)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=first_token)
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert text.startswith("<s>") and text.endswith("<|eot_id|>")
    for said in (text, text.removeprefix("<s>")):
        ids, mask = tokenise_conversation(tokenizer, said, "row")
        assert (tokenizer.decode(ids), len(ids)) == (text, sum(mask))
    prompt, completion = text[: text.index("The answer is 42")], text[text.index("The answer is 42") :]
    for asked in (prompt, prompt.removeprefix("<s>")):
        ids, mask = tokenise_prompt_and_completion(tokenizer, asked, completion, "row")
        assert (tokenizer.decode(ids), learned(tokenizer, ids, mask)) == (text, [completion])


def test_cutting_keeps_the_left_and_refuses_to_leave_nothing_to_learn():
    tokenizer = byte_tokenizer(CHATML)
    ids, mask = tokenise_conversation(tokenizer, TWO_TURNS, "row")
    first = mask.index(1)
    assert truncate_tokens((ids, mask), first + 2, "row") == (ids[: first + 2], [0] * first + [1, 1])
    reason = "a.jsonl:3: skipped, longer than policy.model_max_length with nothing left to learn"
    with pytest.raises(SkippedRow, match=reason):
        truncate_tokens(tokenise_conversation(tokenizer, TWO_TURNS, "a.jsonl:3"), first, "a.jsonl:3")


def test_a_first_token_alone_is_nothing_to_learn():
    with pytest.raises(SkippedRow, match="row: skipped, with nothing to learn"):
        truncate_tokens(([7, 8], [1, 0]), 10, "row")
    assert truncate_tokens(([7, 8], [0, 1]), 10, "row") == ([7, 8], [0, 1])


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [{"role": "assistant", "content": " \n"}],
        [{"role": "assistant", "content": "", "toxic": False, "state": "OK"}],
    ],
    ids=["none", "blank", "labelled"],
)
def test_a_conversation_without_an_assistant_turn_is_skipped(answer):
    with pytest.raises(SkippedRow, match=r"a\.jsonl:9: skipped, without an assistant turn to learn"):
        tokenise_conversation(byte_tokenizer(CHATML), [*TWO_TURNS[:1], *answer], "a.jsonl:9")


class Characters(PreTrainedTokenizer):
    """A tokenizer without offsets. With `pairs` it joins `assistant\\n` and the character after it."""

    def __init__(self, pairs: bool = False, **options: Any) -> None:
        self.pairs = pairs
        super().__init__(pad_token="\0", eos_token="\0", **options)

    vocab_size = 0x110000

    def get_vocab(self) -> dict[str, int]:
        return {}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        letters = list(text)
        if self.pairs and "assistant\nT" in text:
            at = text.index("\nT")
            letters[at : at + 2] = [text[at : at + 2]]
        return letters

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token) if len(token) == 1 else 0x10FFFF

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def test_a_slow_tokenizer_is_masked_piece_by_piece():
    template = CHATML.replace("<|im_end|>", "|")
    ids, mask = tokenise_conversation(Characters(chat_template=template), TWO_TURNS[:2], "row")
    assert "".join(chr(i) for i, bit in zip(ids, mask, strict=True) if bit) == "The answer is 42.|\n"


def test_a_slow_tokenizer_whose_tokens_cross_the_border_is_an_error():
    with pytest.raises(DataError, match=r"row: Characters cannot say which characters a token covers"):
        tokenise_conversation(Characters(pairs=True, chat_template=CHATML), TWO_TURNS[:2], "row")


def test_a_prompt_ends_with_the_generation_prompt():
    text = render_prompt(byte_tokenizer(CHATML), TWO_TURNS[:1], "row")
    assert text == "<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n"
