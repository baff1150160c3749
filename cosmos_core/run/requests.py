"""Send requests of a user to running trainings: for a profiler trace, or for another number of rollout engines."""

from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import Run
from cosmos_core.run.files import write_json
from cosmos_core.run.stage import ENGINES_FILE, PROFILE_REQUEST_FILE
from cosmos_core.run.state import FINISHED_STATES, read_state
from cosmos_core.types import JsonValue


def request_profile(run: Run) -> list[str]:
    """Request a profiler trace of the next steps from the trainings of a run, and return their names; raise ConfigError
    if no training has the profiler enabled, or none runs."""
    training_names = [stage.name for stage in run.pipeline.stages if run.pipeline.stage_kind(stage).trains_model]
    stage_names = [name for name in training_names if run.pipeline.recipes[name].profiler.enable_profiler]
    if not stage_names:
        raise ConfigError(f"run {run.id} has no training with profiler.enable_profiler = true")
    return _write_request_files(run, stage_names, PROFILE_REQUEST_FILE, True)


def _write_request_files(run: Run, stage_names: list[str], request_file: str, request_content: JsonValue) -> list[str]:
    """Write `request_content` as JSON to the file `request_file` of each stage that has begun and not ended; return the
    names of these stages. Raise ConfigError if there is none."""
    started_stage_names = [name for name in stage_names if (run.stage_path(name) / "stage.toml").is_file()]
    if not started_stage_names:
        raise ConfigError(f"run {run.id}: {', '.join(stage_names)} has not begun; try again when it has")
    state_by_stage = {name: read_state(run.stage_path(name)).state for name in started_stage_names}
    unfinished_stage_names = [name for name, state in state_by_stage.items() if state not in FINISHED_STATES]
    if not unfinished_stage_names:
        stages_text = ", ".join(started_stage_names)
        raise ConfigError(f"run {run.id}: {stages_text} has ended; only a training that runs can be changed")
    for name in unfinished_stage_names:
        write_json(run.stage_path(name) / request_file, request_content)
    return unfinished_stage_names


def request_num_engines(run: Run, num_engines: int) -> list[str]:
    """Request that each disaggregated training of a run changes to `num_engines` rollout engines, and return the names
    of these trainings. Raises ConfigError if there is no such training, or none runs."""
    training_names = [stage.name for stage in run.pipeline.stages if run.pipeline.stage_kind(stage).feed == "rollouts"]
    stage_names = [name for name in training_names if run.pipeline.recipes[name].num_engines]
    if not stage_names:
        problem_text = f"run {run.id} has no training with rollout engines beside its ranks"
        raise ConfigError(f"{problem_text}; set mode = 'disaggregated'")
    return _write_request_files(run, stage_names, ENGINES_FILE, num_engines)
