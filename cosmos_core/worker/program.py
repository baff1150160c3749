"""Program of the worker process, `python -m cosmos_core.worker <stage_dir>`.

It reads `stage.toml`, calls the program of the stage's kind, and commits `result.json`. A user error ends with one line
in `error.json` and exit code 64, a stop request with 75, any other error with 1 and the traceback in the log.
"""

import importlib
import inspect
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.environment import mask_secrets, mask_text
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import (
    EXIT_CRASH,
    EXIT_OK,
    EXIT_PREEMPTED,
    ConfigError,
    CosmosError,
    Preempted,
    ProgramError,
    serialise_error,
)
from cosmos_core.imports import without_garbage_collection
from cosmos_core.machine_properties import MachineProperties, measure_machine
from cosmos_core.observe import formatting
from cosmos_core.observe.logs import StepLogger, configure_logging
from cosmos_core.observe.sinks.base import send_to_sinks
from cosmos_core.registry import find_error_location, import_user_code, is_user_code, locate_code
from cosmos_core.run.files import raise_disk_full, read_umask, write_json
from cosmos_core.run.libraries import RECORDED_LIBRARIES
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.run.progress import MetricsWriter, ProgressWriter
from cosmos_core.run.stage import Stage, load_stage, mask_stage_secrets, read_requested_num_engines
from cosmos_core.transient import is_transient
from cosmos_core.types import Outcome

logger = logging.getLogger(__name__)

_USER_CODE_KEYS = ("train.train_policy.trainer_type", "rollout.backend", "policy.model_class")
_PACKAGES_THAT_WARN_ON_EACH_RANK = tuple(
    f"cosmos_core.{name}" for name in ("algorithms", "checkpoint", "models", "rollout", "train")
)
"""Packages whose warnings are about the recipe, the model or a whole train step, and therefore equal on all ranks; only
the first rank logs them."""
_MODULES_THAT_WARN_OF_THE_MACHINE = ("cosmos_core.models.kernels", "cosmos_core.rollout.registry")


def main() -> int:
    """Run the stage whose folder is given on the command line, and return the exit code."""
    # Child processes must not inherit the launcher's lock files, since a child may outlive this process.
    for descriptor in filter(None, os.environ.pop("COSMOS_LOCK_DESCRIPTORS", "").split(",")):
        os.set_inheritable(int(descriptor), False)
    stage_path = Path(sys.argv[1])
    # If the folder of the run is private, let new files be private too.
    if not stage_path.parents[1].stat().st_mode & 0o077:
        os.umask(read_umask() | 0o077)
    configure_logging()
    mask_secrets()
    try:
        with raise_disk_full(stage_path):
            stage = load_stage(stage_path)
            mask_stage_secrets(stage)
            _register_stop_signals(stage)
            run_program(stage)
    except CosmosError as error:
        log_level = logging.WARNING if isinstance(error, Preempted) else logging.ERROR
        logger.log(log_level, "%s", error, exc_info=error.__cause__)
        return _write_error_file(stage_path, error)
    except Exception as error:  # noqa: BLE001 - every error of the process becomes a line and an exit code
        traceback.print_exc()
        return _write_error_file(stage_path, error)
    return EXIT_OK


def run_program(stage: Stage) -> None:
    """Call the program of the stage's kind, in this process or on several ranks, and commit the outcome that it
    returns."""
    stage.progress.phase("start")
    world_size = stage.recipe.policy.parallelism.world_size if stage.kind.has_mesh else 1
    has_engines = stage.kind.feed == "rollouts" and stage.recipe.num_engines > 0
    if world_size == 1 and not has_engines:
        _report_hardware(stage, [measure_machine(RECORDED_LIBRARIES)])
    with without_garbage_collection():
        stage_program = import_user_code(stage.entry)
    if not callable(stage_program):
        raise ConfigError(f"{stage.entry!r} is {type(stage_program).__name__}, not a function")
    try:
        inspect.signature(stage_program).bind(stage, **stage.config.arguments)
    except TypeError as error:
        raise ConfigError(f"stage {stage.name!r}: arguments do not fit {stage.entry}: {error}") from error
    if world_size > 1 or has_engines:
        engine_group = _create_engine_group(stage) if has_engines else None
        worker_group = importlib.import_module("cosmos_core.cluster.group").WorkerGroup(world_size, actors=engine_group)
        rank_program = _add_service_variables(stage, partial(run_rank, stage.path, stage_program))
        stage_outcome = worker_group.run(rank_program, lambda: stage.stop_requested, stage.progress.beat)
    else:
        stage_outcome = _run_with_metrics(stage, stage_program)
    commit_manifest(
        stage.path, stage_outcome, kind=stage.kind.name, fingerprint=stage.fingerprint, inputs=stage.inputs,
        sources=stage.sources,
    )  # fmt: skip


