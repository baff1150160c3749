"""One sequence of tokens to learn from: data sets and scored rollouts are converted to it before training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosmos_core.types import ImageRef


@dataclass(frozen=True, slots=True)
class Sample:
    """Token sequence to learn from, with its loss mask and the values that the losses of some algorithms need."""

    input_ids: np.ndarray
    """Token ids of the whole sequence, int64."""
    loss_mask: np.ndarray
    """Loss mask, uint8, of the same length as `input_ids`: 1 where the token is learned."""
    advantage: float = 0.0
    reward: float = 0.0
    rollout_logprobs: np.ndarray | None = None
    """Log-probabilities that the engine returned for the tokens with mask 1, in order, float32. The value is NaN for a
    token that was not sampled; None: the sequence has no sampled token."""
    reference_logprob: float = 0.0
    """Sum of the log-probabilities of the sequence's learned tokens under the reference policy; 0 without a reference
    policy."""
    images: tuple[ImageRef, ...] = ()
    """Images that the image tokens of the sequence stand for, in order."""
    micro_batch: int | None = None
    """Number of the sample's micro-batch; None: the trainer groups `mini_batch` samples of similar length."""
    top_ids: np.ndarray | None = None
    """Ids of K tokens per learned token, (learned tokens, K), int64, whose log-probabilities the model computes at that
    position; None: the model's own most likely tokens, if the loss requests any."""
    source: str = ""
    """Name of the row's data set in a mixture of data sets; empty: there is one data set."""
    completion_index: int | None = None
    """Index of the sample's completion among all completions whose advantages were computed together; None: unknown."""

    @property
    def num_learned(self) -> int:
        """Return the number of learned tokens, without the first token of the sequence, which nothing predicts."""
        return int(self.loss_mask[1:].sum())


def batch_within_token_limit(samples: Sequence[Sample], max_tokens: int | None) -> list[Sample]:
    """Assign samples of similar length and with equally many images to micro-batches of at most `max_tokens` tokens,
    padding included; return the samples with the number of their micro-batch. If `max_tokens` is None, return the
    samples unchanged."""
    assigned_samples = list(samples)
    if max_tokens is None:
        return assigned_samples
    micro_batch_index = padded_length = num_samples = num_images = 0
    for i in sorted(range(len(samples)), key=lambda i: (len(samples[i].images), -len(samples[i].input_ids))):
        if (num_samples + 1) * padded_length > max_tokens or not num_samples or len(samples[i].images) != num_images:
            micro_batch_index, padded_length, num_samples = micro_batch_index + 1, len(samples[i].input_ids), 0
            num_images = len(samples[i].images)
        num_samples += 1
        assigned_samples[i] = replace(samples[i], micro_batch=micro_batch_index)
    return assigned_samples


def swap_responses(samples: Sequence[Sample], max_tokens: int) -> list[Sample]:
    """Return each prompt with the response of the previous sample, and the first prompt with the last response. Each
    sequence is cut to `max_tokens`."""
    response_start_indices = [int(sample.loss_mask.argmax()) for sample in samples]

    def swap(field_name: str, i: int) -> np.ndarray:
        prompt = getattr(samples[i], field_name)[: response_start_indices[i]]
        previous_response = getattr(samples[i - 1], field_name)[response_start_indices[i - 1] :]
        return np.concatenate([prompt, previous_response])[:max_tokens]

    return [replace(s, input_ids=swap("input_ids", i), loss_mask=swap("loss_mask", i)) for i, s in enumerate(samples)]
