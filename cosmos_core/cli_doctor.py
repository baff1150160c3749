"""`cosmos doctor`: checks of the cluster that executes runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the Prefect server and what it knows.")] = False,
    output_dir: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("outputs"),
) -> None:
    """Say what is wrong with server, pools, workers, deployments, Ray, rewards and disk; exit 1 if something is."""
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    from cosmos_core.errors import EXIT_CRASH, ConfigError
    from cosmos_core.launch.doctor import findings

    if not cluster:
        raise ConfigError("cosmos doctor looks at a cluster: cosmos doctor --cluster; of a run, cosmos check says more")
    if not get_current_settings().api.url:
        raise ConfigError("PREFECT_API_URL is not set; it names the server of the cluster")
    is_well = True
    with get_client(sync_client=True) as client:
        for finding in findings(output_dir.absolute(), client):
            is_well &= finding.is_well
            typer.echo(f"{'ok   ' if finding.is_well else 'WRONG'} {finding.what}: {finding.told}")
    if not is_well:
        raise typer.Exit(EXIT_CRASH)
