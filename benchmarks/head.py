"""The head of a language model at a large vocabulary: tokens per second by the size of its chunks, and by what is known
before the loss.

    python -m benchmarks.head [--dtype bfloat16] [--vocabulary 151936] [--tokens 512] [--rounds 3]

Each row is a forward and a backward pass of the scorer over a small random Qwen3. `derivative known` is what SFT and
GRPO with one update per step have: the head runs once. Variants are run in turn, round after round, and the best round
counts; on CPU the time is that of the processor, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from cosmos_core.models.scorer import LogprobScorer, RequestedOutputs, choose_chunk_bytes

CHUNKS_MIB = (64, 256, 1024)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Run all variants and print the table."""
    options = _options()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=max(1, options.hidden // 64), num_key_value_heads=1,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).to(DEVICE)  # type: ignore[arg-type]
    ids_1T = torch.randint(options.vocabulary, (1, options.tokens + 1), device=DEVICE)
    per_token_N = torch.randn(options.tokens, device=DEVICE) / options.tokens
    variants: dict[tuple[str, str], Callable[[], None]] = {}
    for mib in CHUNKS_MIB:
        scorer = LogprobScorer(model, mib << 20)
        for name, wants, expected in (
            ("derivative known", RequestedOutputs(), per_token_N),
            ("derivative unknown", RequestedOutputs(), None),
            ("known, entropy logged", RequestedOutputs(entropy="value"), per_token_N),
            ("entropy in the loss", RequestedOutputs(entropy="gradient"), None),
        ):
            variants[f"{mib} MiB", name] = partial(_step, scorer, ids_1T, wants, expected, per_token_N, options.dtype)
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(options.rounds):
        for key, step in variants.items():
            began = _now()
            step()
            best[key] = min(best[key], _now() - began)
    Console(width=None if sys.stdout.isatty() else 140).print(_table(best, options))


def _step(
    scorer: LogprobScorer, ids_1T: Tensor, wants: RequestedOutputs, grad_N: Tensor | None, weights_N: Tensor, dtype: str
) -> None:
    scorer.zero_grad(set_to_none=True)
    chosen_N = torch.arange(len(weights_N), device=DEVICE)
    with torch.autocast(DEVICE.type, getattr(torch, dtype), enabled=dtype != "float32"):
        found = scorer({"input_ids": ids_1T}, chosen_N, output_request=wants, loss_gradient_N=grad_N)
    loss = (found["logprobs"] * weights_N).sum()
    if wants.entropy == "gradient":
        loss = loss + 0.01 * found["entropy"].mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _table(best: dict[tuple[str, str], float], options: argparse.Namespace) -> Table:
    title = (
        f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}, hidden {options.hidden}, {options.layers} "
        f"layers, {options.dtype}, {torch.get_num_threads()} threads; the rule chooses "
        f"{choose_chunk_bytes(DEVICE) >> 20} MiB"
    )
    table = Table("tokens/s by chunk", title=title)
    names = list(dict.fromkeys(name for _, name in best))
    for name in names:
        table.add_column(name, justify="right")
    for chunk in dict.fromkeys(chunk for chunk, _ in best):
        table.add_row(chunk, *(f"{options.tokens / best[chunk, name]:,.0f}" for name in names))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute; weights float32")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
