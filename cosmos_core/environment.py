"""Environment variables that a user's own code receives, and masking of secret values in logs.

Rewards and custom stages receive the variables that any program needs and those that their recipe names; a key or token
is never passed on by default. This does not isolate programs: they can read the files of the user who runs them.
"""

import logging
import os
import re
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, cast

from cosmos_core.errors import ConfigError
from cosmos_core.masking import find_secret_spans, mask_secret_spans

_INHERITED_VARIABLES = frozenset({
    "CONDA_PREFIX", "CURL_CA_BUNDLE", "DO_NOT_TRACK", "HOME", "HOSTNAME", "HTTPS_PROXY", "HTTP_PROXY", "LANG",
    "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "NO_PROXY", "PATH", "PWD", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR",
    "SSL_CERT_FILE", "TEMP", "TERM", "TMP", "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "USER", "VIRTUAL_ENV",
    "http_proxy", "https_proxy", "no_proxy",
})  # fmt: skip
_INHERITED_VARIABLE_PREFIXES = (
    "COSMOS_", "CUBLAS_", "CUDA_", "GLOO_", "HF_", "LC_", "MKL_", "MLFLOW_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "RAY_", "TORCH", "TRACKIO_", "TRANSFORMERS_", "VLLM_", "WANDB_", "XDG_",
)  # fmt: skip
_SECRET_NAME_PATTERN = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|[A-Z]*PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|KEYS?|AUTH_STRING)(?:_|$)"
    r"|_(?:AUTH|PASS|PWD)$",
    re.I,
)
_CAMEL_CASE_BOUNDARY_PATTERN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[.-]")
_CREDENTIAL_PATTERN = re.compile(
    r"(?:^|_)(?:api|access|o?auth(?!ors?(?:_|$))\w*|bearer|bot|cred\w*|encrypt\w*|\w*pass(?:word|wd|phrase)|(?:user)?pass|private"
    r"|secrets?|sign(?:ing|ature)?)(?:key)?(?:_|$)",
    re.I,
)
_LOCATION_KEY_PATTERN = re.compile(r"_(?:file|path|dir|env)$", re.I)
_WORD_PATTERN = re.compile(
    r"[A-Za-z_<|>/.-]+|<[^\s<>]{1,30}>|\[\w{1,30}\](?: \w{1,12})?|(?=.{1,19}\Z)[A-Za-z]+\d?(?:_[A-Za-z]*\d{0,3})*"
)
_HARMLESS_KEY_PATTERN = re.compile(
    r"(?:.*_)?(?:sort|order|group|join|index|primary|foreign|partition|split|dict|column|row|id|text|image|video|media"
    r"|label|prompt|question|response|completion|reference|context|message|content|title|score|metric|reward|stop"
    r"|pad|[be]os|unk|special|extra|added|max|min|num|new|total)s?_(?:keys?|tokens)|keys?|tokens",
    re.I,
)
"""Pattern of names that look like names of secrets but are not: they end in `key`, `keys` or `tokens`, and name
columns, special tokens or numbers of tokens."""
_KEY_COLLECTION_PATTERN = re.compile(r"(?:^|_)(?:keys|tokens)_", re.I)
_USER_SETTING_PATTERN = re.compile(r"(?:^|\.)(?:arguments|custom)\.")
"""Pattern of a dotted key below `arguments` or `custom`, tables whose keys users choose."""
_URL_WITH_PASSWORD_PATTERN = re.compile(r"(?:[a-z][a-z0-9+.-]*://|^)[^/@\s]*:([^/@\s]+)@", re.I)
_MIN_BLOCK_OVERLAP_BYTES = 4096
"""Minimum number of bytes by which two consecutive blocks of a file that is masked overlap, so that a secret at their
boundary is detected."""
_MIN_SECRET_CHARACTERS = 8
"""Minimum number of characters of a value that is masked: a shorter value, like `false`, may be an ordinary word."""
_READ_BLOCK_BYTES = 1 << 20
MASK = "***"
"""Text in place of a secret."""
_additional_secret_names: set[str] = set()
_additional_secret_values: set[str] = set()


