"""What the report says, as plain values: which stages, prompts, metrics and files; `templates/` has the looks.

Each function takes the record of a run or of one of its stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cosmos_core.observe import wording
from cosmos_core.observe.plots import curves_svg
from cosmos_core.observe.record import RunRecord, StageRecord, busy_seconds

NUM_PROMPTS = 12
"""Prompts that are shown side by side; the rest is in `samples.jsonl`."""
_NUM_ROLLOUTS = 4  # of the first and of the last logged step of a stage that trains on rollouts
_NUM_FILES = 40  # of a stage's outputs
_LOGPROB_DIFFERENCE = "rollout/logprob_difference_max"


def measured(run: RunRecord) -> list[StageRecord]:
    """Return the stages whose validation metrics are compared: those that only measure, else whichever have some."""
    found = [stage for stage in run.stages if any(key.startswith("validation/") for key in stage.metrics)]
    return [stage for stage in found if stage.kind.makes == "metrics"] or found


def cards(run: RunRecord) -> list[tuple[str, str]]:
    """Return the few values at the top: metrics from the first to the last stage, times, stages that are finished."""
    shown = []
    metrics = [wording.table_metrics(stage.metrics) for stage in measured(run)]
    for name in metrics[-1] if metrics else ():
        values = [wording.number(each[name]) for each in metrics if name in each]
        shown.append((name, f"{values[0]} → {values[-1]}" if len(values) > 1 else values[0]))
    differences = [stage.metrics[_LOGPROB_DIFFERENCE] for stage in run.stages if _LOGPROB_DIFFERENCE in stage.metrics]
    shown += [("log-prob difference", f"≤ {max(differences):.1e}")] if differences else []
    started = run.facts.get("started")
    if isinstance(started, int | float):
        wall, inside = max(0.0, run.ended - started), busy_seconds(run, started)
        shown += [
            ("wall time", wording.duration(wall)),
            ("inside stage workers", wording.duration(inside)),
            ("overhead", wording.duration(max(0.0, wall - inside))),
        ]
    counted = [stage for stage in run.stages if stage.kind.makes != "page"]
    finished = sum(stage.status in {"done", "reused"} for stage in counted)
    return [*shown, ("stages finished", f"{finished} of {len(counted)}")]


def comparison(run: RunRecord) -> list[dict[str, Any]]:
    """Return each validation metric: its value by stage, and the change from the first to the last."""
    stages = measured(run)
    keys = dict.fromkeys(key for stage in stages for key in stage.metrics if key.startswith("validation/"))
    rows = []
    for key in keys:
        values = [stage.metrics.get(key) for stage in stages]
        known = [float(value) for value in values if isinstance(value, int | float)]
        change = known[-1] - known[0] if len(known) > 1 else None
        verdict = ""
        if change and wording.is_judged(key):
            verdict = "better" if (change < 0) == wording.lower_is_better(key) else "worse"
        shown = "" if change is None else f"{change:+.3f}"
        rows.append({"name": key.removeprefix("validation/"), "values": values, "change": shown, "verdict": verdict})
    return rows


def samples(run: RunRecord) -> dict[str, Any]:
    """Return the completions of the same prompts by each stage that measures, side by side."""
    stages = [stage for stage in run.stages if stage.samples and stage.kind.feed != "rollouts"]
    completions = [_newest_by_prompt(stage) for stage in stages]
    everywhere = [prompt for prompt in completions[0] if all(prompt in c for c in completions)] if completions else []
    prompts = everywhere or list(dict.fromkeys(prompt for each in completions for prompt in each))
    rows = []
    for prompt in prompts[:NUM_PROMPTS]:
        lines = [each.get(prompt) for each in completions]
        reference = next((str(line["reference"]) for line in lines if line and line.get("reference")), "")
        rows.append({"prompt": prompt, "reference": reference, "lines": lines})
    return {"stages": stages, "rows": rows, "total": len(prompts)}


def gates(run: RunRecord) -> list[tuple[StageRecord, dict[str, Any]]]:
    """Return every condition of every gate with what was measured."""
    return [(stage, condition) for stage in run.stages for condition in _dicts(stage.info.get("conditions"))]


def lineage(run: RunRecord) -> list[dict[str, Any]]:
    """Return what each stage was made from and what it made, by digest."""
    rows = []
    for stage in (stage for stage in run.stages if stage.result):
        inputs, files = stage.result.get("inputs"), _dicts(stage.result.get("outputs"))
        made_from = inputs.items() if isinstance(inputs, dict) else ()
        rows.append({
            "stage": stage,
            "reused_from": stage.result.get("reused_from"),
            "inputs": [(name, entry.get("digest")) for name, entry in made_from if isinstance(entry, dict)],
            "digest": stage.result.get("digest"),
            "files": files[:_NUM_FILES],
            "num_files": len(files),
            "size": sum(file["size"] for file in files if isinstance(file.get("size"), int)),
        })  # fmt: skip
    return rows


def setting(run: RunRecord) -> list[tuple[str, Any, bool]]:
    """Return command, host, commit, seeds and versions: name, value, and whether it is code."""
    facts = run.facts
    command = facts.get("command")
    return [
        ("command", " ".join(map(str, command)) if isinstance(command, list) else command, True),
        ("run directory", run.path, True),
        ("host", facts.get("host"), False),
        ("git commit", facts.get("git_commit"), True),
        ("python", facts.get("python"), False),
        ("seeds", _pairs(facts.get("seeds")), False),
        ("versions", _pairs(facts.get("versions")), False),
    ]


def label(stage: StageRecord) -> str:
    """Return the state as people read it; the report that is being written cannot know its own end."""
    return "this page" if stage.kind.makes == "page" and stage.status == "running" else stage.status


def headline(stage: StageRecord) -> str:
    """Return the one metric that stands in the title of a stage."""
    found = wording.key_metrics(stage.metrics, most=1).items()
    return " ".join(f"{wording.family(key)} {wording.number(value)}" for key, value in found)


def times(stage: StageRecord) -> list[tuple[str, str]]:
    """Return when, how often and where a stage ran; what is not known is left out."""
    attempt = stage.state["attempt"]
    pairs = [
        ("started", wording.clock(stage.state.get("started"))),
        ("ended", wording.clock(stage.state.get("ended"))),
        ("wall time", wording.duration(stage.seconds)),
        ("in the worker", wording.duration(stage.state.get("worker_seconds") or None)),
        ("attempts", str(attempt) if attempt else ""),
        ("after", ", ".join(stage.after)),
        ("on", _machines(stage.ranks)),
    ]
    return [(name, value) for name, value in pairs if value not in {"", "–"}]


def metrics(stage: StageRecord) -> list[tuple[str, str]]:
    """Return the metrics of a stage that are not bookkeeping."""
    return [(key, wording.number(value)) for key, value in wording.key_metrics(stage.metrics, most=100).items()]


def info(stage: StageRecord) -> dict[str, Any]:
    """Return what a stage left beside metrics; the conditions of a gate have a table of their own."""
    return {key: value for key, value in stage.info.items() if key != "conditions" and value not in ("", [], {}, None)}


def curves(stage: StageRecord) -> str:
    """Return the curves of a stage as SVG; empty: fewer than two steps were logged."""
    return curves_svg(stage.curves) if len(stage.curves) > 1 else ""


def rollouts(stage: StageRecord) -> list[dict[str, Any]]:
    """Return a few rollouts of the first and of the last logged step of a stage that trains on them."""
    if stage.kind.feed != "rollouts":
        return []
    steps = sorted({_step(line) for line in stage.samples})
    chosen = [steps[0], steps[-1]] if len(steps) > 1 else steps
    return [
        {**line, "step": f"{step:g}"}
        for step in chosen
        for line in [line for line in stage.samples if _step(line) == step][:_NUM_ROLLOUTS]
    ]


def _machines(ranks: Sequence[dict[str, Any]]) -> str:
    """Return the machines of a stage's ranks: `node-3 (8 ranks, NVIDIA H100, 16 threads)`."""
    count = Counter(
        (str(each.get("host", "")), ", ".join(dict.fromkeys(each.get("gpus") or ["cpu"])), each.get("threads", 0))
        for each in ranks
    )
    return "; ".join(
        f"{host} ({num} rank{'' if num == 1 else 's'}, {device}, {threads} threads)"
        for (host, device, threads), num in count.items()
    )


def _newest_by_prompt(stage: StageRecord) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for line in stage.samples:
        prompt = str(line["prompt"])
        if prompt not in found or _step(line) > _step(found[prompt]):
            found[prompt] = line
    return found


def _step(line: dict[str, Any]) -> float:
    step = line.get("step")
    return step if isinstance(step, int | float) else 0


def _pairs(value: Any) -> str:
    return "  ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
