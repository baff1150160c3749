"""Commands `cosmos mcp` and `cosmos agent-docs`, with which an AI agent operates runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import typer

from cosmos_core.errors import ConfigError

_EXIT_CODE_HELP = """\
Exit codes: 0 done; 64 the configuration or the data is wrong, one line on standard error names value,
rule and remedy; 65 a gate refused the model; 75 stopped with a checkpoint, `cosmos resume` continues it;
1 another error."""


def mcp() -> None:
    """Serve runs and recipes to an agent. It speaks the Model Context Protocol on standard input and output."""
    if find_spec("mcp") is None:
        raise ConfigError("the package mcp is not installed: pip install 'cosmos-posttrain[mcp]'")
    from cosmos_core.mcp_server import open_server

    open_server().run()


def agent_docs(context: typer.Context) -> None:
    """Print the documentation for an agent. It has all commands with their options, exit codes and recipe keys."""
    from cosmos_core.config.reference import render_config_reference
    from tasks.kinds import all_kinds

    typer.echo(f"# cosmos: post-training as a pipeline\n\n{_EXIT_CODE_HELP}\n\n# Commands\n")
    for name, command in _iterate_commands("cosmos", context.find_root().command):
        typer.echo(f"## {name}\n\n{command.help}\n")
        for parameter in command.params:
            is_cli_option = parameter.param_type_name == "option"
            option_names = parameter.opts if is_cli_option else [parameter.name.upper()]
            typer.echo(f"- `{' '.join(option_names)}`: {getattr(parameter, 'help', None) or ''}")
        typer.echo("")
    typer.echo(render_config_reference(all_kinds()), nl=False)


def _iterate_commands(group_name: str, command_group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command in a group of commands and its sub-groups, with the command."""
    for command_name, command in vars(command_group)["commands"].items():
        command_path, is_command_group = f"{group_name} {command_name}", "commands" in vars(command)
        yield from _iterate_commands(command_path, command) if is_command_group else [(command_path, command)]
