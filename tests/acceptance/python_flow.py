"""A flow in Python of a real model, killed five times and continued: the same bits as if nothing had happened."""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import time
from pathlib import Path

from cosmos_core.run.files import read_json, sha256
from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

NUM_KILLS = 5
SEED = 20261127
_COMMAND = ("run", "expert.py:expert_iteration", "--run-id", "expert")
_FLOW = """
from prefect import flow
from tasks import custom, evaluate, export, sample, sft, upload

TRAIN = {"param_dtype": "float32", "compile": False, "seed": 42}
SAMPLE = {
    "policy": {"model_max_length": 64},
    "train": {**TRAIN, "train_policy": {
        "type": "grpo", "system_prompt": "Reply with one word.",
        "reward_function": "capitals/capitals.py:capital_alone",
    }},
    "rollout": {"backend": "hf", "n_generation": 4, "batch_size": 8, "max_response_length": 10},
}
SFT = {
    "policy": {
        "model_max_length": 64, "model_gradient_checkpointing": False,
        "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    },
    "train": {
        **TRAIN, "epoch": 3, "train_batch_per_replica": 4, "optm_lr": 5e-4, "optm_warmup_steps": 0,
        "train_policy": {"type": "sft", "mini_batch": 4}, "ckpt": {"enable_checkpoint": True, "save_freq": 2},
    },
}
EVAL = {
    "train": {"param_dtype": "float32"},
    "evaluate": {
        "tasks": ["capitals"], "include_path": "capitals", "apply_chat_template": True, "engine": "hf",
        "batch_size": 48,
    },
}


@flow
def expert_iteration(rounds: int = 2):
    questions = custom("capitals/capitals.py:make", name="questions")
    model, best = custom("pretrained.py:smollm2", name="model"), 0.0
    for i in range(rounds):
        rows = sample(SAMPLE, model=model, data=questions, name=f"sample-{i}", keep={"best": 1, "min_reward": 1.0})
        model = sft(SFT, model=model, data=rows, name=f"sft-{i}")
        score = evaluate(EVAL, model=model, name=f"eval-{i}").metrics["evaluation/capitals/exact_match"]
        if score < best + 0.01:
            break
        best = score
    upload(export(model), target="published")
"""


def prove(folder: Path) -> Proof:
    """Run the flow undisturbed, then again in another folder with kills at random moments."""
    began = time.monotonic()
    reference, killed = _workspace(folder / "reference"), _workspace(folder / "killed")
    reference.cosmos(*_COMMAND, timeout=3600)
    whole = time.monotonic() - began
    logger.info("reference: %.0f s", whole)
    generator = random.Random(SEED)
    rows = []
    for number in range(1, NUM_KILLS + 1):
        rows.append([number, *_kill(killed, generator.uniform(8.0, whole / 3))])
        logger.info("kill %d: %s", number, " | ".join(map(str, rows[-1])))
    killed.cosmos(*_COMMAND, timeout=3600)
    weights = _weights(reference)
    is_met = bool(weights) and weights == _weights(killed)
    digests = "\n".join(f"{path}  {digest}" for path, digest in weights.items())
    scores = ", ".join(f"{100 * score:.1f} %" for score in _scores(reference))
    return Proof(
        title="A flow in Python, killed",
        is_met=is_met,
        claim=(
            f"Expert iteration with SmolLM2-135M-Instruct, a flow in Python with `for` and `if`: `kill -9` of its "
            f"process at {NUM_KILLS} random moments (seed {SEED}, an undisturbed run takes {whole:.0f} s), each time "
            f"continued by the same command, ends with the sha256 of the undisturbed run's model."
        ),
        commands=[f"cosmos {' '.join(_COMMAND)}", "kill -9 ..."],
        body=(
            f"{table(['kill', 'after', 'finished stages', 'unfinished'], rows)}\n\nRight answers after each round: "
            f"{scores}.\n\n```\n{digests}\n```"
        ),
        seconds=time.monotonic() - began,
    )


def _workspace(folder: Path) -> Workspace:
    """Return a folder with the flow and the files that it names."""
    workspace = Workspace(folder)
    shutil.copytree(demo.CONFIG.parent, folder)
    workspace.write("expert.py", _FLOW)
    return workspace


def _kill(workspace: Workspace, seconds: float) -> tuple[str, str, str]:
    """Run or continue the flow, kill it after some seconds, and return when, and the stages by their states."""
    flow = workspace.start(*_COMMAND)
    try:
        flow.wait(seconds)
    except subprocess.TimeoutExpired:
        flow.kill()
        flow.wait()
    else:
        raise AssertionError(f"the flow ended before it was killed after {seconds:.0f} s")
    states = {path.parent.name: read_json(path)["state"] for path in _run(workspace).glob("stages/*/state.json")}
    done = sorted(name for name, state in states.items() if state == "done")
    return f"{seconds:.0f} s", ", ".join(done) or "-", ", ".join(sorted(set(states) - set(done))) or "-"


def _run(workspace: Workspace) -> Path:
    return workspace.path / "outputs" / "expert"


def _weights(workspace: Workspace) -> dict[str, str]:
    """Return the sha256 of each file of weights of a finished stage, by its path below the run."""
    files = sorted(_run(workspace).glob("stages/*/safetensors/**/*.safetensors"))
    return {str(file.relative_to(_run(workspace))): sha256(file) for file in files}


def _scores(workspace: Workspace) -> list[float]:
    results = sorted(_run(workspace).glob("stages/eval-*/result.json"))
    return [read_json(file)["metrics"]["evaluation/capitals/exact_match"] for file in results]
