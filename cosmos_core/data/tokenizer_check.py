"""Check that a tokenizer preserves the text of rows: the tokenizer of another model can drop or replace characters."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

_MIN_LOST_FRACTION = 0.1  # fraction of lost characters at or above which `cosmos check` reports an error
_MAX_COMPARED_CHARACTERS = 2_000  # number of characters at the start of a text that are compared
_MAX_LISTED_CHARACTERS = 5


def find_lost_text(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> tuple[str, bool]:
    """Compare texts with their decoded tokens; return a notice about lost letters, digits and spaces (empty if none is
    lost), and whether at least a tenth is lost. Case, accents, punctuation and repeated spaces do not count."""
    lost_characters, num_compared = Counter[str](), 0
    for full_text in texts:
        # Drop lone surrogates, which tokenizers refuse.
        compared_row_text = full_text[:_MAX_COMPARED_CHARACTERS].encode(errors="ignore").decode()
        # Text can contain the token itself: the unknown token of GPT-2 and SmolLM2 is <|endoftext|>.
        compared_row_text = compared_row_text.replace(tokenizer.unk_token or "\0", "")
        token_ids = tokenizer.encode(compared_row_text, add_special_tokens=False)
        known_token_ids = [token_id for token_id in token_ids if token_id != tokenizer.unk_token_id]
        character_counts = _count_characters(compared_row_text)
        lost_characters += character_counts - _count_characters(str(tokenizer.decode(known_token_ids)))
        num_compared += character_counts.total()
    if not lost_characters:
        return "", False
    character_list = ", ".join(repr(character) for character, _ in lost_characters.most_common(_MAX_LISTED_CHARACTERS))
    lost_fraction = lost_characters.total() / num_compared
    problem = f"the tokenizer loses {lost_fraction:.1%} of the letters, digits and spaces of rows ({character_list})"
    remedy = "; take the tokenizer of the model, with the tokenizer_class that it was saved with"
    return problem + remedy, lost_fraction >= _MIN_LOST_FRACTION


def _count_characters(text: str) -> Counter[str]:
    folded_text = unicodedata.normalize("NFKD", text).casefold()
    character_counts = Counter(filter(str.isalnum, folded_text))
    character_counts[" "] = max(0, len(folded_text.split()) - 1)
    return character_counts
