"""One GPU: what a training step of a Qwen3 does per second, and what a sync of its weights takes.

    python -m benchmarks.gpu [--size 0.6B] [--layers N] [--contexts 4096 16384] [--steps 5] [--recompute nothing blocks]
                             [--compile] [--ragged] [--lora RANK] [--fa 2] [--fp8] [--profile FOLDER] [--json FILE]

Random weights of the model's public shape, float32 master and bfloat16 compute, AdamW, rows packed into micro-batches
of --tokens. Useful tokens only; steps do not count until one of them compiled nothing. `of matmul` is the share of what
a large bfloat16 matrix product reaches in the same run, `of 989` that of an H100's data sheet. Memory is the most that
was allocated, and that the allocator reserved. The file of --json is written anew after each cell, so that a run that
is cut off leaves what it has measured. Neither Ray, vLLM, diffusers nor Prefect is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cosmos_core.algorithms.sft import Sft
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.precision import FP8Config
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.compilation import compile_blocks, report_compilations
from cosmos_core.models.kernels import enable_flash_attention_3, enable_fp8_if_supported
from cosmos_core.models.recompute import RecomputeMode, recompute_activations
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.unit.tiny_model import iter_checkpoint_weights

WARM_UP, MOST_WARM_UP = 2, 12
DATA_SHEET = 989e12
"""Dense bfloat16 FLOP/s of an H100 SXM."""
RECOMPUTED: dict[str, RecomputeMode] = {"nothing": False, "selective": "selective", "blocks": True}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30B-A3B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip


class Found(NamedTuple):
    """What a variant was measured to do."""

    tokens_per_second: float
    flops_per_second: float
    peak_bytes: int
    reserved_bytes: int
    sync_seconds: float


def main() -> None:
    """Run all variants and print the table."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: needs an NVIDIA GPU, and torch sees none; --device cpu with --layers 1 tries it out")
    matmul, attention = _matmul(device), 3 if options.fa != 2 and enable_flash_attention_3() else 2
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"Qwen3 {options.size} on {name}, torch {torch.__version__}, products of {matmul / 1e12:.0f} TFLOP/s"
    table = Table("tokens per row", "recomputed", title=title)
    for column in ("tokens/s", "of matmul", "of 989", "peak GiB", "reserved", "sync s"):
        table.add_column(column, justify="right")
    cells: list[dict[str, Any]] = []
    for length in options.contexts:
        for how in options.recompute:
            cell: dict[str, Any] = {"tokens_per_row": length, "recomputed": how}
            try:
                found = _measured(options, device, length, how)
            except torch.OutOfMemoryError:
                table.add_row(f"{length:,}", how, "does not fit")
            else:
                cell |= found._asdict()
                table.add_row(
                    f"{length:,}", how, f"{found.tokens_per_second:,.0f}", f"{found.flops_per_second / matmul:.0%}",
                    f"{found.flops_per_second / DATA_SHEET:.0%}", f"{found.peak_bytes / 2**30:.1f}",
                    f"{found.reserved_bytes / 2**30:.1f}", f"{found.sync_seconds:.3f}",
                )  # fmt: skip
            cells.append(cell)
            if options.json:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                found_here = {"device": name, "matmul": matmul, "flash_attention": attention, **versions}
                options.json.parent.mkdir(parents=True, exist_ok=True)
                said = {key: str(value) for key, value in vars(options).items()}
                options.json.write_text(json.dumps({**found_here, "options": said, "cells": cells}, indent=2))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _measured(options: argparse.Namespace, device: torch.device, length: int, how: str) -> Found:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    num_rows = max(1, options.tokens // length)
    train = TrainConfig.model_validate(
        {"sequence_packing": True, "param_dtype": "bfloat16", "train_policy": {"type": "sft", "mini_batch": num_rows}}
    )
    with tempfile.TemporaryDirectory() as folder:
        progress = ProgressWriter(Path(folder) / "progress.json")
        report_compilations(progress)
        model = _prepared(options, device, how)
        trainer = Trainer(CausalLM(model, train, InputProcessing(0)), train, progress)
        batches = _batches(options, num_rows, length)

        def step() -> int:
            samples = next(batches)
            (update,) = Sft(train.train_policy).updates(samples, trainer)
            trainer.update(update)
            return sum(len(sample.input_ids) for sample in samples)

        for number in range(MOST_WARM_UP):
            compiled = progress.compile_seconds
            step()
            if number + 1 >= WARM_UP and progress.compile_seconds == compiled:
                break
        began = _now(device)
        num_tokens = sum(step() for _ in range(options.steps))
        seconds = _now(device) - began
        if options.profile:
            _profile(step, options.profile / f"{length}-{how}")
    is_cuda = device.type == "cuda"
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if is_cuda else (0, 0)
    flops = _flops_per_token(model, length) * num_tokens
    return Found(num_tokens / seconds, flops / seconds, peak, reserved, _sync_seconds(model, device))


def _batches(options: argparse.Namespace, num_rows: int, length: int) -> Iterator[list[Sample]]:
    """Yield the rows of each step: of one length, or of --ragged lengths from an eighth of it on."""
    generator = np.random.default_rng(0)
    while True:
        count = options.micro_batches * num_rows
        lengths = generator.integers(length // 8, length + 1, size=count) if options.ragged else [length] * count
        rows = (generator.integers(options.vocabulary, size=each) for each in lengths)
        yield [Sample(row, np.ones(len(row), np.uint8)) for row in rows]


def _prepared(options: argparse.Namespace, device: torch.device, how: str) -> PreTrainedModel:
    model = _model(options).to(device)  # type: ignore[arg-type]
    recompute_activations(model, RECOMPUTED[how])
    if options.lora:
        from cosmos_core.models.lora import add_adapter

        model.requires_grad_(False)
        add_adapter(model, LoraConfig(r=options.lora, lora_alpha=options.lora, target_modules="all-linear"))
    if options.fp8:
        enable_fp8_if_supported(model, FP8Config(enable_fp8=True))
    if options.compile:
        compile_blocks(model)
    return model


def _profile(step: Any, target: Path) -> None:
    """Write a trace of one step, and the kernels that took most of its time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    profiler.export_chrome_trace(f"{target}.json.gz")
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    Path(f"{target}.txt").write_text(profiler.key_averages().table(sort_by=order, row_limit=30))


def _model(options: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 8, "tie_word_embeddings": False, **SIZES[options.size]}
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    shared = {"head_dim": 128, "max_position_embeddings": max(40_960, *options.contexts), "attn_implementation": "sdpa"}
    if "num_experts" in sizes:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=options.vocabulary, **sizes, **shared))
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=options.vocabulary, **sizes, **shared))


def _flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Count six per weight of a matrix that is trained and four per frozen one, the tied one once, of experts those
    that a token chooses, and the causal half of attention: without recomputation."""
    text = model.config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", 1) / getattr(text, "num_experts", 1)
    weights = 0.0
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            share = chosen if parameter.ndim == 3 else 1.0
            weights += share * parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
    return weights + 6.0 * length * text.num_hidden_layers * text.num_attention_heads * text.head_dim


def _sync_seconds(model: PreTrainedModel, device: torch.device) -> float:
    """Time what a sync to an engine in this process costs at least: every weight copied once in bfloat16."""
    engine = {name: torch.empty_like(weight, dtype=torch.bfloat16) for name, weight in iter_checkpoint_weights(model)}
    best = float("inf")
    for _ in range(3):
        began = _now(device)
        for name, weight in iter_checkpoint_weights(model):
            engine[name].copy_(weight.detach())
        best = min(best, _now(device) - began)
    return best


def _matmul(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(10):
        began = _now(device)
        left @ left
        best = min(best, _now(device) - began)
    return 2 * size**3 / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="per optimizer step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the size has")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTED, default=list(RECOMPUTED))
    parser.add_argument("--ragged", action="store_true", help="rows of many lengths")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter alone")
    parser.add_argument("--fa", type=int, choices=(2, 3), help="FlashAttention; left out: 3 where it is installed")
    parser.add_argument("--fp8", action="store_true", help="linear layers of the blocks in fp8, by rows")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="a trace and its longest kernels per cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each cell")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
