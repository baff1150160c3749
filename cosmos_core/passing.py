"""Which errors of libraries and of users' own code may be gone at the next attempt: of memory, of disks, of networks.

A library wraps what it met in an error of its own (transformers makes a plain OSError of a lost connection), so what an
error came from is looked at too. Classes are known by name: none of these libraries has to be there.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

_MACHINE = {
    errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    errno.EAGAIN, errno.EBUSY,
}  # fmt: skip
_NETWORK = {
    errno.ENOTCONN, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
}  # fmt: skip
_OF_MACHINE = {"MemoryError", "OutOfMemoryError"}
_OF_NETWORK = {
    "ConnectionError", "TimeoutError", "gaierror", "SSLError", "URLError",  # of Python, requests, urllib3 and botocore
    "NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError",  # httpx
    "Timeout", "MaxRetryError", "ProtocolError", "HTTPClientError", "ClientConnectionError",
}  # fmt: skip
_MISTAKES = (LookupError, NameError, TypeError, AttributeError, AssertionError, FileNotFoundError, PermissionError)
"""What is met while another error is handled, and does not come from it."""
_STATUSES = {408, 425, 429}
"""Beside those from 500 on: what a server says that would serve us later."""


def may_pass(error: BaseException) -> bool:
    """Return whether the same may go well the next time."""
    return is_of_machine(error) or is_of_network(error)


def is_of_machine(error: BaseException) -> bool:
    """Return whether memory, disk or descriptors ran out, or a disk did not respond."""
    return any(
        not _OF_MACHINE.isdisjoint(_classes(each))
        or (isinstance(each, OSError) and each.errno in _MACHINE)
        or (isinstance(each, RuntimeError) and "allocate memory" in str(each))  # torch has no class for it on CPU
        for each in _chain(error)
    )


def is_of_network(error: BaseException) -> bool:
    """Return whether a connection was refused or lost, or a server was too busy or out of order."""
    return any(_is_of_network(each) for each in _chain(error))


def _is_of_network(error: BaseException) -> bool:
    if status := _status(error):  # the server has been reached, and said so
        return status >= 500 or status in _STATUSES
    return not _OF_NETWORK.isdisjoint(_classes(error)) or (isinstance(error, OSError) and error.errno in _NETWORK)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        is_wrapped = not error.__suppress_context__ and not isinstance(error, _MISTAKES)
        error = error.__cause__ or (error.__context__ if is_wrapped else None)


def _classes(error: BaseException) -> set[str]:
    return {each.__name__ for each in type(error).__mro__}


def _status(error: BaseException) -> int:
    """Return the status of the response that an error of HTTP has: its own (urllib, aiohttp), that of an object, or in
    botocore's table; 0: none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata")
        found = response.get("HTTPStatusCode") if isinstance(response, dict) else None
    else:
        found = getattr(response, "status_code", None) or getattr(error, "code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) else 0
