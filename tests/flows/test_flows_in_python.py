"""Flows of one's own: stages called as tasks, with `if` and `for`, in a run that grows and is continued."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from prefect import flow, unmapped
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterTags,
)
from prefect.flows import load_flow_from_entrypoint
from pydantic import BaseModel
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError, DataError, GateFailed, StageFailed
from cosmos_core.run.directory import open_run, read_start_info
from cosmos_core.run.state import read_state
from tasks import configure_run, custom, gate, report, sample, upload, validate
from tasks.flow_identity import derive_name_and_parameters
from tasks.flow_run import find_newest_flow
from tasks.kinds import all_kinds
from tasks.naming import get_user_name
from tasks.stage_task import StageHandle, _make_call
from tests.attempts import unshown, use, workers
from tests.conftest import PROGRAMS, wait_until

__all__ = ["workers"]
GROW = f"{PROGRAMS}/growing.py:grow"


@pytest.fixture(autouse=True)
def folder(
    harness: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    if "workers" not in request.fixturenames:
        use(monkeypatch)
    with unshown():
        yield tmp_path


def grown(name: str, by: int = 1, **settings: Any) -> StageHandle:
    return custom(GROW, name=name, arguments={"by": by}, retries=0, **settings)


@flow
def rounds(most: int = 5, enough: float = 2.0) -> list[str]:
    """Trains further in each round until that is enough, and publishes the last model."""
    made: list[StageHandle] = []
    for number in range(1, most + 1):
        made.append(grown(f"round-{number}", model=made[-1] if made else ""))
        if made[-1].metrics["size"] >= enough:
            break
    passed = gate(made[-1], require=[f"size >= {enough}"])
    published = upload(made[-1], target="published", after=passed)
    return [*(each.name for each in made), published.outputs["model"]]


def starts(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("outputs/*/stages/*/visits.txt") for _ in file.open())


def task_states(flow_run: str) -> set[str]:
    """Names of the states of the task runs of a flow run."""
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run)])))
    return {str(each.state_name) for each in found}


def test_a_loop_that_stops_early_is_one_run_that_is_reused_whole(folder: Path) -> None:
    names = rounds()
    assert names[:-1] == ["round-1", "round-2"] and Path(names[-1]).is_relative_to(folder / "published")
    [path] = folder.glob("outputs/*/pipeline.toml")
    run = open_run(path.parent, all_kinds())
    assert [stage.name for stage in run.pipeline.stages] == ["round-1", "round-2", "gate", "upload"]
    assert run.id.startswith("rounds-") and (run.path / "report.html").is_file()
    assert starts(folder) == ["round-1", "round-2"]
    assert rounds() == names and starts(folder) == ["round-1", "round-2"]
    again = find_newest_flow()
    assert again
    wait_until(lambda: task_states(again.flow_run) == {"Reused", "Completed"}, 5, "the server shows what is reused")
    assert rounds(enough=1.0)[:-1] == ["round-1"] and len([*folder.glob("outputs/*/run.json")]) == 2, "another run"
    assert starts(folder) == ["round-1", "round-2"], "whose stage is reused"


@flow
def parallel(size: int = 3, run_id: str = "") -> float:
    first, second = [custom.submit(GROW, arguments={"by": size + i}) for i in range(2)]
    joined = custom.submit(GROW, model=first, after=[second])
    last = report(after=[joined], wait_for=[second])
    state = custom.submit(GROW, name="stated", return_state=True, model=joined)
    assert state.is_completed() and state.result().name == "stated"
    assert [each.result().name for each in (first, second, joined)] == ["custom", "custom-2", "custom-3"]
    return float(last.name == "report") + joined.result().metrics["size"]


def test_stages_run_in_parallel_and_get_their_names_in_the_order_of_the_calls(folder: Path) -> None:
    assert parallel(run_id="mine") == 5.0
    run = open_run(folder / "outputs" / "mine", all_kinds())
    assert run.pipeline.stage("custom-3").after == ("custom-2", "custom") and run.pipeline.stage("report")
    assert read_state(run.stage_path("custom-2")).state == "done"
    tags = ["cosmos-pipeline:parallel", "cosmos-run:mine", f"cosmos-user:{get_user_name()}"]
    with get_client(sync_client=True) as client:
        [flow_run] = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=tags)))
        tagged = TaskRunFilter(tags=TaskRunFilterTags(all_=tags))
        wait_until(lambda: len(client.read_task_runs(task_run_filter=tagged)) == 5, 5, "five task runs with tags")
    assert flow_run.name == "parallel mine"


def mistakes() -> dict[str, tuple[Callable[[StageHandle, StageHandle], Any], str]]:
    return {
        "name twice": (lambda model, _: grown("model", 2), "stage 'model': the name is used twice in flow 'wrong'"),
        "of another run": (
            lambda _, elsewhere: upload(elsewhere, target="published"),
            r"model is the handle of 'elsewhere', a stage of another run \(first\); pass what it made",
        ),
        "model of another run": (
            lambda _, elsewhere: custom(GROW, model=elsewhere, name="other"),
            r"model is the handle of 'elsewhere', a stage of another run \(first\); pass what it made",
        ),
        "unknown key": (lambda model, _: gate(model, requires=["size > 1"]), "requires"),
        "two firsts": (lambda model, _: upload(model, model="x", target="y"), "the first argument is its model"),
        "no recipe": (lambda *_: custom(GROW, recipe="none.toml"), "recipe = 'none.toml': no such file"),
        "a handle as recipe": (lambda model, _: validate(model), "recipe is the handle of 'model'; pass it as model, "),
        "overrides of a command": (
            lambda *_: custom(GROW, overrides=["train.seed=1"]),
            r"overrides = \['train.seed=1'\] is no dict such as \{'train.optm_lr': 1e-5\}",
        ),
        "a sweep": (lambda *_: custom(GROW, sweep={}), "a sweep is a loop of the flow"),
        "setting of the kind": (
            lambda model, _: sample({"train": {"train_policy": {"type": "grpo"}}}, model=model, keep={"best": -1}),
            "sample.keep.best",
        ),
        "a kind": (lambda *_: custom(GROW, kind="gate"), "call the task of that kind"),
        "a handle in a value": (
            lambda model, _: custom(GROW, name="x", arguments={"by": [model]}),
            "stage 'x': arguments contains the handle of 'model'; pass one of its",
        ),
    }


def test_a_mistake_is_one_line(folder: Path) -> None:
    said: dict[str, str] = {}

    @flow
    def first(run_id: str = "first") -> StageHandle:
        return grown("elsewhere", 2)

    @flow
    def wrong() -> None:
        model, elsewhere = grown("model", np.int64(2)), first()  # type: ignore[arg-type]
        assert model.metrics["size"] == 2.0, "a scalar of NumPy is a plain value"
        for name, (call, _) in mistakes().items():
            with pytest.raises(ConfigError) as error:
                call(model, elsewhere)
            said[name] = str(error.value)

    wrong()
    for name, (_, message) in mistakes().items():
        assert re.search(message, said[name]) and "\n" not in said[name], name
    with pytest.raises(ConfigError, match="decorate the function that calls it with @flow"):
        grown("outside of a flow")


def test_a_finished_stage_is_not_called_with_other_settings_but_one_that_failed_is(folder: Path) -> None:
    size = {"model": 2}

    @flow
    def edited(run_id: str = "edited") -> StageHandle:
        return custom(GROW, name="model", arguments={"by": size["model"], "refuse": size["model"] == 2})

    with pytest.raises(DataError, match="refused on purpose"):
        edited()
    size["model"] = 3
    assert edited().metrics == {"size": 3.0}
    size["model"] = 4
    with pytest.raises(ConfigError, match=r"stage 'model' of run edited is done with other settings \(arguments\)"):
        edited()
    assert starts(folder) == ["model"]


def test_a_retry_keeps_the_recipe_that_was_read_first(folder: Path) -> None:
    """The stage rewrites its recipe and fails once, as when somebody edits the file for the next experiment."""
    (folder / "flaky.py").write_text(
        "from pathlib import Path\nfrom cosmos_core.types import Outcome\n"
        "def once(stage, marker, recipe):\n"
        "    if not Path(marker).exists():\n"
        "        Path(marker).write_text('')\n"
        "        Path(recipe).write_text('train.seed = 8\\n')\n"
        "        raise ConnectionError('away')\n"
        "    return Outcome(metrics={'seed': float(stage.recipe.train.seed)})\n"
    )
    (folder / "recipe.toml").write_text("train.seed = 7\n")
    arguments = {"marker": str(folder / "marker"), "recipe": str(folder / "recipe.toml")}

    @flow
    def retried(run_id: str = "retried") -> float:
        entry = f"{folder}/flaky.py:once"
        return custom(entry, recipe="recipe.toml", name="flaky", arguments=arguments, retries=1).metrics["seed"]

    assert retried() == 7.0 and (folder / "recipe.toml").read_text() == "train.seed = 8\n"


@pytest.mark.filterwarnings("error:coroutine", "error::pytest.PytestUnraisableExceptionWarning")
def test_an_asynchronous_flow_makes_a_call_again_that_was_killed_before_it_was_recorded(folder: Path) -> None:
    @flow
    async def two(run_id: str = "two") -> float:
        first = custom.submit(GROW, name="first")
        return float(grown("second", model=first).metrics["size"])

    assert asyncio.run(two()) == 2.0
    recorded = folder / "outputs" / "two" / "calls.json"
    calls = json.loads(recorded.read_text())
    del calls["calls"]["second"]
    recorded.write_text(json.dumps(calls))
    assert asyncio.run(two()) == 2.0 and starts(folder) == ["first", "second"]


GROWN = """
from prefect import flow
from tasks import custom

