"""Arrange samples in micro-batches that need less computation than micro-batches with equal numbers of samples.

Padded rows are grouped by length. Completions of one prompt share a packed row, which contains the prompt once. An
arrangement changes only the order in which gradients are summed.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from cosmos_core.data.sample import Sample

_MAX_PADDING_FRACTION = 0.1
"""Fraction of padding tokens below which rows are not rearranged."""
_MAX_OVERHEAD_TOKENS, _OVERHEAD_DIVISOR = 32, 64
"""Fixed cost of a micro-batch on a CPU, in tokens: a 64th of all tokens, at most 32."""
_MIN_SAVED_FRACTION = 0.25
"""Fraction of all tokens that sharing prompts must save."""
_MIN_PROMPT_TOKENS = 8
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
    overhead = min(_MAX_OVERHEAD_TOKENS, sum(widths) // _OVERHEAD_DIVISOR)
    costs, starts = [0], [0]
    for end in range(1, len(widths) + 1):
        possible_starts = range(max(0, end - size), end)
        cost, start = min((costs[i] + widths[i] * (end - i) + overhead, i) for i in possible_starts)
        costs.append(cost)
        starts.append(start)
    bounds = [len(widths)]
    while bounds[-1]:
        bounds.append(starts[bounds[-1]])
    slices = [(num_ranks * start, num_ranks * end) for start, end in pairwise(reversed(bounds))]
    batches = [list(sorted_indices[start + k : end : num_ranks]) for start, end in slices for k in range(num_ranks)]
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
    return length if length >= _MIN_PROMPT_TOKENS else 0


def saves_enough_tokens(num_tokens: float, num_shared: float) -> bool:
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
    group_tokens = [num_shared_tokens([samples[i] for i in group]) for group in groups]
    num_tokens = sum(len(samples[i].input_ids) for i in sorted_indices)
    max_row_tokens = size * len(samples[sorted_indices[0]].input_ids)
    max_tokens = min(max_row_tokens, max(max(group_tokens), -(-sum(group_tokens) // num_ranks)))
    batches: list[list[int]] = []
    batch_tokens: list[int] = []
    for num_group_tokens, group in sorted(zip(group_tokens, groups, strict=True), key=lambda entry: -entry[0]):
        num_prompt_tokens = prompt_length(samples[group[0]])
        if not batches or batch_tokens[-1] + num_group_tokens > max_tokens:
            batches.append([])
            batch_tokens.append(0)
        batch_tokens[-1] += num_prompt_tokens
        for i in group:
            num_new_tokens = len(samples[i].input_ids) - num_prompt_tokens
            if batches[-1] and batch_tokens[-1] + num_new_tokens > max_tokens:
                batches.append([])
                batch_tokens.append(num_prompt_tokens)
            batches[-1].append(i)
            batch_tokens[-1] += num_new_tokens
    order = sorted(range(len(batches)), key=lambda k: -batch_tokens[k])
    if not saves_enough_tokens(num_tokens / num_ranks, sum(batch_tokens[k] for k in order[::num_ranks])):
        return None
    return [batches[k] for k in order]
