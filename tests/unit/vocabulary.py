"""Words that are not of our dialect, where they stand, and which of them are still allowed.

    python -m tests.unit.vocabulary            print every offence that is left
    python -m tests.unit.vocabulary --shrink   lower the allow-list to what is left; it never grows by this

`allowed_words.toml` counts the offences that were there when the rule came. It only shrinks; when it is empty it goes.
Words are looked for in identifiers (as parts of `snake_case` and `CamelCase`), in strings and comments, and in whole
documents; where a word has a plain meaning too, `EXCEPTIONS` says which and why.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("allowed_words.toml")
FOLDERS = ("cosmos_core", "flows", "tasks", "configs", "docs", "benchmarks")
DOCUMENTS = ("README.md", "Makefile", "prefect.yaml", "pyproject.toml")
EACH = "step|rank|row|pass|token|completion|prompt|group|batch|micro-batch|layer|tensor|key|field|stage|GPU|file|line"


HEAD = "# Offences against the vocabulary that are left; lower it with `python -m tests.unit.vocabulary --shrink`.\n"


class Rule(NamedTuple):
    """One line of the vocabulary."""

    say: str
    prose: str = ""
    """Regular expression of what is not said in strings, comments and documents; empty: nothing is held out there."""
    part: str = ""
    """The same for names, matched between underscores; empty: nothing."""
    name: str = ""
    """The same for whole names, as they are written."""
    within: tuple[str, ...] = ("",)
    """Beginnings of the paths in which the word is held out."""


SPLIT = tuple(f"cosmos_core/{folder}/" for folder in ("parallel", "train", "algorithms", "rollout", "models"))
"""Where work is split over ranks and micro-batches; elsewhere a path, a message and a file have parts too."""
RULES = {
    "figures": Rule("metrics", r"figures?", r"figures?"),
    "place": Rule("index, position or offset", r"places?", r"places?"),
    "a step": Rule(
        "per step, per rank, each",
        rf"(?:(?:one|two|once|twice|\d+(?: \w+)?) an? (?:{EACH})|(?:updates?|\w+s) an? (?:{EACH})(?=[,.;:)]|$))",
    ),
    "answer": Rule("completion, response", r"answer(?:s|ed)?", r"answer(?:s|ed)?"),
    "split, cut, spread, share_attention": Rule(
        "apply_tp, apply_pp, apply_ep, apply_cp, apply_fsdp", "", "", "split|cut|spread|shard|share_attention", SPLIT
    ),
    "from_first, gathered, on_all": Rule(
        "broadcast_object, all_gather_object, all_reduce", "", "", "from_first|gathered|on_all"
    ),
    "load later": Rule("meta-device initialisation, sharded load", r"load(?:ed)? later", r"load_later"),
    "stand-in": Rule("meta-device initialisation", r"stand-ins?", r"stand_ins?"),
    "print": Rule("fingerprint, digest", r"(?:the|a|its|whose|their) prints?", "", "_?prints?_"),
    "share, part, piece": Rule("micro-batch, data-parallel rank", r"pieces?", r"(?:share|part|piece)s?", "", SPLIT),
    "Stages": Rule("pipeline stage (parallelism)", "", "", "Stages", SPLIT),
    "frozen": Rule("reference policy, old policy, teacher", r"frozen (?:start|model|copy|policy)", "", "_?frozen"),
    "the start": Rule("reference policy", r"(?:under|of|to|like|beside) the start(?! of| \w*s)"),
    "seen steps": Rule(
        "weights of the policy at step N",
        r"(?:has|have|had) seen [^.]{0,20}steps?|steps? that (?:\w+ ){1,3}(?:has|have|had) seen",
    ),
}


class Exception_(NamedTuple):
    """A meaning in which a word is plain English, or not ours to choose."""

    word: str
    path: str
    """The beginning of the paths in which it is meant so."""
    text: str
    """Regular expression around the word."""
    why: str


EXCEPTIONS = (
    Exception_(
        "place", "", r"in (?:\w+ ){0,2}places?|t(?:ake|ook|aken|akes) (?:\w+ )?place", "the idiom of substitution"
    ),
    Exception_("place", "", r"placed|(?:to|that|which|it|families) places? ", "the verb"),
    Exception_(
        "answer", "cosmos_core/rewards/", r"answer\w*", "the value that a completion arrives at, beside the reference"
    ),
    Exception_("answer", "configs/", r"system_prompt = .*|# .*Data: .*", "what a data set calls it"),
    Exception_("answer", "", r"[\"'`]answers?[\"'`]|answers? (?:column|key)", "a column of the user's data"),
    Exception_("answer", "", r"(?:reference|final|right|correct) answers?", "what a problem is solved by"),
    Exception_(
        "answer",
        "",
        r"(?:server|service|endpoint|process|worker|request|command|it)s?\W+(?:\w+ )?answer\w*",
        "a process that reacts",
    ),
    Exception_("figures", "cosmos_core/observe/plots.py", r"figure\w*", "matplotlib's own word"),
    Exception_("figures", "docs/acceptance.md", r"", "written by the acceptance runs"),
    Exception_("frozen", "", r"frozen ?= ?True|[\"']?frozen[\"']?: ?True", "dataclasses and pydantic"),
    Exception_("print", "", r"(?:print_\w+|console\.print|print\()", "the verb"),
    Exception_("share, part, piece", "", r"\.parts\b", "pathlib calls it so"),
    Exception_("stand-in", "cosmos_core/config/compat/", "", "a model that is named in place of another"),
    Exception_("split, cut, spread, share_attention", "", r"\.split\b|split=", "strings, tensors and data sets"),
    Exception_(
        "split, cut, spread, share_attention",
        "cosmos_core/train/",
        r"split: str|for split|, split\b(?=[,)])",
        "the split of a data set",
    ),
    Exception_(
        "a step",
        "",
        r"(?:is|as|has|was|needs|takes|gives|gets|makes|ends|starts|adds|becomes|trains|holds) an? \w+",
        "a verb and its object",
    ),
)


class Found(NamedTuple):
    """One offence."""

    path: str
    line: int
    word: str
    text: str


def offences() -> Iterator[Found]:
    """Yield every offence in the product and its documents."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    for file in sorted([*files, *(ROOT / name for name in DOCUMENTS)]):
        if file.suffix in {".py", ".md", ".toml", ".yaml", ".css", ""} and "__pycache__" not in file.parts:
            path, text = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
            if file.suffix == ".py":
                yield from _in_name(path, file.stem, 1, path, (0, 0))
                yield from in_python(path, text)
            else:
                yield from _in_document(path, text)


