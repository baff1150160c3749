"""A tokenizer that loses the text of rows is told or refused, one that only normalises it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cosmos_core.data.tokenizer_check import find_lost_text
from cosmos_core.errors import DataError
from cosmos_core.train import check
from tests.unit.data_tokenizers import CHATML, byte_tokenizer
from tests.unit.test_train import make_stage, recipe
from tests.unit.tiny_model import save_tiny_model

TEXTS = ["The Café is open, and it is open today.", "  2 + 2 =\n\n4 \ud83d", "東京 🙂"]


def words(*vocabulary: str) -> PreTrainedTokenizerFast:
    model = models.WordLevel({word: i for i, word in enumerate(("<unk>", *vocabulary))}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def normalising(normalizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(None)
    tokenizer.backend_tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(None),
        normalising(normalizers.Lowercase()),
        normalising(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip()])),
        normalising(normalizers.Replace("?", "")),
        words(*["The", "Café", "is", "open", ",", "and", "it", "today", ".", "2", "+", "=", "4", "東京", "🙂"]),
    ],
)
def test_a_normalised_text_is_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    assert find_lost_text(tokenizer, TEXTS) == ("", False)


@pytest.mark.parametrize(
    ("tokenizer", "message", "is_much"),
    [
        (words("The", "is", "and"), r"loses \d\d\.\d% of the letters, digits and spaces of rows", True),
        (normalising(normalizers.Replace("y", "")), r"loses [12]\.\d% of .* \('y'\)", False),
        (normalising(normalizers.Replace(" ", "")), r"\(' '\)", True),
    ],
)
def test_lost_text_is_told(tokenizer: PreTrainedTokenizerFast, message: str, is_much: bool) -> None:
    notice, loses_much = find_lost_text(tokenizer, TEXTS)
    assert re.search(message, notice) and loses_much is is_much


def test_the_name_of_the_unknown_token_in_a_text_is_not_lost() -> None:
    assert find_lost_text(words("one", "two"), ["one <unk> two"]) == ("", False)


def test_letters_of_a_special_token_stand_for_no_lost_ones() -> None:
    tokenizer = words("a", "bos")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("bos $A", special_tokens=[("bos", 2)])
    assert tokenizer.decode(tokenizer.encode("a sob")) == "bos a <unk>"
    assert "('s', 'o', 'b', ' ')" in find_lost_text(tokenizer, ["a sob"])[0]


def test_a_class_of_another_tokenizer_is_refused_by_the_check(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CHATML)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizer"}))
    if " " in AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder).encode("a b")):
        pytest.skip("transformers reads this tokenizer with the class of another one")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c d"}\n' * 4)
    made = recipe({"type": "sft", "dataset": {"name": str(tmp_path / "rows.jsonl")}})
    with pytest.raises(DataError, match="the tokenizer loses"):
        check.run(make_stage(tmp_path / "stage", "prepare", made, folder))
