"""Search of the training rows for duplicates and for benchmark texts: the table `train.train_policy.clean`.

    <stage>/data/clean.jsonl   a match per line: the row, the row that it matches, both texts, whether it was dropped

A row is compared by the texts of its turns, without system turns; a row with images is compared with benchmarks only.
Candidates for near duplicates share a key of `ngrams.MinHashBands`; the exact similarity decides, and the earliest of
several similar rows stays. Memory holds the benchmark texts and about 10 bytes per key and row (200 MB for a million
rows); the n-grams of rows are in a temporary file.
"""

import json
import logging
import pickle
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

from cosmos_core.config.schema.clean import BENCHMARKS_KEY, BenchmarkRowsConfig, CleanConfig
from cosmos_core.data.images import get_column_images
from cosmos_core.data.kinds.registry import load_tokenised_kind
from cosmos_core.data.messages import Row
from cosmos_core.data.ngrams import MinHashBands, hash_ngrams, hash_words, normalise_text, remove_operators, split_words
from cosmos_core.data.rows import Rows, load_rows
from cosmos_core.data.user_dataset import TOKENS_COLUMN, UserDatasetLoader
from cosmos_core.errors import ConfigError, DataError, Preempted
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)

MATCHES_FILE = "clean.jsonl"
_SHINGLE_SIZE = 2  # number of words per shingle, the unit of comparison of two rows
_MIN_BENCHMARK_WORDS = 8  # minimum words of a benchmark text that is searched for, as in GPT-3 (arXiv 2005.14165)
_MAX_CANDIDATES = 32  # maximum number of possible duplicates with which a row is compared
_MAX_TEXT_CHARACTERS = 2_000
_MAX_EXAMPLES_PER_MATCH_TYPE = 3
_PackerFn = Callable[[Row, str], Row]


def clean_training_rows(
    stage: Stage, rows: Rows, held_out_sets: Sequence[Rows], folder: Path, dataset_loader: UserDatasetLoader
) -> tuple[Rows, dict[str, float], list[str]]:
    """Write the duplicates and benchmark texts among the training rows to a file in `folder`, and drop these rows if
    the recipe sets `action = "drop"`; rows that match held-out rows are only reported. Return the kept rows, metrics
    and notices. Raise DataError if a benchmark has no text or no row remains, and Preempted if a stop was requested."""
    config = stage.recipe.train.train_policy.clean
    assert config is not None
    match_counts: Counter[str] = Counter()
    example_notices: list[str] = []
    is_row_dropped = np.zeros(len(rows), dtype=bool)
    with open(folder / MATCHES_FILE, "w", encoding="utf-8") as matches_file:
        apply_packer = dataset_loader.make_packer()
        for row_number, should_drop, match in _find_repeated_texts(stage, config, rows, held_out_sets, apply_packer):
            match["dropped"] = should_drop and config.action == "drop"
            is_row_dropped[row_number] |= match["dropped"]
            match_counts[match["match"]] += 1
            if match_counts[match["match"]] <= _MAX_EXAMPLES_PER_MATCH_TYPE:
                example_notices.append(f"{match['row']}: {match['match']} of {match['of']}: {match['text'][:80]!r}")
            matches_file.write(json.dumps(match, ensure_ascii=False) + "\n")
    kept_rows = rows.select(~is_row_dropped)
    if not len(kept_rows):
        raise DataError(f"train.train_policy.clean drops all {len(rows)} rows; set action = 'report' to see why")
    match_counts["dropped"] = int(is_row_dropped.sum())
    metric_names = ("exact_duplicate", "near_duplicate", "benchmark_text", "held_out_row", "dropped")
    counts_text = ", ".join(f"{match_counts[name]} {name.replace('_', ' ')}" for name in metric_names)
    counts_notice = f"clean: {counts_text}, of {len(rows)} rows; data/{MATCHES_FILE} has them"
    notices = [counts_notice, *example_notices] if example_notices else []
    for notice in notices:
        logger.warning("%s", notice)
    return kept_rows, {f"data/clean_{name}": float(match_counts[name]) for name in metric_names}, notices


