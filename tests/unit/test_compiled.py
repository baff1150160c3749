"""When torch compiles: what is told of it, and on which devices a recipe asks for it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core import machine_properties
from cosmos_core.errors import ConfigError
from cosmos_core.models.compilation import report_compilations
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.progress import ProgressWriter, read_progress
from tests.effects.change import GRPO, SFT, recipe
from tests.unit.run_folder import load_recipe, make_inputs


def test_compiling_is_a_phase_with_its_time_and_the_phase_before_it_goes_on(tmp_path: Path) -> None:
    progress, seen = ProgressWriter(tmp_path / "progress.json"), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        position = read_progress(tmp_path)
        assert position is not None
        seen.append(position.phase)
        return graph.forward

    report_compilations(ProgressWriter(tmp_path / "another.json"))
    report_compilations(progress)  # in place of the other
    doubled = torch.compile(lambda x: x * 2, backend=backend)
    progress.phase("step")
    assert doubled(torch.ones(3)).tolist() == [2, 2, 2]
    seconds = progress.compile_seconds
    position = read_progress(tmp_path)
    assert position is not None and (position.phase, seen) == ("step", ["compile"])
    assert seconds > 0 and position.compile_seconds == seconds
    doubled(torch.ones(3))
    assert progress.compile_seconds == seconds, "the graph is there"


@pytest.mark.parametrize(
    ("settings", "on_gpu", "on_cpu"),
    [
        (SFT, True, False),
        ({**SFT, "train.compile": True}, True, True),
        ({**SFT, "train.compile": False}, False, False),
        ({**SFT, "policy.parallelism.tp_size": 2}, False, False),
        ({**GRPO, "policy.lora": {"r": 4}}, False, False),
        ({**SFT, "policy.lora": {"r": 4}}, True, False),
        ({**SFT, "policy.is_diffusers": True, "policy.parallelism.cp_size": 2}, False, False),
    ],
)
def test_what_is_left_out_is_compiled_on_a_gpu_where_nothing_excludes_it(
    settings: dict[str, Any], on_gpu: bool, on_cpu: bool
) -> None:
    config = recipe(settings)
    assert (config.should_compile_blocks("cuda"), config.should_compile_blocks("cpu")) == (on_gpu, on_cpu)


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["train.compile=true"], r"train.compile needs a C\+\+ compiler \(g\+\+ was not found\) on .*compile = false$"),
        (["train.optm_name='AdamW8bit'"], r"train.optm_name = 'AdamW8bit' needs a C\+\+ compiler .*another optimizer$"),
        (["train.compile=false"], ""),
        ([], ""),
    ],
)
def test_what_this_machine_cannot_compile_is_refused_before_any_stage(
    overrides: list[str], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path, *overrides)
    check_inputs(pipeline)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    machine_properties._measure_machine.cache_clear()
    try:
        with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
            check_inputs(pipeline)
    finally:
        machine_properties._measure_machine.cache_clear()


def test_a_machine_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_properties.measure_machine().lacks == ""
    monkeypatch.setenv("CXX", "/nowhere/c++ -O2")
    assert machine_properties.measure_machine().lacks == "a C++ compiler (/nowhere/c++ -O2 was not found)"
    monkeypatch.setenv("CXX", f"{sys.executable} -O2")
    assert machine_properties.measure_machine().lacks == ""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert machine_properties.measure_machine().lacks == f"Python's headers ({tmp_path}/Python.h was not found)"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine_properties._find_missing_compiler(has_gpus=True) == "a C compiler (gcc was not found)"
