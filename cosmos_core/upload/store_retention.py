"""`cosmos clean --store`: what of an artifact store may go, and its removal.

A run goes when nothing was written of it for long enough, as all of it lies in the store. What was made with a
fingerprint goes when it is as old and no run that stays has it, and then every content that no result names any more.
All ages are those of the store's own clock. While a stage is made nothing goes: it may be about to name what is there.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.run.bucket import SCHEME, Bucket, Object, split_url, translate_errors
from cosmos_core.run.manifest import RESULT
from cosmos_core.upload.bundle import read_document
from cosmos_core.upload.lease import LAPSED_SECONDS

_LEASE = "lease.json"
DAY = 24 * 3600.0


@dataclass
class StoredFolder:
    """A run, or what was made with one fingerprint."""

    name: str
    objects: list[Object] = field(default_factory=list)
    pipeline: str = ""
    age_seconds: float = 0.0
    """Since the last object of it was written."""
    kept_because: str = ""
    """Empty: it may go."""

    @property
    def size(self) -> int:
        """Return the bytes of its objects."""
        return sum(each.size for each in self.objects)


class Retention:
    """What an artifact store holds, as it was when this was made."""

    def __init__(self, url: str, *, keep: int, older_than_seconds: float, least_seconds: float = DAY) -> None:
        """The newest `keep` runs of each pipeline stay, and whatever was written in the last `older_than_seconds`, and
        `least_seconds`: a pipeline may wait between two stages, and a content be sent before it is named.

        Raises:
            ConfigError: the store refuses, or a stage is being made.
            UploadError: it is not reached.
        """
        name, self._prefix = split_url(url)
        self._bucket, self._youngest = Bucket(name), max(older_than_seconds, least_seconds)
        self.url = f"{SCHEME}{name}/{self._prefix}".rstrip("/")
        with translate_errors(self.url):
            self._now = self._bucket.clock()
            self._refuse_while_made()
            self.runs = self._folders("runs")
            for run in self.runs:
                run.pipeline = self._pipeline_of(run.name)
            self._judge(keep)
            self._made = self._folders("made")
            of_runs = {each for run in self.runs if run.kept_because for each in self._results(run, "fingerprint")}
            for made in self._made:
                if made.name in of_runs or made.age_seconds < self._youngest:
                    made.kept_because = "a run that stays has it, or it is not old enough"
            folders = [*self.runs, *self._made]
            unnamed = self._unnamed([folder for folder in folders if folder.kept_because])
            self.size = sum(each.size for each in folders if not each.kept_because) + sum(each.size for each in unnamed)
            """Bytes that may go."""

    def remove(self) -> tuple[int, int]:
        """Remove what may go; return how many runs went, and how many bytes in all."""
        freed = 0
        with translate_errors(self.url):
            gone = [run for run in self.runs if not run.kept_because]
            for folder in [*gone, *(each for each in self._made if not each.kept_because)]:
                heads = {f"{self._key('runs')}/{folder.name}/run.json", f"{self._key('made')}/{folder.name}/{RESULT}"}
                for each in sorted(folder.objects, key=lambda each: each.key not in heads):  # what names the rest first
                    self._bucket.remove(each.key)
                freed += folder.size
            self._refuse_while_made()
            for each in self._unnamed([*self._folders("runs"), *self._folders("made")]):
                self._bucket.remove(each.key)
                freed += each.size
        return len(gone), freed

    def _refuse_while_made(self) -> None:
        now = self._bucket.clock()
        for each in self._bucket.objects(f"{self._key('made')}/"):
            if each.key.endswith(f"/{_LEASE}") and now - each.modified < LAPSED_SECONDS:
                found, _ = read_document(self._bucket, each.key)
                machine = f" on {found.get('machine')}" if found else ""
                raise ConfigError(f"{self.url}: a stage is made now{machine}; clean when no pipeline uses the store")

    def _folders(self, kind: str) -> list[StoredFolder]:
        head, found = f"{self._key(kind)}/", defaultdict[str, list[Object]](list)
        for each in self._bucket.objects(head):
            found[each.key.removeprefix(head).partition("/")[0]].append(each)
        ages = {name: max(0.0, self._now - max(each.modified for each in objects)) for name, objects in found.items()}
        return [StoredFolder(name, objects, age_seconds=ages[name]) for name, objects in found.items()]

    def _pipeline_of(self, name: str) -> str:
        found, _ = read_document(self._bucket, f"{self._key('runs')}/{name}/run.json")
        try:
            return str(tomllib.loads((found or {})["pipeline.toml"])["pipeline"]["name"])
        except (KeyError, TypeError, ValueError):
            return ""

    def _judge(self, keep: int) -> None:
        of_pipeline = defaultdict[str, list[StoredFolder]](list)
        for run in sorted(self.runs, key=lambda run: run.age_seconds):
            of_pipeline[run.pipeline].append(run)
        for newest in of_pipeline.values():
            for run in newest[:keep]:
                run.kept_because = f"one of the newest {keep} of its pipeline"
        for run in self.runs:
            if not run.kept_because and run.age_seconds < self._youngest:
                run.kept_because = "not old enough"

    def _unnamed(self, staying: list[StoredFolder]) -> list[Object]:
        """Return the contents that no result of these names, and that are not new."""
        named = {each["sha256"] for folder in staying for found in self._results(folder, "outputs") for each in found}
        return [
            each
            for each in self._bucket.objects(f"{self._key('objects')}/")
            if each.key.rpartition("/")[2] not in named and self._now - each.modified >= self._youngest
        ]

    def _results(self, folder: StoredFolder, field: str) -> Iterator[Any]:
        for each in folder.objects:
            if each.key.endswith(f"/{RESULT}") and (found := read_document(self._bucket, each.key)[0]):
                yield found[field]

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name
