"""`[logging]`: additional destinations of the metrics. `metrics.jsonl` in the run directory is always written."""

from typing import Annotated

from pydantic import Field, field_validator

from cosmos_core.config.schema.field_metadata import ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import NameOrImportPath, StepCount
from cosmos_core.registry import is_import_path, list_defined_names

CONSOLE_SINK = "console"
"""Name of the metric sink that is the terminal of the command. The terminal shows the metrics of every run, even if
`logger` does not name this sink."""
SINKS_FOLDER = "cosmos_core.observe.sinks"


class LoggingConfig(Table):
    """`[logging]`: settings of metric sinks, and names of runs on Weights & Biases, MLflow and trackio."""

    logger: Annotated[tuple[NameOrImportPath, ...], Field(strict=False), ResultNeutral, ReferenceKind.CODE] = (
        "console",
    )
    """Metric sinks in addition to the run directory: `console`, `wandb` (one run on Weights & Biases for each stage
    with metrics), `mlflow` and `trackio` (likewise), `tensorboard` (event files in the stage's folder `tensorboard/`),
    a user's class, `path/file.py:Class`, with the methods of `MetricSink`, or a function `f(data, step)`."""
    log_completions: Annotated[bool, ResultNeutral] = True
    """Write completions of training with their rewards to `completions/` of the stage, which `cosmos samples` shows:
    per step at most 8 completions of each of 4 prompts, or 4 images or videos of each of 2 prompts, including the best
    and the worst. The newest 1,000 steps are kept, with at most 1 GiB of images and videos."""
    multi_modal_log_interval: Annotated[StepCount | None, ResultNeutral] = None
    """Number of steps between validations whose generated images and videos are sent to Weights & Biases; None: those
    of each validation are sent."""
    project_name: Annotated[str, ResultNeutral] = "cosmos_rl"
    """Name of the project on Weights & Biases and trackio, and of the experiment on MLflow."""
    group_name: Annotated[str | None, ResultNeutral] = None
    """Name of the group on Weights & Biases and trackio, the tag `cosmos.group` on MLflow; None: the stages of one run
    form a group `<experiment_name>-<run id>`."""
    experiment_name: Annotated[str | None, ResultNeutral] = None
    """First part of the name of a run on Weights & Biases, MLflow and trackio, `<experiment_name>-<run id>-<stage>`;
    None: the name of the pipeline."""
    report_mfu: Annotated[bool, ResultNeutral] = False
    """Report the metric `throughput/mfu`: the FLOP/s of train steps relative to those of a large matrix product in
    `param_dtype`, measured on the ranks' devices at the start of the training."""

    @field_validator("logger")
    @classmethod
    def _check_sinks(cls, sink_names: tuple[str, ...]) -> tuple[str, ...]:
        known_sinks = (CONSOLE_SINK, *list_defined_names(SINKS_FOLDER, "Sink"))
        canonical_names = tuple(name if is_import_path(name) else name.lower() for name in sink_names)
        for name in canonical_names:
            if name not in known_sinks and not is_import_path(name):
                raise ValueError(f"logger {name!r} is not known; known: {', '.join(known_sinks)}")
        return canonical_names
