"""On-policy distillation: a teacher scores the completions that the policy sampled (arXiv 2306.13649).

The loss is the expected divergence of policy and teacher over the policy's own completions, summed over tokens. Its
gradient has two terms: how the divergence of a token's distribution changes at a fixed prefix, and how sampling a token
changes the divergences after it. Both are implemented:

- For the sampled tokens only (`top_k = 0`): the penalty -(log pi_old - log T) of a token is added to its advantage. The
  penalties of later tokens are added too, times `kl_discount_factor`, its square, and so on. With a factor of 1 the
  policy gradient is that of the reverse KL of the completion; with 0, that of each token's reverse KL at its prefix.
- For K tokens (`top_k = K`): the generalised Jensen-Shannon divergence D of the two distributions is a loss term with
  its own gradient; with a factor, the advantage of a token falls by the discounted D of the tokens after it.

Two forms of Cosmos-RL are not supported. Cosmos-RL uses -D as the advantage of the sampled token, which lowers the
probability of any sampled token where the distributions differ, even of the teacher's most probable token, and is no
gradient of D. Cosmos-RL also uses only the probabilities of the K tokens: they do not sum to 1, and the minimum of such
a D is not at the teacher. In this module all other tokens form one more event, so that D is a divergence. D is a lower
bound of the divergence over the whole vocabulary, and equals that divergence if K is the size of the vocabulary.

Shapes: B samples, S predicted tokens, K token ids, E = K + 1 events.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, token_metric
from cosmos_core.algorithms.base import TrainerView
from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.data.sample import Sample, batch_within_token_limit
from cosmos_core.models.scorer import RequestedOutputs
from cosmos_core.models.teacher import TEACHER_WEIGHTS


class TeacherLoss(NamedTuple):
    """Contribution of the teacher model to the loss of a micro-batch."""

    advantages_BS: Tensor | None
    """Penalties for differences from the teacher, to add to the advantage of each token; None: nothing is added."""
    loss_BS: Tensor | None
    """Divergence of the policy from the teacher at each token, with gradient, to add to the token's loss; None: nothing
    is added."""
    metrics: Metrics


def teacher_loss(
    config: DistillationConfig,
    policy_logprobs_BS: Tensor,
    teacher_logprobs_BS: Tensor,
    mask_BS: Tensor,
    is_sampled_BS: Tensor,
) -> TeacherLoss:
    """Return the terms that a teacher model adds to the advantages and to the loss of a micro-batch.

    Without `top_k`, the log-probabilities are those of the sampled tokens, and the policy's are from before the train
    step. With `top_k`, they are those of K selected token ids per token, shape BSK, and the policy's are current, with
    gradient. `mask_BS` is 1 at trained tokens, and `is_sampled_BS` at tokens that the policy sampled: only the
    advantages of sampled tokens include penalties of later tokens."""
    kl_coef, discount = config.kl_penalty_coef, config.kl_discount_factor
    if not config.top_k:
        penalty_BS = apply_mask(policy_logprobs_BS.detach() - teacher_logprobs_BS, mask_BS)
        penalty_sum_BS = penalty_BS + apply_mask(discounted_sums(penalty_BS, discount), is_sampled_BS)
        metrics = {"teacher/reverse_kl": token_metric(penalty_BS, mask_BS)}
        return TeacherLoss(-kl_coef * penalty_sum_BS, None, metrics)
    policy_events_BSE, teacher_events_BSE = map(append_other_logprob, (policy_logprobs_BS, teacher_logprobs_BS))
    divergence_BS = jensen_shannon(policy_events_BSE, teacher_events_BSE, config.jsd_beta)
    divergence_BS = apply_mask(divergence_BS, mask_BS)
    metrics = {"teacher/divergence": token_metric(divergence_BS, mask_BS)}
    future_sum_BS = apply_mask(discounted_sums(divergence_BS.detach(), discount), is_sampled_BS) if discount else None
    return TeacherLoss(None if future_sum_BS is None else -kl_coef * future_sum_BS, kl_coef * divergence_BS, metrics)


def discounted_sums(token_values_BS: Tensor, discount: float) -> Tensor:
    """Return for each token the discounted sum of the values of later tokens: the sum over n >= 1 of discount^n times
    the value n tokens later."""
    discounted_sum_BS, num_summed_terms = token_values_BS, 1
    # Double the number of terms in `discounted_sum_BS` each time, so that few additions sum over a long sequence.
    while discount and num_summed_terms < token_values_BS.shape[1]:
        shifted_sum_BS = pad(discounted_sum_BS[:, num_summed_terms:], (0, num_summed_terms))
        discounted_sum_BS = discounted_sum_BS + discount**num_summed_terms * shifted_sum_BS
        num_summed_terms *= 2
    return discount * pad(discounted_sum_BS[:, 1:], (0, 1))


def append_other_logprob(logprobs_BSK: Tensor) -> Tensor:
    """Append the log of the total probability of all other tokens to the log-probabilities of K token ids; the shape
    becomes BSE, the dtype at least float32. The total probability is at least the dtype's epsilon."""
    upcast_logprobs_BSK = logprobs_BSK.to(torch.promote_types(logprobs_BSK.dtype, torch.float32))
    neg_top_probability_BS1 = -upcast_logprobs_BSK.exp().sum(-1, keepdim=True)
    other_logprob_BS1 = neg_top_probability_BS1.clamp(min=torch.finfo(upcast_logprobs_BSK.dtype).eps - 1).log1p()
    return torch.cat([upcast_logprobs_BSK, other_logprob_BS1], dim=-1)


