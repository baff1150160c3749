"""Recipes, rows, models and chat templates that are changed at random: each is taken, or refused in one line, within
fifteen seconds. `python -m tests.acceptance fuzz`; a small sample of it is in the suite.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import re
import shutil
import signal
import string
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core import cli
from cosmos_core.data import prepare
from cosmos_core.errors import EXIT_OK, EXIT_USAGE, ConfigError, CosmosError
from cosmos_core.train import check
from tests.acceptance.page import Proof, table
from tests.effects.change import recipe, stage_of
from tests.unit.config_recipes import valid_configurations
from tests.unit.data_tokenizers import CHATML, FORGETS_THOUGHTS, LLAMA3, MISTRAL, PLAIN_WORDS, byte_tokenizer
from tests.unit.test_run_garbled import changed_value
from tests.unit.tiny_model import save_tiny_model

logger = logging.getLogger(__name__)

SEED = 20261122
NUM_RECIPES, NUM_OTHERS = 10_000, 1_000
LONGEST_SECONDS = 15.0
_TEMPLATES = (CHATML, LLAMA3, MISTRAL, FORGETS_THOUGHTS, PLAIN_WORDS)
_EXPRESSIONS = (
    "'a' * 10 ** 10", "'{:>9999999999}'.format(1)", "range(10 ** 9) | list", "messages[99]",
    "messages.__class__.mro()", "m", "none + 1", "namespace", "raise_exception(messages)", "cycler", "self", "loop",
    "m.content | tojson(indent=10**8)", "lipsum(n=10**6)", "'\ud800'", "'\0'", "9 ** 9 ** 9", "[1] * 10 ** 10",
    "messages | map('x') | list", "strftime_now('%' * 10 ** 6)", "m.content.encode('x')", "'%*d' % (10**9, 1)",
)  # fmt: skip
_ROWS: dict[str, Any] = {
    "sft": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "dpo": {"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
    "grpo": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "answer": "a", "id": 3},
}
_POLICIES = {
    "sft": {"train.train_policy.type": "sft"},
    "dpo": {"train.train_policy.type": "sft", "train.train_policy.trainer_type": "dpo"},
    "grpo": {"train.train_policy.type": "grpo", "train.train_policy.reward_function": "exact_match"},
}


@dataclass
class Tally:
    """How often what was tried was taken and refused, and what should not have been."""

    num_taken: int = 0
    num_refused: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0


class _TooLong(BaseException):
    """Not within fifteen seconds."""


def attempt(tally: Tally, what: str, call: Callable[[], str]) -> None:
    """Call something that is allowed to end or to raise a `CosmosError` of one line, and note how it ended.

    `call` returns what is wrong with what it did; nothing: it was taken.
    """
    began = time.monotonic()
    timer = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SECONDS)  # of this process's own time; the product uses the other
    try:
        if problem := call():
            tally.wrong.append(f"{what}: {problem}")
        tally.num_taken += 1
    except CosmosError as error:
        tally.num_refused += 1
        if not str(error).isprintable() or not 0 < len(str(error)) < 2000:
            tally.wrong.append(f"{what}: refused in other than one line: {str(error)[:300]!r}")
    except _TooLong:
        tally.wrong.append(f"{what}: longer than {LONGEST_SECONDS:.0f} s")
    except Exception:  # noqa: BLE001 - what no user should see
        tally.wrong.append(f"{what}: {traceback.format_exc(limit=-3)}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, timer)
        tally.longest_seconds = max(tally.longest_seconds, time.monotonic() - began)


def _end(number: int, frame: object) -> None:
    raise _TooLong


def recipes(folder: Path, count: int, seed: int = SEED) -> Tally:
    """`cosmos check --schema-only` on configurations that are changed in one to four ways."""
    draw, tally, bases = random.Random(seed), Tally(), list(valid_configurations().values())
    file = folder / "recipe.toml"
    for number in range(count):
        values = draw.choice(bases)
        for _ in range(draw.randint(1, 4)):
            values = changed_value(values, draw)
        try:
            content = tomli_w.dumps(_without_null(values)).encode("utf-8", "surrogatepass")
        except (AttributeError, TypeError):  # no table any more
            content = repr(values).encode("utf-8", "surrogatepass")
        file.write_bytes(_damaged(content, draw) if draw.random() < 0.2 else content)
        before = len(tally.wrong)
        attempt(tally, f"recipe {number}", lambda: _checked(file))
        _keep(file, folder, tally, before)
    return tally


def _checked(file: Path) -> str:
    """Run the command in this process; return what is wrong with how it ended."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    words, sys.argv = sys.argv, ["cosmos", "check", "--schema-only", str(file)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
    except SystemExit as end:
        said.seek(0)
        shown = said.read()
        if end.code not in {EXIT_OK, EXIT_USAGE, None} or "Traceback" in shown or not shown:
            return f"exit {end.code}: {shown or 'nothing was said'}"
        if end.code == EXIT_USAGE:
            raise ConfigError(shown.splitlines()[-1]) from None
        return ""
    finally:
        sys.argv = words
    return "no exit code"


