"""Keys of the search for duplicates and for text of benchmarks, which a `prepare` stage makes."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import open_sequences
from tests.effects.change import SFT, Change, changes, stage_of
from tests.unit.data_tokenizers import CHATML, byte_tokenizer

pytest.importorskip("datasketch", reason="the extra clean is not installed")
WORDS = [f"w{i}" for i in range(15)]
TEXT = " ".join(WORDS)
CLEAN = "train.train_policy.clean"
AGAINST = f"{CLEAN}.decontaminate_against"
ROWS = {**SFT, "train.train_policy.dataset.name": "rows.jsonl", f"{CLEAN}.near_duplicates": 0.9}
LOCAL = {**ROWS, AGAINST: [{"name": "benchmark"}]}
ON_HUB = {**ROWS, AGAINST: [{"name": "org/rows"}]}
EQUAL, SIMILAR = ("rows.jsonl:2", "exact_duplicate"), ("rows.jsonl:3", "near_duplicate")
HAS_TEXT = ("rows.jsonl:4", "benchmark_text")
TEXTS = [(f"rows.jsonl:{i}", "benchmark_text") for i in (1, 2, 3)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows: a text twice, with one more word, its beginning between other words, and other words; and benchmarks."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    write("rows.jsonl", TEXT, TEXT, f"{TEXT} more", f"x y z {' '.join(WORDS[:13])} v w", "all other words")
    write("benchmark/train.jsonl", f"nothing in common {' '.join(WORDS[:9])}")
    write("benchmark/test.jsonl", f"{' '.join(WORDS[:13])} a")
    return tmp_path


def write(name: str, *texts: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))


def cleaned(recipe: Recipe, folder: Path) -> tuple[set[tuple[str, str]], int]:
    """The rows with their matches, and the number of rows that are left."""
    stage = stage_of(folder / "stage", recipe, kind="prepare", model=folder / "model")
    prepare.run(stage)
    lines = [json.loads(line) for line in (stage.path / "data/clean.jsonl").read_text().splitlines()]
    return {(line["row"], line["match"]) for line in lines}, len(open_sequences(stage.path / "data", "train"))


@changes(
    (Change(f"{CLEAN}.action", "drop", ROWS), ({EQUAL, SIMILAR}, 3)),
    (Change(f"{CLEAN}.near_duplicates", 0.99, ROWS), ({EQUAL}, 5)),
    (Change(f"{CLEAN}.ngram", 9, LOCAL), ({EQUAL, SIMILAR, HAS_TEXT, *TEXTS}, 5)),
    (Change(f"{CLEAN}.min_overlap", 0.95, {**LOCAL, f"{AGAINST}": [{"name": "benchmark/test.jsonl"}],
                                           f"{CLEAN}.action": "drop"}), ({EQUAL, SIMILAR, HAS_TEXT, *TEXTS}, 3)),
    (Change(f"{AGAINST}.name", "benchmark/test.jsonl", LOCAL), ({HAS_TEXT, *TEXTS}, 5)),
    (Change(f"{AGAINST}.split", "test", LOCAL), ({HAS_TEXT, *TEXTS}, 5)),
)  # fmt: skip
def test_it_changes_the_matches(change: Change, expected: tuple[set[tuple[str, str]], int], folder: Path) -> None:
    before = cleaned(change.before, folder)
    assert cleaned(change.after, folder) == expected != before


@changes(Change(f"{AGAINST}.subset", "hard", ON_HUB), Change(f"{AGAINST}.revision", "v2", ON_HUB))
def test_it_changes_the_benchmark_on_the_hub(change: Change, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(name: str, subset: str | None, *, revision: str | None, split: str) -> datasets.Dataset:
        is_changed = (name, split) == ("org/rows", "train") and (subset, revision) in {("hard", None), (None, "v2")}
        return datasets.Dataset.from_list([{"text": " ".join(WORDS[:13] if is_changed else WORDS[::-1])}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert HAS_TEXT not in cleaned(change.before, folder)[0]
    assert HAS_TEXT in cleaned(change.after, folder)[0]
