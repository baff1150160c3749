"""Difference between two versions of a bucket of weights, as the words of memory that changed.

At a small learning rate, an optimizer step changes few weights by as much as half precision can represent. The changed
words with their positions are then much smaller than the weights.
"""

from typing import Any, NamedTuple

import numpy as np

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
_MAX_CHANGED_FRACTION = 0.25
"""Fraction of changed words of a bucket of weights above which the whole bucket is sent: a changed word takes six bytes
with its position, instead of two."""


class ChangedWords(NamedTuple):
    """Changed two-byte words of a bucket of weights, stored as one array, and their positions: those that differ from
    the previous version of the array."""

    positions: np.ndarray[Any, np.dtype[np.uint32]]
    words: np.ndarray[Any, np.dtype[np.uint16]]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the changed words and their positions."""
        return self.positions.nbytes + self.words.nbytes

    def apply_changes(self, previous_bytes: ByteArray) -> None:
        """Write the changed words into `previous_bytes`, which must contain the previous version of the array."""
        previous_bytes.view(np.uint16)[self.positions] = self.words


def find_changed_words(previous_bytes: ByteArray, new_bytes: ByteArray) -> ChangedWords | None:
    """Return the words of `new_bytes` that differ from `previous_bytes`; None if too many words differ, or if the
    arrays have different sizes or an odd number of bytes."""
    if previous_bytes.size != new_bytes.size or new_bytes.size % 2:
        return None
    new_words = new_bytes.view(np.uint16)
    is_word_changed = previous_bytes.view(np.uint16) != new_words
    max_changed_words = _MAX_CHANGED_FRACTION * new_words.size
    if np.count_nonzero(is_word_changed) > max_changed_words or new_words.size > np.iinfo(np.uint32).max:
        return None
    positions = np.flatnonzero(is_word_changed)
    return ChangedWords(positions.astype(np.uint32), new_words[positions])
