"""The completion is mathematically equal to the reference, as math-verify sees it (`\\boxed{1/2}` is 0.5)."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from cosmos_core.rewards.base import require_reference

# math-verify's own timeouts are signal alarms, which a C loop ignores; the runner's deadline does the work, and the
# library's warning that somebody has to do it would be one line a process.
_NO_TIMEOUT = None
logging.getLogger("math_verify").setLevel(logging.ERROR)


def boxed_math(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the completion's last LaTeX or plain expression equals the reference, else 0, also when it has none.

    The reference is LaTeX; without `$..$` or `\\boxed{}` it counts as boxed. One that cannot be read is invalid.
    """
    reference = require_reference(reference)
    expected = _parse(reference, LatexExtractionConfig()) or _parse(f"\\boxed{{{reference}}}", LatexExtractionConfig())
    if not expected:
        raise ValueError(f"the reference {reference[-80:]!r} is not a mathematical expression")
    answer = _parse(to_be_evaluated, ExprExtractionConfig(), LatexExtractionConfig())
    return float(verify(expected, answer, timeout_seconds=_NO_TIMEOUT))


def _parse(text: str, *targets: Any) -> list[Any]:
    text = text[max(0, text.rfind("\\boxed")) :]  # math-verify would join the boxes to one answer
    return parse(text, extraction_config=list(targets), parsing_timeout=_NO_TIMEOUT)  # type: ignore[arg-type]
