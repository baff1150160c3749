"""Stage kind `gate`: stop the run unless metrics are good enough compared with a number or the published model."""

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_core.config.conditions import MetricCondition, parse_condition, significance_margin
from cosmos_core.errors import ConfigError, DamagedRecord, GateFailed
from cosmos_core.run.files import write_json
from cosmos_core.run.paired_items import (
    PairedDifferences,
    compare_items,
    compute_sample_size,
    correct_p_values,
    find_measured_item_folders,
    find_published_item_folders,
)
from cosmos_core.run.stage import CONDITIONS_FILE, Stage
from cosmos_core.types import JsonValue, Outcome, StageKind
from cosmos_core.upload.base import open_target

KIND = StageKind(
    name="gate",
    entry="tasks.stages.gate:run",
    result_version=1,
    required_keys={"require": '["METRIC >= NUMBER"]'},
    allowed_keys=("require", "target", "confidence"),
    in_worker=False,
    is_reusable=False,
    forwards_metrics=True,
)


def run(stage: Stage) -> Outcome:
    """Check every condition of the gate against the metrics of the stages in `after`. Raises `GateFailed` with the
    measured value if a condition does not hold, and `ConfigError` if no stage in `after` reported its metric."""
    conditions = list(map(parse_condition, stage.config.require))
    metrics = {key: value for result in stage.inputs.values() for key, value in result["metrics"].items()}
    reads_published_record = stage.config.target and any(each.needs_published_model for each in conditions)
    latest_publication_record = _read_published_record(stage, metrics) if reads_published_record else None
    # Add metrics of stages that conditions name as `STAGE.METRIC`, since several stages may report the same metric.
    for name in {each.metric.partition(".")[0] for each in conditions if each.needs_published_model} & {*stage.inputs}:
        metrics |= {f"{name}.{key}": value for key, value in stage.inputs[name]["metrics"].items()}
    condition_verdicts: list[dict[str, Any]] = []
    failure_messages: list[str] = []
    for condition in conditions:
        published_record = latest_publication_record and _select_stage_metrics(latest_publication_record, condition)
        published_metrics: dict[str, float] = (published_record or {}).get("metrics", {})
        compared_metrics = None if published_record is None else published_metrics
        verdicts: list[dict[str, Any]] = []
        for metric_name, stage_metrics in _find_measured_metrics(condition, stage, compared_metrics):
            paired_differences, noise_margin = None, 0.0
            if published_record is not None and stage.config.confidence and condition.allows_for_noise:
                paired_differences = _compare_paired_items(stage, metric_name, stage_metrics, published_record)
                if not paired_differences:
                    noise_margin = _compute_noise_margin(
                        stage, condition, metric_name, stage_metrics, published_metrics
                    )
            measured_value, bound = stage_metrics[metric_name], condition.threshold(published_metrics.get(metric_name))
            verdict: dict[str, Any] = {"condition": condition.text, "value": measured_value, "bound": bound}
            verdict["passed"] = condition.is_satisfied(measured_value, bound, noise_margin)
            verdict |= {"metric": metric_name} if "*" in condition.metric else {}
            verdict |= {"noise": noise_margin} if noise_margin else {}
            if paired_differences is not None and not math.isnan(measured_value):
                verdict |= _test_item_differences(condition, paired_differences, stage.config.confidence)
            verdicts.append(verdict)
        _add_corrected_p_values(verdicts)
        failure_messages += [_format_refusal(condition, verdict) for verdict in verdicts if not verdict["passed"]]
        condition_verdicts += verdicts
    stage.path.mkdir(parents=True, exist_ok=True)
    write_json(stage.path / CONDITIONS_FILE, condition_verdicts)  # write it also for a refusal, which the report shows
    if failure_messages:
        raise GateFailed(f"gate {stage.name!r}: {'; '.join(failure_messages)}")
    return Outcome(metrics=metrics, info={"conditions": [*condition_verdicts]})


