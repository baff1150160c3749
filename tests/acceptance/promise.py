"""What `cosmos check` says ok to, a run does: recipes, models and rows drawn at random, small, in one process.

Each case is a TOML file, a folder of a model and a file of rows. It is composed and checked as `cosmos check` does it;
where that says ok, its stages run to the first step and the export, and the batch and the export are looked at.
`python -m tests.acceptance promise`; a sample of it is in the suite.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import math
import random
import shutil
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.mesh import check_meshes, resolve_gpu_settings
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.data import quick_check
from cosmos_core.data.kinds.prompts import find_prompts
from cosmos_core.data.prepared import open_table
from cosmos_core.errors import CosmosError
from cosmos_core.launch.check import check_downstream_stages
from cosmos_core.registry import import_object
from cosmos_core.run.files import write_json
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import CHECKED_PROMPTS_FILE, Stage
from cosmos_core.train import check
from tasks.kinds import all_kinds
from tests.acceptance.page import Proof, table
from tests.effects.change import nested
from tests.unit.data_tokenizers import CHATML, LLAMA3, MISTRAL
from tests.unit.tiny_families import save_family
from tests.unit.tiny_model import save_tiny_model
from tests.warm import spawner

logger = logging.getLogger(__name__)

SEED, NUM_CASES = 20261126, 2_000
_FAMILIES = ("tiny", "untied", "llama3", "gemma2", "qwen3-moe", "mistral", "phi3")
_POLICY = "train.train_policy"
_OF_ANY: dict[str, list[Any]] = {
    "train.train_batch_per_replica": [1, 2, 3, 4, 8], f"{_POLICY}.mini_batch": [1, 2, 3, 4],
    "policy.model_max_length": [8, 24, 48, 96, 128, 500], "train.epoch": [1, 2, 3], "train.optm_lr": [1e-3, 0.0],
    "train.param_dtype": ["float32", "bfloat16"], "train.master_dtype": ["float32", "bfloat16"],
    "train.sequence_packing": [True, False], "train.optm_name": ["AdamW", "Adam", "Muon"],
    "train.optm_decay_type": ["linear", "cosine", "sqrt", "none"], "train.optm_warmup_steps": [0, 3, 0.5],
    "train.optm_grad_norm_clip": [0.0, 1.0], "train.ema_enable": [True], "train.deterministic": [True],
    "policy.model_gradient_checkpointing": [True, False], "train.activation_offload": [True],
    f"{_POLICY}.dataloader_shuffle": [False], f"{_POLICY}.dataset.test_size": [1, 2, 0.5, 30],
    f"{_POLICY}.dataset.max_skipped_fraction": [0.0, 0.5, 1.0], f"{_POLICY}.dataset.split": ["train", "train[:3]"],
    f"{_POLICY}.system_prompt": ["Be brief."], "validation.enable": [True, False], "validation.freq": [1, 2],
    "validation.max_rows": [1, 5], "validation.batch_size": [1, 3], "validation.val_before_train": [True],
    "train.ckpt.enable_checkpoint": [True], "train.ckpt.save_freq": [1], "train.ckpt.save_mode": ["sync", "async"],
    "train.ckpt.export_safetensors": [True, False], "train.seed": [0, 7], "policy.chat_template": ["chatml", "plain"],
    "policy.lora.r": [2, 4], "policy.enable_liger_kernel": [True], "logging.report_mfu": [True],
}  # fmt: skip
_OF_LORA: dict[str, list[Any]] = {
    "policy.lora.target_modules": [["q_proj"], "all-linear", ["gate_proj", "down_proj"], ["none"], ["lm_head"]],
    "policy.lora.use_rslora": [True], "policy.lora.modules_to_save": [["lm_head"], ["embed_tokens"], ["norm"]],
    "policy.lora.init_lora_weights": [True, "pissa", "gaussian", "olora"], "policy.lora.lora_dropout": [0.1],
}  # fmt: skip
_OF_SUPERVISED: dict[str, list[Any]] = {
    f"{_POLICY}.dataloader_drop_last": [True, False], f"{_POLICY}.enable_dp_load_balancing": [True],
    f"{_POLICY}.load_balanced_max_tokens_for_batch": [40, 200],
    f"{_POLICY}.conversation_column_name": ["messages", "talk", "prompt", "text"],
    f"{_POLICY}.prompt_column_name": ["prompt", "question"],
    f"{_POLICY}.response_column_name": ["completion", "answer"],
}  # fmt: skip
_OF: dict[str, dict[str, list[Any]]] = {
    "sft": _OF_SUPERVISED | {"validation.reward_function": ["exact_match"]},
    "dpo": _OF_SUPERVISED | {
        f"{_POLICY}.dpo.loss_type": ["ipo", ["sigmoid", "sft"], "simpo", "orpo"], f"{_POLICY}.dpo.beta": [0.5],
        f"{_POLICY}.dpo.reference_free": [True], f"{_POLICY}.dpo.label_smoothing": [0.1],
    },
    "kto": _OF_SUPERVISED | {
        f"{_POLICY}.kto.loss_type": ["apo_zero_unpaired"], f"{_POLICY}.label_column_name": ["label", "flag"],
    },
    "grpo": {
        "rollout.n_generation": [1, 2, 3, 4], "rollout.max_response_length": [4, 16, 600], "rollout.batch_size": [1, 2],
        f"{_POLICY}.kl_beta": [0.1], f"{_POLICY}.mu_iterations": [2], f"{_POLICY}.batch_size_per_optimize": [2, 3],
        f"{_POLICY}.temperature": [0.7], f"{_POLICY}.loss_type": ["seq-mean-token-mean", "token-sum"],
        f"{_POLICY}.variant": ["gspo", "cispo", "sapo", "dppo_tv"], f"{_POLICY}.entropy_coeff": [0.01],
        f"{_POLICY}.reward_function": ["exact_match", ["format", "single_choice"], {"gsm8k": 0.5}, "boxed_math"],
        f"{_POLICY}.prompt_column_name": ["prompt", "question"], f"{_POLICY}.response_column_name": ["answer"],
        f"{_POLICY}.max_token_len_per_mini_batch": [64, 300], f"{_POLICY}.mask_truncated_completions": [True],
        "rollout.sampling_config.top_k": [5], "rollout.sampling_config.temperature": [0.6],
        f"{_POLICY}.on_policy": [True],
    },
}  # fmt: skip
_BASE = {
    "train.compile": False, "train.max_num_steps": 1, "policy.model_name_or_path": "model", "rollout.backend": "hf",
    "train.train_batch_per_replica": 2, f"{_POLICY}.mini_batch": 1, "policy.model_max_length": 96,
    "train.optm_warmup_steps": 0, f"{_POLICY}.dataset.name": "rows.jsonl", "logging.logger": ["console"],
    "rollout.max_response_length": 4, "rollout.n_generation": 2,
}  # fmt: skip

_EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("generation_config.json", {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "min_length": 2}),
    "no pad": ("tokenizer_config.json", {"pad_token": None}), "dtype": ("config.json", {"dtype": "float16"}),
    "no end": ("tokenizer_config.json", {"eos_token": None}), "small": ("config.json", {"vocab_size": 200}),
}  # fmt: skip


@dataclass
class Promises:
    """How cases ended."""

    num_kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """Return how many cases there were, were kept, were refused and are broken."""
        counts = [self.num_kept, sum(self.refused.values()), len(self.broken)]
        return [sum(counts), *counts]


def promises(folder: Path, count: int, seed: int = SEED, first: int = 0) -> Promises:
    """Draw cases and see how each ends; case `n` of a seed is the same whatever `first` and `count` are. What is left
    of a broken one stays in its folder."""
    found = Promises()
    torch.set_num_threads(1)
    spawner.install()
    for number in range(first, first + count):
        place = folder / f"case {number}"
        draw = random.Random(f"{seed} {number}")
        settings = _draw_case(folder, place, draw)
        try:
            with _quiet():
                problem = _kept(place, settings)
        except CosmosError as error:
            found.refused[" ".join(str(error).rpartition(": ")[2].split()[:6])] += 1
        except Exception:  # noqa: BLE001 - a traceback is what no user should see
            found.broken.append(f"case {number}: the check itself: {traceback.format_exc(limit=-4)}\n{settings}")
        else:
            if problem:
                found.broken.append(f"case {number}: {problem}\n{settings}")
                continue
            found.num_kept += 1
        shutil.rmtree(place)
    return found


def _kept(place: Path, settings: dict[str, Any]) -> str:
    """Return what went wrong in a run that the check let pass; nothing: it ended, as it was meant.

    Raises:
        CosmosError: the check refused it.
    """
    pipeline = resolve_gpu_settings(load_pipeline(place / "recipe.toml", [], all_kinds()))
    unique_notices(pipeline)
    check_capabilities(pipeline)
    check_meshes(pipeline)
    check_inputs(pipeline)
    _check(pipeline, place)
    try:
        return _run(pipeline, place, settings)
    except Exception:  # noqa: BLE001 - whatever it is, the check should have told it
        return traceback.format_exc(limit=-6)


def _check(pipeline: Pipeline, place: Path) -> None:
    """Look at rows and stages, as `launch.check.check_stages_in_worker` does in workers."""
    prompts: Any = None
    for stage in pipeline.stages:
        kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
        if not kind.reads_model:
            continue
        at = _stage(pipeline, stage, place / "check" / stage.name, recipe.policy.model_name_or_path, None)
        if prompts:
            write_json(at.path / CHECKED_PROMPTS_FILE, prompts)
        if kind.makes == "data":
            quick_check.run(at)
        info = check.run(at).info
        prompts = info.get("prompts", prompts)
        check_downstream_stages(pipeline, stage.name, info)


def _run(pipeline: Pipeline, place: Path, settings: dict[str, Any]) -> str:
    done: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
        source, data = referenced_stage(stage.model), referenced_stage(stage.data)
        model = done[source]["model"] if source else recipe.policy.model_name_or_path
        at = _stage(
            pipeline, stage, place / "run" / stage.name, model, Path(done[data]["path"]) / "data" if data else None
        )
        at.inputs = {name: done[name] for name in stage.after}
        outcome = import_object(kind.entry)(at)
        made = outcome.info.get("model")
        done[stage.name] = {
            "path": str(at.path), "model": str(at.path / made) if made else model, "kind": stage.kind,
            "info": outcome.info, "metrics": outcome.metrics, "outputs": [], "inputs": {}, "fingerprint": "f" * 64,
            "digest": "d" * 64,
        }  # fmt: skip
        if kind.makes == "data" and (problem := _rows_problem(at, settings)):
            return problem
        if kind.trains_model and (problem := _step_problem(at, recipe)):
            return problem
    made = [done[stage.name] for stage in pipeline.stages]
    last = [each["model"] for each in made if each["info"].get("model")][-1]
    return _export_problem(Path(last))


def _stage(pipeline: Pipeline, stage: StageConfig, path: Path, model: str, data: Path | None) -> Stage:
    path.mkdir(parents=True)
    return Stage(path, stage, pipeline.recipes[stage.name], model, data, {}, "f" * 64, pipeline.stage_kind(stage))


def _rows_problem(at: Stage, settings: dict[str, Any]) -> str:
    """Compare what is learned of each row with what the row says is the assistant's: its words begin with `a`, those of
    others with `u`, and each has the number of its row."""
    tokenizer = AutoTokenizer.from_pretrained(at.model)
    if (prompts := find_prompts(at.path / "data", "train")) is not None:
        return next((f"prompt has an answer in it: {each.text!r}" for each in prompts if "a0" in each.text), "")
    table_ = open_table(at.path / "data", "train")
    for row in table_.to_pylist():
        for side in [name[: -len("_ids")] for name in row if name.endswith("_ids")]:
            ids, mask = row[f"{side}_ids"], row["loss_mask" if side == "input" else f"{side}_mask"]
            learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
            is_cut = len(ids) >= at.recipe.policy.model_max_length
            if "u0" in learned and not settings["is_plain"]:
                return f"{row['place']}: a prompt is learned: {learned!r}"
            if "a0" not in learned and "a0" in tokenizer.decode(ids) and not is_cut:
                return f"{row['place']}: the response is not learned: {learned!r}"
    return ""


def _step_problem(at: Stage, recipe: Any) -> str:
    lines = [line for line in read_metrics(at.path / "metrics.jsonl") if line["step"] > 0]
    if [line["step"] for line in lines] != [1]:
        return f"{len(lines)} steps in place of 1"
    bad = [name for name, value in lines[0].items() if isinstance(value, float) and not math.isfinite(value)]
    is_masked = getattr(recipe.train.train_policy, "mask_truncated_completions", False)  # all may be, with a warning
    if bad or ("loss" not in lines[0] and not (is_masked and lines[0]["completion/truncated"] == 1.0)):
        return f"step 1 has no finite {bad or 'loss'}"
    if recipe.validation.enable and not any(name.startswith("validation/") for name in lines[0]):
        return "nothing was measured at the last step"
    return ""


def _export_problem(folder: Path) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    logits = model(**tokenizer("a0 b", return_tensors="pt")).logits
    weights = [tensor for file in folder.glob("*.safetensors") for tensor in load_file(file).values()]
    return "" if weights and logits.isfinite().all() else "the export gives no finite logits"


def _draw_case(folder: Path, place: Path, draw: random.Random) -> dict[str, Any]:
    """Write recipe, model and rows; return the settings, and `is_plain` where rows are learned whole."""
    place.mkdir(parents=True)
    name = draw.choice(["sft", "sft", "dpo", "kto", "grpo"])
    settings = {**_BASE, f"{_POLICY}.type": "grpo" if name == "grpo" else "sft"}
    if name in {"dpo", "kto"}:
        settings[f"{_POLICY}.trainer_type"] = name
    if name == "grpo":
        settings |= {f"{_POLICY}.reward_function": "exact_match", "train.train_batch_per_replica": 4}
    else:
        settings = {key: value for key, value in settings.items() if not key.startswith("rollout.")}
    known = _OF_ANY | _OF[name]
    for key in draw.sample(sorted(known), draw.choice([0, 1, 2, 3, 5, 8])):
        settings[key] = draw.choice(known[key])
    if "policy.lora.r" in settings:
        for key in draw.sample(sorted(_OF_LORA), draw.choice([0, 1, 2])):
            settings[key] = draw.choice(_OF_LORA[key])
    for one, other, column in (("prompt", "response", "completion"), ("response", "prompt", "prompt")):
        if name == "sft" and f"{_POLICY}.{one}_column_name" in settings and draw.random() < 0.5:  # half name both
            settings.setdefault(f"{_POLICY}.{other}_column_name", column)
    settings[f"{_POLICY}.dataset.name"], form = _write_rows(place, name, draw)
    is_plain = form == "text" or (form == "columns" and settings.get(f"{_POLICY}.conversation_column_name") == "prompt")
    has_template = _write_model(folder, place / "model", draw)
    (place / "recipe.toml").write_text(tomli_w.dumps(nested(settings)))
    return {**settings, "is_plain": is_plain or not has_template}


def _write_model(folder: Path, model: Path, draw: random.Random) -> bool:
    """Copy a model, with one of the oddities that public ones have; return whether it has a chat template."""
    family = draw.choice(_FAMILIES)
    saved = folder / "models" / family
    if not saved.exists():
        with _quiet():
            is_tiny = family in {"tiny", "untied"}
            save_tiny_model(saved, tied=family == "tiny") if is_tiny else save_family(family, saved)
    shutil.copytree(saved, model)
    template = draw.choice([CHATML, CHATML, CHATML, LLAMA3, MISTRAL, None])
    if template:
        (model / "chat_template.jinja").write_text(template)
    oddity = draw.choice(["", "", "sampling", "no pad", "no generation", "dtype", "extra", "no end", "small", "tokens"])
    if oddity in _EDITS:
        _edit(model / _EDITS[oddity][0], **_EDITS[oddity][1])
    elif oddity == "no generation":
        (model / "generation_config.json").unlink(missing_ok=True)
    elif oddity == "extra":
        (model / "notes.txt").write_text("x")
    elif oddity == "tokens":
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens([f"<{i}>" for i in range(8)])
        tokenizer.save_pretrained(model)
    return template is not None


def _edit(file: Path, **values: Any) -> None:
    table_ = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({name: v for name, v in {**table_, **values}.items() if v is not None}))


def _write_rows(place: Path, name: str, draw: random.Random) -> tuple[str, str]:
    """Write rows that the algorithm reads, some of them odd; the name of the file, and their form."""
    form = draw.choice(["turns", "turns", "columns", "talk", "text"] if name == "sft" else ["turns", "columns"])
    rows = [_row(name, form, i, draw) for i in range(draw.choice([1, 2, 3, 5, 8, 12]))]
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        row = rows[draw.randrange(len(rows))]
        key = draw.choice(sorted(row))
        row[key] = draw.choice([None, "", [], 7, "x " * 200, [{"role": "user", "content": "x"}], {"a": 1}, "\ud800"])
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    suffix = draw.choice(["jsonl", "jsonl", "json", "jsonl.gz", "csv"])
    file = place / f"rows.{suffix}"
    if suffix == "jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif suffix == "csv":
        quoted = [[json.dumps(v) if isinstance(v, list | dict) else str(v) for v in row.values()] for row in rows]
        text = "\n".join(",".join('"' + v.replace('"', '""') + '"' for v in row) for row in [list(rows[0]), *quoted])
        file.write_text(text, encoding="utf-8", errors="replace")
    else:
        file.write_text(json.dumps(rows) if suffix == "json" else lines)
    return file.name, form


def _row(name: str, form: str, i: int, draw: random.Random) -> dict[str, Any]:
    asked, said = f"u0 {i} {'u ' * draw.randrange(6)}", f"a0 {i} {'a ' * draw.randrange(6)}".strip()
    turns: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    if draw.random() < 0.2:
        turns.insert(0, {"role": "system", "content": "u0 s"})
    response: Any = said if form == "columns" else [{"role": "assistant", "content": said}]
    prompt: Any = asked if form == "columns" else turns
    if name == "grpo":
        return {"prompt": prompt, "answer": said}
    if name == "dpo":
        worse = f"a0 worse {i}"
        other = worse if form == "columns" else [{"role": "assistant", "content": worse}]
        return {"prompt": prompt, "chosen": response, "rejected": other}
    label = {"label": draw.choice([True, False, 1, 0])} if name == "kto" else {}
    if form == "text":
        return {"text": f"{asked} {said}"}
    if form == "columns":
        return {"prompt": asked, "completion": said} | label
    return {"talk" if form == "talk" else "messages": [*turns, *response]} | label


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the warnings that libraries have for each of them."""
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def prove(folder: Path, count: int = NUM_CASES, seed: int = SEED) -> Proof:
    """Return what two thousand cases show."""
    began = time.monotonic()
    found = promises(folder, count, seed)
    for broken in found.broken:
        logger.error("%s", broken)
    return Proof(
        title="What the check lets pass, runs",
        is_met=not found.broken and found.num_kept >= count // 4,
        claim=(
            f"Recipes of SFT, DPO, KTO and GRPO with random keys, models of {len(_FAMILIES)} kinds with oddities of "
            f"public ones, and rows of which some are broken (seed {seed}): where what `cosmos check` runs says ok, "
            f"the first step is reached with finite figures, prompts are masked and responses learned, and the export "
            f"loads in transformers."
        ),
        commands=["python -m tests.acceptance promise"],
        body=table(["cases", "ran to the export", "refused by the check", "broken"], [found.counts]),
        seconds=time.monotonic() - began,
    )
