"""What a stage takes from the artifact store of its pipeline before it begins, and leaves there when it ends.

Without an `artifact_store` nothing here does anything: the machines share the folder of runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from cosmos_core.config.compose import source_of
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import Preempted
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.directory import Run, open_run, supersede
from cosmos_core.run.files import write_json
from cosmos_core.run.fingerprint import Fingerprint
from cosmos_core.run.manifest import RESULT, STORED, Result, problem, read_result
from cosmos_core.run.plan import register
from cosmos_core.run.process import is_alive, start_time, this_machine
from cosmos_core.run.state import State, read_state, record_event, update_state
from cosmos_core.upload.artifact_store import ArtifactStore, StoredCheckpoints, StoredRecord, opened
from cosmos_core.upload.lease import Holder, Lease
from cosmos_core.upload.saves import yield_to_others
from tasks.kinds import all_kinds
from tasks.layout import make_room

logger = logging.getLogger(__name__)

OUTPUT_DIR = "COSMOS_OUTPUT_DIR"
"""Variable with the folder of runs of a machine that works on what an artifact store has."""
_RECORD_SECONDS = 10.0
_CHECKPOINT_SECONDS = 1.0


class Stored:
    """One stage of a run, and the store of its pipeline."""

    def __init__(self, run: Run, stage: StageConfig) -> None:
        self._run, self._stage, self._path = run, stage, run.stage_path(stage.name)
        url = run.pipeline.config.artifact_store
        self._store = ArtifactStore(url, partial(sleep_unless_stopping, 0)) if url else None
        self._lease: Lease | None = None

    def receive_inputs(self) -> None:
        """Make the results of the stages in `after` be here, and the outputs of those that this stage reads.

        Raises:
            ConfigError, UploadError: the store refuses, is not reached, or has lost something.
        """
        read = self._read()
        for name in self._stage.after:
            path = self._run.stage_path(name)
            here = read_result(path)
            there = self._store.result(self._name, name) if self._store else None
            result = here if there is None or (here and here["digest"] == there["digest"]) else there
            if result is None:
                continue
            was_fetched = name in read and self._fetched(result, path)
            if was_fetched or result is not here:
                _write(path, result)

    def existing(self, expected: Fingerprint) -> Result | None:
        """Return what any machine has made with a fingerprint, now the result of this stage too; None: nothing."""
        found = self._store.made(expected.value) if self._store else None
        if found is None:
            return None
        make_room(self._path, expected)
        result = found | {"reused_from": f"{found[STORED]}/made/{expected.value}"}
        _write(self._path, result)
        register(self._run.output_dir, self._path, expected.value)
        return result

    @contextmanager
    def lease(self, expected: Fingerprint) -> Iterator[bool]:
        """Hold the right to make what has a fingerprint, of all machines; give whether another held it meanwhile.

        Raises:
            Preempted: asked to stop while waiting.
        """
        if self._store is None:
            yield False
            return
        self._lease = self._store.lease(expected.value, _me(), _is_gone)

        def wait(holder: Holder) -> None:
            update_state(self._path, state="waiting", error=f"{holder.machine.partition('/')[0]} makes the same result")
            sleep_unless_stopping(0)

        waited = self._lease.acquire(wait)
        try:
            yield waited
        finally:
            self._lease.release()

    def loss(self) -> str:
        """Return why this machine must make the stage no longer, or an empty string."""
        return self._lease.loss if self._lease else ""

    @contextmanager
    def sending(self, expected: Fingerprint) -> Iterator[None]:
        """Begin with the newest checkpoint that any machine has stored; store those that are saved, and what shows how
        far the stage is, for as long as the block lasts. A store that fails meanwhile costs a warning."""
        if self._store is None:
            yield
            return
        checkpoints = self._store.checkpoints(expected.value, self._path)
        state = read_state(self._path)
        if state.forced and not state.attempt:
            checkpoints.clear()
        elif name := checkpoints.pull():
            record_event(self._path, "fetched", f"{name} from {self._store.url}")
        stop, record = threading.Event(), self._record()
        loops = [
            threading.Thread(target=_repeat, args=(each, seconds, stop, self._path), daemon=True)
            for each, seconds in (
                (partial(self._push, checkpoints, stop), _CHECKPOINT_SECONDS),
                (record.push, _RECORD_SECONDS),
            )
        ]
        for loop in loops:
            loop.start()
        try:
            try:
                yield
            finally:
                stop.set()
                for loop in loops:
                    loop.join()
        except BaseException:
            # What it saved when it was stopped, for whoever goes on.
            _once(partial(self._push, checkpoints, threading.Event()), self._path)
            raise

    def send(self, result: Result) -> Result:
        """Store a result of this stage, its manifest last: that makes the stage complete for every machine.

        Raises:
            ConfigError, UploadError: the store refuses, or is not reached.
            StageFailed: another machine has taken the work over.
        """
        if self._store is None:
            return result
        if self._lease:
            self._lease.check()
        if result.get(STORED) != self._store.url:
            self._fetched(result, self._path)  # of another store
            self._store.put_outputs(self._path, result)
            if self._run.pipeline.kind_of(self._stage).is_reusable:
                self._store.put_made(result)
            result = result | {STORED: self._store.url}
            _write(self._path, result)
        self._record().push(is_last=True)
        self._store.put_result(self._name, self._stage.name, result)
        return result

    def send_record(self) -> None:
        """Store where the stage stands, if the store can be reached."""
        if self._store is not None:
            _once(lambda: self._record().push(is_last=True), self._path)

    def send_run(self) -> str:
        """Store what another machine needs to begin this stage; return what it is to be given: the directory of the
        run, or its URL in the store."""
        if self._store is None:
            return str(self._run.path)
        record = self._record()
        there = record.state()
        if there is not None and there.forced_by == read_state(self._path).forced_by:
            record.pull()  # who worked on it may have gone on after this machine looked last
        record.push(is_last=True)
        return self._store.put_run(self._run.path)

    def mirror(self) -> Callable[[], None]:
        """Return what makes this machine show what the one says that works on the stage."""
        if self._store is None:
            return lambda: None
        return partial(_once, lambda: self._record().pull(), self._path)

    def receive_result(self) -> Result | None:
        """Return the result of this stage, wherever it was made; None: it is not complete.

        Raises:
            ConfigError, UploadError: the store refuses, or is not reached.
        """
        if self._store is None:
            return read_result(self._path)
        self._record().pull()
        result = self._store.result(self._name, self._stage.name)
        if result is not None and read_result(self._path) != result:
            _write(self._path, result)
        return result

    def receive_state(self) -> None:
        """Go on from where the stage stands by the machine that worked on it last."""
        if self._store is None:
            return
        here, record = read_state(self._path), self._record()
        there = record.state()
        if there is None:
            return
        if there.forced and there.forced_by != here.forced_by:
            supersede(self._path)
            here = State()
        if there.attempt > here.attempt or not (self._path / "state.json").is_file():
            record.pull()

    def _fetched(self, result: Result, path: Path) -> bool:
        """Whether outputs that were missing here were fetched from the store that has them."""
        url = result.get(STORED)
        if not url or _is_here(path, result):
            return False
        ArtifactStore(url, partial(sleep_unless_stopping, 0)).fetch_outputs(result, path, self._files_here())
        return True

    def _push(self, checkpoints: StoredCheckpoints, stop: threading.Event) -> None:
        def pause() -> None:
            if stop.is_set():
                raise Preempted("the training has ended")

        if not (self._lease and self._lease.is_lost):  # else another machine sends, and removes what it does not keep
            for name in checkpoints.push(pause):
                record_event(self._path, "sent", name)

    def _record(self) -> StoredRecord:
        assert self._store is not None
        return self._store.record(self._name, self._path, this_machine())

    @cached_property
    def _name(self) -> str:
        """Of the run in the store, where it may not be the first of this id."""
        assert self._store is not None
        return self._store.put_run(self._run.path).rpartition("/")[2]

    def _read(self) -> set[str]:
        """The stages whose outputs this one reads, beside their metrics."""
        kind, recipe = self._run.pipeline.kind_of(self._stage), self._run.pipeline.recipes[self._stage.name]
        if self._stage.entry:
            return set(self._stage.after)
        teacher = recipe.teacher_of(kind)
        named = (self._stage.model, self._stage.data, teacher.model_name_or_path if teacher else "")
        return {name for name in map(source_of, named) if name}

    def _files_here(self) -> dict[str, Path]:
        """Outputs of the run's stages that are on this machine, by digest."""
        found = {}
        for stage in self._run.pipeline.stages:
            path = self._run.stage_path(stage.name)
            for record in (read_result(path) or {"outputs": ()})["outputs"]:
                if (path / record["path"]).is_file():
                    found[record["sha256"]] = path / record["path"]
        return found


