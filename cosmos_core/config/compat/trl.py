"""Map settings of transformers and TRL to the equivalent configuration keys, or to a text with a replacement."""

import tomllib
from importlib.resources import files

_SETTING_GROUPS = tomllib.loads(files(__package__).joinpath("trl.toml").read_text("utf-8"))
_REPLACEMENTS: dict[str, str] = _SETTING_GROUPS.pop("without_key")
"""Replacement for each name of transformers or TRL that has no corresponding key."""
NAMES: dict[str, tuple[str, ...]] = {
    name: (keys,) if isinstance(keys, str) else tuple(keys)
    for group in _SETTING_GROUPS.values()
    for name, keys in group.items()
}
"""Corresponding key for each name of transformers or TRL; several keys if the key depends on the algorithm."""


def keys_of(name: str) -> tuple[str, ...]:
    """Return the configuration keys for a setting of transformers or TRL; empty if there are none. Of `name`, only the
    part after the last dot counts."""
    return NAMES.get(name.rpartition(".")[2], ())


def describe_equivalent_key(name: str) -> str:
    """Return the equivalent of a name of transformers or TRL as the end of the error "unknown key"; empty if none."""
    name = name.rpartition(".")[2]
    meaning = _REPLACEMENTS.get(name) or " or ".join(NAMES.get(name, ()))
    return f"; {name} of transformers and TRL is {meaning}{'' if name in _REPLACEMENTS else ' here'}" if meaning else ""
