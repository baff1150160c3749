"""Export of a model in the quantised formats of `[export]`, each verified by loading it.

    <stage>/safetensors/step_N/   the unquantised model, see `checkpoint.export`
    <stage>/FORMAT/step_N/        the quantised model, with a separate model card
    <stage>/done/                 results of finished operations, which a resumed stage does not repeat

vLLM loads each quantised model in a separate Python process, where it is compared with the unquantised model. If a
stage in `after` has run benchmarks on the unquantised model, the same benchmarks are run on each quantised model.
transformers loads a GGUF file, without benchmarks.
"""

import importlib
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.initialization import meta_device_safe_creation_ops

from cosmos_core.checkpoint.export import run as export_plain
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.export import UNQUANTIZED_FORMAT
from cosmos_core.data.kinds.base import VALIDATION_SPLIT
from cosmos_core.errors import ConfigError, DataError, Preempted
from cosmos_core.export import divergence
from cosmos_core.export.gguf import GGUF_FORMAT, find_gguf_problem, write_gguf
from cosmos_core.export.quantize import LinearLayers, describe_format, find_layers, make_quant_scheme, quantize_folder
from cosmos_core.models.hf import load_config, model_without_weights
from cosmos_core.models.new_interpreter import call_in_interpreter, open_interpreter_pool
from cosmos_core.rollout.vllm_logits import find_vllm_problem, get_vllm_version
from cosmos_core.run.files import read_json_object, write_json, write_text
from cosmos_core.run.progress import read_progress
from cosmos_core.run.stage import Stage, find_source_stage, load_stage
from cosmos_core.types import JsonValue, Outcome

_VERIFICATION_TIMEOUT_SECONDS = 3600.0
_LOGPROBS_FOLDER = ".logprobs"
_BENCHMARK_PREFIX = "evaluation/"


class QuantPlan(NamedTuple):
    """Plan for quantising a model to one format, and for comparing the result with the unquantised model."""

    format_name: str
    quant_scheme: Any
    """Scheme of compressed-tensors; None: the format is GGUF."""
    linear_layers: LinearLayers | None
    unsupported_reason: str
    """Reason why vLLM cannot run the format on this machine; empty if vLLM can run it, and for GGUF."""

    @property
    def is_loaded_by_vllm(self) -> bool:
        """Return True if vLLM loads a model in this format to verify it, False if transformers does."""
        return self.linear_layers is not None and not self.unsupported_reason

    @property
    def description(self) -> str:
        """Return one line about the format and the quantised layers, for `cosmos check` and the model card."""
        if self.linear_layers is None:
            return f"{self.format_name}: one file in bfloat16"
        return describe_format(self.format_name, self.quant_scheme, self.linear_layers)


def run(stage: Stage) -> Outcome:
    """Export the model, and each quantised format of the recipe; see `checkpoint.export.run` for further errors.

    Raises:
        ConfigError: vLLM cannot run a format on this machine, and `export.unproven` is false.
        DataError: there are no rows on which the models can be compared.
        ModelError: a format does not support the layers of the model.
        StageFailed: a quantised model cannot be loaded, or its divergence is that of a broken model.
        Preempted: a stop was requested; finished weight files are kept.
    """
    quant_plans = plan_quantized_formats(stage)
    text_config = load_config(stage.model, stage.recipe.policy.model_revision).get_text_config()
    max_length = getattr(text_config, "max_position_embeddings", None) or divergence.MAX_COMPARED_TOKENS + 1
    split_name, rows = divergence.load_text_rows(_find_prepared_rows(stage), max_length)
    unquantized_outcome = _load_outcome_or_run(stage, UNQUANTIZED_FORMAT, lambda: export_plain(stage))
    logprobs_folder = stage.path / _LOGPROBS_FOLDER
    shutil.rmtree(logprobs_folder, ignore_errors=True)
    logprobs_folder.mkdir()
    output_paths, metrics = list(unquantized_outcome.outputs), dict(unquantized_outcome.metrics)
    folder_by_format: dict[str, JsonValue] = {UNQUANTIZED_FORMAT: unquantized_outcome.info["model"]}
    for plan in quant_plans:
        write_model = partial(_write_quantized_model, stage, plan, unquantized_outcome)
        quantized_outcome = _load_outcome_or_run(stage, plan.format_name, write_model)
        folder = stage.path / quantized_outcome.outputs[0]
        verify_model = partial(_verify_quantized_model, stage, plan, unquantized_outcome, folder, rows)
        check_outcome = _load_outcome_or_run(stage, f"{plan.format_name}-proof", verify_model)
        model_card = (stage.path / str(unquantized_outcome.info["model"]) / "README.md").read_text(encoding="utf-8")
        write_text(folder / "README.md", model_card + _build_card_section(plan, check_outcome, split_name, len(rows)))
        output_paths += quantized_outcome.outputs
        metrics |= quantized_outcome.metrics | check_outcome.metrics
        folder_by_format[plan.format_name] = quantized_outcome.outputs[0]
    shutil.rmtree(logprobs_folder)
    return Outcome(tuple(output_paths), metrics, {**unquantized_outcome.info, "formats": folder_by_format})


