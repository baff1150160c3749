"""Verify that an exported pipeline is the trained one: its files, its tensors, and images from a fresh interpreter.

The fresh interpreter loads the folder as a user would, with `DiffusionPipeline.from_pretrained` and
`load_lora_weights`, and generates a small image from a seed on the CPU. The image must equal that of the policy
in memory, bit for bit.
"""

import filecmp
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cosmos_core.errors import StageFailed
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.export_pipeline import list_untrained_files, make_export_state_dict
from cosmos_core.models.families import find_family_class
from cosmos_core.models.lora import ADAPTER_FOLDER, has_lora_adapter, merge_adapter
from cosmos_core.models.new_interpreter import call_in_interpreter, open_interpreter_pool
from cosmos_core.models.pipeline_folder import PipelineFolder
from cosmos_core.models.verify_export import are_bits_equal, format_names, iterate_tensors

_PROBE_PROMPT = "7 red apples on a table, 東京"
_DRAWING_TIMEOUT_SECONDS = 3000


class ImageRequest(NamedTuple):
    """Settings with which a fresh interpreter generates an image."""

    folder: Path
    adapter_folder: Path | None
    """Folder of the adapter for `load_lora_weights`; None: no adapter is loaded."""
    call_settings: dict[str, Any]
    """Keyword arguments with which the diffusers pipeline is called."""
    dtype: torch.dtype
    model_class: str | None
    num_threads: int


def verify_pipeline(
    family: DiffusionModel,
    model: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    model_class: str | None = None,
) -> list[str]:
    """Compare the pipeline in `folder` with the policy in memory, and return a text about each passed check; raise
    StageFailed if a check fails. `dtype` is that of the exported denoiser; None: its own. `model_class` is the import
    path of a user-defined model family; None: a built-in family."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval().to("cpu")
    family = type(family)(family.folder, family.config)
    try:
        with merge_adapter(model):
            _check_files(family, make_export_state_dict(model, dtype), folder)
        return ["tensors", "copies", *_check_images(family, model, folder, dtype, model_class)]
    finally:
        model.train(was_training).to(device)


def _check_files(family: DiffusionModel, expected_tensors: dict[str, Tensor], folder: Path) -> None:
    """Check that the weight files of the denoiser contain exactly the tensors `expected_tensors`, bit for bit, and that
    the files of components that were not trained equal the files of the base pipeline."""
    is_equal_by_tensor_key = {
        key: key not in expected_tensors or are_bits_equal(tensor, expected_tensors[key])
        for _, key, tensor in iterate_tensors(folder / family.denoiser_name)
    }
    missing_keys = sorted(expected_tensors.keys() - is_equal_by_tensor_key.keys())
    unexpected_keys = sorted(is_equal_by_tensor_key.keys() - expected_tensors.keys())
    changed_keys = [key for key, is_equal in is_equal_by_tensor_key.items() if not is_equal]
    if missing_keys or unexpected_keys or changed_keys:
        raise StageFailed(
            f"export {folder} failed the check 'tensors': missing {format_names(missing_keys)}, unexpected "
            f"{format_names(unexpected_keys)}, changed {format_names(sorted(changed_keys))}; it must not be used, "
            f"run the stage again"
        )
    base_folder, copied_files = family.folder.path, list_untrained_files(family.folder, family.denoiser_name)
    differing_files = [str(f) for f in copied_files if not filecmp.cmp(base_folder / f, folder / f, shallow=False)]
    if differing_files:
        raise StageFailed(
            f"export {folder} failed the check 'copies': {format_names(differing_files)} is not what was copied; "
            f"check the disk, run the stage again"
        )


def _check_images(
    family: DiffusionModel, model: Any, folder: Path, dtype: torch.dtype | None, model_class: str | None
) -> list[str]:
    """Check that the exported pipeline, and the base pipeline with the exported adapter, generate the same image as the
    policy in memory. Return a text about each check. `dtype` is that of the exported denoiser; None: the policy's."""
    export_dtype, probe_settings, num_threads = dtype or model.dtype, family.probe_settings(), torch.get_num_threads()
    with merge_adapter(model):
        expected_images = {"images": _generate_with_rounded_weights(family, model, export_dtype)}
    image_requests = [ImageRequest(folder, None, probe_settings, export_dtype, model_class, num_threads)]
    if has_lora_adapter(model):
        expected_images["adapter"] = _generate_with_rounded_weights(family, model, model.dtype)
        base_and_adapter = family.folder.path, folder / ADAPTER_FOLDER
        image_requests.append(ImageRequest(*base_and_adapter, probe_settings, model.dtype, model_class, num_threads))
    with open_interpreter_pool() as pool:
        images = call_in_interpreter(pool, generate_images, (image_requests,), _DRAWING_TIMEOUT_SECONDS, folder)
    for (check_name, expected), image in zip(expected_images.items(), map(torch.from_numpy, images), strict=True):
        if not are_bits_equal(expected, image):
            max_difference = float((expected - image).abs().max()) if expected.shape == image.shape else float("inf")
            raise StageFailed(
                f"export {folder} failed the check {check_name!r}: what a fresh interpreter draws differs by "
                f"{max_difference:.2g} from what the policy draws; it must not be used, run the stage again"
            )
    return [f"{check_name}: bit-identical" for check_name in expected_images]


