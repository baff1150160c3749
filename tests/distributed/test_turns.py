"""Conversations on several ranks: the ranks of one engine hear the same, and none waits too briefly for slow tools and
rewards."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cosmos_core.models.hf import load_model
from cosmos_core.parallel import mesh
from cosmos_core.parallel.mesh import all_gather_object
from cosmos_core.rollout.base import generate
from cosmos_core.rollout.registry import DataParallelEngine
from cosmos_core.rollout.turns import MultiTurnEngine
from cosmos_core.train.measure import score_on_first_rank
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup
from tests.local_ranks import LocalGroup
from tests.unit.data_tokenizers import CHATML
from tests.unit.test_turns import ASKED, Scripted, call, engine_settings
from tests.unit.tiny_model import save_tiny_model

TOOLS = '''
import os, time
from cosmos_core.tools.base import tool

@tool
def add(a: int, b: int) -> int:
    """Return the number of the process.

    Args:
        a: Seconds to wait.
        b: Nothing.
    """
    time.sleep(a)
    return os.getpid()
'''


def converse(folder: Path, ranks_per_engine: int, seconds: int, stop: threading.Event) -> tuple[list[Any], int]:
    """Return what the tools told each rank, and the number of heartbeats of the first rank."""
    beats: list[None] = []
    model = load_model(str(folder), dtype=torch.float32)
    settings = engine_settings(folder, model, 1000, tools=[f"{folder}/tools.py:add"], tool_timeout_seconds=60)
    settings = replace(settings, beat=lambda: beats.append(None))
    asks = [call("add", a=seconds * dist.get_rank(), b=0) + "<|im_end|>", "Done.<|im_end|>"]
    scripted: Any = Scripted(settings.tokenizer, asks)
    scripted.ranks_per_engine = ranks_per_engine
    turns = MultiTurnEngine(scripted, settings)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=8))
    asked_ids = tuple(settings.tokenizer(ASKED)["input_ids"])
    prompts = [Prompt(i, asked_ids, ASKED, "") for i in range(2 // ranks_per_engine)]
    engine = DataParallelEngine(turns) if ranks_per_engine == 1 else turns
    groups = generate(engine, prompts, Sampling(max_tokens=400, seed=5), step=0)
    own = [each.turns[1].text for group in groups for each in group.completions]
    turns.close()
    return all_gather_object(own), len(beats)


def test_ranks_of_one_engine_continue_with_the_same_results(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "tools.py").write_text(TOOLS)
    (first, second), _ = LocalGroup(2).run(partial(converse, folder, 2, 0))
    assert first == second and first[0].isdigit()
    (first, second), num_beats = LocalGroup(2).run(partial(converse, folder, 1, 12))
    assert first == second and len(set(first)) == 2 and num_beats >= 3


def score_slowly(stop: threading.Event) -> list[list[float | None]]:
    """Return the scores that each rank hears of."""

    def score(groups: Sequence[Group]) -> list[ScoredGroup]:
        time.sleep(8)
        return [ScoredGroup(group, (Score(0.5),)) for group in groups]

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    [scored] = score_on_first_rank(score)([Group(Prompt(0, (), "", ""), (Completion((), "stop", ""),), 0)])
    return all_gather_object([each.value for each in scored.scores])


def test_ranks_wait_for_rewards_that_take_longer_than_a_collective_may() -> None:
    assert LocalGroup(2).run(score_slowly) == [[0.5], [0.5]]


def test_a_rank_that_waits_hears_the_first_heartbeat_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    polls: list[float] = []
    beats: list[int] = []

    def sleep(seconds: float) -> None:
        """The other rank lives at the first poll, and arrives at the third."""
        polls.append(seconds)
        if len(polls) == 1:
            mesh.send_heartbeat(lambda: None)
        elif len(polls) == 3:
            store.add(mesh._NUM_ARRIVALS_KEY, 1)

    monkeypatch.setattr(mesh, "_get_default_store", lambda: store)
    monkeypatch.setattr(mesh, "is_single_rank", lambda: False)
    monkeypatch.setattr(mesh, "num_ranks", lambda: 2)
    monkeypatch.setattr(mesh, "time", SimpleNamespace(sleep=sleep))
    mesh.wait_for_ranks(lambda: beats.append(len(polls)))
    assert (beats, len(polls)) == ([1], 3)
