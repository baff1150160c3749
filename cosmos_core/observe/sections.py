"""The parts of `report.html` below its head, each a function from the record of a run to html; empty when there is
nothing to say. The page around them is `report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from cosmos_core.observe import wording
from cosmos_core.observe.dag import label
from cosmos_core.observe.plots import curves_svg
from cosmos_core.observe.record import RunRecord, StageRecord, loading_line

NUM_PROMPTS = 12
"""Prompts that are shown side by side; the rest is in `samples.jsonl`."""
_NUM_ROLLOUTS = 4  # of the first and of the last logged step of an rl stage
_NUM_FILES = 40  # of a stage's outputs
_MORE_LETTERS = 1200  # of one completion; longer ones are cut


def table(header: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> str:
    """An html table; header (none: no head) and cells are html already, a cell from `<td` on brings its own tag."""
    head = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{''.join(c if c.startswith('<td') else f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{css}">{head}<tbody>{body}</tbody></table></div>'


def section(title: str, body: str, note: str = "") -> str:
    """A titled part of the page; nothing for an empty body."""
    hint = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{hint}{body}</section>" if body else ""


def badge(state: str, text: str = "") -> str:
    """A coloured word."""
    return f'<span class="badge state-{escape(state)}">{escape(text or state)}</span>'


def clock(unix: Any) -> str:
    """Local date and time."""
    if not isinstance(unix, int | float) or not unix:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix))


def measured(run: RunRecord) -> list[StageRecord]:
    """The stages whose validation figures are compared: those that only measure, else whichever have some."""
    found = [stage for stage in run.stages if any(key.startswith("validation/") for key in stage.metrics)]
    return [stage for stage in found if stage.kind.makes == "metrics"] or found


def before_and_after(run: RunRecord) -> str:
    """Validation metrics: a column a stage in order, and the change from the first to the last."""
    stages = measured(run)
    keys = dict.fromkeys(key for stage in stages for key in stage.metrics if key.startswith("validation/"))
    rows = []
    for key in keys:
        values = [stage.metrics.get(key) for stage in stages]
        cells = [f'<td class="figure">{escape(wording.number(value))}</td>' for value in values]
        name = f'<td class="key">{escape(key.removeprefix("validation/"))}</td>'
        rows.append([name, *cells, _change(key, values)] if len(stages) > 1 else [name, *cells])
    heads = ["metric", *(escape(stage.name) for stage in stages)]
    table_html = table([*heads, "change"] if len(stages) > 1 else heads, rows, "figures") if rows else ""
    return section("Before and after", table_html, "Held-out measurements, in the order of the pipeline.")


def samples(run: RunRecord) -> str:
    """The answers to the same prompts by each validate stage, side by side."""
    stages = [stage for stage in run.stages if stage.samples and stage.kind.feed != "rollouts"]
    answers = [_newest_by_prompt(stage) for stage in stages]
    everywhere = [prompt for prompt in answers[0] if all(prompt in other for other in answers)] if answers else []
    prompts = everywhere or list(dict.fromkeys(prompt for other in answers for prompt in other))
    rows = []
    for prompt in prompts[:NUM_PROMPTS]:
        found = [other.get(prompt) for other in answers]
        reference = next((str(line["reference"]) for line in found if line and line.get("reference")), "")
        rows.append([_prompt_cell(prompt, reference), *(_answer_cell(line) for line in found)])
    shown = f"The first {len(rows)} of {len(prompts)} prompts" if len(prompts) > len(rows) else "All logged prompts"
    heads = ["prompt", *(escape(stage.name) for stage in stages)]
    return section("Samples", table(heads, rows, "samples") if rows else "", f"{shown}, in the order of the data.")


def gates(run: RunRecord) -> str:
    """Every condition of every gate with what was measured."""
    rows = []
    for stage in run.stages:
        for condition in _dicts(stage.info.get("conditions")):
            verdict = badge("done", "passed") if condition.get("passed") else badge("failed", "not met")
            value = escape(wording.number(condition.get("value")))
            rows.append([escape(stage.name), _code(condition.get("condition", "")), value, verdict])
    return section("Gates", table(["gate", "condition", "measured", ""], rows) if rows else "")


def model(run: RunRecord) -> str:
    """Where the exported model is and how it is loaded."""
    if run.model is None:
        return ""
    line = loading_line(run.model).replace("; ", "\n")
    return section("Model", f'<p class="path">{_code(run.model)}</p><pre>{escape(line)}</pre>')


def stages(run: RunRecord) -> str:
    """One block a stage: times, attempts, metrics, curves, rollouts, events."""
    return section("Stages", "".join(_stage(stage) for stage in run.stages))


def lineage(run: RunRecord) -> str:
    """What each stage was made from and what it made, by digest."""
    rows = []
    for stage in run.stages:
        result = stage.result
        if not result:
            continue
        inputs = result.get("inputs")
        parts = [
            f"{escape(name)} {_digest(entry.get('digest'))}"
            for name, entry in (inputs.items() if isinstance(inputs, dict) else ())
            if isinstance(entry, dict)
        ]
        reused = result.get("reused_from")
        origin = f'<div class="note">reused from {_code(reused)}</div>' if reused else ""
        rows.append([f"{escape(stage.name)}{origin}", "<br>".join(parts) or "–", _outputs(stage)])
    note = "Inputs and outputs by the first characters of their sha256; result.json of each stage has them in full."
    return section("Lineage", table(["stage", "made from", "made"], rows, "lineage") if rows else "", note)


def setting(run: RunRecord) -> str:
    """Command, host, commit, seeds and versions."""
    facts = run.facts
    command = facts.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else str(command or "")
    rows = [
        ["command", _code(words) if words else ""],
        ["run directory", _code(run.path)],
        ["host", escape(str(facts.get("host") or ""))],
        ["git commit", _code(facts["git_commit"]) if facts.get("git_commit") else ""],
        ["python", escape(str(facts.get("python") or ""))],
        ["seeds", escape(_pairs(facts.get("seeds")))],
        ["versions", escape(_pairs(facts.get("versions")))],
    ]
    body = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    return section("How it was run", f'<dl class="facts">{body}</dl>')


def _change(key: str, values: Sequence[Any]) -> str:
    known = [float(value) for value in values if isinstance(value, int | float)]
    if len(known) < 2:
        return '<td class="figure"></td>'
    change = known[-1] - known[0]
    is_good = (change < 0) == wording.lower_is_better(key)
    css = "" if change == 0 or not wording.is_judged(key) else " better" if is_good else " worse"
    return f'<td class="figure{css}">{change:+.3f}</td>'


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


def _prompt_cell(prompt: str, reference: str) -> str:
    wanted = f'<div class="reference">reference: {escape(reference)}</div>' if reference else ""
    return f'<td class="prompt"><div class="text">{_cut(prompt)}</div>{wanted}</td>'


def _answer_cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return "<td>–</td>"
    reward = line.get("reward")
    css, said = "invalid", "no valid reward"
    if isinstance(reward, int | float):
        css, said = "good" if reward > 0 else "bad", f"reward {wording.number(reward)}"
    text = _cut(str(line.get("completion", ""))) or '<span class="note">(empty)</span>'
    return f'<td><div class="text">{text}</div><div class="reward {css}">{escape(said)}</div></td>'


def _cut(text: str) -> str:
    return escape(text if len(text) <= _MORE_LETTERS else f"{text[:_MORE_LETTERS]}…")


def _stage(stage: StageRecord) -> str:
    attempt = stage.state["attempt"]
    facts = [
        ("started", clock(stage.state.get("started"))),
        ("ended", clock(stage.state.get("ended"))),
        ("wall time", wording.duration(stage.seconds) if stage.seconds is not None else ""),
        ("in the worker", wording.duration(stage.state.get("worker_seconds") or None)),
        ("attempts", str(attempt) if attempt else ""),
        ("after", ", ".join(stage.after)),
    ]
    figures = wording.key_metrics(stage.metrics, most=100)
    error = stage.state.get("error")
    drawn = curves_svg(stage.curves) if len(stage.curves) > 1 else ""
    body = [
        f'<p class="error">{escape(str(error))}</p>' if error else "",
        _facts(facts),
        _facts([(key, wording.number(value)) for key, value in figures.items()], "metrics"),
        f'<div class="curves">{drawn}</div>' if drawn else "",
        _info(stage),
        _rollouts(stage) if stage.kind.feed == "rollouts" else "",
        _events(stage),
    ]
    found = wording.key_metrics(stage.metrics, most=1).items()
    headline = " ".join(f"{wording.family(key)} {wording.number(value)}" for key, value in found)
    seconds = wording.duration(stage.seconds) if stage.seconds is not None else ""
    is_open = " open" if drawn or stage.status in {"failed", "stopped"} else ""
    return (
        f"<details{is_open}><summary><b>{escape(stage.name)}</b> <i>{escape(stage.kind.name)}</i> "
        f'{badge(stage.status, label(stage))}<span class="right">{escape(headline)}</span>'
        f'<span class="right">{escape(seconds)}</span></summary>{"".join(body)}</details>'
    )


def _facts(pairs: Sequence[tuple[str, str]], css: str = "") -> str:
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs if v and v != "–")
    return f'<dl class="grid {css}">{cells}</dl>' if cells else ""


def _info(stage: StageRecord) -> str:
    shown = {key: value for key, value in stage.info.items() if key != "conditions" and value not in ("", [], {}, None)}
    rows = [[escape(key), _value(value)] for key, value in shown.items()]
    return table([], rows, "info") if rows else ""


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "<br>".join(_value(item) for item in value)
    return escape(value if isinstance(value, str) else json.dumps(value))


def _rollouts(stage: StageRecord) -> str:
    steps = sorted({_step(line) for line in stage.samples})
    chosen = [steps[0], steps[-1]] if len(steps) > 1 else steps
    rows = []
    for step in chosen:
        for line in [line for line in stage.samples if _step(line) == step][:_NUM_ROLLOUTS]:
            rows.append(
                [f"{step:g}", _prompt_cell(str(line["prompt"]), str(line.get("reference") or "")), _answer_cell(line)]
            )
    return table(["step", "prompt", "rollout"], rows, "samples") if rows else ""


def _events(stage: StageRecord) -> str:
    rows = [
        [
            f'<td class="when">{escape(clock(event.get("time")))}</td>',
            escape(str(event.get("event", ""))),
            escape(str(event.get("detail") or "")),
        ]
        for event in stage.events
    ]
    return table(["time", "event", "detail"], rows, "events") if rows else ""


def _outputs(stage: StageRecord) -> str:
    files = _dicts(stage.result.get("outputs"))
    size = sum(file["size"] for file in files if isinstance(file.get("size"), int))
    rows = [
        f"<li>{_code(file.get('path', ''))} {_digest(file.get('sha256'))}"
        f' <span class="note">{_bytes(file.get("size"))}</span></li>'
        for file in files[:_NUM_FILES]
    ]
    more = f'<li class="note">and {len(files) - _NUM_FILES} more</li>' if len(files) > _NUM_FILES else ""
    total = f"{_digest(stage.result.get('digest'))} {len(files)} file{'' if len(files) == 1 else 's'}, {_bytes(size)}"
    return f"<details><summary>{total}</summary><ul>{''.join(rows)}{more}</ul></details>" if files else total


def _bytes(size: Any) -> str:
    text = wording.count(size) if isinstance(size, int) else "?"
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def _digest(value: Any) -> str:
    return f'<code title="{escape(str(value))}">{escape(str(value)[:10])}</code>' if value else ""


def _code(value: Any) -> str:
    return f"<code>{escape(str(value))}</code>"


def _pairs(value: Any) -> str:
    return "  ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else ""


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
