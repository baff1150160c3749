"""Compute the content of the report from the record of a run or a stage; the layout is in `templates/`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.observe import formatting, gallery
from cosmos_core.observe.costs import make_cost_card
from cosmos_core.observe.plots import REPORT_PANELS, draw_curves_svg
from cosmos_core.observe.record import LoggedSample, RunRecord, StageRecord, compute_time_breakdown
from cosmos_core.run.files import JsonDocument, parse_documents, read_json
from cosmos_core.run.gpu_time import read_gpu_intervals, sum_gpu_seconds
from cosmos_core.run.stage import PROFILES_FOLDER, read_input_metrics

MAX_SHOWN_PROMPTS = 12
"""Maximum number of prompts whose completions the report shows."""
_MAX_SHOWN_ROLLOUTS = 4  # number of rollouts shown for the first and for the last logged step of a training
_MAX_SHOWN_OPERATORS = 10  # number of operators shown from a profiler trace
_MAX_SHOWN_SAMPLES = 4  # number of images or videos shown for one prompt
_MAX_SHOWN_FILES = 40  # number of output files listed for a stage
_SERVICE_METRICS = ("items", "errors", "ready", "restarts", "retried", "seconds")
_LOGPROB_DIFFERENCE_METRIC = "rollout/logprob_difference_p95"
_REPORT_STATUS_LABEL = "this page"
_NUM_HISTOGRAM_BINS = 10  # number of bins of a histogram of rewards
_STATUSES_BY_URGENCY = ("failed", "refused", "died", "stopped", "running", "retrying", "waiting", "done", "reused")


def select_compared_stages(run: RunRecord) -> list[StageRecord]:
    """Return the stages whose validation metrics the report compares: stages that evaluate a model or select a branch
    or, if there are none, all stages with validation metrics. Stages in branches of a sweep are left out."""
    branch_stage_names = list_sweep_stages(run)
    stages = [stage for stage in run.stages if any(map(_is_validation_metric, stage.metrics))]
    stages = [stage for stage in stages if stage.name not in branch_stage_names]
    return [stage for stage in stages if stage.kind.makes == "metrics" or stage.kind.selects_branch] or stages


def make_summary_cards(run: RunRecord) -> list[tuple[str, str]]:
    """Return name and text of each summary card: metrics of the first and last validation, times, stages done."""
    cards = []
    validation_metrics = [formatting.select_table_metrics(metrics) for _, metrics in _list_validation_columns(run)]
    raw_differences = [stage.metrics.get(_LOGPROB_DIFFERENCE_METRIC) for stage in run.stages]
    logprob_differences = [formatting.float_or_inf(each) for each in raw_differences if isinstance(each, int | float)]
    for name in validation_metrics[-1] if validation_metrics else ():
        if logprob_differences and name == formatting.shorten_metric_name(_LOGPROB_DIFFERENCE_METRIC):
            continue  # skip this metric: a separate card shows its maximum over all stages
        metric_texts = [formatting.format_number(each[name]) for each in validation_metrics if name in each]
        cards.append((name, f"{metric_texts[0]} → {metric_texts[-1]}" if len(metric_texts) > 1 else metric_texts[0]))
    cards += [("log-prob difference, p95", f"≤ {max(logprob_differences):.1e}")] if logprob_differences else []
    time_labels = {"wall": "wall time", "inside": "inside stage workers", "overhead": "overhead"}
    time_breakdown = compute_time_breakdown(run)
    cards += [(time_labels[key], formatting.format_duration(seconds)) for key, seconds in time_breakdown.items()]
    cards += make_cost_card(run).items()
    num_done_stages = sum(
        get_displayed_status(stage) in {"done", "reused", _REPORT_STATUS_LABEL} for stage in run.stages
    )
    return [*cards, ("stages finished", f"{num_done_stages} of {len(run.stages)}")]


def make_validation_metrics_table(run: RunRecord) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the column names of the table of validation metrics, and a row per metric with its values and change."""
    metric_columns = _list_validation_columns(run)
    metric_keys, rows = dict.fromkeys(key for _, metrics in metric_columns[-1:] + metric_columns for key in metrics), []
    for key in filter(_is_validation_metric, metric_keys):
        metric_values = [metrics.get(key) for _, metrics in metric_columns]
        metric_numbers = [formatting.float_or_inf(value) for value in metric_values if isinstance(value, int | float)]
        delta = metric_numbers[-1] - metric_numbers[0] if len(metric_numbers) > 1 else None
        change_cells = {
            "change": "" if delta is None else f"{delta:+.3f}",
            "verdict": formatting.judge_change(key, delta),
        }
        rows.append({"name": key.removeprefix("validation/"), "values": metric_values, **change_cells})
    return [name for name, _ in metric_columns], rows


