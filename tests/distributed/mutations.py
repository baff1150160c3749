"""What the ranks of `test_mutations.py` run: cases of the matrix with one thing broken; and what experts compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode
from transformers.distributed import tensor_parallel

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.models import causal_lm
from cosmos_core.models.hf import load_model
from cosmos_core.parallel import context, expert, tensor
from cosmos_core.parallel.mesh import Mesh, open_mesh
from tests.distributed.matrix import Case, computed, recipe
from tests.distributed.test_invariance import CP2, DP2, TP2

_gather, _select = Mesh.all_gather_object, Mesh.select_local_items
_divide, _to_all = FSDPModule.set_gradient_divide_factor, tensor_parallel.all_to_all_single


def _averaged(module: FSDPModule, factor: float) -> None:
    _divide(module, 2.0 * factor)


def _own_losses(mesh: Mesh, value: Any) -> Any:
    """Losses are a list; what is evaluated is a table, whose rows all ranks need."""
    return [value] if isinstance(value, list) else _gather(mesh, value)


def _same_rows(mesh: Mesh, rows: Any) -> Any:
    return rows[:: mesh.dp.size()] if torch.is_grad_enabled() else _select(mesh, rows)


def _without_gradient(tensor: torch.Tensor, *sizes: Any) -> torch.Tensor:
    return _to_all(tensor.detach(), *sizes)


def _own_piece(states: torch.Tensor, chunk_dim: int, cat_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = dist.get_world_size(group)
    return torch.cat([states.chunk(size, dim=chunk_dim)[dist.get_rank(group)]] * size, dim=cat_dim)


@dataclass(frozen=True)
class Mutation:
    """What is broken, and where it must show."""

    case: Case
    broken: Callable[[], Any]


def _mutation(mesh: Any, target: Any, name: str, by: Any) -> Mutation:
    model = "qwen3-moe" if "ep_size" in dict(mesh) else "qwen3"
    return Mutation(Case(mesh, 2, model=model), partial(patch.object, target, name, by))


MUTATIONS = {
    "gradients are averaged over ranks": _mutation(DP2, FSDPModule, "set_gradient_divide_factor", _averaged),
    "the loss is that of one rank": _mutation(DP2, Mesh, "all_gather_object", _own_losses),
    "ranks have the same rows": _mutation(DP2, Mesh, "select_local_items", _same_rows),
    "attention sees a piece of a row": _mutation(CP2, context, "all_to_all", _own_piece),
    "norms have the gradient of some heads": _mutation(
        TP2, tensor._AllReduceGradient, "backward", staticmethod(lambda ctx, gradient: (gradient, None))
    ),
    "gradients do not return from experts": _mutation(
        (*DP2, ("ep_size", 2)), tensor_parallel, "all_to_all_single", _without_gradient
    ),
}


def run_broken(models: Path, scratch: Path, stop: threading.Event) -> None:
    """Each case as it is, and broken; the first rank writes the answers."""
    torch.set_num_threads(1)
    for name, mutation in MUTATIONS.items():
        for kind, state in (("whole", nullcontext), ("broken", mutation.broken)):
            # A split is proven before the first step, which would end it there.
            with state(), patch.object(causal_lm, "check_tp_plan"):
                found = computed(mutation.case, models, scratch)
            if dist.get_rank() == 0:
                torch.save(found, scratch / f"{name}, {kind}.pt")


def expert_flops(model: Path, stop: threading.Event) -> tuple[list[int], list[int]]:
    """Operations in matrix products of a forward pass, on each rank: with all experts there, and with half of them."""
    loaded = load_model(str(model), dtype=torch.float32)
    loaded.set_experts_implementation("eager")
    ids = torch.arange(24).view(2, 12).add(100 * dist.get_rank())

    def flops() -> list[int]:
        with FlopCounterMode(display=False) as counter:
            loaded(input_ids=ids, use_cache=False)
        found = [0, 0]
        dist.all_gather_object(found, counter.get_total_flops())
        return found

    before = flops()
    mesh = open_mesh(ParallelismConfig(dp_shard_size=2, ep_size=2), "cpu")
    assert mesh is not None
    expert.apply_ep(loaded, mesh, recipe(Case()).train)
    return before, flops()
