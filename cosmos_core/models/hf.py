"""Loading of language models in Hugging Face format, with checks of all loaded tensors and of prepared rows.

This is the only module that selects model classes of transformers. Adapters, meshes, log-probabilities and diffusion
models are in other modules.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import meta_device_safe_creation_ops, no_init_weights
from transformers.quantizers.auto import get_hf_quantizer

from cosmos_core.data.prepared import check_token_ids, find_longest_row_length
from cosmos_core.errors import DataError, ModelError
from cosmos_core.models.chat_templates import set_chat_template
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.model_files import check_weights, locate_model, model_error, read_json, translate_load_errors
from cosmos_core.models.quantized_base import DEQUANTIZED_FORMATS, MXFP4, make_dequantize_options, quantization_method
from cosmos_core.models.recompute import RecomputeMode, recompute_activations

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tekken.json",
)  # fmt: skip


_BIDIRECTIONAL_MODEL_TYPES = ("cpmant", "flaubert", "prophetnet", "xlm", "xlnet")
"""Types of models (`model_type` in config.json) that generate text, but whose logits at a token depend on later
tokens."""


def load_tokenizer(
    model: str, revision: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or Hub id; raise ModelError if there is none, or if it has no token for
    padding. If `chat_template` is not None, it replaces the tokenizer's chat template."""
    model_source, load_options = locate_model(model, revision)
    if isinstance(model_source, Path) and not any((model_source / name).is_file() for name in _TOKENIZER_FILES):
        # Without this check, transformers creates an empty tokenizer from config.json alone.
        raise model_error(model, "the folder has no tokenizer; save one beside the weights (tokenizer.json)")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        read_json(Path(model_source, name), model)
    with translate_load_errors("tokenizer", model):
        # With mistral_common installed and a tekken.json, transformers would return a tokenizer without chat template.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(model_source), trust_remote_code=False, mistral_format=False, **load_options
        )
    if not isinstance(tokenizer.model_max_length, int | float):
        problem = f"tokenizer_config.json has model_max_length = {tokenizer.model_max_length!r}"
        raise model_error(model, f"{problem}, which is no number of tokens; write one, or leave it out")
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        problem = "the tokenizer has neither a pad_token nor an eos_token"
        raise model_error(model, f"{problem}; name one of its tokens in tokenizer_config.json")
    set_chat_template(tokenizer, chat_template)
    return tokenizer


def load_config(model: str, revision: str | None = None) -> PretrainedConfig:
    """Load the configuration of a model folder or Hub id; raise ModelError if its config.json is missing or invalid."""
    model_source, load_options = locate_model(model, revision)
    if isinstance(model_source, Path):
        has_adapter = (model_source / "adapter_config.json").is_file()
        if not (model_source / "config.json").is_file():
            remedy = "give a folder in Hugging Face format"
            nested_config_files = [
                file for level in (1, 2, 3) for file in sorted(model_source.glob("*/" * level + "config.json"))
            ]
            if nested_config_files:  # suggest subfolders, because `model` may be a folder of checkpoints
                remedy += f", such as {' or '.join(str(file.parent) for file in nested_config_files[:3])}"
            if has_adapter:
                remedy = "it is an adapter: name its base here, and the folder in policy.lora.lora_path"
            elif (model_source / "model_index.json").is_file():
                remedy = "it is a pipeline of diffusers, which cosmos diffusion-sft trains"
            raise model_error(model, f"the folder has no config.json; {remedy}")
        if has_adapter:  # `from_pretrained` would load the adapter, but `load_shards` would ignore it: raise an error
            problem = "the folder has a model and an adapter (adapter_config.json)"
            raise model_error(model, f"{problem}; move the adapter to a folder for policy.lora.lora_path")
    for file_name in ("config.json", "generation_config.json"):
        read_json(Path(model_source, file_name), model)
    with translate_load_errors("config.json", model):
        return AutoConfig.from_pretrained(str(model_source), trust_remote_code=False, **load_options)


def load_model(
    model: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device | None = None,
    gradient_checkpointing: RecomputeMode = False,
) -> PreTrainedModel:
    """Load the model of a folder or Hub id in evaluation mode on `device` (None: CPU). Raise ModelError if the model
    does not exist, a file is damaged, a tensor is missing, unexpected, of the wrong shape or not finite, or if the
    architecture does not generate text."""
    model_source, load_options = locate_model(model, revision)
    config = load_config(model, revision)
    check_weights(model)
    with torch.device("meta"), meta_device_safe_creation_ops():
        # Build an empty model first, because this raises the same errors for a wrong config.json as `init_on_meta`.
        _build_empty_model(config, model, dtype)
    cls = find_model_class(config)
    if generation_config := load_generation_config(model, revision):
        load_options["generation_config"] = generation_config
    load_options |= (dequantize_options := make_dequantize_options(config))
    with translate_load_errors("weights", model):
        loaded_model, loading_info = cls.from_pretrained(
            str(model_source), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **load_options, **_select_attention_implementation(cls, config),
        )  # fmt: skip
    if dequantize_options and dequantize_options["quantization_config"].quant_method == MXFP4:
        loaded_model.__dict__.pop("_weight_conversions")  # weight conversions would make transformers save no experts
    check_loaded_tensors(loaded_model, loading_info, model)
    for name, tensor in loaded_model.state_dict().items():
        if problem := describe_nonfinite_values(name, tensor):
            raise model_error(model, problem)
    # The revision is stored for rollout engines, because transformers does not always store it in the config.
    loaded_model.config._commit_hash = getattr(loaded_model.config, "_commit_hash", None) or revision
    nn.Module.to(loaded_model, device)
    recompute_activations(loaded_model, gradient_checkpointing)
    return loaded_model