def plan_quantized_formats(stage: Stage) -> list[QuantPlan]:
    """Return a plan for each quantised format of the recipe. Raise `ModelError` if a format does not support the layers
    of the model, and `ConfigError` if the converter of llama.cpp is missing, or if vLLM cannot run a format on this
    machine and `export.unproven` is false."""
    config = stage.recipe.export
    if GGUF_FORMAT in config.quantized_formats and (problem := find_gguf_problem()):
        raise ConfigError(f"export.formats has 'gguf', but {problem}; leave it out")
    gguf_plans = [QuantPlan(GGUF_FORMAT, None, None, "") for name in config.quantized_formats if name == GGUF_FORMAT]
    vllm_formats = [name for name in config.quantized_formats if name != GGUF_FORMAT]
    if not vllm_formats:
        return gguf_plans
    with torch.device("meta"), meta_device_safe_creation_ops():
        model_revision = stage.recipe.policy.model_revision
        model = model_without_weights(stage.model, revision=model_revision, dtype=torch.bfloat16)
    layers = find_layers(model)
    vllm_plans = [
        QuantPlan(name, make_quant_scheme(name, layers), layers, find_vllm_problem(name, model.config, stage.model))
        for name in vllm_formats
    ]
    for plan in vllm_plans:
        if plan.unsupported_reason and not config.unproven:
            remedy = "leave it out, or set export.unproven = true"
            raise ConfigError(f"export.formats has {plan.format_name!r}, but {plan.unsupported_reason}; {remedy}")
    return vllm_plans + gguf_plans


def _find_prepared_rows(stage: Stage) -> Path:
    """Return the folder of the prepared rows of the stage or an upstream training; raise DataError if there is none."""
    if stage.data is not None:
        return stage.data
    source_stage = referenced_stage(stage.config.model)
    results_to_search = [stage.inputs[name] for name in sorted(stage.inputs, key=lambda name: name != source_stage)]
    for stage_result in results_to_search:
        with suppress(ConfigError):
            upstream_stage = load_stage(find_source_stage(Path(stage_result["path"])))
            if upstream_stage.kind.trains_model and upstream_stage.data is not None:
                if not upstream_stage.data.is_dir():
                    raise DataError(
                        f"stage {stage.name!r}: the rows of stage {upstream_stage.name!r}, with which the formats are "
                        f"compared, are no longer in {upstream_stage.data}, or on another machine; set data = "
                        f'"stage:NAME" of a prepare stage in this pipeline'
                    )
                return upstream_stage.data
            results_to_search += upstream_stage.inputs.values()
    problem = "no training comes before it, with whose rows the formats could be compared"
    raise DataError(f'stage {stage.name!r}: {problem}; set data = "stage:NAME" of a prepare stage')


def _load_outcome_or_run(stage: Stage, operation_name: str, run_operation: Callable[[], Outcome]) -> Outcome:
    """Return the outcome (outputs and metrics) of an operation of an export stage. The operation runs only if no
    earlier attempt of the stage has saved its outcome."""
    outcome_file = stage.path / "done" / f"{operation_name}.json"
    saved_outcome = read_json_object(outcome_file)
    outputs = tuple(saved_outcome.get("outputs", ()))
    if saved_outcome.get("fingerprint") == stage.fingerprint and all((stage.path / path).exists() for path in outputs):
        return Outcome(outputs, saved_outcome["metrics"], saved_outcome["info"])
    outcome = run_operation()
    outcome_file.parent.mkdir(exist_ok=True)
    write_json(outcome_file, {"fingerprint": stage.fingerprint, **asdict(outcome)})
    return outcome


