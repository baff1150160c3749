"""Keys of a sweep: the branches of the graph, which of them is chosen, how many run at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.launch.slots import make_branch_semaphores
from cosmos_core.observe.record import read_run
from cosmos_core.observe.sections import make_sweep_tables
from cosmos_core.run.directory import create_run
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds
from tasks.stages import select
from tests.effects.change import Change, Settings, changes

pytestmark = pytest.mark.usefixtures("here")

PROGRAM = Path(__file__).with_name("program.py")
PREFIX = "pipeline.stages.sweep."
SWEPT: Settings = {f"{PREFIX}metric": "loss", f"{PREFIX}grid": {"arguments.word": ["a", "b"]}}
AMONG = [{"stages": ["swept"]}, {"stages": ["behind"]}]
CHOOSING: Settings = {f"{PREFIX}metric": "loss", f"{PREFIX}branches": AMONG}
MEASURED = {"swept": {"loss": 1.0, "rows": 2.0}, "behind": {"loss": 3.0, "rows": 1.0}}


def pipeline(settings: Settings, folder: Path) -> Pipeline:
    """A stage `swept` with one `behind` it; where there are branches, a third that chooses among them."""
    sweep = {key.removeprefix(PREFIX): value for key, value in settings.items()}
    entry: dict[str, Any] = {"kind": "custom", "entry": f"{PROGRAM}:report"}
    stages = [{"name": "swept", **entry}, {"name": "behind", "after": "swept", **entry}]
    if "branches" in sweep:
        stages.append({"name": "choice", "kind": "select", "sweep": sweep})
    else:
        stages[0]["sweep"] = sweep
    (folder / "p.toml").write_text(tomli_w.dumps({"pipeline": {"stages": stages}}))
    return load_pipeline(folder / "p.toml", (), all_kinds())


def sides(change: Change, folder: Path) -> tuple[Pipeline, Pipeline]:
    key, _, name = change.key.rpartition(".")
    rows = change.base.get(key)  # of a table in a list, the first is changed
    changed = (
        {key: [{**rows[0], name: change.value}, *rows[1:]]} if isinstance(rows, list) else {change.key: change.value}
    )
    return pipeline(change.base, folder), pipeline({**change.base, **changed}, folder)


@changes(
    (Change(f"{PREFIX}grid", {"arguments.word": ["b", "c"]}, SWEPT),
     ["swept-word-b", "swept-word-c", "swept", "behind"]),
    (Change(f"{PREFIX}through", ["behind"], SWEPT),
     ["swept-word-a", "behind-word-a", "swept-word-b", "behind-word-b", "swept"]),
)  # fmt: skip
def test_it_changes_the_branches(change: Change, expected: list[str], tmp_path: Path) -> None:
    before, after = ([stage.name for stage in side.stages] for side in sides(change, tmp_path))
    assert before == ["swept-word-a", "swept-word-b", "swept", "behind"]
    assert after == expected


@changes(
    (Change(f"{PREFIX}metric", "rows", CHOOSING), "swept"),
    (Change(f"{PREFIX}mode", "min", CHOOSING), "swept"),
    (Change(f"{PREFIX}branches.stages", ["swept", "behind"], {**CHOOSING, f"{PREFIX}branches": AMONG[:1]}), "behind"),
)
def test_it_changes_what_is_chosen(change: Change, expected: str, tmp_path: Path) -> None:
    def chosen(found: Pipeline) -> object:
        config = found.stage("choice")
        inputs = {name: {"metrics": metrics, "info": {}, "path": f"/run/{name}"} for name, metrics in MEASURED.items()}
        recipe, kind = found.recipes["choice"], found.stage_kind(config)
        return select.run(Stage(tmp_path / "choice", config, recipe, "", None, inputs, "f", kind=kind)).info["chosen"]

    before, after = map(chosen, sides(change, tmp_path))
    assert before != expected
    assert after == expected


@changes((Change(f"{PREFIX}max_parallel", 2, SWEPT), 2))
def test_it_changes_how_many_run_at_once(change: Change, expected: int, tmp_path: Path) -> None:
    def free(found: Pipeline) -> int:
        slot, count = make_branch_semaphores(found)["swept-word-a"], 0
        while slot.acquire(blocking=False):
            count += 1
        return count

    assert tuple(map(free, sides(change, tmp_path))) == (1, expected)


@changes(
    (Change(f"{PREFIX}branches.settings", {"arguments.word": "a"}, CHOOSING), ("arguments.word",)),
)  # fmt: skip
def test_it_changes_the_columns_of_the_report(change: Change, expected: tuple[str, ...], tmp_path: Path) -> None:
    def columns(found: Pipeline) -> tuple[str, ...]:
        [table] = make_sweep_tables(read_run(create_run(found).path))
        return table["keys"]

    assert tuple(map(columns, sides(change, tmp_path))) == ((), expected)
