"""Exclusion of idle completions from training: their loss has a gradient of exactly 0, as in groups of equal rewards.

Idle completions still count in the denominators of the loss. A few are run, so that engine and trainer are compared in
every step, and so that every weight has a gradient, even of 0: optimizers treat a missing gradient differently.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise

from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import scales_with_advantage
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.sample import Sample

IDLE_METRIC = "train/completions_without_gradient"
"""Name of the metric that counts the completions of a train step whose gradient is exactly 0."""
MIN_COMPARED_COMPLETIONS = 4
"""Minimum number of completions per optimizer step that run through the model, even if their gradient is 0."""


def is_zero_advantage_idle(config: GrpoConfig, settings: PolicySettings) -> bool:
    """Return whether a completion with an advantage of 0 has no gradient and changes the loss of no other completion.

    A loss term without the advantage always has a gradient; a reference policy adds such a term or changes the
    advantages of tokens; entropy quantiles and normalised weights depend on all completions of the step."""
    return (
        scales_with_advantage(settings)
        and "reference" not in config.named_weights
        and not config.positive_nll_coef
        and not config.self_normalised_weights
        and config.top_entropy_quantile == 1
    )


def exclude_idle_completions(
    steps: Sequence[Sequence[Sample]], *, skips_zero_advantage: bool
) -> tuple[list[Sample], list[slice], dict[str, float]]:
    """Return a list of the samples to run through the model, the slice of the list for each optimizer step, and the
    metric `IDLE_METRIC`. `steps` are the samples of each optimizer step. With `skips_zero_advantage`, a sample with an
    advantage of 0 is idle."""

    def is_idle(sample: Sample) -> bool:
        return skips_zero_advantage and sample.advantage == 0

    executed_samples = [_select_executed_samples(samples, is_idle) for samples in steps]
    slices = [slice(*slice_bounds) for slice_bounds in pairwise(accumulate(map(len, executed_samples), initial=0))]
    return list(chain(*executed_samples)), slices, {IDLE_METRIC: float(sum(map(is_idle, chain(*steps))))}


def _select_executed_samples(samples: Sequence[Sample], is_idle: Callable[[Sample], bool]) -> list[Sample]:
    """Return the samples with a gradient, and as many idle samples as needed to have `MIN_COMPARED_COMPLETIONS` samples
    with images and `MIN_COMPARED_COMPLETIONS` without images, where available."""
    selected_indices = {i for i, sample in enumerate(samples) if not is_idle(sample)}
    for has_images in (False, True):
        modality_indices = [i for i, sample in enumerate(samples) if bool(sample.images) == has_images]
        idle_indices = [i for i in modality_indices if i not in selected_indices]
        num_missing = max(0, MIN_COMPARED_COMPLETIONS - len(modality_indices) + len(idle_indices))
        selected_indices.update(idle_indices[:: max(1, len(idle_indices) // max(1, num_missing))][:num_missing])
    return [samples[i] for i in sorted(selected_indices)]
