"""Kind `gate`: go on only if metrics are good enough; compared with a number or with what is published now."""

from __future__ import annotations

from cosmos_core.config.conditions import Condition, parse_condition
from cosmos_core.errors import ConfigError, GateFailed
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome, StageKind
from cosmos_core.upload.base import target_of

KIND = StageKind(name="gate", entry="tasks.gate:run", result_version=1, in_worker=False, is_reusable=False)


def run(stage: Stage) -> Outcome:
    """Check every condition against the metrics of the stages in `after`.

    Raises:
        GateFailed: one does not hold; the message has the value.
        ConfigError: a metric that no stage in `after` reported.
    """
    metrics = {key: value for result in stage.inputs.values() for key, value in result["metrics"].items()}
    # `STAGE.METRIC` tells two stages apart that report the same figure.
    named = {
        f"{name}.{key}": value for name, result in stage.inputs.items() for key, value in result["metrics"].items()
    }
    conditions = [parse_condition(text) for text in stage.config.require]
    record = target_of(stage.config.target).published() if stage.config.target else None
    published: dict[str, float] | None = record["metrics"] if record else None
    report: list[JsonValue] = []
    failed = []
    for condition in conditions:
        value = _value(condition, metrics | named, stage)
        passed = condition.holds(value, published)
        bound = (published or {}).get(condition.metric) if condition.needs_published else float(condition.bound)
        report.append({"condition": condition.text, "value": value, "bound": bound, "passed": passed})
        if not passed:
            failed.append(f"{condition.text} does not hold: {condition.metric} = {value:.6g}, bound {bound}")
    if failed:
        raise GateFailed(f"gate {stage.name!r}: {'; '.join(failed)}")
    return Outcome(metrics=metrics, info={"conditions": report})


def _value(condition: Condition, metrics: dict[str, float], stage: Stage) -> float:
    if condition.metric not in metrics:
        raise ConfigError(
            f"gate {stage.name!r}: no stage in its `after` reported {condition.metric!r}; "
            f"reported: {', '.join(sorted(metrics)) or 'nothing'}"
        )
    return metrics[condition.metric]
