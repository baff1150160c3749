"""Masks of real conversations: exactly the responses of ShareGPT and the solutions of GSM8K are learned."""

from __future__ import annotations

import json

import pytest

from cosmos_core.data.conversation import conversation_tokens
from tests.unit.data_tokenizers import CHATML, FORGETS_THOUGHTS, LLAMA3, TRIMS_THE_END, byte_tokenizer, learned
from tests.unit.test_data_conversation import TEST_DATA


@pytest.mark.parametrize("template", [CHATML, LLAMA3, TRIMS_THE_END, FORGETS_THOUGHTS])
def test_real_conversations_learn_exactly_the_answers(template):
    import datasets

    folder = TEST_DATA / "sharegpt52k_small"
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set COSMOS_TEST_DATA")
    end = "<|eot_id|>" if template is LLAMA3 else "<|im_end|>"
    tokenizer = byte_tokenizer(template, end_token=end)
    for row in datasets.load_from_disk(str(folder))["train"]:
        answers = [turn["content"] for turn in row["conversation"] if turn["role"] == "assistant"]
        ids, mask = conversation_tokens(tokenizer, row["conversation"], "row")
        texts = [text.removeprefix("<think>\n\n</think>\n\n") for text in learned(tokenizer, ids, mask)]
        expected = [answer.lstrip() if template is FORGETS_THOUGHTS else answer for answer in answers]
        expected = [answer.strip() if template is LLAMA3 else answer for answer in expected]
        assert texts == [answer + end for answer in expected]


def test_gsm8k_learns_exactly_the_solutions():
    file = TEST_DATA / "gsm8k" / "test.jsonl"
    if not file.is_file():
        pytest.skip(f"no test data at {file}; set COSMOS_TEST_DATA")
    tokenizer = byte_tokenizer(CHATML)
    for line in file.read_text().splitlines()[:50]:
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        ids, mask = conversation_tokens(tokenizer, turns, "row")
        assert learned(tokenizer, ids, mask) == [row["answer"] + "<|im_end|>"]
