"""Supervised fine-tuning here and in TRL's `SFTTrainer`: the same model, rows, dtype, optimizer and rows per step.

    python -m benchmarks.sft --data gsm8k/train.jsonl [--dtype bfloat16] [--vocabulary 151936] [--rounds 3]

Each variant runs in a process of its own, one after the other, round after round, so that a slow minute of the machine
falls on all of them. Counted are useful tokens (no padding); the first steps are not. Peak memory is the most that the
process held above what it held after the imports. The share of the machine's rate is that of a large matrix product of
the same dtype, measured in the same run. TRL is asked for its default, and for each documented setting that runs here.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table

OURS = {"ours packed": {"sequence_packing": True}, "ours padded": {"sequence_packing": False}}
TRL: dict[str, dict[str, Any]] = {
    "TRL default": {},
    "TRL padding-free": {"padding_free": True, "max_length": None},
    "TRL packing (mixes rows without a flash kernel)": {"packing": True},
}
WARM_UP = 2


def main() -> None:
    """Run all variants and print the table."""
    options = _options()
    if options.variant:
        print(json.dumps(_worker(options)))  # noqa: T201 - read by the parent
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        _prepare(options)
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for variant in (*OURS, *TRL):
                result = _spawn(options, variant)
                if result is not None:
                    found.setdefault(variant, []).append(result)
    Console(width=None if sys.stdout.isatty() else 140).print(_table(found, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="GSM8K, a .jsonl of question and answer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute; master float32")
    parser.add_argument("--vocabulary", type=int, default=8192, help="rows of the head; the tokenizer has 8192")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="rows per optimizer step")
    parser.add_argument("--mini-batch", type=int, default=8, help="rows per forward pass")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _prepare(options: argparse.Namespace) -> None:
    """Model, tokenizer and rows, made once for all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    count = options.batch * (options.steps + WARM_UP)
    lines = Path(options.data).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(options.folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128), head_dim=64, tie_word_embeddings=True, eos_token_id=0,
        pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(options.folder)
    ids = [[*fast(text)["input_ids"], 0] for text in texts[:count]]
    (Path(options.folder) / "rows.json").write_text(json.dumps(ids), encoding="utf-8")


