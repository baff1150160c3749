"""`cosmos bootstrap` and `cosmos reap`: what a team's server and machines need now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bootstrap(
    pools: Annotated[
        list[str], typer.Option("--pool", help="Work pool; several: repeat it. Without: local, cpu and gpu.")
    ] = [],  # noqa: B006 - typer reads the default
    type_: Annotated[str, typer.Option("--type", help="Of the pools: process, kubernetes, slurm ...")] = "process",
    limit: Annotated[int, typer.Option(min=0, help="Most runs at once in each pool; 0: no limit.")] = 0,
    template: Annotated[Path | None, typer.Option(help="Base job template, a JSON file of deploy/.")] = None,
) -> None:
    """Make what the Prefect server needs and does not have: work pools, the automation that notices dead flow runs."""
    from cosmos_core.launch import bootstrap as server

    wanted = [server.Pool(name, type_, limit or None, template) for name in pools or server.POOLS]
    for line in server.bootstrap(wanted):
        typer.echo(line)


def reap(
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
) -> None:
    """End what is left of runs whose flow died on this machine, and correct what is said of them."""
    from cosmos_core.launch import reap as leftovers

    found = False
    for line in leftovers.reap(output_dir.absolute()):
        found = True
        typer.echo(line)
    if not found:
        typer.echo("nothing is left over")
