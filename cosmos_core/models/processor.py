"""Processors of vision-language models: loading, content of their files, and conversion of images to model inputs.

Videos are not supported.

Shape legend: B rows, T tokens of the longest row.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import cached_file, is_torchvision_available

from cosmos_core.data.images import open_image
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.hf import load_config
from cosmos_core.models.model_files import locate_model, translate_load_errors

PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json"
)  # fmt: skip
"""Names of the files of a processor, without those that its tokenizer also writes, such as `chat_template.jinja`."""
_SIZE_KEY_BY_PIXEL_LIMIT = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


PixelLimits = Sequence[tuple[str, int]]
"""Limits of the size of images in pixels, as pairs of a name (`min_pixels` or `max_pixels`) and a number; they override
the limits in the processor's settings."""


def processor_files(
    model: str, revision: str | None = None, chat_template: str | None = None, pixel_limits: PixelLimits = ()
) -> dict[str, bytes]:
    """Return the content of the processor files of a model folder or Hub id, by file name; empty for a text-only model.
    If `chat_template` is not None, it replaces the template of the model, so the file or setting with this template is
    left out. `pixel_limits` are written into the settings of images; for errors see `load_processor`."""
    model_source, load_options = locate_model(model, revision)
    load_options |= {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,  # offline, a file outside the cache counts as missing
    }
    # chat_template.json is left out: transformers would prefer it to the `chat_template.jinja` of an export.
    file_names = [name for name in PROCESSOR_FILES if chat_template is None or name != "chat_template.json"]
    cached_paths = {name: cached_file(str(model_source), name, **load_options) for name in file_names}
    file_contents = {name: Path(path).read_bytes() for name, path in cached_paths.items() if path is not None}
    if chat_template is not None and b'"chat_template"' in (content := file_contents.get(PROCESSOR_FILES[0], b"")):
        settings = json.loads(content)
        settings.pop("chat_template", None)
        file_contents[PROCESSOR_FILES[0]] = json.dumps(settings, indent=2).encode()
    if pixel_limits and (processor := load_processor(model, revision, pixel_limits)) is not None:
        size_settings = {key: getattr(processor.image_processor.size, key) for key in _SIZE_KEY_BY_PIXEL_LIMIT.values()}
        for name in file_contents.keys() & PROCESSOR_FILES[:2]:
            settings = json.loads(file_contents[name])
            # The image settings are a table of processor_config.json, or the whole of preprocessor_config.json.
            image_settings = settings if name == PROCESSOR_FILES[1] else settings.get("image_processor", {})
            image_settings |= {"size": size_settings} | {key: n for key, n in pixel_limits if key in image_settings}
            file_contents[name] = json.dumps(settings, indent=2).encode()
    return file_contents


def load_processor(model: str, revision: str | None = None, pixel_limits: PixelLimits = ()) -> ProcessorMixin | None:
    """Load the processor of a model folder or Hub id; return None for a text-only model. Raise ModelError if a file is
    damaged or a library is missing, and ConfigError if the processor does not support a setting in `pixel_limits`."""
    if not processor_files(model, revision):
        return None
    cls: Any = PROCESSOR_MAPPING.get(type(load_config(model, revision)), None)
    model_source, load_options = locate_model(model, revision)
    load_options |= {"trust_remote_code": False, "mistral_format": False}  # as in `load_tokenizer`
    with translate_load_errors("processor", model):
        if cls is not None and "video_processor" in cls.get_attributes() and not is_torchvision_available():
            processor = _load_processor_without_video(cls, str(model_source), load_options)
        else:
            processor = AutoProcessor.from_pretrained(str(model_source), **load_options)
    if getattr(processor, "image_processor", None) is None:
        return None
    if processor.chat_template is None:  # older models have the template only in tokenizer_config.json
        processor.chat_template = processor.tokenizer.chat_template
    for limit_name, pixel_limit in pixel_limits:
        # Only processors with `merge_size` interpret pixel limits as numbers of pixels; others as lengths of edges.
        if not hasattr(processor.image_processor, "merge_size"):
            name = type(processor).__name__
            raise ConfigError(f"custom.vision.{limit_name} = {pixel_limit}: {name} has no such setting; leave it out")
        setattr(processor.image_processor.size, _SIZE_KEY_BY_PIXEL_LIMIT[limit_name], pixel_limit)
    return processor


def get_image_token(processor: ProcessorMixin) -> str:
    """Return the text that stands for an image in a prompt; the processor replaces it by the tokens of the image."""
    return cast(Any, processor).image_token


