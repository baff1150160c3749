"""Overrides on the command line: `--set train.optm_lr=2e-6` for every stage, `--set sft.train.epoch=2` for one stage,
`--set pipeline.threads=2` for the pipeline. Overrides take precedence over files, later overrides over earlier ones."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cosmos_core.config.compat import trl
from cosmos_core.config.compat.translate import current_name, no_effect_message
from cosmos_core.config.load import MAX_DEPTH, Values, describe_unusable, merge, nest_value
from cosmos_core.config.schema.pipeline import PipelineConfig, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import tables_in
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggestion

IMPLIED_SUFFIX = "-data"
"""Suffix of the name of an implied stage `NAME-data`, which prepares the rows of the stage `NAME`."""

_KEY = re.compile(r"""\s*(?:"[^"]*"\s*|'[^']*'\s*|[^.="'\s][^.="']*)""")
"""Regular expression of one part of a dotted key; a part that contains a dot is quoted."""
_STAGE_KEYS = {*StageConfig.model_fields, *Recipe.model_fields}
"""Keys that may follow the name of a stage in `STAGE.KEY`, needed if a stage is named like a recipe table."""
_DOTTED_KEY = re.compile(rf"{_KEY.pattern}(?:\.{_KEY.pattern})*")
_SETTING_PATTERN = re.compile(rf"({_DOTTED_KEY.pattern})=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """One override on the command line, `--set KEY=VALUE`."""

    text: str
    keys: tuple[str, ...]
    value: Any


@dataclass
class Settings:
    """Overrides on the command line, grouped by the pipeline and the stages to which they apply."""

    pipeline: Values = field(default_factory=dict)
    entries: dict[str, Values] = field(default_factory=dict)
    """Keys of `[[pipeline.stages]]` by stage name; the entry `overrides` holds recipe tables."""

    def add_stage_settings(self, name: str, keys: Sequence[str], value: Any) -> None:
        """Merge a value for a stage over the values that earlier overrides set for it."""
        self.entries[name] = merge(self.entries.get(name, {}), nest_value(keys, value))


def split_key(key: str) -> tuple[str, ...]:
    """Split a dotted TOML key into its parts; in the key, a part that contains a dot is quoted."""
    if not _DOTTED_KEY.fullmatch(key):
        return tuple(key.split("."))
    return tuple(part.strip().strip("'\"") for part in _KEY.findall(key))


def parse_setting(text: str) -> Setting:
    """Parse an override such as `train.optm_lr=2e-6` to its keys and its TOML value; a value that is not TOML is a
    string. Older keys are renamed; a part with a dot is quoted, as in `policy.lora.alpha_pattern."mlp.up"=8`.

    Raises:
        ConfigError: the text has no `=` or no key.
    """
    match = _SETTING_PATTERN.fullmatch(text)
    keys = split_key(current_name(match[1].strip())) if match else ()
    if match is None or not all(keys) or len(keys) > MAX_DEPTH:
        raise ConfigError(f"--set {text[:60]!r}: write key=value, for example train.optm_lr=2e-6")
    value = match[2]
    try:
        values = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return Setting(text, keys, value)
    is_single_value = set(values) == {"value"} and not describe_unusable(values)
    return Setting(text, keys, values["value"] if is_single_value else value)


def drop_dead(settings: Sequence[Setting], notices: list[str]) -> list[Setting]:
    """Return the overrides whose keys have an effect; add a message for each other override to `notices`."""
    messages = [no_effect_message(".".join(setting.keys), setting.value) for setting in settings]
    notices += filter(None, messages)
    return [setting for setting, message in zip(settings, messages, strict=True) if not message]


def values_for_all_stages(settings: Sequence[Setting]) -> Values:
    """Return the recipe tables of all overrides that apply to every stage, before the names of the stages are known."""
    values: Values = {}
    for setting in settings:
        field = Recipe.model_fields.get(setting.keys[0])
        tables = tables_in(field.annotation) if field else []
        keys = {key for table in tables for key in table.model_fields}
        # `export.retries` is a key of the pipeline stage `export`, not of the table `[export]`.
        is_stage_key = bool(tables) and bool({*setting.keys[1:2]} & (_STAGE_KEYS - keys))
        if field and not is_stage_key:
            values = merge(values, nest_value(setting.keys, setting.value))
    return values


def sort_settings(settings: Sequence[Setting], names: Sequence[str]) -> Settings:
    """Return the overrides grouped by the stage, or the pipeline, to which they apply; `names` are the stage names.

    Raises:
        ConfigError: the first part of a key is neither a stage, nor a recipe table, nor `pipeline`.
    """
    grouped_settings = Settings()
    for setting in settings:
        (first, *remaining_keys), value = setting.keys, setting.value
        if first in names and remaining_keys and (first not in Recipe.model_fields or remaining_keys[0] in _STAGE_KEYS):
            is_recipe_key = remaining_keys[0] in Recipe.model_fields
            keys = ["overrides", *remaining_keys] if is_recipe_key else remaining_keys
            grouped_settings.add_stage_settings(first, keys, value)
        elif first in Recipe.model_fields:
            for name in names:  # a value for all stages takes precedence over the recipe file of a stage
                grouped_settings.add_stage_settings(name, ["overrides", *setting.keys], value)
        elif first == "pipeline" and remaining_keys and remaining_keys[0] != "stages":
            grouped_settings.pipeline = merge(grouped_settings.pipeline, nest_value(remaining_keys, value))
        elif first == "pipeline":
            raise ConfigError(
                f"--set {setting.text!r}: write pipeline.KEY=VALUE with one of "
                f"{', '.join(key for key in PipelineConfig.model_fields if key != 'stages')}, or STAGE.KEY=VALUE"
            )
        elif first.endswith(IMPLIED_SUFFIX) and first.removesuffix(IMPLIED_SUFFIX) in names:
            parent_stage_name = first.removesuffix(IMPLIED_SUFFIX)
            raise ConfigError(
                f"--set {setting.text!r}: stage {first!r} is implied by {parent_stage_name!r}; write it out in "
                f"[[pipeline.stages]] to set a key of it, or set one of its recipe with {parent_stage_name}.KEY=VALUE"
            )
        elif first in names:
            raise ConfigError(f"--set {setting.text!r}: {first!r} is a stage; write {first}.KEY=VALUE")
        else:
            allowed_names = list(dict.fromkeys([*names, *Recipe.model_fields, "pipeline"]))
            raise ConfigError(
                f"--set {setting.text!r}: {first!r} is no stage and no table of a "
                f"recipe{trl.describe_equivalent_key('.'.join(setting.keys)) or suggestion(first, allowed_names)}"
            )
    return grouped_settings


def notices_of_grid(settings: Sequence[Setting], stage: StageConfig) -> list[str]:
    """Return a message for each override of a key that the grid of a stage's sweep sets in every branch."""
    grid_keys = {".".join(split_key(current_name(key))) for key in (stage.sweep.grid if stage.sweep else ())}
    return [
        f"--set {setting.text!r} has no effect on stage {stage.name!r}: its sweep.grid sets the key"
        for setting in settings
        if grid_keys & {".".join(setting.keys), ".".join(setting.keys).removeprefix(f"{stage.name}.")}
    ]
