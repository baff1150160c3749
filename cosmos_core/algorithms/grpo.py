"""Group relative policy optimization (GRPO, arXiv 2402.03300) and its variants.

This module computes credit, old and reference log-probabilities, denominators, and the optimizer steps of a train step.
The formulas are in `advantages`, `objectives/`, `policy_loss`, `correction` and `aggregate`.

Shapes: B samples, S predicted tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cosmos_core.algorithms.advantages import advantages, gdpo_advantages, whitened_returns
from cosmos_core.algorithms.aggregate import Metrics, add_metrics, aggregate_loss, compute_denominator, token_metric
from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update, metric_weights, split_equally
from cosmos_core.algorithms.correction import ImportanceWeightRule, importance_weights, self_normalise_weights
from cosmos_core.algorithms.distillation import TeacherLoss, score_with_teacher, teacher_loss, unmask_prompt
from cosmos_core.algorithms.objectives.base import PolicySettings, probability_ratio
from cosmos_core.algorithms.policy_loss import PolicyLossInputs, policy_loss, positive_nll_loss
from cosmos_core.algorithms.selection import excluded_prefix_lengths, high_entropy_masks
from cosmos_core.algorithms.zero_gradient import can_skip_zero_advantage, drop_zero_gradient_samples
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.sample import Sample, batch_within_token_limit
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.scorer import RequestedOutputs
from cosmos_core.types import Completion, Prompt, Sampling, ScoredGroup

_AIPO_OBJECTIVES = {"weighted": "aipo", "clamped": "aipo_clamped"}


@dataclass(frozen=True, slots=True)
class _UpdateInputs:
    """Inputs of the loss of one optimizer step (update). Each field of type `Sequence` has one element per sample."""

    samples: Sequence[Sample]
    all_samples: Sequence[Sample]
    """All samples of the optimizer step, for the denominators of its loss. Some, whose gradient is 0, are not run
    through the model."""
    old_logprobs: Sequence[Tensor] | None
    """Log-probabilities under the old policy: the policy before the first update of the train step or, with
    `use_rollout_logprobs_for_loss`, the rollout policy. None: the old policy is the current policy."""
    reference_logprobs: Sequence[Tensor] | None
    teacher_logprobs: Sequence[Tensor] | None
    """Log-probabilities of the tokens under the teacher model; None: no teacher."""
    token_returns: Sequence[Tensor] | None
    """Advantages of tokens, which replace those of their completions; None unless rewards include a KL penalty."""
    high_entropy_masks: Sequence[Tensor] | None
    """Masks of the high-entropy tokens that the policy loss includes; None: all tokens."""
    weight_rule: ImportanceWeightRule | None
    """Rule for the importance weights of tokens that another policy sampled; None: no weights."""
    is_first_update: bool
    """Whether this is the first optimizer step of the train step."""


class _MicroBatchLogprobs(NamedTuple):
    """Log-probabilities of a micro-batch's tokens under other policies than the current one, for the policy loss."""

    old_logprobs_BS: Tensor | None
    """Log-probabilities under the old policy: the policy before the first update of the train step or, with
    `use_rollout_logprobs_for_loss`, the rollout policy. None: the old policy is the current policy."""
    preupdate_logprobs_BS: Tensor
    """Log-probabilities under the old policy, without gradient: `old_logprobs_BS` or, if it is None, the policy's
    current ones."""
    rollout_logprobs_BS: Tensor | None
    """Log-probabilities with which the rollout engine sampled the tokens; those of the old policy at tokens that were
    not sampled; None: a sample has no rollout log-probabilities."""
    is_sampled_BS: Tensor
    """Mask of the trained tokens that the policy sampled. With distillation, tokens of prompts can be trained too."""


