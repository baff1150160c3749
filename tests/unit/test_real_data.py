"""SFT on real rows, from a recipe to a lower loss: a sample of ShareGPT, with a tiny model."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import Sequences, open_sequences
from cosmos_core.run.files import read_json
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.setup import train
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tests.effects.change import stage_of
from tests.unit.data_tokenizers import CHATML
from tests.unit.tiny_model import save_tiny_model

RECIPE = """
[policy]
model_name_or_path = "{model}"
model_max_length = {length}
model_gradient_checkpointing = false

[train]
train_batch_per_replica = 4
epoch = 4
max_num_steps = 8
optm_lr = 1e-2
optm_warmup_steps = 0
compile = false
param_dtype = "float32"

[train.train_policy]
type = "sft"
mini_batch = 4
conversation_column_name = "conversation"
dataset.name = "{data}"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3; a token is a byte, or <|im_start|>, or <|im_end|>."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def recipe_of(folder: Path, model: Path, data: Path, length: int) -> Recipe:
    """The recipe of the training stage, read from a file."""
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(model=model, data=data, length=length))
    return load_pipeline(file, [], all_kinds()).recipes["sft"]


def prepared(folder: Path, recipe: Recipe, model: Path) -> tuple[Outcome, Sequences]:
    stage = stage_of(folder / "data", recipe, kind="prepare", model=model)
    return prepare.run(stage), open_sequences(stage.path / "data", "train")


def losses(folder: Path, recipe: Recipe, model: Path) -> list[float]:
    """The loss of each step of a training on the prepared rows."""
    stage = stage_of(folder / "train", recipe, model=model, data=folder / "data" / "data")
    train(stage)
    return [point["loss"] for point in read_metrics(stage.path / "metrics.jsonl") if "loss" in point]


def num_bytes(text: str) -> int:
    return len(unicodedata.normalize("NFC", text).encode())  # as the tokenizer of Qwen does


@pytest.mark.full
def test_sharegpt_is_prepared_whole_and_learned(tmp_path: Path, model: Path, test_data: Path) -> None:
    length = 700
    recipe = recipe_of(tmp_path, model, test_data / "sharegpt52k_small", length)
    outcome, sequences = prepared(tmp_path, recipe, model)

    conversations = datasets.load_from_disk(str(test_data / "sharegpt52k_small"))["train"]["conversation"]
    masks = []  # of the bytes and special tokens of each row
    for turns in conversations:
        mask: list[int] = []
        for turn in turns:
            mask += [0] * len(f"<{turn['role']}\n")
            mask += [int(turn["role"] == "assistant")] * (num_bytes(turn["content"]) + len(">")) + [0]
        masks.append(mask)
    kept = [mask for mask in masks if any(mask[:length])]
    said = read_json(tmp_path / "data" / "data" / "statistics.json")["train"]
    assert len(masks) == 10 and said["rows"] == len(kept)
    assert said["skipped_rows"] == outcome.metrics["data/train_skipped_rows"] == len(masks) - len(kept)
    assert said["truncated_rows"] == sum(len(mask) > length for mask in kept) > 0
    assert said["tokens"] == sum(len(mask[:length]) for mask in kept)
    assert [sequences[i][1].tolist() for i in range(len(sequences))] == [mask[:length] for mask in kept]

    found = losses(tmp_path, recipe, model)
    assert len(found) == 8 and np.mean(found[-2:]) < 0.8 * found[0]
