"""GRPO here and in TRL's `GRPOTrainer`: the same model, prompts, group size, lengths, dtype, optimizer and reward.

    python -m benchmarks.grpo [--shape short|ragged] [--steps 12] [--rounds 2]

`short`: 64 completions per step, nearly all of 64 tokens. `ragged`: at most 512 tokens, most of them ending before 100.
Each variant runs in a process of its own, one after the other, round after round, so that a slow minute of the machine
falls on all of them; the first steps are not counted. `asynchronous` has one engine in a process of its own, which
gets weights every third step, and prompts of three steps at once with them; they may be four steps old, which is the
default of `allowed_outdated_steps`. `hf` is our other engine, on transformers, as TRL generates here (vLLM is an option
of its GPUs). Our recipe is the default one, which compiles nothing on a CPU.

The limit is what this machine could do if nothing else took time: the training's floating-point operations at the rate
of a large matrix product, and generation at the rate that our engine alone reaches in this run.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

VARIANTS = ("ours asynchronous", "ours asynchronous, hf", "ours colocated", "ours colocated, hf", "TRL default")
WARM_UP = 3
GROUP, PROMPTS = 8, 8
"""Completions of a prompt, and prompts of a step."""
SHAPES = {"short": (2048, 64), "ragged": (64, 512)}
"""Words that the model draws from about evenly, one of which ends a completion; and the longest completion."""
PARTS = ("time/generate", "time/score", "time/wait", "time/train", "time/sync")


def variety(completion: str, reference: str) -> float:
    """Return the share of different words: a reward that differs inside a group and costs nothing."""
    words = completion.split()
    return len(set(words)) / max(1, len(words))


def main() -> None:
    """Run all variants and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="short")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        found = _trl(options) if options.variant.startswith("TRL") else _ours(options)
        print(json.dumps(found))  # noqa: T201 - read by the parent
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        num_params = _prepare(options)
        measured: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for variant in VARIANTS:
                if (result := _spawn(options, variant)) is not None:
                    measured.setdefault(variant, []).append(result)
        _show(options, measured, num_params)


def _prepare(options: argparse.Namespace) -> int:
    """Make model, tokenizer and prompts, once for all; return the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    count, _ = SHAPES[options.shape]
    words = ["<eos>", "<pad>", *(f"w{i}" for i in range(count - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(options.folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=count, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, head_dim=64,
        num_key_value_heads=max(1, options.hidden // 128), tie_word_embeddings=False, eos_token_id=0, pad_token_id=1,
        bos_token_id=None, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(options.folder)
    draw = torch.Generator().manual_seed(1)
    prompts = [
        " ".join(words[i] for i in torch.randint(2, count, (16,), generator=draw).tolist())
        for _ in range(PROMPTS * (options.steps + WARM_UP))
    ]
    rows = [json.dumps({"prompt": prompt, "answer": "none"}) for prompt in prompts]
    (Path(options.folder) / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def _spawn(options: argparse.Namespace, variant: str) -> dict[str, float] | None:
    arguments = [f"--{name}={value}" for name, value in vars(options).items() if name != "variant"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.grpo", *arguments, f"--variant={variant}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(f"{variant}: does not run here: {done.stderr.strip().splitlines()[-1]}\n")
        return None
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _ours(options: argparse.Namespace) -> dict[str, float]:
    """Run the programs of the stages `prepare` and `rl`."""
    from cosmos_core.config.schema.pipeline import StageConfig
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.data import prepare
    from cosmos_core.run.progress import read_metrics
    from cosmos_core.run.stage import Stage, load_stage
    from cosmos_core.worker import program as worker
    from tasks.kinds import all_kinds

    _, longest = SHAPES[options.shape]
    is_apart = options.variant.startswith("ours asynchronous")
    recipe = Recipe.model_validate(
        {
            "mode": "disaggregated" if is_apart else "colocated",
            "policy": {"model_max_length": longest + 32, "model_gradient_checkpointing": False},
            "train": {
                "param_dtype": "float32", "optm_lr": 1e-5, "optm_weight_decay": 0.0, "epoch": 1,
                "sync_weight_interval": 3 if is_apart else 1, "optm_warmup_steps": 0,
                "train_batch_per_replica": GROUP * PROMPTS,
                "max_num_steps": options.steps + WARM_UP,
                "train_policy": {
                    "type": "grpo", "mini_batch": 16, "reward_function": f"{__file__}:variety",
                    "allowed_outdated_steps": 4 if is_apart else 0, "dataset": {"name": f"{options.folder}/rows.jsonl"},
                },
                "ckpt": {"enable_checkpoint": False},
            },
            "rollout": {
                "backend": "hf" if options.variant.endswith("hf") else "vllm",
                "n_generation": GROUP, "batch_size": 3 * PROMPTS, "max_response_length": longest,
            },
        }
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(dir=options.folder))

    def stage(kind: str, data: Path | None) -> Stage:
        (folder / kind).mkdir()
        config = StageConfig(name=kind, kind=kind)
        return Stage(folder / kind, config, recipe, options.folder, data, {}, "f" * 64, kind=all_kinds()[kind])

    rows = stage("prepare", None)
    prepare.run(rows)
    training = stage("rl", rows.path / "data")
    training.save()
    worker.run_program(load_stage(training.path))
    lines = list(read_metrics(training.path / "metrics.jsonl"))
    counted = lines[WARM_UP:]
    means = {name: statistics.mean(line.get(name, 0.0) for line in counted) for name in PARTS}
    seconds = lines[-1]["time"] - lines[WARM_UP - 1]["time"]
    lengths = statistics.mean(line["completion/length_mean"] for line in counted)
    return {"completions_per_second": GROUP * PROMPTS * len(counted) / seconds, "length": lengths, **means}


def _trl(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    _, longest = SHAPES[options.shape]
    times: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Note that one step is done."""
            times.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        lengths.append(statistics.mean(len(completion.split()) for completion in completions))
        return [variety(completion, "") for completion in completions]

    settings = GRPOConfig(
        output_dir=f"{options.folder}/trl", per_device_train_batch_size=16, gradient_accumulation_steps=4,
        num_generations=GROUP, max_completion_length=longest, max_steps=options.steps + WARM_UP, learning_rate=1e-5,
        weight_decay=0.0, lr_scheduler_type="constant", beta=0.0, temperature=1.0, optim="adamw_torch_fused",
        adam_beta2=0.999, bf16=False, use_cpu=not torch.cuda.is_available(), gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, shuffle_dataset=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32),
        reward_funcs=reward,  # type: ignore[arg-type]
        args=settings, callbacks=[Clock()],
        train_dataset=load_dataset("json", data_files=f"{options.folder}/rows.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.folder),
    )  # fmt: skip
    trainer.train()
    seconds = times[-1] - times[WARM_UP - 1]
    return {
        "completions_per_second": GROUP * PROMPTS * options.steps / seconds,
        "length": statistics.mean(lengths[WARM_UP:]),
    }


