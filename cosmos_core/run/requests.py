"""Send requests of a user to running trainings: for a profiler trace, or for another number of rollout engines."""

from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import Run
from cosmos_core.run.files import write_json
from cosmos_core.run.stage import ENGINES, PROFILE_REQUEST_FILE
from cosmos_core.types import JsonValue


def ask_profile(run: Run) -> list[str]:
    """Request a profiler trace of the next steps from the trainings of a run; return the names of the trainings.

    Raises:
        ConfigError: no training has the profiler enabled, or none has begun.
    """
    trainings = [stage.name for stage in run.pipeline.stages if run.pipeline.kind_of(stage).trains_model]
    names = [name for name in trainings if run.pipeline.recipes[name].profiler.enable_profiler]
    if not names:
        raise ConfigError(f"run {run.id} has no training with profiler.enable_profiler = true")
    return _request(run, names, PROFILE_REQUEST_FILE, True)


def _request(run: Run, names: list[str], file: str, value: JsonValue) -> list[str]:
    """Write a request file for the stages that have begun; return the names of these stages."""
    begun_stages = [name for name in names if (run.stage_path(name) / "stage.toml").is_file()]
    if not begun_stages:
        raise ConfigError(f"run {run.id}: {', '.join(names)} has not begun; try again when it has")
    for name in begun_stages:
        write_json(run.stage_path(name) / file, value)
    return begun_stages


def scale_engines(run: Run, count: int) -> list[str]:
    """Request a number of rollout engines from the trainings of a run in disaggregated mode; return the names of the
    trainings.

    Raises:
        ConfigError: no training has separate rollout engines, or none has begun.
    """
    recipes = run.pipeline.recipes
    names = [
        stage.name
        for stage in run.pipeline.stages
        if run.pipeline.kind_of(stage).feed == "rollouts" and recipes[stage.name].num_engines
    ]
    if not names:
        raise ConfigError(
            f"run {run.id} has no training with rollout engines beside its ranks; set mode = 'disaggregated'"
        )
    return _request(run, names, ENGINES, count)
