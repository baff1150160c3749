"""Create, open and find run directories. The directory, not Prefect's database, is the source of truth about a run."""

import errno
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline, StageKinds, load_pipeline
from cosmos_core.config.load import parse_table, read_toml, without_none
from cosmos_core.config.schema.pipeline import BUDGET_KEYS, PipelineConfig
from cosmos_core.environment import mask_named_secrets, mask_text
from cosmos_core.errors import ConfigError
from cosmos_core.machine_properties import git_commit
from cosmos_core.run.digests import DigestCache, shared_digest_cache
from cosmos_core.run.files import (
    SHARED_FOLDER,
    JsonDocument,
    UnixSeconds,
    read_document,
    read_umask,
    remove_temporary_files,
    write_json,
    write_text,
)
from cosmos_core.run.fingerprint import collect_stage_machine_properties, count_worker_threads
from cosmos_core.run.gpu_time import read_saved_estimate
from cosmos_core.run.hub import pin_hub_revisions
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.liveness import record_run_holder
from cosmos_core.run.lock import FileLock
from cosmos_core.run.remote import pin_urls
from cosmos_core.run.state import read_state

PIPELINE_FILE = "pipeline.toml"
RUNS_FILE = "runs.json"
_STALE_FOLDER_AGE_SECONDS = 3600.0
"""Age in seconds at which an incomplete run folder, which a killed command left, is removed."""
_PREFECT_FOLDER_PATTERN = re.compile(r"tmp\w+prefect")
_RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunStartInfo(JsonDocument):
    """Content of `run.json`, which describes how a run was started."""

    run_id: str = ""
    pipeline: str = ""
    started: UnixSeconds = 0.0
    command: list[str] = []
    host: str = ""
    git_commit: str = ""
    python: str = ""
    versions: dict[str, str] = {}
    seeds: dict[str, int | None] = {}
    kinds: dict[str, dict[str, Any]] = {}
    """Properties of each kind of stage in the run, as `types.StageKind`, by name of the kind."""
    fixed: dict[str, Any] = {}
    """Original values of the settings that were replaced when the run was created, such as `threads`, by key."""
    entrypoint: str = ""
    """Import path `FILE.py:FLOW` of the Python flow that created the run; empty: a TOML file did."""
    parameters: dict[str, Any] = {}
    """Parameters of the Python flow that created the run, with `***` for secrets; empty for a TOML file."""
    working_directory: str = ""
    """Folder in which the run was created, to which relative paths in a Python flow refer."""
    estimate: dict[str, float | None] = {}
    """GPU seconds of each stage in the last `plan --estimate` with the same settings; None if unknown."""


@dataclass(frozen=True)
class Run:
    """Directory and pipeline of one run."""

    path: Path
    pipeline: Pipeline
    should_verify_files: bool = False
    """True: hash files again instead of trusting their size, times and inode."""
    has_unsaved_budget: bool = False
    """True if the price or budget of the run was changed and is not saved yet."""

    @property
    def id(self) -> str:
        """Return the run id, the name of the run's folder: by default the time of its creation, `YYYYmmddHHMMSS`."""
        return self.path.name

    @property
    def output_dir(self) -> Path:
        """Return the folder that holds all runs and their shared data: digests, fingerprints, locks."""
        return self.path.parent

    @cached_property
    def digest_cache(self) -> DigestCache:
        """Return the cache of content digests that all runs share."""
        return shared_digest_cache(self.output_dir, ignores_cache=self.should_verify_files)

    def stage_path(self, name: str) -> Path:
        """Return the directory of the stage `name` in the run."""
        return self.path / "stages" / name


