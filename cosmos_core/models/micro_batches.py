"""Arrange samples in micro-batches that need less computation than micro-batches with equal numbers of samples.

Padded rows are grouped by length. Completions of one prompt share a packed row, which contains the prompt once. An
arrangement changes only the order in which gradients are summed.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from cosmos_core.data.sample import Sample

_MAX_PADDING_FRACTION = 0.1
"""Accepted fraction of padding: rows are rearranged only if more than this fraction of all their tokens is padding."""
_MAX_BATCH_OVERHEAD_TOKENS, _ROW_TOKENS_PER_OVERHEAD_TOKEN = 32, 64
"""Numbers that define the fixed cost of a micro-batch on a CPU, in tokens: a 64th of all tokens, at most 32."""
_MIN_SAVED_TOKEN_FRACTION = 0.25
"""Minimum fraction of all tokens that sharing prompts must save; otherwise each sample keeps its own copy of the
prompt."""
_MIN_PROMPT_TOKENS = 8
"""Minimum number of tokens of a shared prompt: to share a shorter prompt takes more time than it saves."""


def split_by_length(
    samples: Sequence[Sample],
    sorted_indices: Sequence[int],
    max_rows: int,
    num_ranks: int,
    padded_length_fn: Callable[[int], int] = lambda length: length,
) -> list[list[int]] | None:
    """Return micro-batches of at most `max_rows` padded rows with the fewest tokens, padding included; None if
    micro-batches of equal numbers of rows need hardly more tokens. `padded_length_fn` returns the length to which the
    rows of a micro-batch are padded from the length of the longest. For the other arguments see
    `ModelAdapter.arrange_micro_batches`."""
    # The ranks run rows of similar length in parallel, so only the longest of each `num_ranks` rows counts.
    lengths = [padded_length_fn(len(samples[i].input_ids)) for i in sorted_indices[::num_ranks]]
    num_unsplit_tokens = sum(lengths[i] * len(lengths[i : i + max_rows]) for i in range(0, len(lengths), max_rows))
    if sum(lengths) >= (1 - _MAX_PADDING_FRACTION) * num_unsplit_tokens:
        return None
    overhead_tokens = min(_MAX_BATCH_OVERHEAD_TOKENS, sum(lengths) // _ROW_TOKENS_PER_OVERHEAD_TOKEN)
    min_costs, best_starts = [0], [0]
    for end in range(1, len(lengths) + 1):
        candidate_starts = range(max(0, end - max_rows), end)
        batch_cost, start = min((min_costs[i] + lengths[i] * (end - i) + overhead_tokens, i) for i in candidate_starts)
        min_costs.append(batch_cost)
        best_starts.append(start)
    batch_boundaries = [len(lengths)]
    while batch_boundaries[-1]:
        batch_boundaries.append(best_starts[batch_boundaries[-1]])
    row_ranges = [(num_ranks * start, num_ranks * end) for start, end in pairwise(reversed(batch_boundaries))]
    batches = [list(sorted_indices[start + k : end : num_ranks]) for start, end in row_ranges for k in range(num_ranks)]
    return [batch for batch in batches if batch]


def group_by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of samples in one list per prompt: samples with equal prompt tokens are in the same list."""
    indices_by_prompt: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        indices_by_prompt.setdefault(sample.input_ids[: shared_prompt_length(sample)].tobytes(), []).append(i)
    return list(indices_by_prompt.values())


def shared_prompt_length(sample: Sample) -> int:
    """Return the number of leading tokens of a sample that can be shared: those before the token that predicts the
    first trained token. Return 0 if there are too few tokens to share."""
    num_prompt_tokens = int(sample.loss_mask[1:].argmax())
    return num_prompt_tokens if num_prompt_tokens >= _MIN_PROMPT_TOKENS else 0


def saves_enough_tokens(num_tokens: float, num_tokens_if_shared: float) -> bool:
    """Return True if sharing prompts, which reduces the number of tokens from `num_tokens` to `num_tokens_if_shared`,
    saves at least the fraction `_MIN_SAVED_TOKEN_FRACTION`."""
    return num_tokens_if_shared <= (1 - _MIN_SAVED_TOKEN_FRACTION) * num_tokens


def count_tokens_sharing_prompt(samples: Sequence[Sample]) -> int:
    """Return the number of tokens of samples with the same prompt if they share one copy of the prompt."""
    return sum(len(sample.input_ids) for sample in samples) - (len(samples) - 1) * shared_prompt_length(samples[0])


def merge_prompts(
    samples: Sequence[Sample], sorted_indices: Sequence[int], max_rows: int, num_ranks: int
) -> list[list[int]] | None:
    """Return micro-batches, as lists of indices of samples, in which the completions of a prompt share one copy of the
    prompt; None if this would save too few tokens per rank. A micro-batch has at most as many tokens as `max_rows`
    samples of the largest length. For the arguments see `ModelAdapter.arrange_micro_batches`."""
    sorted_samples = [samples[i] for i in sorted_indices]
    prompt_groups = [[sorted_indices[k] for k in group] for group in group_by_prompt(sorted_samples)]
    num_tokens_by_group = [count_tokens_sharing_prompt([samples[i] for i in group]) for group in prompt_groups]
    num_tokens = sum(len(samples[i].input_ids) for i in sorted_indices)
    max_full_batch_tokens = max_rows * len(samples[sorted_indices[0]].input_ids)
    num_tokens_per_rank = -(-sum(num_tokens_by_group) // num_ranks)
    max_batch_tokens = min(max_full_batch_tokens, max(*num_tokens_by_group, num_tokens_per_rank))
    batches: list[list[int]] = []
    num_tokens_by_batch: list[int] = []
    for group_tokens, group in sorted(zip(num_tokens_by_group, prompt_groups, strict=True), key=lambda pair: -pair[0]):
        num_prompt_tokens = shared_prompt_length(samples[group[0]])
        if not batches or num_tokens_by_batch[-1] + group_tokens > max_batch_tokens:
            batches.append([])
            num_tokens_by_batch.append(0)
        num_tokens_by_batch[-1] += num_prompt_tokens
        for i in group:
            num_completion_tokens = len(samples[i].input_ids) - num_prompt_tokens
            if batches[-1] and num_tokens_by_batch[-1] + num_completion_tokens > max_batch_tokens:
                batches.append([])
                num_tokens_by_batch.append(num_prompt_tokens)
            batches[-1].append(i)
            num_tokens_by_batch[-1] += num_completion_tokens
    batch_order = sorted(range(len(batches)), key=lambda k: -num_tokens_by_batch[k])
    if not saves_enough_tokens(num_tokens / num_ranks, sum(num_tokens_by_batch[k] for k in batch_order[::num_ranks])):
        return None
    return [batches[k] for k in batch_order]
