"""Reader of text embeddings in a data set: safetensors, or a pickle; a pickle with other objects than NumPy arrays is
refused."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, first_line
from cosmos_core.transient import is_machine_error

_NUMPY_CORE_GLOBALS = (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
_ALLOWED_GLOBALS = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    *((f"numpy.{package}.{module}", name) for package in ("core", "_core") for module, name in _NUMPY_CORE_GLOBALS),
}  # fmt: skip
"""Globals (module, name) that a pickle of NumPy arrays refers to; any other global could execute arbitrary code."""


def read_embedding(path: Path, output_names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a text embedding by name, without a batch dimension. `output_names` are the names of the
    text encoder's outputs; only one name is possible for a pickle, which stores no names. Raise DataError if the file
    is damaged, holds other objects than arrays, or lacks one of the names."""

    def convert_embedding_error(error: Exception) -> Exception:
        # Raise only disk errors unchanged: a damaged pickle can cause a MemoryError by declaring a huge array.
        is_disk_error = isinstance(error, OSError) and is_machine_error(error)
        return error if is_disk_error else DataError(f"{path.name}: it is damaged: {first_line(error)}")

    is_pickle_file = path.suffix.lower() != ".safetensors"
    if is_pickle_file and len(output_names) != 1:
        raise DataError(f"{path.name}: a pickle has one array, and the model needs {', '.join(output_names)}; write "
                        "safetensors with these names")  # fmt: skip
    with convert_errors(convert_embedding_error):
        tensors = {output_names[0]: torch.from_numpy(_read_pickled_array(path))} if is_pickle_file else load_file(path)
    if missing_names := set(output_names) - tensors.keys():
        saved_names_text, missing_names_text = (", ".join(sorted(each)) for each in (tensors, missing_names))
        raise DataError(f"{path.name}: it has {saved_names_text}, and the model needs {missing_names_text}")
    return {name: tensors[name] for name in output_names}


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that refuses every global but those of NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and a pickle may hold numpy arrays alone")
        return super().find_class(module, name)


def _read_pickled_array(path: Path) -> np.ndarray:
    """Return the array in a pickle, even inside lists of one element; raise an error if it holds other objects."""
    with open(path, "rb") as file:
        pickle_value = _ArrayUnpickler(file).load()
    while isinstance(pickle_value, list) and len(pickle_value) == 1:
        pickle_value = pickle_value[0]
    if not isinstance(pickle_value, np.ndarray) or not np.issubdtype(pickle_value.dtype, np.floating):
        raise DataError(f"{path.name}: it holds {type(pickle_value).__name__}, not one array of floating-point numbers")
    return pickle_value
