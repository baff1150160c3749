"""Pipeline parallelism: each rank has some of a model's layers, and hidden states travel from rank to rank.

A pipeline stage is the transformers model itself, in which modules of other stages pass their input on: names in the
state dict, indices of layers and the code around them stay those of the whole model. Which modules there are is said by
the model's own plan; a model that does more than its plan says is refused. The schedules are torch's
(`models/pipelined.py`).

Shape legend: B rows, T tokens, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.errors import ModelError
from cosmos_core.parallel.fsdp import local, scale_gradients, total_norm

M = TypeVar("M", bound=nn.Module)

_LAYERS = "layers"
_PROBE_TOKENS = 3


class Elsewhere(nn.Module):
    """Replaces a module of another stage: passes its input on, and has the other's attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # no child: its weights are not of this stage

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the input."""
        return hidden_BTH

    def __getattr__(self, name: str) -> Any:
        if "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)


class _EmbeddingElsewhere(Elsewhere):
    """Gives any hidden states, the same for the same token: probes run a stage by itself."""

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ids_BT, weight = hidden_BTH, self.weight
        waves_BTH = (ids_BT.unsqueeze(-1) * torch.arange(1, weight.shape[1] + 1, device=ids_BT.device)).sin()
        return waves_BTH.to(weight.dtype)


class _Witness(Elsewhere):
    """Remembers what a layer would be given beside hidden states."""

    def __init__(self, original: nn.Module, given: list[dict[str, Any]]) -> None:
        super().__init__(original)
        self.given = given

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.given.append({**kwargs, **{str(i): value for i, value in enumerate(args)}})
        return hidden_BTH


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a pipeline stage; where they do not divide, the first stages have one more."""
    size, more = divmod(num_layers, num_stages)
    start = stage * size + min(stage, more)
    return range(start, start + size + (stage < more))


def num_stages(model: PreTrainedModel, sizes: ParallelismConfig) -> int:
    """Return how many stages the pipeline has, several of them on a rank under `Interleaved1F1B`.

    Raises:
        ModelError: they are more than layers.
    """
    layers = int(model.config.num_hidden_layers)
    found = sizes.num_stages(layers)
    if found > layers:
        raise ModelError(
            f"policy.parallelism.pp_size = {sizes.pp_size} makes {found} stages of {layers} layers; lower it, or raise "
            f"pp_layers_per_stage"
        )
    return found


def own_stages(model: PreTrainedModel, sizes: ParallelismConfig, rank: int) -> range:
    """Return the indices of the stages of one rank of the pipeline."""
    return range(rank, num_stages(model, sizes), sizes.pp_size)


def apply_pp(model: PreTrainedModel, sizes: ParallelismConfig, rank: int) -> None:
    """Leave of the model the pipeline stages of one rank, and free the data of all else.

    Weights may be on the meta device. An embedding and a head that are tied stay together, on the first rank and on
    the last.

    Raises:
        ModelError: the model has no plan, or does more than its plan says.
    """
    _check(model, f"policy.parallelism.pp_size = {sizes.pp_size}: {type(model).__name__}")
    own, total = own_stages(model, sizes, rank), num_stages(model, sizes)
    _keep(model, model.base_model, own, total, lambda module: module.to("meta"))


def stage_of(model: PreTrainedModel, stage: int, sizes: ParallelismConfig) -> PreTrainedModel:
    """Return one stage of a model after `apply_pp`, with the same modules and weights."""
    twin, body = _twin(model), _twin(model.base_model)
    twin._modules[model.base_model_prefix] = body
    _keep(twin, body, [stage], num_stages(model, sizes), lambda module: module)
    return twin


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether embedding and head are one weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return bool(head.weight is embedding.weight)


def sum_tied(model: PreTrainedModel, pipeline: DeviceMesh) -> None:
    """Add the gradients of the two copies of a tied weight, so that both have the whole."""
    group, here, last = pipeline.get_group(), pipeline.get_local_rank(), pipeline.size() - 1
    weight = model.get_output_embeddings().weight
    if not is_tied(model) or here not in {0, last} or weight.grad is None:
        return
    mine = local(weight.grad)
    theirs, peer = torch.empty_like(mine), dist.get_global_rank(group, last - here)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group),
    ])  # fmt: skip
    for work in works:
        work.wait()
    mine.add_(theirs)