@torch.no_grad()
def _generate_with_rounded_weights(family: DiffusionModel, model: Any, dtype: torch.dtype) -> Tensor:
    """Return the image that the policy in memory generates in `dtype`, with weights rounded as in the export."""
    family = type(family)(family.folder, family.config.copy_with(dtype=str(dtype).removeprefix("torch.")))
    text_inputs = family.text_embedding([_PROBE_PROMPT])
    family.drop_encoders()
    components = {name: family.folder.load(name, dtype) for name in {"scheduler", "vae"} & {*family.folder.components}}
    pipeline = family.make_pipeline({**components, family.denoiser_name: model})
    # Compile no block, as the fresh interpreter does not, because the kernels of compiled blocks round differently.
    with torch.compiler.set_stance("force_eager"), _round_weights(model, dtype):
        return _generate_images(pipeline, call_settings=family.probe_settings(), **text_inputs)


@contextmanager
def _round_weights(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Round the tensors of a model during the `with` block, as diffusers does when it loads an export in `dtype`.
    diffusers converts some modules back to float32, and does not change tensors that are in no file."""
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    original_tensor_state = {tensor: (tensor.data, tensor.requires_grad) for _, tensor in named_tensors}
    float32_module_names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    is_half_precision = dtype in {torch.float16, torch.bfloat16}
    state_dict_names = set(model.state_dict())
    try:
        for name, tensor in named_tensors:
            if not tensor.is_floating_point() or name not in state_dict_names:
                continue
            is_kept_float32 = is_half_precision and bool(float32_module_names & set(name.split(".")))
            tensor.data = tensor.data.to(dtype).to(torch.float32 if is_kept_float32 else dtype)
        _detach_and_align_tensors(model)
        yield
    finally:
        for tensor, (original_data, requires_grad) in original_tensor_state.items():
            tensor.data, tensor.requires_grad = original_data, requires_grad


def _detach_and_align_tensors(model: Any) -> None:
    """Disable gradients of a model and align the memory of its tensors, which is unaligned in a mapped file. Both
    determine which kernel a CPU uses to multiply the tensors, and so how results are rounded."""
    model.requires_grad_(False)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.data_ptr() % 64:  # copy an unaligned tensor, because torch aligns new memory to 64 bytes
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _generate_images(pipeline: Any, call_settings: dict[str, Any], **text_inputs: Any) -> Tensor:
    """Return the image or clip that one call of a pipeline generates, with values from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    images = pipeline(**text_inputs, **call_settings, generator=generator, output_type="pt", return_dict=False)[0]
    return images.float().cpu()  # type: ignore[no-any-return]


@torch.no_grad()
def generate_images(image_requests: Sequence[ImageRequest]) -> list[np.ndarray]:
    """Return an image for each of `image_requests`: load the pipeline in the folder of the request as a user would,
    with the adapter if the request has one, and generate the image with this pipeline."""
    generated_images = []
    for image_request in image_requests:
        torch.set_num_threads(image_request.num_threads)
        folder = PipelineFolder(str(image_request.folder))
        family = find_family_class(folder, image_request.model_class)
        pipeline = family.load_pipeline(folder, image_request.dtype)
        if image_request.adapter_folder is not None:
            pipeline.load_lora_weights(str(image_request.adapter_folder))
            if not pipeline.get_active_adapters():
                raise StageFailed("load_lora_weights attached nothing")
        _detach_and_align_tensors(getattr(pipeline, family.denoiser_name))
        generated_images.append(_generate_images(pipeline, image_request.call_settings, prompt=[_PROBE_PROMPT]).numpy())
        del pipeline  # the machine may have too little memory for two pipelines
        gc.collect()
    return generated_images
