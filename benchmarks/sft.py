"""Supervised fine-tuning here and in TRL's `SFTTrainer`: the same model, rows, dtype, optimizer and rows per step.

    python -m benchmarks.sft --data gsm8k/train.jsonl [--dtype bfloat16] [--vocabulary 151936] [--rounds 3]
    python -m benchmarks.sft --data sharegpt52k_small                   long rows of about the same length

Measured is the whole loop of both: reading rows, training, logging each step, writing checkpoints and the last state.
Each variant runs in a process of its own, one after the other, round after round, so that a slow minute of the machine
falls on all of them. Counted are useful tokens (no padding); the first steps are not. Peak memory is the most that the
process held above what it held after the imports. The share of the machine's rate is that of a large matrix product of
the same dtype, measured in the same run.

`default` is what each does when nothing is said beside the task; the others say how rows are put together, and
recompute no activations unless `--checkpointing` is given. TRL is asked for each documented setting that runs here.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from rich.console import Console
from rich.table import Table

DEFAULTS = ("ours default", "TRL default")
OURS: dict[str, dict[str, Any]] = {
    "ours default": {},
    "ours packed": {"sequence_packing": True, "compile": False},
    "ours padded": {"sequence_packing": False, "compile": False},
}
TRL: dict[str, dict[str, Any]] = {
    "TRL default": {},
    "TRL padded": {},
    "TRL padding-free": {"padding_free": True, "max_length": None},
    "TRL packing (mixes rows without a flash kernel)": {"packing": True},
}
WARM_UP = 2
LONG_ROW = 450
"""Tokens of a row that is cut out of long conversations, about."""


class Measured(NamedTuple):
    """What a training took."""

    seconds: float
    """Of the measured steps, with what is saved in them and behind them."""
    tokens: int
    loss: float
    """Of the last step."""
    peak: int
    """Bytes that the process held at most."""


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
            for variant in dict.fromkeys((*DEFAULTS, *OURS, *TRL)):
                result = _spawn(options, variant)
                if result is not None:
                    found.setdefault(variant, []).append(result)
        console = Console(width=None if sys.stdout.isatty() else 140)
        for line in _ratios(found):
            console.print(line)
        console.print(_table(found, options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="GSM8K, a .jsonl of questions; or ShareGPT, a folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="compute; master float32")
    parser.add_argument("--vocabulary", type=int, default=8192, help="rows of the head; the tokenizer has 8192")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="rows per optimizer step")
    parser.add_argument("--mini-batch", type=int, default=8, help="rows per forward pass")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument(
        "--save-freq", type=int, default=6, help="steps between checkpoints; the last state is saved too"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _prepare(options: argparse.Namespace) -> None:
    """Model, tokenizer and rows, made once for all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = _texts(Path(options.data))
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
    if Path(options.data).is_dir():
        texts = _long_rows(texts, fast)
    count = options.batch * (options.steps + WARM_UP)
    texts = (texts * (1 + count // len(texts)))[:count]
    ids = [[*fast(text)["input_ids"], 0] for text in texts]
    folder = Path(options.folder)
    (folder / "rows.json").write_text(json.dumps(ids), encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _texts(data: Path) -> list[str]:
    """Return the rows of GSM8K, or the whole conversations of ShareGPT."""
    if data.is_dir():
        from datasets import load_from_disk

        conversations = load_from_disk(str(data))["train"]["conversation"]
        return ["\n".join(turn["content"] for turn in conversation) for conversation in conversations]
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    return [f"{row['question']}\n{row['answer']}" for row in rows]


def _long_rows(texts: list[str], tokenizer: Any) -> list[str]:
    """Return texts cut at spaces into rows of nearly the same number of tokens; what is shorter is left out."""
    rows = []
    for text in texts:
        words, row = text.split(" "), ""
        for word in words:
            row = f"{row} {word}" if row else word
            if len(row) % 16 == 0 and len(tokenizer(row)["input_ids"]) >= LONG_ROW:
                rows.append(row)
                row = ""
    return rows


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
    logging.disable(logging.WARNING)
    run = _ours if options.variant in OURS else _trl
    baseline: list[int] = []
    found = run(options, lambda: baseline.append(_resident()))
    return {
        "tokens_per_second": found.tokens / found.seconds, "peak": found.peak - baseline[0], "loss": found.loss,
        "matmul": _matmul(options),
    }  # fmt: skip


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    return 0 if torch.cuda.is_available() else int(psutil.Process().memory_info().rss)


def _rows(options: argparse.Namespace) -> list[list[int]]:
    rows: list[list[int]] = json.loads((Path(options.folder) / "rows.json").read_text(encoding="utf-8"))
    return rows


def _ours(options: argparse.Namespace, before_model: Callable[[], None]) -> Measured:
    """Run the programs of the stages `prepare` and `sft`."""
    from cosmos_core.config.schema.pipeline import StageConfig
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.registry import import_object
    from cosmos_core.run.stage import Stage
    from tasks.kinds import all_kinds

    steps = options.steps + WARM_UP
    recipe = Recipe.model_validate(_recipe(options))
    folder = Path(tempfile.mkdtemp(dir=options.folder))

    def run(name: str, data: Path | None, follow: Callable[[dict[str, Any]], None] | None = None) -> Path:
        kind = all_kinds()[name]
        program = import_object(kind.entry)
        (folder / name).mkdir()
        config = StageConfig(name=name, kind=name)
        stage = Stage(folder / name, config, recipe, options.folder, data, {}, "f" * 64, kind=kind)
        if follow:
            stage.metrics.line_callbacks.append(follow)
            before_model()
        program(stage)
        return stage.path

    lines: list[dict[str, Any]] = []
    peaks: list[int] = []

    def follow(line: dict[str, Any]) -> None:
        lines.append(line | {"time": time.time()})
        peaks.append(_peak())

    path = run("sft", run("prepare", None) / "data", follow)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    tokens = sum(line["tokens"] for line in lines[WARM_UP:])
    assert tokens == sum(len(ids) for ids in _rows(options)[WARM_UP * options.batch :]), "other rows"
    saved = max(file.stat().st_mtime for file in path.glob("checkpoints/step_*/policy/manifest.json"))
    ended = max(saved, lines[-1]["time"])
    return Measured(ended - lines[WARM_UP - 1]["time"], int(tokens), lines[-1]["loss"], peaks[-1])


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """Return the task, and beside it what the variant says."""
    policy = {"type": "sft", "mini_batch": options.mini_batch, "dataloader_shuffle": False, "dataset": {
        "name": f"{options.folder}/rows.jsonl"}}  # fmt: skip
    return {
        "policy": {"model_max_length": max(len(ids) for ids in _rows(options))}
        | ({} if options.variant in DEFAULTS else {"model_gradient_checkpointing": options.checkpointing}),
        "train": {
            "optm_lr": 1e-4, "optm_weight_decay": 0.0, "epsilon": 1e-8, "optm_warmup_steps": 0,
            "param_dtype": options.dtype, "train_batch_per_replica": options.batch, "train_policy": policy,
            "ckpt": {"enable_checkpoint": True, "save_freq": options.save_freq}, **OURS[options.variant],
        },
    }  # fmt: skip


def _trl(options: argparse.Namespace, before_model: Callable[[], None]) -> Measured:
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    rows = _rows(options)
    times: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each optimizer step, and of the training with what it saves."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Note that one step is done."""
            times.append(_now())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            """Note that all is done."""
            times.append(_now())

    before_model()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    said = {"max_length": max(len(ids) for ids in rows), **TRL[options.variant]}
    if options.variant not in DEFAULTS:
        said["gradient_checkpointing"] = options.checkpointing
    settings = SFTConfig(
        output_dir=f"{options.folder}/trl", per_device_train_batch_size=options.mini_batch,
        gradient_accumulation_steps=options.batch // options.mini_batch, max_steps=options.steps + WARM_UP,
        learning_rate=1e-4, weight_decay=0.0, adam_beta2=0.999, optim="adamw_torch_fused", lr_scheduler_type="constant",
        bf16=options.dtype == "bfloat16", use_cpu=not torch.cuda.is_available(), report_to=[],
        save_strategy="steps", save_steps=options.save_freq, logging_steps=1, disable_tqdm=True,
        shuffle_dataset=False, train_sampling_strategy="sequential", dataloader_pin_memory=False,
        **said,
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
    tokens = sum(counts[WARM_UP * passes : (WARM_UP + options.steps) * passes])
    return Measured(times[-1] - times[WARM_UP - 1], tokens, loss, _peak())


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


def _median(results: list[dict[str, float]], key: str) -> float:
    return statistics.median(result[key] for result in results)


def _ratios(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the default against the default, and packed rows against the best that TRL does."""
    speeds = {variant: _median(results, "tokens_per_second") for variant, results in found.items()}
    lines = []
    if all(name in speeds for name in DEFAULTS):
        lines.append(f"our default against TRL's default: {speeds[DEFAULTS[0]] / speeds[DEFAULTS[1]]:.2f} times")
    theirs = {name: speed for name, speed in speeds.items() if name in TRL}
    if theirs and "ours packed" in speeds:
        best = max(theirs, key=lambda name: theirs[name])
        lines.append(f"ours packed against TRL's best ({best}): {speeds['ours packed'] / theirs[best]:.2f} times")
    return lines


def _table(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> Table:
    weights = 6.0 * _size(options)
    default = _median(found["TRL default"], "tokens_per_second")
    rows = [len(ids) for ids in _rows(options)]
    title = (
        f"{_size(options) / 1e6:.1f}M weights, vocabulary {options.vocabulary:,}, {options.dtype}, rows of "
        f"{min(rows)} to {max(rows)} tokens (mean {statistics.mean(rows):.0f}), {options.batch} per step, "
        f"{options.mini_batch} per pass, {torch.get_num_threads()} threads, median of {options.rounds}"
    )
    table = Table("variant", title=title)
    for column in ("tokens/s", "of TRL's default", "matmul rate", "peak MiB", "last loss"):
        table.add_column(column, justify="right")
    for variant, results in found.items():
        speed = _median(results, "tokens_per_second")
        rate, peak = speed * weights / _median(results, "matmul"), _median(results, "peak") / 2**20
        table.add_row(
            variant, f"{speed:,.0f}", f"{speed / default:.2f}", f"{rate:.0%}", f"{peak:,.0f}",
            f"{_median(results, 'loss'):.3f}",
        )  # fmt: skip
    return table


def _size(options: argparse.Namespace) -> int:
    """Weights in matrices; the tied embedding counts once, for the head."""
    kv = max(1, options.hidden // 128) * 64
    layer = 2 * options.hidden * options.hidden + 2 * options.hidden * kv + 9 * options.hidden**2
    return options.layers * layer + options.vocabulary * options.hidden


if __name__ == "__main__":
    main()
