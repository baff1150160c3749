"""`report.html`: a whole run on one page that reads on its own - no script, no resource from anywhere else.

Built from the run directory alone, so a run that failed half-way has one too. Also the program of kind `report`.
"""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path

from cosmos_core.observe import dag, sections, wording
from cosmos_core.observe.record import RunRecord, busy_seconds, read_run
from cosmos_core.run.files import write_text
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

PAGE = "report.html"
_APART = "rollout/logprob_difference_max"


def run(stage: Stage) -> Outcome:
    """The program of kind `report`: writes the page into the stage and, for people to find, into the run."""
    page = build(stage.run_path)
    for folder in (stage.path, stage.run_path):
        write_text(folder / PAGE, page)
    return Outcome(outputs=(PAGE,), info={"report": str(stage.run_path / PAGE)})


def build(run_path: Path) -> str:
    """The page of the run at `run_path`, whatever of it exists."""
    record = read_run(run_path)
    style = resources.files("cosmos_core.observe").joinpath("report.css").read_text(encoding="utf-8")
    body = [
        _head(record),
        _failures(record),
        _cards(record),
        sections.section("Pipeline", _graph(record)),
        sections.before_and_after(record),
        sections.gates(record),
        sections.samples(record),
        sections.model(record),
        sections.stages(record),
        sections.lineage(record),
        sections.setting(record),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(record.name)} {escape(record.path.name)}</title><style>\n{style}</style></head>"
        f"<body><main>\n{chr(10).join(filter(None, body))}\n</main></body></html>\n"
    )


def _head(record: RunRecord) -> str:
    facts = [
        f"run {record.facts.get('run_id') or record.path.name}",
        sections.clock(record.facts.get("started")),
        str(record.facts.get("host") or ""),
    ]
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f'<header><h1>{escape(record.name)} {sections.badge(record.outcome)}</h1><p class="note">{line}</p></header>'


def _failures(record: RunRecord) -> str:
    broken = [stage for stage in record.stages if stage.status == "failed"]
    said = [f"{stage.name}: {stage.state.get('error') or 'failed; its log says why'}" for stage in broken]
    return "".join(f'<p class="error">{escape(line)}</p>' for line in said)


def _graph(record: RunRecord) -> str:
    graph = dag.draw(record)
    return f'<div class="scroll">{graph}</div>' if graph else ""


def _cards(record: RunRecord) -> str:
    cards = []
    stages = sections.measured(record)
    figures = [wording.table_metrics(stage.metrics) for stage in stages]
    for name in figures[-1] if figures else ():
        values = [wording.number(each[name]) for each in figures if name in each]
        said = f"{values[0]} → {values[-1]}" if len(values) > 1 else values[0]
        cards.append((name, said))
    apart = [stage.metrics[_APART] for stage in record.stages if _APART in stage.metrics]
    cards += [("log-prob difference", f"≤ {max(apart):.1e}")] if apart else []
    started = record.facts.get("started")
    if isinstance(started, int | float):
        wall, inside = max(0.0, record.ended - started), busy_seconds(record, started)
        cards += [
            ("wall time", wording.duration(wall)),
            ("inside stage workers", wording.duration(inside)),
            ("overhead", wording.duration(max(0.0, wall - inside))),
        ]
    finished = sum(stage.status in {"done", "reused"} for stage in record.stages if stage.kind.makes != "page")
    cards.append(("stages finished", f"{finished} of {sum(stage.kind.makes != 'page' for stage in record.stages)}"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards)
    return f'<dl class="cards">{cells}</dl>'
