"""A bucket of an S3-compatible store: who we are to it, what lies in it, and one object read or written whole.

Credentials come from the environment alone: `PROD_S3_CHECKPOINT_*`, the variables of Cosmos-RL, else those of AWS.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cosmos_core.errors import ConfigError, CosmosError, UploadError

T = TypeVar("T")

SCHEME = "s3://"
CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or PROD_S3_CHECKPOINT_*"
_PREFIX = "PROD_S3_CHECKPOINT_"
_ENDPOINTS = (f"{_PREFIX}ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_BLOCK = 1 << 20
_CONNECT_SECONDS = 10.0
_ATTEMPTS = 6
_ALTERED = 3  # times that an object may arrive altered
_SHA256, _MD5 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


class _AlteredError(ConnectionError):
    """What arrived is not what the store says that it holds."""


@dataclass(frozen=True)
class Object:
    """What a listing says of one object."""

    key: str
    size: int
    etag: str
    modified: float
    """When it was written, in seconds since 1970 by the clock of the store."""


def side_by_side(function: Callable[..., T], calls: Iterable[tuple[Any, ...]], num_threads: int, name: str) -> list[T]:
    """Return what a function gives for each tuple of arguments; where it raises, what has not begun is given up."""
    with ThreadPoolExecutor(num_threads, name) as pool:
        running = [pool.submit(function, *arguments) for arguments in calls]
        try:
            return [each.result() for each in running]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://BUCKET/PREFIX`, the prefix without slashes at its ends.

    Raises:
        ConfigError: it names no bucket.
    """
    name, _, prefix = url.removeprefix(SCHEME).partition("/")
    if len(name) < 3:
        raise ConfigError(f"{SCHEME}{name} names no bucket; write {SCHEME}BUCKET/PREFIX")
    return name, prefix.strip("/")


