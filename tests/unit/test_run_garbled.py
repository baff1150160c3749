"""Run directories whose files are damaged at random, under every command that only reads, and under a new run."""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_core import cli
from cosmos_core.errors import CosmosError
from cosmos_core.observe.report import build_report
from cosmos_core.run.directory import Run, create_run, find_run, open_or_create_run
from cosmos_core.run.files import write_json
from cosmos_core.run.manifest import read_result
from cosmos_core.run.progress import MetricsWriter, ProgressWriter
from cosmos_core.run.state import read_state, record_event, update_state
from tests.cells import full
from tests.unit.run_folder import counting_run, finish

WRONG: list[Any] = [
    None, True, 5, -1, 1.5, 10**30, "", "x", "\ud800", [], {}, [[]], {"a": {"b": []}}, [None, 3], "../../..", "\0",
]  # fmt: skip


def whole_run(folder: Path) -> Run:
    """A run of which every file is there that a command may read."""
    run = counting_run(folder)
    for name in ("first", "second"):
        path = finish(run, name, loss=0.5)
        (path / "logs").mkdir()
        (path / "logs/attempt_1.log").write_text("a line\n")
        ProgressWriter(path / "progress.json").step(3, 4, loss=0.5)
        MetricsWriter(path / "metrics.jsonl").log(1, {"loss": 2.0})
        MetricsWriter(path / "metrics.jsonl").log(2, {"loss": 1.0})
        record_event(path, "started", "attempt 1")
        write_json(path / "best.json", {"step": 1, "metric": "validation/loss", "value": 0.5})
        write_json(path / "facts.json", [{"host": "h", "gpus": ["H100"], "threads": 2, "versions": {}}])
        (path / "samples.jsonl").write_text('{"step": 1, "prompt": "p", "completion": "c", "reward": 1.0}\n')
        update_state(path, state="done", attempt=1, spans=[(1000.0, 1003.0)], ended=1003.0)
    write_json(folder / "published.json", {"version": "v", "stage": str(run.stage_path("second"))})
    return run


def changed_value(value: Any, random_: random.Random) -> Any:
    """The value with one part, at any depth, replaced, removed or renamed."""
    if isinstance(value, dict | list) and value and random_.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random_.choice(keys)
        copy = value.copy()
        copy[key] = changed_value(value[key], random_)
        if random_.random() < 0.15:
            del copy[key]
        return copy
    return random_.choice(WRONG)


def garbled(data: bytes, random_: random.Random) -> bytes:
    """What a file holds, damaged: most often JSON of the right syntax and the wrong type."""
    lines = data.decode().splitlines() if data.count(b"\n{") else [data.decode()]
    how = random_.random()
    if how < 0.7:
        position = random_.randrange(len(lines))
        lines[position] = json.dumps(changed_value(json.loads(lines[position]), random_))
        return ("\n".join(lines) + "\n").encode()
    if how < 0.8:
        return data[: random_.randrange(len(data))]
    if how < 0.9:
        return random_.randbytes(40)
    return random_.choice([b"", b"[" * 100_000, b"1" * 10_000, b"NaN", b'{"state": "\\ud800"}', b"{}", b"[]", b"null"])


def answer(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What a command says, run in this process as `main` runs it; any error that it does not know is raised."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)  # what is no text cannot be printed
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["cosmos", *words])
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            cli.main()
        except SystemExit as end:
            assert end.code in {0, 1, 64, None}, end.code
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("num_directories", [10, pytest.param(300, marks=pytest.mark.full)])
def test_no_damage_to_a_run_directory_ends_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_directories: int
) -> None:
    run, random_ = whole_run(tmp_path), random.Random(7)
    kept, outputs = tmp_path / "kept", run.output_dir
    shutil.copytree(outputs, kept)
    config = str(tmp_path / "counting.toml")
    files = sorted(path.relative_to(outputs) for path in outputs.rglob("*.json*") if path.name != "stage.toml")
    assert {"state.json", "result.json", "run.json", "runs.json", "fingerprint.json"} <= {file.name for file in files}
    commands = [
        ("status", str(run.path)), ("logs", str(run.path)), ("lineage", str(run.stage_path("second"))),
        ("lineage", str(tmp_path)), ("lineage", str(run.path)), ("plan", config),
        ("status", "--output-dir", str(outputs)),
    ]  # fmt: skip
    for number in range(num_directories):
        damaged = random_.sample(files, random_.choice([1, 1, 1, 2, 5]))
        for file in damaged:
            (outputs / file).write_bytes(garbled((kept / file).read_bytes(), random_))
        said = answer(monkeypatch, *commands[number % len(commands)])
        assert "Traceback" not in said and len(said) < 20_000, damaged
        if number % 10 == 0:  # it draws curves, which takes a while
            build_report(run.path)
        for file in damaged:
            shutil.copy2(kept / file, outputs / file)


@pytest.mark.parametrize("damage", ["{}", '[{"run_id": []}]', "\ud800", *full('"x"', "[1, null, {}]", "[")])
def test_a_damaged_list_of_runs_never_stops_a_new_run_and_is_made_again(tmp_path: Path, damage: str) -> None:
    run = counting_run(tmp_path)
    (run.output_dir / "runs.json").write_bytes(damage.encode(errors="surrogatepass"))
    new = create_run(run.pipeline)
    listed = json.loads((run.output_dir / "runs.json").read_text())
    assert [entry["run_id"] for entry in listed] == [run.id, new.id]
    assert find_run("", run.output_dir) == new.path


def test_a_damaged_state_is_rebuilt_from_the_manifest(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    for damage in ('{"state": 5}', "[]", '{"attempt": "many"}', "\0"):
        (run.stage_path("first") / "state.json").write_text(damage)
        assert read_state(run.stage_path("first")).state == "done"
    (run.stage_path("first") / "result.json").write_text('{"metrics": []}')
    assert read_result(run.stage_path("first")) is None
    assert read_state(run.stage_path("first")).state == "waiting"


def test_a_run_whose_facts_are_damaged_says_which_file_it_is(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (run.path / "run.json").write_text('{"fixed": 3}')
    with pytest.raises(
        CosmosError, match=rf"^{run.path}/run.json is damaged; continue the run as it is: cosmos resume"
    ):
        open_or_create_run(run.pipeline, run_id=run.id)
