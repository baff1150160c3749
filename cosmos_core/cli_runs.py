"""`cosmos status`, `runs`, `compare`, `report`, `samples`, `watch` and `lineage`: commands that show runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from cosmos_core.errors import ConfigError, CosmosError

# Expand `~`, because a shell expands it in `--output-dir ~/runs`, but not in `--output-dir=~/runs`.
OutputDirOption = Annotated[
    Path, typer.Option(help="Folder of runs.", callback=lambda path: Path(os.path.expanduser(path)))
]
RunArgument = Annotated[str, typer.Argument(help="Id or path of a run; empty: the newest run.")]
_POLL_SECONDS = 1.0


def status(run_name: RunArgument = "", output_dir: OutputDirOption = Path("outputs")) -> None:
    """Show the state of a run and its stages. It is read from the run directory; a run that the Prefect server has
    cancelled is named."""
    from cosmos_core.observe.console import print_status
    from cosmos_core.observe.record import read_run
    from cosmos_core.run.directory import find_run

    run_path = find_run(run_name, output_dir)
    print_status(run_path)
    run_outcome = read_run(run_path).outcome
    if os.environ.get("PREFECT_API_URL") and run_outcome in {"running", "waiting"}:
        from cosmos_core.launch.reap import find_cancelled_flow_run

        if flow_run_name := find_cancelled_flow_run(run_path.parent, run_path.name):
            reap_hint = "but the run goes on; if it still does in a minute: cosmos reap"
            effect_text = reap_hint if run_outcome == "running" else "and waits no more"
            typer.echo(f"flow run {flow_run_name} was cancelled, {effect_text}")


def runs(
    output_dir: OutputDirOption = Path("outputs"),
    max_runs: Annotated[int, typer.Option("--most", min=1, help="Number of newest runs to show.")] = 20,
    cost: Annotated[bool, typer.Option("--cost", help="Show GPU hours and costs, with estimate and budget.")] = False,
) -> None:
    """List the runs of a folder, the newest run last."""
    from cosmos_core.observe.console import make_console
    from cosmos_core.observe.costs import make_cost_table
    from cosmos_core.observe.runs import make_run_table
    from cosmos_core.run.directory import PIPELINE_FILE, find_run

    if not any(output_dir.glob(f"*/{PIPELINE_FILE}")):
        find_run("", output_dir)  # an error, because the name of the folder may be misspelt
    make_console().print((make_cost_table if cost else make_run_table)(output_dir, max_runs))


def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run ids or paths; a single run is compared with the newest.")
    ],
    html: Annotated[Path | None, typer.Option(help="Write a page with the curves of up to 8 runs.")] = None,
    output_dir: OutputDirOption = Path("outputs"),
) -> None:
    """Show how runs differ in settings, metrics and times. With `--html`, plot their curves."""
    from cosmos_core.observe import overlay
    from cosmos_core.observe.console import make_console
    from cosmos_core.observe.runs import compare_runs
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.files import write_text
    from tasks.kinds import all_kinds

    run_paths = [find_run(name, output_dir) for name in (names if len(names) > 1 else [*names, ""])]
    if len(names) == 1 and run_paths[0] == run_paths[1]:
        raise ConfigError(f"{run_paths[0].name} is the newest run; name another one too, which cosmos runs lists")
    if html is not None:
        html_page = overlay.build_comparison_page(run_paths)
        html.parent.mkdir(parents=True, exist_ok=True)
        write_text(html, html_page)
        typer.echo(html)
        return
    for run_path in run_paths[1:]:
        for difference in compare_runs(run_paths[0], run_path, all_kinds()):
            make_console().print(difference)


def report(run_name: RunArgument = "", output_dir: OutputDirOption = Path("outputs")) -> None:
    """Write the report of a run, complete or not. Its path is printed."""
    from cosmos_core.observe.report import REPORT_FILE, build_report
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.files import write_text

    run_path = find_run(run_name, output_dir)
    write_text(run_path / REPORT_FILE, build_report(run_path))
    typer.echo(run_path / REPORT_FILE)


def samples(  # noqa: PLR0913 - options of a command
    run_name: RunArgument = "",
    step: Annotated[int | None, typer.Option(min=0, help="Train step; default: the newest step.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Sort by reward, highest first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Sort by reward, lowest first.")] = False,
    stage: Annotated[str, typer.Option(help="Stage; default: the last one with completions.")] = "",
    limit: Annotated[int, typer.Option("--most", min=1, help="Number of completions to show.")] = 8,
    output_dir: OutputDirOption = Path("outputs"),
) -> None:
    """Show completions with their rewards. They are of a training, or of a validation if no training recorded any."""
    from cosmos_core.observe.completions import iter_completions
    from cosmos_core.run.directory import find_run

    if best and worst:
        raise typer.BadParameter("--best and --worst exclude each other")
    for text in iter_completions(find_run(run_name, output_dir), stage, step, "best" * best + "worst" * worst, limit):
        typer.echo(text)


def watch(run_name: RunArgument = "", output_dir: OutputDirOption = Path("outputs")) -> None:
    """Follow a run of another process or machine until it ends."""
    from cosmos_core.observe.console import ProgressDisplay, print_status
    from cosmos_core.observe.record import read_run
    from cosmos_core.observe.runs import is_run_inactive
    from cosmos_core.run.directory import find_run

    run_path = find_run(run_name, output_dir)
    with ProgressDisplay([stage.name for stage in read_run(run_path).stages]) as display:
        while True:
            run = read_run(run_path)
            for stage in run.stages:
                display.update(stage.name, stage.status, stage.progress)
            if is_run_inactive(run):
                break
            time.sleep(_POLL_SECONDS)
    print_status(run_path)


def lineage(
    name: Annotated[str, typer.Argument(help="Run id (empty: the newest), or path of a run, stage or model.")] = "",
    output_dir: OutputDirOption = Path("outputs"),
) -> None:
    """Show the stages and data from which a model was made. Their digests are verified."""
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.lineage import trace_lineage

    is_run_given_by_path = os.sep in name or (bool(name) and os.path.exists(name))
    path = Path(name) if is_run_given_by_path else find_run(name, output_dir)
    lineage_entries = trace_lineage(path)
    for entry in lineage_entries:
        kind_prefix = f"({entry.kind}) " if entry.kind else ""
        short_digest = entry.digest.removeprefix("hub:").rpartition("@")[2][:12]
        gpu_hours = f"  {entry.gpu_seconds / 3600:.4g} GPU hours" if entry.gpu_seconds else ""
        typer.echo(
            f"{'  ' * entry.depth}{entry.name} {kind_prefix}{short_digest}  {entry.location}  {entry.status}{gpu_hours}"
        )
    if broken_entries := [f"{entry.name}: {entry.status}" for entry in lineage_entries if entry.is_broken]:
        raise CosmosError(f"{path} does not come from what its manifests name: {'; '.join(broken_entries)}")
