"""Reward for completions whose last `Answer:` equals the reference, both normalised by Minerva's rules (DAPO-17k)."""

import re

from cosmos_core.rewards.base import require_reference

_ANSWER_PATTERN = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_ARTICLE_PATTERN = re.compile(
    r"(?<![-+*/(=])(?<![-+*/=] )\b(an|a) "
    r"(?=[a-z]{2})(?!(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|mod|max|min|pi)\b)"
)
"""Pattern of a lower-case article before a word; it matches no variables, as in `A B`, `a b` and `2 + a bc`."""

_MATH_DELIMITER_PATTERN = re.compile(r"((?<!\\)\$|\\[()\[\]])")

# The entries of each replacement table are applied in order, so a string must come before its substrings.
_STRING_REPLACEMENTS = (
    ("\\$", ""), ("\\ ", ""), (" ", ""), (".$", "$"), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_DELETED_STRINGS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_PATTERN_REPLACEMENTS = (
    (re.compile(r"^.*?\$(.*?)\$.*$"), r"\1"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def direct_math(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the completion's last `Answer: ...` line equals the reference after normalisation, else -1.
    Normalisation removes units and some other words. Raise `ValueError` if it removes the whole reference ("ways")."""
    normalised_reference = _normalise_answer(require_reference(reference))
    if not normalised_reference:
        raise ValueError(f"the reference {reference[-80:]!r} is empty after normalisation")
    completion_answers = _ANSWER_PATTERN.findall(to_be_evaluated)
    return 1.0 if completion_answers and _normalise_answer(completion_answers[-1]) == normalised_reference else -1.0


def _normalise_answer(answer: str) -> str:
    # Remove articles, except in formulas, where `a` is a variable (`$a sin x$`).
    text_and_math_parts = _MATH_DELIMITER_PATTERN.split(answer.rpartition("=")[2].strip())
    # An odd number of delimiters means that the opening one was before the `=`, so the text begins in a formula.
    first_text_index = 2 if len(text_and_math_parts) % 4 == 3 else 0
    text_and_math_parts[first_text_index::4] = [
        _ARTICLE_PATTERN.sub("", text) for text in text_and_math_parts[first_text_index::4]
    ]
    answer = "".join(text_and_math_parts)
    for old_text, new_text in _STRING_REPLACEMENTS:
        answer = answer.replace(old_text, new_text)
    for deleted_text in _DELETED_STRINGS:
        answer = answer.replace(deleted_text, "")
    for old_pattern, replacement in _PATTERN_REPLACEMENTS:
        answer = old_pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
