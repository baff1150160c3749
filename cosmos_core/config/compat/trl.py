"""Names of transformers and TRL: each leads to the key that has its meaning here."""

from __future__ import annotations

import tomllib
from importlib.resources import files

_GROUPS = tomllib.loads(files("cosmos_core.config.compat").joinpath("trl.toml").read_text("utf-8"))
NAMES: dict[str, tuple[str, ...]] = {
    name: (keys,) if isinstance(keys, str) else tuple(keys)
    for group in _GROUPS.values()
    for name, keys in group.items()
}
"""Name in transformers or TRL to our key, or keys where the algorithm decides."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return our keys for a name of transformers or TRL, whatever table it was written in; empty: it is none."""
    return NAMES.get(name.rpartition(".")[2], ())


def told(name: str) -> str:
    """Return which key a name is here, to be put behind "unknown key"; empty: it is none of TRL's."""
    keys = keys_of(name)
    return f"; {name.rpartition('.')[2]} of transformers and TRL is {' or '.join(keys)} here" if keys else ""
