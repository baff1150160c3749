"""Stage kind `select`: choose the branch of a sweep with the best metric, and pass on its model and metrics."""

import math
from pathlib import Path

from cosmos_core.errors import ConfigError, GateFailed
from cosmos_core.run.files import link_or_copy, list_files_below
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome, StageKind

KIND = StageKind(
    name="select",
    entry="tasks.stages.select:run",
    result_version=2,
    makes="model",
    selects_branch=True,
    required_keys={"sweep": '{ metric = "validation/accuracy" }'},
    in_worker=False,
    is_numeric=False,
    forwards_metrics=True,
)


def run(stage: Stage) -> Outcome:
    """Compare the branches of a sweep, and link the model of the best branch into the folder of this stage, so that the
    model is kept when the branches are removed. The result does not mention the other branches, so that later stages
    keep their fingerprints while the best branch stays the same. Raises `ConfigError` if a branch did not report the
    metric, and `GateFailed` if the metric is NaN in all branches."""
    sweep = stage.config.sweep
    assert sweep is not None  # a select stage without the key `sweep` is refused earlier
    metrics_by_branch: dict[tuple[str, ...], dict[str, float]] = {}
    for branch_stages in (branch.stages for branch in sweep.branches):
        metrics = {key: value for name in branch_stages for key, value in stage.inputs[name]["metrics"].items()}
        if sweep.metric not in metrics:
            raise ConfigError(
                f"stage {stage.name!r}: branch {branch_stages[0]!r} did not report {sweep.metric!r}; "
                f"reported: {', '.join(sorted(metrics)) or 'nothing'}"
                + "".join(stage.inputs[name].get("hint", "") for name in branch_stages)
            )
        metrics_by_branch[branch_stages] = metrics
    metric_by_branch = {branch: metrics[sweep.metric] for branch, metrics in metrics_by_branch.items()}
    comparable_branches = [branch for branch, value in metric_by_branch.items() if not math.isnan(value)]
    if not comparable_branches:
        raise GateFailed(
            f"stage {stage.name!r}: {sweep.metric} is not a number in any of {len(metric_by_branch)} branches"
        )
    max_or_min = max if sweep.mode == "max" else min
    best_branch = max_or_min(comparable_branches, key=lambda branch: metric_by_branch[branch])
    model_stages = [name for name in best_branch if stage.inputs[name]["info"].get("model")]
    source_result = stage.inputs[model_stages[-1] if model_stages else best_branch[-1]]
    # `data` is left out: it names a data folder of the source stage, and only the model is linked into this stage.
    branch_info = {key: value for key, value in source_result["info"].items() if key != "data"}
    output_paths: tuple[str, ...] = ()
    if model_stages and "://" not in str(branch_info["model"]):
        source_path = Path(source_result["path"]) / str(branch_info["model"])
        if not source_path.resolve().is_relative_to(Path(source_result["path"]).resolve()):
            branch_info["model"] = "model"
        source_paths = {str(branch_info["model"]): source_path}
        source_paths |= {path: Path(source_result["path"]) / path for path in branch_info.get("formats", {}).values()}
        output_paths = tuple(source_paths)
        for output_path, source_path in source_paths.items():
            for file in list_files_below(source_path):
                link_path = stage.path / output_path / file.relative_to(source_path)
                link_path.parent.mkdir(parents=True, exist_ok=True)
                link_path.unlink(missing_ok=True)
                link_or_copy(file, link_path)
    branch_info["chosen"] = Path(source_result["path"]).name
    return Outcome(outputs=output_paths, metrics=metrics_by_branch[best_branch], info=branch_info)