def _list_validation_columns(run: RunRecord) -> list[tuple[str, dict[str, Any]]]:
    """Return title and metrics of each compared validation, in the order of the pipeline: the validation before the
    first step of each training, and the validations of `select_compared_stages`."""
    validation_columns, compared_stages, branch_stage_names = [], select_compared_stages(run), list_sweep_stages(run)
    for stage in run.stages:
        if stage.kind.trains_model and stage.name not in branch_stage_names:
            initial_metrics = _find_initial_validation(stage)
            if metrics := {key: value for key, value in initial_metrics.items() if _is_validation_metric(key)}:
                validation_columns.append((f"before {stage.name}", metrics))
        if stage in compared_stages:
            validation_columns.append((stage.name, stage.metrics))
    return validation_columns


def _find_initial_validation(stage: StageRecord) -> dict[str, Any]:
    """Return the metrics of the validation before the first train step; empty if there was none. A training that starts
    from the checkpoint of step N of another run logs them at step N."""
    first_line = min(stage.metric_lines, key=lambda line: line["step"], default={})
    return first_line if all(key.startswith(("step", "time", "validation/")) for key in first_line) else {}


def _is_validation_metric(key: str) -> bool:
    return key.startswith("validation/")


def make_sample_table(run: RunRecord) -> dict[str, Any]:
    """Return a table of completions with a row per prompt and a column per stage that logs completions. Completions
    from before the first step of a training have a separate column."""
    step_columns: list[tuple[str, dict[str, LoggedSample]]] = []
    compared_stages = select_compared_stages(run)
    for stage in (stage for stage in run.stages if stage.samples):
        initial_step = _find_initial_validation(stage).get("step") if stage.kind.trains_model else None
        initial_samples = [line for line in stage.samples if line.step == initial_step]
        if initial_samples:
            step_columns.append((f"before {stage.name}", {line.prompt: line for line in initial_samples}))
        if stage.kind.feed != "rollouts" or (initial_samples and stage in compared_stages):
            step_columns.append((stage.name, _find_newest_samples(stage)))
    all_prompts = list(dict.fromkeys(prompt for _, samples in step_columns for prompt in samples))
    prompts = [prompt for prompt in all_prompts if all(prompt in samples for _, samples in step_columns)] or all_prompts
    prompt_rows = []
    for prompt in prompts[:MAX_SHOWN_PROMPTS]:
        prompt_samples = [samples.get(prompt) for _, samples in step_columns]
        reference = next((line.reference for line in prompt_samples if line and line.reference), "")
        prompt_rows.append({"prompt": prompt, "reference": reference, "lines": prompt_samples})
    return {"columns": [name for name, _ in step_columns], "rows": prompt_rows, "total": len(prompts)}


