"""Reward for completions whose number after `####` equals the reference's number, as in the GSM8K data set."""

import re
from decimal import Decimal

_NUMBER_PATTERN = re.compile(
    r"####(?:[\s*_`\\$€£({\[]|(?:boxed|text)(?=\{))*([-+]?)[\\$€£]*"
    r"((?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}\b)?)(?:(?: +(\d+))? ?/ ?(0*[1-9]\d*))?"
)
_DIGIT_SEPARATOR_PATTERN = re.compile(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))")


def gsm8k(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the last `#### number` of both texts is the same number, else 0; `#### $42.` is 42, `1/2` is 0.5. The
    reference can be the number alone, as in rows of verl. A reference without a number raises `ValueError`, whereas in
    Cosmos-RL the score is then 1 if the completion has no number."""
    reference_with_marker = _normalise_number_text(f"#### {reference.strip()}")
    number_match = _NUMBER_PATTERN.match(reference_with_marker)
    is_bare_number = number_match is not None and not reference_with_marker[number_match.end() :].strip("}]) \\$.*_`")
    reference_number = _extract_number(reference_with_marker if is_bare_number else reference)
    if reference_number is None:
        raise ValueError(f"the reference {reference[-80:]!r} has no '#### number'")
    return float(_extract_number(to_be_evaluated) == reference_number)


def _extract_number(text: str) -> Decimal | None:
    number_matches = _NUMBER_PATTERN.findall(_normalise_number_text(text))
    if not number_matches:
        return None
    number_sign, number_digits, numerator, denominator = number_matches[-1]
    number = Decimal(number_sign + number_digits.replace(",", ""))
    if numerator:  # add the fraction of a mixed number, such as 1 1/2
        return number + Decimal(number_sign + numerator) / Decimal(denominator)
    return number / Decimal(denominator) if denominator else number


def _normalise_number_text(text: str) -> str:
    return _DIGIT_SEPARATOR_PATTERN.sub("", text.replace("\u2212", "-"))  # \u2212 is the Unicode minus sign
