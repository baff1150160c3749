"""Detect secrets in text whose values are unknown: by the format of known kinds of token, by the word before a value,
or by the randomness of the letters of a value.

A random string changes between capitals, small letters and digits far more often than a name does. Hexadecimal secrets
look like digests: those with 40 or 64 digits (git, SHA-256) are masked only after a word such as `token`. Values that
are known to be secret, and the masking of streams and files, are in environment.py.
"""

import re
from collections.abc import Iterator

_SECRET_FORMAT_PATTERN = re.compile(
    r"-----BEGIN[ A-Z]*PRIVATE KEY-----[\s\S]*?(?:-----END[ A-Z]*PRIVATE KEY-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    r"(?:hf|npm|pnu|pnb|r8)_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|(?:glpat|nvapi|dckr_pat|pypi|sk|rk|xox[abeoprs])[-_](?=[\w-]{0,200}\d)[\w-]{16,}"
    r"|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w.-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_URL_WITH_PASSWORD_PATTERN = re.compile(
    r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^/@\s:]*:(?!\d+/)([^@\s\"'<>]{1,200})@"
    r"|(?:^|\s)(?:-u|--user)[ =][\w.@-]{1,100}:(\S{4,})|hooks\.slack\.com/services/(\S+)|/api/webhooks/(\d+/\S+)",
    re.I,
)
_SECRET_NAME_PATTERN = (
    r"(?:passw(?:or)?d|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?string|X-Amz-Signature)"
    r"(?:[_-]?(?:access[_-]?)?key)?"
)
_NAMED_SECRET_PATTERN = re.compile(
    rf"{_SECRET_NAME_PATTERN}(?:\\*[\"'])?\s*[=:]\s*b?\\*(?:\"(?![$*<])([^\"\\\n]{{6,200}})|'(?![$*<])([^'\\\n]{{6,200}})"
    r"|([^\s\"',;&)\]}$*<\\][^\s\"',;&)\]}\\]{5,}))"
    rf"|\(b?[\"']{_SECRET_NAME_PATTERN}[\"'], ?b?[\"']([^\"']{{6,200}})[\"']\)|<{_SECRET_NAME_PATTERN}>([^<]{{6,200}})<"
    rf"|--{_SECRET_NAME_PATTERN}[ =]([^\s\"'$*<-]\S{{5,}})"
    rf"|{_SECRET_NAME_PATTERN} (?:is |was )?(?-i:(?=[A-Za-z]*\d|[a-z]+[A-Z]))([^\s\"'=:*][^\s\"'=:]{{5,}})"
    r"|[?&](?:[a-z_-]{0,20}token|sig|signature|key|auth|code)=([^&\s\"'*]{6,})"
    r"|authorization(?:[\"'])?\s*[:=,]\s*b?[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]{6,})"
    r"|(?<![a-z])pwd\s*[=:]\s*[\"']?([^\s\"'/~.$*<;][^\s\"';]{5,})",
    re.I,
)
_WORD_AND_SECRET_PATTERN = re.compile(
    r"(?:token|bearer|basic|login|key|secret|passw(?:or)?d|credentials?|authorization)[\"']?"
    r"(?:\s*[=:]\s*|\s+(?:is|was)\s+|\s+)[\"']?([\w+/=~-]{12,})",
    re.I,
)
_LONG_WORD_PATTERN = re.compile(r"[A-Za-z0-9_+-]{20,}={0,2}")
_SEPARATED_LETTER_GROUPS_PATTERN = re.compile(r"[A-Za-z0-9!#$%&*^~._-]{20,}")
_BASE64_WITH_SLASHES = re.compile(r"(?<![\w+/.-])(?=[A-Za-z0-9+]+/)[A-Za-z0-9/+]{32,}={0,2}(?![\w+/=-])")
_WORD_PIECE_PATTERN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_HEX_DIGEST_LENGTHS = {40, 64}


def find_secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of the text that looks like a secret; the spans may overlap."""
    for secret_pattern in (_SECRET_FORMAT_PATTERN, _URL_WITH_PASSWORD_PATTERN, _NAMED_SECRET_PATTERN):
        for match in secret_pattern.finditer(text):
            yield match.span(match.lastindex or 0)
    for match in _WORD_AND_SECRET_PATTERN.finditer(text):
        if _looks_like_secret(match[1]) or re.fullmatch(r"[0-9a-fA-F]{16,}", match[1]):
            yield match.span(1)
    for match in _BASE64_WITH_SLASHES.finditer(text):  # find base64 text, such as secret keys of AWS with 40 characters
        if _has_mixed_characters(match[0]) and _get_piece_length(match[0]) < (3.2 if len(match[0]) == 40 else 2.5):
            yield match.span()
    # A secret can consist of random letters in groups between dashes or dots, each too short for the patterns above.
    for match in _SEPARATED_LETTER_GROUPS_PATTERN.finditer(text):
        has_long_word = re.search("[A-Z]?[a-z]{5}|[A-Z]{5}", match[0])
        if _has_mixed_characters(match[0]) and not has_long_word and _get_piece_length(match[0]) < 1.95:
            yield match.span()
    for match in _LONG_WORD_PATTERN.finditer(text):
        adjacent_characters = text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1]
        is_separate_word = match[0].rstrip("=").isalnum() and not any(c in "/.:" for c in adjacent_characters)
        alphanumeric_parts = re.findall("[A-Za-z0-9]{10,}", match[0])
        is_random_base64 = len(match[0]) >= 32 and _get_piece_length(match[0]) < 2.4
        if any(_is_secret_word(part, is_separate_word) for part in alphanumeric_parts if len(part) >= 20) or (
            is_random_base64
            and any(_has_mixed_characters(part) and _get_piece_length(part) < 2.4 for part in alphanumeric_parts)
        ):
            yield match.span()


def mask_secret_spans(text: str) -> str:
    """Return the text with `***` in place of each part that looks like a secret."""
    output_parts, masked_end = [], 0
    for span_start, span_end in sorted(find_secret_spans(text)):
        if span_end > masked_end:
            output_parts += [text[masked_end : max(span_start, masked_end)], "***" if span_start >= masked_end else ""]
            masked_end = span_end
    return "".join(output_parts) + text[masked_end:]


def _is_secret_word(word: str, is_separate_word: bool) -> bool:
    """Return True if `word` looks random. `is_separate_word`: whether the word stands alone, not inside a path, name or
    digest."""
    has_digit = any(letter.isdigit() for letter in word)
    if re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", word):
        has_digest_length = len(word) in _HEX_DIGEST_LENGTHS
        return is_separate_word and has_digit and not word.isdigit() and len(word) >= 32 and not has_digest_length
    if word.islower() or word.isupper():
        return is_separate_word and has_digit and len(word) >= 24 and _get_piece_length(word) < 3.4
    is_long_word = len(word) >= 28
    return _get_piece_length(word) < ((2.8 if is_long_word else 2.5) if has_digit else (2.6 if is_long_word else 2.2))


def _has_mixed_characters(word: str) -> bool:
    return bool(re.search("[a-z]", word) and re.search("[A-Z]", word) and re.search("[0-9]", word))


def _looks_like_secret(word: str) -> bool:
    """Return True if `word`, the value after a word like `token`, looks random, unlike a name, a path or a number."""
    has_letters_and_digits = any(letter.isdigit() for letter in word) and any(letter.isalpha() for letter in word)
    return has_letters_and_digits and _get_piece_length(word) < 3.0 and "//" not in word


def _get_piece_length(word: str) -> float:
    """Return the mean length of the parts of a string that look like a word, an acronym or a number."""
    word_like_parts = _WORD_PIECE_PATTERN.findall(word)
    return sum(map(len, word_like_parts)) / max(1, len(word_like_parts))
