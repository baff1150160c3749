"""Conversion of lm-eval's results to metrics, to a table with one row per item, and to a report of the tasks' settings.

Metric names end with the filter that extracts the result from a response, except for the first filter of a task: gsm8k
has `exact_match` (of `strict-match`) and `exact_match_flexible-extract`.
"""

import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import pyarrow as pa

from cosmos_core.types import JsonValue

_STDERR_SUFFIX = "_stderr"
_METRIC_NUMBER_TYPES = (Real, np.bool_)
_TASK_SETTING_NAMES = ("dataset_path", "dataset_name", "test_split", "output_type", "generation_kwargs", "filter_list")
_ITEM_TEXT_COLUMNS = ("doc_hash", "prompt_hash", "response")
_COLUMN_TYPES = {"task": pa.string(), "doc_id": pa.int64(), **dict.fromkeys(_ITEM_TEXT_COLUMNS, pa.string())}


def convert_metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics in lm-eval's results by the name `evaluation/TASK/METRIC`, and the standard errors by this
    name with the suffix `_stderr`."""
    metrics: dict[str, float] = {}
    for task, task_metrics in results.items():
        default_filter = next((metric_key.partition(",")[2] for metric_key in task_metrics if "," in metric_key), "")
        for metric_key, value in task_metrics.items():
            metric, separator, filter_name = metric_key.partition(",")
            if separator and isinstance(value, Real):
                metric_name = _qualify_metric_name(metric.removesuffix(_STDERR_SUFFIX), filter_name, default_filter)
                stderr_suffix = _STDERR_SUFFIX if metric.endswith(_STDERR_SUFFIX) else ""
                metrics[f"evaluation/{task}/{metric_name}{stderr_suffix}"] = float(value)
    return metrics


def build_item_table(samples: Mapping[str, list[dict[str, Any]]]) -> pa.Table:
    """Return a sorted table with one row per item of an lm-eval task, in the format of `build_table_from_rows`. The
    column `response` has the generated text or, for multiple choice, a JSON list of `[log-probability, is greedy]`."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for task, task_samples in samples.items():
        for sample in task_samples:
            text_columns = {name: sample.get(name) or _get_response_text(sample) for name in _ITEM_TEXT_COLUMNS}
            row = rows.setdefault((task, sample["doc_id"]), {"task": task, "doc_id": sample["doc_id"], **text_columns})
            for metric_name in sample["metrics"]:
                if isinstance(sample[metric_name], _METRIC_NUMBER_TYPES):
                    name = _qualify_metric_name(metric_name, sample["filter"], task_samples[0]["filter"])
                    row[name] = float(sample[metric_name])
    return build_table_from_rows(list(rows.values())).sort_by([("task", "ascending"), ("doc_id", "ascending")])


def build_table_from_rows(item_rows: list[dict[str, Any]]) -> pa.Table:
    """Return a table of evaluated items with the columns of `_COLUMN_TYPES` and one column per metric. The value is
    null if an item lacks a metric or a column."""
    column_names = dict.fromkeys([*_COLUMN_TYPES, *(name for row in item_rows for name in row)])
    table_schema = pa.schema([(name, _COLUMN_TYPES.get(name, pa.float64())) for name in column_names])
    return pa.Table.from_pylist(item_rows, schema=table_schema)


def select_sample_records(samples: Mapping[str, list[dict[str, Any]]], max_per_task: int) -> list[dict[str, JsonValue]]:
    """Return the first `max_per_task` generated texts of each task, as lines of `samples.jsonl`: prompt, reference,
    completion and, as reward, the first metric that is a number."""
    sample_records: list[dict[str, JsonValue]] = []
    for task_samples in samples.values():
        first_filter = task_samples[0]["filter"]
        text_samples = [each for each in task_samples if each["filter"] == first_filter and _is_generated_text(each)]
        for sample in text_samples[:max_per_task]:
            metric_values = (sample[metric_name] for metric_name in sample["metrics"])
            reward = next((float(value) for value in metric_values if isinstance(value, _METRIC_NUMBER_TYPES)), None)
            prompt = str(next(iter(sample["arguments"]))[0])
            record_texts = {"prompt": prompt, "reference": str(sample["target"]), "completion": sample["resps"][0][0]}
            sample_records.append({"step": 0, **record_texts, "reward": reward})
    return sample_records


def describe_tasks(results: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return version, number of few-shot examples, number of items and generation settings of each lm-eval task, by the
    name of the task."""
    task_descriptions: dict[str, JsonValue] = {}
    for task, task_config in results["configs"].items():
        settings = {name: task_config[name] for name in _TASK_SETTING_NAMES if task_config.get(name) is not None}
        task_settings = {"version": results["versions"].get(task), "num_fewshot": results["n-shot"].get(task)}
        num_items = results["n-samples"].get(task, {}).get("effective")
        task_descriptions[task] = json.loads(json.dumps(task_settings | {"items": num_items} | settings, default=str))
    return task_descriptions


def _qualify_metric_name(metric_name: str, filter_name: str, first_filter: str) -> str:
    return metric_name if filter_name == first_filter else f"{metric_name}_{filter_name}"


def _get_response_text(sample: Mapping[str, Any]) -> str:
    response_texts = [response_choices[0] for response_choices in sample["resps"]]
    return response_texts[0] if _is_generated_text(sample) else json.dumps(response_texts, default=str)


def _is_generated_text(sample: Mapping[str, Any]) -> bool:
    return len(sample["resps"]) == 1 and isinstance(sample["resps"][0][0], str)