def others(folder: Path, count: int, seed: int = SEED) -> dict[str, Tally]:
    """Rows and templates under `prepare`, models and tokenizers under what `cosmos check` runs."""
    draw = random.Random(seed)
    byte_tokenizer(CHATML).save_pretrained(folder / "tokenizer")
    save_tiny_model(folder / "model")
    with _quiet():
        return {
            "rows": _many(folder, draw, 2 * count // 5, "rows", _rows),
            "models": _many(folder, draw, 3 * count // 10, "model", _model),
            "templates": _many(folder, draw, count - 2 * count // 5 - 3 * count // 10, "template", _template),
        }


def _many(
    folder: Path, draw: random.Random, count: int, name: str, one: Callable[[Path, Path, random.Random], object]
) -> Tally:
    tally = Tally()
    for number in range(count):
        place = folder / f"{name} {number}"
        place.mkdir()
        before = len(tally.wrong)
        seed = draw.randrange(2**32)

        def call(place: Path = place, seed: int = seed) -> str:
            one(folder, place, random.Random(seed))
            return ""

        attempt(tally, place.name, call)
        if len(tally.wrong) == before:
            shutil.rmtree(place)
    return tally


def _rows(folder: Path, place: Path, draw: random.Random) -> None:
    kind = draw.choice(sorted(_ROWS))
    rows = [_ROWS[kind]] * 3
    rows[draw.randrange(3)] = _changed(rows[0], draw)
    content = b"".join(json.dumps(row).encode("utf-8", "surrogatepass") + b"\n" for row in rows)
    suffix = draw.choice([*["jsonl"] * 12, "json", "csv", "parquet", "arrow"])
    file = place / f"rows.{suffix}"
    file.write_bytes(_damaged(content, draw) if draw.random() < 0.2 else content)
    _prepared(place, kind, folder / "tokenizer", file)


def _template(folder: Path, place: Path, draw: random.Random) -> None:
    template = draw.choice(_TEMPLATES)
    for _ in range(draw.choice([1, 1, 2])):
        at, how = draw.randrange(len(template)), draw.random()
        if how < 0.4:
            at = draw.choice([match.start() for match in re.finditer(r"(?<![{%])\{[{%]", template)] or [0])
            template = template[:at] + "{{ " + draw.choice(_EXPRESSIONS) + " }}" + template[at:]
        elif how < 0.6:
            template = template[:at] + template[at + draw.randint(1, 30) :] or " "
        elif how < 0.8:
            template = template[:at] + draw.choice(string.printable + "{%}") + template[at:]
        else:
            template = template.replace(*draw.choice([("content", "contents"), ("messages", "m"), ("role", "role.x")]))
    shutil.copytree(folder / "tokenizer", place / "model")
    for file in place.glob("model/chat_template*"):
        file.unlink()
    (place / "model" / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(_ROWS["sft"]) + "\n" for _ in range(3)))
    _prepared(place, "sft", place / "model", rows)


def _prepared(place: Path, kind: str, model: Path, file: Path) -> None:
    dataset = {"name": str(file), "max_skipped_fraction": 0.5}
    settings = {**_POLICIES[kind], "train.train_policy.dataset": dataset, "policy.model_max_length": 256}
    prepare.run(stage_of(place / "stage", recipe(settings), kind="prepare", model=model))


def _model(folder: Path, place: Path, draw: random.Random) -> None:
    model = Path(shutil.copytree(folder / "model", place / "model"))
    files = sorted(path for path in model.iterdir() if path.suffix in {".json", ".jinja", ".safetensors"})
    for file in draw.sample(files, draw.choice([1, 1, 2])):
        if file.suffix != ".json" or draw.random() < 0.25:
            file.write_bytes(_damaged(file.read_bytes(), draw))
            continue
        changed = json.loads(file.read_bytes())
        file.write_text(json.dumps(_changed(changed, draw)))
    check.run(stage_of(place / "stage", recipe(_POLICIES["sft"]), kind="sft", model=model))


def _changed(value: dict[str, Any], draw: random.Random) -> Any:
    """Change one to three parts of a table; seldom the whole of it."""
    for _ in range(draw.choice([1, 1, 2, 3])):
        if not isinstance(value, dict) or not value or draw.random() < 0.03:
            return changed_value(value, draw)
        key = draw.choice(list(value))
        value = {**value, key: changed_value(value[key], draw)}
    return value


def _damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes with some of them others, gone or more."""
    at, how = draw.randrange(len(content) or 1), draw.random()
    if how < 0.4:
        return content[:at] + draw.randbytes(draw.choice([1, 4, 40])) + content[at + draw.choice([0, 1, 40]) :]
    if how < 0.6:
        return content[:at]
    if how < 0.8:
        return (
            content[:at] + draw.choice([b"\0", b"\xff", b"\n", b"\\ud800", b"[" * 5000, b"\xed\xa0\x80"]) + content[at:]
        )
    return draw.choice([b"", b"\0" * 100, b"\xef\xbb\xbf" + content, content * 2, b"9" * 10_000])


def _without_null(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value if item is not None]
    return value


def _keep(file: Path, folder: Path, tally: Tally, before: int) -> None:
    if len(tally.wrong) > before:
        shutil.copy(file, folder / f"wrong {len(tally.wrong)}.toml")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that libraries have for each of them."""
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def prove(folder: Path) -> Proof:
    """Ten thousand recipes and a thousand of the others."""
    began = time.monotonic()
    tallies = {"recipes": recipes(folder, NUM_RECIPES), **others(folder, NUM_OTHERS)}
    for name, tally in tallies.items():
        for wrong in tally.wrong:
            logger.error("%s: %s", name, wrong)
    rows = [
        [name, tally.num_taken + tally.num_refused, tally.num_taken, tally.num_refused, len(tally.wrong),
         f"{tally.longest_seconds:.1f}"]
        for name, tally in tallies.items()
    ]  # fmt: skip
    problems = Counter(wrong.splitlines()[-1][:120] for tally in tallies.values() for wrong in tally.wrong)
    found = "; ".join(f"{problem} ({count})" for problem, count in problems.items())
    return Proof(
        title="Ten thousand recipes, a thousand rows, models and templates",
        is_met=not problems and all(tally.longest_seconds < LONGEST_SECONDS for tally in tallies.values()),
        claim=(
            f"Valid recipes changed in one to four ways, then `cosmos check --schema-only`; rows, chat templates and "
            f"models changed likewise, then what `prepare` and `cosmos check` run (seed {SEED}): each is taken or "
            f"refused in one line within {LONGEST_SECONDS:.0f} s, none ends in a traceback."
        ),
        commands=["python -m tests.acceptance fuzz"],
        body=table(["what", "tried", "taken", "refused", "wrong", "longest, s"], rows)
        + (f"\n\nNot met: {found}" if found else ""),
        seconds=time.monotonic() - began,
    )
