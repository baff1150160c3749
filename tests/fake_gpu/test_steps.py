"""Optimizer steps on device "cuda" without a GPU: they run, on which kernels, and what recomputation saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.fake_gpu import device

CELLS = ("sft", "sft recomputed", "sft selective", "grpo", "moe")
OTHERS = (
    "sft padded", "sft recomputed padded", "sft float32", "grpo with reference", "dpo", "lora", "fp8", "nft"
)  # fmt: skip
ONCE = 2
"""Layers; a step is one batch."""
Found = dict[str, dict[str, Any]]


@cache
def traced(*cells: str) -> Found:
    """Trace cells in one process, because the device has to be there before torch is imported: 8 s, 1 s each."""
    if reason := device.obstacle():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.fake_gpu.steps", str(device.build()), *cells]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr[-2000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", [*CELLS, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_a_step_of_each_kind_runs_on_cuda(name: str) -> None:
    found = traced(*(CELLS if name in CELLS else OTHERS))[name]
    assert "error" not in found, found["error"]
    assert found["devices"] == ["cuda"]


def test_packed_attention_is_one_call_per_layer_and_two_where_whole_blocks_are_recomputed() -> None:
    calls = {name: found["kernels"]["_varlen_attn"] for name, found in traced(*CELLS).items()}
    assert calls == {
        "sft": ONCE, "grpo": ONCE, "moe": ONCE, "sft selective": ONCE, "sft recomputed": 2 * ONCE
    }  # fmt: skip


def test_recomputation_saves_memory_in_its_order() -> None:
    peaks = {name: found["peak"] for name, found in traced(*CELLS).items()}
    assert peaks["sft recomputed"] < peaks["sft selective"] < peaks["sft"]


def test_experts_multiply_in_the_dtype_of_the_training() -> None:
    assert traced(*CELLS)["moe"]["experts"] == ["torch.bfloat16"]


@pytest.mark.full
def test_each_linear_layer_of_a_block_multiplies_in_fp8_forward_and_twice_backward() -> None:
    found = traced(*OTHERS)
    assert found["fp8"]["kernels"]["fp8 mm"] == 7 * ONCE * 3
    assert "fp8 mm" not in found["lora"]["kernels"]


@pytest.mark.full
def test_rows_that_the_packed_kernel_cannot_take_do_without_it() -> None:
    found = traced(*OTHERS)
    assert all("_varlen_attn" not in found[name]["kernels"] for name in OTHERS if "padded" in name or "32" in name)
    assert found["sft recomputed padded"]["peak"] < found["sft padded"]["peak"]
