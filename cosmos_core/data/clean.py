"""Search of the training rows for duplicates and for benchmark texts: the table `train.train_policy.clean`.

    <stage>/data/clean.jsonl   a match per line: the row, the row that it matches, both texts, whether it was dropped

A row is compared by the texts of its turns, without system turns. Candidates for near duplicates share a key of
`ngrams.MinHashBands`; the exact similarity decides, and the earliest of several similar rows stays. Memory holds the
benchmark texts and about 10 bytes per key and row (200 MB for a million rows); the n-grams of rows are in a temporary
file.
"""

import json
import logging
import struct
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cosmos_core.config.schema.clean import BENCHMARKS, BenchmarkRowsConfig, CleanConfig
from cosmos_core.data.kinds.registry import tokenised_kind
from cosmos_core.data.messages import Row
from cosmos_core.data.ngrams import MinHashBands, hashes_of, ngrams, normalised, remove_signs, split_words
from cosmos_core.data.rows import Rows, load_rows
from cosmos_core.data.user_dataset import Opener
from cosmos_core.errors import DataError, Preempted
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)

FILE = "clean.jsonl"
_SHINGLE = 2  # number of words per shingle, the unit of comparison of two rows
_MIN_WORDS = 8  # minimum words of a benchmark text that is searched for, as in GPT-3 (arXiv 2005.14165)
_MAX_CANDIDATES = 32  # maximum number of candidates with which a row is compared
_MAX_CHARACTERS = 2_000
_NUM_EXAMPLES = 3
_HEADER = struct.Struct("<16sIII")


class CleanedRows(NamedTuple):
    """Rows that were kept, with metrics and notices about duplicates and benchmark texts."""

    rows: Rows
    metrics: dict[str, float]
    notices: list[str]


def clean_training_rows(
    stage: Stage, rows: Rows, held_out: Sequence[Rows], folder: Path, opener: Opener
) -> CleanedRows:
    """Write the duplicates and benchmark texts among the training rows to a file in `folder`, and drop these rows if
    the recipe sets `action = "drop"`. Rows that match held-out rows are only reported.

    Raises:
        DataError: a benchmark is missing or has no text, or no row remains.
        Preempted: a stop was requested.
    """
    config = stage.recipe.train.train_policy.clean
    if config is None:
        return CleanedRows(rows, {}, [])
    counts: Counter[str] = Counter()
    examples: list[str] = []
    is_dropped = np.zeros(len(rows), dtype=bool)
    with open(folder / FILE, "w", encoding="utf-8") as file:
        for number, is_removed, match in _matches(stage, config, rows, held_out, opener.packer()):
            match["dropped"] = is_removed and config.action == "drop"
            is_dropped[number] |= match["dropped"]
            counts[match["match"]] += 1
            if counts[match["match"]] <= _NUM_EXAMPLES:
                examples.append(f"{match['row']}: {match['match']} of {match['of']}: {match['text'][:80]!r}")
            file.write(json.dumps(match, ensure_ascii=False) + "\n")
    other_rows = rows.where(~is_dropped)
    if not len(other_rows):
        raise DataError(f"train.train_policy.clean drops all {len(rows)} rows; set action = 'report' to see why")
    counts["dropped"] = int(is_dropped.sum())
    names = ("exact_duplicate", "near_duplicate", "benchmark_text", "held_out_row", "dropped")
    summary = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in names)
    notices = [f"clean: {summary}, of {len(rows)} rows; data/{FILE} has them", *examples] if examples else []
    for notice in notices:
        logger.warning("%s", notice)
    return CleanedRows(other_rows, {f"data/clean_{name}": float(counts[name]) for name in names}, notices)


def _matches(
    stage: Stage, config: CleanConfig, rows: Rows, held_out: Sequence[Rows], pack: Callable[[Row, str], Row] | None
) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    """Yield the number of each training row with a match, whether the match is a reason to drop the row, and the match.
    Matches with benchmarks and held-out rows come first, then duplicates."""
    benchmarks = Benchmarks(config.decontaminate_against, config.ngram)
    bands = MinHashBands(config.near_duplicates) if config.near_duplicates else None
    numbers, keys = array("Q"), array("Q")
    held_out_index = HeldOutIndex(config.near_duplicates)
    for each in held_out:
        for _, where, texts in _readable(stage, each, pack):
            row = _make_compared_row(where, texts, *_normalise_turns(texts))
            held_out_index.add(row, row.keys(bands))
    with tempfile.TemporaryFile(dir=stage.path) as file:
        compared = ComparedRows(file)
        for number, where, texts in _readable(stage, rows, pack):
            normalised_texts, turns = _normalise_turns(texts)
            if match := benchmarks.match(turns):
                is_removed = match["similarity"] >= config.min_overlap
                yield number, is_removed, {"row": where, **match}
                if is_removed:
                    continue
            row = _make_compared_row(where, texts, normalised_texts, turns)
            own_keys = row.keys(bands)
            if match := held_out_index.match(row, own_keys):
                yield number, False, match
            compared.add(row)
            numbers.append(number)
            keys.extend(own_keys)
        table = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 1 + (bands.count if bands else 0))
        for position, match in find_duplicates(table, compared, config.near_duplicates):
            yield numbers[position], True, match


