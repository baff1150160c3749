"""Which environment variables code of a user's own is handed, and the values that no log may show.

Rewards and custom stages get what any program needs to run, and beyond that what their recipe names; a key or token is
never handed on by itself. It is no wall: a program can read the files of the user who runs it.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, cast

from cosmos_core.errors import ConfigError

_NEEDED = frozenset({
    "CONDA_PREFIX", "CURL_CA_BUNDLE", "DO_NOT_TRACK", "HOME", "HOSTNAME", "HTTPS_PROXY", "HTTP_PROXY", "LANG",
    "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "NO_PROXY", "PATH", "PWD", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR",
    "SSL_CERT_FILE", "TEMP", "TERM", "TMP", "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "USER", "VIRTUAL_ENV",
    "http_proxy", "https_proxy", "no_proxy",
})  # fmt: skip
_NEEDED_PREFIXES = (
    "COSMOS_", "CUBLAS_", "CUDA_", "HF_", "LC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "RAY_",
    "TORCH", "TRANSFORMERS_", "VLLM_", "WANDB_", "XDG_",
)  # fmt: skip
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|KEYS?|AUTH_STRING)(?:_|$)", re.I
)
_LOGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/@\s]*:([^/@\s]+)@", re.I)
_SHORTEST = 8
"""Characters of a value that is masked: a shorter one, like `false`, is also a word."""
_BLOCK = 1 << 20
_named: set[str] = set()


def handed_on(names: Iterable[str]) -> dict[str, str]:
    """Return the variables that a user's code is handed: those that any program needs, and those with these names."""
    return {name: value for name, value in os.environ.items() if name in set(names) or _is_needed(name, value)}


def tls_trust() -> ssl.SSLContext | bool:
    """Return what httpx takes for `verify`: the authorities of REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE, which httpx itself
    does not read; True: those of its own rule, SSL_CERT_FILE among them.

    Raises:
        ConfigError: the bundle cannot be read.
    """
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if path := os.environ.get(name):
            key = "capath" if os.path.isdir(path) else "cafile"
            try:
                return ssl.create_default_context(**{key: path})  # type: ignore[arg-type]
            except OSError as error:
                raise ConfigError(f"{name} = {path!r} is no bundle of certificates: {error}") from error
    return True


def hide(names: Iterable[str] = ()) -> None:
    """Mask secrets in what this process prints from now on; the values of variables with these names are some, too."""
    _named.update(names)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Masking):
            setattr(sys, name, cast(TextIO, _Masking(stream)))


def masked(text: str, names: Iterable[str] = ()) -> str:
    """Return the text with `***` for each secret value of the environment, those of variables with these names too."""
    for secret in _secrets(names):
        text = text.replace(secret, "***")
    return text


def mask_file(file: Path, names: Iterable[str] = ()) -> None:
    """Mask secrets in a file that others have written, such as a program that user's code has started.

    They are overwritten where they stand: a log may be larger than the memory, and its disk full.
    """
    secrets = [secret.encode() for secret in _secrets(names)]
    overlap = max(map(len, secrets), default=0)
    start = 0
    with open(file, "r+b", buffering=0) as log:
        while secrets and (block := os.pread(log.fileno(), _BLOCK + overlap, start)):
            for secret in secrets:
                for found in re.finditer(re.escape(secret), block):
                    os.pwrite(log.fileno(), b"*" * len(secret), start + found.start())
            start += _BLOCK


class _Masking:
    """A text stream that shows no secret; what C or a program that is started writes goes past it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(masked(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self._stream.writelines(map(masked, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _secrets(names: Iterable[str] = ()) -> list[str]:
    """Return the values to mask, the longest first: one may be a part of another."""
    found, named = set(), _named.union(names)
    for name, value in os.environ.items():
        if name in named or _is_secret_name(name):
            found.add(value)
        found.update(_LOGIN.findall(value) if "://" in value else ())
    return sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)


def _is_needed(name: str, value: str) -> bool:
    is_known = name in _NEEDED or name.startswith(_NEEDED_PREFIXES)
    return is_known and not _is_secret_name(name) and not _LOGIN.search(value)


@lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name))
