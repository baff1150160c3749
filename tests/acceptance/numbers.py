"""Same numbers: short trainings of every kind through `cosmos run`, compared with what an earlier commit gave.

    python -m tests.acceptance.numbers --compare tests/acceptance/numbers.json [--tree CHECKOUT] [RUN ...]
    python -m tests.acceptance.numbers --record tests/acceptance/numbers.json [--tree CHECKOUT] [RUN ...]

Recorded are the sha256 of every exported file and every metric but times and throughputs, with the commit and the
versions of the libraries: other versions or another processor may round differently, and then a record of the earlier
commit has to be made there first. With `--tensors FOLDER` the exports themselves are kept too, and a comparison says
how far each is off. `--tree` is the checkout whose `cosmos_core` is run; this file needs nothing of it but the command,
its TOML and the run directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

Json = dict[str, Any]
TREE = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "numpy")
TIMED = ("time", "throughput", "memory")
"""Metrics whose name begins with one of these are a clock's."""
SMALL = 1e-4
"""Metrics nearer to zero than this are compared as if they were this large."""
STEPS = 6

PIPELINE = f"""
[pipeline]
name = "numbers"
threads = 1

[policy]
model_name_or_path = "model"
model_max_length = 96
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
seed = 7
epoch = 100
max_num_steps = {STEPS}
train_batch_per_replica = 12
sequence_packing = false
optm_lr = 1e-3
optm_warmup_steps = 2
ckpt = {{ enable_checkpoint = true, save_freq = 3 }}
"""
STAGE = """
[[pipeline.stages]]
name = "{name}"
kind = "{kind}"
retries = 0
after = {after}
{lines}"""
SFT = """overrides.train.train_policy = { type = "sft", dataloader_seed = 0, mini_batch = 3, \
conversation_column_name = "messages", \
dataset = { name = "chat.jsonl", test_size = 6 } }
"""
DPO = """overrides.train.train_policy = { type = "sft", trainer_type = "dpo", dataloader_seed = 0, \
mini_batch = 2, dpo.beta = 0.05, \
dataset = { name = "pairs.jsonl", test_size = 6 } }
"""
GRPO = """overrides.rollout = { backend = "BACKEND", n_generation = 4, batch_size = 4, max_response_length = 12 }
[pipeline.stages.overrides.train.train_policy]
type = "grpo"
dataloader_seed = 0
dataset.name = "prompts.jsonl"
reward_function = "reward.py:variety"
mini_batch = 4
"""
SEVERAL_UPDATES = "kl_beta = 0.05\nepsilon_high = 0.28\nbatch_size_per_optimize = 8\nmu_iterations = 2\n"
GRPO_BATCH = "overrides.train.train_batch_per_replica = 16\n"
ROWS = {"sft": SFT, "dpo": DPO, "rl": GRPO.replace("BACKEND", "hf")}
"""What `prepare` is told for each kind of rows; a stage `rows-KIND` makes them."""


def _grpo(backend: str, lines: str = "", policy: str = "") -> tuple[str, str]:
    return "rl", GRPO_BATCH + lines + GRPO.replace("BACKEND", backend) + policy


RUNS: dict[str, tuple[str, str]] = {
    "sft-fp32": ("sft", SFT + "overrides.validation = { enable = true, freq = 3 }\n"),
    "sft-bf16": ("sft", SFT + 'overrides.train.param_dtype = "bfloat16"\n'),
    "sft-packed": ("sft", SFT + "overrides.train.sequence_packing = true\n"),
    "lora-ema": (
        "sft",
        SFT + 'overrides.policy.lora = { r = 4, lora_alpha = 8, target_modules = ["q_proj", "v_proj", "up_proj"] }\n'
        "overrides.train.ema_enable = true\n",
    ),
    "dpo": ("dpo", DPO + "overrides.validation = { enable = true, freq = 3 }\n"),
    "grpo-vllm": _grpo("vllm"),
    "grpo-updates": _grpo("hf", "overrides.train.ema_enable = true\n", SEVERAL_UPDATES),
    "sft-dp2": ("sft", SFT + "overrides.policy.parallelism.dp_shard_size = 2\n"),
    "sft-tp2": ("sft", SFT + "overrides.policy.parallelism.tp_size = 2\n"),
    "sft-pp2": ("sft", SFT + "overrides.policy.parallelism.pp_size = 2\n"),
    "grpo-dp2": _grpo("hf", "overrides.policy.parallelism.dp_shard_size = 2\n", SEVERAL_UPDATES),
}
"""Each run's row kind and the lines of its stage."""
KINDS = {"sft": "sft", "dpo": "sft", "rl": "rl"}