def make_lineage_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return the inputs and outputs of each finished stage with their digests."""
    return [
        {
            "stage": stage, "reused_from": result["reused_from"], "gpu_seconds": result.get("gpu_seconds", 0.0),
            "inputs": [(name, entry["digest"]) for name, entry in result["inputs"].items()],
            "digest": result["digest"], "files": result["outputs"][:_MAX_SHOWN_FILES],
            "num_files": len(result["outputs"]), "size": sum(file["size"] for file in result["outputs"]),
        }
        for stage in run.stages
        if (result := stage.result)
    ]  # fmt: skip


def list_run_start_fields(run: RunRecord) -> list[tuple[str, Any, bool]]:
    """Return facts about the start of a run, such as command, host and seeds, each as (name, value, whether the report
    shows the value as code)."""
    start_info = run.start_info
    return [
        ("command", " ".join(start_info.command), True),
        ("run directory", run.path, True),
        ("host", start_info.host, False),
        ("git commit", start_info.git_commit, True),
        ("python", start_info.python, False),
        ("seeds", "  ".join(f"{stage} {seed}" for stage, seed in start_info.seeds.items()), False),
        ("versions", "  ".join(f"{name} {version}" for name, version in start_info.versions.items()), False),
    ]


def get_displayed_status(stage: StageRecord) -> str:
    """Return the displayed status of a stage; a running report stage, which writes this page, is `this page`."""
    return _REPORT_STATUS_LABEL if stage.kind.makes == "page" and stage.status == "running" else stage.status


def format_headline_metric(stage: StageRecord) -> str:
    """Return name and value of the metric that is shown in the title of a stage; empty if the stage has no metrics."""
    headline = formatting.select_key_metrics(stage.metrics, max_metrics=1).items()
    return " ".join(f"{formatting.get_metric_family(key)} {formatting.format_number(value)}" for key, value in headline)


def list_stage_times(stage: StageRecord) -> list[tuple[str, str]]:
    """Return the known times, number of attempts, input stages and machines of a stage as pairs of name and text."""
    stage_state = stage.state
    labelled_times = [
        ("started", formatting.format_timestamp(stage_state.spans[0][0] if stage_state.spans else None)),
        ("ended", formatting.format_timestamp(stage_state.ended)),
        ("time", formatting.format_duration(stage.seconds)),
        ("attempts", str(stage_state.attempt or "")),
        ("after", ", ".join(stage.after)),
        ("on", formatting.describe_machines(stage.ranks)),
    ]
    return [(name, value) for name, value in labelled_times if value not in {"", "–"}]


def format_stage_metrics(stage: StageRecord) -> list[tuple[str, str]]:
    """Return the metrics of a stage, without times, throughput and memory."""
    selected_metrics = formatting.select_key_metrics(stage.metrics, max_metrics=100)
    return [(key, formatting.format_number(value)) for key, value in selected_metrics.items()]


def select_info_to_show(stage: StageRecord) -> dict[str, Any]:
    """Return the results of a stage other than metrics, without empty values and without the conditions of a gate,
    which the report shows in another table."""
    return {key: value for key, value in stage.info.items() if key != "conditions" and value not in ("", [], {}, None)}


def make_service_rows(stage: StageRecord) -> list[list[Any]]:
    """Return one row per reward of each reward service of a stage, or one row for a service without rewards."""
    rows: list[list[Any]] = []
    for service in stage.services:
        refusal_counts_text = ", ".join(f"{status}: {count:g}" for status, count in sorted(service.refused.items()))
        metrics_by_reward = service.rewards or {"": {}}
        for name, reward_metrics in metrics_by_reward.items():
            metric_texts = [f"{reward_metrics[key]:g}" if key in reward_metrics else "" for key in _SERVICE_METRICS]
            rows.append([service.url, service.status, name, *metric_texts, refusal_counts_text])
    return rows


def draw_stage_curves(stage: StageRecord) -> str:
    """Return the curves of a stage's metrics as SVG; empty if fewer than two steps were logged."""
    return draw_curves_svg(stage.metric_lines, REPORT_PANELS) if len(stage.metric_lines) > 1 else ""


def list_log_files(stage: StageRecord) -> list[str]:
    """Return the log files of the attempts of a stage, relative to the folder of the run."""
    return [f"stages/{stage.name}/logs/{file.name}" for file in sorted((stage.path / "logs").glob("*.log"))]


def choose_css_classes(samples: Sequence[LoggedSample | None]) -> str:
    """Return the CSS classes of the row with the completions of a prompt: `good` if the last reward is positive, else
    `bad`, and `changed` if the first and the last reward differ; empty without valid rewards."""
    rewards_by_sample = [[line.reward, *line.rewards] for line in samples if line is not None]
    valid_rewards_by_sample = [[value for value in values if value is not None] for values in rewards_by_sample]
    rewards = [max(values) for values in valid_rewards_by_sample if values]
    if not rewards:
        return ""
    css_class = "good" if rewards[-1] > 0 else "bad"
    return css_class if rewards[0] == rewards[-1] else f"{css_class} changed"