def model_without_weights(
    model: str, *, revision: str | None = None, dtype: torch.dtype, gradient_checkpointing: RecomputeMode = False
) -> PreTrainedModel:
    """Build the model of `load_model` from its config.json without reading weights, on the meta device or in fake
    tensor mode. Raise ModelError if its config.json is wrong, or its architecture does not generate text."""
    empty_model = _build_empty_model(load_config(model, revision), model, dtype)
    empty_model.tie_weights()  # weights are tied explicitly, because the initialisation that would tie them is skipped
    recompute_activations(empty_model, gradient_checkpointing)
    return empty_model.eval()


def check_row_length(config: PretrainedConfig, max_length: int) -> None:
    """Raise ModelError if rows of `max_length` tokens exceed the number of tokens above which transformers changes the
    rotary embedding of a whole batch (`longrope`, `dynamic`), so that results would depend on the longest row."""
    text_config = config.get_text_config()
    rope_parameters = getattr(text_config, "rope_parameters", None) or {}
    for rope_config in [rope_parameters] if "rope_type" in rope_parameters else rope_parameters.values():
        if rope_config.get("rope_type") not in ("longrope", "dynamic"):
            continue
        max_trained_length = rope_config.get("original_max_position_embeddings") or text_config.max_position_embeddings
        if max_length > max_trained_length:
            raise ModelError(
                f"policy.model_max_length = {max_length}: the model's {rope_config['rope_type']!r} positions change "
                f"for every row of a batch that has one of more than {max_trained_length} tokens, so a loss would "
                f"depend on its neighbours; make it at most {max_trained_length}"
            )


