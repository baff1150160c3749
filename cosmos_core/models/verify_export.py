"""Verify that an export is the trained model: its keys, its bytes, and its outputs in a fresh interpreter.

The fresh interpreter gets only the folder and the inputs of the computation (the probe). If memory cannot hold the
model a second time, both processes compute with as many first layers as fit; keys and bytes are checked for all layers,
one tensor at a time. Only checks that ran are reported.

Shape legend: B sequences, T tokens, V vocabulary.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from pebble import ProcessPool
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.errors import ProgramError, StageFailed
from cosmos_core.models.export import find_float32_weights
from cosmos_core.models.first_layers import (
    FirstLayers,
    is_layer_removed,
    keep_first_layers,
    select_first_layers,
    truncate_config,
)
from cosmos_core.models.lora import ADAPTER_FOLDER, has_changed_base, has_lora_adapter, merge_adapter, merged_state_dict
from cosmos_core.models.model_files import model_error, translate_load_errors
from cosmos_core.models.new_interpreter import call_in_interpreter, open_interpreter_pool
from cosmos_core.models.quantized_base import disable_requantization, make_dequantize_options

_WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
_PROBE_INPUT_SHAPE = (2, 16)
_PROBE_TEXT = "Is 12 + 7 = 19?\n  Déjà vu: ½ · 東京 🙂"
_LOAD_TIMEOUT_SECONDS = 3000
_LOGIT_TOLERANCE = 1e-4
"""Maximum difference, as a fraction of the largest logit, between the trainer's logits and those of the reloaded
export. Both are computed in float32 with the same weights, but the order of sums can differ between devices."""
_MERGE_TOLERANCE_BY_DTYPE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.1}
"""Maximum difference between the logits with a merged and with a separate adapter, as a fraction of the largest logit,
by dtype of the weights. Merging rounds the weights once more."""
_MAX_MEMORY_FRACTION = 0.8
"""Maximum fraction of the free memory for copies of the model; the page cache of the export's files needs the rest."""
_MODEL_DESCRIPTION_BY_CHECK = {"reload": "reloaded model", "merge": "merged model", "adapter": "adapter on its base"}


class LogitsRequest(NamedTuple):
    """Inputs and settings with which the trainer and a fresh interpreter compute the same logits."""

    input_ids_BT: np.ndarray
    dtype: torch.dtype
    """Dtype in which the base model of an exported adapter is loaded; an exported model is loaded in float32."""
    attention_name: str
    num_threads: int
    first_layers: FirstLayers | None
    buffer_dtypes: dict[str, torch.dtype]
    """Dtypes, by name, of the floating-point buffers that are not float32 in the trainer."""


def verify_export(
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    memory_bytes: int | None = None,
) -> list[str]:
    """Compare the export in `folder` with the model in memory, and return a text about each passed check; raise
    StageFailed if a check fails. A model with an adapter is compared in merged form, and the adapter separately.

    `dtype`: dtype to which the export cast the weights; None: each weight kept its dtype. The exported tokenizer must
    have the ids and the chat template of `tokenizer`; None: not checked. `memory_bytes`: available memory, most of
    which copies of the model for this comparison may use; None: the free memory.
    """
    with open_interpreter_pool() as pool:
        with merge_adapter(model):
            with disable_requantization(model):
                expected_tensors = revert_weight_conversion(model, merged_state_dict(model))
            passed_checks = _check_files(expected_tensors, folder, dtype, find_float32_weights(model, dtype))
            available_memory_bytes = psutil.virtual_memory().available if memory_bytes is None else memory_bytes
            first_layers = select_first_layers(model, dtype, int(available_memory_bytes * _MAX_MEMORY_FRACTION))
            with keep_first_layers(model, first_layers):
                merged_logits_BTV = _compute_trainer_logits(model, dtype)
                reloaded_logits_BTV, tokenizer_description = _compute_reloaded_logits(model, folder, first_layers, pool)
        passed_checks.append(_compare_logits("reload", merged_logits_BTV, reloaded_logits_BTV, folder, first_layers))
        if tokenizer is not None:
            if tokenizer_description != _describe_tokenizer(tokenizer):
                raise ProgramError(
                    f"export {folder} failed the check 'tokenizer': the reloaded one encodes {_PROBE_TEXT!r} "
                    "otherwise or has another chat template; save the tokenizer again from the base model"
                )
            passed_checks.append("tokenizer")
        if has_lora_adapter(model):
            with keep_first_layers(model, first_layers):
                passed_checks += _check_adapter(model, merged_logits_BTV, folder, first_layers, pool)
    return passed_checks