REWARD = '''"""More for more different characters."""


def variety(completion: str, reference: str) -> float:
    """Return the number of different characters by five."""
    return len(set(completion)) / 5
'''
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> int:
    """Record or compare; exit code 1 when a run is not equal to the bit."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.numbers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("runs", nargs="*", help=f"any of: {', '.join(RUNS)}; none: all")
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--record", type=Path, metavar="FILE", help="write the numbers; runs that it has are replaced")
    todo.add_argument("--compare", type=Path, metavar="FILE", help="print how far the numbers are from the recorded")
    parser.add_argument("--tree", type=Path, default=TREE, help="checkout to run; default: this one")
    parser.add_argument("--tensors", type=Path, help="folder of the recorded exports")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept afterwards; none: a temporary one")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if unknown := sorted(set(options.runs) - set(RUNS)):
        parser.error(f"no run {', '.join(unknown)}; there are: {', '.join(RUNS)}")
    with tempfile.TemporaryDirectory(prefix="numbers-") as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        write_inputs(work)
        if options.record:
            return record(options, work)
        return compare(options, work)


def record(options: argparse.Namespace, work: Path) -> int:
    """Write what each run gave; its exports too where `--tensors` says so."""
    file: Path = options.record
    kept = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else {}
    failed = 0
    for name, stage, seconds in finished_runs(options, work):
        if stage is None:
            failed += 1
            continue
        kept[name] = numbers(stage)
        if options.tensors:
            shutil.rmtree(options.tensors / name, ignore_errors=True)
            for path in exports(stage):
                copy = options.tensors / name / path.relative_to(stage)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        logger.info("%s: recorded (%.0f s)", name, seconds)
    runs = {name: kept[name] for name in RUNS if name in kept}
    content = {"commit": _commit(options.tree), "machine": machine(work), "runs": runs}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


def compare(options: argparse.Namespace, work: Path) -> int:
    """Print one line per run, and lines below it for what differs."""
    recorded = json.loads(options.compare.read_text(encoding="utf-8"))
    here = machine(work)
    for key, value in recorded["machine"].items():
        if here[key] != value:
            logger.info("recorded with %s = %s, here %s: bits may differ for this alone", key, value, here[key])
    logger.info("against commit %s", recorded["commit"])
    unequal = 0
    for name, stage, seconds in finished_runs(options, work, known=recorded["runs"]):
        if stage is None:
            unequal += 1
            continue
        lines = differences(numbers(stage), recorded["runs"][name], stage, options.tensors and options.tensors / name)
        logger.info("%s: %s (%.0f s)", name, "DIFFERS" if lines else "equal to the bit", seconds)
        for line in lines:
            logger.info("    %s", line)
        unequal += bool(lines)
    logger.info("runs that are not equal to the bit: %d", unequal)
    return int(unequal > 0)


def write_inputs(work: Path) -> None:
    """Write the model, its tokenizer, rows of each kind and the reward: the same bytes everywhere."""
    names = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)}, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=TEMPLATE,
    )  # fmt: skip
    config = Qwen3Config(
        vocab_size=len(names) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.15, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # A tenth of the vocabulary ends a completion, so that lengths differ.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(60, 85)]
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    chat, pairs, prompts = [], [], []
    for i in range(70):
        question, answer = f"{i} times {i % 7}?", f"That is {i * (i % 7)}" + "." * (i % 5)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}] if i % 3 == 0 else []
        chat.append({"messages": turns + more})
        pairs.append({"prompt": question, "chosen": answer, "rejected": "no idea" + "!" * (i % 4)})
        prompts.append({"prompt": question, "answer": answer})
    for name, rows in (("chat", chat), ("pairs", pairs), ("prompts", prompts)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (work / "reward.py").write_text(REWARD, encoding="utf-8")


def finished_runs(
    options: argparse.Namespace, work: Path, known: Mapping[str, Json] | None = None
) -> Iterator[tuple[str, Path | None, float]]:
    """Yield each run's name, its stage directory and its seconds; None for a run that failed, which is told.

    All runs are stages of one pipeline, one after the other; behind one that fails the rest is run again without it.
    """
    left = [name for name in options.runs or RUNS if known is None or name in known]
    while left:
        (work / "numbers.toml").write_text(pipeline(left), encoding="utf-8")
        output = _run(options.tree.absolute(), work)
        stages = max((work / "outputs").glob("2*"), default=work) / "stages"
        while left and (stages / left[0] / "result.json").is_file():
            name = left.pop(0)
            yield name, stages / name, _seconds(stages / name)
        if left:
            name = left.pop(0)
            logger.info("%s: FAILED: %s", name, _reason(stages, name, output))
            yield name, None, 0.0


def pipeline(names: Sequence[str]) -> str:
    """Return the TOML of these runs, chained so that only one is running at any time."""
    kinds = [kind for kind in ROWS if any(RUNS[name][0] == kind for name in names)]
    stages = [
        STAGE.format(name=f"rows-{kind}", kind="prepare", after=f'["rows-{kinds[i - 1]}"]' if i else "[]",
                     lines=ROWS[kind])
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    before = f"rows-{kinds[-1]}"
    for name in names:
        rows, lines = RUNS[name]
        after = json.dumps(sorted({before, f"rows-{rows}"}))
        lines = f'data = "stage:rows-{rows}"\n{lines}'
        stages.append(STAGE.format(name=name, kind=KINDS[rows], after=after, lines=lines))
        before = name
    return PIPELINE + "".join(stages)


def numbers(stage: Path) -> Json:
    """Return the digests of a run's exports and its metrics."""
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "exports": {str(path.relative_to(stage)): _sha256(path) for path in exports(stage)},
        "metrics": [
            {_metric_name(k): v for k, v in line.items() if k.partition("/")[0] not in TIMED} for line in lines
        ],
    }


