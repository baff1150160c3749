"""What page, summary and card of a run say of what it has published, and of metrics that are out of every range."""

from __future__ import annotations

import io
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.observe import report
from cosmos_core.observe.console import print_summary
from cosmos_core.observe.record import read_run
from cosmos_core.run.files import read_json_object
from cosmos_core.run.progress import ProgressRecord
from tasks import events
from tasks.artifacts import StageArtifacts, _render_run_card, make_run_card_key
from tests.unit.observed_runs import Page, finished_run, write, write_lines


@pytest.mark.parametrize(("url", "has_export"), [("s3://models/sums/v1", True), ("/published/v1", False)])
def test_what_is_published_stands_beside_the_model_of_the_run(tmp_path: Path, has_export: bool, url: str) -> None:
    run = finished_run(tmp_path)
    pipeline = run / "pipeline.toml"
    publish = '[[pipeline.stages]]\nname = "publish"\nkind = "upload"\nafter = ["grpo"]\n'
    pipeline.write_text(pipeline.read_text() + publish)
    result = read_json_object(run / "stages" / "export" / "result.json")
    write(run / "stages" / "publish" / "result.json", result | {"info": {"model": url, "published": url}})
    if not has_export:
        write(run / "stages" / "export" / "result.json", result | {"info": {}})
    model = run / "stages" / ("export" if has_export else "grpo") / "safetensors" / "step_80"
    record, out = read_run(run), io.StringIO()
    assert (record.model, record.published_locations) == (model, [url])
    print_summary(run, stream=out)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"model                      {model}" in lines and f"published                  {url}" in lines
    text = Page(report.build_report(run)).text
    assert f"Model {model} from" in text and f"published {url}" in text
    card = _render_run_card(record)
    assert f"model `{model}`" in card and f"published `{url}`" in card


@pytest.mark.parametrize("metric", [1e308, -(10**400)], ids=["large", "of 400 digits"])
def test_metrics_beyond_every_float_cost_neither_the_page_nor_the_summary(tmp_path: Path, metric: float) -> None:
    run = finished_run(tmp_path)
    stage = run / "stages" / "grpo"
    lines = [{"step": 1, "reward/mean": metric}, {"step": 2, "reward/mean": -metric}]
    write_lines(stage / "metrics.jsonl", lines)
    samples = [{"step": step, "prompt": "p", "completion": "c", "reward": metric * (3 - 2 * step)} for step in (1, 2)]
    write_lines(stage / "samples.jsonl", samples)
    write(stage / "result.json", read_json_object(stage / "result.json") | {"metrics": {"reward/mean": metric}})
    out = io.StringIO()
    print_summary(run, stream=out)
    told = "1e+308" if metric > 0 else "-inf"
    assert f"reward {told}" in out.getvalue() and told in Page(report.build_report(run)).text


def test_a_version_that_a_resumed_run_publishes_again_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[str] = []
    monkeypatch.setattr(events, "_emit_event", lambda event, *_: emitted.append(event))
    run: Any = SimpleNamespace(pipeline=SimpleNamespace(
        stage=lambda _: SimpleNamespace(target="t"), stage_kind=lambda _: SimpleNamespace(makes="publication")
    ))  # fmt: skip
    results: list[Any] = [{"metrics": {}, "info": {"published": address}} for address in ("v1", "v1", "v2")]
    for earlier_result, result in zip([None, *results], results, strict=False):
        events.emit_stage_completed(run, "publish", result, was_reused=False, earlier_result=earlier_result)
    assert emitted.count("cosmos.stage.completed") == 3 and emitted.count("cosmos.model.published") == 2


def test_a_server_that_does_not_respond_holds_up_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            artifacts = StageArtifacts(PipelineConfig(name="held"), tmp_path / "run/stages/sft")
            for step in (1, 2):
                artifacts.update(ProgressRecord(step=step, total=2))
            assert "artifacts" in {thread.name for thread in threading.enumerate()}, "the server is still asked"
            thread = artifacts._thread
            monkeypatch.setattr("tasks.artifacts._MAX_PUBLISH_WAIT_SECONDS", 0.0)
            no_result: Any = None
            artifacts.finish(no_result)
        assert thread is not None and thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()


def test_pipelines_whose_names_differ_in_letters_that_keys_lack_share_no_artifacts() -> None:
    keys = [make_run_card_key(name) for name in ("数学", "物理", "Übung 1", "übung-1", "math")]
    assert len({*keys}) == 5 and keys[-1] == "math-run" and all(re.fullmatch("[a-z0-9][a-z0-9-]*", key) for key in keys)
