"""Lease in a bucket: a lock that expires, so that only one process on all machines computes a result at a time.

The process that holds the lease renews it. A waiting process takes the lease over if the lease has not changed for a
minute by the waiting process's own clock, so that the clocks of machines need not agree. A waiting process on the
machine of a holder that was killed takes the lease over at once.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from cosmos_core.error_handling import log_errors
from cosmos_core.errors import StageFailed
from cosmos_core.run.bucket import Bucket, translate_errors
from cosmos_core.upload.bundle import encode_document, read_document

logger = logging.getLogger(__name__)

RENEW_INTERVAL_SECONDS = 10.0
EXPIRY_SECONDS = 60.0
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class LeaseHolder:
    """Process that holds a lease, with its machine."""

    machine: str
    pid: int
    started: float | None
    """Start time of the process, in seconds since the boot of its machine; None if it is unknown."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    beats: int = 0
    """Number of renewals of the lease so far."""


class Lease:
    """Exclusive right of a process to make one result, stored as a document in a bucket."""

    def __init__(self, bucket: Bucket, key: str, holder: LeaseHolder, has_died: Callable[[LeaseHolder], bool]) -> None:
        """Create the lease at `key` without acquiring it; `has_died` returns True if a holder is known to be dead."""
        self._bucket, self._object_key, self._url = bucket, key, bucket.url(key)
        self._holder, self._has_died = holder, has_died
        self._etag = ""
        self.is_lost = False
        """True if another machine is known to have taken over the lease."""
        self._stop_event = threading.Event()
        self._renewal_thread: threading.Thread | None = None

    def acquire(self, report_waiting: Callable[[LeaseHolder], None]) -> bool:
        """Wait until the lease is free and acquire it; return True if another process held the lease meanwhile.
        Between attempts, `report_waiting` is called with the holder, and can raise an error to stop waiting."""
        observed_etag, last_change_time, had_to_wait = "", time.monotonic(), False
        with translate_errors(self._url):
            while True:
                holder, etag = self._read_lease()
                if etag != observed_etag:
                    observed_etag, last_change_time = etag, time.monotonic()
                has_lease_expired = time.monotonic() - last_change_time > EXPIRY_SECONDS
                is_lease_free = holder is None or self._has_died(holder) or has_lease_expired
                if is_lease_free and self._replace_lease(etag):
                    break
                had_to_wait = True
                if holder is not None:
                    report_waiting(holder)
                time.sleep(_POLL_SECONDS)
        self._renewal_thread = threading.Thread(target=self._renew_periodically, name="lease", daemon=True)
        self._renewal_thread.start()
        return had_to_wait

    def check(self) -> None:
        """Raise StageFailed if another machine has taken the lease over, perhaps while this process was suspended."""
        with translate_errors(self._url):
            self.is_lost = self.is_lost or not self._is_own_lease(self._read_lease()[0])
        if self.is_lost:
            raise StageFailed(self.takeover_message)

    @property
    def takeover_message(self) -> str:
        """Return an error message if another machine is known to have taken over the lease, else an empty string."""
        if not self.is_lost:
            return ""
        return f"{self._url}: another machine has taken the work over: this one was silent for too long"

    def release(self) -> None:
        """Release the lease, if this process still holds it."""
        self._stop_event.set()
        if self._renewal_thread is not None:
            self._renewal_thread.join()
        warning_format = "a lease was not given back, it lapses within %.0f s: %s"
        with log_errors(partial(logger.warning, warning_format, EXPIRY_SECONDS)), translate_errors(self._url):
            if self._is_own_lease(self._read_lease()[0]):
                self._bucket.remove(self._object_key)

    def _read_lease(self) -> tuple[LeaseHolder | None, str]:
        lease_document, etag = read_document(self._bucket, self._object_key)
        try:
            return (LeaseHolder(**lease_document) if lease_document is not None else None), etag
        except TypeError:  # a lease in the format of another version counts as no lease
            return None, etag

    def _replace_lease(self, etag: str) -> bool:
        """Store the lease of this process in place of the stored lease with the ETag `etag`. Return False if the stored
        lease has changed since, because another process has acquired it."""
        self._etag = self._bucket.replace_if_unchanged(self._object_key, encode_document(asdict(self._holder)), etag)
        if self._etag:
            return True
        # Read the lease again: if the response to a successful request was lost, its retry was refused.
        holder, self._etag = self._read_lease()
        return self._is_own_lease(holder)

    def _is_own_lease(self, holder: LeaseHolder | None) -> bool:
        return holder is not None and holder.token == self._holder.token

    def _renew_periodically(self) -> None:
        while not self._stop_event.wait(RENEW_INTERVAL_SECONDS):
            self._holder = replace(self._holder, beats=self._holder.beats + 1)
            with log_errors(partial(logger.warning, "a lease was not renewed, it is tried again: %s")):
                if not self._replace_lease(self._etag):
                    self.is_lost = True
                    return
