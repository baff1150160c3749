"""Generate `docs/configuration.md` from the schema; a test fails if the file differs from the generated page."""

import re
from collections.abc import Mapping
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from cosmos_core.config.compat.translate import INEFFECTIVE_KEYS, RENAMED_KEYS
from cosmos_core.config.describe import KeyDescription, find_kinds_that_read_key, list_keys
from cosmos_core.config.schema.table import Table
from cosmos_core.types import StageKind


def render_config_reference(stage_kinds: Mapping[str, StageKind]) -> str:
    """Return the configuration reference in Markdown, rendered with the template `reference.md.j2`."""
    jinja_environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    jinja_environment.filters["cell"] = lambda cell_text: cell_text.replace("|", "\\|").replace("\n", " ")
    # Headings are linked by their letters and digits, in lower case, as GitHub and mkdocs do.
    jinja_environment.filters["anchor"] = lambda heading: re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    template = jinja_environment.from_string(files("cosmos_core.config").joinpath("reference.md.j2").read_text("utf-8"))
    status = partial(_describe_status, stage_kinds=stage_kinds)
    return template.render(tables=_group_keys_by_table(), moved=RENAMED_KEYS, dead=INEFFECTIVE_KEYS, status=status)


def _group_keys_by_table() -> list[dict[str, object]]:
    """Return the keys of the schema grouped by table, without keys that are tables themselves."""
    keys_by_table: dict[tuple[str, type[Table]], list[KeyDescription]] = {}
    for key in list_keys():
        if not key.is_table or key.default:
            keys_by_table.setdefault((key.name.rpartition(".")[0], key.table), []).append(key)
    tables: list[dict[str, object]] = []
    for (table_path, table_class), table_keys in keys_by_table.items():
        table_summary = " ".join((table_class.__doc__ or "").partition("\n\n")[0].split())
        tables.append({"heading": _table_heading(table_path, table_class), "about": table_summary, "rows": table_keys})
    return tables


def _table_heading(table_path: str, table_class: type[Table]) -> str:
    if table_path == "train.train_policy":
        return f'`[train.train_policy]` with `trainer_type = "{table_class.model_fields["trainer_type"].default}"`'
    return f"`[{table_path}]`" if table_path else "Top level"


def _describe_status(key: KeyDescription, stage_kinds: Mapping[str, StageKind]) -> str:
    if key.status != "used":
        return f"{key.status}: {key.note}" if key.note else key.status
    return "; ".join(filter(None, (", ".join(find_kinds_that_read_key(key, stage_kinds)), key.note)))