def _write_quantized_model(stage: Stage, plan: QuantPlan, unquantized_outcome: Outcome) -> Outcome:
    """Quantise the unquantised model to the format of a plan. The model is written to a temporary folder, which is
    renamed when it is complete."""
    output_folder_name = f"{plan.format_name}/step_{unquantized_outcome.info['step']}"
    target_folder = stage.path / output_folder_name
    incomplete_folder = target_folder.with_name(f".{stage.fingerprint[:16]}.partial")
    shutil.rmtree(target_folder, ignore_errors=True)
    stage.progress.phase("export")

    def on_file_quantized(num_quantized_files: int, num_weight_files: int) -> None:
        stage.progress.advance(num_quantized_files, num_weight_files)
        if stage.stop_requested and num_quantized_files < num_weight_files:
            progress_text = f"{num_quantized_files} of {num_weight_files} files"
            raise Preempted(f"stage {stage.name!r}: {progress_text} of {plan.format_name} are written")

    def report_progress() -> None:
        stage.progress.beat()
        if stage.stop_requested:
            raise Preempted(f"stage {stage.name!r}: stopped while {plan.format_name} was written")

    unquantized_folder = stage.path / str(unquantized_outcome.info["model"])
    if plan.linear_layers is None:
        shutil.rmtree(incomplete_folder, ignore_errors=True)
        write_gguf(unquantized_folder, incomplete_folder, report_progress)
    else:
        quantize_folder(unquantized_folder, incomplete_folder, plan.quant_scheme, plan.linear_layers, on_file_quantized)
    incomplete_folder.rename(target_folder)
    num_bytes = sum(file.stat().st_size for file in target_folder.iterdir() if file.suffix in {".safetensors", ".gguf"})
    return Outcome((output_folder_name,), {f"export/{plan.format_name}/bytes": float(num_bytes)})


def _verify_quantized_model(
    stage: Stage, plan: QuantPlan, unquantized_outcome: Outcome, quantized_folder: Path, rows: list[divergence.TokenIds]
) -> Outcome:
    """Load a quantised model in separate Python processes, and return its divergence and benchmarks as metrics."""
    unquantized_folder = stage.path / str(unquantized_outcome.info["model"])
    reference_folder = stage.path / _LOGPROBS_FOLDER / ("of_engine" if plan.is_loaded_by_vllm else "plain")
    stage.progress.phase("validate")
    divergence_arguments = (plan.is_loaded_by_vllm, rows, reference_folder)
    if not reference_folder.exists():
        _run_in_fresh_interpreter(stage, divergence.save_logprobs, unquantized_folder, *divergence_arguments)
    divergence_result: divergence.Divergence = _run_in_fresh_interpreter(
        stage, divergence.measure_divergence, quantized_folder, *divergence_arguments
    )
    metric_prefix = f"export/{plan.format_name}/"
    metrics = {
        "kl": divergence_result.kl,
        "kl_stderr": divergence_result.standard_error,
        "same_top_token": divergence_result.top_token_agreement,
    }
    metrics["proven"] = float(not plan.unsupported_reason)
    benchmark_result = _find_benchmarks(stage)
    if benchmark_result is not None and plan.is_loaded_by_vllm:
        scratch_folder = stage.path / _LOGPROBS_FOLDER / f"{plan.format_name}-{_BENCHMARK_PREFIX}"
        benchmark_arguments = (quantized_folder, find_source_stage(Path(benchmark_result["path"])), scratch_folder)
        scores = _run_in_fresh_interpreter(stage, _run_benchmarks, *benchmark_arguments, stage_folder=scratch_folder)
        for name, score in scores.items():
            metrics[name] = score
            if not name.endswith("_stderr"):
                metrics[f"lost/{name.removeprefix(_BENCHMARK_PREFIX)}"] = benchmark_result["metrics"][name] - score
    return Outcome(
        (), {metric_prefix + name: value for name, value in metrics.items()}, {"tokens": divergence_result.num_tokens}
    )


