"""Flow `stage`: run one stage of an existing run, as a deployment for another work pool or started by a person."""

import os
import shlex
from pathlib import Path
from typing import Any

from prefect import flow

from cosmos_core.errors import ConfigError
from cosmos_core.run.bucket import S3_SCHEME
from cosmos_core.run.directory import Run, open_run
from cosmos_core.run.manifest import find_output_damage, read_result
from tasks.credentials import set_credentials
from tasks.kinds import all_kinds
from tasks.naming import flow_run_name
from tasks.stage import run_stages
from tasks.store_sync import StageSync, open_run_from_store


@flow(name="stage", flow_run_name=flow_run_name)
def stage(run: str, name: str) -> Any:
    """Run one stage of a run until it has its result; a verified result is reused.

    Args:
        run: Directory of the run, made by post-train or by the command cosmos run; or its URL in an artifact store
        name: Name of the stage in the pipeline of the run; the stages that it starts from must be done
    """
    if run.startswith(S3_SCHEME):
        set_credentials(None)
        opened_run = open_run_from_store(run, name)
    else:
        opened_run = open_run(Path(os.path.expanduser(run)), all_kinds())
    StageSync(opened_run, opened_run.pipeline.stage(name)).receive_inputs()
    check_upstream_results(opened_run, name)
    return run_stages(opened_run, [name], is_local=True)


def check_upstream_results(run: Run, name: str) -> None:
    """Raise `ConfigError` if the stage does not exist, or if a stage in its `after` has no result or an altered one."""
    for upstream_name in run.pipeline.stage(name).after:
        result = read_result(run.stage_path(upstream_name))
        if damage := find_output_damage(run.stage_path(upstream_name), result) if result else "it is not done":
            raise ConfigError(
                f"{run.path}: stage {name!r} starts from {upstream_name!r}, but {damage}; run stage {upstream_name!r} "
                f"first, or the whole: cosmos resume {shlex.quote(str(run.path))}"
            )
