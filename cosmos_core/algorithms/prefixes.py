"""Detection of token prefixes that completions of a group share although their rewards differ.

A shared prefix is excluded from the loss, because it does not explain the difference of the rewards.
"""

from collections.abc import Sequence
from itertools import takewhile


def shared_prefixes(
    completions: Sequence[Sequence[int]], rewards: Sequence[float | None], min_tokens: int
) -> list[int]:
    """Return for each completion of a group how many of its first tokens are excluded from the loss.

    A prefix is excluded if it has at least `min_tokens` tokens, at least two completions share it, no two of these
    completions share a longer prefix, and their valid rewards differ. A completion that consists only of the prefix is
    kept whole. This is the rule of `min_filter_prefix_tokens` in Cosmos-RL.
    """
    numbers = range(len(completions))
    shared = [[_prefix_length(completions[i], completions[j]) if i != j else 0 for j in numbers] for i in numbers]
    num_excluded = [0] * len(completions)
    for i in numbers:
        length = max(shared[i], default=0)
        sharing = [j for j in numbers if j == i or shared[i][j] == length]
        is_longest = all(shared[a][b] <= length for a in sharing for b in sharing)
        if length >= min_tokens and is_longest and len({rewards[j] for j in sharing} - {None}) > 1:
            num_excluded[i] = length if len(completions[i]) > length else 0
    return num_excluded


def _prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
