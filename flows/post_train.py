"""The pipeline: a DAG of stages from one TOML, each a retryable task, independent branches in parallel.

The form in Prefect's UI takes types from the signature and descriptions from `Args`, from nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import PIPELINE, Run, create_run, open_run, saved_pipeline_matches, supersede
from cosmos_core.run.state import update_state
from tasks.kinds import all_kinds
from tasks.stage import run_stages

_RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=64)  # threads that wait for workers


@flow(name="post-train", flow_run_name="{config}", task_runner=_RUNNER)
def post_train(
    config: str,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default
    run_id: str = "",
    from_stage: str = "",
) -> Any:
    """Bring every stage of a pipeline to its result, reusing what is proven.

    Args:
        config: Pipeline or recipe, a TOML file; or the directory of a run, to continue it
        overrides: Settings such as train.optm_lr=2e-6, or STAGE.train.epoch=2 for one stage
        run_id: Name of the run; an existing one is continued; empty: the time
        from_stage: Make this stage and everything behind it again; empty: none
    """
    run = open_or_create(config, overrides, run_id)
    force(run, from_stage)
    return run_stages(run, [stage.name for stage in run.pipeline.stages])


def open_or_create(config: str, overrides: Sequence[str], run_id: str) -> Run:
    """The run to work on: a run directory as it is, an existing `run_id` if it means the same, or a new one.

    Raises:
        ConfigError: the configuration is wrong, or differs from that of the existing run.
    """
    kinds = all_kinds()
    path = Path(config).expanduser()
    if path.is_dir():
        if overrides:
            raise ConfigError(
                f"{path} is a run; its settings are fixed. Start a new run with the overrides: what they "
                f"leave alone is reused"
            )
        return open_run(path, kinds)
    pipeline = load_pipeline(path, overrides, tuple(kinds))
    existing = pipeline.output_dir.expanduser().absolute() / run_id
    if run_id and (existing / PIPELINE).is_file():
        if different := saved_pipeline_matches(existing, pipeline):
            shown = ", ".join(different[:3])
            raise ConfigError(
                f"run {run_id} exists and was made with other settings ({shown}); leave run_id out, or resume "
                f"it as it is"
            )
        return open_run(existing, kinds)
    return create_run(pipeline, kinds, run_id=run_id)


def force(run: Run, from_stage: str) -> None:
    """Move `from_stage` and everything behind it aside, so that it is made again."""
    if not from_stage:
        return
    for name in sorted(run.pipeline.behind(from_stage)):
        supersede(run.stage_path(name))
        update_state(run.stage_path(name), forced=True)
