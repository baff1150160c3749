"""Data set classes and data packers of a user's own, in the form of Cosmos-RL's launcher scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.data import prepare
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.hf import load_tokenizer
from tests.effects.change import GRPO, SFT, recipe, stage_of
from tests.unit.data_tokenizers import CHATML, byte_tokenizer

NAME, PACKER = "train.train_policy.dataset.name", "train.train_policy.data_packer"
TEXTS = {**SFT, NAME: "texts.jsonl"}
SHORT = {**GRPO, "policy.model_max_length": 64, "rollout.max_response_length": 8}

FILE = '''
class Sums:
    """What a launcher script of Cosmos-RL passes as `dataset=`."""

    def setup(self, config, tokenizer):
        self.first, self.tokenizer = config.custom.get("first", 0), tokenizer

    def __len__(self):
        return 3

    def __getitem__(self, index):
        turns = [{"role": "user", "content": f"{self.first + index} + 1?"}]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    def get_reference_answer(self, index):
        return self.first + index + 1


class Talks:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return [{"role": "user", "content": f"q{index}"}, {"role": "assistant", "content": f"a{index}"}]


def talks(config):
    return Talks()


class Sized(Talks):
    def __init__(self, config, times=1):
        assert config.train.train_policy.dataset.name == "mine.py:Sized" and times == 1


class Chosen(Talks):
    """As the examples of Cosmos-RL choose a split; a second parameter with a default is the user's own."""

    def setup(self, config, part=None, *rest, **others):
        assert isinstance(config.train.train_policy.dataset.split, list) and part is None, (config, part)
        self.split = config.train.train_policy.dataset.split[0]
        assert config.validation.dataset.split == ["train"] == [self.split], config


class Misread:
    def setup(self, config, tokenizer):
        raise KeyError("nothing here")

    def sft_process_sample(self, item):
        return item


made = Talks()


class Broken(Talks):
    def __getitem__(self, index):
        return {}[index]


class Shouting:
    def get_rollout_input(self, item):
        return [{"role": "user", "content": item["question"].upper()}]


class Bytes:
    def setup(self, config, tokenizer):
        self.tokenizer = tokenizer

    def sft_process_sample(self, item):
        ids = self.tokenizer(item["text"])["input_ids"]
        return {"token_ids": ids, "label_ids": [-100, *ids[1:]]}


class Shifted(Bytes):
    def sft_process_sample(self, item):
        ids = self.tokenizer(item["text"])["input_ids"]
        return {"token_ids": ids, "label_ids": [*ids[1:], -100]}


class Odd(Bytes):
    def sft_process_sample(self, item):
        return {"token_ids": TOKENS, "label_ids": TOKENS}


class Batching(Bytes):
    def sft_collate_fn(self, samples, computed_max_len):
        return samples


import numpy as np
import torch


class Table(Talks):
    def __getitem__(self, index):
        return {"question": f"q{index}", "answer": np.array([7, np.nan])[index], "level": np.int64(index)}


class Tensors(Bytes):
    def sft_process_sample(self, item):
        sample = super().sft_process_sample(item)
        return {"token_ids": np.array(sample["token_ids"]), "label_ids": torch.tensor(sample["label_ids"])}


class Unanswered(Sums):
    def get_reference_answer(self, index):
        return (None, [1, "so"], {2})[index]
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "questions.jsonl").write_text('{"question": "why", "answer": "so"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "abc"}\n')
    return tmp_path


def prepared(folder: Path, settings: dict[str, Any], name: str = "out") -> Path:
    stage = stage_of(folder / name, recipe(settings), kind="prepare", model=folder / "model")
    prepare.run(stage)
    return stage.path / "data"


def test_a_data_set_class_renders_its_own_prompts_and_gives_their_references(folder: Path) -> None:
    prompts = open_prompts(prepared(folder, {**SHORT, NAME: "mine.py:Sums", "custom.first": 7}), "train")
    found = [prompts[i] for i in range(len(prompts))]
    assert [each.reference for each in found] == ["8", "9", "10"]
    assert found[0].text == "<|im_start|>user\n7 + 1?<|im_end|>\n<|im_start|>assistant\n", "no template around it"
    assert load_tokenizer(str(folder / "model")).decode(found[0].token_ids) == found[0].text


