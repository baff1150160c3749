"""`cosmos doctor`: checks of this machine, or of the cluster that executes runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cosmos_core.launch.doctor import Finding


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Prefect server, its work pools, workers and deployments.")
    ] = False,
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
) -> None:
    """Check this machine and suggest a remedy for each problem; with --cluster, check the Prefect server, its work
    pools, workers and deployments, Ray and rewards. The exit code is 1 if a check fails."""
    from cosmos_core.errors import EXIT_CRASH
    from cosmos_core.launch.machine_doctor import machine_findings

    is_healthy = True
    for finding in _cluster_findings(output_dir) if cluster else machine_findings(output_dir.absolute()):
        is_healthy &= finding.is_ok
        typer.echo(f"{'ok   ' if finding.is_ok else 'WRONG'} {finding.name}: {finding.message}")
    if not is_healthy:
        raise typer.Exit(EXIT_CRASH)


def _cluster_findings(output_dir: Path) -> Iterator[Finding]:
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    from cosmos_core.errors import ConfigError
    from cosmos_core.launch.doctor import run_checks

    if not get_current_settings().api.url:
        raise ConfigError("PREFECT_API_URL is not set; it names the server of the cluster")
    with get_client(sync_client=True) as client:
        yield from run_checks(output_dir.absolute(), client)
