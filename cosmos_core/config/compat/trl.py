"""Names of transformers and TRL: each leads to the key that has its meaning here, or to what is here in its place."""

from __future__ import annotations

import tomllib
from importlib.resources import files

_GROUPS = tomllib.loads(files("cosmos_core.config.compat").joinpath("trl.toml").read_text("utf-8"))
WITHOUT_KEY: dict[str, str] = _GROUPS.pop("without_key")
"""Name in transformers or TRL that no key of ours is for, to what is here in its place."""
NAMES: dict[str, tuple[str, ...]] = {
    name: (keys,) if isinstance(keys, str) else tuple(keys)
    for group in _GROUPS.values()
    for name, keys in group.items()
}
"""Name in transformers or TRL to our key, or keys where the algorithm decides."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return our keys for a name of transformers or TRL, whatever table it was written in; empty: it has none."""
    return NAMES.get(name.rpartition(".")[2], ())


def told(name: str) -> str:
    """Return what a name is here, to be put behind "unknown key"; empty: it is none of TRL's."""
    name = name.rpartition(".")[2]
    meaning = WITHOUT_KEY.get(name) or " or ".join(NAMES.get(name, ()))
    return f"; {name} of transformers and TRL is {meaning}{'' if name in WITHOUT_KEY else ' here'}" if meaning else ""