def _find_repeated_texts(
    stage: Stage, clean_config: CleanConfig, rows: Rows, held_out_sets: Sequence[Rows], apply_packer: _PackerFn | None
) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    """Yield, for each training row that repeats another text, the number of the row, whether the row should be dropped,
    and the match (a line of `clean.jsonl`). Matches with benchmarks and held-out rows come first, then duplicates."""
    benchmark_index = BenchmarkIndex(clean_config.decontaminate_against, clean_config.ngram)
    minhash = MinHashBands(clean_config.near_duplicates) if clean_config.near_duplicates else None
    row_numbers, hash_keys = array("Q"), array("Q")
    held_out_rows, held_out_key_index = list[RowFingerprint](), _HashKeyIndex()
    for held_out_set in held_out_sets:
        for _, location, row_texts, has_images in _iterate_readable_rows(stage, held_out_set, apply_packer):
            if not has_images:
                fingerprint, _ = _make_row_fingerprint(location, row_texts)
                held_out_key_index.add(len(held_out_rows), enumerate(fingerprint.compute_hash_keys(minhash)))
                held_out_rows.append(fingerprint)
    with tempfile.TemporaryFile(dir=stage.path) as fingerprint_file:
        fingerprints = RowFingerprintFile(fingerprint_file)
        for row_number, location, row_texts, has_images in _iterate_readable_rows(stage, rows, apply_packer):
            fingerprint, words_by_turn = _make_row_fingerprint(location, row_texts)
            if match := benchmark_index.find_match(words_by_turn):
                is_match_dropped = match["similarity"] >= clean_config.min_overlap
                yield row_number, is_match_dropped, {"row": location, **match}
                if is_match_dropped:
                    continue
            if has_images:  # do not search rows with images for duplicates: their images may differ
                continue
            row_hash_keys = fingerprint.compute_hash_keys(minhash)
            similar_rows = map(held_out_rows.__getitem__, held_out_key_index.find_row_numbers(enumerate(row_hash_keys)))
            if match := fingerprint.find_match(similar_rows, clean_config.near_duplicates):
                yield row_number, False, {**match, "match": "held_out_row"}
            fingerprints.add(fingerprint)
            row_numbers.append(row_number)
            hash_keys.extend(row_hash_keys)
        hash_key_rows = np.frombuffer(hash_keys, dtype=np.uint64).reshape(-1, 1 + (minhash.num_bands if minhash else 0))
        for row_position, match in find_duplicates(hash_key_rows, fingerprints, clean_config.near_duplicates):
            yield row_numbers[row_position], True, match


def _iterate_readable_rows(
    stage: Stage, rows: Rows, apply_packer: _PackerFn | None
) -> Iterator[tuple[int, str, list[str], bool]]:
    """Yield number, location and texts of each row, and whether it shows images; unreadable rows are skipped."""
    algorithm, row_kind = stage.recipe.train.train_policy, load_tokenised_kind(stage.recipe.train.train_policy.rows)
    for row_number, (location, row) in enumerate(rows):
        if row_number % 256 == 0:
            stage.progress.beat()
            if stage.stop_requested:
                raise Preempted(f"stopped after {row_number} rows were compared; preparing starts anew")
        with suppress(DataError):
            packer_row = apply_packer(row, location) if apply_packer else row
            if packer_row.get(TOKENS_COLUMN) is not None:
                problem = f"train.train_policy.clean compares texts, and {location} has only {TOKENS_COLUMN}"
                raise ConfigError(f"{problem}; leave clean out, or let the data packer return turns")
            row_content = row_kind.read(packer_row, location, algorithm)
            yield row_number, location, list(iterate_texts(row_content)), _shows_images(packer_row, row_content)


def _shows_images(row: Row, row_content: Any) -> bool:
    row_contents = row_content if isinstance(row_content, tuple) else (row_content,)
    row_turns = chain.from_iterable(item for item in row_contents if isinstance(item, list))
    return bool(get_column_images(row)) or any(isinstance(turn["content"], list) for turn in row_turns)


