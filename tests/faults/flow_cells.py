"""The cells of the matrix of diffusion trainings: each family with each training, all weights or an adapter.

A cell is trained as a stage in a process of its own, once to the end and once with a SIGKILL behind a checkpoint, at a
moment that its name decides, and then to the end. `problems` says in what the two differ, and whether the training did
not do what it is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cosmos_core.data import prepare
from cosmos_core.models import verify_pipeline_export
from cosmos_core.run.files import read_json, sha256
from cosmos_core.run.manifest import read_result
from cosmos_core.run.progress import MetricsWriter, read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.worker import program as worker
from tests import tiny_pipelines
from tests.effects.change import recipe, stage_of
from tests.unit.test_media_source import png, write_clip

REWARD = """
def bright(to_be_evaluated, reference, media):
    if hasattr(media, "getdata"):
        return sum(sum(pixel) for pixel in media.getdata()) / 1e5
    return float(media.mean()) / 10
"""
BASE: dict[str, Any] = {
    "train.compile": False, "train.param_dtype": "float32", "train.seed": 11, "train.optm_warmup_steps": 0,
    "train.ckpt.enable_checkpoint": True, "train.ema_enable": True, "train.ema_decay": 0.5, "train.ckpt.max_keep": 2,
    "train.ema_update_step_interval": 1, "train.train_policy.mini_batch": 8,
    "train.train_policy.dataset.test_size": 2, "validation.enable": True, "validation.val_before_train": True,
    "validation.freq": 100, "policy.is_diffusers": True, "policy.diffusers.max_prompt_length": 8,
    "policy.diffusers.train_frames": 5, "policy.diffusers.inference_frames": 5,
    "policy.diffusers.inference_size": [32, 32], "policy.diffusers.sample.num_steps": 4,
    "policy.diffusers.sample.eval_num_steps": 4, "policy.diffusers.sample.guidance_scale": 1.0,
}  # fmt: skip
SFT: dict[str, Any] = {
    "train.train_policy.type": "sft", "train.train_batch_per_replica": 8, "train.epoch": 12, "train.ckpt.save_freq": 3,
}  # fmt: skip
RL: dict[str, Any] = {
    "train.train_policy.type": "grpo", "train.train_batch_per_replica": 16, "train.epoch": 3, "train.ckpt.save_freq": 2,
    "rollout.backend": "flow_sampler", "rollout.n_generation": 4, "rollout.batch_size": 8,
}  # fmt: skip
NFT: dict[str, Any] = {
    **RL, "train.train_policy.trainer_type": "diffusion_nft", "train.train_policy.kl_beta": 1e-4,
    "policy.diffusers.weight_copy_decay_type": 1, "policy.diffusers.sample.deterministic_sampling": True,
    "policy.diffusers.timesteps_fraction": 0.99,
}  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "nft": NFT,
    "flow_grpo": {
        **RL, "train.train_policy.trainer_type": "flow_grpo", "policy.diffusers.sample.solver": "flow",
        "policy.diffusers.flow_rl.train_on": [0, 1, 2], "train.train_policy.kl_beta": 0.01,
        "train.train_policy.batch_size_per_optimize": 8,
    },
    "nft+data": {**NFT, "train.train_policy.learns_data": True, "policy.diffusers.flow_rl.data_beta": 0.01},
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {"train.optm_lr": 2e-3},
    "lora": {"train.optm_lr": 2e-2, "policy.lora.r": 4, "policy.lora.lora_alpha": 8.0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "cosmos_predict": {"rollout.n_generation": 16, "train.train_batch_per_replica": 64, "train.epoch": 8},
}
"""What its rollouts need beside the rest: its tiny clips differ so little that few of them say nothing."""
BESIDE: dict[str, dict[str, Any]] = {
    "cosmos_predict-flow_grpo-lora": {
        "train.train_policy.batch_size_per_optimize": 64, "policy.diffusers.sample.noise_level": 0.7,
    },
    "sd3-nft+data-full": {"train.epoch": 2, "policy.diffusers.sample.num_steps": 2},
}  # fmt: skip
"""What a cell needs: an update of an adapter by a few such clips is mostly chance, and few updates do for one."""
NAMED = {
    "sft": {"model", "optimizer", "ema"}, "flow_grpo": {"model", "optimizer", "ema", "reference"},
    "nft": {"model", "optimizer", "ema", "old", "reference"},
    "nft+data": {"model", "optimizer", "ema", "old", "reference"},
}  # fmt: skip
"""What the checkpoint of a training has tensors of."""


ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cell:
    """One training."""

    family: str
    training: str
    weights: str

    def __str__(self) -> str:
        return f"{self.family}-{self.training}-{self.weights}"

    @property
    def kind(self) -> str:
        return "sft" if self.training == "sft" else "rl"

    @property
    def rows(self) -> str:
        return "media" if self.training in ("sft", "nft+data") else "prompts"

    @property
    def measure(self) -> tuple[str, int]:
        """The figure of held-out rows that has to change, and whether it rises (1) or falls (-1)."""
        return ("validation/loss", -1) if self.kind == "sft" else ("validation/reward", 1)


CELLS = [Cell(*each) for each in product(tiny_pipelines.FAMILIES, TRAININGS, WEIGHTS)]


@dataclass(frozen=True)
class Found:
    """What came out of a cell."""

    problems: Sequence[str]
    before: float
    after: float
    """Of `Cell.measure`."""
    killed_at: int
    """Complete steps at the moment of the kill."""
    checkpoint: int
    """That the training went on from."""
    num_steps: int
    num_tensors: int
    """Of the last checkpoint, every one the same."""
    seconds: float


class Cells:
    """Runs cells below a folder; pipelines and prepared rows are made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "reward.py").write_text(REWARD)

    def run(self, cell: Cell) -> Found:
        """Train undisturbed, and again with a kill."""
        began = time.monotonic()
        whole, killed = (self._stage(cell, name) for name in ("whole", "killed"))
        problems = self._ended(whole, "", 0) + self._ended(killed, str(cell), -signal.SIGKILL)
        step, checkpoint = _standing(killed)
        problems += self._ended(killed, "", 0)
        if problems:
            return Found(problems, 0.0, 0.0, step, checkpoint, 0, 0, time.monotonic() - began)
        total = _last_step(whole)
        if not 0 < checkpoint <= step < total:
            problems.append(f"killed at step {step} with a checkpoint of step {checkpoint}")
        problems += differences(whole.path, killed.path, total)
        tensors = tensor_digests(whole.path, total)
        if missing := NAMED[cell.training] - {name.partition(".")[0] for name in tensors}:
            problems.append(f"no {', '.join(sorted(missing))} in the checkpoint")
        name, sign = cell.measure
        measured = [line[name] for line in read_metrics(whole.path / "metrics.jsonl") if name in line]
        if not sign * measured[-1] > sign * measured[0]:
            problems.append(f"{name} was {measured[0]:.5g} and is {measured[-1]:.5g}")
        seconds = time.monotonic() - began
        return Found(problems, measured[0], measured[-1], step, checkpoint, total, len(tensors), seconds)

    def _ended(self, stage: Stage, killed_as: str, code: int) -> list[str]:
        """Run a stage; say so if it did not end with that code."""
        log = stage.path / "log.txt"
        program = "import sys\nfrom tests.faults.flow_cells import work\nsys.exit(work(*sys.argv[1:]))"
        command = [sys.executable, "-c", program, str(stage.path), killed_as]
        with open(log, "a") as output:
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        if done.returncode == code:
            return []
        return [f"exit code {done.returncode}, not {code}: ...{log.read_text(encoding='utf-8')[-600:]}"]

    def _stage(self, cell: Cell, name: str) -> Stage:
        model = self._folder / cell.family
        if not model.exists():
            tiny_pipelines.save(cell.family, model)
        config = recipe({
            **BASE, **TRAININGS[cell.training], **WEIGHTS[cell.weights],
            **(FAMILIES.get(cell.family, {}) if cell.kind == "rl" else {}),
            **BESIDE.get(str(cell), {}),
            **({"train.train_policy.reward_function": f"{self._folder / 'reward.py'}:bright"}
               if cell.kind == "rl" else {}), **self._dataset(cell),
        })  # fmt: skip
        data = self._folder / f"{cell.family}-{cell.rows}"
        if not data.exists():
            prepare.run(stage_of(data, config, kind="prepare", model=model))
        stage = stage_of(
            self._folder / f"runs/{cell}/stages/{name}", config, kind=cell.kind, model=model, data=data / "data"
        )
        stage.save()
        return stage

    def _dataset(self, cell: Cell) -> dict[str, Any]:
        is_clip = cell.family in tiny_pipelines.CLIPS
        folder = self._folder / (("clips" if is_clip else "images") if cell.rows == "media" else "prompts")
        if not folder.exists():
            folder.mkdir()
            if cell.rows == "media":
                _write_media(folder, is_clip=is_clip)
            else:
                lines = [json.dumps({"prompt": f"{i} is a colour"}) + "\n" for i in range(10)]
                (folder / "train.jsonl").write_text("".join(lines))
        key = "local_dir" if cell.rows == "media" else "name"
        return {f"train.train_policy.dataset.{key}": str(folder)}


