"""Exchange the inputs, outputs and checkpoints of a stage with the artifact store of its pipeline.

Without an `artifact_store` the methods do nothing, because all machines share the folder of runs.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from pathlib import Path

from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.error_handling import cleanup_on_error, log_errors
from cosmos_core.errors import Preempted
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.directory import Run, open_run, supersede_stage
from cosmos_core.run.files import write_json
from cosmos_core.run.fingerprint import Fingerprint
from cosmos_core.run.manifest import RESULT_FILE, STORE_URL_KEY, Result, find_output_damage, read_result
from cosmos_core.run.process import identify_machine, is_alive, read_start_time
from cosmos_core.run.state import StageState, read_state, record_event, update_state
from cosmos_core.upload.artifact_store import ArtifactStore, StoredCheckpoints, StoredRecord, open_stored_run
from cosmos_core.upload.checkpoint_upload import lower_cpu_priority
from cosmos_core.upload.lease import Lease, LeaseHolder
from tasks.kinds import all_kinds
from tasks.layout import supersede_outdated_stage

logger = logging.getLogger(__name__)

OUTPUT_DIR_VARIABLE = "COSMOS_OUTPUT_DIR"
"""Environment variable with the folder of runs, for machines that execute stages of runs in an artifact store."""
_RECORD_PUSH_SECONDS = 10.0
_CHECKPOINT_POLL_SECONDS = 1.0


class StageSync:
    """Transfer of the files of one stage between this machine and the artifact store of its pipeline."""

    def __init__(self, run: Run, stage: StageConfig) -> None:
        self._run, self._stage, self._stage_path = run, stage, run.stage_path(stage.name)
        store_url = run.pipeline.config.artifact_store
        self._store = ArtifactStore(store_url, partial(sleep_unless_stopping, 0)) if store_url else None
        self._lease: Lease | None = None

    def receive_inputs(self) -> None:
        """Fetch the manifests of the stages in `after`, and the output files of those stages whose files this stage
        reads, from the artifact store. Raises `ConfigError` or `UploadError` if the store cannot be accessed or has
        lost a file."""
        input_stages = {referenced_stage(each.location) for each in self._run.pipeline.inputs(self._stage)}
        stage_kind = self._run.pipeline.stage_kind(self._stage)
        # A stage that merges models, or selects one, names them only in `after`, so it reads all stages listed there.
        reads_all_stages = bool(self._stage.entry) or stage_kind.selects_branch or stage_kind.merges_models
        for name in self._stage.after:
            upstream_path = self._run.stage_path(name)
            local_result = read_result(upstream_path)
            stored_result = self._store.read_result(self._stored_run_name, name) if self._store else None
            result = stored_result or local_result
            if local_result and stored_result and local_result["digest"] == stored_result["digest"]:
                result = local_result
            if result is None:
                continue
            # Fetch no files of a stage of which this stage reads only the metrics, because the manifest contains them.
            needs_output_files = reads_all_stages or name in input_stages
            has_fetched_files = needs_output_files and self._fetch_missing_outputs(result, upstream_path)
            if has_fetched_files or result is not local_result:
                _write_result(upstream_path, result)

    def find_result(self, expected_fingerprint: Fingerprint) -> Result | None:
        """Adopt a result with the expected fingerprint, which any machine may have put into the artifact store, as the
        result of this stage, and return it; return None if the store has no such result."""
        stored_result = self._store.find_stored_result(expected_fingerprint.value) if self._store else None
        if stored_result is None:
            return None
        supersede_outdated_stage(self._stage_path, expected_fingerprint)
        result = stored_result | {"reused_from": f"{stored_result[STORE_URL_KEY]}/made/{expected_fingerprint.value}"}
        _write_result(self._stage_path, result)
        return result

    @contextmanager
    def hold_result_lease(self, expected_fingerprint: Fingerprint) -> Iterator[bool]:
        """Hold the exclusive right among all machines to make the result with the expected fingerprint during the
        `with` block. Yield True if this machine had to wait for another machine that held the right. Raises `Preempted`
        if this process was requested to stop while it waited."""
        if self._store is None:
            yield False
            return
        lease_holder = LeaseHolder(identify_machine(), os.getpid(), read_start_time(os.getpid()))
        self._lease = self._store.lease_result(expected_fingerprint.value, lease_holder, _is_holder_dead)

        def report_and_wait(lease_holder: LeaseHolder) -> None:
            machine_name = lease_holder.machine.partition("/")[0]
            update_state(self._stage_path, state="waiting", error=f"{machine_name} makes the same result")
            sleep_unless_stopping(0)

        has_waited_for_holder = self._lease.acquire(report_and_wait)
        try:
            yield has_waited_for_holder
        finally:
            self._lease.release()

    def get_lease_loss_reason(self) -> str:
        """Return the reason why this machine has lost the exclusive right to make the result, and must stop the stage;
        empty if the stage can continue."""
        return self._lease.takeover_message if self._lease else ""

    @contextmanager
    def sync_checkpoints(self, expected_fingerprint: Fingerprint) -> Iterator[None]:
        """Fetch the newest checkpoint that any machine has stored for the training with the expected fingerprint. Then,
        during the `with` block, store each new checkpoint and the progress of the stage. A failure of the artifact
        store within the block is only logged."""
        if self._store is None:
            yield
            return
        stored_checkpoints = self._store.open_checkpoints(expected_fingerprint.value, self._stage_path)
        stage_state = read_state(self._stage_path)
        if stage_state.forced and not stage_state.attempt:
            stored_checkpoints.clear()
        elif checkpoint_name := stored_checkpoints.pull():
            record_event(self._stage_path, "fetched", f"{checkpoint_name} from {self._store.url}")
        stop_event, stored_record = threading.Event(), self._open_stored_record()
        push_checkpoints = partial(self._push_checkpoints, stored_checkpoints, stop_event)
        periodic_functions = ((push_checkpoints, _CHECKPOINT_POLL_SECONDS), (stored_record.push, _RECORD_PUSH_SECONDS))
        sync_threads = [
            threading.Thread(target=_call_periodically, args=(*each, stop_event, self._stage_path), daemon=True)
            for each in periodic_functions
        ]
        for sync_thread in sync_threads:
            sync_thread.start()
        # A stopped worker has saved a checkpoint: send it to the store, from which any machine continues.
        push_last_checkpoint = partial(self._push_checkpoints, stored_checkpoints, threading.Event())
        with cleanup_on_error(partial(_call_with_logged_errors, push_last_checkpoint, self._stage_path)):
            try:
                yield
            finally:
                stop_event.set()
                for sync_thread in sync_threads:
                    sync_thread.join()

    def send_result(self, result: Result) -> Result:
        """Send a result of this stage to the artifact store and return it. The manifest is sent last, which makes the
        stage complete for all machines. Raises `ConfigError` or `UploadError` if the store refuses access or cannot be
        reached, and `StageFailed` if another machine has taken over the stage."""
        if self._store is None:
            return result
        if self._lease:
            self._lease.check()
        if result.get(STORE_URL_KEY) != self._store.url:
            self._fetch_missing_outputs(result, self._stage_path)  # get output files that only another store has
            self._store.put_outputs(self._stage_path, result)
            if self._run.pipeline.stage_kind(self._stage).is_reusable:
                self._store.store_result(result)
            result = result | {STORE_URL_KEY: self._store.url}
            _write_result(self._stage_path, result)
        self._open_stored_record().push(is_final_push=True)
        self._store.put_result(self._stored_run_name, self._stage.name, result)
        return result

    def send_stage_state(self) -> None:
        """Send the state of the stage to the artifact store, if the store can be reached."""
        if self._store is not None:
            _call_with_logged_errors(lambda: self._open_stored_record().push(is_final_push=True), self._stage_path)

    def send_run(self) -> str:
        """Send what another machine needs to run this stage to the artifact store. Return the URL of the run in the
        store, or the run's directory if there is no store."""
        stored_record = self._open_stored_record() if self._store else None
        stored_state = stored_record.read_state() if stored_record else None
        if stored_record and stored_state and stored_state.forced_by == read_state(self._stage_path).forced_by:
            stored_record.pull()  # fetch the progress that another machine may have made
        # Remove the old error: it would be reported if the next machine is lost before it records its own error.
        if read_state(self._stage_path).state in {"failed", "stopped"}:
            update_state(self._stage_path, state="waiting", error="", error_type="")
        if self._store is None or stored_record is None:
            return str(self._run.path)
        stored_record.push(is_final_push=True)
        return self._store.put_run(self._run.path, has_new_stages=True)

    def make_progress_mirror(self) -> Callable[[], None]:
        """Return a function that fetches the state and progress of the stage from the artifact store, for display."""
        if self._store is None:
            return lambda: None
        # All calls use the same `StoredRecord`, because it remembers which files it has fetched.
        open_stored_record_once = cache(self._open_stored_record)
        return partial(_call_with_logged_errors, lambda: open_stored_record_once().pull(), self._stage_path)

    def receive_result(self) -> Result | None:
        """Return the manifest of this stage from any machine; None if the stage is not complete. Raises `ConfigError`
        or `UploadError` if the artifact store refuses access or cannot be reached."""
        if self._store is None:
            return read_result(self._stage_path)
        self._open_stored_record().pull()
        stored_result = self._store.read_result(self._stored_run_name, self._stage.name)
        if stored_result is not None and read_result(self._stage_path) != stored_result:
            _write_result(self._stage_path, stored_result)
        return stored_result

    def receive_state(self) -> None:
        """Fetch the state of the stage from the artifact store if another machine has worked on the stage in the
        meantime."""
        if self._store is None:
            return
        local_state, stored_record = read_state(self._stage_path), self._open_stored_record()
        if (stored_state := stored_record.read_state()) is None:
            return
        if stored_state.forced and stored_state.forced_by != local_state.forced_by:
            supersede_stage(self._stage_path)
            local_state = StageState()
        if stored_state.attempt > local_state.attempt or not (self._stage_path / "state.json").is_file():
            stored_record.pull()

    def _fetch_missing_outputs(self, result: Result, stage_path: Path) -> bool:
        """Fetch the outputs of a result from its artifact store if one of them is missing or damaged on this machine;
        return True if they were fetched."""
        store_url = result.get(STORE_URL_KEY)
        are_outputs_present = all((stage_path / record["path"]).is_file() for record in result["outputs"])
        if not store_url or (are_outputs_present and find_output_damage(stage_path, result) is None):
            return False
        stage_paths = [self._run.stage_path(stage.name) for stage in self._run.pipeline.stages]
        paths_and_results = [(path, other) for path in stage_paths if (other := read_result(path))]
        output_files = [
            (each["sha256"], path / each["path"]) for path, other in paths_and_results for each in other["outputs"]
        ]
        local_files = {digest: file for digest, file in output_files if file.is_file()}
        ArtifactStore(store_url, partial(sleep_unless_stopping, 0)).fetch_outputs(result, stage_path, local_files)
        return True

    def _push_checkpoints(self, stored_checkpoints: StoredCheckpoints, stop_event: threading.Event) -> None:
        def raise_if_training_ended() -> None:
            if stop_event.is_set():
                raise Preempted("the training has ended")

        if not (self._lease and self._lease.is_lost):  # after the loss of the lease, its new holder sends checkpoints
            for checkpoint_name in stored_checkpoints.push(raise_if_training_ended):
                record_event(self._stage_path, "sent", checkpoint_name)

    def _open_stored_record(self) -> StoredRecord:
        assert self._store is not None
        return self._store.open_record(self._stored_run_name, self._stage_path, identify_machine())

    @cached_property
    def _stored_run_name(self) -> str:
        """Return the name of the run in the artifact store: its id, or another name if another run in the store has
        this id."""
        assert self._store is not None
        return self._store.put_run(self._run.path).rpartition("/")[2]


