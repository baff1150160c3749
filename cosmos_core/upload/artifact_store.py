"""What machines that share no disk share instead: `artifact_store = "s3://BUCKET/PREFIX"`.

    objects/<ab>/<sha256>                         outputs of stages, each content once
    made/<fingerprint>/result.json                what was made with it: reuse looks there
    made/<fingerprint>/lease.json                 who makes it now
    made/<fingerprint>/checkpoints/step_<N>.json  of the training; their objects lie below content/, and go with them
    runs/<run>/run.json                           pipeline.toml and run.json; <run>-2 where another run has the name
    runs/<run>/stages/<name>/result.json          written last: with it the stage is complete
    runs/<run>/stages/<name>/record.json          state, metrics, samples, logs: for other machines to show

Every document is written after what it names. Outputs stay until `store_retention` removes them.
"""

from __future__ import annotations

import itertools
import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.compose import Pipeline
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.run.bucket import SCHEME, Bucket, split_url, translate_errors
from cosmos_core.run.directory import read_facts
from cosmos_core.run.files import write_text
from cosmos_core.run.manifest import RESULT, STORED, Result
from cosmos_core.upload.bundle import Contents, Entry, exchange_document, read_document, write_document
from cosmos_core.upload.lease import Holder, Lease
from cosmos_core.upload.saves import FOLDER
from cosmos_core.upload.stored_checkpoints import JOURNAL, StoredCheckpoints
from cosmos_core.upload.stored_record import StoredRecord

logger = logging.getLogger(__name__)

_PIPELINE, _FACTS = RUN_FILES = ("pipeline.toml", "run.json")
_RUNS = "/runs/"