def create_run(
    pipeline: Pipeline, *, run_id: str = "", requires_exact_id: bool = False, entrypoint: str = "",
    parameters: dict[str, Any] | None = None
) -> Run:  # fmt: skip
    """Create the directory of a new run if this machine can run the pipeline. If a run with the id `run_id` exists,
    append a number to the id, or raise an error if `requires_exact_id`. For a Python flow, `run.json` records its
    `entrypoint` and `parameters`.

    Raises:
        ConfigError: this version does not support a setting, the output folder is not writable, or `run_id` is invalid.
        ModelError, DataError, RewardError: an input that the pipeline names is missing.
    """
    check_capabilities(pipeline)
    check_inputs(pipeline)
    # The number of threads is set only once, so that the run can be resumed on a machine with another number of cores.
    # Revisions are set only once, so that models and data sets that change on the Hub do not change the run.
    original_pipeline, is_run_private = pipeline, pipeline.config.private
    if is_run_private is None and read_umask() & 0o077 == 0o077:
        # The umask makes all new files private, so make the run private.
        is_run_private = True
    resolved_settings = {"threads": count_worker_threads(pipeline), "private": is_run_private}
    pipeline = replace(pipeline, config=pipeline.config.model_copy(update=resolved_settings))
    pipeline = pin_urls(pin_hub_revisions(pipeline))
    package_versions = collect_stage_machine_properties(pipeline).versions
    output_dir = create_writable_folder(pipeline.output_dir)
    start_info = RunStartInfo(
        pipeline=pipeline.config.name,
        started=time.time(),
        command=list(map(mask_text, sys.argv)),
        host=socket.gethostname(),
        git_commit=git_commit(),
        python=sys.version.split()[0],
        versions=package_versions,
        seeds={stage.name: pipeline.recipes[stage.name].train.seed for stage in pipeline.stages},
        kinds={stage.kind: asdict(pipeline.stage_kind(stage)) for stage in pipeline.stages},
        fixed=_find_changed_values(original_pipeline, pipeline.as_toml()),
        entrypoint=entrypoint,
        parameters=mask_named_secrets(parameters or {}),
        working_directory=os.getcwd(),
        estimate=read_saved_estimate(original_pipeline, output_dir),
    )
    recipe_timestamps = (recipe.train.timestamp for recipe in pipeline.recipes.values())
    run_id = run_id or next(filter(None, recipe_timestamps), time.strftime("%Y%m%d%H%M%S"))
    pipeline_toml, max_run_suffix = tomli_w.dumps(pipeline.as_toml()), 1 if requires_exact_id else 999
    run_path = _create_run_folder(output_dir, run_id, pipeline_toml, start_info, max_run_suffix)
    write_run_list(output_dir)
    return open_run(run_path, pipeline.stage_kinds)


def extend_run(run: Run, pipeline: Pipeline) -> Run:
    """Replace the saved pipeline of a run by `pipeline`, which has additional stages; for errors see `create_run`."""
    check_capabilities(pipeline)
    check_inputs(pipeline)
    pipeline = pin_urls(pin_hub_revisions(pipeline))
    start_info = read_start_info(run.path) or RunStartInfo(run_id=run.id)
    start_info.kinds |= {stage.kind: asdict(pipeline.stage_kind(stage)) for stage in pipeline.stages}
    start_info.seeds |= {stage.name: pipeline.recipes[stage.name].train.seed for stage in pipeline.stages}
    write_json(run.path / "run.json", start_info.model_dump())
    write_text(run.path / PIPELINE_FILE, tomli_w.dumps(pipeline.as_toml()))
    return open_run(run.path, pipeline.stage_kinds)


def open_or_create_run(pipeline: Pipeline, *, run_id: str = "") -> Run:
    """Return the existing run `run_id` of this pipeline to continue it, or a new run; raise ConfigError if the existing
    run has other settings, and the errors of `create_run`."""
    existing_run_path = pipeline.output_dir.expanduser().absolute() / run_id
    if not run_id or not (existing_run_path / PIPELINE_FILE).is_file():
        return create_run(pipeline, run_id=run_id, requires_exact_id=bool(run_id))
    differing_keys = find_differing_keys(existing_run_path, pipeline)
    if changed_keys := [key for key in differing_keys if key.removeprefix("pipeline.") not in BUDGET_KEYS]:
        problem_text = f"run {run_id} exists and was made with other settings ({', '.join(changed_keys[:3])})"
        raise ConfigError(f"{problem_text}; leave the run id out, or resume it as it is")
    return replace_budget(open_run(existing_run_path, pipeline.stage_kinds), pipeline.config)


def replace_budget(run: Run, config: PipelineConfig) -> Run:
    """Return the run with the price of GPUs and the budget of `config`, which `claim_run` then saves; raise ConfigError
    if a value is not positive or there is a budget without a price."""
    budget_settings = {key: getattr(config, key) for key in BUDGET_KEYS}
    new_config = run.pipeline.config.model_copy(update=budget_settings)
    if new_config == run.pipeline.config:
        return run
    parse_table(
        PipelineConfig, without_none(budget_settings), error_prefix=str(run.path / PIPELINE_FILE), key_prefix="pipeline"
    )
    return replace(run, pipeline=replace(run.pipeline, config=new_config), has_unsaved_budget=True)


def open_run(path: Path, stage_kinds: StageKinds) -> Run:
    """Open an existing run from its directory; raise ConfigError if there is none, or its settings are damaged."""
    if not (path / PIPELINE_FILE).is_file():
        raise ConfigError(f"{path} is not a run directory: it has no {PIPELINE_FILE}")
    try:
        run = Run(path.resolve(), load_pipeline(path / PIPELINE_FILE, (), stage_kinds))
    except ConfigError as error:
        raise ConfigError(f"{error}; if another version made the run, continue it with that version") from error
    if run.pipeline.config.private and run.path.stat().st_mode & 0o077:
        # Make the run private again, because copying may have made it public.
        with suppress(PermissionError):  # ignore a run of another user, who alone may change its permissions
            run.path.chmod(0o700)
    return run