def open_run_from_store(run_url: str, stage_name: str) -> Run:
    """Open the run at a URL in an artifact store, on a machine that may not have its files yet, and fetch the state of
    the stage `stage_name`. Raises `ConfigError` or `UploadError` if the store cannot be accessed or has no such run."""
    run_path = open_stored_run(run_url, os.environ.get(OUTPUT_DIR_VARIABLE, ""), partial(sleep_unless_stopping, 0))
    run = open_run(run_path, all_kinds())
    StageSync(run, run.pipeline.stage(stage_name)).receive_state()
    return run


def _write_result(stage_path: Path, result: Result) -> None:
    stage_path.mkdir(parents=True, exist_ok=True)
    write_json(stage_path / RESULT_FILE, result)


def _call_periodically(
    sync_function: Callable[[], object], period_seconds: float, stop_event: threading.Event, stage_path: Path
) -> None:
    lower_cpu_priority()
    while not stop_event.wait(period_seconds):
        _call_with_logged_errors(sync_function, stage_path)


def _call_with_logged_errors(sync_function: Callable[[], object], stage_path: Path) -> None:
    warning_template = "%s: the artifact store has not everything, it is tried again: %s"
    with log_errors(partial(logger.warning, warning_template, stage_path.name)), suppress(Preempted):
        sync_function()


def _is_holder_dead(holder: LeaseHolder) -> bool:
    return holder.machine == identify_machine() and not is_alive(holder.pid, holder.started)
