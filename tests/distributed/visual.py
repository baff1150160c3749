"""What the ranks of `test_visual.py` run: an update of rows with and without images, and its loss and gradients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.parallel.fsdp import full_tensors
from cosmos_core.parallel.mesh import is_first_rank, open_mesh
from tests.unit.test_visual_families import loaded, make_rank, samples
from tests.unit.trainers import NoView, likelihood, score_in, sft


def computed(model: Path, data: Path, scratch: Path, **mesh: int) -> dict[str, Any]:
    """Loss, validation and every gradient, on the first rank."""
    whole, processor = loaded(str(model))
    sizes = open_mesh(ParallelismConfig.model_validate(mesh), "cpu")
    rank = make_rank(whole.double(), processor, scratch, mesh=sizes)
    score_in(rank, torch.float64)
    rows = samples(data)
    evaluated = likelihood(rank, rows, size=2)
    (update,) = sft().updates(rows, NoView())
    figures = rank.update(update)
    gradients = {name: p.grad for name, p in rank.adapter.model.named_parameters() if p.grad is not None}
    return {
        "loss": figures["loss"],
        "evaluated": evaluated,
        "gradients": {name: tensor.clone() for name, tensor in full_tensors(gradients) if is_first_rank()},
    }


def of_families(names: list[str], folder: Path, stop: threading.Event) -> None:
    """Each family on one rank of two; the first rank writes the answers."""
    torch.set_num_threads(1)
    for name in names:
        own = folder / f"{name}-{dist.get_rank()}"
        own.mkdir()
        found = computed(folder / name / "model", folder / name / "stage" / "data", own, dp_shard_size=2)
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{name}.pt")
