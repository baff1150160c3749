"""Worker program of stage kind `validate`: evaluate one exported model on held-out rows."""

import json
from contextlib import ExitStack

import torch

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.data.kinds.base import VALIDATION
from cosmos_core.data.prepared import check_held_out, open_held_out
from cosmos_core.errors import Preempted
from cosmos_core.observe.gallery import FOLDER as DRAWINGS
from cosmos_core.parallel.mesh import is_first
from cosmos_core.run.stage import Stage
from cosmos_core.train.generation import Generation
from cosmos_core.train.measure import (
    SAMPLES,
    Completions,
    max_held_out_tokens,
    prepared_folder,
    reward_weights,
    row_metrics,
)
from cosmos_core.train.reference import load_earlier_reference
from cosmos_core.train.setup import open_trainer
from cosmos_core.train.stop import StopRequested
from cosmos_core.types import Outcome

METRICS = "metrics.json"


def run(stage: Stage) -> Outcome:
    """Evaluate the model on its held-out rows, and write `metrics.json`."""
    recipe, folder = stage.recipe, prepared_folder(stage)
    check_held_out(folder)
    trainer = open_trainer(stage)
    rows, prompts = open_held_out(folder, recipe.train.train_policy, recipe.policy, trainer.adapter)
    with torch.no_grad():
        trainer.adapter.check_parallel_plan()
    stage.progress.phase("validate")
    outputs = [METRICS]
    metrics: dict[str, float] = {}
    try:
        if prompts is not None:
            with ExitStack() as stack:
                generation = Generation(stage, trainer, stack)
                score = generation.score(reward_weights(recipe), max_held_out_tokens(recipe))
                metrics = Completions(prompts, generation.engine, score, stage).measure(0)
            outputs += [name for name in (SAMPLES, DRAWINGS) if (stage.path / name).exists()]
        if rows is not None:
            rows.reference = load_earlier_reference(stage, rows, VALIDATION) if rows.has_reference_pair else None
            metrics |= row_metrics(stage, trainer, make_algorithm(recipe), rows)
    except StopRequested:
        raise Preempted("stopped while it measured; nothing saved") from None
    stage.metrics.log(0, metrics)
    if is_first():
        (stage.path / METRICS).write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return Outcome(outputs=tuple(outputs), metrics=metrics)
