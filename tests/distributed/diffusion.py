"""What the ranks of `test_diffusion.py` run: an update of a denoiser, its loss, gradients and gathered weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_core.algorithms.diffusion_sft import DiffusionSft
from cosmos_core.config.schema.diffusion_sft import DiffusionSftConfig
from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.recompute import recompute_activations
from cosmos_core.parallel.fsdp import full_tensors
from cosmos_core.parallel.mesh import is_first_rank, open_mesh
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests import tiny_pipelines
from tests.effects.change import recipe
from tests.unit.trainers import NoView

MESHES = {
    "replicas": {"dp_replicate_size": 4, "dp_shard_size": 1},
    "shards": {"dp_shard_size": 4},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "context": {"cp_size": 2, "dp_shard_size": 2},
}
_RECOMPUTED = {"policy.model_gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "sd3": {}, "sd3-lora": {"policy.lora.r": 2}, "cosmos_predict": {}, "cosmos_predict-lora": {"policy.lora.r": 2},
    "sana_video": {}, "sana_video-recomputed": _RECOMPUTED, "cosmos_predict-recomputed": _RECOMPUTED,
}  # fmt: skip
"""Pipeline, and what is said of its adapter and of the backward pass."""
PRECISE = {"cosmos_predict": (torch.float32, 1e-5), "sana_video": (torch.float32, 1e-5)}
"""Dtype and tolerance of those that do not compute in float64."""


def usual_cells() -> list[tuple[str, str]]:
    """The cells that the suite has: replicas, shards of replicas, and clips that sharded ranks share."""
    return [("sd3-lora", "replicas"), ("sd3-lora", "hsdp"), ("cosmos_predict", "context")]


def cells() -> list[tuple[str, str]]:
    """Each case with each mesh that it can be on: ranks share the tokens of clips alone."""
    return [
        (case, mesh)
        for case in CASES
        for mesh in MESHES
        if mesh != "context" or case.partition("-")[0] in tiny_pipelines.CLIPS
    ]


def samples(name: str) -> list[FlowSample]:
    """Seven samples of two shapes, clips of a third with an odd number of tokens too: some ranks have nothing to do at
    the end."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found = []
    for i in range(7):
        is_clip = name in tiny_pipelines.CLIPS
        side = (4, 8, 6)[i % 3] if is_clip else 8 if i % 3 else 4
        shape = (16, 3, side, side) if is_clip else (4, side, side)
        text = {"prompt_embeds": tensor(6, 8 if name == "sana_video" else 32)}
        if name == "sana_video":
            text["prompt_attention_mask"] = torch.ones(6, dtype=torch.int64)
        elif not is_clip:
            text["pooled_prompt_embeds"] = tensor(32)
        given = i % 3 if name == "cosmos_predict" else 0
        found.append(FlowSample(tensor(*shape), 0.1 + 0.1 * i, text, tensor(*shape), num_conditioning_frames=given))
    return found


def computed(folder: Path, case: str, scratch: Path, **mesh: int) -> dict[str, Any]:
    """Loss, a prediction and every gradient, and what all weights are together."""
    name = case.partition("-")[0]
    config = recipe({
        "train.train_policy.type": "sft", "train.train_policy.mini_batch": 2, "train.compile": False,
        "train.param_dtype": "float32", "policy.is_diffusers": True, "train.optm_grad_norm_clip": 0.0,
            **CASES[case],
    })  # fmt: skip
    train = config.train.copy_with(fsdp_reduce_dtype="float64" if name not in PRECISE else "float32")
    torch.manual_seed(0)
    family = open_pipeline(str(folder / name), config.policy)
    dtype, _ = PRECISE.get(name, (torch.float64, 1e-9))
    model = family.load_denoiser(dtype)
    mark_trained_weights(model, config.policy, family.lora_targets)
    if CASES[case] == _RECOMPUTED:
        recompute_activations(model, config.policy.model_gradient_checkpointing)
    sizes = open_mesh(ParallelismConfig.model_validate(mesh), "cpu") if mesh else None
    adapter = Denoiser(model, family, train, sizes)
    trainer = Trainer(adapter, train, ProgressWriter(scratch / "p.json"))
    rows = samples(name)
    predicted = trainer.evaluate(rows)
    [update] = DiffusionSft(DiffusionSftConfig(type="sft")).updates(rows, NoView())
    metrics = trainer.update(update)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    whole = adapter.gather_whole_model()
    return {
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
        "predicted": [row["velocity"] for row in predicted],
        "gradients": {key: tensor.clone() for key, tensor in full_tensors(gradients) if is_first_rank()},
        "weights": None if whole is None else {key: value.clone() for key, value in whole.state_dict().items()},
    }


def on_meshes(folder: Path, chosen: list[tuple[str, str]], stop: threading.Event) -> None:
    """Each case on each mesh; the first rank writes what came out."""
    torch.set_num_threads(1)
    for case, mesh in chosen:
        own = folder / f"{mesh}-{case}-{dist.get_rank()}"
        own.mkdir()
        found = computed(folder, case, own, **MESHES[mesh])
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{mesh}-{case}.pt")
