"""Prefixes that completions of one group share although their rewards differ: their tokens say nothing of either."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def shared_prefixes(
    completions: Sequence[Sequence[int]], rewards: Sequence[float | None], min_tokens: int
) -> list[int]:
    """Return for each completion how many of its first tokens are left out of the loss.

    A prefix counts if it has at least `min_tokens` tokens, two or more completions share it, no two of these share a
    longer one, and their rewards differ, invalid ones aside. A completion that is nothing but the prefix is learned
    whole. (The rule of `min_filter_prefix_tokens` in Cosmos-RL.)
    """
    numbers = range(len(completions))
    shared = [[_common(completions[i], completions[j]) if i != j else 0 for j in numbers] for i in numbers]
    found = [0] * len(completions)
    for i in numbers:
        length = max(shared[i], default=0)
        sharing = [j for j in numbers if j == i or shared[i][j] == length]
        is_longest = all(shared[a][b] <= length for a in sharing for b in sharing)
        if length >= min_tokens and is_longest and len({rewards[j] for j in sharing} - {None}) > 1:
            found[i] = length if len(completions[i]) > length else 0
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
