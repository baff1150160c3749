"""Arrange samples in micro-batches that need less computation than micro-batches with equal numbers of samples.

Padded rows are grouped by length. Completions of one prompt share a packed row, which contains the prompt once. An
arrangement changes only the order in which gradients are summed.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from cosmos_core.data.sample import Sample

_MAX_PADDING_FRACTION = 0.1
"""Fraction of padding tokens below which rows are not rearranged."""
_OVERHEAD, _FRACTION = 32, 64
"""Fixed cost of a micro-batch on a CPU, in tokens: a 64th of all tokens, at most 32."""
_MIN_SAVED_FRACTION = 0.25
"""Fraction of all tokens that sharing prompts must save."""
_MIN_PROMPT = 8
"""Minimum number of tokens of a prompt to share, because the attention of completions of shared prompts runs in more,
smaller batches."""


def split_by_length(
    samples: Sequence[Sample],
    sorted_indices: Sequence[int],
    size: int,
    num_ranks: int,
    width: Callable[[int], int] = lambda length: length,
) -> list[list[int]] | None:
    """Return micro-batches of at most `size` padded rows with the fewest tokens, padding included; None if batches of
    equal numbers of rows need hardly more tokens.

    Args:
        samples: all samples.
        sorted_indices: indices of the samples to arrange, the longest first.
        size: maximum number of rows of a micro-batch.
        num_ranks: number of data-parallel ranks, which get the micro-batches in turn.
        width: function from the length of the longest row of a micro-batch to the padded length.
    """
    # The ranks run rows of similar length in parallel, so the longest of `num_ranks` rows determines the cost.
    widths = [width(len(samples[i].input_ids)) for i in sorted_indices[::num_ranks]]
    num_unsplit_tokens = sum(widths[start] * len(widths[start : start + size]) for start in range(0, len(widths), size))
    if sum(widths) >= (1 - _MAX_PADDING_FRACTION) * num_unsplit_tokens:
        return None
    overhead = min(_OVERHEAD, sum(widths) // _FRACTION)
    costs, starts = [0], [0]
    for end in range(1, len(widths) + 1):
        options = [(costs[i] + widths[i] * (end - i) + overhead, i) for i in range(max(0, end - size), end)]
        cost, start = min(options)
        costs.append(cost)
        starts.append(start)
    bounds = [len(widths)]
    while bounds[-1]:
        bounds.append(starts[bounds[-1]])
    slices = [(num_ranks * start, num_ranks * end) for start, end in pairwise(reversed(bounds))]
    batches = [
        list(sorted_indices[start + rank : end : num_ranks]) for start, end in slices for rank in range(num_ranks)
    ]
    return [batch for batch in batches if batch]


def group_by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples in one list per prompt."""
    groups: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.input_ids[: prompt_length(sample)].tobytes(), []).append(i)
    return list(groups.values())


def prompt_length(sample: Sample) -> int:
    """Return the number of leading tokens of a sample that can be shared: those before the token that predicts the
    first trained token. Return 0 if there are too few tokens to share."""
    length = int(sample.loss_mask[1:].argmax())
    return length if length >= _MIN_PROMPT else 0


def is_worth_sharing(num_tokens: float, num_shared: float) -> bool:
    """Return True if sharing prompts, which reduces `num_tokens` tokens to `num_shared`, saves enough tokens."""
    return num_shared <= (1 - _MIN_SAVED_FRACTION) * num_tokens


def num_shared_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of tokens of samples with the same prompt, counting the prompt once."""
    return sum(len(sample.input_ids) for sample in samples) - (len(samples) - 1) * prompt_length(samples[0])


def merge_prompts(
    samples: Sequence[Sample], sorted_indices: Sequence[int], size: int, num_ranks: int
) -> list[list[int]] | None:
    """Return micro-batches in which completions of a prompt share one copy of the prompt; None if the prompts are too
    short, or too few for the number of ranks.

    A micro-batch has at most as many tokens as `size` of the longest samples without sharing. The arguments are those
    of `split_by_length`.
    """
    groups = [[sorted_indices[k] for k in group] for group in group_by_prompt([samples[i] for i in sorted_indices])]
    totals = [num_shared_tokens([samples[i] for i in group]) for group in groups]
    num_tokens = sum(len(samples[i].input_ids) for i in sorted_indices)
    max_tokens = min(size * len(samples[sorted_indices[0]].input_ids), max(max(totals), -(-sum(totals) // num_ranks)))
    batches: list[list[int]] = []
    lengths: list[int] = []
    for number in sorted(range(len(groups)), key=lambda g: -totals[g]):
        prompt = prompt_length(samples[groups[number][0]])
        if not batches or lengths[-1] + totals[number] > max_tokens:
            batches.append([])
            lengths.append(0)
        lengths[-1] += prompt
        for i in groups[number]:
            num_new_tokens = len(samples[i].input_ids) - prompt
            if batches[-1] and lengths[-1] + num_new_tokens > max_tokens:
                batches.append([])
                lengths.append(prompt)
            batches[-1].append(i)
            lengths[-1] += num_new_tokens
    order = sorted(range(len(batches)), key=lambda batch_index: -lengths[batch_index])
    rank_tokens = sum(lengths[batch_index] for batch_index in order[::num_ranks])
    return (
        [batches[batch_index] for batch_index in order]
        if is_worth_sharing(num_tokens / num_ranks, rank_tokens)
        else None
    )
