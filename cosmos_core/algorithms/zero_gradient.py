"""Exclusion of completions whose loss has a gradient of exactly 0, as in groups of equal rewards, from training.

Excluded completions still count in the denominators of the loss. A few of them are run through the model, so that every
step compares engine and trainer, and so that no weight lacks a gradient, which optimizers treat unlike one of 0.
"""

from collections.abc import Sequence

from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import scales_with_advantage
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.sample import Sample

ZERO_GRADIENT_METRIC = "train/completions_without_gradient"
"""Name of the metric that counts the completions of a train step whose gradient is exactly 0."""
MIN_COMPARED_COMPLETIONS = 4
"""Minimum number of completions per optimizer step that run through the model, even if their gradient is 0."""


def can_skip_zero_advantage(config: GrpoConfig, policy_settings: PolicySettings) -> bool:
    """Return True if a completion with an advantage of 0 has no gradient and does not change other completions' loss.

    A loss term without the advantage always has a gradient; a reference policy adds such a term or changes the
    advantages of tokens; entropy quantiles and normalised weights depend on all completions of the step."""
    return (
        scales_with_advantage(policy_settings)
        and "reference" not in config.auxiliary_model_names
        and not config.positive_nll_coef
        and not config.self_normalised_weights
        and config.top_entropy_quantile == 1
    )


def drop_zero_gradient_samples(
    samples_by_step: Sequence[Sequence[Sample]], *, skips_zero_advantage: bool
) -> tuple[list[Sample], list[slice], dict[str, float]]:
    """Return a list of the samples to run through the model, the slice of the list for each optimizer step, and the
    metric `ZERO_GRADIENT_METRIC`. `samples_by_step` has the samples of each optimizer step. With
    `skips_zero_advantage`, samples with an advantage of 0 are left out of the list, but not below
    `MIN_COMPARED_COMPLETIONS` samples without images, and as many with images, per optimizer step."""
    kept_samples: list[Sample] = []
    batch_slices, num_zero_gradient_samples = [], 0
    for samples in samples_by_step:
        kept_sample_indices = {i for i, sample in enumerate(samples) if sample.advantage or not skips_zero_advantage}
        num_zero_gradient_samples += len(samples) - len(kept_sample_indices)
        for has_images in (False, True):
            same_modality_indices = [i for i, sample in enumerate(samples) if bool(sample.images) == has_images]
            zero_gradient_indices = [i for i in same_modality_indices if i not in kept_sample_indices]
            num_added_back = max(0, MIN_COMPARED_COMPLETIONS - len(same_modality_indices) + len(zero_gradient_indices))
            index_stride = max(1, len(zero_gradient_indices) // max(1, num_added_back))
            kept_sample_indices.update(zero_gradient_indices[::index_stride][:num_added_back])
        batch_slices.append(slice(len(kept_samples), len(kept_samples) + len(kept_sample_indices)))
        kept_samples += [samples[i] for i in sorted(kept_sample_indices)]
    return kept_samples, batch_slices, {ZERO_GRADIENT_METRIC: float(num_zero_gradient_samples)}
