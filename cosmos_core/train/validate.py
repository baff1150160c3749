"""Worker program of stage kind `validate`: evaluate one exported model on held-out rows."""

from contextlib import ExitStack
from pathlib import Path

import torch

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.data.kinds.base import VALIDATION_SPLIT
from cosmos_core.data.prepared import open_held_out, require_held_out_rows
from cosmos_core.errors import Preempted
from cosmos_core.observe.gallery import SAMPLES_FOLDER as GALLERY_FOLDER
from cosmos_core.parallel.mesh import is_first_rank
from cosmos_core.run.files import write_json
from cosmos_core.run.stage import Stage
from cosmos_core.train import measure
from cosmos_core.train.generation import RolloutSetup
from cosmos_core.train.reference import load_earlier_reference
from cosmos_core.train.setup import open_trainer
from cosmos_core.train.stop import StopRequested
from cosmos_core.types import Outcome

METRICS_FILE = "metrics.json"


def run(stage: Stage) -> Outcome:
    """Evaluate the model of a stage on held-out rows or on completions of held-out prompts, and write
    `metrics.json`."""
    recipe, data_folder, algorithm_config = stage.recipe, stage.prepared_folder, stage.recipe.train.train_policy
    require_held_out_rows(data_folder)
    trainer = open_trainer(stage)
    rows, prompts = open_held_out(data_folder, algorithm_config, recipe.policy, trainer.adapter)
    with torch.no_grad():
        trainer.adapter.check_parallel_plan()
    stage.progress.phase("validate")
    output_names = [METRICS_FILE]
    metrics: dict[str, float] = {}
    try:
        if prompts is not None:
            with ExitStack() as exit_stack:
                rollout_setup = RolloutSetup(stage, trainer, exit_stack)
                completion_settings, engine = measure.make_completion_settings(recipe), rollout_setup.engine
                scorer = rollout_setup.make_scorer(completion_settings.rewards, completion_settings.sampling.max_tokens)
                metrics = measure.CompletionValidation(prompts, engine, scorer, completion_settings, stage).validate(0)
            output_names += [name for name in (measure.SAMPLES_FILE, GALLERY_FOLDER) if (stage.path / name).exists()]
        if rows is not None:
            if rows.has_sample_pairs and algorithm_config.saves_reference_logprobs:
                input_folders = [Path(result["path"]) for result in stage.inputs.values()]
                rows.reference_logprobs = load_earlier_reference(input_folders, rows, VALIDATION_SPLIT)
            metrics |= measure.row_metrics(stage, trainer, make_algorithm(recipe), rows, recipe.held_out_rows_per_pass)
    except StopRequested:
        raise Preempted("stopped while it measured; nothing saved") from None
    stage.metrics.log(0, metrics)
    if is_first_rank():
        write_json(stage.path / METRICS_FILE, metrics)
    return Outcome(outputs=tuple(output_names), metrics=metrics)
