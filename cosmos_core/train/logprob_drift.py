"""Detect drift between the log-probabilities of rollout engines and of the trainer, on the completions of each step.

`rollout.publish` probes engines after weight loads; this check also detects later errors, such as overwritten memory.
"""

import logging
import math
from collections.abc import Mapping

import torch

from cosmos_core.errors import StageFailed
from cosmos_core.rollout.publish import choose_logprob_tolerance
from cosmos_core.types import Sampling

logger = logging.getLogger(__name__)

_LOGPROB_DIFFERENCE_METRIC, _WEIGHT_LAG_METRIC = "rollout/logprob_difference_mean", "rollout/version_lag"
_NONFINITE_METRIC = "rollout/tokens_not_finite"
_OLD_WEIGHTS_TOLERANCE_NATS = 1.0
"""Difference between the log-probabilities of engines and trainer, in nats per token, that is tolerated if the engines
have older weights than the trainer. Corrupt weights lead to a larger difference."""


class LogprobDriftCheck:
    """Check that compares the log-probabilities of engines and trainer for the completions of a train step."""

    def __init__(
        self, dtype: torch.dtype, transfer_dtype: torch.dtype | None, sampling: Sampling, *,
        should_stop: bool = False, has_dropout: bool = False,
    ) -> None:  # fmt: skip
        """Set the tolerance of the check for engines that compute in `dtype` and get weights that were cast to
        `transfer_dtype`; None: no cast. With `should_stop`, a difference above the tolerance ends the stage. The
        tolerance is larger for a model with dropout, which only the trainer applies."""
        self._should_stop = should_stop
        self._tolerance = choose_logprob_tolerance(dtype, transfer_dtype) + _max_logprob_shift(sampling)
        self._tolerance = max(self._tolerance, _OLD_WEIGHTS_TOLERANCE_NATS) if has_dropout else self._tolerance
        self._has_warned = False

    def check_step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metric `watch/alarm` of train step `step`: 1 if trainer and engines differ by more than the
        tolerance, else 0. Return no metric if `metrics` has no log-probability difference. Raise StageFailed if an
        alarm ends the stage."""
        logprob_difference = math.nan if metrics.get(_NONFINITE_METRIC) else metrics.get(_LOGPROB_DIFFERENCE_METRIC)
        if logprob_difference is None:
            return {}
        weight_lag = metrics.get(_WEIGHT_LAG_METRIC, 0.0)
        tolerance = self._tolerance if weight_lag == 0 else max(self._tolerance, _OLD_WEIGHTS_TOLERANCE_NATS)
        exceeds_tolerance = not logprob_difference <= tolerance  # unlike `>`, `not <=` is also True for NaN
        if exceeds_tolerance and not self._has_warned:
            logger.warning(
                "step %d: engines and trainer differ by %.3g nats per token, their weights by %g steps, which explains "
                "%g; see rollout/logprob_difference in metrics.jsonl",
                step, logprob_difference, weight_lag, tolerance
            )  # fmt: skip
        self._has_warned = exceeds_tolerance
        if exceeds_tolerance and self._should_stop:
            raise StageFailed(
                f"step {step}: engines and trainer differ by {logprob_difference:.3g} nats per token, of which "
                f"rounding and sampling explain {tolerance:.3g}; rollout.stop_on_alarm = false goes on"
            )
        return {"watch/alarm": float(exceeds_tolerance)}


def _max_logprob_shift(sampling: Sampling) -> float:
    """Return by how many nats the sampling settings can raise an engine's log-probabilities; infinite for settings
    without a bound. Top-p sampling divides probabilities by the total of the remaining tokens, which is at least
    `top_p`."""
    has_policy_temperature = sampling.policy_temperature in (None, sampling.temperature)
    is_shift_bounded = sampling.top_k <= 0 and sampling.repetition_penalty == 1 and has_policy_temperature
    return -math.log(sampling.top_p) if is_shift_bounded else math.inf
