"""Quantised exports: tensors against plain arithmetic, loading, divergence, continuation and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pebble import ProcessPool
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.table import StageContext
from cosmos_core.data import prepare
from cosmos_core.errors import ConfigError, DataError, ModelError, Preempted, StageFailed
from cosmos_core.export import formats, program
from cosmos_core.export.divergence import measure_divergence, save_logprobs
from cosmos_core.export.formats import _run_in_fresh_interpreter, plan_quantized_formats
from cosmos_core.export.gguf import write_gguf
from cosmos_core.export.quantize import find_layers, make_quant_scheme, quantize_folder, quantize_weight
from cosmos_core.rollout.vllm_logits import find_vllm_problem
from cosmos_core.run.progress import read_progress
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds
from tests.conftest import PROGRAMS, wait_until
from tests.effects.change import SFT, recipe, stage_of
from tests.programs.beating import beat_until_released
from tests.real.rows import write_rows
from tests.unit.tiny_families import save_family
from tests.unit.tiny_model import save_tiny_model

UP = "model.layers.0.mlp.up_proj.weight"
ROWS = [[5, 9, 200, 31, 77, 8], [1, 2, 3, 4], [90, 80, 70, 60, 50]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16 with its weights in several files, and an output layer of its own."""
    folder = tmp_path_factory.mktemp("models") / "model"
    save_tiny_model(folder, tied=False)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    loaded.save_pretrained(folder, max_shard_size="60KB")
    (folder / "README.md").write_text("card\n")
    (folder / "lora").mkdir()
    (folder / "lora/adapter_config.json").write_text("{}")
    return folder


def open_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def quantized(source: Path, target: Path, name: str, **arguments: Any) -> Path:
    layers = find_layers(open_model(source))
    quantize_folder(source, target, make_quant_scheme(name, layers), layers, **arguments)
    return target


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def dequantized(parts: dict[str, Tensor], prefix: str, name: str) -> Tensor:
    """A weight in float32: value times scale, without a function of the product."""
    scale = parts[f"{prefix}.weight_scale"].float()
    if name != "w4a16":
        return parts[f"{prefix}.weight"].float() * scale
    packed = parts[f"{prefix}.weight_packed"].numpy().view(np.uint32)
    shifts = np.arange(8, dtype=np.uint32) * 4
    values = ((packed[:, :, None] >> shifts) & 15).reshape(len(packed), -1).astype(np.float32) - 8
    return (torch.from_numpy(values).unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)).flatten(1)


def rounded_inputs(inputs: Tensor, name: str) -> Tensor:
    """Activations as a format rounds them, with a scale per token."""
    if name == "w4a16":
        return inputs
    scale = inputs.abs().amax(-1, keepdim=True) / (127.5 if name == "int8" else 448)
    scaled = inputs / scale
    return (scaled.round().clamp(-128, 127) if name == "int8" else scaled.to(torch.float8_e4m3fn).bfloat16()) * scale


@pytest.mark.parametrize("name", ["fp8", "int8", "w4a16"])
def test_transformers_loads_the_weights_that_plain_rounding_gives(name: str, model: Path, tmp_path: Path) -> None:
    folder = quantized(model, tmp_path / name, name)
    parts, exact = tensors_of(folder), tensors_of(model)
    reference = open_model(model)
    rows = torch.tensor([ROWS[0]])
    for prefix in (key.removesuffix(".weight") for key in find_layers(reference).module_names):
        weight, scale = exact[f"{prefix}.weight"].float(), parts[f"{prefix}.weight_scale"]
        rounded = dequantized(parts, prefix, name)
        # Half a step, and up to half a step more for the largest value, whose scale is rounded to bfloat16.
        step = weight.abs() / 8 + scale.float().amax() if name == "fp8" else scale.float().repeat_interleave(
            weight.shape[1] // scale.shape[1], dim=1)  # fmt: skip
        assert ((rounded - weight).abs() <= step).all() and 2 * (rounded - weight).abs().mean() < step.mean()
        layer = reference.get_submodule(prefix)
        layer.weight.data = rounded.to(torch.bfloat16)
        layer.register_forward_pre_hook(lambda _, inputs: rounded_inputs(inputs[0], name))
    with torch.no_grad():
        loaded = open_model(folder)(input_ids=rows).logits
        assert torch.equal(loaded, reference(input_ids=rows).logits)
    kept = {key for key in exact if not key.endswith("_proj.weight")}
    assert "lm_head.weight" in kept and all(torch.equal(exact[key], parts[key]) for key in kept)
    assert (folder / "lora/adapter_config.json").read_text() == "{}"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert config["quantization_status"] == "compressed" and config["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_the_integers_are_those_of_round_to_nearest() -> None:
    layers = find_layers(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=64, vocab_size=8,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)))  # fmt: skip
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0] = 0
    eight = quantize_weight(weight, make_quant_scheme("int8", layers))
    scale = (weight.float().abs().amax(1, keepdim=True) / 127.5).bfloat16()
    assert torch.equal(eight["weight_scale"][1:], scale[1:])
    expected = (weight.float() / scale.float()).nan_to_num().round().clamp(-128, 127)
    assert torch.equal(eight["weight"].float(), expected) and eight["weight"].dtype == torch.int8
    scheme = make_quant_scheme("w4a16", layers)  # 128 and 64 do not divide 96
    four = quantize_weight(weight, scheme)
    groups = weight.float().unflatten(1, (3, 32))
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    expected = (groups / scale.float().unsqueeze(-1)).nan_to_num().round().clamp(-8, 7).flatten(1)
    assert scheme.weights.group_size == 32 and four["weight_shape"].tolist() == [8, 96]
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    assert torch.equal(unpack_from_int32(four["weight_packed"], 4, weight.shape).float(), expected)