def _read_published_record(stage: Stage, metrics: dict[str, float]) -> dict[str, Any] | None:
    """Return the record of the published model; None if nothing was published. If this run has published the measured
    model, return the record of the version before it, so that a resumed run does not compare the model with itself."""
    publication_target: Any = open_target(stage.config.target)
    record: dict[str, Any] | None = publication_target.published()
    if not hasattr(publication_target, "record_of"):
        # A user-defined target without `record_of` gives no access to earlier versions, so use the current record.
        return record
    earlier_versions = [*publication_target.history()][:-1]
    metric_texts = {*map(repr, metrics.items())}  # compare metrics as text, because NaN is not equal to NaN
    while record and record.get("run_id") == stage.run_path.name:
        if not metric_texts.issubset(map(repr, record["metrics"].items())):
            break
        if not earlier_versions:
            return None
        with suppress(DamagedRecord):
            # Skip a version whose record is damaged or was removed, and take the version before it.
            record = publication_target.record_of(earlier_versions.pop())
    return record


def _select_stage_metrics(published_record: dict[str, Any], condition: MetricCondition) -> dict[str, Any]:
    """Return the record of the published model, in whose metrics those of the stage that a condition `STAGE.METRIC`
    names replace metrics of the same name from other stages; unchanged if the record has no metrics of this stage."""
    metrics, prefix = published_record.get("metrics", {}), f"{condition.metric.partition('.')[0]}."
    stage_metrics = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return published_record | {"metrics": metrics | stage_metrics}


def _test_item_differences(
    condition: MetricCondition, paired_differences: PairedDifferences, confidence: float
) -> dict[str, JsonValue]:
    """Test a condition of a gate on the differences between the new and the published model for each item of a
    benchmark. Return as `passed` whether the condition holds, and as `paired` statistics for the report of the gate."""
    improvement_sign = 1 if condition.operator.startswith(">") else -1
    item_differences = tuple(improvement_sign * each for each in paired_differences.item_differences)
    signed_differences = replace(paired_differences, item_differences=item_differences)
    p_value = signed_differences.p_value(improvement_sign * condition.published_offset)
    statistics = paired_differences.summarize(confidence)
    measured_improvement = (paired_differences.mean - condition.published_offset) * improvement_sign
    num_needed_items = compute_sample_size(statistics["items"], statistics["detectable"], measured_improvement)
    return {
        "passed": p_value <= 1 - confidence,
        "paired": statistics | {"p_value": p_value, "needed": num_needed_items},
    }


def _add_corrected_p_values(verdicts: list[dict[str, Any]]) -> None:
    """Add p-values with Holm's correction to the comparisons of one condition if it compares several benchmarks. The
    report uses them to show which benchmarks differ; the gate does not, because every benchmark has to pass."""
    paired_statistics = [verdict["paired"] for verdict in verdicts if "paired" in verdict]
    if len(paired_statistics) > 1:
        corrected_p_values = correct_p_values([item_comparison["p_value"] for item_comparison in paired_statistics])
        for item_comparison, corrected_p_value in zip(paired_statistics, corrected_p_values, strict=True):
            item_comparison["p_holm"] = corrected_p_value


def _format_refusal(condition: MetricCondition, verdict: dict[str, Any]) -> str:
    bound_text = "" if verdict["bound"] is None else f", bound {verdict['bound']:.6g}"
    uncertainty_text = f", noise {verdict['noise']:.3g}" if "noise" in verdict else ""
    if stats := verdict.get("paired"):
        uncertainty_text = (
            f"; {stats['difference']:+.3g} ({stats['low']:+.3g} .. {stats['high']:+.3g}) on {stats['items']} "
            f"items, of which {stats['better']} are better and {stats['worse']} worse, p = {stats['p_value']:.3g}"
        )
        uncertainty_text += f" ({stats['p_holm']:.3g} with Holm's correction)" if "p_holm" in stats else ""
        uncertainty_text += f"; as many items show a difference of {stats['detectable']:.2g}"
        uncertainty_text += f", this one needs {stats['needed']:,} items" if stats["needed"] else ""
    metric_name = verdict.get("metric", condition.metric)
    return f"{condition.text} does not hold: {metric_name} = {verdict['value']:.6g}{bound_text}{uncertainty_text}"


