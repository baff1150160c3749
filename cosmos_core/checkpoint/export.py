"""Program of the stage kind `export`: write a trained model in its published form, verify it, and add a model card."""

import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from cosmos_core.checkpoint.load_checkpoint_model import find_checkpoint_step, load_checkpoint_model
from cosmos_core.config.inputs import read_card_metadata, referenced_stage
from cosmos_core.errors import Preempted, StageFailed
from cosmos_core.models.export import export_model
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.lora import ADAPTER_FOLDER
from cosmos_core.models.processor import processor_files
from cosmos_core.models.verify_export import select_auto_class, verify_export
from cosmos_core.run.lineage import strip_local_path
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

_LICENSE_KEYS = ("license", "license_name", "license_link")
_LICENSE_FILE_REGEX = re.compile(r"(licen[cs]e|notice|use_policy)([._-].*)?", re.IGNORECASE)


class LoadingInstructions(NamedTuple):
    """Text of a model card that explains how to load the model."""

    library: str
    loading_code_lines: tuple[str, ...]
    adapter_note: str
    """Sentence about the LoRA adapter that is exported with the model."""


def run(stage: Stage) -> Outcome:
    """Export the model of the upstream stage, or of a checkpoint of that stage, in the dtype `train.param_dtype`.
    Verify the export, and add a model card and, if the upstream stage trained an adapter, the adapter. Raise
    `ModelError` if the model cannot be loaded, `StageFailed` if the export does not equal the model or the disk is
    full, and `Preempted` if a stop was requested before the verification."""
    if stage.recipe.policy.is_diffusers:  # import the modules for diffusion models only here
        return importlib.import_module("cosmos_core.checkpoint.export_diffusion").run(stage)
    if not stage.config.checkpoint:
        return _export_and_verify(stage, num_trained_steps(stage))
    stage.progress.phase("load")
    revision, model_path, step = stage.recipe.policy.model_revision, stage.path / "pinned", find_checkpoint_step(stage)
    chat_template = stage.recipe.policy.chat_template
    tokenizer = load_tokenizer(stage.model, revision, chat_template)
    extra_files = processor_files(stage.model, revision, chat_template)
    export_model(load_checkpoint_model(stage, step), tokenizer, model_path, dtype=None, extra_files=extra_files)
    stage.model = str(model_path)
    try:
        return _export_and_verify(stage, step)
    finally:
        shutil.rmtree(model_path)


def _export_and_verify(stage: Stage, step: int) -> Outcome:
    export_dtype: torch.dtype = getattr(torch, stage.recipe.train.param_dtype)
    revision, chat_template = stage.recipe.policy.model_revision, stage.recipe.policy.chat_template
    stage.progress.phase("load")
    tokenizer = load_tokenizer(stage.model, revision, chat_template)
    model = load_model(stage.model, revision=revision, dtype=torch.float32)
    export_path = stage.path / export_folder(step)
    stage.progress.phase("export")
    copied_files = adapter_files(stage)
    readme_content = model_card(stage, loading_instructions(stage, select_auto_class(model.config).__name__)).encode()
    extra_files = {"README.md": readme_content} | license_files(stage) | copied_files
    extra_files |= processor_files(stage.model, revision, chat_template)
    export_model(model, tokenizer, export_path, dtype=export_dtype, extra_files=extra_files)
    run_checks = partial(verify_export, model, export_path, dtype=export_dtype, tokenizer=tokenizer)
    weight_files = export_path.glob("*.safetensors")
    return make_verified_outcome(stage, step, run_checks, copied_files, weight_files, has_adapter=bool(copied_files))


def make_verified_outcome(
    stage: Stage,
    step: int,
    run_checks: Callable[[], list[str]],
    copied_files: Mapping[str, bytes],
    weight_files: Iterable[Path],
    *,
    has_adapter: bool,
) -> Outcome:
    """Check the written export of step `step`, and return the outcome of the stage; for errors see `run`. `run_checks`
    compares the export with the model and returns the names of the checks that it made. `copied_files` has the expected
    contents of the adapter files, by path in the export. `weight_files` are the paths of the weight files, whose total
    size is reported, and `has_adapter` says whether the export includes an adapter."""
    if stage.stop_requested:
        raise Preempted(f"stage {stage.name!r} was asked to stop before its export was proven; run again to finish it")
    passed_checks, folder = run_checks(), export_folder(step)
    export_path = stage.path / folder
    if changed_files := [n for n, content in copied_files.items() if (export_path / n).read_bytes() != content]:
        remedy = "check the disk and run the stage again"
        raise StageFailed(f"export {export_path}: {changed_files[0]} is not what was copied; {remedy}")
    if copied_files:
        passed_checks.append("adapter: bytes")
    logger.info("exported %s %s; checks: %s", export_path, describe_precision(stage), ", ".join(passed_checks))
    total_weight_bytes, dtype = sum(file.stat().st_size for file in weight_files), stage.recipe.train.param_dtype
    outcome_info: dict[str, JsonValue] = {"model": folder, "step": step, "checks": list(passed_checks), "dtype": dtype}
    if has_adapter:
        outcome_info |= {"adapter": f"{folder}/{ADAPTER_FOLDER}", "base": _adapter_base_model(stage)}
    return Outcome(outputs=(folder,), metrics={"export/bytes": float(total_weight_bytes)}, info=outcome_info)


def export_folder(step: int) -> str:
    """Return the folder of the export of a step, relative to the folder of the stage."""
    return f"safetensors/step_{step}"