def check_rows(
    config: PretrainedConfig, prepared_folder: Path, build_model: Callable[[], PreTrainedModel],
    *, completed_splits: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return a warning if a row in `prepared_folder` has more tokens than the model has positions, otherwise an empty
    string. Raise DataError if a token has no embedding; raise ModelError if a row has more tokens than the model has
    learned position embeddings, or if a prompt leaves no position for its completion. `build_model` returns the model,
    possibly without weights; it is called only if `config` lacks a size. `completed_splits` are the splits (`train`,
    `validation`) whose prompts a rollout engine completes."""
    text_config = config.get_text_config()
    try:
        check_token_ids(prepared_folder, getattr(text_config, "vocab_size", 0))
    except DataError:  # count embeddings, because some models have more than `vocab_size`
        input_embedding: Any = build_model().get_input_embeddings()
        check_token_ids(prepared_folder, input_embedding.weight.shape[0])
    max_row_tokens = find_longest_row_length(prepared_folder)
    max_positions = getattr(text_config, "max_position_embeddings", None)
    longest_prompt_lengths = [find_longest_row_length(prepared_folder, "prompt_ids", s) for s in completed_splits]
    max_prompt_tokens = max(longest_prompt_lengths, default=0)
    if max_positions and max_prompt_tokens >= max_positions:
        raise ModelError(
            f"a prompt of {max_prompt_tokens:,} tokens leaves none of the {max_positions:,} positions of the model to "
            f"a completion; set policy.model_max_length to {max_positions}, which leaves such prompts out"
        )
    if not max_positions or max_row_tokens <= max_positions:
        return ""
    problem = f"rows of up to {max_row_tokens:,} tokens are longer than the {max_positions:,} positions of the model"
    model, remedy = build_model(), "lower policy.model_max_length"
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedding_sizes = {module.num_embeddings for module in embeddings if module is not model.get_input_embeddings()}
    if not embedding_sizes.isdisjoint({max_positions, max_positions + 2}):
        raise ModelError(f"{problem}; {remedy}")
    return f"{problem} (max_position_embeddings), so it learns positions that it never saw; {remedy}"


def _build_empty_model(config: PretrainedConfig, model: str, dtype: torch.dtype) -> PreTrainedModel:
    _check_architecture(config, model)
    cls = find_model_class(config)
    model_constructor = cls.from_config if cls is AutoModelForCausalLM else cls._from_config
    # Skip initialisations that read weights, because meta tensors have no values.
    with translate_load_errors("architecture", model), no_init_weights():
        empty_model = model_constructor(config, dtype=dtype, **_select_attention_implementation(cls, config))
    is_encoder_config = {getattr(c, "is_decoder", None) for c in (type(config), empty_model.config)} == {False}
    if is_encoder_config and "encoder_hidden_states" in inspect.signature(empty_model.forward).parameters:
        problem = "config.json has is_decoder = false or no such key, so that tokens attend to the tokens after them"
        raise model_error(model, f"{problem}; write true there if it was trained so, or give a causal language model")
    return empty_model


def _check_architecture(config: PretrainedConfig, model: str) -> None:
    """Raise ModelError if the architecture in a config.json is no model of transformers, does not generate text or does
    not match `model_type`, or if the package that reads quantized weights is missing."""
    with translate_load_errors("architecture", model):  # importing the model class fails if a library is missing
        cls = find_model_class(config)
    if config.model_type in _BIDIRECTIONAL_MODEL_TYPES:
        problem = f"logits of {config.model_type!r} depend on the tokens that follow, which it would learn to copy"
        raise model_error(model, f"{problem}; give a causal language model")
    if config.architectures:
        architectures_text = f"config.json has architectures = {config.architectures!r}"
        if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
            problem = f"{architectures_text}, which transformers has no model for"
            raise model_error(model, f"{problem}; name a causal language model there")
        if not cls.can_generate():
            raise model_error(model, f"{cls.__name__} does not generate text; give a causal language model")
        text_config, config_class = config.get_text_config(), cast(Any, cls.config_class)
        is_bidirectional = getattr(text_config, "use_bidirectional_attention", None) is True
        if is_bidirectional or (
            getattr(config, "is_encoder_decoder", False) and not cls.__name__.endswith("ForCausalLM")
        ):
            problem = f"tokens of {cls.__name__} attend to the tokens after them, which they would learn to copy"
            raise model_error(model, f"{problem}; give a causal language model")
        is_image_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None) is cls
        if config_class and not (is_image_class or any(isinstance(c, config_class) for c in (config, text_config))):
            raise model_error(
                model, f"{architectures_text} and model_type = {config.model_type!r}, which do not belong together"
            )
    for config_key, default_value in (("output_attentions", False), ("return_dict", True)):
        if (config_value := getattr(config, config_key, default_value)) != default_value:
            problem = f"config.json has {config_key} = {config_value}, which changes what a forward pass returns"
            raise model_error(model, f"{problem}; leave it out there")
    # RuntimeError is ignored: the quantizer raises it without a GPU, but a machine with a GPU may load the weights.
    quantization_remedy = (
        "" if quantization_method(config) in DEQUANTIZED_FORMATS else " (to train, take the model without quantization)"
    )
    with translate_load_errors(f"quantized weights{quantization_remedy}", model), suppress(RuntimeError):
        get_hf_quantizer(copy.deepcopy(config), None, None, True, {})


def find_model_class(config: PretrainedConfig) -> Any:
    """Return the model class of transformers for a config: the class that `architectures` in config.json names or, if
    transformers has no class of this name, the causal language model for the type of the config; None: neither exists.
    Without `architectures`, return AutoModelForCausalLM."""
    architectures = config.architectures
    if not architectures:
        return AutoModelForCausalLM
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        return None
    return getattr(transformers, architectures[0], AutoModelForCausalLM._model_mapping.get(type(config), None))


def _select_attention_implementation(cls: Any, config: PretrainedConfig) -> dict[str, str]:
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return {"attn_implementation": "eager"}  # sdpa silently ignores the soft cap of the logits (Gemma 2)
    return {"attn_implementation": "sdpa"} if getattr(cls, "_supports_sdpa", True) else {}


def check_loaded_tensors(loaded_model: PreTrainedModel, loading_info: dict[str, Any], model: str) -> None:
    """Raise ModelError if tensors are missing, unexpected, of another shape, or not tied although config.json ties
    them. In these cases, transformers only logs a warning."""
    mismatched_names = {mismatch[0] for mismatch in loading_info["mismatched_keys"]}
    tied_names = loaded_model.get_expanded_tied_weights_keys(all_submodels=True).keys()
    tensor_names_by_problem = {
        "missing from the files": set(loading_info["missing_keys"]) - mismatched_names,
        f"in the files but not in {type(loaded_model).__name__}": set(loading_info["unexpected_keys"]),
        "of another shape than config.json says": mismatched_names,
        "that config.json ties to others, but the files do not": tied_names - loaded_model.all_tied_weights_keys.keys(),
    }
    problem_texts = [
        f"{len(names)} tensors {problem}: {', '.join(sorted(names)[:3])}{', ...' * (len(names) > 3)}"
        for problem, names in tensor_names_by_problem.items() if names
    ]  # fmt: skip
    if loading_info.get("error_msgs"):
        problem_texts.append("; ".join(loading_info["error_msgs"]))
    if problem_texts:
        raise model_error(model, f"{'; '.join(problem_texts)}; the weights do not belong to this config.json")


def describe_nonfinite_values(name: str, tensor: Tensor) -> str:
    """Return an error message if a tensor contains NaN or infinity, otherwise an empty string."""
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    if tensor.element_size() == 1:
        tensor = tensor.bfloat16()  # convert 8-bit floats, because torch computes no minimum of them
    # Minimum and maximum are finite only if all values are; isfinite() on the tensor would need more memory.
    if torch.stack(tensor.aminmax()).isfinite().all():
        return ""
    return f"tensor {name} holds NaN or infinity; take an undamaged checkpoint"