def differences(one: Path, other: Path, step: int) -> list[str]:
    """In what two runs of a training differ: the last checkpoint, the export, the figures of each step."""
    found = []
    of_checkpoints = (tensor_digests(path, step) for path in (one, other))
    of_exports = (file_digests(path / f"safetensors/step_{step}") for path in (one, other))
    for what, (ours, theirs) in (("tensor", of_checkpoints), ("file", of_exports)):
        if not ours or ours.keys() != theirs.keys():
            found.append(f"there are other {what}s")
        found += [f"{what} {name} differs" for name in ours if ours[name] != theirs.get(name)]
    for part in ("rng", "feed", "algorithm", "metrics"):
        if _timeless(states(one, step).get(part)) != _timeless(states(other, step).get(part)):
            found.append(f"{part} of the checkpoint differs")
    if states(one, step).get("rng") is None:
        found.append("no state of random numbers in the checkpoint")
    if figures(one) != figures(other):
        found.append("metrics.jsonl differs")
    return found


def tensor_digests(path: Path, step: int) -> dict[str, str]:
    """sha256 of each tensor of a checkpoint: weights, named weights, optimizer."""
    found = {}
    for file in (path / f"checkpoints/step_{step}/policy").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            found[name] = hashlib.sha256(
                f"{tensor.dtype}{tensor.shape}".encode() + tensor.numpy().tobytes()
            ).hexdigest()
    return found


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of each file of an export."""
    return {str(file.relative_to(folder)): _digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def _digest(file: Path) -> str:
    """sha256 of a file; the order in which safetensors names what a file is about is random and no difference."""
    if file.suffix != ".safetensors":
        return sha256(file)
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True)
    return hashlib.sha256(header.encode() + content[8 + size :]).hexdigest()


def states(path: Path, step: int) -> dict[str, Any]:
    """What a checkpoint has beside tensors."""
    [file] = [each for each in (path / f"checkpoints/step_{step}/policy").glob("*.json") if each.stem != "manifest"]
    found = read_json(file)
    assert isinstance(found, dict)
    return found


def figures(path: Path) -> list[dict[str, Any]]:
    """Every line of `metrics.jsonl` without times."""
    return [_timeless(line) for line in read_metrics(path / "metrics.jsonl")]


def _timeless(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {name: v for name, v in values.items() if not name.startswith(("time", "throughput", "memory"))}


def _standing(stage: Stage) -> tuple[int, int]:
    """Complete steps, and the step of the newest checkpoint."""
    steps = [line["step"] for line in read_metrics(stage.path / "metrics.jsonl")]
    saved = (stage.path / "checkpoints").glob("step_*/policy/manifest.json")
    return max(steps, default=0), max((int(file.parts[-3].removeprefix("step_")) for file in saved), default=0)


def _last_step(stage: Stage) -> int:
    result = read_result(stage.path)
    assert result is not None
    return int(result["info"]["step"])


def _write_media(folder: Path, *, is_clip: bool) -> None:
    for i in range(10):
        (folder / f"{i:04}.json").write_text(json.dumps({"prompt": f"{i} is a colour"}))
        if is_clip:
            write_clip(folder / f"{i:04}.mp4")
        else:
            (folder / f"{i:04}.png").write_bytes(png((20 * i, 255 - 20 * i, 128), (32, 32)))


# What follows runs in the children.


def work(path: str, killed_as: str) -> int:
    """Run a stage as the worker does; with `killed_as` end by SIGKILL behind a checkpoint, before the last step."""
    torch.set_num_threads(1)
    np.random.seed()  # as in an interpreter of its own
    with drawn_apart():
        if killed_as:
            _die_later(Path(path), random.Random(killed_as).uniform(0.0, 0.5))
        sys.argv = ["worker", path]
        return worker.main()


def _die_later(path: Path, seconds: float) -> None:
    """Kill this process so long after its first checkpoint is there; its last step never comes."""
    log = MetricsWriter.log

    def die() -> None:
        while not list((path / "checkpoints").glob("step_*/policy/manifest.json")):
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def logged(self: MetricsWriter, step: int, metrics: dict[str, float]) -> None:
        log(self, step, metrics)
        progress = read_json(path / "progress.json")
        if isinstance(progress, dict) and progress.get("total") and step >= progress["total"] - 1:
            threading.Event().wait()

    MetricsWriter.log = logged  # type: ignore[method-assign]
    threading.Thread(target=die, daemon=True).start()


@contextmanager
def drawn_apart() -> Iterator[None]:
    """Have exports loaded and drawn by a process that was forked before anything was computed, in place of a fresh
    interpreter, which would import everything again for each export."""
    here, there = Pipe()
    if (child := os.fork()) == 0:
        here.close()
        _draw(there)
    there.close()

    def fresh(pool: object, function: object, arguments: tuple[Any, ...], *_: object) -> Any:
        here.send(arguments[0])
        found = here.recv()
        if isinstance(found, str):
            raise AssertionError(found)
        return found

    verify_pipeline_export.call_in_interpreter = fresh
    yield
    here.close()
    os.waitpid(child, 0)


def _draw(connection: Connection) -> None:
    while True:
        try:
            probes = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send(verify_pipeline_export.generate_images(probes))
        except Exception as error:  # noqa: BLE001 - the other side says it
            connection.send(f"{type(error).__name__}: {error}")
