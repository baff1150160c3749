"""Wire format of the remote protocol: one line of JSON, a newline, and an array in the file format of numpy.

The client (`remote.py`) encodes requests and the service decodes them. The service also accepts a tensor that torch
saved (`torch_file.py`), as Cosmos-RL's example clients send latents. Data from the network is never unpickled, and no
memory is allocated before its size is checked. HTTP, queues and scores are in other modules.
"""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cosmos_core.error_handling import convert_errors
from cosmos_core.rewards.torch_file import ZIP_SIGNATURE, NotATensorError, read_tensor

ENQUEUE_PATH = "/api/reward/enqueue"
PULL_PATH = "/api/reward/pull"
PING_PATH = "/api/reward/ping"
LATENT_ATTRIBUTES_PATH = "/api/reward/latent_attr"

REPLICA_HEADER = "X-Lepton-Replica-Target"
"""HTTP header of a pull, the request for scores. The value of the header names the replica that has the scores."""
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""HTTP header of an enqueue with the uuid of the request, so that a request that is sent twice is scored once."""
REQUEST_STATE_HEADER = "X-Reward-State"
"""HTTP header of a response without scores: `pending`, or `unknown` if the service does not have the request."""

MAX_JSON_BYTES = 16 * 2**20
_MAX_NPY_HEADER_BYTES = 4096
_MAX_NDIM = 5
_MAX_JSON_DEPTH = 32
_SUPPORTED_DTYPES = {"|u1", "<f2", "<f4", "<f8"}


class ProtocolError(ValueError):
    """Error for an HTTP body that violates the protocol; the message describes the problem on one line."""


def encode_request(json_fields: Mapping[str, Any], array: np.ndarray) -> bytes:
    """Return the HTTP body that enqueues items at a reward service, byte for byte as Cosmos-RL's client writes it."""
    body_buffer = io.BytesIO()
    body_buffer.write(json.dumps(json_fields).encode("utf-8") + b"\n")
    np.save(body_buffer, array, allow_pickle=False)
    return body_buffer.getvalue()


def decode_request(request_body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], np.ndarray]:
    """Return the JSON fields and the array in the HTTP body of an enqueue; the array is a read-only view of the body.
    Raise `ProtocolError` if the body does not have the format of the protocol."""
    body_view = memoryview(request_body)
    body_prefix = bytes(body_view[: MAX_JSON_BYTES + 1])
    newline_index = body_prefix.find(b"\n")
    if newline_index < 0:
        if len(body_view) <= MAX_JSON_BYTES:
            raise ProtocolError("no newline; the body is one line of JSON, then an array")
        remedy = "send fewer completions in a request (remote_reward.batch_size), or less metadata of each"
        raise ProtocolError(f"the line of JSON has more than {MAX_JSON_BYTES >> 20} MiB; {remedy}")
    json_fields, array_bytes = _parse_json_fields(body_prefix[:newline_index]), body_view[newline_index + 1 :]
    if bytes(array_bytes[:4]) != ZIP_SIGNATURE:
        return json_fields, decode_array(array_bytes)
    try:
        array = read_tensor(array_bytes)
    except NotATensorError as error:
        raise ProtocolError(f"the array was saved by torch, and {error}") from error
    if not 1 <= array.ndim <= _MAX_NDIM:
        raise ProtocolError(f"the tensor has {array.ndim} axes; from one to {_MAX_NDIM} are read")
    return json_fields, array


def decode_array(npy_bytes: memoryview) -> np.ndarray:
    """Return the array in a file of numpy's format, without unpickling. Raise `ProtocolError` if the content is no
    array of numbers, or its length differs from its header."""
    header_stream = io.BytesIO(bytes(npy_bytes[: _MAX_NPY_HEADER_BYTES + 16]))
    header_error_prefix = "no array in numpy's format follows the JSON: "
    with convert_errors(lambda error: ProtocolError(header_error_prefix + type(error).__name__), ProtocolError):
        version = np.lib.format.read_magic(header_stream)
        if version not in {(1, 0), (2, 0)}:
            raise ProtocolError(f"the array has format version {version}; 1.0 and 2.0 are read")
        read_npy_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran_order, array_dtype = read_npy_header(header_stream, max_header_size=_MAX_NPY_HEADER_BYTES)  # type: ignore[call-arg]
    if array_dtype.str not in _SUPPORTED_DTYPES:
        raise ProtocolError(f"the array is of {array_dtype.str!r}; uint8, float16, float32 and float64 are read")
    if not 1 <= len(shape) <= _MAX_NDIM or any(type(axis_size) is not int or axis_size < 0 for axis_size in shape):
        raise ProtocolError(f"the array has the shape {str(shape)[:100]}; from one to {_MAX_NDIM} axes are read")
    data_offset, num_bytes = header_stream.tell(), math.prod(shape) * array_dtype.itemsize
    if len(npy_bytes) - data_offset != num_bytes:
        raise ProtocolError(f"the array has {len(npy_bytes) - data_offset} bytes; its shape and dtype make {num_bytes}")
    flat_array = np.frombuffer(npy_bytes, array_dtype, offset=data_offset)
    try:
        return flat_array.reshape(shape, order="F" if is_fortran_order else "C")
    except ValueError as error:  # raised for an empty array whose axes exceed the limits of NumPy
        raise ProtocolError(f"the array has the shape {str(shape)[:100]}, which none can have") from error


def _parse_json_fields(json_line: bytes) -> dict[str, Any]:
    if _json_depth(json_line) > _MAX_JSON_DEPTH:
        raise ProtocolError(f"the JSON is nested more than {_MAX_JSON_DEPTH} deep")
    try:
        json_fields = json.loads(json_line, parse_constant=_parse_finite_float, parse_float=_parse_finite_float)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the first line is no JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(json_fields, dict):
        raise ProtocolError(f"the JSON is a {type(json_fields).__name__}; the rule is an object")
    return json_fields


def _json_depth(json_line: bytes) -> int:
    """Return the nesting depth of JSON text; if it has few brackets, return their number, an upper bound."""
    num_brackets = json_line.count(b"[") + json_line.count(b"{")
    if num_brackets <= _MAX_JSON_DEPTH:
        return num_brackets
    max_depth = nesting_depth = 0
    is_in_string = is_escaped = False
    for byte in json_line:
        if is_in_string:
            is_in_string, is_escaped = is_escaped or byte != 0x22, not is_escaped and byte == 0x5C
        elif byte == 0x22:
            is_in_string = True
        elif byte in b"[{":
            nesting_depth += 1
            max_depth = max(max_depth, nesting_depth)
        elif byte in b"]}":
            nesting_depth -= 1
    return max_depth


def _parse_finite_float(number_text: str) -> float:
    parsed_number = float(number_text)
    if not math.isfinite(parsed_number):
        raise ValueError(f"{number_text[:40]} is no number of JSON")
    return parsed_number
