"""`cosmos status`, `runs`, `compare`, `report`, `samples` and `watch`: commands that show runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.errors import CosmosError

OutputDir = Annotated[Path, typer.Option(help="Folder of runs, where run ids are looked up.")]
RunName = Annotated[str, typer.Argument(help="Run id or path; empty: the newest.")]
_TABLE_WIDTH = 160
_POLL_SECONDS = 1.0


def status(run_name: RunName = "", output_dir: OutputDir = Path("outputs")) -> None:
    """Show where every stage of a run stands, from its directory; and whether the Prefect server says that a run which
    goes on was cancelled."""
    from cosmos_core.observe.console import print_status
    from cosmos_core.observe.record import read_run
    from cosmos_core.run.directory import find_run

    path = find_run(run_name, output_dir)
    print_status(path)
    if os.environ.get("PREFECT_API_URL") and read_run(path).outcome == "running":
        from cosmos_core.launch.reap import cancelled_flow_run

        if name := cancelled_flow_run(path.parent, path.name):
            typer.echo(f"flow run {name} was cancelled, but the run goes on; if it still does in a minute: cosmos reap")


def runs(
    output_dir: OutputDir = Path("outputs"),
    most: Annotated[int, typer.Option(min=1, help="Newest runs that are shown.")] = 20,
    cost: Annotated[bool, typer.Option("--cost", help="GPU hours and costs, with estimate and budget.")] = False,
) -> None:
    """List the runs of a folder, the newest last."""
    from rich.console import Console

    from cosmos_core.observe.costs import table_of_costs
    from cosmos_core.observe.runs import table_of_runs

    table = (table_of_costs if cost else table_of_runs)(output_dir, most)
    Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(table)


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run ids or paths; of one, beside the newest.")],
    html: Annotated[Path | None, typer.Option(help="Write a page with the curves of all runs, up to 8.")] = None,
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Show how runs differ from the first: settings, metrics and times; with `--html`, their curves in one page."""
    from rich.console import Console

    from cosmos_core.observe import overlay
    from cosmos_core.observe.runs import run_differences
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.files import write_text
    from tasks.kinds import all_kinds

    paths = [find_run(name, output_dir) for name in (names if len(names) > 1 else [*names, ""])]
    if html is not None:
        page = overlay.build(paths)
        html.parent.mkdir(parents=True, exist_ok=True)
        write_text(html, page)
        typer.echo(html)
        return
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for path in paths[1:]:
        for part in run_differences(paths[0], path, all_kinds()):
            console.print(part, markup=False, highlight=False)


def report(run_name: RunName = "", output_dir: OutputDir = Path("outputs")) -> None:
    """Write report.html of a run, whatever of it there is, and say where."""
    from cosmos_core.observe.report import REPORT_FILE, build
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.files import write_text

    path = find_run(run_name, output_dir)
    write_text(path / REPORT_FILE, build(path))
    typer.echo(path / REPORT_FILE)


def samples(  # noqa: PLR0913 - options of a command
    run_name: RunName = "",
    step: Annotated[int | None, typer.Option(min=0, help="Train step; left out: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest reward first.")] = False,
    stage: Annotated[str, typer.Option(help="Stage; left out: the last one that has completions.")] = "",
    most: Annotated[int, typer.Option(min=1, help="Completions that are shown.")] = 8,
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Show completions of a training with their rewards, or of a validation where there was none."""
    from cosmos_core.observe.completions import iter_completions
    from cosmos_core.run.directory import find_run

    if best and worst:
        raise typer.BadParameter("--best and --worst exclude each other")
    for text in iter_completions(find_run(run_name, output_dir), stage, step, "best" * best + "worst" * worst, most):
        typer.echo(text)


def watch(run_name: RunName = "", output_dir: OutputDir = Path("outputs")) -> None:
    """Follow a run that another process or machine runs, until nothing happens in it any more."""
    from cosmos_core.observe.console import Display, print_status
    from cosmos_core.observe.record import read_run
    from cosmos_core.observe.runs import is_inactive
    from cosmos_core.run.directory import find_run

    path = find_run(run_name, output_dir)
    with Display([stage.name for stage in read_run(path).stages]) as display:
        while True:
            run = read_run(path)
            for stage in run.stages:
                display.update(stage.name, stage.status, stage.progress)
            if is_inactive(run):
                break
            time.sleep(_POLL_SECONDS)
    print_status(path)


def lineage(
    name: Annotated[str, typer.Argument(help="Run id (empty: the newest), or path of a run, a stage or a model.")] = "",
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Walk from a model back to its data; every step is verified."""
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.lineage import lineage_of

    is_path = os.sep in name or (bool(name) and os.path.exists(name))
    path = Path(name) if is_path else find_run(name, output_dir)
    links = lineage_of(path)
    for link in links:
        kind = f"({link.kind}) " if link.kind else ""
        digest = link.digest.removeprefix("hub:").rpartition("@")[2][:12]
        gpu_hours = f"  {link.gpu_seconds / 3600:.4g} GPU hours" if link.gpu_seconds else ""
        typer.echo(f"{'  ' * link.depth}{link.name} {kind}{digest}  {link.where}  {link.note}{gpu_hours}")
    if broken := [f"{link.name}: {link.note}" for link in links if link.is_broken]:
        raise CosmosError(f"{path} does not come from what its manifests name: {'; '.join(broken)}")
