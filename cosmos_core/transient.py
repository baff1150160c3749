"""Distinguish transient errors of memory, disks and networks, after which a retry may succeed, from permanent errors.

Libraries wrap errors in errors of their own classes (transformers turns a lost connection into a plain OSError), so the
causes of an error are examined too. Classes are matched by name, so that none of these libraries has to be installed.
"""

import errno
import re
from collections.abc import Iterator

_MACHINE_ERRNOS = {
    errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    errno.EAGAIN, errno.EBUSY,
}  # fmt: skip
_NETWORK_ERRNOS = {
    errno.ENOTCONN, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
}  # fmt: skip
_MACHINE_ERROR_NAMES = {"MemoryError", "OutOfMemoryError"}
_NETWORK_ERROR_NAMES = {
    "ConnectionError", "TimeoutError", "gaierror", "SSLError", "URLError",  # error classes of Python, requests, urllib3
    "NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError",  # error classes of httpx
    "Timeout", "MaxRetryError", "ProtocolError", "HTTPClientError", "ClientConnectionError",
    "DistError",  # base class of the errors of torch.distributed
}  # fmt: skip
_GLOO_CONNECTION_LOST_PATTERN = re.compile(r"/gloo/.*Connection (closed|reset) by peer")
_CODE_ERRORS = (LookupError, NameError, TypeError, AttributeError, AssertionError, FileNotFoundError, PermissionError)
"""Classes of programming errors. Their `__context__`, the error that was being handled, is not examined as a cause."""
_TRANSIENT_HTTP_STATUSES = {408, 425, 429}
"""HTTP status codes below 500 after which a retry may succeed, such as a timeout or too many requests."""


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed after this error."""
    return is_machine_error(error) or is_network_error(error)


def is_machine_error(error: BaseException) -> bool:
    """Return True if memory, disk space, processes or descriptors were exhausted, or if a disk did not respond."""
    return any(
        any(error_class.__name__ in _MACHINE_ERROR_NAMES for error_class in type(cause).__mro__)
        or (isinstance(cause, OSError) and cause.errno in _MACHINE_ERRNOS)
        # Messages of torch if it cannot allocate host memory, and of Python at the limit on processes (`ulimit -u`).
        or (isinstance(cause, RuntimeError) and re.search("allocate memory|can't start new thread", str(cause)))
        for cause in _iterate_causes(error)
    )


def is_network_error(error: BaseException) -> bool:
    """Return True if a connection was refused or lost, or if a server was overloaded or failed."""
    return any(_is_single_network_error(cause) for cause in _iterate_causes(error))


def _is_single_network_error(error: BaseException) -> bool:
    if http_status := _find_http_status(error):  # if a server sent a status, only the status decides
        return http_status >= 500 or http_status in _TRANSIENT_HTTP_STATUSES
    return (
        any(error_class.__name__ in _NETWORK_ERROR_NAMES for error_class in type(error).__mro__)
        or (isinstance(error, OSError) and error.errno in _NETWORK_ERRNOS)
        # The backend `gloo` of torch.distributed raises an error with these words if another rank is gone.
        or (isinstance(error, RuntimeError) and _GLOO_CONNECTION_LOST_PATTERN.search(str(error)) is not None)
    )


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    visited_error_ids: set[int] = set()
    while error is not None and id(error) not in visited_error_ids:
        visited_error_ids.add(id(error))
        yield error
        should_follow_context = not error.__suppress_context__ and not isinstance(error, _CODE_ERRORS)
        error = error.__cause__ or (error.__context__ if should_follow_context else None)


def _find_http_status(error: BaseException) -> int:
    """Return the HTTP status of an error, from an attribute of the error (urllib, aiohttp), of its response, or from
    the response table of botocore; 0 if the error has no status."""
    http_response = getattr(error, "response", None)
    if isinstance(http_response, dict):
        response_metadata = http_response.get("ResponseMetadata")
        http_statuses = [response_metadata.get("HTTPStatusCode") if isinstance(response_metadata, dict) else None]
    else:
        status_attributes = ((http_response, "status_code"), (error, "code"), (error, "status"))
        http_statuses = [getattr(holder, name, None) for holder, name in status_attributes]
    http_status = next(filter(None, http_statuses), None)
    return http_status if isinstance(http_status, int) else 0
