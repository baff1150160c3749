"""Generate `docs/configuration.md` from the schema; a test fails if the file differs from the generated page."""

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from itertools import groupby

from jinja2 import Environment, StrictUndefined

from cosmos_core.config.compat.translate import RENAMED_KEYS, UNUSED_KEYS
from cosmos_core.config.describe import Key, all_keys, find_kinds_that_read_key
from cosmos_core.types import StageKind


def render_config_reference(kinds: Mapping[str, StageKind]) -> str:
    """Return the configuration reference in Markdown, rendered with the template `reference.md.j2`."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    template = environment.from_string(files("cosmos_core.config").joinpath("reference.md.j2").read_text("utf-8"))
    status = partial(_describe_status, kinds=kinds)
    return template.render(tables=_group_keys_by_table(), moved=RENAMED_KEYS, dead=UNUSED_KEYS, status=status)


def _group_keys_by_table() -> list[dict[str, object]]:
    """Return the keys of the schema grouped by table, without keys that are tables themselves."""
    keys = [key for key in all_keys() if not key.is_table or key.default]
    table_order = list(dict.fromkeys(map(_table_of, keys)))
    table_groups = groupby(sorted(keys, key=lambda key: table_order.index(_table_of(key))), key=_table_of)
    return [
        {
            "heading": _table_heading(path, table.__name__),
            "about": " ".join((table.__doc__ or "").partition("\n\n")[0].split()),
            "rows": list(table_keys),
        }
        for (path, table), table_keys in table_groups
    ]


def _table_of(key: Key) -> tuple[str, type]:
    return key.name.rpartition(".")[0], key.table


def _table_heading(path: str, table: str) -> str:
    if path == "train.train_policy":
        return f'`[train.train_policy]` with `trainer_type = "{table.removesuffix("Config").lower()}"`'
    return f"`[{path}]`" if path else "Top level"


def _describe_status(key: Key, kinds: Mapping[str, StageKind]) -> str:
    if key.status != "used":
        return f"{key.status}: {key.note}" if key.note else key.status
    return "; ".join(filter(None, (", ".join(find_kinds_that_read_key(key, kinds)), key.note)))