def _compare_paired_items(
    stage: Stage, name: str, measured_metrics: dict[str, float], record: dict[str, Any]
) -> PairedDifferences | None:
    """Compare the measured model with the published model on each item of a benchmark. Return None if the run of the
    published model is not on this machine, if it measured other items, or if the metric is not the mean over the items:
    for a perplexity, for example, the items are log-likelihoods."""
    stage_path = next(result.get("path") for result in stage.inputs.values() if result["metrics"] is measured_metrics)
    published_value = record["metrics"][name]
    measured_folders = [*find_measured_item_folders(Path(stage_path or "-"), measured_metrics)]
    published_folders = find_published_item_folders(record, name, [folder.name for folder in measured_folders])
    for published_folder, measured_folder in itertools.product(published_folders, measured_folders):
        if paired_differences := compare_items(name, measured_folder, published_folder):
            # The condition is negated, so that a difference of NaN counts as equal.
            is_mean_of_items = not abs(paired_differences.mean - (measured_metrics[name] - published_value)) > 1e-6
            return paired_differences if is_mean_of_items else None
    return None


def _compute_noise_margin(
    stage: Stage, condition: MetricCondition, name: str, metrics: dict[str, float], published_metrics: dict[str, float]
) -> float:
    """Return the margin by which a metric must differ from that of the published model at the configured confidence.
    Raise ConfigError if no standard error of the metric is known."""
    noise_margin = significance_margin(name, stage.config.confidence, metrics, published_metrics)
    if noise_margin is None:
        raise ConfigError(
            f"gate {stage.name!r}: {condition.text!r} with confidence = {stage.config.confidence:g}: nobody knows how "
            f"exact {name!r} is, here or of what is published; report {name}_stderr, or set confidence = 0"
        )
    return noise_margin


def _find_measured_metrics(
    condition: MetricCondition, stage: Stage, published_metrics: dict[str, float] | None
) -> list[tuple[str, dict[str, float]]]:
    """Return the metrics that a condition matches, as pairs: the name of the metric, and all metrics of the stage that
    reported it. `STAGE.METRIC` selects one of several stages that report the same metric. In a comparison with the
    published model, metrics that the published model does not have are left out."""
    labelled_metrics: dict[str, tuple[str, dict[str, float]]] = {}
    for name, result in stage.inputs.items():
        for metric_name in result["metrics"]:
            labelled_metrics[f"{name}.{metric_name}"] = labelled_metrics[metric_name] = (metric_name, result["metrics"])
    named_metrics = {each[0]: each for label, each in labelled_metrics.items() if condition.matches_metric(label)}
    if not named_metrics:
        reported_metric_names = sorted({metric_name for metric_name, _ in labelled_metrics.values()})
        raise ConfigError(
            f"gate {stage.name!r}: no stage in its `after` reported {condition.metric!r}; "
            f"reported: {', '.join(reported_metric_names) or 'nothing'}"
            + "".join(result.get("hint", "") for result in stage.inputs.values())
        )
    if published_metrics is None or not condition.needs_published_model:
        return list(named_metrics.values())
    comparable_metrics = [
        each for name, each in named_metrics.items() if isinstance(published_metrics.get(name), int | float)
    ]
    if not comparable_metrics:
        metric_choices = " or ".join(map(repr, named_metrics))
        raise ConfigError(
            f"gate {stage.name!r}: {condition.text!r}: what is published has no {metric_choices}; compare with a number"
        )
    return comparable_metrics
