"""`cosmos bootstrap`, `worker`, `serve-reports`, `reap` and `clean`: maintenance of a Prefect server, of the machines
that run stages, and of folders of runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def bootstrap(
    pools: Annotated[
        list[str], typer.Option("--pool", help="Work pool; several: repeat it. Without: local, cpu and gpu.")
    ] = [],  # noqa: B006 - typer reads the default
    type_: Annotated[str, typer.Option("--type", help="Of the pools: process, kubernetes, docker ...")] = "process",
    limit: Annotated[int, typer.Option(min=0, help="Most runs at once in each pool; 0: no limit.")] = 0,
    template: Annotated[Path | None, typer.Option(help="Base job template, a JSON file of deploy/.")] = None,
    notify: Annotated[
        list[str],
        typer.Option(
            metavar="CHANNEL=URL",
            help="Tell slack=URL, webhook=URL or email=mailtos://... of ends; several: repeat it.",
        ),
    ] = [],  # noqa: B006
) -> None:
    """Make what the Prefect server needs and does not have: work pools, the automation that notices dead flow runs,
    and automations that send notifications."""
    from cosmos_core.launch import bootstrap as server
    from cosmos_core.launch.notify import parsed_channels

    work_pools = [server.Pool(name, type_, limit or None, template) for name in pools or server.POOLS]
    for line in server.bootstrap(work_pools, parsed_channels(notify)):
        typer.echo(line)


def worker(
    pool: Annotated[str, typer.Option(help="Work pool whose flow runs it takes.")],
    limit: Annotated[int, typer.Option(min=0, help="Most flow runs at once; 0: no limit.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the worker; empty: Prefect makes one.")] = "",
    type_: Annotated[str, typer.Option("--type", help="Of the worker, e.g. kubernetes; empty: that of the pool.")] = "",
) -> None:
    """Start a Prefect worker whose polling, also for cancelled flow runs, outlasts an outage of the server."""
    arguments = ["worker", "start", "--pool", pool]
    arguments += ["--limit", str(limit)] * bool(limit) + ["--name", name] * bool(name)
    arguments += ["--type", type_] * bool(type_)
    os.execv(sys.executable, [sys.executable, "-m", "cosmos_core.launch.prefect", *arguments])


def serve_reports(
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8765,
) -> None:
    """Serve the reports of all runs to other machines, read-only, until it is stopped.

    The password is the token in COSMOS_REPORTS_TOKEN, or a new one that is printed; the user name may be any. Links to
    reports use the address in COSMOS_REPORTS_URL. Reports of private runs are not served.
    """
    import secrets

    from cosmos_core.observe.report_server import TOKEN, ReportServer

    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    with ReportServer(output_dir.expanduser(), token, (host, port)) as server:
        typer.echo(f"reports of {server.output_dir} at http://{host}:{server.server_address[1]}/RUN/report.html")
        if TOKEN not in os.environ:
            typer.echo(f"password: {token}")
        server.serve_forever()


def reap(
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
) -> None:
    """End what is left of runs whose flow died on this machine, and correct what is said of them."""
    from cosmos_core.launch import reap as leftovers

    has_changes = False
    for line in leftovers.reap(output_dir.absolute()):
        has_changes = True
        typer.echo(line)
    if not has_changes:
        typer.echo("nothing is left over")


def clean(
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
    store: Annotated[str, typer.Option(help="Clean this artifact_store, s3://BUCKET/PREFIX, in its place.")] = "",
    keep: Annotated[int, typer.Option(min=0, help="Newest runs of each pipeline that stay.")] = 5,
    older_than: Annotated[str, typer.Option(help="Only runs that did nothing for so long, e.g. 12h or 30d.")] = "0s",
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
) -> None:
    """Show which runs may be removed, and with --yes remove them.

    What runs, is published, or is referred to by a run that stays is never removed. Of an artifact store goes what no
    run that stays needs, and nothing of the last day.
    """
    from cosmos_core.config.schema.pipeline import seconds
    from cosmos_core.errors import ConfigError
    from cosmos_core.launch import clean as retention
    from cosmos_core.observe.formatting import duration, size

    try:
        age = seconds(older_than)
    except ValueError as error:
        raise ConfigError(f"--older-than {older_than!r}: write a number and a unit: 12h or 30d") from error
    if store:
        _clean_store(store, keep=keep, older_than_seconds=age, is_confirmed=yes)
        return
    folder = output_dir.expanduser().absolute()
    runs = retention.verdicts(folder, num_kept=keep, older_than_seconds=age)
    for verdict in runs:
        outcome = f"stays: {verdict.reason_to_keep}" if verdict.reason_to_keep else "goes"
        details = f"{verdict.pipeline}, {size(verdict.size)}, {duration(verdict.age_seconds)} old"
        typer.echo(f"{verdict.path.name}  {details}  {outcome}")
    deletable = [verdict for verdict in runs if not verdict.reason_to_keep]
    removed = list(retention.remove(folder, deletable)) if yes else deletable
    freed_bytes = size(sum(verdict.size for verdict in removed))
    line = (
        f"removed {len(removed)} of {len(runs)} runs" if yes else f"{len(removed)} of {len(runs)} runs may be removed"
    )
    typer.echo(f"{line}, {freed_bytes}" + ("" if yes or not removed else "; remove them with --yes"))


def _clean_store(url: str, *, keep: int, older_than_seconds: float, is_confirmed: bool) -> None:
    from cosmos_core.observe.formatting import duration, size
    from cosmos_core.upload.store_retention import Retention

    retention = Retention(url, num_kept=keep, older_than_seconds=older_than_seconds)
    for run in retention.runs:
        outcome = f"stays: {run.reason_to_keep}" if run.reason_to_keep else "goes"
        typer.echo(f"{run.name}  {run.pipeline}, {duration(run.age_seconds)} old  {outcome}")
    num_leaving = sum(not run.reason_to_keep for run in retention.runs)
    if is_confirmed:
        num_deleted, freed_bytes = retention.remove()
        typer.echo(f"removed {num_deleted} of {len(retention.runs)} runs, {size(freed_bytes)}")
    else:
        hint = "; remove them with --yes" if retention.size else ""
        typer.echo(f"{num_leaving} of {len(retention.runs)} runs may be removed, {size(retention.size)}{hint}")
