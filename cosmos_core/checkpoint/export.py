"""Write a model as a Hugging Face folder, and the stage kind `export`: write, prove, describe.

An adapter is written twice: merged into the model, and as it is in the folder `lora/`. Models that are not causal
language models are left out.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.checkpoint.disk import saving
from cosmos_core.checkpoint.pinned import pinned_model, pinned_step
from cosmos_core.checkpoint.prove import auto_class, prove_export
from cosmos_core.errors import Preempted, StageFailed
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.lora import FOLDER, is_adapted, merged, plain_state, save_adapter
from cosmos_core.models.processor import processor_files
from cosmos_core.run.files import replaced_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_size: str = "4GB",
    extra_files: Mapping[str, bytes] = {},
) -> None:
    """Write weights, config, generation config, tokenizer and `extra_files` (by relative path) to `target`, in one
    rename.

    Floating-point weights are cast to `dtype` (None: as they are); the model itself is not changed. Tied weights are
    written once, several shards get an index, as transformers does it.

    Raises:
        StageFailed: the disk is full or broken.
    """
    with saving(f"export {target}", lambda: "nothing is left of it"), replaced_folder(target) as building:
        with merged(model):
            model.save_pretrained(building, state_dict=_cast_weights(model, dtype), max_shard_size=max_shard_size)
        _exported_config(model, dtype).save_pretrained(building)
        tokenizer.save_pretrained(building)
        if is_adapted(model):
            save_adapter(model, building / FOLDER)
        for name, content in extra_files.items():
            (building / name).parent.mkdir(exist_ok=True)
            (building / name).write_bytes(content)


def run(stage: Stage) -> Outcome:
    """Run kind `export`: the upstream model, or a checkpoint of it, in `train.param_dtype`, proven, with a
    model card, and the adapter that is in it, if there is one, as it was trained.

    Raises:
        ModelError: the upstream folder or checkpoint cannot be loaded.
        StageFailed: the export does not equal the model, or the disk is full.
        Preempted: asked to stop before the proof.
    """
    if not stage.config.checkpoint:
        return _export(stage, _trained_step(stage))
    stage.progress.phase("load")
    revision, folder, step = stage.recipe.policy.model_revision, stage.path / "pinned", pinned_step(stage)
    tokenizer, files = load_tokenizer(stage.model, revision), processor_files(stage.model, revision)
    export_model(pinned_model(stage, step), tokenizer, folder, dtype=None, extra_files=files)
    stage.model = str(folder)
    try:
        return _export(stage, step)
    finally:
        shutil.rmtree(folder)


def _export(stage: Stage, step: int) -> Outcome:
    dtype_name = stage.recipe.train.param_dtype
    dtype: torch.dtype = getattr(torch, dtype_name)
    revision = stage.recipe.policy.model_revision
    stage.progress.phase("load")
    tokenizer = load_tokenizer(stage.model, revision)
    model = load_model(stage.model, revision=revision, dtype=torch.float32)

    folder = f"safetensors/step_{step}"
    target = stage.path / folder
    stage.progress.phase("export")
    adapter = _adapter_files(stage)
    card = model_card(stage, auto_class(model.config).__name__).encode()
    extra_files = {"README.md": card, **adapter, **processor_files(stage.model, revision)}
    export_model(model, tokenizer, target, dtype=dtype, extra_files=extra_files)
    if stage.stop_requested:
        raise Preempted(f"stage {stage.name!r} was asked to stop before its export was proven; run again to finish it")
    checks = prove_export(model, target, dtype=dtype, tokenizer=tokenizer)
    if adapter:
        checks.append(_prove_copy(adapter, target))
    logger.info("exported %s in %s; checks: %s", target, dtype_name, ", ".join(checks))
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    info: dict[str, JsonValue] = {"model": folder, "step": step, "checks": list(checks), "dtype": dtype_name}
    if adapter:
        info["adapter"] = f"{folder}/{FOLDER}"
    return Outcome(outputs=(folder,), metrics={"export/bytes": float(size)}, info=info)


def model_card(stage: Stage, loader: str) -> str:
    """Return README.md of an export: where the weights come from, by digest, what was measured, and by which class of
    transformers to load them."""
    base = stage.recipe.policy.model_name_or_path
    is_hub_id = base.count("/") == 1 and not base.startswith((".", "~", "/")) and not Path(base).exists()
    lines = ["---", "library_name: transformers", *([f"base_model: {base}"] if is_hub_id else []), "---", ""]
    lines += [f"# {stage.run_path.name}/{stage.name}", ""]
    lines += [f"- Base model: `{base}`", f"- Run: `{stage.run_path.name}`"]
    lines += [
        f"- Precision: {stage.recipe.train.param_dtype}",
        f"- Fingerprint of this stage: `{stage.fingerprint}`",
        "",
    ]
    reader = "Processor" if processor_files(stage.model, stage.recipe.policy.model_revision) else "Tokenizer"
    lines += ["```python", f"from transformers import {loader}, Auto{reader}", ""]
    lines += [f'model = {loader}.from_pretrained(path, dtype="auto")']
    lines += [f"{reader.lower()} = Auto{reader}.from_pretrained(path)", "```", ""]
    if _adapter_files(stage):
        lines += [f"The adapter is merged into these weights; `{FOLDER}/` has it alone, in PEFT's format.", ""]
    for name, result in sorted(stage.inputs.items()):
        lines += _describe_input(name, result)
    return "\n".join(lines)


def _describe_input(name: str, result: Mapping[str, Any]) -> list[str]:
    lines = [f"## From stage `{name}` ({result.get('kind', 'unknown kind')})", ""]
    lines += [f"- {key}: `{result[key]}`" for key in ("digest", "fingerprint") if key in result]
    lines += [f"- made from `{source}`: `{its['digest']}`" for source, its in sorted(result.get("inputs", {}).items())]
    metrics = result.get("metrics", {})
    if metrics:
        lines += ["", "| metric | value |", "|---|---|"]
        lines += [f"| {key} | {value:.6g} |" for key, value in sorted(metrics.items())]
    return [*lines, ""]


def _trained_step(stage: Stage) -> int:
    """Return the steps that the model was trained, as the stage that it comes from says; 0 for a base model."""
    upstream = stage.inputs.get(stage.config.model.removeprefix("stage:"), {})
    return int(upstream.get("info", {}).get("step", 0))


def _adapter_files(stage: Stage) -> dict[str, bytes]:
    """Return the files of the adapter that the upstream stage exported."""
    return {f"{FOLDER}/{file.name}": file.read_bytes() for file in sorted(Path(stage.model, FOLDER).glob("*"))}


def _prove_copy(files: Mapping[str, bytes], target: Path) -> str:
    if wrong := [name for name, content in files.items() if (target / name).read_bytes() != content]:
        raise StageFailed(f"export {target}: {wrong[0]} is not what was copied; check the disk and run the stage again")
    return "adapter: bytes"


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the state dict in `dtype` with ties kept as ties, so that transformers writes them once."""
    weights = plain_state(model)
    if dtype is None:
        return weights
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in weights.values():
        if (key := (tensor.data_ptr(), tensor.shape)) not in cast:
            cast[key] = tensor.to("cpu", dtype if tensor.is_floating_point() else None)
    return {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in weights.items()}


def _exported_config(model: PreTrainedModel, dtype: torch.dtype | None) -> Any:
    config = copy.deepcopy(model.config)
    for each in [config, *(getattr(config, name) for name in config.sub_configs)]:
        if dtype is not None:
            each.dtype = dtype
        # Training with recomputation turns the cache off; whoever loads an export wants to generate.
        if hasattr(each, "use_cache"):
            each.use_cache = True
    return config
