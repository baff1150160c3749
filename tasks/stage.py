"""The one body that all stages share: reuse what is proven, or launch, verify and publish what was made.

We decide about reuse, not Prefect: its cache returns a result without looking at the files. Prefect's retries are set
high and `should_retry`, which reads `state.json`, is the only policy.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from cosmos_core.config.compose import source_of
from cosmos_core.config.load import without_none
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import EXIT_USAGE, ConfigError, CosmosError, GateFailed, Preempted, StageFailed
from cosmos_core.launch import worker
from cosmos_core.launch.processes import start_time
from cosmos_core.registry import import_thing
from cosmos_core.run import manifest
from cosmos_core.run.directory import Run, open_run, supersede
from cosmos_core.run.files import read_json
from cosmos_core.run.fingerprint import Fingerprint, fingerprint, threads
from cosmos_core.run.lock import Lock
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.plan import FINGERPRINT, Decision, decide, fingerprint_folder, register, save_fingerprint
from cosmos_core.run.stage import load_stage
from cosmos_core.run.state import read_state, record_event, update_state
from tasks.artifacts import StageArtifacts, name_flow_run, show_run
from tasks.kinds import all_kinds

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 60.0
_RETRIES = 100_000  # Prefect's own count never decides


@worker.stoppable()
def run_stages(run: Run, names: Sequence[str], *, verify: bool = False) -> State[Any]:
    """Bring stages, in topological order, to their results, independent ones in parallel; the final state of the flow.

    A flow that is cancelled or terminated asks its workers to save a checkpoint and waits for them.
    """
    name_flow_run(run.pipeline.config.name, run.id, *(names if len(names) < len(run.pipeline.stages) else ()))
    futures: dict[str, PrefectFuture[Any]] = {}
    try:
        _listen_for_stop(run)
        for name in names:
            upstream = [futures[other] for other in run.pipeline.stage(name).after if other in futures]
            futures[name] = stage_task(run.path, name).submit(str(run.path), name, verify, wait_for=upstream)
        wait(list(futures.values()))
    except (TerminationSignal, KeyboardInterrupt):
        # Termination reaches this thread alone; the tasks wait in others and would not notice.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.stop_all()
        wait(list(futures.values()), timeout=run.pipeline.config.grace_seconds + 5)
        raise
    show_run(run.path)
    bad = [name for name, future in futures.items() if not future.state.is_completed()]
    if bad:
        return Failed(
            message=f"run {run.id}: not completed: {', '.join(bad)}; continue it with: cosmos resume {run.path}"
        )
    return Completed(message=f"run {run.id}: {len(futures)} stages completed", data=str(run.path))


def _listen_for_stop(run: Run) -> None:
    """`train.signal_to_handle` stops the flow as SIGTERM does, for which Prefect listens itself."""

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    if threading.current_thread() is threading.main_thread():
        for name in {name for recipe in run.pipeline.recipes.values() for name in recipe.train.signal_to_handle}:
            signal.signal(signal.Signals[name], terminate)


def stage_task(run_path: Path, name: str) -> Any:
    """A Prefect task that brings the stage `name` of a run to its result; call `.submit()` on it."""

    def condition(_task: object, _run: object, state: State[Any]) -> bool:
        return should_retry(run_path, name, state.data)

    decorate = task(
        name=name,
        task_run_name=name,
        retries=_RETRIES,
        retry_condition_fn=condition,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    return decorate(_run_stage)


def should_retry(run_path: Path, name: str, error: object) -> bool:
    """The retry policy: never a user's mistake, always a preemption, a crash until `retries` brought no progress."""
    if worker.is_stopping() or not isinstance(error, CosmosError) or isinstance(error, GateFailed):
        return False  # what is no error of ours could not even be counted: the disk may be full
    if isinstance(error, Preempted):
        return True
    if error.exit_code == EXIT_USAGE:
        return False
    run = open_run(run_path, all_kinds())
    return int(read_state(run.stage_path(name))["failures"]) <= run.pipeline.stage(name).retries


def _run_stage(run_path: str, name: str, verify: bool = False) -> State[Any] | Result:
    run = open_run(Path(run_path), all_kinds())
    log = get_run_logger()
    artifacts = StageArtifacts(run.id, run.stage_path(name))
    result, was_reused = perform(run, name, verify=verify, on_progress=artifacts.update, on_line=log.info)
    artifacts.finish(result)
    return (
        Completed(name="Reused", data=result, message=result["reused_from"] or "done in this run")
        if was_reused
        else result
    )


