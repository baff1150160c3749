"""Evaluation of a language model: benchmarks of lm-eval, with the results of lm-eval's command line.

Writes `evaluation.json` (metrics and settings of each task), `items.parquet` (one row per item of a task, so that two
models can be compared on the same items) and `samples.jsonl` (some generated texts, for the report). Responses are
cached until the stage ends, so that a stage that was stopped or killed continues after the last cached response.
"""

import json
import logging
from importlib.metadata import version
from typing import Any

import pyarrow.parquet as pq
from jinja2 import TemplateError
from lm_eval import evaluator

from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, ModelError, Preempted
from cosmos_core.evaluate.benchmarks import open_benchmarks
from cosmos_core.evaluate.engines import check_engine, engine_name, open_model
from cosmos_core.evaluate.results import build_item_table, convert_metrics, describe_tasks, select_sample_records
from cosmos_core.models.chat_templates import set_chat_template
from cosmos_core.models.hf import load_config, load_tokenizer
from cosmos_core.models.model_files import check_weights
from cosmos_core.rewards.base import error_on_one_line
from cosmos_core.run.files import write_json, write_text
from cosmos_core.run.stage import Stage
from cosmos_core.transient import is_transient
from cosmos_core.types import Outcome

REPORT_FILE, ITEMS_FILE, SAMPLES_FILE = "evaluation.json", "items.parquet", "samples.jsonl"
_NUM_SAMPLES_PER_TASK = 24
_RESPONSE_CACHE_PREFIX = "responses"
_LM_EVAL_SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}
"""Default seeds of lm-eval's command line."""


def check(stage: Stage) -> Outcome:
    """Check the engine, the lm-eval tasks and the model files of an `evaluate` stage without loading weights. Raise
    `ConfigError`, `DataError` or `ModelError` for the first problem."""
    architecture = _describe_model(stage)
    check_engine(stage)
    num_items_by_task = open_benchmarks(stage.recipe.evaluate).num_items_by_task
    task_sizes_text = ", ".join(f"{name} ({count} items)" for name, count in num_items_by_task.items())
    return Outcome(info={"found": f"{architecture}, engine {engine_name(stage.recipe)}; {task_sizes_text}"})


def run(stage: Stage) -> Outcome:
    """Run the benchmarks of an `evaluate` stage, and return their metrics. Raise `ConfigError`, `DataError` or
    `ModelError` as `check` does, and `Preempted` if a stop was requested."""
    _describe_model(stage)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hide lm-eval's warnings about default task settings
    stage.progress.phase("prepare")
    config = stage.recipe.evaluate
    benchmarks = open_benchmarks(config)
    num_responses = 0

    def stop_if_requested() -> None:
        nonlocal num_responses
        num_responses += 1
        stage.progress.beat()
        if stage.stop_requested:
            raise Preempted(f"stopped after {num_responses} responses, which are kept")

    stage.progress.phase("load")
    lm_eval_model = open_model(stage, stop_if_requested)
    if config.apply_chat_template:
        set_chat_template(lm_eval_model.tokenizer, stage.recipe.policy.chat_template)
    stage.progress.phase("evaluate", deadline_seconds=3600)
    evaluator.add_env_info = lambda results: None  # skip lm-eval's list of packages, which takes long
    with convert_errors(_make_task_error):
        results: Any = evaluator.simple_evaluate(
            model=lm_eval_model, tasks=benchmarks.task_names, task_manager=benchmarks.task_manager,
            num_fewshot=config.num_fewshot, limit=config.limit, apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template and config.fewshot_as_multiturn,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            use_cache=str(stage.path / f"{_RESPONSE_CACHE_PREFIX}-{stage.fingerprint[:16]}"),
            **(_LM_EVAL_SEEDS if config.seed is None else dict.fromkeys(_LM_EVAL_SEEDS, config.seed)),
        )  # fmt: skip
    metrics = convert_metrics(results["results"])
    stage.metrics.log(0, metrics)
    evaluation_report = {
        "lm_eval": version("lm-eval"), "engine": engine_name(stage.recipe),
        "settings": config.model_dump(exclude={"include_path"}), "tasks": describe_tasks(results), "metrics": metrics,
    }  # fmt: skip
    write_json(stage.path / REPORT_FILE, evaluation_report)
    pq.write_table(build_item_table(results["samples"]), stage.path / ITEMS_FILE)
    samples = select_sample_records(results["samples"], _NUM_SAMPLES_PER_TASK)
    write_text(stage.path / SAMPLES_FILE, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in samples))
    for file in stage.path.glob(f"{_RESPONSE_CACHE_PREFIX}-*"):
        file.unlink()
    return Outcome(outputs=(REPORT_FILE, ITEMS_FILE, SAMPLES_FILE), metrics=metrics)


def _make_task_error(error: Exception) -> Exception:
    """Return the error to raise in place of an error of lm-eval: `ConfigError` if the rows or settings do not fit a
    task, otherwise the error itself."""
    is_error_of_task_code = isinstance(error, AssertionError | ValueError | TypeError | LookupError | TemplateError)
    if is_transient(error) or not is_error_of_task_code:
        return error
    problem = f"evaluate.tasks: lm-eval cannot run them with these rows and settings ({error_on_one_line(error)})"
    return ConfigError(f"{problem}; see the rows of the tasks, evaluate.max_length and evaluate.num_fewshot")


def _describe_model(stage: Stage) -> str:
    """Check that the stage's model has weights, a tokenizer and, if the recipe applies it, a chat template; return the
    name of the model's architecture."""
    policy_config, uses_chat_template = stage.recipe.policy, stage.recipe.evaluate.apply_chat_template
    model_config = load_config(stage.model, policy_config.model_revision)
    chat_template = policy_config.chat_template if uses_chat_template else None
    tokenizer = load_tokenizer(stage.model, policy_config.model_revision, chat_template)
    if uses_chat_template and not tokenizer.chat_template:
        problem = f"evaluate.apply_chat_template = true: {stage.model!r} has no chat template"
        raise ModelError(f"{problem}; set it to false, or policy.chat_template to one")
    check_weights(stage.model)
    return next(iter(model_config.architectures or ()), type(model_config).__name__)
