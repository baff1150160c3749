"""Reader of one tensor in the file format of `torch.save`, without torch and without unpickling.

Cosmos-RL's example clients send latents of videos in this format. The file is a zip archive whose `data.pkl` holds
dtype, shape and strides in twenty opcodes. The opcodes are parsed as data, and the names in them are compared with
expected names and never called. All allocations are smaller than the file. Other objects that torch saves are refused.
"""

import io
import math
import pickletools
import struct
import zipfile
from typing import Any, NamedTuple

import numpy as np

from cosmos_core.error_handling import convert_errors

ZIP_SIGNATURE = b"PK\x03\x04"
_DIRECTORY_SEARCH_BYTES = 16 * 2**10
"""Number of bytes at the end of the archive in which its directory is searched."""
_MAX_PICKLE_BYTES = 4096
_DTYPE_BY_STORAGE_TYPE: dict[str, np.dtype[Any]] = {
    "ByteStorage": np.dtype("|u1"), "HalfStorage": np.dtype("<f2"), "BFloat16Storage": np.dtype("<u2"),
    "FloatStorage": np.dtype("<f4"), "DoubleStorage": np.dtype("<f8"),
}  # fmt: skip
_REBUILD_TENSOR_FUNCTION = ("torch._utils", "_rebuild_tensor_v2")
_HOOKS_DICT_TYPE = ("collections", "OrderedDict")
_CONSTANT_BY_OPCODE_NAME = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PICKLE_MARK = object()


class NotATensorError(ValueError):
    """Error for a file of `torch.save` that is not one tensor; the message describes the content on one line."""


class _PickledGlobal(NamedTuple):
    name: tuple[str, ...]


class _StorageReference(NamedTuple):
    type_name: str
    key: str
    num_elements: int


class _PickledCall(NamedTuple):
    function: _PickledGlobal
    arguments: tuple[Any, ...]


def read_tensor(file_bytes: memoryview) -> np.ndarray:
    """Return the tensor in a file, as a view of the file if possible; bfloat16 numbers become uint8 bytes. Raise
    `NotATensorError` if the file is not one tensor of numbers."""
    archive_files = _read_zip_files(file_bytes)
    [archive_root] = {name.partition("/")[0] for name in archive_files}
    if (pickle_bytes := archive_files.get(f"{archive_root}/data.pkl")) is None or len(pickle_bytes) > _MAX_PICKLE_BYTES:
        raise NotATensorError("it has no description of a tensor")
    if bytes(archive_files.get(f"{archive_root}/byteorder", b"little")) != b"little":
        raise NotATensorError("its numbers are not little-endian")
    error_prefix = "its description is none of a tensor: "
    with convert_errors(lambda error: NotATensorError(error_prefix + type(error).__name__), NotATensorError):
        storage_ref, storage_offset, shape, strides = _parse_tensor(bytes(pickle_bytes))
    dtype = _DTYPE_BY_STORAGE_TYPE[storage_ref.type_name]
    tensor_bytes = archive_files.get(f"{archive_root}/data/{storage_ref.key}")
    if tensor_bytes is None or len(tensor_bytes) != storage_ref.num_elements * dtype.itemsize:
        raise NotATensorError("its numbers are not there, or not as many as it says")
    strides = tuple(stride if axis_size > 1 else 0 for axis_size, stride in zip(shape, strides, strict=True))
    max_element_index = storage_offset + sum(
        (axis_size - 1) * stride for axis_size, stride in zip(shape, strides, strict=True)
    )
    if not 0 < math.prod(shape) <= storage_ref.num_elements or max_element_index >= storage_ref.num_elements:
        raise NotATensorError("it is empty, or its shape goes beyond its numbers")
    flat_array = np.frombuffer(tensor_bytes, dtype)[storage_offset:]
    byte_strides = [each * dtype.itemsize for each in strides]
    tensor = np.lib.stride_tricks.as_strided(flat_array, shape, byte_strides, writeable=False)
    return np.ascontiguousarray(tensor).view(np.uint8) if storage_ref.type_name == "BFloat16Storage" else tensor