def perform(
    run: Run,
    name: str,
    *,
    verify: bool = False,
    on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
    on_line: Callable[[str], None] = lambda _: None,
) -> tuple[Result, bool]:
    """Bring one stage to its result; (result, whether it was there already). Its inputs are done.

    `verify` hashes every file that would be reused.

    Raises:
        CosmosError: as `launch.worker.run`, or an input is missing.
    """
    stage, path = run.pipeline.stage(name), run.stage_path(name)
    with Lock(run.path / "locks" / f"{name}.lock") as lock:
        lock.acquire(while_waiting=_owner_watch(path, run.pipeline.config.grace_seconds))
        worker.reap(path)
        try:
            _take_charge(path)
            print_ = _fingerprint(run, stage)
            if found := _existing(run, stage, print_, thorough=verify):
                return found, True
            if not run.kinds[stage.kind].in_worker:
                return _in_this_process(run, stage, print_), False
            return _made_once(run, stage, print_, lock, on_progress, on_line)
        except CosmosError as error:
            _record_failure(path, error)
            raise
        except Exception as error:  # a bug or a broken disk here is one failed attempt, never an endless retry
            logger.exception("stage %r", name)
            failure = StageFailed(f"stage {name!r}: {type(error).__name__}: {' '.join(str(error).split())}")
            _record_failure(path, failure)
            raise failure from error


def _fingerprint(run: Run, stage: StageConfig) -> Fingerprint:
    upstream = {name: result["digest"] for name, result in _inputs(run, stage).items()}
    return fingerprint(run.pipeline, stage, run.kinds[stage.kind], upstream, run.digests)


def _made_once(
    run: Run,
    stage: StageConfig,
    print_: Fingerprint,
    lock: Lock,
    on_progress: Callable[[dict[str, Any]], None],
    on_line: Callable[[str], None],
) -> tuple[Result, bool]:
    """Make the result in a worker, unless another run is making the same: then wait for it and take it over."""
    path = run.stage_path(stage.name)
    with Lock(fingerprint_folder(run.output_dir, print_.value) / "lock") as shared:
        if not shared.try_acquire():
            update_state(path, state="waiting", error="another run is making the same result")
            shared.acquire(while_waiting=lambda: worker.sleep_unless_stopping(0))
            if found := _existing(run, stage, print_):
                return found, True
        _lay_out(run, stage, print_)
        result = worker.run(
            worker.Launch(
                stage_path=path,
                python=run.pipeline.config.python,
                threads=threads(run.pipeline),
                grace_seconds=run.pipeline.config.grace_seconds,
                timeout_seconds=stage.timeout_seconds,
                locks=(lock.descriptor, shared.descriptor),
                on_progress=on_progress,
                on_line=on_line,
            )
        )
        _finish(run, stage, print_)
        return result, False


def _inputs(run: Run, stage: StageConfig) -> dict[str, Result]:
    """Results of the stages in `after`, each with its `path`."""
    inputs = {}
    for name in stage.after:
        result = read_result(run.stage_path(name))
        if result is None:
            raise StageFailed(f"stage {stage.name!r} needs the result of {name!r}, which is not there")
        inputs[name] = {**result, "path": str(run.stage_path(name))}
    return inputs


def _existing(run: Run, stage: StageConfig, print_: Fingerprint, *, thorough: bool = False) -> Result | None:
    """A verified result with this fingerprint, of this run or taken over from another."""
    path = run.stage_path(stage.name)
    state = read_state(path)
    if state.get("forced") and read_result(path) is None:
        return None
    is_reusable = run.kinds[stage.kind].is_reusable
    decision: Decision = decide(run.output_dir, path, print_, is_reusable=is_reusable, thorough=thorough)
    if decision.action == "run":
        return None
    assert decision.result is not None and decision.source is not None
    result = decision.result
    if decision.action == "adopt":
        _make_room(path, print_)
        save_fingerprint(path, print_)
        result = manifest.adopt(decision.source, path, decision.result)
        register(run.output_dir, path, print_.value)
    if state["state"] not in {"done", "reused"} or decision.action == "adopt":
        record_event(path, "reused", decision.reason)
        update_state(path, state="reused", started=time.time(), ended=time.time(), error="")
    return result


