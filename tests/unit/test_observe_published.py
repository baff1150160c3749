"""What page, summary and card of a run say of what it has published, and of metrics that are out of every range."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cosmos_core.observe import report
from cosmos_core.observe.console import print_summary
from cosmos_core.observe.record import read_run
from cosmos_core.run.files import read_object
from tasks.artifacts import _render_run_card
from tests.unit.observed_runs import Page, finished_run, write, write_lines


@pytest.mark.parametrize("has_export", [True, False])
@pytest.mark.parametrize("url", ["s3://models/sums/v1", "/published/v1"])
def test_what_is_published_stands_beside_the_model_of_the_run(tmp_path: Path, has_export: bool, url: str) -> None:
    run = finished_run(tmp_path)
    pipeline = run / "pipeline.toml"
    pipeline.write_text(
        pipeline.read_text() + '[[pipeline.stages]]\nname = "publish"\nkind = "upload"\nafter = ["grpo"]\n'
    )
    result = read_object(run / "stages" / "export" / "result.json")
    write(run / "stages" / "publish" / "result.json", result | {"info": {"model": url, "published": url}})
    if not has_export:
        write(run / "stages" / "export" / "result.json", result | {"info": {}})
    model = run / "stages" / ("export" if has_export else "grpo") / "safetensors" / "step_80"
    record, out = read_run(run), io.StringIO()
    assert (record.model, record.published_locations) == (model, [url])
    print_summary(run, stream=out)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert f"model                      {model}" in lines and f"published                  {url}" in lines
    text = Page(report.build(run)).text
    assert f"Model {model} from" in text and f"published {url}" in text
    card = _render_run_card(record)
    assert f"model `{model}`" in card and f"published `{url}`" in card


@pytest.mark.parametrize("metric", [1e308, -(10**400)], ids=["large", "of 400 digits"])
def test_metrics_beyond_every_float_cost_neither_the_page_nor_the_summary(tmp_path: Path, metric: float) -> None:
    run = finished_run(tmp_path)
    stage = run / "stages" / "grpo"
    lines = [{"step": 1, "reward/mean": metric}, {"step": 2, "reward/mean": -metric}]
    write_lines(stage / "metrics.jsonl", lines)
    write(stage / "result.json", read_object(stage / "result.json") | {"metrics": {"reward/mean": metric}})
    out = io.StringIO()
    print_summary(run, stream=out)
    told = "1e+308" if metric > 0 else "-inf"
    assert f"reward {told}" in out.getvalue() and told in Page(report.build(run)).text
