"""Weights in buckets from ranks that each hold a part are those of the whole model, tied ones and adapters included."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import publishing
from tests.distributed.test_load import DP2, EP2, HSDP, TP2, TP2_DP2, label, models
from tests.local_ranks import LocalGroup

PP2 = {"pp_size": 2}
LORA = ("lora", {"r": 4, "target_modules": "all-linear"})
TWO = [
    *(("tied", mesh, torch.float32) for mesh in (DP2, TP2, PP2)),
    *((name, DP2, torch.float32) for name in ("moe", "gpt-oss", "gemma3-vlm")),
    ("moe", EP2, torch.float32),
    ("untied", DP2, torch.bfloat16, ("lora", {**LORA[1], "modules_to_save": ["lm_head"]})),
    ("tied", TP2, torch.float32, LORA),
    ("untied", PP2, torch.float32, LORA),
]
FOUR = [
    *(("tied", mesh, torch.float32) for mesh in (HSDP, TP2_DP2)),
    ("uneven", {"dp_shard_size": 4}, torch.float32),
    ("moe", {"ep_size": 2, "dp_shard_size": 4}, torch.float32),
    ("moe", {"pp_size": 2, "dp_shard_size": 2}, torch.float32),
    ("tied", TP2_DP2, torch.float32, LORA),
]
__all__ = ["models"]


def problems(cases: list[Any], size: int, folder: Path, scratch: Path) -> dict[str, list[str]]:
    named = [(folder / name, mesh, dtype, dict(policy)) for name, mesh, dtype, *policy in cases]
    found = LocalGroup(size).run(partial(publishing.problems, named, scratch))
    return dict(zip(map(label, cases), found, strict=True))


@pytest.mark.parametrize("cases", [TWO, pytest.param(FOUR, marks=pytest.mark.full)], ids=["two", "four"])
def test_buckets_from_parts_are_the_whole_model(cases: list[Any], models: Path, tmp_path: Path) -> None:
    found = problems(cases, 2 if cases is TWO else 4, models, tmp_path)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
