"""Which errors another attempt may not meet, on those that the libraries themselves raise."""

from __future__ import annotations

import errno
import socket
import ssl
from email.message import Message
from urllib.error import HTTPError, URLError

import botocore.exceptions
import httpx
import pytest
import requests
import torch
import urllib3
from PIL import UnidentifiedImageError

from cosmos_core.transient import is_machine_error, is_network_error, is_transient

REQUEST = httpx.Request("GET", "http://hub/x")


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(f"status {code}", request=REQUEST, response=httpx.Response(code))


def of_s3(code: int) -> botocore.exceptions.ClientError:
    return botocore.exceptions.ClientError({"ResponseMetadata": {"HTTPStatusCode": code}}, "PutObject")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.EIO, "input/output error"),
        OSError(errno.ESTALE, "stale file handle"), OSError(errno.ENOSPC, "no space"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory: you tried to allocate 8 bytes"),
        BlockingIOError(errno.EAGAIN, "no process can be forked"), RuntimeError("can't start new thread"),
    ],
)  # fmt: skip
def test_memory_and_disks_may_be_well_again(error: Exception) -> None:
    assert is_machine_error(error) and is_transient(error) and not is_network_error(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError("timed out"),
        OSError(errno.EHOSTUNREACH, "no route"), status(503), status(429),
        httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut off"),
        requests.ConnectionError("refused"), requests.Timeout("slow"), urllib3.exceptions.ProtocolError("cut off"),
        socket.gaierror(socket.EAI_AGAIN, "try again"), URLError(socket.gaierror(socket.EAI_AGAIN, "try again")),
        HTTPError("http://hub", 503, "busy", Message(), None), ssl.SSLEOFError(8, "EOF occurred"),
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://s3"),
        botocore.exceptions.ReadTimeoutError(endpoint_url="http://s3"), of_s3(503), of_s3(500),
        torch.distributed.DistBackendError("a rank is gone"), torch.distributed.DistNetworkError("reset"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9"),
        RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:289] Read error [10.0.0.1]:9: Connection reset by peer"),
    ],
)  # fmt: skip
def test_networks_and_servers_may_be_well_again(error: Exception) -> None:
    assert is_network_error(error) and is_transient(error) and not is_machine_error(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"), KeyError("missing"), FileNotFoundError(errno.ENOENT, "gone"),
        PermissionError(errno.EACCES, "no"), UnidentifiedImageError("no image"), OSError("a damaged file"),
        RuntimeError("shapes do not fit"), status(404), status(401), of_s3(403),
        HTTPError("http://hub", 404, "not there", Message(), None), botocore.exceptions.NoCredentialsError(), httpx.UnsupportedProtocol("ftp://"),
    ],
)  # fmt: skip
def test_mistakes_do_not_pass(error: Exception) -> None:
    assert not is_transient(error)


def test_what_an_error_came_from_counts() -> None:
    """As transformers tells of a lost connection: an OSError without a number."""
    try:
        try:
            raise httpx.ConnectError("refused")
        except httpx.ConnectError as lost:
            raise OSError("We couldn't connect to the Hub") from lost
    except OSError as error:
        assert is_transient(error)
    for mistake in (KeyError("typo"), FileNotFoundError("gone")):
        try:
            try:
                raise ConnectionError("lost")
            except ConnectionError:
                raise mistake  # noqa: B904 - while another is handled, not because of it
        except (KeyError, FileNotFoundError) as error:
            assert not is_transient(error)
    loop = ValueError("no")
    loop.__context__ = KeyError("other")
    loop.__context__.__context__ = loop
    assert not is_transient(loop)