class Grpo(Algorithm):
    """GRPO with the settings of `[train.train_policy]`."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        """Store the settings. `sampling`: sampling settings of the completions; None: softmax(logits / temperature)
        samples them."""
        super().__init__(config, custom, sampling)
        self._requested_outputs = RequestedOutputs(config.temperature)
        self._weight_rule = _make_weight_rule(config, sampling)
        objective = {"grpo": "clip", "dapo": "clip"}.get(config.variant, config.variant)
        objective = _AIPO_OBJECTIVES[config.aipo_form] if config.aipo_rho else objective
        self._policy_settings = PolicySettings(
            epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high,
            lower_bound_ratio=config.lower_bound_ratio, kl_beta=0.0 if config.kl_in_reward else config.kl_beta,
            unbiased_kl_estimate=config.unbiased_kl_estimate, kl_estimator=config.kl_estimator, objective=objective,
            ratio_cap=config.aipo_rho or config.ratio_cap or (20.0 if objective.startswith("dppo") else 5.0),
            sapo_temperature_pos=config.sapo_temperature_pos, sapo_temperature_neg=config.sapo_temperature_neg,
            entropy_coeff=config.entropy_coeff, off_policy_masking_delta=config.off_policy_masking_delta,
        )  # fmt: skip

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        """Return the completions of all groups that have a valid reward as samples with advantages, and metrics of the
        groups. Completions without a valid reward do not affect these advantages. With `mask_truncated_completions`,
        truncated completions are left out."""
        config = self.config
        rewards = [[score.value for score in group.scores] for group in groups]
        prefix_lengths = [[0] * len(group.scores) for group in groups]
        if (min_tokens := config.min_filter_prefix_tokens) is not None:
            prefix_lengths = [
                excluded_prefix_lengths([each.token_ids for each in group.group.completions], row, min_tokens)
                for group, row in zip(groups, rewards, strict=True)
            ]
        all_samples = [
            [
                make_sample(group.group.prompt, completion, 0.0, score.value or 0.0, prefix_length)
                for completion, score, prefix_length in zip(group.group.completions, group.scores, row, strict=True)
            ]
            for group, row in zip(groups, prefix_lengths, strict=True)
        ]
        excluded_finish_reason = "length" if config.mask_truncated_completions else None
        advantage_rows, constant_group_fraction = advantages(
            rewards,
            algo="grpo" if config.algo == "gdpo" else config.algo,
            normalise_std=not config.unbiased_advantage,
            num_tokens=[
                [
                    0 if completion.finish_reason == excluded_finish_reason else sample.num_learned
                    for completion, sample in zip(group.group.completions, row, strict=True)
                ]
                for group, row in zip(groups, all_samples, strict=True)
            ],
        )
        reward_weights = metric_weights(config)  # no weights if `bypass_reward` disables the reward functions
        if config.algo == "gdpo" and reward_weights:
            rewards_by_function = [
                [[None if s.value is None else s.metrics.get(name) for s in group.scores] for group in groups]
                for name in reward_weights
            ]
            advantage_rows = gdpo_advantages(rewards_by_function, list(reward_weights.values()))
        metrics = {"reward/constant_groups": constant_group_fraction}
        samples, num_ignored_tokens, num_sampled_tokens, num_invalid_tokens, num_completions = [], 0, 0, 0, 0
        for group, *columns in zip(groups, all_samples, advantage_rows, prefix_lengths, strict=True):
            rows: Any = zip(group.group.completions, *columns, strict=True)
            for i, (completion, sample, advantage, prefix_length) in enumerate(rows, num_completions):
                if advantage is not None and completion.finish_reason != excluded_finish_reason:
                    samples.append(replace(sample, advantage=advantage, completion_index=i))
                    num_ignored_tokens += sum(completion.loss_mask[:prefix_length])
                    num_sampled_tokens += completion.num_sampled
                    num_invalid_tokens += int((~np.isfinite(completion.logprobs)).sum())
                    if self.teacher is not None and self.teacher.include_prompt:
                        samples[-1] = unmask_prompt(samples[-1], len(group.group.prompt.token_ids))
            num_completions += len(group.scores)
        if min_tokens is not None:
            metrics["completion/shared_prefix"] = num_ignored_tokens / max(1, num_sampled_tokens)
        metrics["rollout/tokens_not_finite"] = float(num_invalid_tokens)
        return batch_within_token_limit(samples, config.max_token_len_per_mini_batch), metrics

    def updates(self, samples: Sequence[Sample], view: TrainerView) -> Iterator[Update]:
        """Yield the optimizer steps of one train step, which makes `mu_iterations` passes over `samples`."""
        all_samples = [samples[batch] for batch in split_equally(len(samples), self.config.batch_size_per_optimize)]
        is_scaled_by_advantage = not self.teacher and can_skip_zero_advantage(self.config, self._policy_settings)
        can_skip_samples = self.has_separate_gradients and is_scaled_by_advantage
        samples, batch_slices, metrics = drop_zero_gradient_samples(all_samples, skips_zero_advantage=can_skip_samples)
        samples = batch_within_token_limit(samples, self.config.max_token_len_per_mini_batch)

        def evaluate_logprobs(weights: str) -> list[Tensor]:
            return [row["logprobs"] for row in view.evaluate(samples, self._requested_outputs, weights=weights)]

        # If a train step has a single update, pi_old is the current policy and needs no separate forward pass.
        has_one_update = len(batch_slices) * self.config.mu_iterations == 1 and not self.config.self_normalised_weights
        old_logprobs = None
        if self.config.use_rollout_logprobs_for_loss:
            old_logprobs = [_make_rollout_logprob_row(sample) for sample in samples]
        elif not has_one_update:
            old_logprobs = evaluate_logprobs("policy")
        has_reference_policy = "reference" in self.config.auxiliary_model_names
        reference_logprobs = evaluate_logprobs("reference") if has_reference_policy else None
        token_returns = None
        if self.config.kl_in_reward and reference_logprobs is not None:
            preupdate_logprobs = old_logprobs or evaluate_logprobs("policy")
            token_returns = whitened_returns(samples, preupdate_logprobs, reference_logprobs, self.config.kl_beta)
        weight_rule = self._weight_rule
        if weight_rule is not None and old_logprobs is not None and self.config.self_normalised_weights:
            weight_rule = self_normalise_weights(weight_rule, map(_make_importance_ratio_rows, samples, old_logprobs))
        teacher_logprobs = None
        if self.teacher is not None:
            samples, teacher_logprobs = score_with_teacher(self.teacher, samples, view, self._requested_outputs)
        update_batches = [*zip(batch_slices, all_samples, strict=True)] * self.config.mu_iterations
        for update_index, (batch, step_samples) in enumerate(update_batches):
            token_masks = None
            if self.config.top_entropy_quantile != 1:
                outputs = view.evaluate(samples[batch], RequestedOutputs(self.config.temperature, entropy="value"))
                entropies = [row["entropy"] for row in outputs]
                token_masks = high_entropy_masks(samples[batch], entropies, self.config.top_entropy_quantile)
            update_inputs = _UpdateInputs(
                samples[batch], step_samples, old_logprobs and old_logprobs[batch],
                reference_logprobs and reference_logprobs[batch], teacher_logprobs and teacher_logprobs[batch],
                token_returns and token_returns[batch], token_masks, weight_rule, is_first_update=update_index == 0,
            )  # fmt: skip
            yield replace(self._make_update(update_inputs), metrics=metrics)

    def _make_update(self, inputs: _UpdateInputs) -> Update:
        config, step_samples = self.config, inputs.all_samples
        max_tokens, num_trained_tokens = config.unbiased_loss_max_tokens, [s.num_learned for s in step_samples]
        denominator = compute_denominator(config.loss_type, num_trained_tokens, max_tokens)
        num_rewarded_tokens = float(max(1, sum(s.num_learned for s in step_samples if s.reward > 0)))

        def loss(micro_batch: MicroBatch) -> Loss:
            logprobs = _collate_logprobs(micro_batch, inputs.old_logprobs)
            loss_BS, metrics = self._policy_loss(micro_batch, inputs, logprobs)
            loss_value = aggregate_loss(loss_BS, micro_batch.mask_BS, config.loss_type, denominator, max_tokens)
            if config.positive_nll_coef:
                rewards_B = micro_batch.logprobs_BS.new_tensor([sample.reward for sample in micro_batch.samples])
                nll = positive_nll_loss(micro_batch.logprobs_BS, micro_batch.mask_BS, rewards_B, num_rewarded_tokens)
                loss_value = loss_value + config.positive_nll_coef * nll
            if config.use_rollout_logprobs_for_loss:
                # Compare the engine with the old policy, which the current policy equals only in the first update.
                if not inputs.is_first_update:
                    return Loss(loss_value, metrics)
                logprobs = logprobs._replace(preupdate_logprobs_BS=micro_batch.logprobs_BS.detach())
            min_ratio, max_ratio = config.rollout_correction_low, config.rollout_correction_high
            logprob_differences, engine_mismatch_metrics = _compare_engine_logprobs(logprobs, min_ratio, max_ratio)
            return Loss(loss_value, add_metrics(metrics, engine_mismatch_metrics), logprob_differences)

        entropy_mode: Literal["", "value", "gradient"] = "value" if config.log_entropy else ""
        top_k = self.teacher.top_k if self.teacher else 0
        entropy_mode = "gradient" if config.entropy_coeff else entropy_mode
        output_request = RequestedOutputs(config.temperature, entropy=entropy_mode, top_k=top_k)
        # Micro-batches are assigned per optimizer step: slices of a train step would leave some only partly filled.
        samples = batch_within_token_limit(inputs.samples, config.max_token_len_per_mini_batch)
        return Update(samples, loss, output_request, has_constant_gradient=self._has_constant_gradient(inputs))

    def _has_constant_gradient(self, inputs: _UpdateInputs) -> bool:
        policy_settings = self._policy_settings
        nonlinear_inputs = (inputs.old_logprobs, inputs.reference_logprobs, inputs.teacher_logprobs, inputs.weight_rule,
                           policy_settings.off_policy_masking_delta, policy_settings.entropy_coeff or None)  # fmt: skip
        return all(loss_term is None for loss_term in nonlinear_inputs) and policy_settings.objective != "aipo"

    def _policy_loss(
        self, micro_batch: MicroBatch, inputs: _UpdateInputs, logprobs: _MicroBatchLogprobs
    ) -> tuple[Tensor, Metrics]:
        """Return the policy loss of each token of a micro-batch, and metrics of the loss. The loss includes importance
        weights, the KL penalty, the entropy bonus and the terms of the teacher model, if they are configured."""
        metrics: Metrics = {}
        token_weights_BS = None
        if inputs.weight_rule is not None:
            assert logprobs.rollout_logprobs_BS is not None, "weights need the log-probabilities of the rollouts"
            token_weights_BS, metrics = importance_weights(
                logprobs.preupdate_logprobs_BS, logprobs.rollout_logprobs_BS, logprobs.is_sampled_BS, inputs.weight_rule
            )
            token_weights_BS = torch.where(logprobs.is_sampled_BS, token_weights_BS, 1.0)
        if (high_entropy_BS := _pad_micro_batch(inputs.high_entropy_masks, micro_batch)) is not None:
            token_weights_BS = high_entropy_BS if token_weights_BS is None else high_entropy_BS * token_weights_BS
        teacher_terms = TeacherLoss(None, None, {})
        if self.teacher and (teacher_logprobs := _pad_micro_batch(inputs.teacher_logprobs, micro_batch)) is not None:
            uses_top_k, model_outputs = self.teacher.top_k > 0, micro_batch.outputs
            policy_logprobs = model_outputs["top_logprobs"] if uses_top_k else logprobs.preupdate_logprobs_BS
            token_masks = micro_batch.mask_BS, logprobs.is_sampled_BS
            teacher_terms = teacher_loss(self.teacher, policy_logprobs, teacher_logprobs, *token_masks)
        advantages_B = micro_batch.logprobs_BS.new_tensor([sample.advantage for sample in micro_batch.samples])
        token_advantages_BS = teacher_terms.advantages_BS
        if (returns_BS := _pad_micro_batch(inputs.token_returns, micro_batch)) is not None:
            advantages_B = torch.zeros_like(advantages_B)
            token_advantages_BS = returns_BS if token_advantages_BS is None else returns_BS + token_advantages_BS
        policy_inputs = PolicyLossInputs(
            logprobs_BT=micro_batch.logprobs_BS, advantages_B=advantages_B, mask_BT=micro_batch.mask_BS,
            weights_BT=token_weights_BS, old_logprobs_BT=logprobs.old_logprobs_BS,
            ref_logprobs_BT=_pad_micro_batch(inputs.reference_logprobs, micro_batch),
            entropy_BT=micro_batch.outputs.get("entropy"), rollout_logprobs_BT=logprobs.rollout_logprobs_BS,
            token_advantages_BT=token_advantages_BS,
        )  # fmt: skip
        policy_term = policy_loss(policy_inputs, self._policy_settings)
        loss_BT = policy_term.loss_BT if teacher_terms.loss_BS is None else policy_term.loss_BT + teacher_terms.loss_BS
        return loss_BT, add_metrics(add_metrics(policy_term.metrics, metrics), teacher_terms.metrics)


ALGORITHM = Grpo


def make_sample(
    prompt: Prompt, completion: Completion, advantage: float, reward: float, num_ignored_tokens: int = 0
) -> Sample:
    """Return a completion as a sample. The loss mask has the tokens that the policy sampled, except the first
    `num_ignored_tokens` and those without a finite log-probability from the engine: the sampling probability of such a
    token is unknown, and a ratio of 1 would treat the token as on-policy."""
    token_ids = np.array([*prompt.token_ids, *completion.token_ids], dtype=np.int64)
    sampled_mask = np.array(completion.loss_mask, dtype=np.uint8)
    loss_mask = sampled_mask.copy()
    logprobs = np.array(completion.logprobs, dtype=np.float32)
    loss_mask[sampled_mask == 1] = np.isfinite(logprobs)
    loss_mask[:num_ignored_tokens] = 0
    full_loss_mask = np.concatenate([np.zeros(len(prompt.token_ids), dtype=np.uint8), loss_mask])
    return Sample(
        token_ids, full_loss_mask, advantage, reward, logprobs[loss_mask[sampled_mask == 1] == 1], images=prompt.images
    )


def _make_weight_rule(config: GrpoConfig, sampling: Sampling | None) -> ImportanceWeightRule | None:
    """Return the rule for the importance weights of tokens that another policy sampled; None: no weights."""
    max_mean_deviation = config.geometric_mask
    geometric_mean_range = None if max_mean_deviation is None else (1 - max_mean_deviation, 1 + max_mean_deviation)
    sequence_limits = (geometric_mean_range, config.mean_k3_mask, config.max_k3_mask)
    weight_rule = ImportanceWeightRule("none", 0.0, math.inf, *sequence_limits)
    # An objective with the ratio to the rollout policy needs no importance weights, which would repeat the ratio.
    has_rollout_ratio = config.use_rollout_logprobs_for_loss or (config.aipo_rho and config.aipo_form == "weighted")
    if config.use_decoupled_loss:
        weight_rule = replace(weight_rule, name="mask", max_weight=config.behav_imp_weight_cap or math.inf)
    elif config.rollout_correction:
        min_weight, max_weight = config.rollout_correction_low, config.rollout_correction_high
        weight_rule = replace(weight_rule, name=config.rollout_correction, min_weight=min_weight, max_weight=max_weight)
    elif sampling is not None and sampling.is_off_policy and not has_rollout_ratio:
        weight_rule = replace(weight_rule, name="truncate", max_weight=config.rollout_correction_high)
    has_ratio_limits_per_sequence = any(sequence_limit is not None for sequence_limit in sequence_limits)
    return weight_rule if has_ratio_limits_per_sequence or weight_rule.name != "none" else None


def _pad_micro_batch(rows: Sequence[Tensor] | None, micro_batch: MicroBatch) -> Tensor | None:
    """Return the rows of a micro-batch's samples as one tensor, padded with zeros to the shape of
    `micro_batch.logprobs_BS`; None if `rows` is None. `rows` has for each sample of the optimizer step a tensor with a
    number or a vector per token."""
    if rows is None:
        return None
    padded_rows_BS = micro_batch.logprobs_BS.new_zeros((*micro_batch.logprobs_BS.shape, *rows[0].shape[1:]))
    for padded_row_index, i in enumerate(micro_batch.indices):
        padded_rows_BS[padded_row_index, : len(rows[i])] = rows[i]
    return padded_rows_BS


def _make_rollout_logprob_row(sample: Sample) -> Tensor:
    """Return the rollout log-probability of each token of a sample after the first, 0 for untrained tokens."""
    logprob_row = torch.zeros(len(sample.input_ids) - 1)
    logprob_row[torch.as_tensor(sample.loss_mask[1:]).bool()] = torch.as_tensor(sample.rollout_logprobs)
    return logprob_row


def _make_importance_ratio_rows(sample: Sample, old_logprobs_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of `self_normalise_weights` for one sample: log-probabilities under the old policy, those of
    the rollout, and the mask of tokens that have both."""
    rollout_logprobs_S = _make_rollout_logprob_row(sample).to(old_logprobs_S)
    loss_mask_S = torch.as_tensor(sample.loss_mask[1:], device=old_logprobs_S.device)
    return old_logprobs_S, rollout_logprobs_S, loss_mask_S.bool() & ~rollout_logprobs_S.isnan()