def _metric_name(name: str) -> str:
    """Return a metric's name without the folder that the reward lies in."""
    return "reward/variety" if name.startswith("reward/") and name.endswith("variety") else name


def exports(stage: Path) -> list[Path]:
    """Return the exported weights of a run."""
    return sorted(stage.glob("safetensors/**/*.safetensors"))


def differences(found: Json, expected: Json, stage: Path, tensors: Path | None) -> list[str]:
    """Return what differs, in words; empty: nothing does."""
    lines = []
    if missing := sorted(expected["exports"].keys() - found["exports"].keys()):
        lines.append(f"exports missing: {', '.join(missing)}; there are: {', '.join(found['exports'])}")
    for path, digest in expected["exports"].items():
        if found["exports"].get(path, digest) != digest:
            lines.append(f"{path}: {_tensor_difference(stage / path, tensors and tensors / path)}")
    if len(found["metrics"]) != len(expected["metrics"]):
        lines.append(f"{len(found['metrics'])} lines of metrics, {len(expected['metrics'])} were recorded")
    return lines + _metric_differences(found["metrics"], expected["metrics"])


def _metric_differences(found: Sequence[Json], expected: Sequence[Json]) -> list[str]:
    """Return the three metrics that are farthest off, and names that came or went."""
    names, before = ({name for line in lines for name in line} for lines in (found, expected))
    lines = [f"metrics {what}: {', '.join(sorted(which))}" for what, which in
             (("gone", before - names), ("new", names - before)) if which]  # fmt: skip
    worst: dict[str, tuple[float, str]] = {}
    for one, other in zip(found, expected, strict=False):
        for name in one.keys() & other.keys():
            value, old = one[name], other[name]
            if value != old and not (value != value and old != old):
                relative = abs(value - old) / max(abs(old), SMALL)
                relative = relative if math.isfinite(relative) else math.inf
                text = f"{name}: {relative:.1e} of it (step {other.get('step')}: {value!r}, was {old!r})"
                worst[name] = max(worst.get(name, (0.0, "")), (relative, text))
    ordered = sorted(worst.values(), reverse=True)
    lines += [text for _, text in ordered[:3]]
    if len(ordered) > 3:
        lines.append(f"... and {len(ordered) - 3} more metrics, each less")
    return lines


def _tensor_difference(path: Path, recorded: Path | None) -> str:
    """Say which tensor is farthest off, as a share of its largest value."""
    if recorded is None or not recorded.is_file():
        return "other bytes (the recorded tensors are not at hand)"
    worst = (0.0, "no tensor differs")
    with safe_open(path, "pt") as new, safe_open(recorded, "pt") as old:
        if set(new.keys()) != set(old.keys()):
            return f"other tensors: {', '.join(sorted(set(new.keys()) ^ set(old.keys())))}"
        for name in old.keys():  # noqa: SIM118 - not a mapping
            one, other = new.get_tensor(name), old.get_tensor(name)
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                return f"{name} is {one.dtype} {tuple(one.shape)}, was {other.dtype} {tuple(other.shape)}"
            off = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
            worst = max(worst, (off.item(), f"{name}: {off.item():.1e} of its largest value"))
    return worst[1]


def machine(work: Path) -> Json:
    """Return what decides bits beside the code."""
    libraries = {name: version(name) for name in LIBRARIES}
    model = _sha256(work / "model" / "model.safetensors")
    return {"processor": _processor(), "python": platform.python_version(), **libraries, "model": model}


def _run(tree: Path, work: Path) -> str:
    """Run the pipeline with the code of a tree; what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    done = subprocess.run(
        [sys.executable, "-m", "cosmos_core", "run", "numbers.toml"],
        cwd=work, env=kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.stdout


def _reason(stages: Path, name: str, output: str) -> str:
    """Return why a run failed: its one line, else the end of what the command printed."""
    for stage in (name, *(f"rows-{kind}" for kind in ROWS)):
        error = stages / stage / "error.json"
        if error.is_file():
            return f"{stage}: {json.loads(error.read_text(encoding='utf-8'))['message']}"
    return "\n    ".join(["the command printed:", *output.splitlines()[-15:]])


def _seconds(stage: Path) -> float:
    """Return the time between the writing of a stage's settings and of its result."""
    return (stage / "result.json").stat().st_mtime - (stage / "stage.toml").stat().st_mtime


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _commit(tree: Path) -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
