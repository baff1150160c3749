"""The completion is mathematically equal to the reference, as math-verify sees it (`\\boxed{1/2}` is 0.5)."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from cosmos_core.rewards.base import require_reference

# math-verify's own timeouts are signal alarms, which a C loop ignores; the runner's deadline does the work, and the
# library's warning that somebody has to do it would be one line a process.
_NO_TIMEOUT = None
logging.getLogger("math_verify").setLevel(logging.ERROR)

_INTEGER = r"\s*(-?\d{1,300}|-?\d{1,3}(?:,\d{3}){1,99})\s*"
_BOXED_INTEGER = re.compile(rf"\\boxed\{{{_INTEGER}\}}[\s$.]*")


def boxed_math(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the completion's last LaTeX or plain expression equals the reference, else 0, also when it has none.

    The reference is LaTeX; without `$..$` or `\\boxed{}` it counts as boxed. Of a solution that ends as those of GSM8K
    do (`#### 72`) it is what stands behind that mark. One that cannot be read is invalid.
    """
    reference = require_reference(require_reference(reference).rpartition("####")[2])
    end = to_be_evaluated[max(0, to_be_evaluated.rfind("\\boxed")) :]  # math-verify would join the boxes to one answer
    if (found := _BOXED_INTEGER.fullmatch(end)) and (wanted := re.fullmatch(_INTEGER, reference)):
        # What most completions end with needs no parser.
        return float(int(found[1].replace(",", "")) == int(wanted[1].replace(",", "")))
    return _judged(end, reference)


@lru_cache(maxsize=1024)  # completions of a prompt have one reference, and often one end
def _judged(end: str, reference: str) -> float:
    expected = _expected(reference)
    if not expected:
        raise ValueError(f"the reference {reference[-80:]!r} is not a mathematical expression")
    found = _parse(end, ExprExtractionConfig(), LatexExtractionConfig())
    return float(verify(expected, found, timeout_seconds=_NO_TIMEOUT))


@lru_cache(maxsize=1024)
def _expected(reference: str) -> list[Any]:
    text = reference[max(0, reference.rfind("\\boxed")) :]
    return _parse(text, LatexExtractionConfig()) or _parse(f"\\boxed{{{reference}}}", LatexExtractionConfig())


def _parse(text: str, *targets: Any) -> list[Any]:
    return parse(text, extraction_config=list(targets), parsing_timeout=_NO_TIMEOUT)  # type: ignore[arg-type]
