"""Program of the stage kind `merge`: combine models of one architecture, with one safetensors file in memory at a time.

The formulas are those of `peft.utils.merge_utils`, applied to each tensor of the models.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.merge import MergeConfig
from cosmos_core.errors import ConfigError, ModelError, Preempted
from cosmos_core.models.disk import translate_disk_errors
from cosmos_core.models.generation_config import use_default_generation_config
from cosmos_core.models.hf import load_model
from cosmos_core.models.lora import ADAPTER_FOLDER
from cosmos_core.models.model_files import weight_files
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.run.files import list_files_below, replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

_MODEL_FOLDER = "model"
_TASK_VECTOR_METHODS: Mapping[str, Callable[..., Tensor]] = {
    "ties": ties, "dare_linear": dare_linear, "dare_ties": dare_ties
}  # fmt: skip


def run(stage: Stage) -> Outcome:
    """Merge the models of the upstream stages, and check that transformers knows each tensor of the merged model. Raise
    `ConfigError` if the stage's `after` names fewer than two models, or `merge.weights` has not one value per model;
    `ModelError` if the models differ in names or shapes of tensors; and `Preempted`, with nothing written, if a stop
    was requested."""
    config = stage.recipe.merge
    upstream_results = _get_upstream_results(stage)
    model_folders = [Path(result["path"]) / str(result["info"]["model"]) for result in upstream_results]
    merge_weights = get_merge_weights(config, len(model_folders))
    stage.progress.phase("export")
    merged_folder = stage.path / _MODEL_FOLDER
    with (
        translate_disk_errors(f"merge {merged_folder}", lambda: "nothing is left of it"),
        replace_folder(merged_folder) as temporary_folder,
        ExitStack() as exit_stack,
    ):
        model_readers = [_TensorReader(str(folder), None, exit_stack) for folder in model_folders]
        base_model_reader = _open_base_model(stage, exit_stack) if config.method in _TASK_VECTOR_METHODS else None
        for second_model in model_readers[1:]:
            _check_same_tensors(model_readers[0], second_model)
        if base_model_reader is not None:
            base_model_reader.add_missing_prefixes(model_readers[0])
            _check_same_tensors(model_readers[0], base_model_reader, allows_extra_tensors=True)
        for file_number, (weight_file, names) in enumerate(model_readers[0].tensor_names_by_file.items(), start=1):
            tensors = {
                name: combine_tensors(config, merge_weights, model_readers, base_model_reader, name, stage.seed)
                for name in names
            }
            save_file(tensors, temporary_folder / Path(weight_file).name, metadata={"format": "pt"})
            stage.progress.step(file_number, len(model_readers[0].tensor_names_by_file))
            if stage.stop_requested:
                raise Preempted(f"stage {stage.name!r} was asked to stop; run again to merge")
        for other_file in list_files_below(model_folders[0]):
            name = other_file.relative_to(model_folders[0])
            if other_file.suffix != ".safetensors" and name.parts[0] not in {"README.md", ADAPTER_FOLDER}:
                (temporary_folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(other_file, temporary_folder / name)
    stage.progress.phase("load")
    # init_on_meta raises an error if tensors of the merged model and of its transformers class differ in name or shape.
    init_on_meta(str(merged_folder), dtype=torch.float32, device=torch.device("cpu"))
    total_weight_bytes = sum(weight_file.stat().st_size for weight_file in merged_folder.glob("*.safetensors"))
    merged_stage_names = [Path(result["path"]).name for result in upstream_results]
    outcome_info: dict[str, Any] = {"model": _MODEL_FOLDER, "checks": ["keys"], "merged": merged_stage_names}
    metrics = {"merge/bytes": float(total_weight_bytes), "merge/models": float(len(model_folders))}
    return Outcome(outputs=(_MODEL_FOLDER,), metrics=metrics, info=outcome_info)


class _TensorReader:
    """Reader of the tensors in a model folder, by name and one at a time."""

    def __init__(self, model: str, revision: str | None, exit_stack: ExitStack) -> None:
        self.model = model
        tensor_files, format_problem = weight_files(model, revision)
        if format_problem:
            raise ModelError(f"merge: {model}: {format_problem}; merge models in safetensors format")
        self.tensor_names_by_file: dict[str, list[str]] = {}
        """Names of the tensors in each safetensors file, by path."""
        self._readers: dict[str, Any] = {}
        self._stored_name_by_alias: dict[str, str] = {}
        """Original names of the tensors that `add_missing_prefixes` has renamed, by new name."""
        for tensor_file in tensor_files:
            tensor_reader = exit_stack.enter_context(safe_open(tensor_file, framework="pt"))
            self.tensor_names_by_file[tensor_file] = list(tensor_reader.keys())
            self._readers |= dict.fromkeys(self.tensor_names_by_file[tensor_file], tensor_reader)

    def add_missing_prefixes(self, model: "_TensorReader") -> None:
        """Add the first component of the tensor names in `model`, such as `transformer.`, to tensor names of this
        reader that lack it, as in files of GPT-2 and BLOOM. transformers loads such files, and saves the full names."""
        for name in model._readers.keys() - self._readers.keys():
            if (stored_name := name.partition(".")[2]) in self._readers:
                self._readers[name], self._stored_name_by_alias[name] = self._readers[stored_name], stored_name

    def get_shapes(self) -> dict[str, list[int]]:
        get_stored_name = self._stored_name_by_alias.get
        return {
            name: reader.get_slice(get_stored_name(name, name)).get_shape() for name, reader in self._readers.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name].get_tensor(self._stored_name_by_alias.get(name, name))


def _open_base_model(stage: Stage, exit_stack: ExitStack) -> _TensorReader:
    """Return a reader of the base model's tensors. Pickled weights, of which no single tensor can be read, are
    converted to safetensors first, in a folder that `exit_stack` removes."""
    revision, converted_model_folder = stage.recipe.policy.model_revision, stage.path / "base"
    if not weight_files(stage.model, revision)[1]:
        return _TensorReader(stage.model, revision, exit_stack)
    exit_stack.callback(shutil.rmtree, converted_model_folder, ignore_errors=True)
    model = load_model(stage.model, revision=revision, dtype=torch.float32)
    with use_default_generation_config(model):
        model.save_pretrained(converted_model_folder)
    return _TensorReader(str(converted_model_folder), None, exit_stack)


def combine_tensors(
    config: MergeConfig,
    merge_weights: Sequence[float],
    models: Sequence[Mapping[str, Tensor] | _TensorReader],
    base_model: Mapping[str, Tensor] | _TensorReader | None,
    name: str,
    seed: int,
) -> Tensor:
    """Return the tensor `name` of the merged model, computed in float32 from the tensors `name` of all `models`, and
    cast to the dtype of the first. With `base_model`, TIES or DARE combines the differences from its tensor, with
    random choices that depend only on `seed` and `name`. Without, the result is the sum of the tensors, weighted with
    `merge_weights`. An integer tensor is that of the first model. Raise `ModelError` if a value of the result is not
    finite."""
    first_tensor = models[0][name]
    if not first_tensor.is_floating_point():
        return first_tensor
    float32_tensors, weights_M = [model[name].float() for model in models], torch.tensor(merge_weights)
    if base_model is None:
        merged_tensor = task_arithmetic(float32_tensors, weights_M)
    else:
        base_tensor = base_model[name].float()
        task_vectors = [tensor - base_tensor for tensor in float32_tensors]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1)
            merged_tensor = base_tensor + _TASK_VECTOR_METHODS[config.method](task_vectors, weights_M, config.density)
    merged_tensor = merged_tensor.to(first_tensor.dtype)  # may overflow in float16, so the values are checked below
    if not torch.isfinite(merged_tensor).all():
        raise ModelError(f"merge: {name} has values that are not finite; look for them in the merged models")
    return merged_tensor


def _get_upstream_results(stage: Stage) -> list[dict[str, Any]]:
    """Return the results of the upstream stages whose models this stage merges: those that `after` names, except the
    stage of the base model. Raise `ConfigError` if there are fewer than two."""
    base_stage, stage_names = referenced_stage(stage.config.model), stage.config.after
    stage_results = [stage.inputs[n] for n in stage_names if n != base_stage and stage.inputs[n]["info"].get("model")]
    if len(stage_results) < 2:
        base_model_text = f" besides the base {base_stage!r}" if base_stage in stage_names else ""
        problem_text = f"after = {json.dumps(stage_names)} names {len(stage_results)} models to merge"
        raise ConfigError(f"stage {stage.name!r}: {problem_text}; name at least two{base_model_text}")
    return stage_results


def get_merge_weights(config: MergeConfig, num_models: int) -> Sequence[float]:
    """Return for each of `num_models` models its weight in the merge: the configured weight, by default the same for
    all. Raise a `ConfigError` if the number of configured weights is not `num_models`."""
    if not config.weights:
        return [1 / num_models if config.method in {"linear", "dare_linear"} else 1.0] * num_models
    if len(config.weights) != num_models:
        raise ConfigError(f"merge.weights has {len(config.weights)} values for {num_models} models; give one for each")
    return config.weights


def _check_same_tensors(
    first_model: _TensorReader, second_model: _TensorReader, *, allows_extra_tensors: bool = False
) -> None:
    """Raise `ModelError` unless two models have tensors of the same names and shapes. With `allows_extra_tensors`,
    `second_model` can have further tensors, such as an output layer that is stored although it is tied to the
    embedding."""
    first_shapes, second_shapes = first_model.get_shapes(), second_model.get_shapes()
    compared_names = first_shapes.keys() if allows_extra_tensors else {*first_shapes, *second_shapes}
    if differing_names := sorted(name for name in compared_names if first_shapes.get(name) != second_shapes.get(name)):
        name = differing_names[0]
        raise ModelError(
            f"merge: {len(differing_names)} tensors differ, such as {name}: {first_shapes.get(name, 'missing')} in "
            f"{first_model.model}, {second_shapes.get(name, 'missing')} in {second_model.model}; merge models of one "
            f"architecture"
        )
