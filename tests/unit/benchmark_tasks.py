"""Two small tasks of lm-eval over local rows, and a stage that runs them: `choice` (acc) and `copy` (exact_match, with
two filters)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from cosmos_core.run.stage import Stage
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.tiny_model import save_tiny_model

ROWS = [{"question": f"What comes after {i}?", "choices": [str(i + 1), str(i), "nothing"], "label": i % 3,
         "answer": "x"} for i in range(8)]  # fmt: skip
FILTERS = [
    {"name": "first", "filter": [{"function": "regex", "regex_pattern": "^\\s*(\\S)"}, {"function": "take_first"}]},
    {"name": "whole", "filter": [{"function": "take_first"}]},
]


def write_tasks(folder: Path, rows: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Write the tasks and their rows; `changes` are keys of both tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"test": folder / "test.jsonl", "train": folder / "train.jsonl"}
    for file in files.values():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    shared = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {name: str(file) for name, file in files.items()}},
        "test_split": "test", "training_split": "train", "fewshot_split": "train",
        "doc_to_text": "Question: {{question}}\nAnswer:", "metadata": {"version": 1.0},
    } | changes  # fmt: skip
    choice = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
              "doc_to_target": "label", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}  # fmt: skip
    copy = {"task": "copy", "output_type": "generate_until", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
            "filter_list": FILTERS, "metric_list": [{"metric": "exact_match"}]}  # fmt: skip
    for task in (choice, copy):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    (folder / "both.yaml").write_text(yaml.safe_dump(
        {"group": "both", "task": ["choice"], "aggregate_metric_list": [{"metric": "acc"}]}
    ))  # fmt: skip
    return folder


def save_model(folder: Path) -> None:
    """Write a tiny model with a chat template."""
    save_tiny_model(folder)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template)


def evaluate_stage(folder: Path, **settings: Any) -> Stage:
    """Return a stage that runs both tasks with a tiny model on `hf`, with these settings of `[evaluate]`."""
    tasks = folder / "tasks"
    if not tasks.exists():
        write_tasks(tasks)
    if not (folder / "model").exists():
        save_model(folder / "model")
    given = {"tasks": ["choice", "copy"], "include_path": str(tasks), "engine": "hf", **settings}
    keys = {f"evaluate.{name}": value for name, value in given.items()}
    name = f"evaluate-{len(list(folder.glob('stages/*')))}"
    return stage_of(folder / "stages" / name, recipe({**SFT, **keys}), kind="evaluate", model=folder / "model")
