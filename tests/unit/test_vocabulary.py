"""The words of the product and its documents: one dialect, with a list of offences that only shrinks."""

from __future__ import annotations

import pytest

from tests.unit import vocabulary


def test_no_file_says_what_the_vocabulary_says_otherwise() -> None:
    kept = vocabulary.allowed()
    too_many = {
        f"{word!r}, say {vocabulary.RULES[word].say}": f"{count} times, {kept.get(word, 0)} are allowed"
        for word, count in vocabulary.counted().items()
        if count > kept.get(word, 0)
    }
    assert too_many == {}, "see them with: python -m tests.unit.vocabulary [PATH]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""Return the figures of one update a step."""', ["figures", "a step"]),
        ("figure_N = 1", ["figures"]),
        ("configure = disfigured = 1", []),
        ('"""It is read in place of the file, and takes its place."""', []),
        ('"""Return the place of each row."""', ["place"]),
        ('x = row["answer"]  # the server answers', []),
        ("def _answer(answers): pass", ["answer", "answer"]),
        ("@dataclass(frozen=True)", []),
        ('"""Under the frozen start."""', ["frozen"]),
        ('"""The weights have seen so many steps."""', ["seen steps"]),
        ("print_ = SpreadEngine", ["print"]),
        ('"""Rows a step trains on; what a step is."""', []),
    ],
)  # fmt: skip
def test_a_word_is_found_in_names_and_prose_but_not_inside_of_others(text: str, words: list[str]) -> None:
    assert [found.word for found in vocabulary.in_python("cosmos_core/x.py", text + "\n")] == words