def check_export_possible(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, model: str, processor_files: Mapping[str, bytes]
) -> None:
    """Check before a training that the config, tokenizer and processor of its export can be saved and loaded again;
    raise ModelError if transformers cannot save them, or loads a different tokenizer."""
    with translate_load_errors("config and tokenizer that an export would have", model), TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, content in processor_files.items():
            Path(folder, name).write_bytes(content)
        ProcessorMixin.get_processor_dict(folder)  # raises an error for conflicting files of chat templates
        if _describe_tokenizer(AutoTokenizer.from_pretrained(folder)) != _describe_tokenizer(tokenizer):
            raise model_error(model, "the tokenizer, saved by transformers, is another when it is loaded")


def _check_files(
    expected_tensors: dict[str, Tensor], export_folder: Path, dtype: torch.dtype | None, float32_addresses: set[int]
) -> list[str]:
    """Check that the weight files and their index contain exactly `expected_tensors`, cast to `dtype`, bit for bit.
    Tensors at the memory addresses `float32_addresses` are not cast. If a weight is tied, one of its keys suffices."""
    file_name_by_key: dict[str, str] = {}
    differing_keys: list[str] = []
    for tensor_file, tensor_key, tensor in iterate_tensors(export_folder):
        file_name_by_key[tensor_key] = tensor_file.name
        if (expected_tensor := expected_tensors.get(tensor_key)) is not None:
            should_cast = expected_tensor.is_floating_point() and expected_tensor.data_ptr() not in float32_addresses
            expected_tensor = expected_tensor.detach().to("cpu", dtype if should_cast else None)
            differing_keys += [] if are_bits_equal(tensor, expected_tensor) else [tensor_key]
    keys_by_storage: dict[tuple[int, torch.Size], set[str]] = {}
    for tensor_key, tensor in expected_tensors.items():
        keys_by_storage.setdefault((tensor.data_ptr(), tensor.shape), set()).add(tensor_key)
    missing_keys = sorted(min(keys) for keys in keys_by_storage.values() if not keys & file_name_by_key.keys())
    unexpected_keys = sorted(file_name_by_key.keys() - expected_tensors.keys())
    if missing_keys or unexpected_keys:
        raise ProgramError(
            f"export {export_folder} failed the check 'keys': missing {format_names(missing_keys)}, unexpected "
            f"{format_names(unexpected_keys)}; it must not be used, run the stage again"
        )
    index_file = export_folder / _WEIGHTS_INDEX_FILE
    if index_file.exists() and json.loads(index_file.read_text(encoding="utf-8"))["weight_map"] != file_name_by_key:
        remedy = f"{_WEIGHTS_INDEX_FILE} does not match the files; run the stage again"
        raise ProgramError(f"export {export_folder} failed the check 'keys': {remedy}")
    if differing_keys:
        raise ProgramError(
            f"export {export_folder} failed the check 'bytes': {format_names(sorted(differing_keys))} on disk is not "
            "what was trained; it must not be used, check the disk and run the stage again"
        )
    return ["keys", "bytes"]


def iterate_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield file, key and tensor of all safetensors files in a folder; raise StageFailed if a file is damaged."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensor_file:
                yield from ((file, key, tensor_file.get_tensor(key)) for key in tensor_file.keys())  # noqa: SIM118
        except SafetensorError as error:
            remedy = "check the disk and run the stage again"
            raise StageFailed(f"export file {file} is damaged ({error}); {remedy}") from error