class Bucket:
    """One bucket; every method may be called by several threads at once."""

    def __init__(self, name: str, *, read_seconds: float = 20.0) -> None:
        self.name = name
        self._read_seconds = read_seconds
        """A connection that is silent for longer is given up and the request sent again."""

    @cached_property
    def client(self) -> Any:
        """Return boto3's client, made when it is first asked for: the import alone takes a third of a second.

        Raises:
            ConfigError: there are no credentials, or the endpoint is no URL.
        """
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        endpoint = _variable("ENDPOINT_URL", *_ENDPOINTS[1:])
        key, secret = _variable("ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"), _variable(
            "SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY"
        )  # fmt: skip
        session = boto3.session.Session(
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            aws_session_token=None
            if os.environ.get(f"{_PREFIX}ACCESS_KEY_ID")
            else os.environ.get("AWS_SESSION_TOKEN"),
            region_name=_variable("REGION_NAME", "AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1",
        )
        if session.get_credentials() is None:
            raise ConfigError(f"{SCHEME}{self.name}: no credentials; set {CREDENTIALS}")
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=self._read_seconds,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            max_pool_connections=32,
            s3={"addressing_style": "path" if endpoint else "auto"},
            # What not every compatible store understands is not asked for: a digest is taken of what arrived.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            return session.client("s3", endpoint_url=endpoint, config=config)
        except BotoCoreError:  # some are a ValueError too
            raise
        except ValueError as error:
            named = next(name for name in _ENDPOINTS if os.environ.get(name) == endpoint)
            raise ConfigError(f"{named} = {endpoint!r} is no URL; write http://HOST:PORT or https://HOST") from error

    def check(self) -> None:
        """Find out whether the bucket is there and the credentials are taken.

        Raises:
            ConfigError, UploadError: it is not, or they are not, or nobody responds.
        """
        with translate_errors(f"{SCHEME}{self.name}"):
            self.client.head_bucket(Bucket=self.name)

    def clock(self) -> float:
        """Return the time by the clock of the store, in seconds since 1970."""
        headers = self.client.head_bucket(Bucket=self.name)["ResponseMetadata"]["HTTPHeaders"]
        return parsedate_to_datetime(headers["date"]).timestamp()

    def objects(self, prefix: str) -> Iterator[Object]:
        """Yield what lies below a prefix, by key."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        for page in pages:
            for found in page.get("Contents", ()):
                yield Object(found["Key"], found["Size"], found["ETag"].strip('"'), found["LastModified"].timestamp())

    def head(self, key: str) -> dict[str, Any] | None:
        """Return what is known of an object: size, ETag, metadata; None: there is none."""
        from botocore.exceptions import ClientError

        try:
            found = self.client.head_object(Bucket=self.name, Key=key)
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise
        return {"size": found["ContentLength"], "etag": found["ETag"].strip('"'), "metadata": found["Metadata"]}

    def read(self, key: str) -> bytes | None:
        """Return an object that is small; None: there is none."""
        return self.read_tagged(key)[0]

    def read_tagged(self, key: str) -> tuple[bytes | None, str]:
        """Return an object that is small, and its ETag; None and an empty one: there is none."""
        from botocore.exceptions import ClientError

        def read() -> tuple[bytes, str]:
            found = self.client.get_object(Bucket=self.name, Key=key)
            arrived = _Arrived(found)
            content = found["Body"].read()
            arrived.update(content)
            arrived.check(key)
            return content, found["ETag"].strip('"')

        try:
            content, etag = self._again(read)
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None, ""
            raise
        return content, etag

    def write(self, key: str, data: bytes, **only: str) -> str:
        """Replace an object that is small in one request, and again where it arrived altered; return its ETag.

        `only`: `IfMatch` an ETag, or `IfNoneMatch` "*", for a store that is to refuse it otherwise.
        """
        digest = hashlib.md5(data, usedforsecurity=False)
        for _ in range(_ALTERED):
            done = self.client.put_object(
                Bucket=self.name, Key=key, Body=data, ContentMD5=base64.b64encode(digest.digest()).decode(), **only
            )
            etag: str = done["ETag"].strip('"')
            # Where the store encrypts with other keys the ETag is another.
            if etag == digest.hexdigest() or "ServerSideEncryption" in done:
                return etag
            only = {}
        raise UploadError(f"{SCHEME}{self.name}/{key} arrived altered {_ALTERED} times")

    def remove(self, key: str) -> None:
        """Remove an object, if there is one."""
        self.client.delete_object(Bucket=self.name, Key=key)

    def sha256(self, key: str) -> str:
        """Return the digest of an object as it lies there, by reading all of it."""

        def read() -> str:
            digest = hashlib.sha256()
            for block in self._blocks(key, self.client.get_object(Bucket=self.name, Key=key)):
                digest.update(block)
            return digest.hexdigest()

        return str(self._again(read))

    def download(self, key: str, path: Path, etag: str = "") -> None:
        """Write an object to a file that is whole and as the store says, or not there; with an ETag, only that content.

        What arrives altered is fetched again, three times in all.
        """
        only = {"IfMatch": f'"{etag}"'} if etag else {}
        partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")

        def fetch() -> None:
            found = self.client.get_object(Bucket=self.name, Key=key, **only)
            arrived = _Arrived(found)
            with open(partial, "wb") as file:
                for block in self._blocks(key, found):
                    file.write(block)
                    arrived.update(block)
                arrived.check(key)
                file.flush()
                os.fsync(file.fileno())

        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._again(fetch)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _blocks(self, key: str, found: dict[str, Any]) -> Iterator[bytes]:
        num_read = 0
        for block in found["Body"].iter_chunks(_BLOCK):
            num_read += len(block)
            yield block
        if num_read != found["ContentLength"]:
            raise ConnectionError(f"{key} ended after {num_read} of {found['ContentLength']} bytes")

    def _again(self, read: Any) -> Any:
        """Read again what was cut off or altered: boto3 repeats requests, but not the reading of a response."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

        num_altered = 0
        for attempt in range(_ATTEMPTS):
            try:
                return read()
            except (HTTPClientError, IncompleteReadError, ResponseStreamingError, ConnectionError) as error:
                num_altered += isinstance(error, _AlteredError)
                if attempt == _ATTEMPTS - 1 or num_altered == _ALTERED:
                    raise
        raise AssertionError("the last attempt returns or raises")


class _Arrived:
    """The digest of an object that is read, compared with the one that the store tells: the SHA-256 that our uploads
    note, or an ETag that is an MD5. It tells none of an object that others sent in parts, or that is encrypted with
    other keys.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        etag = found["ETag"].strip('"')
        noted = found.get("Metadata", {}).get("sha256", "")
        has_own_keys = found.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in found
        self._digest: hashlib._Hash | None
        if _SHA256.fullmatch(noted):
            self._digest, self._wanted = hashlib.sha256(), noted
        elif _MD5.fullmatch(etag) and not has_own_keys:
            self._digest, self._wanted = hashlib.md5(usedforsecurity=False), etag
        else:
            self._digest, self._wanted = None, ""

    def update(self, block: bytes) -> None:
        """Take in what arrived next."""
        if self._digest is not None:
            self._digest.update(block)

    def check(self, key: str) -> None:
        """Compare what arrived with what the store says.

        Raises:
            _AlteredError: it is another content.
        """
        if self._digest is not None and self._digest.hexdigest() != self._wanted:
            raise _AlteredError(f"{key} arrived altered {_ALTERED} times")


@contextmanager
def translate_errors(where: str, error_class: type[CosmosError] = UploadError, note: str = "") -> Iterator[None]:
    """Translate errors of boto3 into ours, with a message of one line: wrong credentials and names are permanent
    (`ConfigError`), all other errors may be transient.

    Raises:
        ConfigError: the store refuses the credentials, or there is no such bucket.
        CosmosError: of `error_class`, anything else went wrong.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    end = f"; {note}" if note else ""
    try:
        yield
    except ClientError as error:
        code = _code(error)
        if code in _REFUSED:
            raise ConfigError(f"{where}: the store refuses the credentials ({code}); set {CREDENTIALS}{end}") from error
        if code in {"PreconditionFailed", "412"}:
            raise error_class(f"{where}: what lies there was changed meanwhile{end}") from error
        if code == "NoSuchKey":
            raise error_class(f"{where}: an object of it is gone{end}") from error
        if code in {*_ABSENT, "NoSuchBucket"}:
            raise ConfigError(f"{where}: there is no such bucket; make it, or name another{end}") from error
        raise error_class(f"{where}: the store responds with {code}{end}") from error
    except (BotoCoreError, ConnectionError) as error:
        raise error_class(f"{where}: {' '.join(str(error).split())}{end}") from error


def is_refused_condition(error: Exception) -> bool:
    """Return whether a store refused to write because what lies there is not what `only` named."""
    return _code(error) in {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey"}


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "an error"))


def _variable(name: str, *others: str) -> str | None:
    """Return the first of these variables that is set; Cosmos-RL's all come from one set or none do."""
    if os.environ.get(f"{_PREFIX}ACCESS_KEY_ID"):
        return os.environ.get(f"{_PREFIX}{name}") or None
    return next((value for value in map(os.environ.get, others) if value), None)