@flow
def grown(by: int, times: float = 1):
    model = custom("FOLDER/first.py:grow", name="first", arguments={"by": by})
    custom("FOLDER/second.py:grow", name="second", model=model, arguments={"by": times})
"""


def test_a_plan_shows_the_stages_of_the_last_run_with_these_parameters_and_which_are_reused(folder: Path) -> None:
    (folder / "my.py").write_text(GROWN.replace("FOLDER", str(folder)))
    for name in ("first", "second"):
        shutil.copy(f"{PROGRAMS}/growing.py", folder / f"{name}.py")
    load_flow_from_entrypoint("my.py:grown")(by=2)
    (folder / "second.py").open("a").write("# another digest\n")

    def planned(*words: str) -> list[str]:
        done = CliRunner().invoke(app, ["plan", *words])
        assert done.exception is None or isinstance(done.exception, ConfigError), done.exception
        return [" ".join(line.split()) for line in (*done.output.splitlines(), str(done.exception or ""))]

    lines = planned("my.py:grown", "-p", "by=2")
    [run] = (folder / "outputs").glob("grown-*")
    assert any(f"first │ custom │ │ be reused │ same fingerprint as run {run.name}" in line for line in lines)
    assert any("second │ custom │ first │ run │ changed since" in line for line in lines)
    assert lines[-2].endswith(f"of run {run.name} (by=2, times=1.0); the flow decides on later calls when it runs.")
    [unknown, _] = planned("my.py:grown", "-p", "by=3")
    assert unknown.startswith("my.py:grown has no run ") and "with by=3, times=1.0: its stages are known" in unknown
    for words, message in (((), "missing a required argument: 'by'"), (("-p", "by=x"), "valid integer")):
        assert message in planned("my.py:grown", *words)[-1]
    assert planned("my.toml", "-p", "by=2")[-1].startswith("-p is for a flow")
    assert sorted(path.name for path in (folder / "outputs").glob("grown-*")) == [run.name], "a plan makes no run"


def test_a_flow_sets_what_pipeline_sets_in_toml_before_its_first_stage(folder: Path) -> None:
    settings: dict[str, Any] = {"threads": 1, "private": True}

    recipe = {"policy": {"lora": {"target_modules": "all-linear", "alpha_pattern": {"up_proj": 1.0, "mlp.up": 2.0}}}}
    key = "policy.lora.alpha_pattern"
    overrides = {f"{key}.up_proj": 8.0, f'{key}."mlp.down"': 4.0}

    @flow
    def private(run_id: str = "private") -> None:
        for wrong, message in (({"thread": 2}, "pipeline.thread"), ({"stages": []}, "stages follows from the flow")):
            with pytest.raises(ConfigError, match=message):
                configure_run(**settings, **wrong)
        configure_run(**settings, grace_seconds=None)
        grown("model", recipe=recipe, overrides=overrides)
        with pytest.raises(ConfigError, match="in flow 'private' after its first stage"):
            configure_run(threads=2)

    private()
    pipeline = open_run(folder / "outputs" / "private", all_kinds()).pipeline
    config, lora = pipeline.config, pipeline.recipes["model"].policy.lora
    assert (config.threads, config.private, config.grace_seconds) == (1, True, 20.0)
    kept = "an override of one name of a map keeps the other names"
    assert lora and lora.alpha_pattern == {"up_proj": 8.0, "mlp.up": 2.0, "mlp.down": 4.0}, kept
    settings["threads"] = 2
    with pytest.raises(ConfigError, match=r"run private has other settings \(threads\)"):
        private()


def test_a_map_names_its_stages_in_the_order_of_the_elements_and_a_gate_that_refuses_raises(folder: Path) -> None:
    """The flow may go on after it; and a task with other options of Prefect adds a stage all the same."""
    seen: list[str] = []
    (folder / "crash.py").write_text("def crash(stage):\n    raise ConnectionError('away')\n")

    @flow
    def mapped(run_id: str = "mapped") -> list[tuple[str, float]]:
        tagged = custom.with_options(task_run_name="mine-{name}", on_failure=[lambda *_: seen.append("failed")])
        first = tagged.submit(GROW, name="first", arguments={"by": 10}, retries=0)
        with pytest.raises(StageFailed):
            tagged.submit(f"{folder}/crash.py:crash", name="never", model=first, retries=0).result()
        made = custom.map(GROW, arguments=[{"by": 1}, {"by": 2}], model=unmapped(first)).result()
        with pytest.raises(GateFailed):
            gate(made[0], require=["size >= 12"], target=f"{folder}/published")
        (folder / "published" / "latest").mkdir(parents=True)  # cannot be read, but only a gate that is called reads it
        states = custom.map(GROW, arguments=[{"by": 3}], model=[first], return_state=True)
        return [(each.name, each.metrics["size"]) for each in (*made, states[0].result())]

    assert mapped() == [("custom", 11.0), ("custom-2", 12.0), ("custom-3", 13.0)]
    assert seen == ["failed"] and read_state(folder / "outputs/mapped/stages/never").failures == 1


class Plan(BaseModel):
    by: int = 2
    names: set[str] = {"c", "b", "a"}


class Size(Enum):
    LARGE = 3


@flow
def typed(plan: Plan, size: Size, where: Path, rates: dict[int, float], day: date) -> list[Any]:
    grown("model", plan.by + size.value)
    return [plan.names, size, where, rates, day]


def test_parameters_of_any_type_are_restored_from_the_run(folder: Path) -> None:
    given = {"plan": Plan(), "size": Size.LARGE, "where": Path("x"), "rates": {1: 0.5}, "day": date(2026, 1, 2)}
    values = typed(**given)
    [path] = folder.glob("outputs/typed-*")
    saved = read_start_info(path)
    assert saved and saved.parameters["plan"] == {"by": 2, "names": ["a", "b", "c"]}
    assert typed(**saved.parameters) == values and starts(folder) == ["model"]
    assert derive_name_and_parameters(typed, saved.parameters) == (path.name, saved.parameters)


def test_a_flow_called_by_a_flow_has_a_run_of_its_own_under_any_name_of_the_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @flow
    def inner(base: str) -> StageHandle:
        return grown("model", 2, model=base)

    @flow
    def outer() -> float:
        made = inner(grown("model").outputs["model"])
        return grown("last", model=made.outputs["model"]).metrics["size"]

    assert outer() == 4.0
    current = find_newest_flow()
    assert current is not None and current.name == "outer"
    monkeypatch.setenv("COSMOS_RUN_ID", current.run_id)
    assert outer() == 4.0 and len(list(folder.glob("outputs/*/pipeline.toml"))) == 2


@pytest.mark.full
@pytest.mark.usefixtures("workers")
def test_a_flow_whose_time_is_over_stops_its_stage(folder: Path) -> None:
    @flow
    def late(run_id: str = "late") -> None:
        custom(f"{PROGRAMS}/counting.py:count", arguments={"steps": 10**6})

    stage = folder / "outputs/late/stages/custom"
    for seconds in (3, 20, 100):  # until the stage has begun in time
        if not (stage / "visits.txt").exists():
            with pytest.raises(TimeoutError):
                late.with_options(timeout_seconds=seconds)()
    assert read_state(stage).state == "stopped"


def test_a_decorated_function_is_the_entry_of_the_file_that_defines_it() -> None:
    state: Any = SimpleNamespace(entrypoint="flow.py:flow", run=None)
    for function in (in_context, cached):  # the code of the first one is in contextlib.py
        call, _ = _make_call(state, all_kinds()["custom"], "stage", {"entry": function}, {})
        assert call.stage["entry"] == f"{__file__}:{function.__qualname__}"
    with pytest.raises(ConfigError, match="get_user_name was decorated elsewhere; do it where it is defined"):
        _make_call(state, all_kinds()["custom"], "stage", {"entry": functools.cache(get_user_name)}, {})


@contextmanager
def in_context() -> Iterator[None]:
    yield


@functools.cache
def cached() -> None:
    pass