def _lay_out(run: Run, stage: StageConfig, print_: Fingerprint) -> None:
    """Make the stage directory say what is to be done; content of another fingerprint is moved aside, not mixed in."""
    path = run.stage_path(stage.name)
    _make_room(path, print_)
    (path / manifest.RESULT).unlink(missing_ok=True)
    save_fingerprint(path, print_)
    kind = run.kinds[stage.kind]
    inputs = _inputs(run, stage)
    recipe = run.pipeline.recipes[stage.name]
    keys = ("path", "fingerprint", "digest", "metrics", "info")
    spec = {
        "entry": kind.entry or stage.entry,
        "fingerprint": print_.value,
        "model": _output(stage, "model", inputs) or recipe.policy.model_name_or_path,
        "data": _output(stage, "data", inputs),
        "kind": asdict(kind),
        "stage": stage.model_dump(),
        "recipe": recipe.model_dump(),
        "inputs": {name: {key: result[key] for key in keys} for name, result in inputs.items()},
    }
    (path / "stage.toml").write_text(tomli_w.dumps(without_none(spec)), encoding="utf-8")


def _make_room(path: Path, print_: Fingerprint) -> None:
    """Content of another fingerprint is moved aside, and said so: a checkpoint among it will not be continued."""
    saved = read_json(path / FINGERPRINT)
    if isinstance(saved, dict) and saved.get("value") != print_.value:
        changed = "; ".join(print_.difference(saved["ingredients"])[:3])
        supersede(path)
        record_event(path, "superseded", changed)
        logger.warning("stage %s starts anew, its earlier files are in superseded/: %s", path.name, changed)
    path.mkdir(parents=True, exist_ok=True)


def _output(stage: StageConfig, key: str, inputs: dict[str, Result]) -> str:
    """The folder that `model = "stage:NAME"` or `data = "stage:NAME"` names, or the folder written there."""
    reference: str = getattr(stage, key)
    name = source_of(reference)
    if name is None:
        return reference
    output = inputs[name]["info"].get(key)
    if not output:
        raise ConfigError(
            f"stage {stage.name!r}: {key} = {reference!r}, but stage {name!r} (kind {inputs[name]['kind']}) "
            f"makes no {key}"
        )
    return str(Path(inputs[name]["path"]) / str(output))


def _in_this_process(run: Run, stage: StageConfig, print_: Fingerprint) -> Result:
    """A light stage: no worker, no torch."""
    path = run.stage_path(stage.name)
    _lay_out(run, stage, print_)
    began = time.time()
    attempt = int(read_state(path)["attempt"]) + 1
    update_state(path, state="running", attempt=attempt, started=began, ended=None, error="")
    record_event(path, "started", f"attempt {attempt}")
    loaded = load_stage(path)
    outcome = import_thing(run.kinds[stage.kind].entry)(loaded)
    result = manifest.commit(
        path, outcome, name=stage.name, kind=stage.kind, fingerprint=print_.value, inputs=loaded.inputs
    )
    _finish(run, stage, print_)
    return result


def _finish(run: Run, stage: StageConfig, print_: Fingerprint) -> None:
    path = run.stage_path(stage.name)
    register(run.output_dir, path, print_.value)
    update_state(path, state="done", ended=time.time(), error="", failures=0, forced=False)
    record_event(path, "done")


def _record_failure(path: Path, error: CosmosError) -> None:
    """Count attempts without progress; a preemption is not one."""
    state = read_state(path)
    gained = (state.get("checkpoint_step") or 0) > (state.get("failed_at") or 0)
    failures = state["failures"] if isinstance(error, Preempted) else 1 if gained else state["failures"] + 1
    kind = "stopped" if isinstance(error, Preempted) else "failed"
    update_state(
        path, state=kind, failures=failures, failed_at=state.get("checkpoint_step"), error=str(error),
        error_type=type(error).__name__, exit_code=error.exit_code, ended=time.time(),
    )  # fmt: skip
    record_event(path, "preempted" if isinstance(error, Preempted) else "crashed", str(error))


def _take_charge(path: Path) -> None:
    """Note that this process runs the stage; wait before another attempt of its own after a crash: 1, 2, 4 ... 60 s.

    A new process, that is a person's resume, starts with a full budget of attempts and without a wait.
    """
    state = read_state(path)
    if state.get("launcher_pid") != os.getpid():
        update_state(path, launcher_pid=os.getpid(), launcher_started=start_time(os.getpid()), failures=0)
    elif state["state"] == "failed":
        update_state(path, state="retrying")
        worker.sleep_unless_stopping(min(_MAX_BACKOFF_SECONDS, 2.0 ** (int(state["failures"]) - 1)))


def _owner_watch(path: Path, grace_seconds: float) -> Callable[[], None]:
    """Called while the stage is locked: an orphan may use its grace to save, then it is reaped; a live owner is
    waited for."""
    began = time.monotonic()

    def watch() -> None:
        worker.sleep_unless_stopping(0)
        if time.monotonic() - began > grace_seconds:
            worker.reap(path)

    return watch
