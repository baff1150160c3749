"""Reader of one tensor in the file format of `torch.save`, without torch and without unpickling.

Cosmos-RL's example clients send latents of videos in this format. The file is a zip archive whose `data.pkl` holds
dtype, shape and strides in twenty opcodes. The opcodes are parsed as data, and the names in them are compared with
expected names and never called. All allocations are smaller than the file. Other objects that torch saves are refused.
"""

import math
import pickletools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_core.error_handling import convert_errors

SIGNATURE = b"PK\x03\x04"
_DIRECTORY_SEARCH_BYTES = 16 * 2**10
"""Number of bytes at the end of the archive that contain its directory."""
_MAX_PICKLE_BYTES = 4096
_DTYPES: dict[str, np.dtype[Any]] = {
    "ByteStorage": np.dtype("|u1"), "HalfStorage": np.dtype("<f2"), "BFloat16Storage": np.dtype("<u2"),
    "FloatStorage": np.dtype("<f4"), "DoubleStorage": np.dtype("<f8"),
}  # fmt: skip
_REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_NO_HOOKS = ("collections", "OrderedDict")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PICKLE_MARK = object()


class NotATensorError(ValueError):
    """Error for a file that is not one tensor; the message describes the content on one line."""


@dataclass(frozen=True)
class _GlobalName:
    name: tuple[str, ...]


@dataclass(frozen=True)
class _StorageReference:
    type_name: str
    key: str
    count: int


@dataclass(frozen=True)
class _Call:
    function: _GlobalName
    arguments: tuple[Any, ...]


def read_tensor(content: memoryview) -> np.ndarray:
    """Return the tensor in a file, as a view of the file if possible; bfloat16 values as pairs of uint8.

    Raises:
        NotATensorError: the file is not one tensor of numbers.
    """
    members = _read_zip_files(content)
    [root] = {name.partition("/")[0] for name in members}
    if (script := members.get(f"{root}/data.pkl")) is None or len(script) > _MAX_PICKLE_BYTES:
        raise NotATensorError("it has no description of a tensor")
    if bytes(members.get(f"{root}/byteorder", b"little")) != b"little":
        raise NotATensorError("its numbers are not little-endian")
    problem = "its description is none of a tensor: "
    with convert_errors(lambda error: NotATensorError(problem + type(error).__name__), NotATensorError):
        storage, offset, shape, strides = _tensor(bytes(script))
    dtype = _DTYPES[storage.type_name]
    data = members.get(f"{root}/data/{storage.key}")
    if data is None or len(data) != storage.count * dtype.itemsize:
        raise NotATensorError("its numbers are not there, or not as many as it says")
    steps = [step if n > 1 else 0 for n, step in zip(shape, strides, strict=True)]
    last = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    if not 0 < math.prod(shape) <= storage.count or last >= storage.count:
        raise NotATensorError("it is empty, or its shape goes beyond its numbers")
    flat = np.frombuffer(data, dtype)[offset:]
    array = np.lib.stride_tricks.as_strided(flat, shape, [step * dtype.itemsize for step in steps], writeable=False)
    return np.ascontiguousarray(array).view(np.uint8) if storage.type_name == "BFloat16Storage" else array