def environment_for_user_code(variable_names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables of user code: those that any program needs, and those in `variable_names`."""
    environment, recipe_variable_names = {}, set(variable_names)
    for name, value in os.environ.items():
        is_variable_inherited = name in _INHERITED_VARIABLES or name.startswith(_INHERITED_VARIABLE_PREFIXES)
        is_variable_secret = _is_secret_name(name) or _URL_WITH_PASSWORD_PATTERN.search(value)
        if name in recipe_variable_names or (is_variable_inherited and not is_variable_secret):
            environment[name] = value
    return environment


def make_tls_verify() -> ssl.SSLContext | bool:
    """Return the value of httpx's argument `verify`: a context with the certificates of REQUESTS_CA_BUNDLE or
    CURL_CA_BUNDLE, which httpx itself does not read; otherwise True, with which httpx uses its defaults and
    SSL_CERT_FILE. Raises `ConfigError` if the bundle cannot be read."""
    for variable_name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if path := os.environ.get(variable_name):
            argument_name = "capath" if os.path.isdir(path) else "cafile"
            try:
                return ssl.create_default_context(**{argument_name: path})  # type: ignore[arg-type]
            except OSError as error:
                raise ConfigError(f"{variable_name} = {path!r} is no bundle of certificates: {error}") from error
    return True


def mask_secrets(variable_names: Iterable[str] = (), secret_values: Iterable[str] = ()) -> None:
    """Mask secrets in everything that this process prints and logs from now on, including the values of the environment
    variables in `variable_names`, and `secret_values`."""
    _additional_secret_names.update(variable_names)
    _additional_secret_values.update(secret_values)
    mask_log_records()
    for stream_name in ("stdout", "stderr"):
        text_stream = getattr(sys, stream_name)
        if not isinstance(text_stream, _MaskingStream):
            setattr(sys, stream_name, cast(TextIO, _MaskingStream(text_stream)))


def mask_log_records() -> None:
    """Mask secrets in every log record of this process, since Prefect sends the records to its server."""
    make_unmasked_record = logging.getLogRecordFactory()
    if getattr(make_unmasked_record, "masks_secrets", False):
        return

    def make_masked_record(*record_arguments: Any, **keyword_arguments: Any) -> logging.LogRecord:
        log_record = make_unmasked_record(*record_arguments, **keyword_arguments)
        with suppress(Exception):  # ignore arguments that do not fit the format: the logging module reports them
            message = log_record.getMessage()
            if (masked_message := mask_text(message)) != message:
                log_record.msg, log_record.args = masked_message, ()
        if log_record.exc_info and not log_record.exc_text:
            log_record.exc_text = mask_text(logging.Formatter().formatException(log_record.exc_info))
        return log_record

    make_masked_record.masks_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_masked_record)


def mask_text(text: str, variable_names: Iterable[str] = ()) -> str:
    """Return the text with `***` for each secret value of the environment, for the value of each variable in
    `variable_names`, and for text that looks like a secret."""
    for secret in _collect_secrets(variable_names):
        text = text.replace(secret, "***")
    return mask_secret_spans(text)


def mask_error_message(error: BaseException) -> None:
    """Mask secrets in the message and the notes of an error, because Prefect and the files of a run show them."""
    error.args = tuple(each if mask_text(str(each)) == str(each) else mask_text(str(each)) for each in error.args)
    if error_notes := getattr(error, "__notes__", None):
        error_notes[:] = map(mask_text, error_notes)


def find_secrets(settings: Any, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield each string in nested settings whose key, or the key of a table around it, names a secret, such as
    `api_key`. `keys`: keys that lead to `settings`. Plain words and paths are left out, see `_is_secret_setting`."""
    if isinstance(settings, Mapping):
        for key, nested_settings in settings.items():
            yield from find_secrets(nested_settings, (*keys, str(key)))
    elif isinstance(settings, list | tuple):
        for nested_settings in settings:
            yield from find_secrets(nested_settings, keys)
    elif isinstance(settings, str) and _is_secret_setting(keys, settings):
        yield settings


def mask_named_secrets(parameters: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return parameters of a flow with `***` in place of each string that looks like a secret, and of each string below
    a key that names a credential. `keys`: keys that lead to `parameters`. Names such as "sort_key", "key" and
    "stop_tokens" name no credential. "keys" and "tokens" name one only if the string is a word with a digit in a table
    below them, as in `keys = {"openai": "k1-22"}`."""
    if isinstance(parameters, Mapping):
        return {key: mask_named_secrets(value, (*keys, str(key))) for key, value in parameters.items()}
    if isinstance(parameters, list | tuple):
        return [mask_named_secrets(value, keys) for value in parameters]
    if not isinstance(parameters, str) or not parameters.strip():
        return parameters
    snake_keys = [_CAMEL_CASE_BOUNDARY_PATTERN.sub("_", key) for key in keys]
    joined_keys, is_word_with_digit = "_".join(snake_keys), re.fullmatch(r"[^\s:,<>[\]]*\d[^\s:,<>[\]]*", parameters)
    harmless_keys = set(filter(_HARMLESS_KEY_PATTERN.fullmatch, snake_keys))
    keys_to_check = [name for name in snake_keys if _CREDENTIAL_PATTERN.search(name) or name not in harmless_keys]
    if _CREDENTIAL_PATTERN.search(joined_keys) or (_KEY_COLLECTION_PATTERN.search(joined_keys) and is_word_with_digit):
        keys_to_check.append(joined_keys)
    text = f"{snake_keys[-1]}={parameters}"
    return MASK if _is_secret_setting(keys_to_check, parameters) or mask_text(text) != text else parameters


def mask_settings(settings: Any, key: str = "") -> Any:
    """Return settings for display, with `***` for secrets. Only strings in tables whose keys users choose are masked:
    those that look like a secret, and those whose key, or a key above it, is the name of a secret, such as `api_key`.
    `key` is the dotted key of `settings`, empty for a whole configuration."""
    if isinstance(settings, Mapping):
        return {name: mask_settings(setting, f"{key}.{name}") for name, setting in settings.items()}
    if isinstance(settings, list | tuple):
        return type(settings)(mask_settings(setting, key) for setting in settings)
    if not isinstance(settings, str) or not _USER_SETTING_PATTERN.search(key):
        return settings
    return MASK if _is_secret_setting(key.split("."), settings) else mask_text(settings)


def mask_file(log_path: Path, variable_names: Iterable[str] = ()) -> None:
    """Mask secrets in a file written by another program, such as one that a user's code has started; the values of the
    environment variables `variable_names` are masked too.

    The secrets are overwritten in place: a log may be larger than the memory, and the disk may be full.
    """
    secret_bytes = [secret.encode() for secret in _collect_secrets(variable_names)]
    block_overlap_bytes = max(_MIN_BLOCK_OVERLAP_BYTES, *map(len, secret_bytes), 0)
    block_offset = 0
    with open(log_path, "r+b", buffering=0) as log_file:
        while block := os.pread(log_file.fileno(), _READ_BLOCK_BYTES + block_overlap_bytes, block_offset):
            secret_spans = [match.span() for secret in secret_bytes for match in re.finditer(re.escape(secret), block)]
            # Decode as Latin-1, which has one character per byte, so that spans are byte offsets. Replace its
            # white-space characters 0x85 and 0xA0, because these bytes also occur inside of UTF-8 letters.
            secret_spans += find_secret_spans(block.decode("latin-1").translate(dict.fromkeys((0x85, 0xA0), "x")))
            for span_start, span_end in secret_spans:
                os.pwrite(log_file.fileno(), b"*" * (span_end - span_start), block_offset + span_start)
            block_offset += _READ_BLOCK_BYTES


class _MaskingStream:
    """Text stream that masks secrets in the output of Python code, but not in that of C code and subprocesses."""

    def __init__(self, wrapped_stream: TextIO) -> None:
        self._stream = wrapped_stream

    def write(self, text: str) -> int:
        return self._stream.write(mask_text(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self._stream.writelines(map(mask_text, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _collect_secrets(variable_names: Iterable[str] = ()) -> list[str]:
    """Return the secret values to mask, including those of the environment variables `variable_names`: the longest
    first, because a value may contain a shorter one."""
    secrets_to_mask, secret_names = set(_additional_secret_values), _additional_secret_names.union(variable_names)
    for name, value in os.environ.items():
        if name in secret_names or _is_secret_name(name):
            secrets_to_mask.add(value)
        secrets_to_mask.update(_URL_WITH_PASSWORD_PATTERN.findall(value) if "@" in value else ())
    return sorted((value for value in secrets_to_mask if len(value) >= _MIN_SECRET_CHARACTERS), key=len, reverse=True)


def _is_secret_setting(key_path: Sequence[str], setting_value: str) -> bool:
    """Return True if one of the keys that lead to a setting is the name of a secret, and the value is likely to be a
    secret. A word, such as `question` in `text_key = "question"`, is no secret unless the key names a credential, such
    as a password. The value of a key that matches `_LOCATION_KEY_PATTERN` is the path of a secret, and no secret
    either."""
    secret_names = [_CAMEL_CASE_BOUNDARY_PATTERN.sub("_", key) for key in key_path if _is_secret_name(key)]
    is_plain_word = _WORD_PATTERN.fullmatch(setting_value) and not any(map(_CREDENTIAL_PATTERN.search, secret_names))
    return bool(secret_names) and not (is_plain_word or _LOCATION_KEY_PATTERN.search(key_path[-1]))


@lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME_PATTERN.search(_CAMEL_CASE_BOUNDARY_PATTERN.sub("_", name)))