def _load_processor_without_video(cls: Any, model_source: str, load_options: dict[str, Any]) -> ProcessorMixin:
    """Load a processor for text, images and videos without its video processor, which would require torchvision."""

    def check_component(self: Any, name: str, processor_component: Any) -> Any:
        is_video_processor = name == "video_processor"
        return None if is_video_processor else cls.check_argument_for_proper_class(self, name, processor_component)

    overridden_methods = {
        "check_argument_for_proper_class": check_component,
        # Use the method of the base class, because SmolVLM's own `apply_chat_template` needs a video processor.
        "apply_chat_template": ProcessorMixin.apply_chat_template,
    }
    patched_class: Any = type(cls.__name__, (cls,), overridden_methods)
    processor_settings, _ = cls.get_processor_dict(model_source, **load_options)
    processor_component_by_name = {
        "image_processor": AutoImageProcessor.from_pretrained(model_source, **load_options),
        "tokenizer": AutoTokenizer.from_pretrained(model_source, **load_options),
        "video_processor": None,
    }
    components = [processor_component_by_name[name] for name in cls.get_attributes()]
    return patched_class.from_args_and_dict(components, processor_settings)


class ImageReader:
    """Converter of the images of samples to model inputs, which reads the images when a micro-batch needs them."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor = processor
        if processor.tokenizer.pad_token_id is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token

    def batching_key(self, sample: Sample) -> int:
        """Return the batching key of a row; only rows with equal keys can be in the same micro-batch. Rows with and
        without images are separate, because all ranks must enter the vision tower together. In a model with
        cross-attention to images, tokens before the first image attend to all images of the batch, so the key is the
        number of images."""
        has_cross_attention = "cross_attention_mask" in self._processor.model_input_names
        return len(sample.images) if has_cross_attention else min(len(sample.images), 1)

    def count_tokens_before_images(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens before the first image token in a completion. A policy sometimes samples image
        tokens although there is no image; such a completion is truncated before its first image token."""
        if not token_ids:
            return 0
        [image_token_flags] = self._mark_image_tokens(torch.tensor([list(token_ids)])).bool().tolist()
        return image_token_flags.index(True) if True in image_token_flags else len(image_token_flags)

    def make_image_inputs(self, rows: Sequence[Sample], input_ids_BT: Tensor) -> dict[str, Tensor]:
        """Return the model inputs, by name, for the images of `rows`, which have equal batching keys. `input_ids_BT`
        are the padded token ids of the rows. Raise DataError if an image or the processor has changed since the rows
        were prepared."""
        images = [[open_image(image_reference) for image_reference in sample.images] for sample in rows]
        # The texts have only image tokens, because image inputs do not depend on other tokens.
        image_token_texts = [get_image_token(self._processor) * len(sample_images) for sample_images in images]
        inputs: dict[str, Any] = dict(
            self._processor(text=image_token_texts, images=images, padding=True, return_tensors="pt")
        )
        processed_ids_BT, _ = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        processed_image_mask_BT = self._mark_image_tokens(processed_ids_BT)
        image_mask_BT = self._mark_image_tokens(input_ids_BT)
        if not torch.equal(processed_image_mask_BT.sum(-1), image_mask_BT.sum(-1)):
            raise DataError("an image has another number of tokens than its row; set one custom.vision in all recipes")
        for name in ("mm_token_type_ids", "token_type_ids"):
            token_type_ids = inputs.pop(name, None)
            if token_type_ids is not None and torch.equal(token_type_ids, processed_image_mask_BT):
                inputs[name] = image_mask_BT
        if "cross_attention_mask" in inputs:
            inputs["cross_attention_mask"] = self._cross_attention_mask(rows, inputs, input_ids_BT.shape[1])
        return inputs

    def _mark_image_tokens(self, token_ids_BT: Tensor) -> Tensor:
        # The method of the base class is called, because the override in Idefics3 needs the lengths of images.
        token_types = ProcessorMixin.create_mm_token_type_ids(self._processor, token_ids_BT.tolist())
        return torch.as_tensor(token_types, dtype=torch.int64)

    def _cross_attention_mask(self, rows: Sequence[Sample], inputs: Mapping[str, Tensor], num_tokens: int) -> Tensor:
        """Return a mask (rows, tokens, images, tiles) of the image tiles to which each token of a row attends.
        `num_tokens` is the length of the padded rows."""
        from transformers.models.mllama.processing_mllama import (
            convert_sparse_cross_attention_mask_to_dense,
            get_cross_attention_token_mask,
        )

        num_tiles = inputs["aspect_ratio_mask"].sum(-1).tolist()
        image_token_id: Any = self._processor.image_token_ids[0]
        attention_spans = [get_cross_attention_token_mask(sample.input_ids.tolist(), image_token_id) for sample in rows]
        attention_mask = convert_sparse_cross_attention_mask_to_dense(
            attention_spans, num_tiles=num_tiles, max_num_tiles=inputs["aspect_ratio_mask"].shape[-1], length=num_tokens
        )
        return torch.from_numpy(attention_mask)
