"""Reward for completions that are mathematically equal to the reference by math-verify (`\\boxed{1/2}` equals 0.5)."""

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from cosmos_core.rewards.base import require_reference

# Disable the timeouts of math-verify: they are signal alarms, which C loops ignore, and the runner has a deadline.
# Hide the warning of math-verify about disabled timeouts, which each process would log.
_NO_TIMEOUT = None
_LATEX_CONFIG = LatexExtractionConfig()
logging.getLogger("math_verify").setLevel(logging.ERROR)

_INTEGER_PATTERN = r"\s*(-?\d{1,300}|-?\d{1,3}(?:,\d{3}){1,99})\s*"
_BOXED_COMMAND_PATTERN = re.compile(r"\\(?:boxed|fbox|framebox)\b(?:\s*(?=\{))?")
_SPACE_IN_NUMBER_PATTERN = re.compile(
    r"(?<=\d)(?:\\[,!;: ]|[~\u00a0\u2009\u202f]|\{,\}|\\thinspace\s)\s*(?=\d{3}(?!\d))"
)
_NUMBER_WITH_SPACES_PATTERN = re.compile(r"(?:\A|(?<=\\boxed\{))[\s$]*[-+]?\d{1,3}(?: \d{3})+(?! ?\d)")
_NUMBER_WITH_EXPONENT_PATTERN = re.compile(
    r"(?<![\w.\\^/])(?<![\^/] )(\d+(?:\.\d+)?)"  # do not read the exponent in 5^2 \cdot 10^3 as a factor of 10^3
    r"(?:[eE]([-+]?\d{1,3})(?!\w)|\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{([-+]?\d{1,3})\}|(\d{1,3})(?!\d)))"
)
_REPEATING_DECIMAL_PATTERN = re.compile(
    r"(?<![\d,.])(\d*)\.(\d*)(\{)?\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))(?(3)\})"
    r"(?:(\d*)\\dot\s*(?:\{(\d)\}|(\d)))?"  # match `0.\dot{1}4\dot{2}`, with dots on the first and last repeating digit
)
_TRAILING_PUNCTUATION_PATTERN = re.compile(r"(?:\\[\\,;:! ]|[.,;:~\s])+(\$*)$")
_MATH_DELIMITER_PATTERN = re.compile(r"\A\\boxed|(?<!\\)(?:\$|\\[(\[])")
# Words to remove around a number: `(B) 3`, `\text{John: } 3`, `the answer is x = 3`, `3 apples`, `\frac{1}{2} or 0.5`.
_WORDS_AROUND_MATH_PATTERN = re.compile(
    r"\A\s*(?:\\(?:text\w*|mathrm)\{\s*\(?[A-E][):]\s*\}|\([A-E]\)(?= )|[A-E]:)[\\\s~]*(?=[\\\d(-])"
    r"|\A\s*\\text\w*\{[^{}]*:\s*\}"
    r"|\A\s*(?!sqrt|sinh|cosh|tanh|arc)[A-Za-z]{4,}(?::\s*| +(?:- +)?)(?=[\\\d(-]|[a-z] ?=)"
    r"|\A\s*[A-Za-z]{2,}(?: +[A-Za-z]+)*? +[A-Za-z]{2,}[\s:]+(?=[\\\d(-]|[a-z] ?=)"
    r"|(?<=[\d}%]) +(?:[a-z]{4,}(?: of\b.*)?\W*|of [a-z].*)\Z"
    r"|(?<=\})(?: or \d*\.?\d+\\?%|\s*=\s*\d*\.\d+)\s*\Z",
    re.S,
)
_MATH_WORD_PATTERN = re.compile(
    r"\b(?:negative|minus|plus|half|double|twice|hundred|thousand|[mbtr]+illion|dozen|pairs?|squared|cubed|factorial|alpha|beta"
    r"|gamma|delta|theta|lambda|sigma|omega|infinity)\b", re.I,
)  # fmt: skip
_BOXED_INTEGER_PATTERN = re.compile(rf"\\boxed\{{{_INTEGER_PATTERN}\}}[\s$.]*")