def _run_in_fresh_interpreter(
    stage: Stage, function: Callable[..., Any], folder: Path, *arguments: Any, stage_folder: Path | None = None
) -> Any:
    """Call `function(folder, *arguments)` in a separate Python process, and return the result. Raise `Preempted` if a
    stop was requested, and `StageFailed` if the function failed.

    The function must end within an hour, unless it runs another stage. For such a function, `stage_folder` is the
    folder of the other stage, whose heartbeats are forwarded to `stage`."""
    heartbeats_at_last_check = 0

    def forward_heartbeat() -> None:
        nonlocal heartbeats_at_last_check
        if stage.stop_requested:
            raise Preempted(f"stage {stage.name!r}: stopped while {folder} was compared; what was written is kept")
        benchmark_progress = read_progress(stage_folder) if stage_folder else None
        if benchmark_progress and benchmark_progress.beats != heartbeats_at_last_check:
            heartbeats_at_last_check = benchmark_progress.beats
            stage.progress.beat()

    stage.progress.beat()
    with open_interpreter_pool() as pool:
        timeout_seconds = None if stage_folder else _VERIFICATION_TIMEOUT_SECONDS
        return call_in_interpreter(pool, function, (folder, *arguments), timeout_seconds, folder, forward_heartbeat)


def _find_benchmarks(stage: Stage) -> dict[str, Any] | None:
    """Return the result of an earlier stage, named in `after`, that has run benchmarks on the model to export; None if
    there is no such stage."""
    for stage_result in stage.inputs.values():
        if any(name.startswith(_BENCHMARK_PREFIX) for name in stage_result["metrics"]):
            upstream_stage = load_stage(find_source_stage(Path(stage_result["path"])))
            if upstream_stage.kind.makes == "metrics" and upstream_stage.config.model == stage.config.model:
                return stage_result
    return None


def _run_benchmarks(model_folder: Path, stage_path: Path, scratch_folder: Path) -> dict[str, float]:
    """Run the benchmarks of the `evaluate` stage at `stage_path` on the model in `model_folder`, with files in
    `scratch_folder`; return the metrics."""
    scratch_folder.mkdir(parents=True)
    # Import the program only if it is needed, because lm-eval is an optional package.
    evaluate_program = importlib.import_module("cosmos_core.evaluate.program")
    return evaluate_program.run(replace(load_stage(stage_path), path=scratch_folder, model=str(model_folder))).metrics


def _build_card_section(quant_plan: QuantPlan, verification_outcome: Outcome, split_name: str, num_rows: int) -> str:
    metric_prefix = f"export/{quant_plan.format_name}/"
    plan_metrics = {name.removeprefix(metric_prefix): value for name, value in verification_outcome.metrics.items()}
    split_text = "held-out" if split_name == VALIDATION_SPLIT else "training"
    quantization_method_text = f"rounded to nearest, by compressed-tensors {version('compressed-tensors')}"
    loading_text, comparison_engine_text = f"Loaded by vLLM {get_vllm_version()}", ""
    if quant_plan.linear_layers is None:
        quantization_method_text = "converted by llama.cpp"
        loading_text = f"Loaded by transformers {version('transformers')}"
    elif quant_plan.unsupported_reason:
        loading_text, comparison_engine_text = f"**Unproven**: {quant_plan.unsupported_reason}", ", by transformers"
    card_lines = [
        "", f"## Quantised: `{quant_plan.format_name}`", "",
        f"- {quant_plan.description}, {quantization_method_text}",
        f"- {loading_text}",
        f"- Divergence KL(bf16 || {quant_plan.format_name}): {plan_metrics['kl']:.3g} nats per token (standard error "
        f"{plan_metrics['kl_stderr']:.2g}) on {verification_outcome.info['tokens']} tokens of {num_rows} {split_text} "
        f"rows{comparison_engine_text}",
        f"- The most likely token is that of bf16 for {plan_metrics['same_top_token']:.2%} of them", "",
    ]  # fmt: skip
    if score_drops := {name: value for name, value in plan_metrics.items() if name.startswith("lost/")}:
        card_lines += [f"| benchmark | bf16 | {quant_plan.format_name} | lost |", "|---|---|---|---|"]
    for name, score_drop in score_drops.items():
        benchmark_score = plan_metrics[_BENCHMARK_PREFIX + name.removeprefix("lost/")]
        benchmark_cells = f"{benchmark_score + score_drop:.4g} | {benchmark_score:.4g} | {score_drop:.4g}"
        card_lines.append(f"| {name.removeprefix('lost/')} | {benchmark_cells} |")
    return "\n".join([*card_lines, ""])
