"""Stage kinds as Prefect tasks, for user flows in Python: `from tasks import export, rl, sft, upload`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.flow_run import configure_run as configure_run
    from tasks.stage_task import StageTask

    custom: StageTask
    evaluate: StageTask
    export: StageTask
    gate: StageTask
    merge: StageTask
    prepare: StageTask
    report: StageTask
    rl: StageTask
    sample: StageTask
    select: StageTask
    sft: StageTask
    upload: StageTask
    validate: StageTask


def __getattr__(name: str) -> Any:
    """Return the task of the stage kind `name`, or `configure_run`; imported lazily, because both import Prefect."""
    if name == "configure_run":
        from tasks.flow_run import configure_run

        return configure_run
    from tasks.kinds import all_kinds

    if name not in all_kinds():
        raise AttributeError(f"module 'tasks' has no attribute {name!r}")
    from tasks.stage_task import get_stage_task

    return get_stage_task(name)
