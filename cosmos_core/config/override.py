"""Overrides on the command line: `--set train.optm_lr=2e-6` for every stage, `--set sft.train.epoch=2` for one stage,
`--set pipeline.threads=2` for the pipeline. Overrides take precedence over files, later overrides over earlier ones."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_core.config.compat import trl
from cosmos_core.config.compat.translate import current_key, no_effect_message
from cosmos_core.config.load import MAX_NESTING_DEPTH, TomlTable, describe_unsupported_value, merge_tables, nest_value
from cosmos_core.config.schema.pipeline import PipelineConfig, StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import all_fields, find_table_classes
from cosmos_core.errors import ConfigError
from cosmos_core.registry import suggest_names

IMPLIED_STAGE_SUFFIX = "-data"
"""Suffix of the name of an implied stage `NAME-data`, which prepares the rows of the stage `NAME`."""

_KEY_PART_PATTERN = re.compile(r"""\s*(?:"[^"]*"\s*|'[^']*'\s*|[^.="'\s][^.="']*)""")
"""Regular expression of one part of a dotted key; a part that contains a dot is quoted."""
_STAGE_KEYS = {*StageConfig.model_fields, *Recipe.model_fields}
"""Keys of `[[pipeline.stages]]` and of recipes. If one follows the name of a stage, as in `STAGE.KEY`, the override
belongs to that stage, even if a table of recipes has the name of the stage."""
_DOTTED_KEY_PATTERN = re.compile(rf"{_KEY_PART_PATTERN.pattern}(?:\.{_KEY_PART_PATTERN.pattern})*")
_OVERRIDE_PATTERN = re.compile(rf"({_DOTTED_KEY_PATTERN.pattern})=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override on the command line, `--set KEY=VALUE`."""

    text: str
    keys: tuple[str, ...]
    value: Any


def split_key(dotted_key: str) -> tuple[str, ...]:
    """Split a dotted TOML key into its parts; in the key, a part that contains a dot is quoted."""
    if not _DOTTED_KEY_PATTERN.fullmatch(dotted_key):
        return tuple(dotted_key.split("."))
    return tuple(key_part.strip().strip("'\"") for key_part in _KEY_PART_PATTERN.findall(dotted_key))


def parse_override(override_text: str) -> Override:
    """Parse an override such as `train.optm_lr=2e-6` to its keys and its TOML value; a value that is not TOML is a
    string. Older keys are renamed; a part with a dot is quoted, as in `policy.lora.alpha_pattern."mlp.up"=8`.
    Raises `ConfigError` if the text has no `=` or no key."""
    override_match = _OVERRIDE_PATTERN.fullmatch(override_text)
    key_parts = split_key(current_key(override_match[1].strip())) if override_match else ()
    if override_match is None or not all(key_parts) or len(key_parts) > MAX_NESTING_DEPTH:
        raise ConfigError(f"--set {override_text[:60]!r}: write key=value, for example train.optm_lr=2e-6")
    value_text = override_match[2].strip()
    try:
        parsed_value_table = tomllib.loads(f"value = {value_text}")
    except (ValueError, RecursionError):
        return Override(override_text, key_parts, value_text)
    is_toml_value = set(parsed_value_table) == {"value"} and not describe_unsupported_value(parsed_value_table)
    return Override(override_text, key_parts, parsed_value_table["value"] if is_toml_value else value_text)


def drop_ineffective_overrides(overrides: Sequence[Override], notices: list[str]) -> list[Override]:
    """Return the overrides whose keys have an effect; add a message for each other override to `notices`."""
    no_effect_messages = [no_effect_message(".".join(override.keys), override.value) for override in overrides]
    notices += filter(None, no_effect_messages)
    return [override for override, message in zip(overrides, no_effect_messages, strict=True) if not message]