def _read_zip_files(content: memoryview) -> dict[str, memoryview]:
    """Return the files in an uncompressed zip archive by name, from the directory at its end."""
    archive_end = bytes(content[-_DIRECTORY_SEARCH_BYTES:])
    directory_offset = archive_end.rfind(b"PK\x05\x06")
    if directory_offset < 0 or len(archive_end) - directory_offset < 22:
        raise NotATensorError("it has no directory")
    count, size, start = struct.unpack_from("<H2L", archive_end, directory_offset + 10)
    zip64_at = archive_end.rfind(b"PK\x06\x06", 0, directory_offset)
    if 0xFFFF in (count,) or 0xFFFFFFFF in (size, start):
        if zip64_at < 0 or directory_offset - zip64_at < 56:
            raise NotATensorError("it has no directory")
        count, size, start = struct.unpack_from("<3Q", archive_end, zip64_at + 32)
    if start + size > len(content) or start < len(content) - len(archive_end):
        raise NotATensorError("its directory is too long")
    members: dict[str, memoryview] = {}
    directory, position = bytes(content[start : start + size]), 0
    for _ in range(count):
        if directory[position : position + 4] != b"PK\x01\x02" or len(directory) - position < 46:
            raise NotATensorError("its directory is damaged")
        method, packed, length, name_bytes, extra, comment = struct.unpack_from("<10x1H8x2L3H", directory, position)
        [header] = struct.unpack_from("<L", directory, position + 42)
        name = directory[position + 46 : position + 46 + name_bytes].decode("utf-8", "replace")
        position += 46 + name_bytes + extra + comment
        if method or packed != length:
            raise NotATensorError("it is packed")
        members[name] = _member(content, header, length)
    if len({name.partition("/")[0] for name in members}) != 1:
        raise NotATensorError("it is an archive of something else")
    return members


def _member(content: memoryview, header: int, size: int) -> memoryview:
    if bytes(content[header : header + 4]) != SIGNATURE or header + 30 > len(content):
        raise NotATensorError("its directory is wrong")
    name_bytes, extra = struct.unpack_from("<2H", content, header + 26)
    start = header + 30 + name_bytes + extra
    if start + size > len(content):
        raise NotATensorError("it is cut off")
    return content[start : start + size]


def _tensor(script: bytes) -> tuple[_StorageReference, int, tuple[int, ...], tuple[int, ...]]:
    """Return storage, offset, shape and strides in the pickled description of a tensor."""
    result = _run(script)
    if not isinstance(result, _Call) or result.function.name != _REBUILD_TENSOR:
        raise NotATensorError("it holds something else than one tensor")
    storage, offset, shape, strides, _, hooks = result.arguments[:6]
    if not isinstance(hooks, _Call) or hooks.function.name != _NO_HOOKS or hooks.arguments:
        raise NotATensorError("its tensor has hooks")
    if storage.type_name not in _DTYPES:
        raise NotATensorError(f"its tensor is of {storage.type_name!r}; uint8 and floating-point numbers are read")
    numbers = (offset, storage.count, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
        raise NotATensorError("its shape is none")
    return storage, offset, tuple(shape), tuple(strides)


def _run(script: bytes) -> Any:
    """Return the result of pickle opcodes, with names and calls represented as data."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(script):
        name = opcode.name
        if name in {"PROTO", "FRAME"}:
            continue
        if name == "STOP":
            [result] = stack
            return result
        if name in {"BINPUT", "LONG_BINPUT"}:
            memo[argument] = stack[-1]
        elif name in {"BINGET", "LONG_BINGET"}:
            stack.append(memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}:
            stack.append(argument)
        else:
            _apply(name, argument, stack)
    raise NotATensorError("its description has no end")


def _apply(name: str, argument: Any, stack: list[Any]) -> None:
    """Execute an opcode that takes values from the stack or pushes something other than a constant."""
    if name == "GLOBAL":
        stack.append(_GlobalName(tuple(argument.split(" "))))
    elif name == "MARK":
        stack.append(_PICKLE_MARK)
    elif name == "TUPLE":
        start = len(stack) - 1 - next(i for i, each in enumerate(reversed(stack)) if each is _PICKLE_MARK)
        stack[start:] = [tuple(stack[start + 1 :])]
    elif name in {"TUPLE1", "TUPLE2", "TUPLE3"}:
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "BINPERSID":
        tag, storage, key, _, count = stack.pop()
        if tag != "storage" or storage.name[0] != "torch":
            raise NotATensorError("its numbers are kept elsewhere")
        stack.append(_StorageReference(storage.name[1], key, count))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack[-1] = _Call(stack[-1], arguments)
    else:
        raise NotATensorError(f"its description does more than to describe a tensor ({name})")
