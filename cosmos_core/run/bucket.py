"""Access to a bucket of an S3-compatible store: credentials, listing, and reading or writing one whole object.

Credentials come from the environment only: the variables `PROD_S3_CHECKPOINT_*` of Cosmos-RL, or else those of AWS.
"""

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from cosmos_core.errors import ConfigError, CosmosError, UploadError
from cosmos_core.run.files import replace_file

T = TypeVar("T")

S3_SCHEME = "s3://"
CREDENTIAL_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or PROD_S3_CHECKPOINT_*"
_COSMOS_VARIABLE_PREFIX = "PROD_S3_CHECKPOINT_"
_DEFAULT_REGION = "us-east-1"
_ENDPOINT_URL_VARIABLES = (f"{_COSMOS_VARIABLE_PREFIX}ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_DENIED_CODES = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
_NOT_FOUND_CODES = {"404", "NoSuchKey", "NotFound"}
_WRITE_CONFLICT_CODES = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey"}
"""Codes of errors with which a store refuses a conditional write because the object has changed or is missing."""
_DOWNLOAD_BLOCK_BYTES = 1 << 20
_CONNECT_TIMEOUT_SECONDS = 10.0
_MAX_REQUEST_ATTEMPTS = 6
_MAX_CLIENT_AGE_SECONDS = 300.0
_MAX_TRANSFER_ATTEMPTS = 3  # number of transfers of one object after which a wrong digest is an error
_SHA256_PATTERN, _MD5_PATTERN = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


class _DigestMismatchError(ConnectionError):
    """Error for an object whose received bytes do not match the digest that the store reports."""


@dataclass(frozen=True)
class StoredObject:
    """One object of a bucket, with the attributes that a listing returns."""

    key: str
    size: int
    etag: str
    modified_time: float
    """Time at which the object was written, in seconds since 1970 by the clock of the S3 store."""


def thread_map(
    function: Callable[..., T], argument_tuples: Iterable[tuple[Any, ...]], num_threads: int, name: str
) -> list[T]:
    """Call a function in threads, once per tuple of arguments in `argument_tuples`; return the results in the same
    order. An error cancels the calls that have not started."""
    with ThreadPoolExecutor(num_threads, name) as pool:
        futures = [pool.submit(function, *arguments) for arguments in argument_tuples]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def split_s3_url(url: str) -> tuple[str, str]:
    """Return the bucket name and the key prefix of an s3:// URL; raise ConfigError if the URL names no bucket."""
    bucket_name, _, prefix = url.removeprefix(S3_SCHEME).partition("/")
    if len(bucket_name) < 3:
        raise ConfigError(f"{S3_SCHEME}{bucket_name} names no bucket; write {S3_SCHEME}BUCKET/PREFIX")
    return bucket_name, prefix.strip("/")


@lru_cache(maxsize=8)
def _create_client(pid: int, endpoint: str | None, read_timeout_seconds: float, **session_settings: str | None) -> Any:
    """Return a boto3 client with session settings such as region and credentials; None if boto3 finds no credentials.
    Clients are cached, because creating one takes a tenth of a second. The process id is part of the cache key, because
    a child process must not use the connections of its parent."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    session = boto3.session.Session(**session_settings)
    if session.get_credentials() is None:
        return None
    client_config = Config(
        connect_timeout=_CONNECT_TIMEOUT_SECONDS,
        read_timeout=read_timeout_seconds,
        retries={"total_max_attempts": _MAX_REQUEST_ATTEMPTS, "mode": "standard"},
        max_pool_connections=32,
        # Use no checksums of boto3, which some compatible stores lack; `_TransferDigest` compares digests instead.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        region_name = session.region_name or _DEFAULT_REGION  # take the region of the AWS profile if it has one
        return session.client("s3", region_name=region_name, endpoint_url=endpoint, config=client_config)
    except BotoCoreError:  # raise it unchanged, because some are ValueErrors, but not about the URL
        raise
    except ValueError as error:
        url_variable = next(name for name in _ENDPOINT_URL_VARIABLES if os.environ.get(name) == endpoint)
        raise ConfigError(f"{url_variable} = {endpoint!r} is no URL; write http://HOST:PORT or https://HOST") from error


class Bucket:
    """Client for one bucket; its methods are thread-safe."""

    def __init__(self, name: str, *, read_timeout_seconds: float = 20.0) -> None:
        self.name = name
        self._read_timeout_seconds = read_timeout_seconds
        """Read timeout in seconds, after which the connection is closed and the request is retried."""
        self._client: Any = None
        self._client_creation_time = 0.0

    @property
    def s3_client(self) -> Any:
        """Return the boto3 client, created at the first use because importing boto3 takes a third of a second. A client
        with credentials of a file or a role is replaced after minutes, as another program may have renewed the file.
        Raise ConfigError if there are no credentials, or the endpoint is no URL."""
        if self._client is None or time.monotonic() > self._client_creation_time + _MAX_CLIENT_AGE_SECONDS:
            self._client, self._client_creation_time = self._open_client(), time.monotonic()
        return self._client

    def _open_client(self) -> Any:
        access_key_id = _read_environment_variable("ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID")
        secret_access_key = _read_environment_variable("SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY")
        # Credentials from files or roles may change while the process runs, so a client with them is not cached.
        create_client: Callable[..., Any] = _create_client if access_key_id else _create_client.__wrapped__
        has_cosmos_access_key = bool(os.environ.get(f"{_COSMOS_VARIABLE_PREFIX}ACCESS_KEY_ID"))
        session_token = None if has_cosmos_access_key else os.environ.get("AWS_SESSION_TOKEN", "").strip() or None
        s3_client = create_client(
            os.getpid(),
            endpoint=_read_environment_variable("ENDPOINT_URL", *_ENDPOINT_URL_VARIABLES[1:]),
            read_timeout_seconds=self._read_timeout_seconds,
            region_name=_read_environment_variable("REGION_NAME", "AWS_REGION", "AWS_DEFAULT_REGION")
            or (_DEFAULT_REGION if has_cosmos_access_key else None),
            aws_access_key_id=access_key_id,
            # A secret or a token without an access key would hide the credentials of files and roles.
            aws_secret_access_key=secret_access_key if access_key_id else None,
            aws_session_token=session_token if access_key_id else None,
        )
        if s3_client is None or (access_key_id and not secret_access_key):
            raise ConfigError(f"{S3_SCHEME}{self.name}: no credentials; set {CREDENTIAL_VARIABLES}")
        return s3_client

    def url(self, key: str) -> str:
        """Return the s3:// URL of an object or a prefix in this bucket."""
        return f"{S3_SCHEME}{self.name}/{key}"

    def check_write_access(self, key: str) -> None:
        """Check that the credentials allow listing the prefix `key`, and reading and writing the object `key`; write
        nothing. For errors see `translate_errors`."""
        from botocore.exceptions import ClientError

        with translate_errors(f"{S3_SCHEME}{self.name}"):
            self.read_clock(key)  # not by HeadBucket, which policies refuse that allow listing one prefix
            self.head(key)  # check read access, because a transfer reads back what it has sent
            try:
                multipart_upload = self.s3_client.create_multipart_upload(Bucket=self.name, Key=key)
                self.s3_client.abort_multipart_upload(Bucket=self.name, Key=key, UploadId=multipart_upload["UploadId"])
            except ClientError as error:
                if error.operation_name == "CreateMultipartUpload" and _read_error_code(error) in _DENIED_CODES:
                    raise

    def read_clock(self, prefix: str) -> float:
        """Return the time by the clock of the S3 store, in seconds since 1970, read from a listing of `prefix`."""
        listing_page = self.s3_client.list_objects_v2(Bucket=self.name, Prefix=prefix, MaxKeys=1)
        return parsedate_to_datetime(listing_page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose key begins with a prefix, sorted by key."""
        for listing_page in self.s3_client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
            for entry in listing_page.get("Contents", ()):
                etag, modified_time = entry["ETag"].strip('"'), entry["LastModified"].timestamp()
                yield StoredObject(entry["Key"], entry["Size"], etag, modified_time)

    def head(self, key: str) -> dict[str, Any] | None:
        """Return size, ETag and metadata of an object, or None if the object does not exist."""
        response = _call_or_none(_NOT_FOUND_CODES, self.s3_client.head_object, Bucket=self.name, Key=key)
        if response is None:
            return None
        etag = response["ETag"].strip('"')
        return {"size": response["ContentLength"], "etag": etag, "metadata": _read_metadata(response)}

    def read(self, key: str) -> bytes | None:
        """Return the content of a small object, or None if the object does not exist."""
        return self.read_with_etag(key)[0]

    def read_with_etag(self, key: str) -> tuple[bytes | None, str]:
        """Return the content and the ETag of a small object, or None and an empty string if there is no such object."""

        def read_object() -> tuple[bytes, str]:
            response = self.s3_client.get_object(Bucket=self.name, Key=key)
            digest = _TransferDigest(response)
            content = response["Body"].read()
            digest.update(content)
            digest.verify(key)
            return content, response["ETag"].strip('"')

        return _call_or_none(_NOT_FOUND_CODES, self._retry_read, read_object) or (None, "")

    def write(self, key: str, content: bytes, **write_condition: str) -> str:
        """Replace a small object in one request and return its new ETag; retry if the store received altered bytes.
        `write_condition` limits the write to a stored ETag (`IfMatch`), or to a new object (`IfNoneMatch` with "*")."""
        digest = hashlib.md5(content, usedforsecurity=False)
        for _ in range(_MAX_TRANSFER_ATTEMPTS):
            response = self.s3_client.put_object(
                Bucket=self.name,
                Key=key,
                Body=content,
                ContentMD5=base64.b64encode(digest.digest()).decode(),
                **write_condition,
            )
            if may_content_have_md5(response, digest.hexdigest()):
                return str(response["ETag"].strip('"'))
            if write_condition:
                # The store now has the altered object, so the next attempt may replace only this object.
                write_condition = {"IfMatch": response["ETag"]}
        raise UploadError(f"{S3_SCHEME}{self.name}/{key} arrived altered {_MAX_TRANSFER_ATTEMPTS} times")

    def replace_if_unchanged(self, key: str, content: bytes, etag: str) -> str:
        """Replace a small object whose ETag is `etag`, or create it if `etag` is empty, and return its new ETag. Return
        an empty string if another process has changed or created the object."""
        write_condition = {"IfMatch": f'"{etag}"'} if etag else {"IfNoneMatch": "*"}
        return _call_or_none(_WRITE_CONFLICT_CODES, self.write, key, content, **write_condition) or ""

    def remove(self, key: str) -> None:
        """Remove an object if it exists."""
        self.s3_client.delete_object(Bucket=self.name, Key=key)

    def sha256(self, key: str) -> str:
        """Return the SHA-256 digest of a stored object; this reads the whole object."""

        def read_object() -> str:
            sha256_hash = hashlib.sha256()
            for block in self._iterate_blocks(key, self.s3_client.get_object(Bucket=self.name, Key=key)):
                sha256_hash.update(block)
            return sha256_hash.hexdigest()

        return self._retry_read(read_object)

    def download(self, key: str, path: Path, etag: str = "") -> None:
        """Download an object, and replace the file `path` atomically if the received bytes match the digest that the
        store reports; try at most three times. If `etag` is not empty, only this version of the object is
        downloaded."""
        read_condition = {"IfMatch": f'"{etag}"'} if etag else {}

        def download_object(temporary_path: Path) -> None:
            response = self.s3_client.get_object(Bucket=self.name, Key=key, **read_condition)
            digest = _TransferDigest(response)
            with open(temporary_path, "wb") as file:
                for block in self._iterate_blocks(key, response):
                    file.write(block)
                    digest.update(block)
                digest.verify(key)
                file.flush()
                os.fsync(file.fileno())

        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary_path:
            self._retry_read(partial(download_object, temporary_path))

    def _iterate_blocks(self, key: str, response: dict[str, Any]) -> Iterator[bytes]:
        num_bytes_read = 0
        for block in response["Body"].iter_chunks(_DOWNLOAD_BLOCK_BYTES):
            num_bytes_read += len(block)
            yield block
        if num_bytes_read != response["ContentLength"]:
            raise ConnectionError(f"{key} ended after {num_bytes_read} of {response['ContentLength']} bytes")

    def _retry_read(self, read_object: Callable[[], T]) -> T:
        """Retry a read that was cut off or altered in transit: boto3 retries requests, not the reading of responses."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

        num_failures = num_digest_mismatches = 0
        while True:
            try:
                return read_object()
            except (HTTPClientError, IncompleteReadError, ResponseStreamingError, ConnectionError) as error:
                num_failures += 1
                num_digest_mismatches += isinstance(error, _DigestMismatchError)
                if num_failures == _MAX_REQUEST_ATTEMPTS or num_digest_mismatches == _MAX_TRANSFER_ATTEMPTS:
                    raise


class _TransferDigest:
    """Digest of the received bytes of an object, compared with the digest that the store reports: the SHA-256 in the
    metadata of objects that this package uploaded, or an ETag that is an MD5. Without either (a multi-part upload of
    another program, or encryption with a customer's key), nothing is compared."""

    def __init__(self, response: dict[str, Any]) -> None:
        etag = response["ETag"].strip('"')
        stored_sha256 = _read_metadata(response).get("sha256", "")
        encryption_algorithm = response.get("ServerSideEncryption", "AES256")
        has_customer_key = encryption_algorithm != "AES256" or "SSECustomerAlgorithm" in response
        self._running_hash: hashlib._Hash | None = None
        if _SHA256_PATTERN.fullmatch(stored_sha256):
            self._running_hash, self._expected_digest = hashlib.sha256(), stored_sha256
        elif _MD5_PATTERN.fullmatch(etag) and not has_customer_key:
            self._running_hash, self._expected_digest = hashlib.md5(usedforsecurity=False), etag

    def update(self, block: bytes) -> None:
        """Add the next received block of an object to the digest."""
        if self._running_hash is not None:
            self._running_hash.update(block)

    def verify(self, key: str) -> None:
        """Raise `_DigestMismatchError` if the digest of the received bytes differs from the digest that the store
        reports."""
        if self._running_hash is not None and self._running_hash.hexdigest() != self._expected_digest:
            raise _DigestMismatchError(f"{key} arrived altered {_MAX_TRANSFER_ATTEMPTS} times")


@contextmanager
def translate_errors(url: str, error_class: type[CosmosError] = UploadError, message_hint: str = "") -> Iterator[None]:
    """Translate errors of boto3 into errors of this package with a message of one line: wrong credentials and names are
    permanent (`ConfigError`), all other errors may be transient. Raises `ConfigError` if the store refuses the
    credentials, has no such bucket or lacks conditional writes, and `error_class` for any other error."""
    from botocore.exceptions import BotoCoreError, ClientError

    hint_suffix = f"; {message_hint}" if message_hint else ""
    try:
        yield
    except ClientError as error:
        error_code = _read_error_code(error)
        if error_code in _DENIED_CODES:
            remedy_text = f"set {CREDENTIAL_VARIABLES} of an account that may list, read and write there"
            problem_text = f"the store refuses the credentials ({error_code}); {remedy_text}"
            raise ConfigError(f"{url}: {problem_text}{hint_suffix}") from error
        if error_code == "400":  # the response to a HEAD request has no body that explains the error
            problem_text = "the session token has expired, or the store has another region or address (400)"
            remedy_text = f"set {CREDENTIAL_VARIABLES}, or AWS_REGION, or AWS_ENDPOINT_URL"
            raise ConfigError(f"{url}: {problem_text}; {remedy_text}{hint_suffix}") from error
        if error_code in {"PreconditionFailed", "412"}:
            raise error_class(f"{url}: what lies there was changed meanwhile{hint_suffix}") from error
        if error_code == "NotImplemented":
            problem_text = f"the store lacks a kind of {error.operation_name}, such as a write on a condition"
            raise ConfigError(f"{url}: {problem_text}; take another store{hint_suffix}") from error
        if error_code == "NoSuchKey":
            raise error_class(f"{url}: an object of it is gone{hint_suffix}") from error
        if error_code in {*_NOT_FOUND_CODES, "NoSuchBucket"}:
            raise ConfigError(f"{url}: there is no such bucket; make it, or name another{hint_suffix}") from error
        raise error_class(f"{url}: the store responds with {error_code}{hint_suffix}") from error
    except (BotoCoreError, ConnectionError) as error:
        raise error_class(f"{url}: {' '.join(str(error).split())}{hint_suffix}") from error


def _call_or_none(error_codes: set[str], function: Callable[..., Any], *arguments: Any, **keyword_args: Any) -> Any:
    from botocore.exceptions import ClientError

    try:
        return function(*arguments, **keyword_args)
    except ClientError as error:
        if _read_error_code(error) not in error_codes:
            raise
    return None


def may_content_have_md5(response: dict[str, Any], md5: str) -> bool:
    """Return False if the response to a write shows that the stored object has another MD5. The ETag is the MD5, except
    with server-side encryption, and in some stores, whose ETags have another form."""
    etag = response["ETag"].strip('"')
    return etag == md5 or "ServerSideEncryption" in response or not _MD5_PATTERN.fullmatch(etag)


def _read_metadata(response: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of an object by name in lower case, because proxies such as Traefik capitalise headers."""
    return {name.lower(): value for name, value in response.get("Metadata", {}).items()}


def _read_error_code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", "an error"))


def _read_environment_variable(cosmos_variable_suffix: str, *aws_variables: str) -> str | None:
    """Return the value of the first environment variable in `aws_variables` that is set. If the access key of Cosmos-RL
    is set, return the value of the variable of Cosmos-RL that ends in `cosmos_variable_suffix` instead. White space
    around a value is removed: a mounted secret may end with a line break."""
    has_cosmos_access_key = os.environ.get(f"{_COSMOS_VARIABLE_PREFIX}ACCESS_KEY_ID")
    names = (f"{_COSMOS_VARIABLE_PREFIX}{cosmos_variable_suffix}",) if has_cosmos_access_key else aws_variables
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)