def get_flow_runs_folder(output_dir: Path) -> Path:
    """Return the folder with one file per flow run; the file contains the id of the run that the flow run works on."""
    return output_dir / SHARED_FOLDER / "flow_runs"


def record_flow_run(run: Run, flow_run_id: str) -> None:
    """Save the id of a run in a file named after the flow run that works on it, so that each leads to the other."""
    flow_runs_path = get_flow_runs_folder(run.output_dir)
    flow_runs_path.mkdir(parents=True, exist_ok=True)
    write_text(flow_runs_path / flow_run_id, run.id)


def describe_run_removal(run: Run) -> str:
    """Return a warning if a run is below the temporary folder in which a process worker of Prefect starts a flow run
    and which it removes at the end; empty for a run in another folder, or if an artifact store keeps its results."""
    if run.pipeline.config.artifact_store or not any(map(_PREFECT_FOLDER_PATTERN.fullmatch, run.path.parts)):
        return ""
    return f"the worker removes {run.path} at the end of this flow run; set output_dir to an absolute path to keep it"


def claim_run(run: Run, start_time: float | None = None) -> FileLock:
    """Acquire the lock that a process must hold to run the stages of `run`, and save a changed price or budget; raise
    ConfigError if another process holds the lock. `start_time` is the unix time at which this command began; None:
    now."""
    if run_lock := try_claim_run(run, start_time):
        return run_lock
    status_command = f"cosmos status {shlex.quote(str(run.path))}"
    raise ConfigError(f"run {run.id} is being run by another process; wait for it ({status_command}) or stop it")


def try_claim_run(run: Run, start_time: float | None = None) -> FileLock | None:
    """Claim a run as `claim_run` does, but return None if another process is running it."""
    run_lock = FileLock(run.path / "locks" / ".run")
    if not run_lock.try_acquire():
        run_lock.release()
        return None
    local_hosts = {"", socket.gethostname()}
    remote_stages = {path for path in run.path.glob("stages/*") if read_state(path).launcher_host not in local_hosts}
    remove_temporary_files(run.path, lambda file: not remote_stages.isdisjoint(file.parents))
    record_run_holder(run.path, time.time() if start_time is None else start_time)
    if run.has_unsaved_budget:  # change only the budget: another process may have saved other settings
        saved_run = replace_budget(open_run(run.path, run.pipeline.stage_kinds), run.pipeline.config)
        write_text(run.path / PIPELINE_FILE, tomli_w.dumps(saved_run.pipeline.as_toml()))
    return run_lock


def find_run(name_or_path: str, output_dir: Path) -> Path:
    """Return the absolute directory of a run; an empty name, and `latest` unless a run has this name, select the newest
    run. Raise ConfigError, whose message lists the newest runs, if the run does not exist."""
    # Use os.path.isfile, which returns False for an invalid path, for which Path.is_file raises an error.
    if name_or_path and os.path.isfile(Path(name_or_path) / PIPELINE_FILE):
        return Path(name_or_path).resolve()
    run_ids = [start_info.run_id for start_info in list_runs(output_dir)]
    run_id = run_ids[-1] if run_ids and name_or_path in {"", "latest"}.difference(run_ids) else name_or_path
    if run_id in run_ids:
        return (output_dir / run_id).resolve()
    newest_runs_hint = f"; newest there: {', '.join(run_ids[-3:])}" if run_ids else ""
    problem_text = f"no run {repr(name_or_path) if name_or_path else 'at all'} in {output_dir}{newest_runs_hint}"
    raise ConfigError(f"{problem_text}; give its path, or the folder of runs with --output-dir")


def supersede_stage(stage_path: Path) -> None:
    """Move a stage directory to `superseded`, because its fingerprint is outdated or the user wants a rerun."""
    if not stage_path.exists():
        return
    superseded_folder = stage_path.parent.parent / "superseded"
    superseded_folder.mkdir(exist_ok=True)
    superseded_name_parts = [path.name.rpartition(".") for path in superseded_folder.iterdir()]
    suffix = 1 + max((int(suffix) for name, _, suffix in superseded_name_parts if name == stage_path.name), default=0)
    os.rename(stage_path, superseded_folder / f"{stage_path.name}.{suffix}")


def list_attempt_folders(run_path: Path, stage_name: str) -> list[Path]:
    """Return the folder of a stage in a run, followed by the folders of its earlier attempts in `superseded/`."""
    return [run_path / "stages" / stage_name, *(run_path / "superseded").glob(f"{stage_name}.*")]


def create_writable_folder(folder: Path) -> Path:
    """Return the folder as an absolute path, and create it; raise ConfigError if it cannot be created or written."""
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError, RuntimeError) as error:
        # A null byte in the path raises a ValueError, and an unknown user in `~user` raises a RuntimeError.
        problem_text = f"cannot be written: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError(f"pipeline.output_dir = {str(folder)!r} {problem_text}; choose another folder") from error
    return folder


