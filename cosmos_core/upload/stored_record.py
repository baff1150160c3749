"""Copies of a stage's small files in an artifact store, updated when a file changes, for display on other machines."""

import json
from pathlib import Path

from cosmos_core.run.bucket import Bucket, translate_errors
from cosmos_core.run.files import write_bytes
from cosmos_core.run.manifest import RESULT_FILE
from cosmos_core.run.stage import PROFILES_FOLDER
from cosmos_core.run.state import StageState
from cosmos_core.upload.bundle import ContentEntry, ContentStore, read_index, write_index

_EVENTS_FILE, _STATE_FILE = "events.jsonl", "state.json"
# `*/id`, such as `wandb/id`, has the run id of a tracking service, with which another machine continues that run.
_COPIED_FILE_PATTERNS = ("*.json", "*.jsonl", "*/id", "visual_output/**/*", f"{PROFILES_FOLDER}/*.operators.json")
_FINAL_FILE_PATTERNS = (*_COPIED_FILE_PATTERNS, "logs/*.log")  # logs are stored after the attempt, with secrets masked
_NOT_COPIED_FILES = {RESULT_FILE, "pool.json", "stored.jsonl", "saves.jsonl", "upload.jsonl"}
_MAX_BYTES_BY_SUFFIX = {".jsonl": 64 << 20}
_MAX_FILE_BYTES = 1 << 20


class StoredRecord:
    """Stored copies of the files of one stage of a run, which other machines display."""

    def __init__(self, bucket: Bucket, key_prefix: str, stage_path: Path, machine_name: str) -> None:
        self._bucket, self._key_prefix = bucket, key_prefix
        self._stage_path, self._writer_identity = stage_path, {"machine": machine_name, "path": str(stage_path)}
        self._content_store = ContentStore(bucket, f"{key_prefix}/content")
        self._known_index: dict[str, ContentEntry] | None = None
        self._index_etag = ""

    def push(self, *, is_final_push: bool = False) -> None:
        """Upload the small files of the stage that have changed; with `is_final_push`, upload the logs as well."""
        with translate_errors(self._bucket.url(self._key_prefix)):
            if self._known_index is None:
                self._known_index, *_ = read_index(self._bucket, self._index_key)
            kept_index = {} if is_final_push else self._known_index
            new_index = {path: log_entry for path, log_entry in kept_index.items() if path.startswith("logs/")}
            file_patterns = _FINAL_FILE_PATTERNS if is_final_push else _COPIED_FILE_PATTERNS
            files = {file for pattern in file_patterns for file in self._stage_path.glob(pattern) if file.is_file()}
            for file in sorted(files):
                is_excluded_file = file.name.startswith(".") or file.name in _NOT_COPIED_FILES
                if is_excluded_file or file.stat().st_size > _MAX_BYTES_BY_SUFFIX.get(file.suffix, _MAX_FILE_BYTES):
                    continue
                path, data = str(file.relative_to(self._stage_path)), file.read_bytes()
                entry = ContentEntry.from_bytes(data)
                new_index[path] = entry if self._known_index.get(path) == entry else self._content_store.write(data)
            if new_index == self._known_index:
                return
            write_index(self._bucket, self._index_key, new_index, **self._writer_identity)
            for entry in set(self._known_index.values()) - set(new_index.values()):
                self._content_store.remove(entry)
            self._known_index = new_index

    def pull(self) -> bool:
        """Download the stored files of the stage if they have changed since the last call, unless they were stored from
        this folder of this machine. Return True if files were downloaded."""
        with translate_errors(self._bucket.url(self._key_prefix)):
            stored_entries, writer_identity, etag = read_index(self._bucket, self._index_key)
            if etag in {"", self._index_etag} or writer_identity == self._writer_identity:
                return False
            known_index = self._known_index or {}
            for relative_path, entry in stored_entries.items():
                content = self._content_store.read(entry) if known_index.get(relative_path) != entry else None
                if content is not None:  # skip a file that is unchanged, or was replaced meanwhile
                    self._write_local_file(self._stage_path / relative_path, content)
            self._known_index, self._index_etag = stored_entries, etag
        return True

    def read_state(self) -> StageState | None:
        """Return the stored state of the stage; None if it is missing or damaged."""
        with translate_errors(self._bucket.url(self._key_prefix)):
            state_entry = read_index(self._bucket, self._index_key)[0].get(_STATE_FILE)
            state_bytes = self._content_store.read(state_entry) if state_entry else None
        return _read_state_without_pids(state_bytes) if state_bytes else None

    @property
    def _index_key(self) -> str:
        return f"{self._key_prefix}/record.json"

    def _write_local_file(self, file: Path, file_content: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.name == _STATE_FILE and (state := _read_state_without_pids(file_content)):
            file_content = (json.dumps(state.model_dump(), indent=1) + "\n").encode()
        if file.name == _EVENTS_FILE:
            file_content = _merge_json_lines(file_content, file.read_bytes() if file.is_file() else b"")
        write_bytes(file, file_content, fsync=False)


def _read_state_without_pids(data: bytes) -> StageState | None:
    """Return the state of a stage without process ids, which are local to a machine; None if `data` is damaged."""
    try:
        state = StageState.model_validate_json(data)
    except ValueError:
        return None
    cleared_pids = dict.fromkeys(("pid", "pid_started", "launcher_pid", "launcher_started"))
    return state.model_copy(update={**cleared_pids, "mark": "", "launcher_machine": ""})


def _merge_json_lines(*file_contents: bytes) -> bytes:
    """Return the distinct JSON lines of several files of events, sorted by the key `time`; incomplete lines are left
    out."""
    distinct_lines = {line for data in file_contents for line in data.splitlines()}

    def parse_line_time(line: bytes) -> float:
        try:
            return float(json.loads(line)["time"])
        except (ValueError, TypeError, KeyError):
            return 0.0

    complete_lines = [line for line in distinct_lines if line.startswith(b"{") and line.endswith(b"}")]
    return b"".join(line + b"\n" for line in sorted(complete_lines, key=parse_line_time))
