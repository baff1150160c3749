"""The program of kind `validate`: one exported model, apart from any training, on held-out rows."""

from __future__ import annotations

import json

import torch

from cosmos_core.data.prepared import Pairs, Prompts
from cosmos_core.parallel.mesh import is_first
from cosmos_core.run.stage import Stage
from cosmos_core.train.measure import (
    SAMPLES,
    Answers,
    held_out,
    open_rewards,
    pair_figures,
    reward_weights,
    sequence_figures,
)
from cosmos_core.train.reference import handed_on
from cosmos_core.train.setup import open_engine, open_rank, prepared_folder
from cosmos_core.types import Outcome


def run(stage: Stage) -> Outcome:
    """Measure the model on its held-out rows."""
    rows = held_out(prepared_folder(stage))
    rank, tokenizer = open_rank(stage)
    with torch.no_grad():
        rank.prove()
    stage.progress.phase("validate")
    if isinstance(rows, Prompts):
        with (
            open_rewards(stage, reward_weights(stage.recipe)) as score,
            open_engine(stage, rank, tokenizer) as engine,
        ):
            metrics = Answers(rows, engine, score, stage).measure(0)
        outputs: tuple[str, ...] = (SAMPLES,)
    elif isinstance(rows, Pairs):
        metrics = pair_figures(rank, rows, handed_on(stage, rows, "validation"), stage.recipe, stage.progress)
        outputs = ()
    else:
        metrics = sequence_figures(rank, rows, stage.recipe, stage.progress)
        outputs = ()
    stage.metrics.log(0, metrics)
    if is_first():
        (stage.path / "figures.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return Outcome(outputs=(*outputs, "figures.json"), metrics=metrics)