def _matmul(size: int = 2048) -> float:
    """Return floating-point operations per second of a matrix product."""
    import torch

    left = torch.randn(size, size)
    left @ left
    began, repeats = time.perf_counter(), 5
    for _ in range(repeats):
        left @ left
    return repeats * 2 * size**3 / (time.perf_counter() - began)


def _show(options: argparse.Namespace, measured: dict[str, list[dict[str, float]]], num_params: int) -> None:
    rates = {name: [each["completions_per_second"] for each in found] for name, found in measured.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    console = Console(width=None if sys.stdout.isatty() else 140)
    trl = medians.get("TRL default")
    for name, rate in medians.items():
        if trl and name != "TRL default":
            console.print(f"{name}: {rate / trl:.2f} times TRL default")
    if {"ours colocated", "ours asynchronous"} <= set(medians):
        console.print(f"asynchronous: {medians['ours asynchronous'] / medians['ours colocated']:.2f} times colocated")
    own = measured.get("ours colocated", [])
    limit = None
    if own:
        length = statistics.mean(each["length"] for each in own)
        training = 6 * num_params * (length + 16) / _matmul()
        generation = statistics.median(each["time/generate"] for each in own) / (GROUP * PROMPTS)
        limit = 1 / (training + generation)
    table = Table(
        "variant", "completions/s", "all rounds", "tokens", *(p.removeprefix("time/") for p in PARTS), "of limit"
    )
    for name, found in measured.items():
        parts = [f"{statistics.median(each.get(part, 0.0) for each in found):.2f}" for part in PARTS]
        table.add_row(
            name, f"{medians[name]:.1f}", " ".join(f"{rate:.1f}" for rate in rates[name]),
            f"{statistics.mean(each['length'] for each in found):.0f}",
            *(parts if name.startswith("ours") else ["" for _ in PARTS]),
            f"{medians[name] / limit:.0%}" if limit else "",
        )  # fmt: skip
    console.print(table)
    if limit:
        console.print(f"limit: {limit:.1f} completions/s, taking turns; seconds are per step")


if __name__ == "__main__":
    main()