def _readable(stage: Stage, rows: Rows, pack: Callable[[Row, str], Row] | None) -> Iterator[tuple[int, str, list[str]]]:
    """Yield number, location and texts of each readable row; unreadable rows are counted later, by tokenisation."""
    policy, kind = stage.recipe.train.train_policy, tokenised_kind(stage.recipe.train.train_policy.rows)
    for number, (where, row) in enumerate(rows):
        if number % 256 == 0:
            stage.progress.beat()
            if stage.stop_requested:
                raise Preempted(f"stopped after {number} rows were compared; preparing starts anew")
        with suppress(DataError):
            yield number, where, list(texts_of(kind.read(pack(row, where) if pack else row, where, policy)))


def _normalise_turns(texts: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Return the normalised texts of a row, and the words of each."""
    normalised_texts = list(map(normalised, texts))
    return normalised_texts, list(map(split_words, normalised_texts))


def _make_compared_row(
    where: str, texts: list[str], normalised_texts: list[str], turns: list[list[str]]
) -> "ComparedRow":
    digest = blake2b("\0".join(normalised_texts).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    grams = np.unique(ngrams(hashes_of([*chain.from_iterable(turns)]), _SHINGLE))
    text = "\n".join(texts)[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()
    return ComparedRow(digest, where, text, grams)


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a value that a kind of rows has read from a row, except the texts of system turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if value.get("role") not in {"system", "developer"}:
            yield from texts_of([each for name, each in value.items() if name not in {"role", "type"}])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, bool):  # label of a row: whether the completion is desirable
        yield str(value)
    elif hasattr(value, "__dict__"):
        yield from texts_of(list(vars(value).values()))


class ComparedRow(NamedTuple):
    """Row of a data set, reduced to what the search for duplicates compares."""

    digest: bytes
    where: str
    text: str
    """Beginning of the row's text, in valid UTF-8."""
    grams: np.ndarray
    """Sorted hashes of the row's n-grams, uint64."""

    def similarity(self, other: "ComparedRow") -> float:
        """Return the Jaccard similarity of the n-grams of two rows."""
        num_common_grams = np.intersect1d(self.grams, other.grams, assume_unique=True).size
        return num_common_grams / max(1, self.grams.size + other.grams.size - num_common_grams)

    def keys(self, bands: MinHashBands | None) -> list[int]:
        """Return the hash of the row's text and, with `bands`, a key per band; similar rows very likely share a key."""
        return [int.from_bytes(self.digest[:8]), *(bands.keys(self.grams).tolist() if bands else ())]

    def match(self, others: Iterable["ComparedRow"], threshold: float) -> dict[str, Any] | None:
        """Return the match with the most similar row of `others`; None if no row is equal or at least as similar as
        `threshold` (0: equal rows only)."""
        best, similarity = None, threshold or 2.0
        for other in others:
            value = 2.0 if self.digest == other.digest else self.similarity(other)
            if value > similarity or (value == similarity and best is None):
                best, similarity = other, value
        if best is None:
            return None
        return {
            "row": self.where, "match": "exact_duplicate" if similarity == 2.0 else "near_duplicate",
            "similarity": min(similarity, 1.0), "text": self.text, "of": best.where, "of_text": best.text,
        }  # fmt: skip


class HeldOutIndex:
    """In-memory index of the held-out rows by their hash keys."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._rows = threshold, list[ComparedRow]()
        self._holders: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, row: ComparedRow, keys: Sequence[int]) -> None:
        """Add a held-out row to the index under its hash keys."""
        for key in enumerate(keys):
            if len(self._holders[key]) < _MAX_CANDIDATES:
                self._holders[key].append(len(self._rows))
        self._rows.append(row)

    def match(self, row: ComparedRow, keys: Sequence[int]) -> dict[str, Any] | None:
        """Return the match of a training row with a held-out row; None if no held-out row matches."""
        candidates = sorted({position for key in enumerate(keys) for position in self._holders.get(key, ())})
        match = row.match((self._rows[position] for position in candidates), self._threshold)
        return match and {**match, "match": "held_out_row"}


class ComparedRows:
    """Sequence of `ComparedRow`s that are stored in a file."""

    def __init__(self, file: Any) -> None:
        self._file, self._offsets = file, array("Q")

    def add(self, row: ComparedRow) -> None:
        """Append a row to the file."""
        self._offsets.append(self._file.tell())
        name, content = row.where.encode("utf-8", "replace"), row.text.encode()
        header = _HEADER.pack(row.digest, len(name), len(content), row.grams.size)
        self._file.write(header + name + content + row.grams.tobytes())

    def __getitem__(self, index: int) -> ComparedRow:
        self._file.seek(self._offsets[index])
        digest, *sizes, count = _HEADER.unpack(self._file.read(_HEADER.size))
        where, text = (self._file.read(size).decode() for size in sizes)
        return ComparedRow(digest, where, text, np.frombuffer(self._file.read(8 * count), dtype=np.uint64))


def find_duplicates(keys: np.ndarray, rows: ComparedRows, threshold: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position and the match of each row that duplicates an earlier row: its text is equal, or its similarity
    is at least `threshold` (0: equal rows only).

    `keys` has shape (rows, keys): rows with an equal key in a column are compared. The first column is a hash of the
    text. A row is compared only with rows that are no duplicates themselves.
    """
    is_shared = np.zeros(keys.shape, dtype=bool)
    for column in range(keys.shape[1]):
        _, inverse, counts = np.unique(keys[:, column], return_inverse=True, return_counts=True)
        is_shared[:, column] = counts[inverse] > 1
    holders: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for position in np.flatnonzero(is_shared.any(axis=1)).tolist():
        row_keys = [(column, int(keys[position, column])) for column in np.flatnonzero(is_shared[position]).tolist()]
        candidates = sorted({each for key in row_keys for each in holders[key]})
        if match := rows[position].match((rows[each] for each in candidates), threshold):
            yield position, match
            continue
        for key in row_keys:
            if len(holders[key]) < _MAX_CANDIDATES:
                holders[key].append(position)


def _words_to_compare(text: str) -> list[str]:
    """Return the words of a benchmark's text that are compared with rows."""
    return remove_signs(split_words(normalised(text)))


class Benchmarks:
    """Index of the n-grams of the texts of benchmarks, held in memory."""

    def __init__(self, tables: Sequence[BenchmarkRowsConfig], ngram: int) -> None:
        self._ngram, self._min_words = ngram, min(ngram, _MIN_WORDS)
        self._texts: list[tuple[str, str]] = []
        grams, owners = array("Q"), array("I")
        self._sizes: set[int] = set()
        for index, table in enumerate(tables):
            count = len(self._texts)
            for where, row in load_rows(table.dataset, f"{BENCHMARKS}.{index}"):
                for text in texts_of(row):
                    if len(words := _words_to_compare(text)) >= self._min_words:
                        self._sizes.add(min(ngram, len(words)))
                        grams.extend(ngrams(hashes_of(words), ngram).tolist())
                        owners.extend([len(self._texts)] * (len(grams) - len(owners)))
                        self._texts.append((where, text))
            if len(self._texts) == count:
                raise DataError(f"{BENCHMARKS}.{index}: no text of at least {self._min_words} words; name rows of text")
        order = np.argsort(np.frombuffer(grams, dtype=np.uint64), kind="stable")
        self._grams, self._owners = np.frombuffer(grams, dtype=np.uint64)[order], np.frombuffer(owners, "I")[order]

    def match(self, turns: Sequence[list[str]]) -> dict[str, Any] | None:
        """Return the match of a row, whose turns are lists of words, with the benchmark text that the row repeats most;
        None if the row repeats no benchmark text.

        `similarity` is the fraction of the benchmark's words in common n-grams; `text` is the longest common passage.
        """
        turns = [remove_signs(words) for words in turns] if self._texts else []
        hashes = [*map(hashes_of, turns)]
        grams = [ngrams(each, size) for each in hashes for size in self._sizes if len(each) >= size]
        if not grams:
            return None
        row_hashes = np.concatenate(grams)
        first = np.minimum(np.searchsorted(self._grams, row_hashes), len(self._grams) - 1)
        owners: Counter[int] = Counter()
        for start in first[self._grams[first] == row_hashes].tolist():
            end = start + _MAX_CANDIDATES
            owners.update(self._owners[start:end][self._grams[start:end] == self._grams[start]].tolist())
        best: tuple[float, int, list[str]] | None = None
        for owner, _ in owners.most_common(_MAX_CANDIDATES):
            part, passage = self._overlap_with_turns(turns, _words_to_compare(self._texts[owner][1]))
            if passage and (best is None or part > best[0]):
                best = part, owner, passage
        if best is None:
            return None
        part, owner, passage = best
        where, text = self._texts[owner]
        return {"match": "benchmark_text", "similarity": round(part, 4), "text": " ".join(passage),
                "of": where, "of_text": text[:_MAX_CHARACTERS]}  # fmt: skip

    def _overlap_with_turns(self, turns: Sequence[list[str]], words: list[str]) -> tuple[float, list[str]]:
        """Return the fraction of `words` in n-grams that also occur in a turn, and the longest common passage."""
        n = min(self._ngram, len(words))
        turn_ngrams = {tuple(turn[i : i + n]) for turn in turns for i in range(len(turn) - n + 1)}
        is_in_turn = np.zeros(len(words) + 1, dtype=bool)
        for i in range(len(words) - n + 1):
            is_in_turn[i : i + n] |= tuple(words[i : i + n]) in turn_ngrams
        starts = np.flatnonzero(np.diff(is_in_turn, prepend=False)).reshape(-1, 2).tolist()
        first, last = max(starts, key=lambda span: span[1] - span[0], default=(0, 0))
        return float(is_in_turn.sum() / len(words)), words[first:last]