def boxed_math(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the completion's last LaTeX or plain expression equals the reference, else 0. The reference is LaTeX;
    without `$..$` or `\\boxed{}` it counts as boxed. In a reference in the format of GSM8K (`#### 72`), only the text
    after `####` counts. A reference that is no expression raises `ValueError`. `\\fbox`, a trailing full stop or comma,
    thin spaces between digits, `6.02e23` and `0.\\overline{3}` are supported in both texts."""
    reference = _keep_last_boxed_answer(require_reference(require_reference(reference).rpartition("####")[2]))
    completion_answer = _keep_last_boxed_answer(to_be_evaluated)
    completion_match = _BOXED_INTEGER_PATTERN.fullmatch(completion_answer)
    reference_match = re.fullmatch(_INTEGER_PATTERN, reference)
    if completion_match and reference_match:  # compare boxed integers, the most frequent case, without the slow parser
        return float(int(completion_match[1].replace(",", "")) == int(reference_match[1].replace(",", "")))
    return _grade_completion(completion_answer, reference)


def _keep_last_boxed_answer(text: str) -> str:
    """Return the text from its last `\\boxed` on, normalised: math-verify would join several boxed answers into one."""
    boxed_command_matches = list(_BOXED_COMMAND_PATTERN.finditer(text))
    text = "\\boxed" + text[boxed_command_matches[-1].end() :] if boxed_command_matches else text
    text = _SPACE_IN_NUMBER_PATTERN.sub("", re.sub("[°º]", r"^\\circ ", text))
    text = _NUMBER_WITH_SPACES_PATTERN.sub(lambda number_match: number_match[0].replace(" ", ""), text)
    text = _NUMBER_WITH_EXPONENT_PATTERN.sub(lambda n: format(Decimal(f"{n[1]}e{n[2] or n[3] or n[4]}"), "f"), text)
    text = _REPEATING_DECIMAL_PATTERN.sub(_repeating_decimal_to_fraction, text)
    if not boxed_command_matches:
        return text
    text_after_boxed, brace_depth = text[len("\\boxed") :], 0
    for index, character in enumerate(text_after_boxed):
        brace_depth += (character == "{") - (character == "}")
        if brace_depth == 0:
            box_content = _TRAILING_PUNCTUATION_PATTERN.sub(r"\1", text_after_boxed[1:index])
            return "\\boxed" + text_after_boxed[:1] + box_content + text_after_boxed[index:]
    return text


def _repeating_decimal_to_fraction(match: re.Match[str]) -> str:
    """Return a repeating decimal as a fraction: 0.1666... becomes (16 - 1) / 90."""
    integer_digits, nonrepeating_digits = match[1] or "0", match[2]
    repeated_digits = "".join(filter(None, match.groups()[3:]))
    numerator = int(integer_digits + nonrepeating_digits + repeated_digits) - int(integer_digits + nonrepeating_digits)
    return f"\\frac{{{numerator}}}{{{(10 ** len(repeated_digits) - 1) * 10 ** len(nonrepeating_digits)}}}"


@lru_cache(maxsize=1024)  # cached, because many completions of a prompt have the same answer
def _grade_completion(completion_answer: str, reference: str) -> float:
    reference_expressions = _parse_reference(reference)
    if not reference_expressions:
        raise ValueError(f"the reference {reference[-80:]!r} is not a mathematical expression")
    completion_expressions = _parse_expressions(completion_answer, ExprExtractionConfig(), _LATEX_CONFIG)
    return float(verify(reference_expressions, completion_expressions, timeout_seconds=_NO_TIMEOUT))


@lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> list[Any]:
    text = reference if reference.startswith("\\boxed") else _TRAILING_PUNCTUATION_PATTERN.sub(r"\1", reference)
    boxed_text = f"\\boxed{{{text}}}"
    text_candidates = [[text], [boxed_text]]
    if not _MATH_DELIMITER_PATTERN.search(text):
        # Box the text: math-verify would find only the fraction in x + \frac{1}{2}. Drop words, which it multiplies.
        formula_text = text if _MATH_WORD_PATTERN.search(text) else _WORDS_AROUND_MATH_PATTERN.sub("", text)
        text_candidates = [[*dict.fromkeys([f"\\boxed{{{formula_text}}}", boxed_text])], [text]]
    expression_candidates = (
        [e for each in group for e in _parse_expressions(each, _LATEX_CONFIG)] for group in text_candidates
    )
    return next(filter(None, expression_candidates), [])


def _parse_expressions(text: str, *extraction_configs: Any) -> list[Any]:
    return parse(text, extraction_config=list(extraction_configs), parsing_timeout=_NO_TIMEOUT)  # type: ignore[arg-type]