def test_an_interrupted_quantisation_keeps_its_complete_files(model: Path, tmp_path: Path) -> None:
    whole = quantized(model, tmp_path / "whole", "int8")

    def stop(number: int, count: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(model, tmp_path / "parts", "int8", on_file_quantized=stop)
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "parts").glob("*.safetensors")}
    assert len(written) == 2
    (tmp_path / "parts/model-00003.partial").write_bytes(b"half")  # a kill in the middle of the next file
    again = quantized(model, tmp_path / "parts", "int8")
    assert {file: file.stat().st_mtime_ns for file in written} == written
    index = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: tensor.shape for name, tensor in tensors_of(again).items()}.keys() == index.keys()
    for file in whole.glob("*.safetensors"):
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_the_divergence_is_that_of_the_distributions_and_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    folder = quantized(model, tmp_path / "w4a16", "w4a16")
    save_logprobs(model, False, ROWS, tmp_path / "logprobs")
    found = measure_divergence(folder, False, ROWS, tmp_path / "logprobs")
    values, one, other = [], open_model(model), open_model(folder)
    with torch.no_grad():
        for row in ROWS:
            first, second = (torch.distributions.Categorical(logits=each(input_ids=torch.tensor([row])).logits[0, :-1]
                             .double()) for each in (one, other))  # fmt: skip
            values.append(torch.distributions.kl_divergence(first, second))
    assert found.kl == pytest.approx(float(torch.cat(values).mean()), rel=1e-4) and found.num_tokens == 12
    row_means = torch.stack([v.mean() for v in values])
    assert found.standard_error == pytest.approx(float(row_means.std() / 3**0.5), rel=1e-4)
    assert measure_divergence(model, False, ROWS, tmp_path / "logprobs").kl == 0
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.copy_(torch.randn_like(parameter))
    one.save_pretrained(tmp_path / "other")
    with pytest.raises(StageFailed, match="it is another model"):
        measure_divergence(tmp_path / "other", False, ROWS, tmp_path / "logprobs")