def _create_engine_group(stage: Stage) -> Any:
    open_engine = importlib.import_module("cosmos_core.train.generation").open_replica
    return importlib.import_module("cosmos_core.cluster.actors").ActorGroup(
        _add_service_variables(stage, partial(open_engine, stage.path)),
        partial(read_requested_num_engines, stage.path, stage.recipe.num_engines),
        name="RolloutEngine",
        shares_gpus=stage.recipe.mode == "colocated_separated",
        processes_per_actor=stage.recipe.rollout.parallelism.tp_size,
        is_concurrent_with_ranks=any(stage.recipe.train.train_policy.rollout_lookahead[:2]),
    )


def _add_service_variables(stage: Stage, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sets environment variables for rewards, tools and metric sinks, and then calls `program`:
    ranks and engines on a Ray cluster do not inherit the variables of this process."""
    properties_module = importlib.import_module("cosmos_core.cluster.properties")
    variable_names = (*stage.recipe.secret_env_names, *stage.recipe.rollout.multi_turn_config.tool_env)
    return properties_module.wrap_with_environment(properties_module.get_service_environment(variable_names), program)


def run_rank(stage_path: Path, stage_program: Callable[..., Outcome], messages_to_parent: Any) -> Outcome:
    """Run the program of a stage on this rank. Only the first rank logs below WARNING and writes shared files.
    `messages_to_parent` delivers a request to stop and the actors of the rollout engines."""
    from cosmos_core.parallel.mesh import all_gather_object, is_first_rank

    _configure_rank_logging(is_first_rank=is_first_rank())
    mask_secrets()
    stage = load_stage(stage_path)
    mask_stage_secrets(stage)

    def wait_for_stop_request() -> None:
        messages_to_parent.wait()
        stage.stop_requested = True

    threading.Thread(target=wait_for_stop_request, daemon=True).start()
    stage.engines = messages_to_parent.actors
    properties_by_rank = all_gather_object(asdict(measure_machine(RECORDED_LIBRARIES)))
    with raise_disk_full(stage_path):
        if is_first_rank():
            _report_hardware(stage, [MachineProperties(**rank_properties) for rank_properties in properties_by_rank])
            return _run_with_metrics(stage, stage_program)
        with tempfile.TemporaryDirectory() as scratch_folder:
            stage.progress = ProgressWriter(Path(scratch_folder) / "progress.json")
            stage.metrics = MetricsWriter(Path(scratch_folder) / "metrics.jsonl")
            return _call_program(stage_program, stage)


def _configure_rank_logging(*, is_first_rank: bool) -> None:
    """Let the first rank log everything, and other ranks only warnings that the first rank does not log as well."""
    configure_logging("INFO" if is_first_rank else "WARNING")
    if not is_first_rank:
        for package in _PACKAGES_THAT_WARN_ON_EACH_RANK:
            logging.getLogger(package).setLevel(logging.ERROR)
        for module in _MODULES_THAT_WARN_OF_THE_MACHINE:
            logging.getLogger(module).setLevel(logging.WARNING)


def _call_program(stage_program: Callable[..., Outcome], stage: Stage) -> Outcome:
    """Call the program of a stage, and return its outcome. Report an error in user-defined code with its file and
    line."""
    stage_description = f"stage {stage.name!r}: {stage.config.entry}"

    def convert_user_error(error: Exception) -> Exception:
        if is_transient(error):
            return error
        if not stage.config.entry:
            return _convert_user_code_error(error, stage.recipe)
        error_description = f"{type(error).__name__}: {error} ({find_error_location(error, stage_program)})"
        return ConfigError(f"{stage_description} raised {error_description}; traceback in the log")

    try:
        with convert_errors(convert_user_error):
            stage_outcome = stage_program(stage, **stage.config.arguments)
    except SystemExit as error:  # raised if the user's function calls `sys.exit`
        if error.code == EXIT_PREEMPTED:
            raise Preempted(f"{stage_description} exited with {EXIT_PREEMPTED}") from error
        raise ProgramError(f"{stage_description} exited with {error.code!r} instead of returning") from error
    if not isinstance(stage_outcome, Outcome):
        returned_type_text = "nothing" if stage_outcome is None else f"a {type(stage_outcome).__name__}"
        raise ConfigError(f"{stage_description} returned {returned_type_text}; return a cosmos_core.types.Outcome")
    return stage_outcome


def _convert_user_code_error(error: Exception, recipe: Recipe) -> Exception:
    """Return an error raised in a user's algorithm, engine or model family as a `ProgramError` that names the key of
    the recipe, the file and the line. Return any other error unchanged."""
    for key in _USER_CODE_KEYS:
        name, stack_frames = str(attrgetter(key)(recipe)), traceback.extract_tb(error.__traceback__)
        with suppress(ConfigError):  # ignore a built-in name, which has no file
            user_file = os.path.realpath(locate_code(name)) if is_user_code(name) else ""
            if line_numbers := [each.lineno for each in stack_frames if os.path.realpath(each.filename) == user_file]:
                return ProgramError(
                    f"{key} = {name!r}: {type(error).__name__}: {error} ({user_file}:{line_numbers[-1]})"
                )
    return error


def _report_hardware(stage: Stage, properties_by_rank: Sequence[MachineProperties]) -> None:
    write_json(stage.path / "facts.json", list(map(asdict, properties_by_rank)))  # by rank, for the report
    training_dtypes_text, train_config = "", stage.recipe.train
    if stage.kind.trains_model:
        training_dtypes_text = f", {train_config.master_dtype} weights, computes in {train_config.param_dtype}"
    machines_text = formatting.describe_machines(properties_by_rank)
    logger.info("%s (%s) on %s%s", stage.name, stage.kind.name, machines_text, training_dtypes_text)


def _run_with_metrics(stage: Stage, stage_program: Callable[..., Outcome]) -> Outcome:
    """Call the program of a stage, and pass its metrics to the log and to the metric sinks (W&B, TensorBoard)."""
    if stage.kind.makes == "metrics":  # remove the metrics that a killed attempt has written
        stage.metrics.remove_lines_after_step(0)
    step_logger = StepLogger(stage.progress)
    stage.metrics.line_callbacks.append(step_logger.log_metrics_line)
    warning_handler, cosmos_logger = _WarningHandler(stage.progress), logging.getLogger("cosmos_core")
    cosmos_logger.addHandler(warning_handler)
    try:
        with send_to_sinks(stage):
            return _call_program(stage_program, stage)
    finally:
        cosmos_logger.removeHandler(warning_handler)
        step_logger.flush()


class _WarningHandler(logging.Handler):
    """Log handler that adds warnings to the stage's `progress.json`, from which the terminal shows them."""

    def __init__(self, progress_writer: ProgressWriter) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress_writer

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # ignore a full disk: it must not stop the code that logs a warning
            self._progress.warn(mask_text(record.getMessage()))


def _register_stop_signals(stage: Stage) -> None:
    def request_stop(signal_number: int, stack_frame: object) -> None:
        stage.stop_requested = True

    for signal_name in {"SIGTERM", *stage.recipe.train.signal_to_handle}:
        signal.signal(signal.Signals[signal_name], request_stop)


def _write_error_file(stage_path: Path, error: Exception) -> int:
    """Write the error with which the program ended to `error.json`, and return the exit code of this process."""
    error_type, message = serialise_error(error)
    if not isinstance(error, CosmosError) and not is_transient(error):
        error_type = ProgramError.__name__
    try:
        write_json(stage_path / "error.json", {"type": error_type, "message": mask_text(" ".join(message.split()))})
    except OSError:
        logger.exception("error.json could not be written")
    return error.exit_code if isinstance(error, CosmosError) else EXIT_CRASH
