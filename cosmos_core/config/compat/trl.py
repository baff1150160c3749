"""Names of transformers and TRL: each maps to the key with the same meaning here, or to the feature that replaces
it."""

import tomllib
from importlib.resources import files

_GROUPS = tomllib.loads(files("cosmos_core.config.compat").joinpath("trl.toml").read_text("utf-8"))
WITHOUT_KEY: dict[str, str] = _GROUPS.pop("without_key")
"""Replacement for each name in transformers or TRL that has no corresponding key."""
NAMES: dict[str, tuple[str, ...]] = {
    name: (keys,) if isinstance(keys, str) else tuple(keys)
    for group in _GROUPS.values()
    for name, keys in group.items()
}
"""Corresponding key for each name in transformers or TRL, or several keys if the algorithm decides."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return the corresponding keys for a name of transformers or TRL in any table; empty if there are none."""
    return NAMES.get(name.rpartition(".")[2], ())


def equivalent(name: str) -> str:
    """Return the equivalent of a name of transformers or TRL, to append to "unknown key"; empty for any other name."""
    name = name.rpartition(".")[2]
    meaning = WITHOUT_KEY.get(name) or " or ".join(NAMES.get(name, ()))
    return f"; {name} of transformers and TRL is {meaning}{'' if name in WITHOUT_KEY else ' here'}" if meaning else ""
