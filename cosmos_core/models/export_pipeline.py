"""Write a trained diffusion model as a pipeline that diffusers loads.

    <target>/model_index.json, <component>/...     the whole pipeline, with an adapter merged into the denoiser
    <target>/lora/model.safetensors                the adapter alone, for `load_lora_weights` on the base pipeline

Files of components that were not trained are copied. `verify_pipeline_export.py` verifies the written pipeline.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.disk import write_export
from cosmos_core.models.lora import ADAPTER_FOLDER, has_changed_base, has_lora_adapter, merge_adapter, merged_state_dict
from cosmos_core.models.pipeline_folder import MODEL_INDEX_FILE, PipelineFolder
from cosmos_core.run.files import copy_file, write_json

ADAPTER_FILE = "model.safetensors"
_WEIGHTS_FILE_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"
_ADAPTER_NAME = "default"


def export_pipeline(
    family: DiffusionModel,
    model: Any,
    export_folder: Path,
    *,
    dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] = {},
) -> None:
    """Write the pipeline with `model` as its denoiser to the folder `export_folder`, atomically; raise StageFailed if
    the disk is full or broken.

    The denoiser's weights are cast to `dtype` (None: unchanged) without changing the model itself. `extra_files` has
    the contents of further files by path in the folder.
    """
    with write_export(export_folder, extra_files) as staging_folder:
        for relative_path in list_untrained_files(family.folder, family.denoiser_name):
            (staging_folder / relative_path).parent.mkdir(parents=True, exist_ok=True)
            copy_file(family.folder.path / relative_path, staging_folder / relative_path)
        with merge_adapter(model):
            denoiser_folder = staging_folder / family.denoiser_name
            denoiser_folder.mkdir(exist_ok=True)
            denoiser_config = json.loads(model.to_json_string())
            # Leave out `_name_or_path`, a local folder, because it would make the exports of equal runs differ.
            denoiser_config.pop("_name_or_path", None)
            write_json(denoiser_folder / model.config_name, denoiser_config)
            save_torch_state_dict(
                make_export_state_dict(model, dtype), denoiser_folder, filename_pattern=_WEIGHTS_FILE_PATTERN,
                metadata={"format": "pt"},
            )  # fmt: skip
        if has_lora_adapter(model):
            _save_adapter(family, model, staging_folder / ADAPTER_FOLDER)


def list_untrained_files(pipeline_folder: PipelineFolder, denoiser_name: str) -> Iterator[Path]:
    """Yield the paths of the files of a pipeline, relative to its folder, except for those of the trained component
    `denoiser_name`."""
    yield Path(MODEL_INDEX_FILE)
    for name in pipeline_folder.components:
        if name != denoiser_name:
            component_files = sorted(file for file in (pipeline_folder.path / name).rglob("*") if file.is_file())
            yield from (file.relative_to(pipeline_folder.path) for file in component_files)


def _save_adapter(family: DiffusionModel, model: Any, folder: Path) -> None:
    """Write the LoRA adapter of `model` to `folder` with `save_lora_weights` of the pipeline, and the settings of the
    adapter as JSON values, in the same order in every process.

    Without the settings, diffusers would use the rank as alpha on loading, and so change the scale of the adapter. The
    dropout is written as 0, because diffusers would apply it, and each call of the pipeline would return another image.
    """
    adapter_state_dict = peft.get_peft_model_state_dict(model, adapter_name=_ADAPTER_NAME, save_embedding_layers=False)
    assert not has_changed_base(model), "refused by `check`: the adapter would not fit the untouched base"
    adapter_settings = model.peft_config[_ADAPTER_NAME].to_dict() | {"inference_mode": True, "lora_dropout": 0.0}
    sorted_adapter_settings = {k: sorted(v) if isinstance(v, (set, list)) else v for k, v in adapter_settings.items()}
    lora_arguments = {
        "lora_layers": {key: tensor.detach().cpu().contiguous() for key, tensor in adapter_state_dict.items()},
        "lora_adapter_metadata": json.loads(json.dumps(sorted_adapter_settings, default=str, sort_keys=True)),
    }
    folder.mkdir(parents=True)
    family.folder.pipeline_class.save_lora_weights(
        str(folder), weight_name=ADAPTER_FILE,
        **{f"{family.denoiser_name}_{key}": value for key, value in lora_arguments.items()},
    )  # fmt: skip


def make_export_state_dict(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of the denoiser by name for the export, on the CPU, with floating-point tensors in `dtype`.
    Call this function inside `merge_adapter`, so that the weights include the LoRA adapter."""
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        for name, tensor in merged_state_dict(model).items()
    }