def _collate_logprobs(micro_batch: MicroBatch, old_logprobs: Sequence[Tensor] | None) -> _MicroBatchLogprobs:
    old_logprobs_BS = _pad_micro_batch(old_logprobs, micro_batch)
    preupdate_logprobs_BS = micro_batch.logprobs_BS.detach() if old_logprobs_BS is None else old_logprobs_BS
    mask_BS = micro_batch.mask_BS.bool()
    if any(sample.rollout_logprobs is None for sample in micro_batch.samples):
        return _MicroBatchLogprobs(old_logprobs_BS, preupdate_logprobs_BS, None, mask_BS)
    rollout_logprobs_BS = torch.zeros_like(micro_batch.logprobs_BS)
    flat_logprobs = [torch.as_tensor(sample.rollout_logprobs) for sample in micro_batch.samples]
    rollout_logprobs_BS[mask_BS] = torch.cat(flat_logprobs).to(rollout_logprobs_BS)
    is_missing_BS = rollout_logprobs_BS.isnan()
    rollout_logprobs_BS = torch.where(is_missing_BS, preupdate_logprobs_BS, rollout_logprobs_BS)
    return _MicroBatchLogprobs(old_logprobs_BS, preupdate_logprobs_BS, rollout_logprobs_BS, mask_BS & ~is_missing_BS)


