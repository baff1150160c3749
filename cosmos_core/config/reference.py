"""`docs/configuration.md`, written from the schema: a test fails when the file is not what this makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from cosmos_core.config.compat.translate import DEAD, MOVED
from cosmos_core.config.describe import Key, all_keys, used_by
from cosmos_core.types import StageKind

_HEAD = """# Configuration

Written by `make docs` from the schema in `cosmos_core/config/schema/`; do not edit.

Every key, in the order of the schema. An unknown key is an error, with the nearest known one. *since* is the generation
of recipes that has the key: Cosmos-RL's first reference, a later one, or ours. *status* says what this version does
with it:

- **used by** stages of these kinds; `cosmos config coverage` names the test that shows what it changes;
- **no effect**: accepted, and said once when it is set;
- **planned**, **unsupported**: accepted by `check --schema-only`, refused by `check` and `run` when set.

`None` is not a value of TOML: it means that the key is left out. Secrets come from the environment alone
(`WANDB_API_KEY`, `HF_TOKEN`), everything else from files and `--set`. A file builds on others with
`extends = "base.toml"` (or a list), relative to itself; `cosmos run a.toml b.toml` lays `b.toml` over `a.toml`.
"""
_COLUMNS = ("key", "type", "default", "unit", "meaning", "since", "status")


def reference(kinds: Mapping[str, StageKind]) -> str:
    """Return the page, in Markdown."""
    return "\n".join(_lines(kinds))


def _lines(kinds: Mapping[str, StageKind]) -> Iterator[str]:
    yield _HEAD
    for prefix, group in groupby(_by_table(), key=lambda key: (key.name.rpartition(".")[0], key.table)):
        path, table = prefix
        yield f"## {_heading(path, table.__name__)}\n"
        yield f"{(table.__doc__ or '').strip().splitlines()[0]}\n"
        yield _row(_COLUMNS)
        yield _row(("---",) * len(_COLUMNS))
        yield from (_row(_cells(key, kinds)) for key in group)
        yield ""
    yield "## Older names\n"
    yield from (f"- `{old}` is today's `{new}`" for old, new in MOVED.items())
    yield "\n## Keys that do nothing\n"
    yield "They occur in public recipes, and Cosmos-RL drops them without a word; here they are accepted and told.\n"
    yield from (f"- `{key}` would have meant {meaning}" for key, meaning in DEAD.items())
    yield ""


def _by_table() -> list[Key]:
    """The keys that are not tables, those of a table together."""
    keys = [key for key in all_keys() if not key.is_table or key.default]
    tables = list(dict.fromkeys((key.name.rpartition(".")[0], key.table) for key in keys))
    return [key for table in tables for key in keys if (key.name.rpartition(".")[0], key.table) == table]


def _heading(path: str, table: str) -> str:
    if path == "train.train_policy":
        return f'`[train.train_policy]` with `trainer_type = "{table.removesuffix("Config").lower()}"`'
    return f"`[{path}]`" if path else "Top level"


def _cells(key: Key, kinds: Mapping[str, StageKind]) -> tuple[str, ...]:
    status = ", ".join(used_by(key, kinds)) if key.status == "used" else key.status
    note = f"{status}: {key.note}" if key.note and key.status != "used" else "; ".join(filter(None, (status, key.note)))
    return (f"`{key.name}`", key.type, f"`{key.default}`", key.unit, key.meaning, key.since, note)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
