"""When torch compiles: what is told of it, and on which devices a recipe asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.models.compiled import watch_compiling
from cosmos_core.run.progress import Progress, read_progress
from tests.effects.change import GRPO, SFT, recipe


def test_compiling_is_a_phase_with_its_time_and_the_phase_before_it_goes_on(tmp_path: Path) -> None:
    progress, seen = Progress(tmp_path / "progress.json"), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        position = read_progress(tmp_path)
        assert position is not None
        seen.append(position.phase)
        return graph.forward

    watch_compiling(Progress(tmp_path / "another.json"))
    watch_compiling(progress)  # in place of the other
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
    assert (config.compiles_on("cuda"), config.compiles_on("cpu")) == (on_gpu, on_cpu)