def select_shown_rollouts(stage: StageRecord) -> list[LoggedSample]:
    """Return the first four rollouts of the first and last logged step of a training; empty without rollouts."""
    if stage.kind.feed != "rollouts":
        return []
    steps = sorted({line.step for line in stage.samples})
    samples = [[line for line in stage.samples if line.step == step] for step in dict.fromkeys(steps[:1] + steps[-1:])]
    return [line for lines_of_step in samples for line in lines_of_step[:_MAX_SHOWN_ROLLOUTS]]


class ProfiledOperator(JsonDocument):
    """Operator in a profiler trace, with its calls, milliseconds and share of the time of the profiled steps."""

    operator: str
    calls: int
    ms: float
    share: float


def read_slowest_operators(stage: StageRecord) -> list[ProfiledOperator]:
    """Return the operators that took the most time in the newest profiler trace of a stage; empty if there is no
    trace."""
    trace_files = sorted((stage.path / PROFILES_FOLDER).glob("*.operators.json"), key=lambda path: path.stat().st_mtime)
    return parse_documents(read_json(trace_files[-1]), ProfiledOperator)[:_MAX_SHOWN_OPERATORS] if trace_files else []


def load_completion_media(sample: LoggedSample) -> list[dict[str, Any]]:
    """Return the images and videos of a logged completion for the report, each with its reward."""
    media_entries = []
    reward_captions = [
        formatting.format_number(value) if value is not None else "no valid reward" for value in sample.rewards
    ]
    for index, name in enumerate(sample.media[:_MAX_SHOWN_SAMPLES]):
        media_path = Path(sample.folder) / name
        data_uri = gallery.encode_media_file(media_path)
        caption = reward_captions[index] if index < len(reward_captions) else ""
        is_video = bool(data_uri) and media_path.suffix == gallery.VIDEO_SUFFIX
        media_entries.append({"path": name, "uri": data_uri, "is_video": is_video, "caption": caption})
    return media_entries


def _find_newest_samples(stage: StageRecord) -> dict[str, LoggedSample]:
    newest_samples: dict[str, LoggedSample] = {}
    for line in stage.samples:
        if line.step > newest_samples.setdefault(line.prompt, line).step:
            newest_samples[line.prompt] = line
    return newest_samples


