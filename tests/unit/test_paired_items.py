"""Comparisons per item: wrong promotions are as rare as promised, and planted differences are found."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import binom

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import PipelineConfig, StageConfig
from cosmos_core.errors import GateFailed
from cosmos_core.observe.plan_table import describe_smallest_effects
from cosmos_core.observe.record import GateCondition
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.run.paired_items import (
    PairedDifferences,
    compare_items,
    compute_detectable_effect,
    compute_sample_size,
    correct_p_values,
)
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tasks.stages import gate
from tests.unit.test_gate import gate_stage

NUM_ITEMS, NUM_DRAWS, CONFIDENCE = 600, 300, 0.95


def retrainings(change: float, seed: int) -> list[PairedDifferences]:
    """Return comparisons of pairs of models whose accuracy on items of differing difficulty differs by `change`."""
    random = np.random.default_rng(seed)
    difficulty = random.beta(0.5, 0.5, NUM_ITEMS) * (1 - abs(change)) + max(-change, 0)
    old, new = (random.random((NUM_DRAWS, NUM_ITEMS)) < p for p in (difficulty, difficulty + change))
    return [PairedDifferences(tuple(row), has_binary_metric=True) for row in new.astype(float) - old.astype(float)]


@pytest.mark.parametrize("margin", [0.0, pytest.param(-0.04, marks=pytest.mark.full)])
def test_equal_models_are_rarely_promoted_and_planted_differences_are_found(margin: float) -> None:
    def rate(change: float) -> float:
        return float(np.mean([each.p_value(margin) <= 1 - CONFIDENCE for each in retrainings(change, seed=1)]))

    assert rate(margin) <= binom.ppf(0.999, NUM_DRAWS, 1 - CONFIDENCE) / NUM_DRAWS
    detectable = float(np.mean([each.summarize(CONFIDENCE)["detectable"] for each in retrainings(margin, seed=2)]))
    assert 0.72 <= rate(margin + detectable) <= 0.9  # promised: 80 of 100
    assert rate(margin - 0.02) <= 0.02
    low_high = [each.summarize(CONFIDENCE) for each in retrainings(0.02, seed=3)]
    assert 0.92 <= np.mean([each["low"] <= 0.02 <= each["high"] for each in low_high]) <= 0.99


def test_equal_results_of_few_items_are_not_certain() -> None:
    same = PairedDifferences((0.0,) * 10, has_binary_metric=True)
    assert (same.p_value(), same.p_value(-0.02) > 0.05) == (1.0, True)
    assert PairedDifferences((0.0,) * 5000, has_binary_metric=True).p_value(-0.02) < 0.05


def write_evaluation(folder: Path, scores: list[float] | dict[str, list[float]], **columns: Any) -> dict[str, Any]:
    """Write the stage directory of an evaluation of benchmark `a`, or of several, and return its result as a gate
    receives it; `columns` are further columns of the items, and `metrics` replaces the means."""
    folder.mkdir(parents=True)
    scores = scores if isinstance(scores, dict) else {"a": scores}
    metrics = columns.pop("metrics", {f"evaluation/{task}/acc": sum(v) / len(v) for task, v in scores.items()})
    metrics = {key: value for name, mean in metrics.items() for key, value in ((name, mean), (f"{name}_stderr", 0.05))}
    items = [(task, i, value) for task, values in scores.items() for i, value in enumerate(values)]
    names, numbers, values = map(list, zip(*items, strict=True))
    rows = {"task": names, "doc_id": numbers, "doc_hash": list(map(str, numbers)), "acc": values, **columns}
    pq.write_table(pa.table(rows), folder / "items.parquet")
    result = commit_manifest(
        folder, Outcome(("items.parquet",), metrics), kind="evaluate", fingerprint="f" * 64, inputs={}
    )
    return {**result, "path": str(folder)}


def evaluation(folder: Path, run: str, scores: list[float] | dict[str, list[float]], **columns: Any) -> dict[str, Any]:
    return write_evaluation(folder / run / "stages" / "scores", scores, **columns)


def confident_gate(folder: Path, require: str, published: dict[str, Any]) -> Stage:
    """A gate with a confidence, after a new evaluation."""
    stage = gate_stage(folder / "new", (require,), published["metrics"])
    stage.config = stage.config.model_copy(update={"confidence": 0.95})
    return stage


def publish_items(folder: Path) -> Path:
    """Record that the published model is that of the run `old`; return the record."""
    record = folder / "new" / "published" / "v1" / "published.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"stage": str(folder / "old" / "stages" / "up")}))
    return record


def test_a_gate_compares_the_items_of_both_models(tmp_path: Path) -> None:
    old = [float(i % 2) for i in range(100)]
    new = [1.0 if i < 12 else score for i, score in enumerate(old)]  # six items more, and none less
    stage = confident_gate(tmp_path, "evaluation/a/acc > published", evaluation(tmp_path, "old", old))
    stage.inputs["after"] = evaluation(tmp_path, "new", new)
    with pytest.raises(GateFailed, match="noise"):  # without the items of the published model
        gate.run(stage)
    publish_items(tmp_path)
    [entry] = gate.run(stage).info["conditions"]  # type: ignore[union-attr, misc]
    assert isinstance(entry, dict) and entry["passed"] and "noise" not in entry
    found: Any = entry["paired"]
    assert (found["better"], found["worse"], found["items"], found["p_value"]) == (6, 0, 100, 0.5**6)
    title = GateCondition.model_validate(entry).title
    interval = r"\+0.06 \(\+0.0\d+ \.\. \+0.\d+\)"
    assert re.fullmatch(rf"evaluation/a/acc > published: {interval} on 100 items, \d+ needed", title)
    stage.config = stage.config.model_copy(update={"require": ("evaluation/a/acc > published + 0.05",)})
    message = r"\+0.06 \(.* \.\. .*\) on 100 items, of which 6 are better and 0 worse, p = 0"
    with pytest.raises(GateFailed, match=message):
        gate.run(stage)


def test_a_gate_after_another_or_after_a_choice_compares_the_items_of_what_it_forwards(tmp_path: Path) -> None:
    old = [float(i % 2) for i in range(100)]
    better, alike = [1.0 if i < 12 else score for i, score in enumerate(old)], old
    stage = confident_gate(tmp_path, "evaluation/a/acc > published", evaluation(tmp_path, "old", old))
    publish_items(tmp_path)
    stages = tmp_path / "new" / "stages"
    results = {name: write_evaluation(stages / name, scores) for name, scores in (("s-0", alike), ("s-1", better))}
    for name, inputs in (("select", results), ("first-gate", {"select": results["s-1"]})):
        forwarded = Outcome(metrics=results["s-1"]["metrics"])
        (stages / name).mkdir()
        result = commit_manifest(stages / name, forwarded, kind="gate", fingerprint="f" * 64, inputs=inputs)
        stage.inputs = {name: {**result, "path": str(stages / name)}}
        [entry] = gate.run(stage).info["conditions"]  # type: ignore[union-attr, misc]
        paired: Any = entry["paired"]  # type: ignore[call-overload, index]
        assert (paired["better"], paired["worse"], paired["items"]) == (6, 0, 100)


def test_a_gate_compares_with_the_items_of_the_published_model_and_not_of_another_with_as_many_right(
    tmp_path: Path,
) -> None:
    alike, other = ([float((i + shift) % 2) for i in range(100)] for shift in (0, 1))
    new = [1.0 if i < 12 else score for i, score in enumerate(alike)]  # six items more than `alike`, and none less
    metric = "evaluation/a/right/strict"
    columns: Any = {"metrics": {metric: 0.5}, "right/strict": alike}
    published = evaluation(tmp_path, "old", alike, **columns)
    write_evaluation(tmp_path / "old" / "stages" / "base", other, **columns | {"right/strict": other})
    stage = confident_gate(tmp_path, f"{metric} > published", published)
    publish_items(tmp_path)
    stage.inputs["after"] = evaluation(tmp_path, "new", new, **{"metrics": {metric: 0.56}, "right/strict": new})
    [entry] = gate.run(stage).info["conditions"]  # type: ignore[union-attr, misc]
    found: Any = entry["paired"]  # type: ignore[index, call-overload]
    assert (found["better"], found["worse"]) == (6, 0)


@pytest.mark.parametrize(("published", "passes"), [(0.5, True), (0.51, False)])
def test_an_equal_metric_is_equal_whatever_the_noise(tmp_path: Path, published: float, passes: bool) -> None:
    old = evaluation(tmp_path, "old", [float(i % 2) for i in range(100)])
    metrics = {**old["metrics"], "evaluation/a/acc": published}
    stage = confident_gate(tmp_path, "evaluation/a/acc == published", {**old, "metrics": metrics})
    stage.inputs["after"] = old
    with nullcontext() if passes else pytest.raises(GateFailed, match=r"= 0\.5, bound 0\.51$"):
        gate.run(stage)


def test_the_correction_of_holm() -> None:
    by_hand = [0.03, 0.06, 0.06, 0.02]  # by the procedure of his paper
    assert correct_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx(by_hand)
    assert (correct_p_values([]), correct_p_values([0.2]), correct_p_values([0.6, 0.7])) == ([], [0.2], [1.0, 1.0])


def test_holm_finds_one_of_equal_benchmarks_as_rarely_as_promised() -> None:
    p_values = np.array([each.p_value(-0.04) for each in retrainings(-0.04, seed=4)]).reshape(-1, 10)
    wrong = sum(min(correct_p_values(list(row))) <= 0.05 for row in p_values)
    assert wrong <= binom.ppf(0.999, len(p_values), 0.05) < sum(row.min() <= 0.05 for row in p_values)


def test_the_smallest_effect_of_items_is_found_as_often_as_promised(tmp_path: Path) -> None:
    random, accuracy = np.random.default_rng(5), 0.4
    old = (random.random((NUM_DRAWS, NUM_ITEMS)) < accuracy).astype(float)
    write_evaluation(tmp_path / "old", list(old[0]))
    found = compute_detectable_effect("evaluation/a/acc", float(old[0].mean()), tmp_path / "old", CONFIDENCE)
    assert found is not None and found[0] == NUM_ITEMS
    effect = found[1]
    new = (random.random((NUM_DRAWS, NUM_ITEMS)) < accuracy + effect).astype(float)
    pairs = [PairedDifferences(tuple(row), has_binary_metric=True) for row in new - old]
    assert 0.72 <= np.mean([each.p_value() <= 1 - CONFIDENCE for each in pairs]) <= 0.9
    assert (
        compute_detectable_effect("evaluation/a/acc", 0.9, tmp_path / "old", CONFIDENCE) is None
    )  # not the mean of its items
    required = [compute_sample_size(NUM_ITEMS, effect, margin) for margin in (effect, effect / 2, 0.0)]
    assert required == [NUM_ITEMS, 2400, None]


def test_a_plan_says_what_a_gate_can_show(tmp_path: Path) -> None:
    folder = tmp_path / "old" / "stages" / "scores"
    metrics = write_evaluation(folder, [float(i % 2) for i in range(400)])["metrics"]
    requires = ("evaluation/*/acc not worse than published by 0.05", "evaluation/a/acc > 0.3")
    stage = gate_stage(tmp_path / "new", requires, metrics)
    config = stage.config.model_copy(update={"confidence": 0.95})

    def lines(config: StageConfig) -> list[str]:
        recipes = {config.name: stage.recipe}
        return [*describe_smallest_effects(Pipeline(tmp_path, PipelineConfig(stages=(config,)), recipes, all_kinds()))]

    assert lines(config) == []  # the run of the published model is not on this machine
    record = publish_items(tmp_path)
    quantiles = 1.6448536 + 0.8416212  # of the normal distribution at 0.95 and 0.8
    effect = quantiles * math.sqrt(2 * 0.25 / 400)
    needed = math.ceil(400 * (effect / 0.05) ** 2)
    assert lines(config) == [
        f"gate: 400 items of evaluation/a/acc show a difference of {effect:.2g} in 80 of 100 cases; "
        f"0.05 needs {needed:,}"
    ]
    assert lines(stage.config) == []  # without confidence
    assert lines(config.model_copy(update={"target": f"{tmp_path}/none"})) == []
    record.write_text("{")
    [damaged] = lines(config)
    assert damaged.startswith("gate: what is published is not known: ")


def test_a_gate_about_several_benchmarks_reports_the_correction_of_holm(tmp_path: Path) -> None:
    old = {name: [float(i % 2) for i in range(100)] for name in "ab"}
    new = {"a": [1.0 if i < 12 else value for i, value in enumerate(old["a"])],
           "b": [1.0 if i < 20 else value for i, value in enumerate(old["b"])]}  # fmt: skip
    stage = confident_gate(tmp_path, "evaluation/*/acc > published", evaluation(tmp_path, "old", old))
    publish_items(tmp_path)
    stage.inputs["after"] = evaluation(tmp_path, "new", new)
    entries: Any = gate.run(stage).info["conditions"]  # type: ignore[union-attr]
    p_values = [(entry["paired"]["p_value"], entry["paired"]["p_holm"]) for entry in entries]
    assert p_values == [(0.5**6, 0.5**6), (0.5**10, 0.5**9)]
    assert GateCondition.model_validate(entries[0]).title.endswith(" needed, p = 0.016 with Holm's correction")


def test_a_metric_that_is_not_the_mean_of_its_items_is_not_compared_by_them(tmp_path: Path) -> None:
    def perplexity(run: str, likelihood: float) -> dict[str, Any]:
        """Return the result of a perplexity, whose items are log-likelihoods."""
        values = [likelihood - 0.01 * (i % 3) for i in range(90)]
        metrics = {"evaluation/a/perplexity": math.exp(-sum(values) / len(values))}
        return evaluation(tmp_path, run, values, perplexity=values, metrics=metrics)

    require = "evaluation/a/perplexity not worse than published by 0.05"
    stage = confident_gate(tmp_path, require, perplexity("old", -2.0))
    publish_items(tmp_path)
    stage.inputs["after"] = perplexity("new", -1.5)
    [entry] = gate.run(stage).info["conditions"]  # type: ignore[union-attr, misc]
    assert isinstance(entry, dict) and entry["passed"] and "paired" not in entry
    stage.inputs["after"] = perplexity("worse", -2.5)
    with pytest.raises(GateFailed, match="noise"):
        gate.run(stage)


def test_other_items_are_not_compared(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "a", [0.0, 1.0])
    write_evaluation(tmp_path / "b", [0.0, 1.0], doc_hash=["0", "other"])
    write_evaluation(tmp_path / "c", [0.0, 1.0, 1.0])
    for other in ("b", "c", "missing"):
        assert compare_items("evaluation/a/acc", tmp_path / "a", tmp_path / other) is None
    same = compare_items("evaluation/a/acc", tmp_path / "a", tmp_path / "a")
    assert same is not None and same.item_differences == (0.0, 0.0)
    assert compare_items("evaluation/a/f1", tmp_path / "a", tmp_path / "a") is None