def jensen_shannon(policy_logprobs_BSE: Tensor, teacher_logprobs_BSE: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence over the last dimension, from log-probabilities.

    For policy S, teacher T and M = (1 - beta) S + beta T, the divergence is beta KL(T | M) + (1 - beta) KL(S | M). For
    beta = 0 it is the forward KL(T | S), for beta = 1 the reverse KL(S | T).
    """
    if beta == 0:
        return _kl_div(teacher_logprobs_BSE, policy_logprobs_BSE)
    if beta == 1:
        return _kl_div(policy_logprobs_BSE, teacher_logprobs_BSE)
    mixture_BSE = torch.logaddexp(policy_logprobs_BSE + math.log1p(-beta), teacher_logprobs_BSE + math.log(beta))
    return beta * _kl_div(teacher_logprobs_BSE, mixture_BSE) + (1 - beta) * _kl_div(policy_logprobs_BSE, mixture_BSE)


def _kl_div(logprobs_BSE: Tensor, other_logprobs_BSE: Tensor) -> Tensor:
    return (logprobs_BSE.exp() * (logprobs_BSE - other_logprobs_BSE)).sum(-1)


def score_with_teacher(
    config: DistillationConfig, samples: Sequence[Sample], view: TrainerView, request: RequestedOutputs
) -> tuple[list[Sample], list[Tensor]]:
    """Return the samples and, for each sample, the teacher's log-probabilities of its tokens. With K = `config.top_k`,
    unless it is 0, these are the log-probabilities of K token ids at each token, and the returned samples have these
    ids as `top_ids`."""
    teacher_samples, max_batch_tokens = list(samples), config.max_token_len_per_mini_batch
    pass_size = config.mini_batch if max_batch_tokens is None else None
    if config.top_k:
        request = replace(request, entropy="", top_k=config.top_k)
        if not config.trainer_token_ids_from_teacher:
            teacher_samples = _set_top_token_ids(teacher_samples, view.evaluate(teacher_samples, request))
    teacher_outputs = view.evaluate(
        batch_within_token_limit(teacher_samples, max_batch_tokens), request, weights=TEACHER_WEIGHTS, size=pass_size
    )
    if config.top_k and config.trainer_token_ids_from_teacher:
        teacher_samples = _set_top_token_ids(teacher_samples, teacher_outputs)
    return teacher_samples, [row["top_logprobs" if config.top_k else "logprobs"] for row in teacher_outputs]


def unmask_prompt(sample: Sample, num_prompt_tokens: int) -> Sample:
    """Return the sample with a loss mask that also includes its prompt tokens, except the first. The policy did not
    sample prompt tokens, so their rollout log-probabilities are NaN."""
    loss_mask = sample.loss_mask.copy()
    loss_mask[1:num_prompt_tokens] = 1
    assert sample.rollout_logprobs is not None
    nan_prompt_logprobs = np.full(max(0, num_prompt_tokens - 1), np.nan, dtype=np.float32)
    rollout_logprobs = np.concatenate([nan_prompt_logprobs, sample.rollout_logprobs])
    return replace(sample, loss_mask=loss_mask, rollout_logprobs=rollout_logprobs)


def _set_top_token_ids(samples: Sequence[Sample], sample_outputs: Sequence[dict[str, Tensor]]) -> list[Sample]:
    """Return copies of `samples` with `top_ids`: the K most likely token ids at each trained token, which a model has
    returned in `sample_outputs`."""
    return [
        replace(sample, top_ids=row["top_ids"].cpu().numpy()[sample.loss_mask[1:] == 1])
        for sample, row in zip(samples, sample_outputs, strict=True)
    ]
