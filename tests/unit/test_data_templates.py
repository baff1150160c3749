"""Token by token: a mask is 1 on what the assistant has to write, in the chat templates of fifteen model families."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import pytest

from cosmos_core.data.conversation import tokenise_conversation
from cosmos_core.data.rendering import RefusedRow
from tests.unit.chat_families import FAMILIES, Family
from tests.unit.data_tokenizers import byte_tokenizer


def turns(*contents: str, system: str = "") -> list[dict[str, str]]:
    """The user and the assistant in turn."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *said] if system else said


CONVERSATIONS = {
    "one turn": turns("What is the answer?", "The answer is 42."),
    "many turns": turns("One?", "First.", "Two?", "Second.", "Three?", "Third.\n\nAnd more."),
    "a system turn": turns("One?", "First.", "Two?", "Second.", system="Be brief."),
    "a last question": turns("One?", "First.", "Two?"),
    "thoughts": turns("One?", "<think>\nhm\n</think>\n\nFirst.", "Two?", "<think>\nmm\n</think>\n\nSecond."),
    "empty thoughts": turns("One?", "<think>\n\n</think>\n\nFirst.", "Two?", "<think>\n\n</think>\n\nSecond."),
    "blanks at both ends": turns(" \n One? \n", "\n  First. \n\n", "\tTwo?  ", " Second.\n", system=" Be brief.\n"),
    "characters of many bytes": turns("é😀?", "👩‍👩‍👧 são 日本語", "나?", "😀", system="ñ"),
    "the same words": turns("First.", "First.", "First.", "First."),
    "words of the template": turns(
        "ASSISTANT: or USER: or assistant\n?", "user\nASSISTANT: system", "model\n", "model"
    ),
    "an answer that says nothing": turns("One?", "First.", "Two?", "", "Three?", "Third."),
    "seventy answers": turns(*(f"{i}?" if i % 2 else f"{i}." for i in range(1, 141))),
}


CROSSED = {"a system turn", "thoughts", "blanks at both ends", "characters of many bytes", "words of the template"}


def expected_mask(tokenizer: Any, family: Family, messages: list[dict[str, str]], ids: list[int]) -> list[int]:
    """1 for each token with a byte of a piece that the model has to write, from the lengths of tokens in bytes."""
    added = tokenizer.get_added_vocab()
    # Of a token that was learned from bytes each character stands for one byte.
    names = tokenizer.convert_ids_to_tokens(ids)
    ends = list(accumulate(len(name.encode()) if name in added else len(name) for name in names))
    bytes_to_write = [bit for text, bit in family.pieces(messages) for _ in text.encode()]
    assert ends[-1] == len(bytes_to_write)
    return [int(any(bytes_to_write[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


CROSSING = [*FAMILIES][::3]


@cache
def tokenizer_of(family: Family, num_merges: int) -> Any:
    return byte_tokenizer(family.template, end_token=family.end_token, num_merges=num_merges, special=family.special)


def cells() -> Iterator[Any]:
    """All families and talks with a token a byte, and with larger tokens the talks in which these cross a border; a
    talk of seventy answers with a token behind each turn and with words alone."""
    for name, family in FAMILIES.items():
        for said, messages in CONVERSATIONS.items():
            for num_merges, tokens in ((0, "bytes"), (300, "merged")):
                is_kept = (num_merges == 0 and said != "many turns") or (said in CROSSED and name in CROSSING)
                if said == "seventy answers":
                    is_kept = name in {"ChatML", "Vicuna"} and num_merges > 0
                marks = [pytest.mark.full] * (not is_kept)
                yield pytest.param(family, messages, num_merges, id=f"{name}-{said}-{tokens}", marks=marks)


@pytest.mark.parametrize(("family", "messages", "num_merges"), cells())
def test_what_the_assistant_has_to_write_is_learned_and_nothing_else(
    family: Family, messages: list[dict[str, str]], num_merges: int
) -> None:
    tokenizer = tokenizer_of(family, num_merges)
    if family.refuses_system and messages[0]["role"] == "system":
        with pytest.raises(RefusedRow, match="roles must alternate"):
            tokenise_conversation(tokenizer, messages, "row")
        return
    rendered = "".join(text for text, _ in family.pieces(messages))
    assert tokenizer.apply_chat_template(messages, tokenize=False) == rendered, "the two versions of the template agree"
    ids, mask = tokenise_conversation(tokenizer, messages, "row")
    assert tokenizer.decode(ids) == rendered
    wanted = expected_mask(tokenizer, family, messages, ids)
    told = [(tokenizer.decode([i]), is_learned) for i, is_learned in zip(ids, mask, strict=True)]
    assert told == [(tokenizer.decode([i]), is_learned) for i, is_learned in zip(ids, wanted, strict=True)]
    assert 0 < sum(mask) < len(mask)