class ArtifactStore:
    """The store below one URL; its methods raise ConfigError or UploadError, in one line, where it fails."""

    def __init__(self, url: str, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called between files and parts, and raises where the run is to stop."""
        name, self._prefix = split_url(url)
        self.url = f"{SCHEME}{name}/{self._prefix}".rstrip("/")
        self._bucket = Bucket(name)
        self._objects = Contents(self._bucket, self._key("objects"), pause)

    def check(self) -> None:
        """Find out whether the bucket can be reached, and change nothing."""
        self._bucket.check()

    def put_run(self, run_path: Path) -> str:
        """Store what a run is, unless it is there; return its URL, which `opened` takes.

        Runs that began on two machines in the same second have one name, and two in the store.
        """
        files, facts = {name: _text(run_path / name) for name in RUN_FILES}, read_facts(run_path)
        run_id = facts.run_id if facts and facts.run_id else run_path.name  # a machine that opened it may say otherwise
        names = (f"{run_id}{suffix}" for suffix in _suffixes())
        with translate_errors(self.url):
            return f"{self.url}{_RUNS}{next(name for name in names if self._has_run(name, files))}"

    def run(self, run_id: str) -> dict[str, str]:
        """Return the files that say what a run is."""
        found = self._read(f"runs/{run_id}/run.json")
        if found is None:
            raise ConfigError(f"{self.url}{_RUNS}{run_id}: there is no such run")
        return found

    def put_outputs(self, stage_path: Path, result: Result) -> None:
        """Store the outputs of a finished stage, each content once."""
        files = {record["sha256"]: stage_path / record["path"] for record in result["outputs"]}
        with translate_errors(self.url):
            self._objects.send(files, stage_path / JOURNAL)

    def put_result(self, run_id: str, stage: str, result: Result) -> None:
        """Make a stage of a run complete: its outputs are there."""
        self._write(f"runs/{run_id}/stages/{stage}/{RESULT}", result)

    def put_made(self, result: Result) -> None:
        """Let other runs find what was made with a fingerprint: its outputs are there."""
        self._write(f"made/{result['fingerprint']}/{RESULT}", result)

    def result(self, run_id: str, stage: str) -> Result | None:
        """Return the manifest of a stage of a run; None: it is not complete."""
        return self._stored(f"runs/{run_id}/stages/{stage}/{RESULT}")

    def made(self, fingerprint: str) -> Result | None:
        """Return what was made with a fingerprint, if every output is there in its size; None: make it."""
        found = self._stored(f"made/{fingerprint}/{RESULT}")
        if found is None:
            return None
        with translate_errors(self.url):
            if missing := self._objects.missing(map(_entry, found["outputs"])):
                logger.warning("%s/objects/%s is gone: its stage is made again", self.url, missing)
                return None
        return found

    def fetch_outputs(self, result: Result, stage_path: Path, here: Mapping[str, Path]) -> None:
        """Make the outputs of a result lie below `stage_path`; what a file in `here` has, by digest, stays at home."""
        with translate_errors(self.url):
            self._objects.fetch({stage_path / record["path"]: _entry(record) for record in result["outputs"]}, here)
        for record in result["outputs"]:
            status = (stage_path / record["path"]).stat()
            record.update(mtime_ns=status.st_mtime_ns, inode=status.st_ino)

    def lease(self, fingerprint: str, holder: Holder, is_gone: Callable[[Holder], bool]) -> Lease:
        """Return the right to make the result of a fingerprint."""
        return Lease(self._bucket, self._key(f"made/{fingerprint}/lease.json"), holder, is_gone)

    def checkpoints(self, fingerprint: str, stage_path: Path) -> StoredCheckpoints:
        """Return the checkpoints of the training with a fingerprint."""
        return StoredCheckpoints(self._bucket, self._key(f"made/{fingerprint}/{FOLDER}"), stage_path)

    def record(self, run_id: str, stage_path: Path, machine: str) -> StoredRecord:
        """Return what other machines are shown of a stage of a run."""
        return StoredRecord(self._bucket, self._key(f"runs/{run_id}/stages/{stage_path.name}"), stage_path, machine)

    def _has_run(self, name: str, files: dict[str, str]) -> bool:
        """Return whether the run with these files has the name; it has it from now on if no run had it."""
        key = self._key(f"runs/{name}/run.json")
        found, _ = read_document(self._bucket, key)
        if found is None:
            if exchange_document(self._bucket, key, files, ""):
                return True
            found, _ = read_document(self._bucket, key)  # another was faster, or the response to us was lost
        return found is not None and found[_FACTS] == files[_FACTS]

    def _stored(self, key: str) -> Result | None:
        found = self._read(key)
        return found | {STORED: self.url} if found is not None else None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _write(self, name: str, value: dict[str, Any]) -> None:
        with translate_errors(self.url):
            write_document(self._bucket, self._key(name), value)

    def _read(self, name: str) -> dict[str, Any] | None:
        with translate_errors(self.url):
            return read_document(self._bucket, self._key(name))[0]


def opened(url: str, folder: str, pause: Callable[[], None]) -> Path:
    """Return the directory of a run on this machine, made if it is not there; `url` is what `put_run` returned.

    It lies in `folder`, or where the folder of runs has the path that it has on the machine that began the run.
    """
    base, _, run_id = url.rpartition(_RUNS)
    files = ArtifactStore(base, pause).run(run_id)
    pipeline = tomllib.loads(files[_PIPELINE])
    runs = Path(folder or pipeline["pipeline"].get("output_dir") or "outputs").expanduser().absolute()
    for suffix in _suffixes():
        path = runs / f"{run_id}{suffix}"
        if not (path / _PIPELINE).is_file():
            (path / "stages").mkdir(parents=True, exist_ok=True)
            pipeline["pipeline"]["output_dir"] = str(runs)
            write_text(path / _FACTS, files[_FACTS])
            write_text(path / _PIPELINE, tomli_w.dumps(pipeline))
        if _text(path / _FACTS) == files[_FACTS]:  # otherwise it is another run of this machine
            return path
    raise AssertionError("there are more suffixes than runs")


def _suffixes() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in itertools.count(2))


def _text(file: Path) -> str:
    """Return what is in a file of a run; one that is missing or damaged is no reason not to go on with the run."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def look_up(pipeline: Pipeline) -> Callable[[str], Result | None]:
    """Return what finds the result with a fingerprint in the store of a pipeline; without a store it finds nothing."""
    url = pipeline.config.artifact_store
    return ArtifactStore(url).made if url else lambda fingerprint: None


def check_store(pipeline: Pipeline) -> None:
    """Find out whether the store of a pipeline can be reached.

    Raises:
        ConfigError: it cannot.
    """
    url = pipeline.config.artifact_store
    try:
        if url:
            ArtifactStore(url).check()
    except (ConfigError, UploadError) as error:
        raise ConfigError(f"{pipeline.source}: pipeline.artifact_store = {url!r}: {error}") from error


def _entry(record: dict[str, Any]) -> Entry:
    return Entry(record["size"], record["sha256"])