def _read_zip_files(file_bytes: memoryview) -> dict[str, memoryview]:
    """Return the files in an uncompressed zip archive by name, from the directory at its end."""
    archive_tail = file_bytes[-_DIRECTORY_SEARCH_BYTES:]
    with convert_errors(lambda error: NotATensorError("it has no directory, or a damaged one"), NotATensorError):
        zip_entries = zipfile.ZipFile(io.BytesIO(archive_tail)).infolist()
    archive_files: dict[str, memoryview] = {}
    for zip_entry in zip_entries:
        if zip_entry.compress_type or zip_entry.compress_size != zip_entry.file_size:
            raise NotATensorError("it is packed")
        header_offset = zip_entry.header_offset + len(file_bytes) - len(archive_tail)
        header_signature = bytes(file_bytes[header_offset : header_offset + 4])
        if not 0 <= header_offset <= len(file_bytes) - 30 or header_signature != ZIP_SIGNATURE:
            raise NotATensorError("its directory is wrong")
        name_length, extra_field_length = struct.unpack_from("<2H", file_bytes, header_offset + 26)
        entry_data_offset = header_offset + 30 + name_length + extra_field_length
        entry_data_end = entry_data_offset + zip_entry.file_size
        if entry_data_end > len(file_bytes):
            raise NotATensorError("it is cut off")
        archive_files[zip_entry.filename] = file_bytes[entry_data_offset:entry_data_end]
    if len({name.partition("/")[0] for name in archive_files}) != 1:
        raise NotATensorError("it is an archive of something else")
    return archive_files


def _parse_tensor(pickle_bytes: bytes) -> tuple[_StorageReference, int, tuple[int, ...], tuple[int, ...]]:
    """Return storage, offset, shape and strides in the pickled description of a tensor."""
    pickled_call = _interpret_pickle(pickle_bytes)
    if not isinstance(pickled_call, _PickledCall) or pickled_call.function.name != _REBUILD_TENSOR_FUNCTION:
        raise NotATensorError("it holds something else than one tensor")
    storage_ref, storage_offset, shape, strides, _, hooks = pickled_call.arguments[:6]
    if not isinstance(hooks, _PickledCall) or hooks.function.name != _HOOKS_DICT_TYPE or hooks.arguments:
        raise NotATensorError("its tensor has hooks")
    if storage_ref.type_name not in _DTYPE_BY_STORAGE_TYPE:
        raise NotATensorError(f"its tensor is of {storage_ref.type_name!r}; uint8 and floating-point numbers are read")
    layout_integers = (storage_offset, storage_ref.num_elements, *shape, *strides)
    if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in layout_integers):
        raise NotATensorError("its shape is none")
    return storage_ref, storage_offset, tuple(shape), tuple(strides)


def _interpret_pickle(pickle_bytes: bytes) -> Any:
    """Return the object that pickle opcodes describe; names and calls in them become data, and nothing is executed."""
    pickle_stack: list[Any] = []
    pickle_memo: dict[Any, Any] = {}
    for opcode, opcode_argument, _ in pickletools.genops(pickle_bytes):
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":  # these opcodes push nothing on the stack, and `genops` ends at STOP
                pass
            case "BINPUT" | "LONG_BINPUT":
                pickle_memo[opcode_argument] = pickle_stack[-1]
            case "BINGET" | "LONG_BINGET":
                pickle_stack.append(pickle_memo[opcode_argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                pickle_stack.append(_CONSTANT_BY_OPCODE_NAME[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                pickle_stack.append(opcode_argument)
            case "GLOBAL":
                pickle_stack.append(_PickledGlobal(tuple(str(opcode_argument).split(" "))))
            case "MARK":
                pickle_stack.append(_PICKLE_MARK)
            case "TUPLE":
                mark_index = next(i for i in reversed(range(len(pickle_stack))) if pickle_stack[i] is _PICKLE_MARK)
                pickle_stack[mark_index:] = [tuple(pickle_stack[mark_index + 1 :])]
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                tuple_size = int(opcode.name[-1])
                pickle_stack[-tuple_size:] = [tuple(pickle_stack[-tuple_size:])]
            case "BINPERSID":
                persistent_id_type, storage_type, storage_key, _, num_elements = pickle_stack.pop()
                if persistent_id_type != "storage" or storage_type.name[0] != "torch":
                    raise NotATensorError("its numbers are kept elsewhere")
                pickle_stack.append(_StorageReference(storage_type.name[1], storage_key, num_elements))
            case "REDUCE":
                call_arguments = pickle_stack.pop()
                pickle_stack[-1] = _PickledCall(pickle_stack[-1], call_arguments)
            case name:
                raise NotATensorError(f"its description does more than to describe a tensor ({name})")
    [unpickled_object] = pickle_stack
    return unpickled_object
