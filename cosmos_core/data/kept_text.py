"""Check that a tokenizer keeps the text of rows: one of another model may drop characters or map them to `<unk>`."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

_MOST_LOST = 0.1  # fraction of the characters that `cosmos check` accepts
_MOST_CHARACTERS = 2_000  # compared characters of a text
_NUM_EXAMPLES = 5


def lost_text(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> tuple[str, bool]:
    """Compare texts with their decoded tokens; return a notice about lost letters, digits and spaces, or an empty
    string, and whether they are a tenth of all or more. Case, accents, punctuation and runs of white space may differ.
    """
    lost, total = Counter[str](), 0
    for whole in texts:
        text = whole[:_MOST_CHARACTERS].encode(errors="ignore").decode()  # without halves of surrogate pairs
        ids = tokenizer.encode(text, add_special_tokens=False)
        known = [each for each in ids if each != tokenizer.unk_token_id]
        characters = _characters(text)
        lost += characters - _characters(str(tokenizer.decode(known)))
        total += characters.total()
    if not lost:
        return "", False
    examples = ", ".join(repr(character) for character, _ in lost.most_common(_NUM_EXAMPLES))
    problem = f"the tokenizer loses {lost.total() / total:.1%} of the letters, digits and spaces of rows ({examples})"
    remedy = "; take the tokenizer of the model, with the tokenizer_class that it was saved with"
    return problem + remedy, lost.total() >= _MOST_LOST * total


def _characters(text: str) -> Counter[str]:
    normal = unicodedata.normalize("NFKD", text).casefold()
    counts = Counter(filter(str.isalnum, normal))
    counts[" "] = max(0, len(normal.split()) - 1)
    return counts