def _check_adapter(
    model: PreTrainedModel, merged_logits_BTV: Tensor, folder: Path, first_layers: FirstLayers | None, pool: ProcessPool
) -> list[str]:
    """Check that merging the adapter changes the logits only by rounding, and that PEFT computes the same logits from
    the base model and the exported adapter in `folder`. Return texts about both checks; raise an error if one fails."""
    adapted_logits_BTV, merge_tolerance = _compute_trainer_logits(model, None), _MERGE_TOLERANCE_BY_DTYPE[model.dtype]
    tolerance = merge_tolerance if has_changed_base(model) else _LOGIT_TOLERANCE
    adapter_folder = folder / ADAPTER_FOLDER
    reloaded_logits_BTV, _ = _compute_reloaded_logits(model, adapter_folder, first_layers, pool)
    return [
        _compare_logits("merge", adapted_logits_BTV, merged_logits_BTV, folder, first_layers, merge_tolerance),
        _compare_logits("adapter", adapted_logits_BTV, reloaded_logits_BTV, adapter_folder, first_layers, tolerance),
    ]


def _compute_reloaded_logits(
    model: PreTrainedModel, folder: Path, first_layers: FirstLayers | None, pool: ProcessPool
) -> tuple[Tensor, list[object]]:
    """Return the logits BTV that a fresh interpreter computes from the exported model in `folder`, with the attention
    of transformers instead of packed attention, and a description of the tokenizer in this folder."""
    attention_name = (model.config._attn_implementation or "sdpa").removeprefix("packed_")
    buffer_dtypes = {
        name: buffer.dtype
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype != torch.float32
    }
    token_ids, num_threads = _make_probe_ids(model).numpy(), torch.get_num_threads()
    logits_request = LogitsRequest(token_ids, model.dtype, attention_name, num_threads, first_layers, buffer_dtypes)
    call_arguments = (folder, logits_request)
    logits_BTV, tokenizer = call_in_interpreter(pool, compute_logits, call_arguments, _LOAD_TIMEOUT_SECONDS, folder)
    return torch.from_numpy(logits_BTV), tokenizer