ROW_SETTINGS = {
    **SFT, "train.train_policy.conversation_column_name": "text", "train.train_policy.dataset.test_size": 4,
    "policy.model_max_length": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def prepared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows = write_rows(folder / "rows.jsonl", "text")
    config = recipe({**ROW_SETTINGS, "train.train_policy.dataset.name": str(rows)})
    prepare.run(stage_of(folder / "rows", config, kind="prepare", model=model))
    return folder / "rows/data"


def exported(folder: Path, model: Path, names: list[str], data: Path | None = None, **settings: Any) -> Stage:
    config = recipe({**ROW_SETTINGS, "export.formats": names, **settings})
    return stage_of(folder / "stages/export", config, kind="export", model=model, data=data)


def test_rows_that_are_gone_are_one_line(model: Path, tmp_path: Path) -> None:
    training = stage_of(tmp_path / "stages/sft", recipe(SFT), kind="sft", model=model, data=tmp_path / "gone/data")
    training.save()
    stage = exported(tmp_path, model, ["bf16", "int8"])
    stage.inputs = {"sft": {"path": str(training.path), "inputs": {}}}
    with pytest.raises(
        DataError, match=rf"rows of stage 'sft', .* are no longer in {tmp_path}/gone/data, .*; set data"
    ):
        program.run(stage)


@pytest.mark.full
def test_a_format_that_vllm_runs_is_loaded_by_it_and_kept(model: Path, prepared: Path, tmp_path: Path) -> None:
    stage = exported(tmp_path, model, ["bf16", "int8"], prepared)
    outcome = program.run(stage)
    assert outcome.outputs == ("safetensors/step_0", "int8/step_0") and outcome.info["model"] == "safetensors/step_0"
    assert outcome.info["formats"] == {"bf16": "safetensors/step_0", "int8": "int8/step_0"}
    metrics = outcome.metrics
    assert metrics["export/int8/proven"] == 1 and 0 < metrics["export/int8/kl"] < 0.3
    assert metrics["export/int8/bytes"] < metrics["export/bytes"]
    card = (stage.path / "int8/step_0/README.md").read_text()
    assert "Loaded by vLLM" in card and "tokens of 4 held-out rows" in card and "Unproven" not in card
    files = {file: file.stat().st_mtime_ns for file in stage.path.glob("*/step_0/*.safetensors")}
    assert program.run(stage) == outcome  # an attempt after a kill before the result was written
    assert {file: file.stat().st_mtime_ns for file in files} == files


@pytest.fixture
def one_interpreter(interpreter: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats are compared in the interpreter that reads the exports of other tests."""
    monkeypatch.setattr(formats, "open_interpreter_pool", lambda: nullcontext(interpreter))


@pytest.mark.usefixtures("one_interpreter")
def test_an_unproven_format_is_refused_unless_it_is_wanted(model: Path, prepared: Path, tmp_path: Path) -> None:
    if not (problem := find_vllm_problem("w4a16")):
        pytest.skip("vLLM runs w4a16 here")
    with pytest.raises(ConfigError, match=r"AVX-512.*set export.unproven = true"):
        plan_quantized_formats(exported(tmp_path, model, ["bf16", "w4a16"]))
    stage = exported(tmp_path, model, ["bf16", "w4a16"], prepared, **{"export.unproven": True})
    outcome = program.run(stage)
    assert outcome.metrics["export/w4a16/proven"] == 0 and outcome.metrics["export/w4a16/kl"] > 0
    assert f"**Unproven**: {problem}" in (stage.path / "w4a16/step_0/README.md").read_text()


@pytest.mark.full
def test_a_head_size_that_vllm_has_no_attention_for_is_named(model: Path, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(model, head_dim=24).save_pretrained(tmp_path / "narrow")
    stage = exported(tmp_path, model, ["bf16", "int8"])
    with pytest.raises(ConfigError, match=r"has 'int8', but vLLM on CPU has no attention for head_dim = 24 .*unproven"):
        plan_quantized_formats(replace(stage, model=str(tmp_path / "narrow")))
    with pytest.raises(StageFailed, match=r"head_dim = 24 .*; leave the format out of export.formats"):
        _run_in_fresh_interpreter(stage, save_logprobs, tmp_path / "narrow", True, ROWS, tmp_path / "logprobs")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter of the tests on PATH."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("converter", "one_interpreter")
def test_a_gguf_file_is_written_and_loaded_by_transformers(model: Path, prepared: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(
        model, head_dim=128
    )  # transformers does not read it from a GGUF file of a Qwen3
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*safetensors*"))
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    stage = exported(tmp_path, model, ["bf16", "gguf"], prepared)
    assert "gguf: one file in bfloat16" in str(program.check(stage).info["found"])
    outcome = program.run(stage)
    assert outcome.info["formats"] == {"bf16": "safetensors/step_0", "gguf": "gguf/step_0"}
    metrics, file = outcome.metrics, stage.path / "gguf/step_0/model.gguf"
    assert metrics["export/gguf/proven"] == 1 and 0 <= metrics["export/gguf/kl"] < 0.01
    assert metrics["export/gguf/bytes"] == file.stat().st_size and metrics["export/gguf/same_top_token"] > 0.9
    card = (file.parent / "README.md").read_text()
    assert "converted by llama.cpp" in card and "Loaded by transformers" in card and "4 held-out rows" in card
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    assert torch.equal(loaded.get_parameter(UP), open_model(model).get_parameter(UP).float())
    written = file.stat().st_mtime_ns
    assert program.run(stage) == outcome and file.stat().st_mtime_ns == written


@pytest.mark.usefixtures("converter")
def test_a_converter_that_fails_is_quoted_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(StageFailed, match=r"convert_hf_to_gguf.py failed with exit code 1: ERROR.*is not supported"):
        write_gguf(other, tmp_path / "gguf", lambda: None)
    assert not list((tmp_path / "gguf").iterdir())


def test_gguf_is_refused_where_the_converter_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"export.formats has 'gguf', but convert_hf_to_gguf.py .*leave it out"):
        program.check(exported(tmp_path, model, ["bf16", "gguf"], **{"export.unproven": True}))


def test_a_stop_leaves_the_written_files(model: Path, prepared: Path, tmp_path: Path) -> None:
    stage = exported(tmp_path, model, ["bf16", "int8"], prepared)
    stage.stop_requested = True
    with pytest.raises(Preempted):
        program.run(stage)
    assert not (stage.path / "int8").exists()


def test_a_stage_lives_while_its_benchmarks_do_and_a_stop_ends_them(tmp_path: Path) -> None:
    stage, pipe = stage_of(tmp_path / "export", recipe(SFT), kind="export"), tmp_path / "pipe"
    os.mkfifo(pipe)
    stage.progress.phase("validate")

    def release() -> None:  # the first beat is that before the program
        wait_until(lambda: read_progress(stage.path).beats >= before + 2, 120, "the heartbeat of the stage")  # type: ignore[union-attr]
        pipe.write_text("released")

    before = read_progress(stage.path).beats  # type: ignore[union-attr]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(release)
        followed = tmp_path / "first"
        said = _run_in_fresh_interpreter(stage, beat_until_released, tmp_path, followed, stage_folder=followed)
        assert said == "released"
    stage.stop_requested = True
    followed = tmp_path / "second"
    with pytest.raises(Preempted, match="stopped while"):
        _run_in_fresh_interpreter(stage, beat_until_released, tmp_path, followed, stage_folder=followed)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path / "model")
    with pytest.raises(ModelError, match="mixture of experts"):
        plan_quantized_formats(exported(tmp_path, folder, ["bf16", "int8"]))


def test_sizes_that_no_kernel_has_are_refused_for_four_bits() -> None:
    layers = find_layers(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=48, vocab_size=8,
        intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)))  # fmt: skip
    assert make_quant_scheme("int8", layers).weights.group_size is None
    with pytest.raises(ModelError, match=r"q_proj.weight has the shape \[48, 48\].*multiples of 32"):
        make_quant_scheme("w4a16", layers)


TABLES = '[policy]\nmodel_name_or_path = "m"\n[train.train_policy]\ntype = "sft"\n[export]\nformats = {}\n'
STAGES = """[[pipeline.stages]]
name = "export"
kind = "export"
model = "m"
[[pipeline.stages]]
name = "upload"
kind = "upload"
model = "stage:export"
after = ["export"]
target = "published"
"""
SAMPLED = """[[pipeline.stages]]
name = "sampled"
kind = "sample"
[[pipeline.stages]]
name = "export"
kind = "export"
model = "m"
data = "stage:sampled"
after = "sampled"
"""


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        ('["int8"]', "", "the others are made of 'bf16'; add it"),
        ('["bf16", "int8"]', '[train]\nparam_dtype = "float32"\n', "needs train.param_dtype = 'bfloat16'"),
        ('["bf16", "int8"]', STAGES, "no training comes before the stage"),
        ('["bf16", "int8"]', SAMPLED, "data = 'stage:sampled' has none; name a stage of kind prepare"),
        ('["bf16"]', STAGES + 'format = "int8"\n', "'int8' is not among"),
        ('["bf16", "int4"]', "", "export.formats"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_a_run(names: str, more: str, message: str, tmp_path: Path) -> None:
    tables = more + TABLES if more.startswith("[[") else TABLES.replace("[train.", more + "[train.", 1)
    (tmp_path / "recipe.toml").write_text(tables.format(names))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_capabilities(load_pipeline(tmp_path / "recipe.toml", (), all_kinds()))


def test_an_export_for_diffusion_models_has_no_formats() -> None:
    config = recipe({**SFT, "policy.is_diffusers": True, "export.formats": ["bf16", "fp8"]})
    [problem] = config.export.unsupported_setting_errors(StageContext(config, all_kinds()["export"]))
    assert problem == "export.formats is for language models; leave it out with policy.is_diffusers = true"