def _compare_engine_logprobs(
    logprobs: _MicroBatchLogprobs, min_ratio: float, max_ratio: float
) -> tuple[dict[str, Tensor], Metrics]:
    """Return |log pi_old - log mu| of each sampled token, of trainer (pi_old) and engine (mu), and metrics of the ratio
    pi_old / mu: its mean, its mean square, and the fraction outside `min_ratio` to `max_ratio`."""
    if logprobs.rollout_logprobs_BS is None:
        return {}, {}
    log_ratio_BS, is_sampled_BS = logprobs.preupdate_logprobs_BS - logprobs.rollout_logprobs_BS, logprobs.is_sampled_BS
    logprob_gap_BS, ratio_BS = log_ratio_BS.abs(), probability_ratio(log_ratio_BS)
    return {"rollout/logprob_difference": logprob_gap_BS[is_sampled_BS]}, {
        "rollout/logprob_difference_mean": token_metric(logprob_gap_BS, is_sampled_BS),
        "rollout/ratio": token_metric(ratio_BS, is_sampled_BS),
        "rollout/ratio_square": token_metric(ratio_BS.square(), is_sampled_BS),
        "rollout/ratio_out_of_band": token_metric((ratio_BS < min_ratio) | (ratio_BS > max_ratio), is_sampled_BS),
    }
