"""Duplicates among rows, and text of benchmarks in rows: what is shown, what is dropped; oracles are sets of words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.clean import MATCHES_FILE, clean_training_rows
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.ngrams import MinHashBands, hash_ngrams, hash_words, normalise_text, split_words
from cosmos_core.data.rows import Rows, load_rows
from cosmos_core.data.user_dataset import UserDatasetLoader
from cosmos_core.errors import ConfigError, DataError, Preempted
from cosmos_core.run.stage import Stage
from tests.effects.change import stage_of
from tests.unit.data_tokenizers import CHATML, byte_tokenizer

pytest.importorskip("datasketch", reason="the extra clean is not installed")
WORDS = [f"w{i}" for i in range(2_000)]


def text(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(f"{seed}").choices(WORDS, k=count))


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return path


def stage(folder: Path, texts: list[str], benchmark: list[Any] | None = None, **settings: Any) -> Stage:
    rows = write(folder / "train.jsonl", texts)
    if benchmark is not None:
        settings["decontaminate_against"] = [str(write(folder / "test.jsonl", benchmark))]
    policy = {"type": "sft", "dataset": {"name": str(rows)}, "clean": settings}
    return stage_of(folder / "stage", Recipe.model_validate({"train": {"train_policy": policy}}), kind="prepare")


def cleaned(of: Stage, held_out: Sequence[Rows] = ()) -> tuple[Rows, dict[str, float], list[str], list[dict[str, Any]]]:
    """The rows that were kept, metrics, notices, and the matches in the file."""
    rows = load_rows(of.recipe.train.train_policy.dataset)
    result = clean_training_rows(of, rows, held_out, of.path, UserDatasetLoader(of.recipe, lambda: None))
    return *result, [json.loads(line) for line in (of.path / MATCHES_FILE).read_text().splitlines()]


def matches(of: Stage) -> list[tuple[str, str, str]]:
    *_, lines = cleaned(of)
    return [tuple(line[key].replace("train.jsonl:", "") for key in ("row", "match", "of")) for line in lines]


def planted(count: int) -> list[str]:
    """Rows without a match but for 5 in the middle: a copy, one in other letters, one that is cut, and two quotes."""
    texts = [text(i) for i in range(count)]
    passage = " ".join(text(-1, 40).split()[7:20])
    extra = [texts[3], texts[4].upper() + "!", texts[5].rsplit(" ", 2)[0], f"{text(-7, 400)} {passage} {text(-8, 400)}"]
    return [*texts[: count // 2], *extra, f"{text(-3)}\n{text(-1, 40)}", *texts[count // 2 :]]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_each_planted_match_is_shown_and_only_clear_ones_are_dropped(tmp_path: Path, count: int) -> None:
    first = count // 2 + 1
    kept, metrics, notices, lines = cleaned(stage(tmp_path, planted(count), [text(-2), text(-1, 40)], action="drop"))
    assert [(each["row"], each["match"], each["of"], each["dropped"]) for each in lines] == [
        (f"train.jsonl:{first + 3}", "benchmark_text", "test.jsonl:2", False),
        (f"train.jsonl:{first + 4}", "benchmark_text", "test.jsonl:2", True),
        (f"train.jsonl:{first}", "exact_duplicate", "train.jsonl:4", True),
        (f"train.jsonl:{first + 1}", "near_duplicate", "train.jsonl:5", True),
        (f"train.jsonl:{first + 2}", "near_duplicate", "train.jsonl:6", True),
    ]
    assert lines[0]["text"] == " ".join(text(-1, 40).split()[7:20]) and lines[0]["similarity"] == 13 / 40
    assert lines[4]["similarity"] == pytest.approx(57 / 59)
    assert (lines[2]["text"], lines[2]["of_text"]) == (text(3), text(3))
    assert len(kept) == count + 1 and metrics["data/clean_dropped"] == 4
    assert "1 exact duplicate, 2 near duplicate, 2 benchmark text, 0 held out row, 4 dropped" in notices[0]


@pytest.mark.parametrize("action", ["drop", "report"])
def test_rows_that_are_held_out_too_are_told_and_stay(tmp_path: Path, action: str) -> None:
    rows = [text(0), text(1), text(2).rsplit(" ", 2)[0], text(3), text(0)]
    held_out = load_rows(DatasetConfig(name=str(write(tmp_path / "held.jsonl", [text(5), text(0).upper(), text(2)]))))
    _, metrics, _, lines = cleaned(stage(tmp_path, rows, action=action), [held_out])
    assert [(each["row"], each["match"], each["of"], each["dropped"]) for each in lines] == [
        ("train.jsonl:1", "held_out_row", "held.jsonl:2", False),
        ("train.jsonl:3", "held_out_row", "held.jsonl:3", False),
        ("train.jsonl:5", "held_out_row", "held.jsonl:2", False),
        ("train.jsonl:5", "exact_duplicate", "train.jsonl:1", action == "drop"),
    ]
    assert lines[1]["similarity"] == pytest.approx(57 / 59) and metrics["data/clean_held_out_row"] == 3


def test_a_killed_or_repeated_search_gives_the_same_bytes_and_leaves_no_file(tmp_path: Path) -> None:
    made = stage(tmp_path, planted(300), [text(-1, 40)])
    cleaned(made)
    before = (made.path / MATCHES_FILE).read_bytes()
    made.stop_requested = True
    with pytest.raises(Preempted, match="starts anew"):
        cleaned(made)
    made.stop_requested = False
    cleaned(made)
    assert (made.path / MATCHES_FILE).read_bytes() == before and json.loads(before.splitlines()[0])["dropped"] is False
    assert {path.name for path in made.path.iterdir()} == {MATCHES_FILE, "progress.json"}


@pytest.mark.parametrize(
    ("left", "right", "match"),
    [
        ("Ｔｈｅ  café\n is open", "the CAFE\u0301 is open", "exact_duplicate"),
        ("Is the café open, today?", "is the cafe\u0301 open today", "near_duplicate"),
        ("What is 5 + 3 in all?", "What is 5 - 3 in all?", None),
        ("我们今天去公园散步吧。", "我们今天去公园散步吧", "near_duplicate"),
        ("我们今天去公园散步", "他们明天在学校读书", None),
        ("...", "!!!", None),
        ("一", "二", None),
    ],
)
def test_texts_are_equal_after_normalisation(left: str, right: str, match: str | None, tmp_path: Path) -> None:
    assert matches(stage(tmp_path, [left, right])) == ([("2", match, "1")] if match else [])


def shingles(content: str) -> set[tuple[str, str]]:
    words = split_words(normalise_text(content))
    return set(pairwise(words))


@pytest.mark.parametrize("threshold", [0.9, *(pytest.param(each, marks=pytest.mark.full) for each in (0.7, 1.0))])
def test_near_duplicates_are_the_pairs_that_all_pairs_give(threshold: float, tmp_path: Path) -> None:
    chooser, texts = random.Random(0), [text(i, 80) for i in range(30)]
    for i in range(90):
        words = texts[i % 30].split()
        for _ in range(chooser.randrange(9)):
            words[chooser.randrange(80)] = "other"
        texts.append(" ".join(words))
    kept, expected = [], {}
    for number, each in enumerate(texts, start=1):
        own = shingles(each)
        values = {other: len(own & seen) / len(own | seen) for other, seen in kept}
        best = max(values, key=lambda other: (each == texts[other - 1], values[other], -other), default=0)
        if best and values[best] >= threshold:
            expected[str(number)] = str(best)
        else:
            kept.append((number, own))
    found = {row: of for row, _, of in matches(stage(tmp_path, texts, near_duplicates=threshold))}
    assert found == expected and 10 <= len(found) < 95


def test_without_near_duplicates_only_equal_texts_match(tmp_path: Path) -> None:
    texts = [text(1), text(1) + " more", text(1)]
    assert matches(stage(tmp_path, texts, near_duplicates=0.0)) == [("3", "exact_duplicate", "1")]


def test_rows_with_one_text_and_other_images_are_no_duplicates(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": text(0), "answer": "Yes.", "image": f"{i}.png"} for i in range(2)]
    for i in range(2):
        parts = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": text(1)}]
        rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "No."}]})
    searched = stage(tmp_path, [], action="drop")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept, _, _, lines = cleaned(searched)
    assert (lines, len(kept)) == ([], 4)


def test_calls_that_differ_in_a_name_or_a_number_of_their_arguments_are_no_duplicates(tmp_path: Path) -> None:
    def talk(**arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "heat", "arguments": arguments}}]
        asked = {"role": "user", "content": "Warmer, please."}
        return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": calls}]}

    of = stage(tmp_path, [], near_duplicates=0.0)
    talks = [talk(celsius=20), talk(celsius=25), talk(kelvin=20), talk(celsius=20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talks))
    assert matches(of) == [("4", "exact_duplicate", "1")]


def test_bands_of_similar_sets_mostly_share_a_key() -> None:
    bands, pairs = MinHashBands(0.9), 0
    for seed in range(200):
        words = text(seed, 200).split()
        left, right = (hash_ngrams(hash_words(each), 2) for each in (words, words[10:]))
        pairs += bool((bands.compute_band_keys(left) == bands.compute_band_keys(right)).any())
    assert pairs >= 196, "of similarity 0.95"


def test_texts_of_benchmarks_match_by_n_words_in_one_turn_or_as_a_whole(tmp_path: Path) -> None:
    item, short, tiny = text(1, 30), text(2, 9), text(3, 5)
    words = item.split()
    texts = [
        " ".join(words[:12]),
        f"x {' '.join(words[9:22])} y",
        f"{text(4)} {short} {text(5)}",
        f"{text(6)} {tiny}",
        " ".join([*words[:7], "x", *words[7:13]]),
    ]
    assert matches(stage(tmp_path, texts, [item, short, tiny])) == [
        ("2", "benchmark_text", "test.jsonl:1"),
        ("3", "benchmark_text", "test.jsonl:2"),
    ]
    turns = [{"role": "user", "content": " ".join(words[:7])}, {"role": "assistant", "content": " ".join(words[7:])}]
    made = stage(tmp_path, [item], [item])
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"messages": [{"role": "system", "content": item}, *turns[:1], {**turns[1], "content": "no"}]})
        + "\n" + json.dumps({"messages": turns})
    )  # fmt: skip
    assert [line["similarity"] for line in cleaned(made)[-1]] == [round(23 / 30, 4)]


def test_a_benchmark_without_texts_and_rows_that_all_match_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"decontaminate_against\.0: no text of at least 8 words"):
        cleaned(stage(tmp_path, [text(1)], ["short"]))
    with pytest.raises(DataError, match="drops all 1 rows"):
        cleaned(stage(tmp_path, [text(1)], [text(1)], action="drop"))


def test_rows_of_tokens_are_not_taken_for_clean(tmp_path: Path) -> None:
    made = stage(tmp_path, [text(1)])
    (tmp_path / "train.jsonl").write_text('{"token_ids": [1, 2], "label_ids": [-100, 2]}\n')
    with pytest.raises(ConfigError, match=r"clean compares texts, and train\.jsonl:1 has only token_ids"):
        cleaned(made)


def test_dropped_rows_are_not_prepared(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    made = stage(tmp_path, [text(1), text(2), text(1)], [text(2)], action="drop")
    made.model = str(tmp_path / "model")
    outcome = prepare.run(made)
    assert len(open_sequences(made.path / "data", "train")) == 1
    assert outcome.metrics["data/train_rows"] == 1 and outcome.metrics["data/clean_dropped"] == 2
    assert (made.path / "data" / MATCHES_FILE).is_file() and outcome.info["notices"]


@pytest.mark.full
def test_no_row_of_gsm8k_is_dropped_for_its_test_rows(test_data: Path, tmp_path: Path) -> None:
    names = {name: str(test_data / f"gsm8k/{name}.jsonl") for name in ("train", "test")}
    settings = {"decontaminate_against": [names["test"]], "action": "drop"}
    policy = {"type": "sft", "dataset": {"name": names["train"]}, "clean": settings}
    made = stage_of(tmp_path / "stage", Recipe.model_validate({"train": {"train_policy": policy}}), kind="prepare")
    _, metrics, *_ = cleaned(made)
    assert metrics["data/clean_dropped"] == 0 and 0 < metrics["data/clean_benchmark_text"] <= 20
