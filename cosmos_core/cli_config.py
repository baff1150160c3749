"""`cosmos config ...`: commands that show the schema and configurations without running anything."""

from __future__ import annotations

import difflib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline

config_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Explain, compare, convert and check configurations.",
)

ConfigArgument = Annotated[Path, typer.Argument(help="Pipeline or recipe, a TOML file.")]


@config_app.command()
def explain(
    key: Annotated[str, typer.Argument(help="Dotted key, e.g. train.optm_lr; or an older or TRL name.")],
) -> None:
    """Explain a configuration key. Type, default, unit, the stages that read it, and its status are printed."""
    from cosmos_core.config.describe import explain_key
    from tasks.kinds import all_kinds

    for line in explain_key(key, all_kinds()):
        typer.echo(line)


@config_app.command()
def diff(first: ConfigArgument, second: ConfigArgument) -> None:
    """Show for each stage how two configurations differ. Defaults and settings that follow from others are included."""
    from cosmos_core.config.difference import pipeline_differences

    for line in pipeline_differences(_load_pipeline(first), _load_pipeline(second)):
        typer.echo(line)


@config_app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of a configuration file for editors."""
    import json

    from cosmos_core.config.editor import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@config_app.command()
def convert(file: ConfigArgument) -> None:
    """Print a configuration with current key names. Changes are listed on standard error. Comments are lost."""
    import tomli_w

    from cosmos_core.config.compat.translate import with_current_algorithm_keys
    from cosmos_core.config.compose import with_paths_of_other_folders
    from cosmos_core.config.files import read_config

    pipeline = _load_pipeline(file)  # check the configuration: raises ConfigError if it is invalid
    notices: list[str] = []
    config_values, config_folders = read_config(file, notices)
    config_values = with_paths_of_other_folders(config_values, config_folders, pipeline)
    # Do not translate the algorithm keys of a pipeline with stages, because its stages may have different algorithms.
    if not config_values.get("pipeline", {}).get("stages"):
        config_values = with_current_algorithm_keys(config_values, notices)
    print_notices(notices)
    typer.echo(tomli_w.dumps(config_values), nl=False)


@config_app.command("coverage")
def print_key_coverage() -> None:
    """Print the status of every configuration key. For each key in use, the test that shows its effect is named."""
    from cosmos_core.config.describe import effect_test_by_key, list_keys

    key_descriptions = [key for key in list_keys() if not key.is_table]
    for key in key_descriptions:
        typer.echo(f"{key.status:<12} {key.name}  {effect_test_by_key().get(key.name, key.note)}")
    counts_by_status = Counter(key.status for key in key_descriptions)
    typer.echo(", ".join(f"{count} {status}" for status, count in counts_by_status.most_common()))


@config_app.command("reference")
def print_key_reference() -> None:
    """Print the reference of all keys in Markdown. It is the content of `docs/configuration.md`."""
    from cosmos_core.config.reference import render_config_reference
    from tasks.kinds import all_kinds

    typer.echo(render_config_reference(all_kinds()), nl=False)


def print_notices(notices: list[str]) -> None:
    """Write notes to standard error about settings that are accepted but ignored or changed."""
    for notice in notices:
        sys.stderr.write(f"cosmos: note: {notice}\n")


def describe_usage_error(error: Any) -> str:
    """Return the message for an error in the command line. For an unknown option, suggest `--set` if the command
    accepts `--set`, because the unknown option may be a setting of the recipe."""
    click_context, syntax_hint = vars(error).get("ctx"), ""
    if {"option_name", "possibilities"} <= vars(error).keys():
        similar_options = difflib.get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)
        error.possibilities = similar_options
        if not similar_options and any(parameter.name == "overrides" for parameter in click_context.command.params):
            syntax_hint = "; a setting of the recipe is given as --set KEY=VALUE, such as --set train.epoch=2"
    help_command = getattr(click_context, "command_path", "cosmos")
    return f"{error.format_message().rstrip('.')}{syntax_hint}; see {help_command} --help"


def describe_system_error(system_error: Exception) -> str:
    """Return the message for an error of the operating system or of the Prefect server; raise any other error again."""
    if isinstance(system_error, OSError):
        return f"{system_error.filename or 'the system'}: {system_error.strerror or system_error}"
    # Compare the error classes of httpx and Prefect by name, because most commands import neither package.
    if type(system_error).__module__.partition(".")[0] not in {"httpx", "prefect"}:
        raise system_error
    return f"the Prefect server {os.environ.get('PREFECT_API_URL', 'of the profile')}: {system_error}"


def _load_pipeline(config_file: Path) -> Pipeline:
    from cosmos_core.config.compose import load_pipeline
    from tasks.kinds import all_kinds

    return load_pipeline(config_file, [], all_kinds())