def make_resource_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return machines, GPU hours, tokens per second and output bytes of each stage that ran a worker in this run."""
    return [
        {
            "stage": stage, "machines": formatting.describe_machines(stage.ranks),
            "gpu_hours": _compute_gpu_hours(stage), "tokens_per_second": _compute_median_token_rate(stage),
            "size": sum(file["size"] for file in stage.result["outputs"]) if stage.result else 0,
        }
        for stage in run.stages
        if stage.seconds is not None and stage.kind.in_worker
    ]  # fmt: skip


def _compute_gpu_hours(stage: StageRecord) -> float:
    """Return the GPU hours of a stage; if the run did not record when the stage held GPUs, the duration of the stage
    times its number of ranks with a GPU."""
    if stage.state.holds:
        return sum_gpu_seconds(read_gpu_intervals(stage.path)) / 3600
    return (stage.seconds or 0.0) * sum(bool(rank.gpus) for rank in stage.ranks) / 3600


def _compute_median_token_rate(stage: StageRecord) -> float | None:
    """Return the median of tokens per second over all steps, because it ignores slow first steps; None: no value."""
    throughputs = sorted(v for line in stage.metric_lines if (v := formatting.find_tokens_per_second(line)) is not None)
    return throughputs[len(throughputs) // 2] if throughputs else None


def compute_reward_bins(stage: StageRecord) -> list[dict[str, float]]:
    """Return the bins of two histograms of the logged rewards of a training, one for each half of its steps; empty if
    all rewards are equal or from one step. `first` and `last` are the fractions of the rewards of each half that lie in
    a bin, in percent of the largest fraction of any bin."""
    logged_rewards = [(line.step, value) for line in stage.samples for value in (line.rewards or [line.reward])]
    steps_and_rewards = [(step, value) for step, value in logged_rewards if value is not None and math.isfinite(value)]
    steps = sorted({step for step, _ in steps_and_rewards})
    reward_values = [value for _, value in steps_and_rewards]
    if stage.kind.feed != "rollouts" or len(steps) < 2:
        return []
    middle_step, min_reward = steps[len(steps) // 2], min(reward_values)
    bin_width = (max(reward_values) - min_reward) / _NUM_HISTOGRAM_BINS
    if not 0 < bin_width < math.inf:
        return []
    histogram_counts = [[0] * _NUM_HISTOGRAM_BINS, [0] * _NUM_HISTOGRAM_BINS]
    for step, value in steps_and_rewards:
        histogram_counts[step >= middle_step][min(_NUM_HISTOGRAM_BINS - 1, int((value - min_reward) / bin_width))] += 1
    reward_fractions_by_half = [[count / sum(bin_counts) for count in bin_counts] for bin_counts in histogram_counts]
    max_fraction = max(map(max, reward_fractions_by_half))
    return [
        {
            "low": min_reward + i * bin_width, "high": min_reward + (i + 1) * bin_width,
            "first": 100 * reward_fractions_by_half[0][i] / max_fraction, "num_first_half": histogram_counts[0][i],
            "last": 100 * reward_fractions_by_half[1][i] / max_fraction, "num_second_half": histogram_counts[1][i],
        }
        for i in range(_NUM_HISTOGRAM_BINS)
    ]  # fmt: skip


def make_sweep_tables(run: RunRecord) -> list[dict[str, Any]]:
    """Return a table of branches for each stage of a run that chooses among branches of a sweep. Each row has the
    settings of a branch, the most urgent state among its stages, and the value of the metric that decides, None before
    it is measured. The best branch is first, and branches without a value are last."""
    stage_by_name = {stage.name: stage for stage in run.stages}
    sweep_tables = []
    for stage, sweep in ((each, choice) for each in run.stages if (choice := each.sweep) and choice.branches):
        keys = tuple(dict.fromkeys(key for sweep_branch in sweep.branches for key in sweep_branch.settings))
        rows: list[dict[str, Any]] = []
        input_metrics = read_input_metrics(stage.path) if stage.result else {}
        for sweep_branch in sweep.branches:
            branch_stages = [stage_by_name[name] for name in sweep_branch.stages if name in stage_by_name]
            branch_metrics = [input_metrics.get(each.name, each.metrics) for each in branch_stages]
            value = {key: value for metrics in branch_metrics for key, value in metrics.items()}.get(sweep.metric)
            stage_seconds = [each.seconds for each in branch_stages if each.seconds]
            branch_statuses = sorted((each.status for each in branch_stages), key=_STATUSES_BY_URGENCY.index)
            rows.append({
                "name": sweep_branch.stages[0], "settings": tuple(sweep_branch.settings.get(key) for key in keys),
                "state": branch_statuses[0] if branch_statuses else "waiting",
                "seconds": sum(stage_seconds) if stage_seconds else None,
                "value": formatting.float_or_inf(value) if isinstance(value, int | float) else None,
                "is_chosen": stage.info.get("chosen") in sweep_branch.stages,
            })  # fmt: skip
        sort_sign = -1.0 if sweep.mode == "max" else 1.0
        rows.sort(key=lambda row: formatting.make_sort_key(row["value"], sort_sign))
        sweep_tables.append({"stage": stage, "metric": sweep.metric, "mode": sweep.mode, "keys": keys, "rows": rows})
    return sweep_tables


def list_sweep_stages(run: RunRecord) -> set[str]:
    """Return the names of all stages of a run that belong to a branch of a sweep."""
    branch_choices = [stage.sweep for stage in run.stages if stage.sweep is not None]
    return {name for sweep in branch_choices for sweep_branch in sweep.branches for name in sweep_branch.stages}