def recipe_overrides(overrides: Sequence[Override]) -> TomlTable:
    """Return the overrides that apply to every stage as recipe tables. Names of stages are not needed: they are not
    known yet if the pipeline is derived from a recipe."""
    recipe_tables: TomlTable = {}
    for override in overrides:
        recipe_table_field = Recipe.model_fields.get(override.keys[0])
        table_classes = find_table_classes(recipe_table_field.annotation) if recipe_table_field else []
        table_keys = {key for table_class in table_classes for key in table_class.model_fields}
        # Skip a key of a stage: `export.retries` belongs to the pipeline stage `export`, not to the table `[export]`.
        is_key_of_stage = bool(table_classes) and bool({*override.keys[1:2]} & (_STAGE_KEYS - table_keys))
        if recipe_table_field and not is_key_of_stage:
            recipe_tables = merge_tables(recipe_tables, nest_value(override.keys, override.value))
    return recipe_tables


def group_overrides(
    overrides: Sequence[Override], stage_names: Sequence[str]
) -> tuple[TomlTable, dict[str, TomlTable]]:
    """Return the overrides as a table of keys of `[pipeline]` and a dict of tables by stage name, each with keys of
    `[[pipeline.stages]]`; overrides of recipe keys are in the key `overrides` of these tables. Raises `ConfigError` if
    the first part of a key is neither a stage, nor a recipe table, nor `pipeline`."""
    pipeline_table: TomlTable = {}
    stage_tables: defaultdict[str, TomlTable] = defaultdict(dict)
    for override in overrides:
        (prefix, *remaining_keys), value, option_text = override.keys, override.value, f"--set {override.text!r}"
        is_stage_name = prefix in stage_names
        if is_stage_name and remaining_keys and (prefix not in Recipe.model_fields or remaining_keys[0] in _STAGE_KEYS):
            keys = ["overrides", *remaining_keys] if remaining_keys[0] in Recipe.model_fields else remaining_keys
            stage_tables[prefix] = merge_tables(stage_tables[prefix], nest_value(keys, value))
        elif prefix in Recipe.model_fields:
            for name in stage_names:  # set the value in each stage, so that it takes precedence over recipe files
                stage_tables[name] = merge_tables(stage_tables[name], nest_value(["overrides", *override.keys], value))
        elif prefix == "pipeline" and remaining_keys and remaining_keys[0] != "stages":
            pipeline_table = merge_tables(pipeline_table, nest_value(remaining_keys, value))
        elif prefix == "pipeline":
            pipeline_keys = ", ".join(name for name in PipelineConfig.model_fields if name != "stages")
            pipeline_key_hint = f"write pipeline.KEY=VALUE with one of {pipeline_keys}, or STAGE.KEY=VALUE"
            raise ConfigError(f"{option_text}: {pipeline_key_hint}")
        elif (
            prefix.endswith(IMPLIED_STAGE_SUFFIX) and (name := prefix.removesuffix(IMPLIED_STAGE_SUFFIX)) in stage_names
        ):
            raise ConfigError(
                f"{option_text}: stage {prefix!r} is implied by {name!r}; write it out in [[pipeline.stages]] to set a "
                f"key of it, or set one of its recipe with {name}.KEY=VALUE"
            )
        elif is_stage_name:
            raise ConfigError(f"{option_text}: {prefix!r} is a stage; write {prefix}.KEY=VALUE")
        else:
            valid_names = list(dict.fromkeys([*stage_names, *Recipe.model_fields, "pipeline"]))
            name = ".".join(override.keys)
            matching_keys = list(dict.fromkeys(key for key, _, _ in all_fields(Recipe) if key.endswith(f".{name}")))
            full_key_hint = f"; did you mean {' or '.join(map(repr, matching_keys))}?" if matching_keys else ""
            correction_hint = trl.describe_equivalent_key(name) or full_key_hint or suggest_names(prefix, valid_names)
            raise ConfigError(f"{option_text}: {prefix!r} is no stage and no table of a recipe{correction_hint}")
    return pipeline_table, stage_tables


def grid_override_notices(overrides: Sequence[Override], stage: StageConfig) -> list[str]:
    """Return a message for each override of a key that has no effect, because the grid of the stage's sweep sets the
    key in every branch."""
    grid_keys = {".".join(split_key(current_key(key))) for key in (stage.sweep.grid if stage.sweep else ())}
    return [
        f"--set {override.text!r} has no effect on stage {stage.name!r}: its sweep.grid sets the key"
        for override in overrides
        if grid_keys & {".".join(override.keys), ".".join(override.keys).removeprefix(f"{stage.name}.")}
    ]