def _spawn(options: argparse.Namespace, variant: str) -> dict[str, float] | None:
    arguments = [sys.executable, "-m", "benchmarks.sft"]
    for name, value in vars(options).items():
        if name == "checkpointing":
            arguments += ["--checkpointing"] if value else []
        elif name != "variant":
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([*arguments, "--variant", variant], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"{variant}: does not run here: {done.stderr.strip().splitlines()[-1]}\n")
        return None
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _worker(options: argparse.Namespace) -> dict[str, float]:
    warnings.simplefilter("ignore")
    run = _ours if options.variant in OURS else _trl
    baseline: list[int] = []
    seconds, tokens, loss = run(options, lambda: baseline.append(_resident()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak, baseline = torch.cuda.max_memory_allocated(), [0]
    return {"tokens_per_second": tokens / seconds, "peak": peak - baseline[0], "loss": loss, "matmul": _matmul(options)}


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _rows(options: argparse.Namespace) -> list[list[int]]:
    rows: list[list[int]] = json.loads((Path(options.folder) / "rows.json").read_text(encoding="utf-8"))
    return rows


def _ours(options: argparse.Namespace, before_model: Callable[[], None]) -> tuple[float, int, float]:
    from cosmos_core.algorithms.sft import Sft
    from cosmos_core.config.schema.train import TrainConfig
    from cosmos_core.data.sample import Sample
    from cosmos_core.models.causal_lm import CausalLM, Reading
    from cosmos_core.models.hf import load_model
    from cosmos_core.run.progress import Progress
    from cosmos_core.train.trainer import Trainer

    train = TrainConfig.model_validate(
        {
            "optm_lr": 1e-4, "optm_weight_decay": 0.0, "epsilon": 1e-8, "param_dtype": options.dtype,
            "optm_impl": "fused", "train_batch_per_replica": options.batch, **OURS[options.variant],
            "train_policy": {"type": "sft", "mini_batch": options.mini_batch},
        }
    )  # fmt: skip
    before_model()
    model = load_model(options.folder, dtype=torch.float32, gradient_checkpointing=options.checkpointing)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(CausalLM(model, train, Reading(1)), train, Progress(Path(options.folder) / "progress.json"))
    rows = [Sample(np.array(ids), np.ones(len(ids), np.uint8)) for ids in _rows(options)]
    began, tokens, loss = 0.0, 0, 0.0
    for step in range(options.steps + WARM_UP):
        if step == WARM_UP:
            began = _now()
        batch = rows[step * options.batch : (step + 1) * options.batch]
        for update in Sft(train.train_policy).updates(batch, trainer):
            loss = trainer.update(update)["loss"]
        tokens += sum(len(sample.input_ids) for sample in batch) if step >= WARM_UP else 0
    return _now() - began, tokens, loss


def _trl(options: argparse.Namespace, before_model: Callable[[], None]) -> tuple[float, int, float]:
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    rows = _rows(options)
    times: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each optimizer step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """One step is done."""
            times.append(_now())

    before_model()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    settings = SFTConfig(
        output_dir=f"{options.folder}/trl", per_device_train_batch_size=options.mini_batch,
        gradient_accumulation_steps=options.batch // options.mini_batch, max_steps=options.steps + WARM_UP,
        learning_rate=1e-4, weight_decay=0.0, adam_beta2=0.999, optim="adamw_torch_fused", lr_scheduler_type="constant",
        bf16=options.dtype == "bfloat16", use_cpu=not torch.cuda.is_available(), report_to=[], save_strategy="no",
        logging_steps=1, gradient_checkpointing=options.checkpointing, disable_tqdm=True,
        shuffle_dataset=False, train_sampling_strategy="sequential", dataloader_pin_memory=False,
        **{"max_length": max(len(ids) for ids in rows), **TRL[options.variant]},
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=settings, train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=AutoTokenizer.from_pretrained(options.folder), callbacks=[Clock()],
    )  # fmt: skip
    counts: list[int] = []
    _count_tokens(trainer, counts)
    trainer.train()
    loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
    passes = options.batch // options.mini_batch
    return times[-1] - times[WARM_UP - 1], sum(counts[WARM_UP * passes : (WARM_UP + options.steps) * passes]), loss


def _count_tokens(trainer: Any, counts: list[int]) -> None:
    """Note the useful tokens of each forward pass: labels that are learned, and each row's first token."""
    compute = trainer.compute_loss

    def counting(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        mask = inputs.get("attention_mask")
        counts.append(int(mask.sum()) if mask is not None and mask.ndim == 2 else ids.numel())
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = counting


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _matmul(options: argparse.Namespace, size: int = 2048) -> float:
    """Floating-point operations per second of a matrix product in the compute dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.randn(size, size, device=device, dtype=getattr(torch, options.dtype))
    left @ left
    began, repeats = _now(), 5
    for _ in range(repeats):
        left @ left
    return repeats * 2 * size**3 / (_now() - began)


def _table(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> Table:
    def median(variant: str, key: str) -> float:
        return statistics.median(result[key] for result in found[variant])

    weights = 6.0 * _size(options)
    default = median("TRL default", "tokens_per_second")
    title = (
        f"{_size(options) / 1e6:.1f}M weights, vocabulary {options.vocabulary:,}, {options.dtype}, rows a step "
        f"{options.batch}, a pass {options.mini_batch}, {torch.get_num_threads()} threads, median of {options.rounds}"
    )
    table = Table("variant", title=title)
    for column in ("tokens/s", "of TRL's default", "matmul rate", "peak MiB", "last loss"):
        table.add_column(column, justify="right")
    for variant in found:
        speed = median(variant, "tokens_per_second")
        share = speed * weights / median(variant, "matmul")
        peak = median(variant, "peak") / 2**20
        table.add_row(
            variant, f"{speed:,.0f}", f"{speed / default:.2f}", f"{share:.0%}", f"{peak:,.0f}",
            f"{median(variant, 'loss'):.3f}",
        )  # fmt: skip
    return table


def _size(options: argparse.Namespace) -> int:
    """Weights in matrices; the tied embedding counts once, for the head."""
    kv = max(1, options.hidden // 128) * 64
    layer = 2 * options.hidden * options.hidden + 2 * options.hidden * kv + 9 * options.hidden**2
    return options.layers * layer + options.vocabulary * options.hidden


if __name__ == "__main__":
    main()
