"""Quantisation of an exported model to a format of compressed-tensors, by rounding to nearest, one tensor at a time.

The package `compressed_tensors` defines rules, rounding and packing; vLLM and transformers read the files. Memory holds
at most the quantised tensors of one weight file, one tensor to quantise and temporary values of one chunk of weights.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.checkpoint.rank_files import safetensors_blocks
from cosmos_core.errors import ModelError
from cosmos_core.models.first_layers import find_layers_path
from cosmos_core.models.model_files import weight_files
from cosmos_core.run.files import sync_folder, write_json

_FORMAT_PRESETS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "int8": ("W8A8", "int-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
}
"""Quantisation preset and tensor layout of compressed-tensors, by the name of the format in `export.formats`."""
_GROUP_SIZES = (128, 64, 32)
"""Numbers of weights per quantisation group that vLLM's kernels support, the preferred number first."""
_DIMENSION_SIZE_MULTIPLE = 32
"""Number by which both dimensions of a 4-bit weight must be divisible, for vLLM's kernels."""
_WEIGHTS_PER_CHUNK = 1 << 23
"""Maximum number of elements of a weight tensor that are quantised at once, which limits the memory."""
_INDEX_FILE = "model.safetensors.index.json"


class LinearLayers(NamedTuple):
    """Names and shapes of the linear layers of a model: those to quantise, and those that keep their weights."""

    module_names: dict[str, str]
    """Name of each module to quantise, by the name of its weight in the exported files."""
    weight_shapes: dict[str, tuple[int, ...]]
    """Shape (outputs, inputs) of each weight to quantise, by the name of the weight in the exported files."""
    ignored_modules: list[str]
    """Names of the linear modules that keep their weights: the output layer, and layers outside the decoder blocks."""


def find_layers(model: PreTrainedModel) -> LinearLayers:
    """Return the linear layers of a model; only names and shapes are needed, so that the model can be on the meta
    device. Raise `ModelError` if the model has experts, or no linear layers in decoder blocks."""
    path = find_layers_path(model)
    linear_modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    block_linears = {name: module for name, module in linear_modules.items() if path and name.startswith(f"{path}.")}
    model_class_name = type(model).__name__
    expert_names = [n for n, p in model.named_parameters() if path and n.startswith(f"{path}.") and p.ndim == 3]
    expert_names += [name for name in block_linears if ".experts." in name]
    if expert_names:
        problem = f"is a mixture of experts ({expert_names[0]}), whose fused weights are not quantised"
        raise ModelError(f"{model_class_name} {problem}; leave the quantised formats out of export.formats")
    if not block_linears:
        raise ModelError(f"{model_class_name} has no linear layers in decoder blocks to quantise; see export.formats")
    # Match weights by identity, because they may have other names in the exported files than in the modules.
    saved_tensors = revert_weight_conversion(model, dict(model.state_dict(keep_vars=True)))
    key_by_tensor_id = {id(tensor): key for key, tensor in saved_tensors.items()}
    module_names = {key_by_tensor_id[id(module.weight)]: name for name, module in block_linears.items()}
    weight_shapes = {key: tuple(block_linears[name].weight.shape) for key, name in module_names.items()}
    return LinearLayers(module_names, weight_shapes, [name for name in linear_modules if name not in block_linears])


def make_quant_scheme(format_name: str, linear_layers: LinearLayers) -> QuantizationScheme:
    """Return the scheme of compressed-tensors for a quantised format. The format `w4a16` gets the largest group size
    that divides the input size of every layer. Raise `ModelError` if a weight with groups has a dimension that is not a
    multiple of `_DIMENSION_SIZE_MULTIPLE`."""
    preset_name, tensor_layout = _FORMAT_PRESETS[format_name]
    scheme = preset_name_to_scheme(preset_name, ["Linear"])
    scheme.format = tensor_layout
    if scheme.weights.group_size is None:
        return scheme
    for key, shape in linear_layers.weight_shapes.items():
        if any(dimension % _DIMENSION_SIZE_MULTIPLE for dimension in shape):
            problem = f"{list(shape)}, and both sizes must be multiples of {_DIMENSION_SIZE_MULTIPLE}"
            remedy = f"leave {format_name!r} out of export.formats"
            raise ModelError(f"{format_name}: {key} has the shape {problem}; {remedy}")
    common_input_divisor = math.gcd(*(shape[-1] for shape in linear_layers.weight_shapes.values()))
    scheme.weights.group_size = next(size for size in _GROUP_SIZES if common_input_divisor % size == 0)
    return scheme


