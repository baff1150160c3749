"""Keys of the rollout engine: which one it is, and what vLLM is started with; vLLM itself is not."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.rollout.base import EngineSettings
from cosmos_core.rollout.registry import make_engine
from cosmos_core.train import setup
from cosmos_core.train.generation import RolloutSetup
from cosmos_core.train.rollout_feed import make_training_sampling
from tests.effects.change import GRPO, Change, changes, difference, recipe
from tests.unit.test_rollout_groups import Recording, scored
from tests.unit.tiny_model import save_tiny_model


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each vLLM that is started on what looks like a GPU."""
    found: list[dict[str, Any]] = []
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.__dict__["LLM"] = lambda **arguments: found.append(arguments)
    platforms.__dict__["current_platform"] = None
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return found


@changes(Change("rollout.probe_interval", 3, GRPO))
def test_it_changes_how_often_the_engine_is_compared_with_the_trainer(change: Change) -> None:
    adapter = SimpleNamespace(model=None, meta_copy=None)

    def interval(recipe: Recipe) -> int:
        stage: Any = SimpleNamespace(recipe=recipe)
        trainer: Any = SimpleNamespace(adapter=adapter)
        generation = RolloutSetup(stage, trainer, ExitStack())
        generation.__dict__["engine"] = Recording()
        return generation._weight_publisher.probe_interval

    assert (interval(change.before), interval(change.after)) == (50, 3)


@changes(Change("rollout.stop_on_alarm", True, GRPO))
def test_it_changes_what_an_alarm_does(change: Change) -> None:
    metrics = {"rollout/logprob_difference_mean": 100.0}

    def watch(recipe: Recipe) -> dict[str, float]:
        should_stop = recipe.rollout.stop_on_alarm
        trainer: Any = SimpleNamespace(has_dropout=False)
        sampling = make_training_sampling(recipe)
        return setup._make_drift_check(recipe.train, sampling, trainer, should_stop=should_stop)(1, metrics)

    assert watch(change.before) == {"watch/alarm": 1.0}
    with pytest.raises(StageFailed, match="differ by 100 nats per token"):
        watch(change.after)


@changes(Change("train.transfer_dtype", "bfloat16", {**GRPO, "train.param_dtype": "float32"}))
def test_it_changes_the_dtype_in_which_weights_travel(change: Change, model: Path) -> None:
    def taken(recipe: Recipe) -> tuple[set[torch.dtype], float]:
        engine: Any = Recording()
        engine.model = load_model(str(model), dtype=torch.float32)
        stage: Any = SimpleNamespace(recipe=recipe)
        trainer: Any = SimpleNamespace(adapter=SimpleNamespace(model=engine.model, meta_copy=None))
        generation = RolloutSetup(stage, trainer, ExitStack())
        generation.__dict__["engine"] = engine
        generation._compute_trainer_logprobs = lambda ids: scored(engine.model, ids)  # type: ignore[method-assign]
        sent = generation.publish(0)["sync/bytes"]
        return {tensor.dtype for tensor in engine.taken.values()}, sent

    (before, more), (after, less) = taken(change.before), taken(change.after)
    assert (before, after) == ({torch.float32}, {torch.bfloat16}) and more == 2 * less
    assert taken(recipe(GRPO)) == (after, less), "engines compute in bfloat16"


@changes(
    (Change("rollout.backend", "hf", GRPO), None),
    (Change("rollout.enforce_eager", True, GRPO), {"enforce_eager": True}),
    (Change("rollout.gpu_memory_utilization", 0.3, GRPO), {"gpu_memory_utilization": 0.3}),
    (Change("rollout.parallelism.tp_size", 2, GRPO), {"tensor_parallel_size": 2}),
    (Change("rollout.quantization", "fp8", GRPO), {"quantization": "fp8"}),
    (Change("rollout.n_generation_mini_batch", 4, {**GRPO, "rollout.batch_size": 3}), {"max_num_seqs": 12}),
)
def test_it_changes_the_engine(
    change: Change, expected: dict[str, Any] | None, started: list[dict[str, Any]], model: Path
) -> None:
    folder = str(model)
    loaded, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)

    def name(recipe: Recipe) -> str:
        return make_engine(EngineSettings(loaded, tokenizer, folder, recipe.rollout, 64, torch.float32)).name

    names = [name(change.before), name(change.after)]
    if expected is None:
        assert names == ["vllm", "hf"] and len(started) == 1
    else:
        assert difference(*started) == expected


@pytest.mark.parametrize("has_it", [True, False])
def test_mxfp4_is_for_checkpoints_that_have_it(has_it: bool, started: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    model, tokenizer = load_model(str(folder), dtype=torch.float32), load_tokenizer(str(folder))
    if has_it:
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = {"quant_method": "mxfp4"}
        (folder / "config.json").write_text(json.dumps(values))
    rollout = recipe({**GRPO, "rollout.quantization": "mxfp4"}).rollout
    with nullcontext() if has_it else pytest.raises(ConfigError, match=r"is a format of checkpoints, which .* has not"):
        make_engine(EngineSettings(model, tokenizer, str(folder), rollout, 64, torch.float32))
    assert [arguments.get("quantization") for arguments in started] == [None] * has_it  # its config.json says it