def _make_row_fingerprint(location: str, row_texts: list[str]) -> tuple["RowFingerprint", list[list[str]]]:
    """Return the fingerprint of a training row for the search for duplicates, and the normalised words of each text of
    the row."""
    normalised_texts = list(map(normalise_text, row_texts))
    words_by_text = list(map(split_words, normalised_texts))
    text_digest = blake2b("\0".join(normalised_texts).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    ngram_hashes = np.unique(hash_ngrams(hash_words([*chain.from_iterable(words_by_text)]), _SHINGLE_SIZE))
    text_beginning = "\n".join(row_texts)[:_MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()
    return RowFingerprint(text_digest, location, text_beginning, ngram_hashes), words_by_text


def iterate_texts(content: Any) -> Iterator[str]:
    """Yield all texts in nested lists and dictionaries, such as turns, except the texts of system turns. The arguments
    of a tool call are one text, as JSON."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        if content.get("role") not in {"system", "developer"}:
            # Compare tool calls by their JSON, because they may differ only in argument names and numbers.
            if isinstance(arguments := content.get("arguments"), dict):
                content = {**content, "arguments": json.dumps(arguments, ensure_ascii=False, default=str)}
            yield from iterate_texts([element for name, element in content.items() if name not in {"role", "type"}])
    elif isinstance(content, list | tuple):
        for element in content:
            yield from iterate_texts(element)


class RowFingerprint(NamedTuple):
    """Digest and n-gram hashes of the text of a training row, which the search for duplicates compares."""

    digest: bytes
    location: str
    text: str
    """Beginning of the row's text, in valid UTF-8."""
    ngram_hashes: np.ndarray
    """Sorted hashes of the row's n-grams, uint64."""

    def compute_similarity(self, other_row: "RowFingerprint") -> float:
        """Return the Jaccard similarity of the n-grams of two rows."""
        num_common_ngrams = np.intersect1d(self.ngram_hashes, other_row.ngram_hashes, assume_unique=True).size
        return num_common_ngrams / max(1, self.ngram_hashes.size + other_row.ngram_hashes.size - num_common_ngrams)

    def compute_hash_keys(self, minhash: MinHashBands | None) -> list[int]:
        """Return a hash of the row's text and, if `minhash` is not None, one key per band of the row's MinHash
        signature. Similar rows probably have a common key."""
        band_keys = minhash.compute_band_keys(self.ngram_hashes).tolist() if minhash else []
        return [int.from_bytes(self.digest[:8]), *band_keys]

    def find_match(self, candidates: Iterable["RowFingerprint"], min_similarity: float) -> dict[str, Any] | None:
        """Compare this row with the rows `candidates`. Return the match (a line of `clean.jsonl`) with the most similar
        one; None if none has an equal text or a similarity of at least `min_similarity` (0: only equal texts match)."""
        best_match, best_similarity = None, min_similarity or 2.0
        for similar_row in candidates:
            similarity = 2.0 if self.digest == similar_row.digest else self.compute_similarity(similar_row)
            if similarity > best_similarity or (similarity == best_similarity and best_match is None):
                best_match, best_similarity = similar_row, similarity
        if best_match is None:
            return None
        return {
            "row": self.location, "match": "exact_duplicate" if best_similarity == 2.0 else "near_duplicate",
            "similarity": min(best_similarity, 1.0), "text": self.text,
            "of": best_match.location, "of_text": best_match.text,
        }  # fmt: skip


class _HashKeyIndex:
    """Index of row numbers by hash keys, with at most `_MAX_CANDIDATES` rows per key."""

    def __init__(self) -> None:
        self._row_numbers_by_hash_key: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, row_number: int, hash_keys: Iterable[tuple[int, int]]) -> None:
        """Add a row under its hash keys: (0, hash of its text) and (i, hash) per band i of its MinHash signature."""
        for key in hash_keys:
            if len(self._row_numbers_by_hash_key[key]) < _MAX_CANDIDATES:
                self._row_numbers_by_hash_key[key].append(row_number)

    def find_row_numbers(self, hash_keys: Iterable[tuple[int, int]]) -> list[int]:
        """Return the sorted numbers of the rows that have at least one of the hash keys."""
        return sorted({row_number for key in hash_keys for row_number in self._row_numbers_by_hash_key.get(key, ())})


class RowFingerprintFile:
    """Sequence of `RowFingerprint`s that are stored in a file."""

    def __init__(self, fingerprint_file: Any) -> None:
        self._fingerprint_file, self._byte_offset_by_row = fingerprint_file, array("Q")

    def add(self, fingerprint: RowFingerprint) -> None:
        """Append the fingerprint of a row to the file."""
        self._byte_offset_by_row.append(self._fingerprint_file.tell())
        # A file name may contain bytes that are not UTF-8; replace them, because `clean.jsonl` is UTF-8.
        location = fingerprint.location.encode("utf-8", "replace").decode()
        pickle.dump(fingerprint._replace(location=location), self._fingerprint_file)

    def __getitem__(self, index: int) -> RowFingerprint:
        self._fingerprint_file.seek(self._byte_offset_by_row[index])
        fingerprint: RowFingerprint = pickle.load(self._fingerprint_file)
        return fingerprint


def find_duplicates(
    hash_keys: np.ndarray, fingerprints: RowFingerprintFile, min_similarity: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the position and the match (a line of `clean.jsonl`) of each row that duplicates an earlier row: its text
    is equal, or the similarity is at least `min_similarity` (0: equal texts only). Earlier rows that are duplicates
    themselves are not compared. `hash_keys`, shape (rows, keys), are the hash keys of the rows; two rows are compared
    only if they have an equal key in the same column."""
    is_key_shared = np.zeros(hash_keys.shape, dtype=bool)
    for key_column in range(hash_keys.shape[1]):
        _, key_number_by_row, key_counts = np.unique(hash_keys[:, key_column], return_inverse=True, return_counts=True)
        is_key_shared[:, key_column] = key_counts[key_number_by_row] > 1
    hash_key_index = _HashKeyIndex()
    for row_position in np.flatnonzero(is_key_shared.any(axis=1)).tolist():
        shared_key_columns = np.flatnonzero(is_key_shared[row_position]).tolist()
        row_hash_keys = [(key_column, int(hash_keys[row_position, key_column])) for key_column in shared_key_columns]
        rows_with_shared_keys = map(fingerprints.__getitem__, hash_key_index.find_row_numbers(row_hash_keys))
        if match := fingerprints[row_position].find_match(rows_with_shared_keys, min_similarity):
            yield row_position, match
        else:
            hash_key_index.add(row_position, row_hash_keys)


class BenchmarkIndex:
    """Index in memory of the n-grams of benchmark texts, for the search for these texts in training rows."""

    def __init__(self, benchmark_configs: Sequence[BenchmarkRowsConfig], ngram_size: int) -> None:
        self._ngram_size, self._min_benchmark_words = ngram_size, min(ngram_size, _MIN_BENCHMARK_WORDS)
        self._benchmark_texts: list[tuple[str, str]] = []
        ngram_hashes, text_indices = array("Q"), array("I")
        self._ngram_sizes: set[int] = set()
        for benchmark_number, benchmark_config in enumerate(benchmark_configs):
            num_indexed_texts = len(self._benchmark_texts)
            for location, row in load_rows(benchmark_config.dataset, f"{BENCHMARKS_KEY}.{benchmark_number}"):
                for text in iterate_texts(row):
                    if len(words := remove_operators(split_words(normalise_text(text)))) >= self._min_benchmark_words:
                        self._ngram_sizes.add(min(ngram_size, len(words)))
                        ngram_hashes.extend(hash_ngrams(hash_words(words), ngram_size).tolist())
                        text_indices.extend([len(self._benchmark_texts)] * (len(ngram_hashes) - len(text_indices)))
                        self._benchmark_texts.append((location, text))
            if len(self._benchmark_texts) == num_indexed_texts:
                problem = f"no text of at least {self._min_benchmark_words} words"
                raise DataError(f"{BENCHMARKS_KEY}.{benchmark_number}: {problem}; name rows of text")
        unsorted_ngram_hashes = np.frombuffer(ngram_hashes, dtype=np.uint64)
        hash_order = np.argsort(unsorted_ngram_hashes, kind="stable")
        self._sorted_ngram_hashes = unsorted_ngram_hashes[hash_order]
        self._ngram_text_indices = np.frombuffer(text_indices, "I")[hash_order]

    def find_match(self, words_by_turn: Sequence[list[str]]) -> dict[str, Any] | None:
        """Compare a row, the words of each of its turns, with the benchmark texts. Return the match (a line of
        `clean.jsonl`) with the text of which the row repeats the largest fraction; None if it repeats none. In the
        match, `similarity` is the fraction of the benchmark text's words in n-grams that the row has too, and `text`
        the longest passage of such n-grams."""
        words_by_turn = [remove_operators(words) for words in words_by_turn] if self._benchmark_texts else []
        ngram_hashes = [
            hash_ngrams(word_hashes, ngram_size)
            for word_hashes in map(hash_words, words_by_turn)
            for ngram_size in self._ngram_sizes
            if len(word_hashes) >= ngram_size
        ]
        if not ngram_hashes:
            return None
        row_ngram_hashes = np.concatenate(ngram_hashes)
        hashes, text_indices = self._sorted_ngram_hashes, self._ngram_text_indices
        hash_positions = np.minimum(np.searchsorted(hashes, row_ngram_hashes), len(hashes) - 1)
        shared_ngram_counts: Counter[int] = Counter()
        for start in hash_positions[hashes[hash_positions] == row_ngram_hashes].tolist():
            end = start + _MAX_CANDIDATES
            shared_ngram_counts.update(text_indices[start:end][hashes[start:end] == hashes[start]].tolist())
        best_match: tuple[float, int, list[str]] | None = None
        for text_index, _ in shared_ngram_counts.most_common(_MAX_CANDIDATES):
            benchmark_words = remove_operators(split_words(normalise_text(self._benchmark_texts[text_index][1])))
            overlap_fraction, common_passage = self._measure_overlap(words_by_turn, benchmark_words)
            if common_passage and (best_match is None or overlap_fraction > best_match[0]):
                best_match = overlap_fraction, text_index, common_passage
        if best_match is None:
            return None
        overlap_fraction, text_index, common_passage = best_match
        location, benchmark_text = self._benchmark_texts[text_index]
        return {"match": "benchmark_text", "similarity": round(overlap_fraction, 4), "text": " ".join(common_passage),
                "of": location, "of_text": benchmark_text[:_MAX_TEXT_CHARACTERS]}  # fmt: skip

    def _measure_overlap(self, turns: Sequence[list[str]], benchmark_words: list[str]) -> tuple[float, list[str]]:
        """Return the fraction of `benchmark_words`, the words of a benchmark text, that are in n-grams which also occur
        in one of the `turns`, and the longest passage of the text that consists of such n-grams."""
        ngram_size = min(self._ngram_size, len(benchmark_words))
        turn_ngrams = {tuple(turn[i : i + ngram_size]) for turn in turns for i in range(len(turn) - ngram_size + 1)}
        is_word_in_ngram = np.zeros(len(benchmark_words) + 1, dtype=bool)
        for i in range(len(benchmark_words) - ngram_size + 1):
            is_word_in_ngram[i : i + ngram_size] |= tuple(benchmark_words[i : i + ngram_size]) in turn_ngrams
        spans_of_shared_words = np.flatnonzero(np.diff(is_word_in_ngram, prepend=False)).reshape(-1, 2).tolist()
        passage_start, passage_end = max(spans_of_shared_words, key=lambda span: span[1] - span[0], default=(0, 0))
        return float(is_word_in_ngram.sum() / len(benchmark_words)), benchmark_words[passage_start:passage_end]