def allowed() -> dict[str, int]:
    """Return how many offences of each word there may be."""
    return tomllib.loads(ALLOWED.read_text(encoding="utf-8")) if ALLOWED.is_file() else {}


_TOKEN = re.compile(
    r'(?P<name>[^\W\d]\w*)|"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'|#[^\n]*",
    re.DOTALL,
)
"""Names, strings and comments; `tokenize` takes ten times as long."""


def in_python(path: str, text: str) -> Iterator[Found]:
    """Yield every offence in the text of a Python file."""
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "name":
            if _words_of(match.group()):
                begin = text.rfind("\n", 0, match.start()) + 1
                line, number = text[begin:].partition("\n")[0], text.count("\n", 0, begin) + 1
                yield from _in_name(path, match.group(), number, line, (match.start() - begin, match.end() - begin))
        elif _ANY_PROSE.search(match.group()):
            for number, line in enumerate(match.group().splitlines(), text.count("\n", 0, match.start()) + 1):
                yield from _in_prose(path, number, line)


def _in_document(path: str, text: str) -> Iterator[Found]:
    for number, line in enumerate(text.splitlines(), 1):
        yield from _in_prose(path, number, line)


_ANY_PROSE = re.compile(rf"\b(?:{'|'.join(rule.prose for rule in RULES.values() if rule.prose)})\b", re.IGNORECASE)
"""Most lines match no rule, and one search tells so."""


def _in_prose(path: str, number: int, line: str) -> Iterator[Found]:
    if not _ANY_PROSE.search(line):
        return
    for word, rule in RULES.items():
        if rule.prose and path.startswith(rule.within):
            for match in re.finditer(rf"\b(?:{rule.prose})\b", line, re.IGNORECASE):
                if not _is_excepted(word, path, line, match.span()):
                    yield Found(path, number, word, line.strip())


@functools.cache
def _words_of(name: str) -> tuple[str, ...]:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return tuple(
        word
        for word, rule in RULES.items()
        if (rule.part and re.search(rf"(?:^|_){rule.part}(?:_|$)", snake))
        or (rule.name and re.fullmatch(rule.name, name))
    )


def _in_name(path: str, name: str, number: int, line: str, span: tuple[int, int]) -> Iterator[Found]:
    for word in _words_of(name):
        if path.startswith(RULES[word].within) and not _is_excepted(word, path, line.rstrip(), span):
            yield Found(path, number, word, line.strip())


def _is_excepted(word: str, path: str, line: str, span: tuple[int, int]) -> bool:
    """Tell whether an exception of the word covers it: the text of one overlaps the word."""
    for exception in EXCEPTIONS:
        if exception.word == word and path.startswith(exception.path):
            if not exception.text:
                return True
            for match in re.finditer(exception.text, line, re.IGNORECASE):
                if match.start() < span[1] and span[0] < match.end():
                    return True
    return False


def counted() -> Counter[str]:
    """Return the number of offences of each word."""
    return Counter(offence.word for offence in offences())


def main() -> None:
    """Print what is left, or lower the allow-list to it."""
    parser = argparse.ArgumentParser(prog="python -m tests.unit.vocabulary", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--shrink", action="store_true", help="lower the allow-list to what is left")
    parser.add_argument("paths", nargs="*", help="only files whose path begins so")
    options = parser.parse_args()
    if not options.shrink:
        for found in offences():
            if not options.paths or found.path.startswith(tuple(options.paths)):
                sys.stdout.write(f"{found.path}:{found.line}: {found.word} -> {RULES[found.word].say}: {found.text}\n")
        return
    left = counted()
    lines = [f'"{word}" = {min(count, left[word])}' for word, count in allowed().items() if left[word]]
    ALLOWED.write_text("\n".join([HEAD, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
