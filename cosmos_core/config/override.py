"""Settings given on the command line: `--set train.optm_lr=2e-6` for every stage, `--set sft.train.epoch=2` for one,
`--set pipeline.threads=2` for the pipeline. They win over everything that files say; the last one wins."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cosmos_core.config.compat.translate import dead, today
from cosmos_core.config.load import MAX_DEPTH, Values, excess, merge, nested
from cosmos_core.config.schema.pipeline import PipelineConfig, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

IMPLIED = "-data"
"""What stands behind the name of a stage in that of the stage that prepares its rows, where the file has none."""

_KEY = re.compile(r"""\s*(?:"[^"]*"\s*|'[^']*'\s*|[^.="'\s][^.="']*)""")
"""One part of a dotted key, quoted where it has a dot of its own."""
_SETTING = re.compile(rf"({_KEY.pattern}(?:\.{_KEY.pattern})*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """One `--set KEY=VALUE`."""

    text: str
    keys: tuple[str, ...]
    value: Any

    def below(self, level: int) -> Values:
        """Return the value as nested tables, without the first `level` keys."""
        values: Values = nested(self.keys[level:], self.value)  # at least one key is left
        return values


@dataclass
class Settings:
    """What the command line says, by whom it is for."""

    pipeline: Values = field(default_factory=dict)
    entries: dict[str, Values] = field(default_factory=dict)
    """Keys of `[[pipeline.stages]]`, by stage; recipe tables are among its `overrides`."""

    def of_stage(self, name: str, values: Values) -> None:
        """Take what is for a stage on top of what was said before."""
        self.entries[name] = merge(self.entries.get(name, {}), values)


def parse_setting(text: str) -> Setting:
    """Split `train.optm_lr=2e-6` into its keys and its TOML value; what is not TOML is a string. Keys of older
    generations are taken as today's; one with a dot of its own is quoted, `policy.lora.alpha_pattern."mlp.up"=8`.

    Raises:
        ConfigError: there is no `=` or no key.
    """
    found = _SETTING.fullmatch(text)
    keys = tuple(part.strip().strip("'\"") for part in _KEY.findall(today(found[1].strip()))) if found else ()
    if found is None or not all(keys) or len(keys) > MAX_DEPTH:
        raise ConfigError(f"--set {text[:60]!r}: write key=value, for example train.optm_lr=2e-6")
    value = found[2]
    try:
        values = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return Setting(text, keys, value)
    is_one_value = set(values) == {"value"} and not excess(values)
    return Setting(text, keys, values["value"] if is_one_value else value)


def living(settings: Sequence[Setting], notices: list[str]) -> list[Setting]:
    """Return the settings without those of keys that do nothing, which files may have too; `notices` tells them."""
    said = [dead(".".join(setting.keys), setting.value) for setting in settings]
    notices += filter(None, said)
    return [setting for setting, is_dead in zip(settings, said, strict=True) if not is_dead]


def shared_values(settings: Sequence[Setting]) -> Values:
    """Return the recipe tables that hold for every stage, before the stages are known."""
    values: Values = {}
    for setting in settings:
        if setting.keys[0] in Recipe.model_fields:
            values = merge(values, setting.below(0))
    return values


def sort_settings(settings: Sequence[Setting], names: Sequence[str]) -> Settings:
    """Find out for whom each setting is; `names` are the stages.

    Raises:
        ConfigError: the first key is no stage, no recipe table and not `pipeline`.
    """
    found = Settings()
    for setting in settings:
        first, *rest = setting.keys
        if first in names and rest and (first not in Recipe.model_fields or _is_of_stage(rest[0])):
            values = setting.below(1)
            found.of_stage(first, {"overrides": values} if rest[0] in Recipe.model_fields else values)
        elif first in Recipe.model_fields:
            for name in names:  # the command line wins over a stage's recipe file too
                found.of_stage(name, {"overrides": setting.below(0)})
        elif first == "pipeline" and rest and rest[0] != "stages":
            found.pipeline = merge(found.pipeline, setting.below(1))
        elif first == "pipeline":
            raise ConfigError(
                f"--set {setting.text!r}: write pipeline.KEY=VALUE with one of "
                f"{', '.join(key for key in PipelineConfig.model_fields if key != 'stages')}, or STAGE.KEY=VALUE"
            )
        elif first.endswith(IMPLIED) and first.removesuffix(IMPLIED) in names:
            stage = first.removesuffix(IMPLIED)
            raise ConfigError(
                f"--set {setting.text!r}: stage {first!r} is implied by {stage!r}; write it out in [[pipeline.stages]] "
                f"to set a key of it, or set one of its recipe with {stage}.KEY=VALUE"
            )
        else:
            known = [*names, *Recipe.model_fields, "pipeline"]
            raise ConfigError(
                f"--set {setting.text!r}: {first!r} is no stage and no table of a recipe{suggestion(first, known)}"
            )
    return found


def entry_with(entry: Mapping[str, Any], settings: Settings) -> Values:
    """Return an entry of `[[pipeline.stages]]` with what the command line says of it."""
    name = entry.get("name")
    return merge(entry, settings.entries.get(name, {})) if isinstance(name, str) else dict(entry)


def _is_of_stage(key: str) -> bool:
    """Whether a key after a stage's name addresses that stage, where the name is that of a recipe table too."""
    return key in StageConfig.model_fields or key in Recipe.model_fields