def loading_instructions(stage: Stage, auto_class_name: str) -> LoadingInstructions:
    """Return the instructions for loading a stage's model; `auto_class_name` names the model's auto class in
    transformers."""
    preprocessor_name = "Processor" if processor_files(stage.model, stage.recipe.policy.model_revision) else "Tokenizer"
    return LoadingInstructions(
        "transformers",
        (
            f"from transformers import {auto_class_name}, Auto{preprocessor_name}", "",
            f'model = {auto_class_name}.from_pretrained(path, dtype="auto")',
            f"{preprocessor_name.lower()} = Auto{preprocessor_name}.from_pretrained(path)",
        ),
        f"The adapter is merged into these weights; `{ADAPTER_FOLDER}/` has it alone, in PEFT's format.",
    )  # fmt: skip


def model_card(stage: Stage, instructions: LoadingInstructions) -> str:
    """Return the text of README.md for an exported model: origin of the weights, the loading code of `instructions`,
    and metrics of upstream stages."""
    origin_record, base_model_name = stage.origin, strip_local_path(stage.origin.get("base_model", ""))
    revision = origin_record.get("revision", "")
    card_metadata = [f"library_name: {instructions.library}", *([f"base_model: {base_model_name}"] if revision else [])]
    base_model_metadata = read_card_metadata(_base_model_folder(stage))
    license_fields = {key: base_model_metadata[key] for key in _LICENSE_KEYS if key in base_model_metadata}
    card_metadata += yaml.safe_dump(license_fields, sort_keys=False).splitlines() if license_fields else []
    made_by = f"made by `{strip_local_path(origin_record['made_by'])}`" if origin_record.get("made_by") else ""
    model_card_fields = {
        "Base model": f"`{base_model_name}`" + f" at `{revision}`" * bool(revision) if base_model_name else made_by,
        "Data": ", ".join(f"`{strip_local_path(name)}`" for name in origin_record.get("data", ())),
        "Run": f"`{stage.run_path.name}`",
        "Precision": describe_precision(stage),
        "Fingerprint of this stage": f"`{stage.fingerprint}`",
    }
    card_lines = [
        "---", *card_metadata, "---", "", f"# {stage.run_path.name}/{stage.name}", "",
        *(f"- {name}: {value}" for name, value in model_card_fields.items() if value), "",
        "```python", *instructions.loading_code_lines, "```", "",
    ]  # fmt: skip
    if adapter_files(stage):
        card_lines += [f"{instructions.adapter_note} Its base is `{_adapter_base_model(stage)}`.", ""]
    for name, stage_result in sorted(stage.inputs.items()):
        card_lines += [f"## From stage `{name}` ({stage_result['kind']})", ""]
        card_lines += [f"- {key}: `{stage_result[key]}`" for key in ("digest", "fingerprint")]
        card_lines += [f"- made from `{key}`: `{r['digest']}`" for key, r in sorted(stage_result["inputs"].items())]
        if metrics := stage_result["metrics"]:
            card_lines += ["", "| metric | value |", "|---|---|"]
            card_lines += [f"| {key} | {value:.6g} |" for key, value in sorted(metrics.items())]
        card_lines.append("")
    return "\n".join(card_lines)


def num_trained_steps(stage: Stage) -> int:
    """Return for how many steps the upstream stage trained the exported model; 0 for a base model."""
    return int(_get_upstream_outcome_info(stage).get("step", 0))


def describe_precision(stage: Stage) -> str:
    """Return the dtype of the export as text, followed by the training dtype if the two differ."""
    dtype, training_dtype = stage.recipe.train.param_dtype, _get_upstream_outcome_info(stage).get("dtype", "")
    return dtype if training_dtype in {"", dtype} else f"{dtype}, cast from {training_dtype}, in which it was trained"


def _get_upstream_outcome_info(stage: Stage) -> Mapping[str, Any]:
    """Return the `info` of the `Outcome` of the upstream stage that made the model, such as its step and dtype; empty
    for a base model."""
    return stage.inputs.get(str(referenced_stage(stage.config.model)), {}).get("info", {})


def adapter_files(stage: Stage) -> dict[str, bytes]:
    """Return the content of the adapter files that the upstream stage exported, by path in this export. The adapter's
    config is changed to name the base model by its public name instead of a local folder. Empty if there is no adapter,
    or if no stage of the run made the model, because the base model of the adapter is then unknown."""
    is_model_made_by_run = referenced_stage(stage.config.model) is not None
    adapter_paths = sorted(Path(stage.model, ADAPTER_FOLDER).glob("*")) if is_model_made_by_run else []
    adapter_contents = {f"{ADAPTER_FOLDER}/{path.name}": path.read_bytes() for path in adapter_paths}
    if content := adapter_contents.get(name := f"{ADAPTER_FOLDER}/adapter_config.json"):
        adapter_config = json.loads(content) | {"base_model_name_or_path": _adapter_base_model(stage)}
        adapter_contents[name] = json.dumps(adapter_config, indent=2, sort_keys=True).encode()
    return adapter_contents


def license_files(stage: Stage) -> dict[str, bytes]:
    """Return the content of the licence files of the base model by name; empty if the base model is in no local
    folder."""
    base_model_files = sorted(_base_model_folder(stage).glob("*"))
    license_paths = [file for file in base_model_files if _LICENSE_FILE_REGEX.fullmatch(file.name) and file.is_file()]
    return {file.name: file.read_bytes() for file in license_paths}


def _base_model_folder(stage: Stage) -> Path:
    """Return the local folder of the base model; the null device if the base model is in no local folder."""
    model_path = Path(stage.origin.get("base_model", ""))
    return model_path if model_path.is_absolute() else Path(os.devnull)


def _adapter_base_model(stage: Stage) -> str:
    return str(_get_upstream_outcome_info(stage).get("base") or strip_local_path(stage.origin.get("base_model", "")))
