"""Conversion of lm-eval's results to metrics, to a table with one row per item, and to a report of the tasks' settings.

lm-eval names a metric by the filter that extracts the final result from the response. The first filter of a task is
omitted from metric names, so gsm8k has `exact_match` (of `strict-match`) and `exact_match_flexible-extract`.
"""

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

import pyarrow as pa

from cosmos_core.types import JsonValue

_STDERR = "_stderr"
_TASK_SETTINGS = ("dataset_path", "dataset_name", "test_split", "output_type", "generation_kwargs", "filter_list")
_TEXTS = ("doc_hash", "prompt_hash", "response")


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of tasks and groups as `evaluation/TASK/METRIC`, and standard errors that lm-eval
    returns as `evaluation/TASK/METRIC_stderr`."""
    metrics: dict[str, float] = {}
    for task, values in results.items():
        first = next((key.partition(",")[2] for key in values if "," in key), "")
        for key, value in values.items():
            name, comma, filter_ = key.partition(",")
            if comma and isinstance(value, Real):
                metric_name = _qualified_metric(name.removesuffix(_STDERR), filter_, first)
                suffix = _STDERR if name.endswith(_STDERR) else ""
                metrics[f"evaluation/{task}/{metric_name}{suffix}"] = float(value)
    return metrics


def item_table(samples: Mapping[str, list[dict[str, Any]]]) -> pa.Table:
    """Return a table with the columns task, doc_id, doc_hash, prompt_hash, response and one column for each metric of
    any task, with null if the row's task lacks the metric.

    A response is the generated text or, for choices, a JSON list of `[log-probability, is greedy]`.
    """
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for task, task_samples in samples.items():
        for sample in task_samples:
            key = (task, sample["doc_id"])
            row = rows.setdefault(key, {name: sample.get(name) or _response(sample) for name in _TEXTS})
            for metric in sample["metrics"]:
                if isinstance(sample[metric], Real):
                    row[_qualified_metric(metric, sample["filter"], task_samples[0]["filter"])] = float(sample[metric])
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    return pa.table({
        "task": pa.array([task for task, _ in rows], pa.string()),
        "doc_id": pa.array([doc_id for _, doc_id in rows], pa.int64()),
        **{
            name: pa.array([row.get(name) for row in rows.values()], pa.string() if name in _TEXTS else pa.float64())
            for name in columns
        },
    }).sort_by([("task", "ascending"), ("doc_id", "ascending")])  # fmt: skip


def texts_of(samples: Mapping[str, list[dict[str, Any]]], max_rows: int) -> list[dict[str, JsonValue]]:
    """Return the first `max_rows` generated texts of each task, as lines of `samples.jsonl`: prompt, reference,
    completion and, as reward, the first metric that is a number."""
    lines: list[dict[str, JsonValue]] = []
    for task_samples in samples.values():
        texts = [each for each in task_samples if each["filter"] == task_samples[0]["filter"] and _is_text(each)]
        for sample in texts[:max_rows]:
            values = (sample[metric] for metric in sample["metrics"])
            reward = next((float(value) for value in values if isinstance(value, Real)), None)
            prompt = str(next(iter(sample["arguments"]))[0])
            line = {"prompt": prompt, "reference": str(sample["target"]), "completion": sample["resps"][0][0]}
            lines.append({"step": 0, **line, "reward": reward})
    return lines


def describe_tasks(results: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return facts about each task by its name: version, number of items and few-shot examples, generation settings."""
    facts: dict[str, JsonValue] = {}
    for task, config in results["configs"].items():
        settings = {name: config[name] for name in _TASK_SETTINGS if config.get(name) is not None}
        run_settings = {"version": results["versions"].get(task), "num_fewshot": results["n-shot"].get(task)}
        items = results["n-samples"].get(task, {}).get("effective")
        facts[task] = json.loads(json.dumps(run_settings | {"items": items} | settings, default=str))
    return facts


def _qualified_metric(metric: str, filter_: str, first: str) -> str:
    return metric if filter_ == first else f"{metric}_{filter_}"


def _response(sample: Mapping[str, Any]) -> str:
    responses = [each[0] for each in sample["resps"]]
    return responses[0] if _is_text(sample) else json.dumps(responses, default=str)


def _is_text(sample: Mapping[str, Any]) -> bool:
    return len(sample["resps"]) == 1 and isinstance(sample["resps"][0][0], str)
