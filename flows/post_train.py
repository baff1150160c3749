"""Flow `post-train`: run the DAG of stages of one TOML file, with a task per stage, retries and parallel branches.

The form in Prefect's UI shows the types of the signature and the descriptions of the docstring section `Args` only.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from cosmos_core.config.capabilities import unique_notices
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.mesh import resolve_gpu_settings
from cosmos_core.errors import ConfigError
from cosmos_core.launch import worker
from cosmos_core.run.directory import (
    Run,
    claim_run,
    create_writable_folder,
    describe_run_removal,
    get_flow_runs_folder,
    open_or_create_run,
    open_run,
    read_start_info,
    record_flow_run,
    supersede_stage,
)
from cosmos_core.run.liveness import check_approval
from cosmos_core.run.lock import open_stage_lock
from cosmos_core.run.state import read_state, update_state
from cosmos_core.upload.artifact_store import check_store
from cosmos_core.upload.base import check_targets
from tasks.credentials import set_credentials
from tasks.kinds import all_kinds
from tasks.naming import flow_run_name
from tasks.remote_stage import require_ended_child
from tasks.stage import run_stages

_TASK_RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=64)  # many threads, as each only waits for a worker


@flow(name="post-train", flow_run_name=flow_run_name, task_runner=_TASK_RUNNER)
def post_train(
    config: str,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default
    run_id: str = "",
    from_stage: str = "",
    verify: bool = False,
) -> Any:
    """Run every stage of a pipeline until it has its result; verified results are reused.

    Args:
        config: Pipeline or recipe, a TOML file; or the directory of a run, to continue it
        overrides: Settings such as train.optm_lr=2e-6, or STAGE.train.epoch=2 for one stage
        run_id: Name of the run; an existing run is continued; empty: the time
        from_stage: Make this stage and all stages that depend on it again; empty: none
        verify: Hash every input and every reused file instead of trusting size, times and inode
    """
    flow_run_id = str(flow_run.id or "")
    run = replace(open_run_to_execute(config, overrides, run_id, flow_run_id), should_verify_files=verify)
    check_approval(run.path)
    for notice in unique_notices(run.pipeline):
        get_run_logger().info("note: %s", notice)
    with claim_run(run):
        supersede_stages(run, from_stage, flow_run_id)
        return run_stages(run, [stage.name for stage in run.pipeline.stages])


def open_run_to_execute(config: str, overrides: Sequence[str], run_id: str, flow_run_id: str = "") -> Run:
    """Return the run to execute: an existing run directory, the run that an earlier attempt of the same flow run
    created, the existing run `run_id` if its configuration is the same, or a new run. Raises `ConfigError` if the
    configuration is wrong or differs from that of the existing run, or if a publication target or the artifact store is
    not writable."""
    stage_kinds = all_kinds()
    path = Path(os.path.expanduser(config))
    if path.is_dir():
        if overrides or run_id:
            raise ConfigError(
                f"{path} is a run; its settings and its name are fixed. Start a new run with the overrides: what they "
                "leave alone is reused"
            )
        if (start_info := read_start_info(path)) is not None and start_info.entrypoint:
            raise ConfigError(
                f"{path} is a run of the flow {start_info.entrypoint}, which decides on its stages: cosmos resume "
                f"{shlex.quote(str(path))}"
            )
        return open_run(path, stage_kinds)
    pipeline = resolve_gpu_settings(load_pipeline(path, overrides, stage_kinds))
    set_credentials(pipeline)  # look-ups in stores and on the Hub need credentials
    check_targets(pipeline)
    check_store(pipeline)
    # If Prefect retries a flow run, continue the run that the first attempt of the flow run created.
    run_id_file = get_flow_runs_folder(create_writable_folder(pipeline.output_dir)) / flow_run_id
    if flow_run_id and not run_id and run_id_file.is_file():
        run_id = run_id_file.read_text(encoding="utf-8")
    opened_run = open_or_create_run(pipeline, run_id=run_id)
    if flow_run_id:
        record_flow_run(opened_run, flow_run_id)
        if removal_warning := describe_run_removal(opened_run):
            get_run_logger().warning(removal_warning)
    return opened_run


def supersede_stages(run: Run, from_stage: str, flow_run_id: str) -> None:
    """Move the folders of the stage `from_stage` and of all stages that depend on it to `superseded/`, so that they run
    again, unless this flow run has done so before. Raises `ConfigError` if a stage still runs on its work pool."""
    stage_names = sorted(run.pipeline.stage_and_dependents(from_stage)) if from_stage else []
    stage_paths = [
        path
        for path in map(run.stage_path, stage_names)
        if not flow_run_id or read_state(path).forced_by != flow_run_id
    ]
    for path in stage_paths:
        require_ended_child(path, run.pipeline.config.grace_seconds)
    for path in stage_paths:
        with open_stage_lock(run.path, path.name) as lock:  # the worker of a killed flow may still write to the folder
            lock.acquire(on_poll=partial(_reap_unless_stopping, path))
            worker.mask_log_of_killed_launcher(path, run.pipeline.secret_env_names(run.pipeline.stage(path.name)))
            supersede_stage(path)
            update_state(path, forced=True, forced_by=flow_run_id)


def _reap_unless_stopping(path: Path) -> None:
    worker.sleep_unless_stopping(0)
    worker.reap_attempt(path)