def clip_over_stages(model: PreTrainedModel, pipeline: DeviceMesh, max_norm: float) -> float:
    """Scale the gradients of all stages together, as `clip_gradients` does; return the norm before that."""
    trained = [p for p in model.parameters() if p.grad is not None]
    counted = trained
    if is_tied(model) and pipeline.get_local_rank() > 0:  # of the two copies that of the first rank counts
        counted = [p for p in trained if p is not model.get_output_embeddings().weight]
    norm = (
        total_norm(p.grad for p in counted if p.grad is not None) if counted else torch.zeros((), device=model.device)
    )
    square = norm.to(torch.float64).square()
    dist.all_reduce(square, group=pipeline.get_group())
    norm = square.sqrt()
    scale_gradients(trained, norm, max_norm)
    return float(norm)


def _twin(module: M) -> M:
    """Return the same module, whose children can be replaced without changing it."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _ends(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of the body's modules before its layers, and after them."""
    names = list(model.config.base_model_pp_plan or ())
    return names[: names.index(_LAYERS)], names[names.index(_LAYERS) + 1 :]


def _keep(
    model: PreTrainedModel, body: nn.Module, stages: Sequence[int], total: int, drop: Callable[[nn.Module], nn.Module]
) -> None:
    """Replace in `model` and its `body` what is not of these stages; `drop` gives what attributes are read from."""
    before, after = _ends(model)
    is_first, is_last, tied = 0 in stages, total - 1 in stages, is_tied(model)
    layers = _layers(body)
    own = {layer for stage in stages for layer in layers_of(stage, total, len(layers))}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    keeps_both = tied and (is_first or is_last)
    for holder, names, is_kept in ((body, before, is_first), (body, after, is_last), (model, _heads(model), is_last)):
        for name in names:
            module = holder._modules[name]
            assert module is not None
            if is_kept or (keeps_both and module in {head, embedding}):
                continue
            elsewhere = _EmbeddingElsewhere if module is embedding else Elsewhere
            holder._modules[name] = elsewhere(drop(module))
    body._modules[_LAYERS] = nn.ModuleList(
        layer if i in own else Elsewhere(drop(layer)) for i, layer in enumerate(layers)
    )


def _layers(body: nn.Module) -> list[nn.Module]:
    return list(body.get_submodule(_LAYERS).children())


def _heads(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model._modules.items() if module is model.get_output_embeddings()]


def _check(model: PreTrainedModel, where: str) -> None:
    """Refuse a model of which anything happens outside the parts of its plan, or that hands layers what is made of
    tokens: a later stage has none."""
    plan, config = getattr(model.config, "base_model_pp_plan", None), model.config
    body = model._modules.get(model.base_model_prefix)
    is_planned = plan and _LAYERS in plan and config.get_text_config() is config
    if not is_planned or body is None or not _heads(model):
        raise ModelError(f"{where} has no plan for a pipeline; set it to 1 and raise dp_shard_size")
    before, after = _ends(model)
    planned_names = {*before, _LAYERS, *after}
    known = [*(body._modules.get(name) for name in planned_names), *(model._modules[name] for name in _heads(model))]
    planned = {p for module in known if module is not None for p in module.parameters()}
    if others := [name for name, p in model.named_parameters() if p not in planned]:
        raise ModelError(f"{where}: its plan does not know {others[0]}; set it to 1 and raise dp_shard_size")
    try:
        reason = _difference(model, body, before, after)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
    if reason:
        raise ModelError(f"{where} cannot be cut into stages ({reason}); set it to 1 and raise dp_shard_size")


@torch.no_grad()
def _difference(model: PreTrainedModel, body: nn.Module, before: Sequence[str], after: Sequence[str]) -> str:
    """What the body does beside its parts; empty: nothing. Weights, which may have no data, are not used."""
    device = next((buffer.device for buffer in body.buffers()), torch.device("cpu"))
    embedding = _EmbeddingElsewhere(model.get_input_embeddings())
    ids_BT = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    hidden_BTH = embedding(ids_BT)
    inputs = {"position_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "use_cache": False}
    given: list[list[dict[str, Any]]] = []
    for start in ({"input_ids": ids_BT}, {"inputs_embeds": hidden_BTH}):
        bare, seen = _twin(body), list[dict[str, Any]]()
        for name in (*before, *after):
            module: Any = body._modules[name]
            bare._modules[name] = embedding if module is embedding.original else Elsewhere(module)
        bare._modules[_LAYERS] = nn.ModuleList(_Witness(layer, seen) for layer in _layers(body))
        bare.eval()
        found = bare(**inputs, **start)
        if "inputs_embeds" in start and found.last_hidden_state is not hidden_BTH:
            return "hidden states change outside its layers"
        given.append(seen)
    of_tokens, of_hidden = given
    names = [name for a, b in zip(of_tokens, of_hidden, strict=True) for name in a if not _same(a[name], b.get(name))]
    return f"its layers are given {names[0]!r}, which is made of tokens" if names else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
