"""Map settings of transformers, PEFT and TRL to the equivalent configuration keys, or to a text that says what to use
instead."""

import tomllib
from importlib.resources import files

_TRL_TRANSLATIONS = tomllib.loads(files(__package__).joinpath("trl.toml").read_text("utf-8"))
_ADVICE_BY_TRL_NAME: dict[str, str] = _TRL_TRANSLATIONS.pop("without_key")
"""Text that says what to use instead of a setting of these libraries that has no equivalent key, by its name."""
KEYS_BY_TRL_NAME: dict[str, tuple[str, ...]] = {
    name: (keys,) if isinstance(keys, str) else tuple(keys)
    for section in _TRL_TRANSLATIONS.values()
    for name, keys in section.items()
}
"""Equivalent configuration key of each setting of these libraries, by its name; several keys if the key depends on the
algorithm."""


def keys_for_trl_name(name: str) -> tuple[str, ...]:
    """Return the configuration keys that correspond to a setting of these libraries, such as `args.learning_rate`;
    empty if there are none. Only the part of `name` after the last dot is compared."""
    return KEYS_BY_TRL_NAME.get(name.rpartition(".")[2], ())


def describe_equivalent_key(name: str) -> str:
    """Return the end of the error message "unknown key" for a key that is a setting of transformers, PEFT or TRL: the
    equivalent configuration key, or what to use instead. Empty for any other key."""
    name = name.rpartition(".")[2]
    replacement_text = _ADVICE_BY_TRL_NAME.get(name) or " or ".join(KEYS_BY_TRL_NAME.get(name, ()))
    location_text = "" if name in _ADVICE_BY_TRL_NAME else " here"
    return f"; {name} of transformers, PEFT and TRL is {replacement_text}{location_text}" if replacement_text else ""
