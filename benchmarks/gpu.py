"""One GPU: what a training step of a 0.6B Qwen3 does per second, and what a sync of its weights takes.

    python -m benchmarks.gpu [--contexts 4096 16384] [--steps 5] [--compile]

Random weights of the model's public shape, float32 master and bfloat16 compute, AdamW, rows of one length packed into
micro-batches of --tokens. Useful tokens only; the first steps do not count. `of peak` is the share of what a large
bfloat16 matrix product reaches in the same run. Memory is the most that was allocated. Neither Ray, vLLM nor Prefect
is needed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cosmos_core.algorithms.sft import Sft
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM, Reading
from cosmos_core.models.hf import named_weights
from cosmos_core.models.recompute import Recompute, recompute
from cosmos_core.parallel.fsdp import blocks_of
from cosmos_core.run.progress import Progress
from cosmos_core.train.trainer import Trainer

WARM_UP = 2
RECOMPUTED: dict[str, Recompute] = {"nothing": False, "selective": "selective", "blocks": True}


class Found(NamedTuple):
    """What a variant was measured to do."""

    tokens_per_second: float
    flops_per_second: float
    peak_bytes: int
    sync_seconds: float


def main() -> None:
    """Run all variants and print the table."""
    options = _options()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: needs an NVIDIA GPU, and torch sees none; --device cpu with --layers 1 tries it out")
    peak = _matmul(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"Qwen3 0.6B on {name}, torch {torch.__version__}, matrix products of {peak / 1e12:.0f} TFLOP/s"
    table = Table("tokens per row", "recomputed", title=title)
    for column in ("tokens/s", "of peak", "peak GiB", "sync s"):
        table.add_column(column, justify="right")
    for length in options.contexts:
        for how, setting in RECOMPUTED.items():
            try:
                found = _measured(options, device, length, setting)
            except torch.OutOfMemoryError:
                table.add_row(f"{length:,}", how, "does not fit", "", "", "")
                continue
            table.add_row(
                f"{length:,}", how, f"{found.tokens_per_second:,.0f}", f"{found.flops_per_second / peak:.0%}",
                f"{found.peak_bytes / 2**30:.1f}", f"{found.sync_seconds:.3f}",
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _measured(options: argparse.Namespace, device: torch.device, length: int, setting: Recompute) -> Found:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = _model(options).to(device)
    recompute(model, setting)
    if options.compile:
        for block in blocks_of(model):
            block.compile(dynamic=True)
    num_rows = max(1, options.tokens // length)
    train = TrainConfig.model_validate(
        {"sequence_packing": True, "param_dtype": "bfloat16", "train_policy": {"type": "sft", "mini_batch": num_rows}}
    )
    generator = np.random.default_rng(0)
    num_tokens = options.micro_batches * num_rows * length
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(CausalLM(model, train, Reading(0)), train, Progress(Path(folder) / "progress.json"))
        began = 0.0
        for step in range(WARM_UP + options.steps):
            if step == WARM_UP:
                began = _now(device)
            rows = generator.integers(options.vocabulary, size=(options.micro_batches * num_rows, length))
            (update,) = Sft(train.train_policy).updates(
                [Sample(row, np.ones(length, np.uint8)) for row in rows], trainer
            )
            trainer.update(update)
        seconds = (_now(device) - began) / options.steps
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    flops = _flops_per_token(model, length) * num_tokens
    return Found(num_tokens / seconds, flops / seconds, peak, _sync_seconds(model, device))


def _model(options: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=1024, intermediate_size=3072, num_hidden_layers=options.layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=max(40_960, *options.contexts), attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Count six per weight of a matrix, the tied one once, and the causal half of attention: without recomputation."""
    text = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    return 6.0 * weights + 6.0 * length * text.num_hidden_layers * text.num_attention_heads * text.head_dim


def _sync_seconds(model: PreTrainedModel, device: torch.device) -> float:
    """Time what a sync to an engine in this process costs at least: every weight copied once in bfloat16."""
    engine = {name: torch.empty_like(weight, dtype=torch.bfloat16) for name, weight in named_weights(model)}
    best = float("inf")
    for _ in range(3):
        began = _now(device)
        for name, weight in named_weights(model):
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
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16_384], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="per optimizer step")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
