"""JSON schema of a configuration file, with which editors complete and check TOML."""

from typing import Any

from pydantic import Field

from cosmos_core.config.compat.translate import INEFFECTIVE_KEYS, RENAMED_KEYS
from cosmos_core.config.describe import list_keys
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.config.schema.recipe import Recipe


class _ConfigFile(Recipe):
    """Root table of a configuration file: a recipe with an optional `[pipeline]` and `extends`."""

    pipeline: PipelineConfig = Field(default_factory=PipelineConfig, description="The graph of stages.")
    extends: str | list[str] = Field(default="", description="Files that this one builds on, relative to it.")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (dialect 2020-12) of a configuration file. The descriptions of keys say whether they have
    an effect and are supported."""
    schema = _ConfigFile.model_json_schema()
    # `type` of `train_policy` is optional, since a file named in `extends` may set it, or other keys imply it.
    for name in ("SftConfig", "DpoConfig", "KtoConfig"):
        schema["$defs"][name]["required"].remove("type")
    train_policy_schema = schema["$defs"]["TrainConfig"]["properties"]["train_policy"]
    train_policy_schema["anyOf"] = train_policy_schema.pop("oneOf")
    train_policy_schema.pop("discriminator", None)
    schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Configuration", "description": ""}
    for key in list_keys():
        table_properties = schema["$defs"].get(key.table.__name__, schema)["properties"]
        status_note = f" [{key.status}: {key.note}]" if key.note else ""
        table_properties[key.name.rpartition(".")[2]]["description"] = key.description + status_note
    description_by_renamed_key = {old_key: f"today's {new_key}" for old_key, new_key in RENAMED_KEYS.items()}
    for old_key, description in (description_by_renamed_key | INEFFECTIVE_KEYS).items():
        _add_deprecated_key(schema, old_key, description)
    return schema


def _add_deprecated_key(schema: dict[str, Any], key: str, description: str) -> None:
    """Add an old configuration key, marked as deprecated, to each table of the JSON schema to which the key belongs."""
    *parent_table_names, key_name = key.split(".")
    table_schemas = [schema]
    for parent_name in parent_table_names:
        fields = [table_schema.get("properties", {}).get(parent_name, {}) for table_schema in table_schemas]
        fields += [each for field in fields for key in ("anyOf", "oneOf", "allOf") for each in field.get(key, [])]
        table_definition_names = [field["$ref"].rpartition("/")[2] for field in fields if "$ref" in field]
        table_schemas = [schema["$defs"][name] for name in table_definition_names]
    for table_schema in table_schemas:
        table_schema["properties"].setdefault(key_name, {"deprecated": True, "description": description})