def _make_probe_ids(model: PreTrainedModel) -> Tensor:
    """Return the random token ids BT for which logits are compared, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.get_text_config().vocab_size, _PROBE_INPUT_SHAPE, generator=generator)


def _compare_logits(
    check_name: str,
    trainer_logits_BTV: Tensor,
    reloaded_logits_BTV: Tensor,
    export_folder: Path,
    first_layers: FirstLayers | None,
    logit_tolerance: float = _LOGIT_TOLERANCE,
) -> str:
    """Return a text that the check `check_name` has passed; raise ProgramError if the logits differ by more than
    `logit_tolerance` times the largest logit. `first_layers` are the layers that computed the logits, for the text."""
    layer_text = f" (first {first_layers.num_first_layers} of {first_layers.num_layers} layers)" if first_layers else ""
    if are_bits_equal(trainer_logits_BTV, reloaded_logits_BTV):
        return f"{check_name}{layer_text}: bit-identical"
    max_allowed_difference = logit_tolerance * float(trainer_logits_BTV.abs().max())
    is_same_shape = trainer_logits_BTV.shape == reloaded_logits_BTV.shape
    max_difference = float((trainer_logits_BTV - reloaded_logits_BTV).abs().max()) if is_same_shape else float("inf")
    if not max_difference <= max_allowed_difference:  # `not <=` instead of `>`, so that NaN fails too
        raise ProgramError(
            f"export {export_folder} failed the check {check_name!r}: logits of the "
            f"{_MODEL_DESCRIPTION_BY_CHECK[check_name]} differ by {max_difference:.2g} from the trainer's, more than "
            f"{max_allowed_difference:.2g}; compare its config.json with that of the base model"
        )
    return f"{check_name}{layer_text}: max difference {max_difference:.1g} <= {max_allowed_difference:.1g}"


@torch.no_grad()
def _compute_trainer_logits(model: PreTrainedModel, dtype: torch.dtype | None) -> Tensor:
    """Return the logits BTV that the model computes in float32 with weights rounded to `dtype`, as in the export."""
    float32_weight_addresses = find_float32_weights(model, dtype)
    float32_weights = {
        name: (p if dtype is None or p.data_ptr() in float32_weight_addresses else p.to(dtype)).float()
        for name, p in model.named_parameters()
    }
    was_training = model.training
    model.eval()
    try:
        forward_arguments = {"input_ids": _make_probe_ids(model).to(model.device), "use_cache": False}
        with torch.compiler.set_stance("force_eager"):  # do not run blocks that were compiled for another device
            model_output = torch.func.functional_call(model, float32_weights, kwargs=forward_arguments)
    finally:
        model.train(was_training)
    return model_output.logits.float().cpu()


@torch.no_grad()
def compute_logits(folder: Path, logits_request: LogitsRequest) -> tuple[np.ndarray, list[object]]:
    """Load the exported model or adapter in `folder` as a user would. Return the logits BTV of the token ids in
    `logits_request`, and a description of the tokenizer, which is empty for an adapter."""
    torch.set_num_threads(logits_request.num_threads)
    has_adapter = (folder / "adapter_config.json").is_file()
    model = _load_with_adapter(folder, logits_request) if has_adapter else _load_exported_model(folder, logits_request)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffer.to(logits_request.buffer_dtypes.get(name, buffer.dtype)))
    ProcessorMixin.get_processor_dict(folder)
    tokenizer_description = [] if has_adapter else _describe_tokenizer(AutoTokenizer.from_pretrained(folder))
    logits_BTV = model.eval()(input_ids=torch.from_numpy(logits_request.input_ids_BT), use_cache=False).logits
    return logits_BTV.float().numpy(), tokenizer_description


def _load_exported_model(folder: Path, logits_request: LogitsRequest) -> Any:
    first_layers, attention_name = logits_request.first_layers, logits_request.attention_name
    config = truncate_config(AutoConfig.from_pretrained(folder), first_layers)
    model_and_loading_info: Any = select_auto_class(config).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=attention_name, output_loading_info=True
    )
    model, loading_info = model_and_loading_info
    unexpected_keys = map(str, loading_info["unexpected_keys"])
    loading_info["unexpected_keys"] = [k for k in unexpected_keys if not is_layer_removed(k, first_layers)]
    if keys_by_problem := {name: sorted(map(str, keys)) for name, keys in loading_info.items() if keys}:
        raise StageFailed(f"transformers found {keys_by_problem}")
    return model


def _load_with_adapter(folder: Path, logits_request: LogitsRequest) -> Any:
    """Return the base model that an exported adapter names, with the adapter, in float32. The base model is loaded in
    the dtype of training first, so that its weights are rounded as in training."""
    adapter_config = PeftConfig.from_pretrained(str(folder))
    base_name, revision = str(adapter_config.base_model_name_or_path), adapter_config.revision
    config = truncate_config(AutoConfig.from_pretrained(base_name, revision=revision), logits_request.first_layers)
    model_class: Any = select_auto_class(config)
    base_model = model_class.from_pretrained(
        base_name, config=config, revision=revision, dtype=logits_request.dtype,
        attn_implementation=logits_request.attention_name,
        generation_config=GenerationConfig(),  # empty, because transformers may refuse the base model's config
        **make_dequantize_options(config),
    )  # fmt: skip
    return PeftModel.from_pretrained(base_model, str(folder)).float()


def select_auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that loads the architecture in a model config. AutoModelForCausalLM does
    not support some vision-language models, and loads others without their vision tower."""
    class_name = (config.architectures or [""])[0]
    image_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_image_class = image_class is not None and image_class.__name__ == class_name and text_class is not image_class
    return AutoModelForImageTextToText if is_image_class else AutoModelForCausalLM


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[object]:
    return [tokenizer.encode(_PROBE_TEXT), tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.pad_token_id]


def are_bits_equal(first_tensor: Tensor, second_tensor: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits: NaN equals NaN, and 0.0 does not equal -0.0."""
    if first_tensor.dtype != second_tensor.dtype or first_tensor.shape != second_tensor.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (first_tensor, second_tensor)))


def format_names(names: list[str]) -> str:
    """Return a text, for an error message, with the first three of `names` and the number of the others."""
    return (", ".join(names[:3]) or "none") + (f" and {len(names) - 3} more" if len(names) > 3 else "")