def describe_format(format_name: str, scheme: QuantizationScheme, layers: LinearLayers) -> str:
    """Return a line about a quantised format: the number of quantised layers, the number of weights per group, and the
    reason if this is not the preferred number."""
    format_text, size = f"{format_name}: {len(layers.module_names)} linear layers quantised", scheme.weights.group_size
    if size is None:
        return format_text
    reason = "" if size == _GROUP_SIZES[0] else f", because {_GROUP_SIZES[0]} does not divide the inputs of all layers"
    return f"{format_text}, groups of {size} weights{reason}"


def quantize_folder(
    source_folder: Path,
    target_folder: Path,
    scheme: QuantizationScheme,
    linear_layers: LinearLayers,
    on_file_quantized: Callable[[int, int], None] = lambda num_finished, num_files: None,
) -> None:
    """Write a quantised copy of the model in `source_folder` to `target_folder`; files without weights are copied
    unchanged. Weight files that an interrupted call has written to `target_folder` are kept. `on_file_quantized` is
    called after each weight file with the number of finished files and of all files. Raise `ModelError` if
    `source_folder` has no complete safetensors files."""
    target_folder.mkdir(parents=True, exist_ok=True)
    weight_paths, read_problem = weight_files(str(source_folder), None)
    if read_problem:
        raise ModelError(f"export: {source_folder}: {read_problem}")
    for file_number, file in enumerate(map(Path, weight_paths), start=1):
        if not (target_folder / file.name).exists():
            _quantize_file(file, target_folder / file.name, scheme, linear_layers)
        on_file_quantized(file_number, len(weight_paths))
    for other_file in source_folder.iterdir():
        if other_file.is_dir():  # copy the subfolder of the LoRA adapter
            shutil.copytree(other_file, target_folder / other_file.name, dirs_exist_ok=True)
        elif other_file.suffix != ".safetensors" and other_file.name != _INDEX_FILE:
            shutil.copyfile(other_file, target_folder / other_file.name)
    if (source_folder / _INDEX_FILE).exists():
        quantized_files, weight_map = [target_folder / Path(file).name for file in weight_paths], dict[str, str]()
        for target_file in quantized_files:
            with safe_open(target_file, framework="pt") as reader:
                weight_map |= dict.fromkeys(reader.keys(), target_file.name)
        total_size = sum(target_file.stat().st_size for target_file in quantized_files)
        weight_index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(target_folder / _INDEX_FILE, weight_index)
    quantization_config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=str(scheme.format), ignore=linear_layers.ignored_modules,
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    ModelCompressor(quantization_config=quantization_config).update_config(str(target_folder))
    sync_folder(target_folder)


def _quantize_file(file: Path, target_file: Path, scheme: QuantizationScheme, linear_layers: LinearLayers) -> None:
    """Write one weight file with its linear layers quantised, under a temporary name until the file is complete."""
    saved_tensors: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as reader:
        tensor_names = list(reader.keys())
    for tensor_name in tensor_names:
        # Close the file after each tensor, because its mapped pages count as memory of this process.
        with safe_open(file, framework="pt") as reader:
            tensor = reader.get_tensor(tensor_name)
            if tensor_name not in linear_layers.module_names:
                saved_tensors[tensor_name] = tensor.clone()
                continue
            quantized_tensors = quantize_weight(tensor, scheme)
        for tensor_suffix, quantized_tensor in quantized_tensors.items():
            saved_tensors[f"{tensor_name.removesuffix('weight')}{tensor_suffix}"] = quantized_tensor
        del tensor
    partial_weight_file = target_file.with_suffix(".partial")
    with open(partial_weight_file, "wb") as output_file:
        for block in safetensors_blocks(saved_tensors, {"format": "pt"}):
            output_file.write(block)
    partial_weight_file.rename(target_file)


def quantize_weight(weight: Tensor, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Quantise a weight tensor; return the resulting tensors by the names of compressed-tensors, like `weight_scale`.

    Scales have the dtype of the weight, as vLLM reads them; weights are divided by their scales in float32.
    """
    compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
    rows_per_chunk = max(1, _WEIGHTS_PER_CHUNK // weight.shape[1])
    compressed_chunks: list[Mapping[str, Any]] = []
    for weight_rows in weight.split(rows_per_chunk):
        float_rows = weight_rows.float()
        grouped_weights = float_rows.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
        weight_scale, zero_point = calculate_qparams(grouped_weights.amin(-1), grouped_weights.amax(-1), scheme.weights)
        weight_scale = weight_scale.to(weight.dtype)
        unpacked_tensors = {"weight": float_rows, "weight_scale": weight_scale.float(), "weight_zero_point": zero_point}
        compressed_chunks.append({**compressor.compress(unpacked_tensors, scheme), "weight_scale": weight_scale})
    packed_tensors = {name: torch.cat([chunk[name] for chunk in compressed_chunks]) for name in compressed_chunks[0]}
    return packed_tensors | ({"weight_shape": torch.tensor(weight.shape)} if "weight_shape" in packed_tensors else {})