def received(url: str, name: str) -> Run:
    """Open the run with that URL in a store, on a machine that may have nothing of it; `name` is the stage to go on
    with.

    Raises:
        ConfigError, UploadError: the store refuses, is not reached, or has no such run.
    """
    path = opened(url, os.environ.get(OUTPUT_DIR, ""), partial(sleep_unless_stopping, 0))
    run = open_run(path, all_kinds())
    Stored(run, run.pipeline.stage(name)).receive_state()
    return run


def _is_here(path: Path, result: Result) -> bool:
    return all((path / record["path"]).is_file() for record in result["outputs"]) and problem(path, result) is None


def _write(path: Path, result: Result) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / RESULT, result)


def _repeat(what: Callable[[], object], seconds: float, stop: threading.Event, path: Path) -> None:
    yield_to_others()
    while not stop.wait(seconds):
        _once(what, path)


def _once(what: Callable[[], object], path: Path) -> None:
    try:
        what()
    except Preempted:
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the stage goes on, and so does the thread that sends
        logger.warning("%s: the artifact store has not everything, it is tried again: %s", path.name, error)


def _me() -> Holder:
    return Holder(this_machine(), os.getpid(), start_time(os.getpid()))


def _is_gone(holder: Holder) -> bool:
    return holder.machine == this_machine() and not is_alive(holder.pid, holder.started)
