"""Normalised words of texts, hashes of their n-grams, and MinHash signatures, for `clean.py`.

Texts are compared as words: Unicode NFKC, case folded, split at whitespace, without punctuation. In a search for
duplicates, signs of arithmetic are words, because `5 + 3` and `5 - 3` are different texts. Letters of scripts without
spaces are words.
"""

import re
import unicodedata
from functools import cache, lru_cache
from hashlib import blake2b

import numpy as np

_UNSPACED_SCRIPTS = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD_REGEX = re.compile(rf"[{_UNSPACED_SCRIPTS}]|[^\W{_UNSPACED_SCRIPTS}]+|[+*/=<>^%]|-(?=\s?[\d(])")
_MAX_CACHED_WORDS = 1 << 20  # maximum number of words whose hashes are cached, about 300 MB
_NUM_PERMUTATIONS = 128
_TARGET_RECALL = 0.99
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


def normalise_text(text: str) -> str:
    """Return a text in Unicode NFKC, with folded case and single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def split_words(text: str) -> list[str]:
    """Return the words and the signs of arithmetic of a normalised text."""
    return _WORD_REGEX.findall(text)


def remove_operators(normalised_words: list[str]) -> list[str]:
    """Return the words that are not signs of arithmetic, such as `+`."""
    return [word for word in normalised_words if word[0].isalnum()]


@lru_cache(maxsize=_MAX_CACHED_WORDS)
def _hash_word(word: str) -> int:
    """Return a 64-bit hash of a word, the same in each process."""
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def hash_words(words: list[str]) -> np.ndarray:
    """Return a hash of each word, uint64."""
    return np.fromiter(map(_hash_word, words), dtype=np.uint64, count=len(words))


def hash_ngrams(word_hashes: np.ndarray, n: int) -> np.ndarray:
    """Return a hash of each n-gram, `n` consecutive words, uint64, from the hashes of the words; fewer than `n` words
    give one hash."""
    n = min(n, len(word_hashes))
    if not n:
        return word_hashes
    return np.convolve(word_hashes, _compute_hash_powers(n), mode="valid")


@cache
def _compute_hash_powers(num_powers: int) -> np.ndarray:
    """Return powers of an odd number modulo 2^64, with which 64-bit hashes are combined to one."""
    return np.array([pow(_HASH_MULTIPLIER, i + 1, 1 << 64) for i in range(num_powers)], dtype=np.uint64)


class MinHashBands:
    """Locality-sensitive hashing (MinHash) of sets of n-grams, each to several keys. The probability that two sets have
    a common key grows with their Jaccard similarity, and is at least 99 % at the similarity `min_jaccard`."""

    def __init__(self, min_jaccard: float) -> None:
        from datasketch import MinHash  # datasketch is optional, so import it only if it is used

        band_size = _NUM_PERMUTATIONS
        while band_size > 1 and 1 - (1 - min_jaccard**band_size) ** (_NUM_PERMUTATIONS // band_size) < _TARGET_RECALL:
            band_size -= 1
        self._band_size = band_size
        self.num_bands = _NUM_PERMUTATIONS // self._band_size
        """Number of bands of a MinHash signature, which is the number of keys that each set of n-grams gets."""
        self._empty_signature = MinHash(num_perm=_NUM_PERMUTATIONS, hashfunc=int)
        self._hash_powers = _compute_hash_powers(self._band_size)

    def compute_band_keys(self, ngram_hashes: np.ndarray) -> np.ndarray:
        """Return the keys of a set of n-grams, uint64, one per band of its MinHash signature; `ngram_hashes` are the
        hashes of the n-grams."""
        minhash = self._empty_signature.copy()
        minhash.update_batch((ngram_hashes >> np.uint64(32)).tolist())
        hashes_by_band = minhash.hashvalues[: self.num_bands * self._band_size].reshape(self.num_bands, self._band_size)
        return hashes_by_band.astype(np.uint64) @ self._hash_powers
