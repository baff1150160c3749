"""What the ranks of `test_publish.py` run: weights streamed from parts of a model, against those of the whole."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.models.hf import load_model
from cosmos_core.models.lora import merge_adapter, merged_state_dict
from cosmos_core.rollout import publish
from tests.distributed.loading import split, trained
from tests.unit.tiny_model import iter_checkpoint_weights

BUCKET_BYTES = 20_000


def expected_weights(model: PreTrainedModel, form: str) -> dict[str, Tensor]:
    if form == "checkpoint":
        return dict(iter_checkpoint_weights(model))
    with merge_adapter(model):
        return merged_state_dict(model)


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """The model after a training step, so to speak: an adapter that begins with zeros adds nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def problems(
    cases: list[tuple[Path, dict[str, int], torch.dtype, dict[str, Any]]], scratch: Path, stop: threading.Event
) -> list[list[str]]:
    """What is wrong with the stream of each case, on any rank, both times that it is read."""
    torch.set_num_threads(1)
    found = []
    for folder, mesh, dtype, policy in cases:
        whole = disturbed(trained(load_model(str(folder), dtype=dtype), policy))
        rank = split(copy.deepcopy(whole), mesh, scratch)
        wrong: list[str] = []
        for is_shared in (True, False):
            for form in ("checkpoint", "module"):
                weights = publish._WeightBuckets(rank.adapter.model, rank.adapter.meta_copy, form, BUCKET_BYTES)
                assert weights._gatherer is not None and weights._gatherer._uses_shared_memory
                weights._gatherer._uses_shared_memory = is_shared
                wrong += differences(weights, expected_weights(whole, form))
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, wrong)
        found.append(sorted({name for each in of_all for name in each}))
    return found


def differences(weights: publish._WeightBuckets, expected: dict[str, Tensor]) -> list[str]:
    got: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    wrong = []
    for number, bucket in enumerate(weights.buckets()):
        # An engine that still has tensors of buckets before.
        wrong += [f"{name} was written over" for name, tensor in kept.items() if not torch.equal(tensor, got[name])]
        got |= {name: tensor.clone() for name, tensor in bucket}
        kept |= dict(bucket[-1:]) if number % 3 == 0 else {}
        del bucket
    wrong += sorted(expected.keys() ^ got.keys())
    return wrong + [name for name in expected.keys() & got.keys() if not torch.equal(expected[name], got[name])]