def _create_run_folder(
    output_dir: Path, run_id: str, pipeline_toml: str, start_info: RunStartInfo, max_run_suffix: int
) -> Path:
    """Create the folder of a run atomically. If a run with the id `run_id` exists, append a number to the id; raise
    `ConfigError` if the ids with all numbers up to `max_run_suffix` exist too."""
    if not _RUN_ID_PATTERN.fullmatch(run_id):
        naming_rule_text = "must be a plain folder name of letters, digits, '.', '-' and '_', at most 100"
        raise ConfigError(f"run_id = {run_id!r} {naming_rule_text}")
    shared_folder = output_dir / SHARED_FOLDER
    shared_folder.mkdir(exist_ok=True)
    for stale_folder in shared_folder.glob("new-*"):
        with suppress(FileNotFoundError):  # another command may have removed the folder
            if time.time() - stale_folder.stat().st_mtime > _STALE_FOLDER_AGE_SECONDS:
                shutil.rmtree(stale_folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=shared_folder, ignore_cleanup_errors=True) as folder:
        hidden_folder = Path(folder) / "run"
        (hidden_folder / "stages").mkdir(parents=True)
        write_text(hidden_folder / PIPELINE_FILE, pipeline_toml)
        for suffix in ("", *(f"-{number}" for number in range(2, max_run_suffix + 1))):
            run_path = output_dir / f"{run_id}{suffix}"
            if run_path.exists():
                continue
            write_json(hidden_folder / "run.json", start_info.model_copy(update={"run_id": run_path.name}).model_dump())
            try:
                return hidden_folder.rename(run_path)
            except OSError as error:  # try the next name if another command has created a run of this name
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
    raise ConfigError(f"run_id = {run_id!r} is taken in {output_dir}; wait if a process runs it, or choose another")


def read_start_info(run_path: Path) -> RunStartInfo | None:
    """Return the content of `run.json`, which describes how a run was started; None if it is missing or damaged."""
    return read_document(run_path / "run.json", RunStartInfo)


def list_runs(output_dir: Path) -> list[RunStartInfo]:
    """Return the content of `run.json` of each run in a folder, the oldest run first."""
    paths = [file.parent for file in output_dir.glob(f"*/{PIPELINE_FILE}")]
    start_infos = [(read_start_info(path) or RunStartInfo()).model_copy(update={"run_id": path.name}) for path in paths]
    return sorted(start_infos, key=lambda start_info: (start_info.started, start_info.run_id))


def write_run_list(output_dir: Path) -> None:
    """Write `runs.json`, a list of all runs in a folder, the oldest run first."""
    with FileLock(output_dir / SHARED_FOLDER / "runs.lock") as lock:
        lock.acquire()
        listed_fields = {"run_id", "pipeline", "started"}
        write_json(output_dir / RUNS_FILE, [info.model_dump(include=listed_fields) for info in list_runs(output_dir)])


def find_differing_keys(run_path: Path, pipeline: Pipeline) -> list[str]:
    """Return the keys in which `pipeline` differs from the pipeline from which an existing run was created; raise
    ConfigError if `run.json` is damaged, because the original settings are then unknown."""
    start_info = read_start_info(run_path)
    if start_info is None:
        resume_command = f"cosmos resume {shlex.quote(str(run_path))}"
        raise ConfigError(f"{run_path / 'run.json'} is damaged; continue the run as it is: {resume_command}")
    new_settings = _find_changed_values(pipeline, read_toml(run_path / PIPELINE_FILE))
    return [key for key, value in new_settings.items() if key not in start_info.fixed or start_info.fixed[key] != value]


def _find_changed_values(pipeline: Pipeline, saved_settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `pipeline`, by key, that differ from `saved_settings`, those of another pipeline."""
    current_values, saved_values = _flatten_settings(pipeline.as_toml()), _flatten_settings(saved_settings)
    setting_keys = sorted({*current_values, *saved_values})
    return {key: current_values.get(key) for key in setting_keys if current_values.get(key) != saved_values.get(key)}


def _flatten_settings(settings: Any, key_prefix: str = "") -> dict[str, Any]:
    if isinstance(settings, list) and settings and isinstance(settings[0], dict):
        names = [item.get("name", "") for item in settings]  # number equal names, as of two data sets in a mixture
        settings = {f"{name}[{i}]" if names.count(name) > 1 else name: settings[i] for i, name in enumerate(names)}
    if not isinstance(settings, dict):
        return {key_prefix.rstrip("."): settings}
    nested_items = (_flatten_settings(item, f"{key_prefix}{key}.").items() for key, item in settings.items())
    return dict(chain.from_iterable(nested_items))
