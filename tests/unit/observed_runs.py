"""Run directories written by hand, and a reader of their pages."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tasks.kinds import all_kinds

STARTED = 1_760_000_000.0
HOSTILE = '<script>alert("no")</script> & <b>4</b>'
# name, kind, after, begins, worker seconds, metrics, info
STAGES: list[tuple[str, str, list[str], float, float, dict[str, float], dict[str, Any]]] = [
    ("prepare", "prepare", [], 1, 9, {"rows": 20000}, {}),
    ("eval-base", "validate", ["prepare"], 11, 14, {"validation/accuracy": 0.015, "validation/loss": 3.1}, {}),
    ("sft", "sft", ["prepare"], 11, 61, {"loss": 0.412, "perplexity": 1.51}, {"model": "safetensors/step_40"}),
    ("eval-sft", "validate", ["sft"], 74, 15, {"validation/accuracy": 0.405, "validation/loss": 0.44}, {}),
    ("grpo", "rl", ["sft"], 74, 143, {"reward/mean": 0.71, "loss": -0.002}, {"model": "safetensors/step_80"}),
    ("eval-grpo", "validate", ["grpo"], 219, 16, {"validation/accuracy": 0.705, "validation/loss": 0.52}, {}),
    ("gate", "gate", ["eval-grpo"], 236, 0, {}, {"conditions": [
        {"condition": "validation/accuracy >= 0.6", "value": 0.705, "passed": True},
        {"condition": "validation/loss <= 0.5", "value": 0.52, "passed": False}]}),
    ("export", "export", ["gate", "grpo"], 237, 11, {}, {"model": "safetensors/step_80", "checks": ["keys", "load"]}),
    ("report", "report", ["export", "eval-base", "eval-sft"], 249, 0, {}, {}),
]  # fmt: skip


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_pipeline(run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    text = '[pipeline]\nname = "arithmetic-demo"\n'
    for name, kind, after, *_ in STAGES:
        text += f'[[pipeline.stages]]\nname = "{name}"\nkind = "{kind}"\nafter = {json.dumps(after)}\n'
    (run / "pipeline.toml").write_text(text)


def samples(name: str) -> list[dict[str, Any]]:
    right = {"eval-base": 0, "eval-sft": 8, "eval-grpo": 14}[name]
    answers = [f"{17 + i} + {35 + i} = {52 + 2 * i}" if i < right else f"{i} 7 7 2 {HOSTILE}" for i in range(20)]
    return [
        {"step": 0, "prompt": f"What is {17 + i} + {35 + i}?", "reference": str(52 + 2 * i), "completion": answer,
         "reward": float(i < right) if i != 4 else None}
        for i, answer in enumerate(answers)
    ]  # fmt: skip


def finished_run(tmp_path: Path, *, has_curves: bool = False) -> Path:
    """A run of all stages; to plot its curves takes most of the time in which a page is built."""
    run = tmp_path / "20251009085320"
    write_pipeline(run)
    write(run / "run.json", {
        "run_id": run.name, "pipeline": "arithmetic-demo", "started": STARTED, "command": ["cosmos", "run", "a b.toml"],
        "host": "node-3", "git_commit": "0123456789abcdef", "python": "3.11.7", "seeds": {"sft": 42, "grpo": 42},
        "versions": {"torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.30.0"},
        "kinds": {name: asdict(kind) for name, kind in all_kinds().items()},
    })  # fmt: skip
    for name, kind, after, begins, seconds, metrics, info in STAGES:
        folder = run / "stages" / name
        begun, ended = STARTED + begins, STARTED + begins + seconds + 0.6
        is_self = kind == "report"
        state = "running" if is_self else "reused" if name == "prepare" else "done"
        write(folder / "state.json", {
            "state": state, "attempt": 2 if name == "grpo" else 1, "error": "",
            "spans": [[begun, None if is_self else begun + seconds]], "ended": None if is_self else ended,
        })  # fmt: skip
        write_lines(folder / "events.jsonl", [{"time": begun, "event": "started", "detail": "attempt 1"}])
        outputs = [
            {"path": f"out/{i}.bin", "size": 1_830_000, "sha256": f"{i}{name}" + "e" * 50, "mtime_ns": 1, "inode": 1}
            for i in range(2)
        ]
        result = {
            "name": name, "kind": kind, "fingerprint": "f" * 64, "created": ended, "metrics": metrics, "info": info,
            "inputs": {other: {"fingerprint": "f" * 64, "digest": f"d-{other}" + "0" * 50} for other in after},
            "outputs": outputs, "digest": f"d-{name}" + "0" * 50,
            "reused_from": "/runs/earlier/stages/prepare" if name == "prepare" else None,
        }  # fmt: skip
        if not is_self:
            write(folder / "result.json", result)
        if kind == "validate":
            write_lines(folder / "samples.jsonl", samples(name))
    stages = run / "stages"
    if has_curves:
        write_curves(stages)
    rollouts = [
        {"step": s, "prompt": f"What is {s} + {i}?", "reference": str(s + i), "completion": f"= {s + i}", "reward": 1.0}
        for s in (1, 40, 80)
        for i in range(4)
    ]
    write_lines(stages / "grpo" / "samples.jsonl", rollouts)
    write_lines(stages / "grpo" / "events.jsonl", [
        {"time": STARTED + 74, "event": "started", "detail": "attempt 1"},
        {"time": STARTED + 122, "event": "checkpoint", "detail": "step 20"},
        {"time": STARTED + 131, "event": "crashed", "detail": "signal 9; retried in 2 s"},
        {"time": STARTED + 133, "event": "resumed", "detail": "from step 20"},
    ])  # fmt: skip
    return run


def write_curves(stages: Path) -> None:
    losses = [
        {"step": i, "train/loss": 2.4 * math.exp(-i / 14) + 0.41, "grad_norm": 1 + math.sin(i), "time/step": 1.5}
        for i in range(1, 41)
    ]
    held_out = [{"step": i, "validation/loss": 2.4 * math.exp(-i / 14) + 0.46} for i in (10, 20, 30, 40)]
    write_lines(stages / "sft" / "metrics.jsonl", [*losses, *held_out])
    rewards = [
        {"step": i, "reward/mean": 0.72 - 0.32 * math.exp(-i / 30) + 0.02 * math.sin(3 * i),
         "loss": 0.004 * math.sin(i), "kl": 0.0004 * i, "grad_norm": 0.3 + 0.1 * math.cos(i)}
        for i in range(1, 81)
    ]  # fmt: skip
    accuracies = [{"step": i, "validation/accuracy": 0.4 + i / 260} for i in (0, 20, 40, 60, 80)]
    write_lines(stages / "grpo" / "metrics.jsonl", [*rewards, *accuracies])


def failed_run(tmp_path: Path) -> Path:
    run = tmp_path / "20251009101500"
    write_pipeline(run)
    sft = run / "stages" / "sft"
    done = {"state": "done", "attempt": 1, "spans": [[STARTED, STARTED + 5]], "ended": STARTED + 5}
    write(run / "stages" / "prepare" / "state.json", done)
    failed = {"state": "failed", "attempt": 3, "spans": [[STARTED + 6, STARTED + 66]], "ended": STARTED + 66}
    write(sft / "state.json", {**failed, "error": f"boom {HOSTILE}"})
    (sft / "result.json").write_text('{"name": "sft", "met')
    (sft / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    (sft / "events.jsonl").write_text('{"time": 1760000000, "event": "crashed"}\n{"ti')
    (sft / "samples.jsonl").write_text("not json\n")
    return run


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects texts and attributes."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
