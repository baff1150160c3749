"""Worker program of stage kind `validate`: evaluate one exported model on held-out rows."""

from __future__ import annotations

import json
from contextlib import ExitStack

import torch

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.data.media_rows import MediaRows
from cosmos_core.data.prepared import Prompts
from cosmos_core.errors import Preempted
from cosmos_core.observe.gallery import FOLDER as DRAWINGS
from cosmos_core.parallel.mesh import is_first
from cosmos_core.run.stage import Stage
from cosmos_core.train.diffusion_setup import DrawnPrompts, open_drawn
from cosmos_core.train.generation import Generation
from cosmos_core.train.measure import (
    SAMPLES,
    Completions,
    held_out,
    learned_held_out,
    most_tokens,
    prepared_folder,
    reward_weights,
    row_metrics,
)
from cosmos_core.train.reference import handed_on, is_compared
from cosmos_core.train.setup import open_trainer
from cosmos_core.train.stop import StopAsked
from cosmos_core.types import Outcome

METRICS = "metrics.json"


def run(stage: Stage) -> Outcome:
    """Evaluate the model on its held-out rows, and write `metrics.json`."""
    rows = held_out(prepared_folder(stage))
    trainer = open_trainer(stage)
    with torch.no_grad():
        trainer.adapter.prove()
    stage.progress.phase("validate")
    outputs = [METRICS]
    drawn = rows
    if isinstance(rows, MediaRows):
        drawn = open_drawn(prepared_folder(stage), "validation", stage.recipe)
        rows = drawn if stage.recipe.train.train_policy.has_rollouts else rows
    metrics: dict[str, float] = {}
    if isinstance(drawn, Prompts | DrawnPrompts):
        with ExitStack() as stack:
            generation = Generation(stage, trainer, stack)
            score = generation.score(reward_weights(stage.recipe), most_tokens(stage.recipe))
            try:
                metrics = Completions(drawn, generation.engine, score, stage).measure(0)
            except StopAsked:
                raise Preempted("stopped while it measured; nothing saved") from None
        outputs += [name for name in (SAMPLES, DRAWINGS) if (stage.path / name).exists()]
    if isinstance(rows, Prompts) and (learned := learned_held_out(prepared_folder(stage))) is not None:
        rows = learned
    if not isinstance(rows, Prompts | DrawnPrompts):
        reference = handed_on(stage, rows, "validation") if is_compared(rows) else None
        algorithm = make_algorithm(stage.recipe)
        metrics |= row_metrics(trainer, algorithm, rows, reference, stage.recipe, stage.progress)
    stage.metrics.log(0, metrics)
    if is_first():
        (stage.path / METRICS).write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return Outcome(outputs=tuple(outputs), metrics=metrics)
