"""A lease in a bucket: of all processes on all machines one makes a thing at a time.

Its holder renews it. Who waits takes it over when it has not changed for a minute by his own clock: those of other
machines are never read. What a kill leaves behind is taken over on the same machine at once.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from cosmos_core.errors import StageFailed
from cosmos_core.run.bucket import SCHEME, Bucket, translate_errors
from cosmos_core.upload.bundle import exchange_document, read_document

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
LAPSED_SECONDS = 60.0
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Holder:
    """A process of one machine."""

    machine: str
    pid: int
    started: float | None
    """Of the process, after the boot of its machine."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    beats: int = 0
    """Raised by each renewal."""


class Lease:
    """The right to make one thing."""

    def __init__(self, bucket: Bucket, key: str, holder: Holder, is_gone: Callable[[Holder], bool]) -> None:
        """`is_gone`: whether a process is known to have ended, because it was one of this machine."""
        self._bucket, self._key = bucket, key
        self._holder, self._is_gone = holder, is_gone
        self._etag = ""
        self.is_lost = False
        """Whether another machine is known to have taken it over."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, while_waiting: Callable[[Holder], None]) -> bool:
        """Take the lease; return whether another held it meanwhile. `while_waiting` is called between tries with who
        does, and may raise to give up.

        Raises:
            ConfigError, UploadError: the store refuses, or is not reached.
        """
        last_etag, since, has_waited = "", time.monotonic(), False
        with translate_errors(self._url):
            while True:
                found, etag = self._read()
                if etag != last_etag:
                    last_etag, since = etag, time.monotonic()
                is_free = found is None or self._is_gone(found) or time.monotonic() - since > LAPSED_SECONDS
                if is_free and self._put(etag):
                    break
                has_waited = True
                if found is not None:
                    while_waiting(found)
                time.sleep(_POLL_SECONDS)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return has_waited

    def check(self) -> None:
        """Make sure that it is still held: who was suspended has not noticed yet that it lapsed.

        Raises:
            StageFailed: another machine has taken it over.
            ConfigError, UploadError: the store refuses, or is not reached.
        """
        with translate_errors(self._url):
            self.is_lost = self.is_lost or not self._is_ours(self._read()[0])
        if self.is_lost:
            raise StageFailed(self.loss)

    @property
    def loss(self) -> str:
        """Return what is to be said once it is known to be lost, before that an empty string."""
        if not self.is_lost:
            return ""
        return f"{self._url}: another machine has taken the work over: this one was silent for too long"

    def release(self) -> None:
        """Let go."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with translate_errors(self._url):
                if self._is_ours(self._read()[0]):
                    self._bucket.remove(self._key)
        except Exception as error:  # noqa: BLE001 - it lapses by itself
            logger.warning("a lease was not given back, it lapses within %.0f s: %s", LAPSED_SECONDS, error)

    @property
    def _url(self) -> str:
        return f"{SCHEME}{self._bucket.name}/{self._key}"

    def _read(self) -> tuple[Holder | None, str]:
        found, etag = read_document(self._bucket, self._key)
        try:
            return (Holder(**found) if found is not None else None), etag
        except TypeError:  # of another version
            return None, etag

    def _put(self, etag: str) -> bool:
        """Write who we are over the lease with this ETag; return whether that is what lies there now."""
        self._etag = exchange_document(self._bucket, self._key, asdict(self._holder), etag)
        if self._etag:
            return True
        # Refused is also what was written by a request whose response was lost.
        found, self._etag = self._read()
        return self._is_ours(found)

    def _is_ours(self, found: Holder | None) -> bool:
        return found is not None and found.token == self._holder.token

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            holder = self._holder
            self._holder = Holder(holder.machine, holder.pid, holder.started, holder.token, holder.beats + 1)
            try:
                if not self._put(self._etag):
                    self.is_lost = True
                    return
            except Exception as error:  # noqa: BLE001 - the work goes on; who takes over meanwhile is noticed
                logger.warning("a lease was not renewed, it is tried again: %s", error)