def test_numbers_of_numpy_in_an_item_are_those_of_a_file_and_nan_is_none(folder: Path) -> None:
    found = open_prompts(prepared(folder, {**SHORT, NAME: "mine.py:Table"}), "train")
    assert [(prompt.reference, prompt.metadata["level"]) for prompt in found] == [("7.0", 0), ("", 1)]


def test_a_class_without_a_reference_for_a_prompt_gives_none_of_it(folder: Path) -> None:
    prompts = open_prompts(prepared(folder, {**SHORT, NAME: "mine.py:Unanswered"}), "train")
    assert [prompts[i].reference for i in range(3)] == ["", '[1, "so"]', "{2}"], "as of a column where it has JSON"


def test_a_packer_that_cannot_be_set_up_is_named_with_its_line(folder: Path) -> None:
    settings = {**TEXTS, PACKER: "mine.py:Misread"}
    with pytest.raises(DataError, match=r"data_packer = 'mine.py:Misread': KeyError: 'nothing here' \(.*mine.py:\d+\)"):
        prepared(folder, settings)


@pytest.mark.parametrize(
    "name", ["mine.py:Talks", "mine.py:talks", "mine.py:Sized", "mine.py:Chosen", "mine.py:made"],
    ids=["class", "function", "class that takes the recipe", "class that reads lists of it", "object"],
)  # fmt: skip
def test_conversations_of_a_class_are_those_of_a_file(folder: Path, name: str) -> None:
    turns = [[{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}] for i in range(2)]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    ours = open_sequences(prepared(folder, {**SFT, NAME: name}), "train")
    theirs = open_sequences(prepared(folder, {**SFT, NAME: "talks.jsonl"}, "other"), "train")
    for i in range(2):
        for found, expected in zip(ours[i], theirs[i], strict=True):
            assert [*found] == [*expected]


@pytest.mark.parametrize("reference", ['"answer": "so"', '"reward_model": {"ground_truth": "so"}'])
def test_a_packer_makes_the_prompt_of_a_row_and_keeps_its_reference(folder: Path, reference: str) -> None:
    (folder / "questions.jsonl").write_text(f'{{"question": "why", {reference}}}\n')
    settings = {**SHORT, NAME: "questions.jsonl", PACKER: "mine.py:Shouting"}
    (only,) = open_prompts(prepared(folder, settings), "train")
    assert "WHY" in only.text and only.reference == "so"


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ("[[1, 2]]", "must be flat lists of integers"),
        ("__import__('torch').ones(1, 2)", "must be flat lists of integers"),
        ("[1, None]", "must be flat lists of integers"),
        ("[1, -200]", "must be from 0 to 2**31 - 1; some are -200 and 1"),
        ("[1, 1 << 40]", "must be from 0 to 2**31 - 1; some are 1 and 1099511627776"),
    ],
)
def test_tokens_of_a_packer_that_are_none_are_one_line(folder: Path, tokens: str, problem: str) -> None:
    (folder / "mine.py").write_text(FILE.replace("TOKENS", tokens))
    with pytest.raises(DataError, match=re.escape(problem)):
        prepared(folder, {**TEXTS, PACKER: "mine.py:Odd"})


@pytest.mark.parametrize("name", ["Bytes", "Tensors"])
def test_a_packer_gives_tokens_and_what_is_learned_of_them(folder: Path, name: str) -> None:
    sequences = open_sequences(prepared(folder, {**TEXTS, PACKER: f"mine.py:{name}"}), "train")
    ids, mask, *_ = sequences[0]
    assert load_tokenizer(str(folder / "model")).decode([*ids]) == "abc"
    assert [*mask] == [0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({**SFT, NAME: "mine.py:Broken"}, DataError, r"^mine.py:Broken item 0: KeyError: 0 \(.*mine.py:58\)$"),
        ({**SFT, NAME: "mine.py:Nothing"}, ConfigError, "has no 'Nothing'"),
        ({**TEXTS, PACKER: "mine.py:Batching"}, ConfigError, "has sft_collate_fn, which nothing calls"),
        ({**TEXTS, PACKER: "mine.py:Shouting"}, ConfigError, "calls sft_process_sample, which it does"),
        ({**TEXTS, PACKER: "mine.py:Shifted"}, DataError, "the token itself, or -100"),
    ],
)
def test_a_mistake_in_it_is_one_line(
    folder: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        prepared(folder, settings)
    assert "\n" not in str(raised.value)
