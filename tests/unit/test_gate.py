"""Conditions of a gate, and what it compares them with."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, GateFailed
from cosmos_core.run.directory import Run
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome
from cosmos_core.upload.file import FileTarget
from tasks.kinds import all_kinds
from tasks.layout import read_upstream_results
from tasks.stage import run_stage
from tasks.stages import gate
from tests.unit.run_folder import make_inputs

COMPARED: list[tuple[str, float, float | None, bool]] = [
    ("m >= 0.5", 0.5, None, True), ("m >= 0.5", 0.4999, None, False), ("m > 0.5", 0.5, None, False),
    ("m <= 2", 2.0, None, True), ("m < 2", 2.0, None, False), ("m == 1e0", 1.0, None, True),
    ("m>=-1", -1.0, None, True), ("m < inf", 1e300, None, True), ("m >= 1", 0.7 + 0.2 + 0.1, None, True),
    ("m >= published", 0.5, 0.5, True), ("m > published", 0.5, 0.5, False), ("m < published", 0.4, 0.5, True),
    ("m >= published", 0.1, None, True), ("m >= 0", math.nan, None, False), ("m < 0", math.nan, None, False),
    ("m >= published", math.nan, None, False), ("m >= published", 0.5, math.nan, False),
    ("m >= published - 0.01", 0.3, 0.31, True), ("m >= published-.01", 0.29, 0.31, False),
    ("m > published + 1e-1", 0.3, 0.2, False), ("m > published + 1e-1", 0.31, 0.2, True),
    ("m >= published - 0.01", 0.1, None, True), ("m not worse than published by 0.02", 0.29, 0.31, True),
    ("m  not worse than published by 0.02", 0.28, 0.31, False), ("m not worse than published", 0.3, 0.31, False),
    *[(f"m {words} published", n / 9, n / 9, True) for n in range(9) for words in (">=", "<=", "not worse than")],
    *[(f"m {sign} published", n / 9, n / 9, False) for n in range(9) for sign in "<>"],
    ("m >= published - 0.01", 197 / 300, 200 / 300, True), ("m > published - 0.01", 197 / 300, 200 / 300, False),
]  # fmt: skip
NONE = [
    "", "m", "m >=", ">= 1", "m => 1", "m >= x", "m >= nan", "m >= 1 2", "m != 1", "m >= published -",
    "m >= published - -1", "m >= published * 2", "m >= published - nan", "m >= publishedd", "m not worse than 1",
    "m not worse than published by", "m not worse than published by x",
]  # fmt: skip


def test_a_condition_compares_a_metric_with_a_number_or_with_what_is_published() -> None:
    for text, value, published, passes in COMPARED:
        condition = parse_condition(text)
        assert condition.metric == "m"
        assert condition.is_satisfied(value, condition.threshold(published)) is passes, (text, value, published)


def test_what_is_no_condition_is_refused_with_the_form() -> None:
    for text in NONE:
        with pytest.raises(ValueError, match=r"must be METRIC >= NUMBER, METRIC >= published, .* or METRIC not worse"):
            parse_condition(text)


def gate_stage(folder: Path, require: tuple[str, ...], published: dict[str, float] | None = None) -> Stage:
    """A gate behind two measurements, before a target where something may be published."""
    target = folder / "published"
    if published is not None:
        (target / "v1").mkdir(parents=True)
        (target / "v1" / "published.json").write_text(json.dumps({"metrics": published, "files": {}}))
        (target / "latest").symlink_to("v1")
    inputs = {"before": {"metrics": {"accuracy": 0.4, "loss": 2.0}}, "after": {"metrics": {"accuracy": 0.7}}}
    config = StageConfig(name="gate", kind="gate", after=("before", "after"), require=require, target=str(target))
    kind = all_kinds()[config.kind]
    return Stage(folder / "stages" / "gate", config, Recipe(), "", None, inputs, "f" * 64, kind=kind)


def test_a_gate_that_holds_reports_each_condition_and_hands_the_metrics_on(tmp_path: Path) -> None:
    outcome = gate.run(gate_stage(tmp_path, ("accuracy >= 0.6", "before.accuracy >= 0.3", "accuracy >= published")))
    assert outcome.metrics == {"accuracy": 0.7, "loss": 2.0}
    assert outcome.info["conditions"] == [
        {"condition": "accuracy >= 0.6", "value": 0.7, "bound": 0.6, "passed": True},
        {"condition": "before.accuracy >= 0.3", "value": 0.4, "bound": 0.3, "passed": True},
        {"condition": "accuracy >= published", "value": 0.7, "bound": None, "passed": True},
    ]


@pytest.mark.parametrize(
    ("require", "published", "said"),
    [
        (("accuracy >= 0.8",), None, "accuracy >= 0.8 does not hold: accuracy = 0.7, bound 0.8"),
        (("accuracy >= published",), {"accuracy": 0.9}, "accuracy >= published does not hold: accuracy = 0.7, bound "
         "0.9"),
        (("before.accuracy >= published",), {"accuracy": 0.5}, "before.accuracy >= published does not hold: "
         "before.accuracy = 0.4, bound 0.5"),
        (("accuracy > 1", "loss < 1"), None, "accuracy > 1 does not hold: accuracy = 0.7, bound 1; loss < 1 does not "
         "hold: loss = 2, bound 1"),
    ],
)  # fmt: skip
def test_a_gate_that_does_not_hold_says_which_condition_by_how_much(
    tmp_path: Path, require: tuple[str, ...], published: dict[str, float] | None, said: str
) -> None:
    with pytest.raises(GateFailed) as caught:
        gate.run(gate_stage(tmp_path, require, published))
    assert str(caught.value) == f"gate 'gate': {said}"


def test_a_better_model_passes(tmp_path: Path) -> None:
    outcome = gate.run(gate_stage(tmp_path, ("accuracy > published", "loss < 3"), {"accuracy": 0.65}))
    assert outcome.info["conditions"] == [
        {"condition": "accuracy > published", "value": 0.7, "bound": 0.65, "passed": True},
        {"condition": "loss < 3", "value": 2.0, "bound": 3.0, "passed": True},
    ]


def test_a_resumed_run_compares_its_published_model_with_the_version_before_it(tmp_path: Path) -> None:
    stage = gate_stage(tmp_path, ("accuracy > published",), {"accuracy": 0.65})
    outcome, target = gate.run(stage), FileTarget(stage.config.target)
    record = {"run_id": tmp_path.name, "metrics": {**outcome.metrics, "export/error": 0.0}, "files": {}}
    (tmp_path / "model").mkdir()
    target.publish(tmp_path / "model", "v2", record)
    assert gate.run(stage) == outcome, "not with itself"
    target.publish(tmp_path / "model", "v3", {**record, "run_id": "another"})
    with pytest.raises(GateFailed, match=r"bound 0\.7$"):
        gate.run(stage)


def test_what_is_published_must_have_the_metric_that_is_compared(tmp_path: Path) -> None:
    said = "gate 'gate': 'loss < published': what is published has no 'loss'; compare with a number"
    with pytest.raises(ConfigError, match=f"^{said}$"):
        gate.run(gate_stage(tmp_path, ("loss < published",), {"accuracy": 0.65}))


@pytest.mark.parametrize(
    ("text", "lowest", "highest"), [("a/kl_free/acc not worse than published by 1", 4, math.inf),
                                    ("a/word_perplexity not worse than published by 1", -math.inf, 6),
                                    ("evaluation/wmt16-en-ro/ter not worse than published by 1", -math.inf, 6),
                                    ("a/brier_score not worse than published by 1", -math.inf, 6),
                                    ("a/character_match not worse than published by 1", 4, math.inf),
                                    ("validation/loss/code not worse than published by 1", -math.inf, 6),
                                    ("sft.validation/loss/* not worse than published by 1", -math.inf, 6)]
)  # fmt: skip
def test_worse_is_higher_for_a_loss_and_lower_for_a_score(text: str, lowest: float, highest: float) -> None:
    condition = parse_condition(text)
    values = [-100.0, 4.0, 6.0, 100.0]
    passing = [value for value in values if condition.is_satisfied(value, condition.threshold(5.0))]
    assert passing == [value for value in values if lowest <= value <= highest]


BENCHMARKS = {"evaluation/a/acc": 0.5, "evaluation/a/acc_stderr": 0.1, "evaluation/b/acc": 0.3, "evaluation/new/acc": 0}


def test_a_condition_with_a_star_holds_for_every_benchmark_that_is_published(tmp_path: Path) -> None:
    condition = "evaluation/*/acc not worse than published by 0.02"
    for b, holds in ((0.32, True), (0.33, False)):
        stage = gate_stage(tmp_path / str(b), (condition,), {"evaluation/a/acc": 0.4, "evaluation/b/acc": b})
        stage.inputs["after"]["metrics"] |= BENCHMARKS
        if not holds:
            message = f"{condition} does not hold: evaluation/b/acc = 0.3, bound 0.31"
            with pytest.raises(GateFailed, match=re.escape(f"gate 'gate': {message}")):
                gate.run(stage)
            continue
        assert gate.run(stage).info["conditions"] == [
            {"condition": condition, "metric": f"evaluation/{task}/acc", "value": value, "bound": bound, "passed": True}
            for task, value, bound in (("a", 0.5, 0.38), ("b", 0.3, 0.3))
        ]


def test_a_condition_with_a_star_must_be_about_something(tmp_path: Path) -> None:
    for require, said in (
        ("evaluation/*/f1 > 0", "no stage in its `after` reported 'evaluation"),
        ("evaluation/*/acc >= published", "what is published has no 'evaluation/a/acc' or "),
    ):
        stage = gate_stage(tmp_path / said[:4], (require,), {"loss": 1.0})
        stage.inputs["after"]["metrics"] |= BENCHMARKS
        with pytest.raises(ConfigError, match=said):
            gate.run(stage)


def test_a_gate_asks_only_for_metrics_that_somebody_reports(tmp_path: Path) -> None:
    said = "gate 'gate': no stage in its `after` reported 'acuracy'; reported: accuracy, loss"
    with pytest.raises(ConfigError, match=f"^{said}$"):
        gate.run(gate_stage(tmp_path, ("acuracy >= 0.8",)))


def test_a_measurement_that_is_not_a_number_passes_nothing(tmp_path: Path) -> None:
    stage = gate_stage(tmp_path, ("accuracy >= published",))
    stage.inputs["after"]["metrics"]["accuracy"] = math.nan
    with pytest.raises(GateFailed, match=r"^gate 'gate': accuracy >= published does not hold: accuracy = nan$"):
        gate.run(stage)


@pytest.mark.parametrize(
    ("accuracy", "confidence", "passes"),
    [(0.75, 0.0, True), (0.75, 0.95, False), (0.90, 0.95, True), (0.7, 0.0, False)],
)
def test_with_confidence_noise_is_not_better(tmp_path: Path, accuracy: float, confidence: float, passes: bool) -> None:
    name = "validation/accuracy"
    stage = gate_stage(tmp_path, (f"{name} > published",), {name: 0.7, "validation/prompts": 100.0})
    stage.inputs = {"after": {"metrics": {name: accuracy, "validation/prompts": 100.0}}}
    stage.config = stage.config.model_copy(update={"confidence": confidence})
    if not passes:
        noise = ", noise 0.104" if confidence else ""
        with pytest.raises(GateFailed, match=rf"= {accuracy}, bound 0.7{noise}$"):
            gate.run(stage)
        return
    (found,) = gate.run(stage).info["conditions"]
    # By hand: shares (70+1)/102 and (90+1)/102 of 100 draws each, 1.645 standard errors of the difference.
    noise = 1.6449 * math.sqrt((71 / 102 * 31 / 102 + 91 / 102 * 11 / 102) / 100)
    assert found.get("noise", 0.0) == pytest.approx(noise if confidence else 0.0, rel=1e-4)


@pytest.mark.parametrize("order", [("exact", "noisy"), ("noisy", "exact")])
def test_the_noise_is_that_of_the_stage_which_is_compared(tmp_path: Path, order: tuple[str, str]) -> None:
    name = "validation/reward"
    measured = {"exact": {name: 0.6, f"{name}_stderr": 0.01}, "noisy": {name: 0.9, f"{name}_stderr": 1.0}}
    published = {name: 0.5, f"{name}_stderr": 0.01}
    stage = gate_stage(tmp_path, (f"exact.{name} >= published",), published)
    stage.config = stage.config.model_copy(update={"confidence": 0.95})
    stage.inputs = {each: {"metrics": measured[each]} for each in order}
    (found,) = gate.run(stage).info["conditions"]
    assert (found["value"], found["noise"]) == (0.6, pytest.approx(1.6449 * math.hypot(0.01, 0.01), rel=1e-4))
    stage.config = stage.config.model_copy(update={"require": (f"noisy.{name} >= published",)})
    with pytest.raises(GateFailed, match=r"= 0.9, bound 0.5, noise 1.64$"):
        gate.run(stage)


def test_nobody_knows_how_exact_an_accuracy_in_percent_is(tmp_path: Path) -> None:
    name = "validation/accuracy"
    published = {name: 70.0, "validation/prompts": 100.0}
    stage = gate_stage(tmp_path, (f"{name} >= published",), published)
    stage.config = stage.config.model_copy(update={"confidence": 0.95})
    stage.inputs = {"after": {"metrics": {name: 75.0, "validation/prompts": 100.0}}}
    with pytest.raises(ConfigError, match=r"report validation/accuracy_stderr, or set confidence = 0$"):
        gate.run(stage)


def test_confidence_takes_a_standard_error_that_was_measured_and_asks_for_one(tmp_path: Path) -> None:
    published = {"validation/loss": 2.0, "validation/loss_stderr": 0.3}
    stage = gate_stage(tmp_path, ("validation/loss < published",), published)
    stage.config = stage.config.model_copy(update={"confidence": 0.975})
    for loss, error, passes in ((1.1, 0.4, False), (0.9, 0.4, True), (1.1, None, None)):
        measured = {"validation/loss": loss} | ({"validation/loss_stderr": error} if error else {})
        stage.inputs = {"after": {"metrics": measured}}
        if passes:
            assert gate.run(stage).info["conditions"][0]["noise"] == pytest.approx(1.96 * 0.5, rel=1e-3)
            continue
        said = "does not hold" if error else "report validation/loss_stderr, or set confidence = 0$"
        with pytest.raises((GateFailed, ConfigError), match=said):
            gate.run(stage)


EXPORTED = """
[policy]
model_name_or_path = "FOLDER/model"
[train]
ckpt.enable_checkpoint = true
[validation]
enable = true
[train.train_policy]
type = "sft"
dataset.name = "FOLDER/rows.jsonl"
[[pipeline.stages]]
name = "sft"
kind = "sft"
[[pipeline.stages]]
name = "export"
kind = "export"
model = "stage:sft"
after = "sft"
CHECKPOINT
[[pipeline.stages]]
name = "archive"
kind = "export"
model = "stage:sft"
after = "sft"
[[pipeline.stages]]
name = "measure"
kind = "validate"
model = "stage:sft"
after = "sft"
[[pipeline.stages]]
name = "gate"
kind = "gate"
after = "sft"
require = "validation/loss <= 0.5"
[[pipeline.stages]]
name = "publish"
kind = "upload"
model = "stage:export"
after = ["sft", "export", "gate"]
target = "FOLDER/published"
"""


def exported(folder: Path, checkpoint: str) -> Pipeline:
    """A training, the exports of one of its checkpoints and of its final model, and a gate before the former is
    published."""
    make_inputs(folder)
    setting = f'checkpoint = "{checkpoint}"' if checkpoint else ""
    text = EXPORTED.replace("FOLDER", str(folder)).replace("CHECKPOINT", setting)
    (folder / "c.toml").write_text(text)
    return load_pipeline(folder / "c.toml", (), all_kinds())


@pytest.mark.parametrize(
    ("checkpoint", "has_lines", "loss", "others"),
    [
        ("best", True, 0.4, {"loss": 0.3, "validation/tokens": 7}), ("2", True, 0.6, {"loss": 0.2}),
        pytest.param("3", True, 0.9, {"loss": 0.1, "validation/tokens": 7}, marks=pytest.mark.full),
        ("", True, 0.9, {"loss": 0.1, "validation/tokens": 7}), ("best", False, 0.4, {"loss": 0.1}),
    ],
)  # fmt: skip
def test_a_gate_judges_the_checkpoint_that_is_exported(
    tmp_path: Path, checkpoint: str, has_lines: bool, loss: float, others: dict[str, float]
) -> None:
    run = Run(tmp_path / "run", exported(tmp_path, checkpoint))
    lines = [
        {"step": 1, "time": 1.0, "loss": 0.3}, {"step": 1, "time": 2.0, "validation/loss": 0.4, "validation/tokens": 7},
        {"step": 2, "time": 3.0, "loss": 0.2, "validation/loss": 0.6}, {"step": 3, "time": 4.0, "loss": 0.1},
    ]  # fmt: skip
    run.stage_path("sft").mkdir(parents=True)
    if has_lines:
        (run.stage_path("sft") / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    best = {"step": 1, "metric": "validation/loss", "value": 0.4}
    outcome = Outcome(
        metrics={"loss": 0.1, "validation/loss": 0.9, "validation/tokens": 7}, info={"step": 3, "best": best}
    )
    commit_manifest(run.stage_path("sft"), outcome, kind="sft", fingerprint="f", inputs={})
    for reader in ("gate", "export"):  # the card of the export shows them too
        inputs = read_upstream_results(run, run.pipeline.stage(reader))
        assert inputs["sft"]["metrics"] == {"validation/loss": loss} | others
    with pytest.raises(GateFailed, match=f"validation/loss = {loss}") if loss > 0.5 else nullcontext():
        run_stage(run, "gate")
    if not has_lines:
        settings = ("gate.require=validation/tokens >= 7",)
        other = Run(run.path, load_pipeline(tmp_path / "c.toml", settings, all_kinds()))
        with pytest.raises(ConfigError, match=r"; those of step 1 of 'sft' are in .*sft/metrics.jsonl, which is not"):
            run_stage(other, "gate")


def test_a_gate_judges_the_final_model_that_a_later_training_continues(tmp_path: Path) -> None:
    exported(tmp_path, "best")
    text = (tmp_path / "c.toml").read_text().replace('"archive"\nkind = "export"', '"archive"\nkind = "sft"')
    (tmp_path / "c.toml").write_text(text.replace("stage:export", "stage:archive").replace('"export", ', '"archive", '))
    run = Run(tmp_path / "run", load_pipeline(tmp_path / "c.toml", (), all_kinds()))
    info: dict[str, JsonValue] = {"step": 3, "best": {"step": 1, "metric": "validation/loss", "value": 0.4}}
    run.stage_path("sft").mkdir(parents=True)
    commit_manifest(run.stage_path("sft"), Outcome((), {"loss": 0.9}, info), kind="sft", fingerprint="f", inputs={})
    assert read_upstream_results(run, run.pipeline.stage("gate"))["sft"]["metrics"] == {"loss": 0.9}


@pytest.mark.parametrize(
    ("checkpoint", "measured", "is_refused"),
    [
        ("best", "stage:sft", True),
        ("best", "stage:export", False),
        ("", "stage:sft", False),
        pytest.param("9", "stage:sft", False, marks=pytest.mark.full),
    ],
)
def test_a_gate_that_judges_another_model_than_the_published_one_is_refused(
    tmp_path: Path, checkpoint: str, measured: str, is_refused: bool
) -> None:
    exported(tmp_path, checkpoint)
    settings = (
        f"measure.model={measured}",
        f"measure.after={measured[6:]}",
        "gate.after=measure",
        "train.max_num_steps=9",
    )
    pipeline = load_pipeline(tmp_path / "c.toml", settings, all_kinds())
    said = (
        r"stage 'gate': .* 'measure' measures the final model of 'stage:sft', but 'publish' publishes checkpoint = 'b"
    )
    with pytest.raises(ConfigError, match=said) if is_refused else nullcontext():
        check_capabilities(pipeline)


def test_a_published_metric_that_is_not_a_number_is_that_of_the_run(tmp_path: Path) -> None:
    stage = gate_stage(tmp_path, ("accuracy > published",), {"accuracy": 0.65})
    stage.inputs["after"]["metrics"]["drift"] = math.nan
    (tmp_path / "model").mkdir()
    record = {"run_id": tmp_path.name, "metrics": gate.run(stage).metrics, "files": {}}
    FileTarget(stage.config.target).publish(tmp_path / "model", "v2", record)
    assert gate.run(stage).info["conditions"][0]["bound"] == 0.65, "not its own"


@pytest.mark.parametrize("metric", ["loss", "reward/score", "rewards/accuracy", "reward", "pass@4"])
def test_a_comparison_whose_noise_nothing_reports_is_refused_before_anything_runs(tmp_path: Path, metric: str) -> None:
    exported(tmp_path, "")
    reward = "{'FOLDER/mine.py:score' = 1.0}".replace("FOLDER", str(tmp_path))
    settings = (f"gate.require=validation/{metric} not worse than published", f"validation.reward_function={reward}")
    check_capabilities(load_pipeline(tmp_path / "c.toml", settings, all_kinds()))
    pipeline = load_pipeline(tmp_path / "c.toml", (*settings, "gate.confidence=0.95"), all_kinds())
    said = rf"stage 'gate': confidence = 0.95: no stage in its `after` reports 'validation/{metric}_stderr'"
    with nullcontext() if metric in {"reward", "pass@4"} else pytest.raises(ConfigError, match=said):
        check_capabilities(pipeline)
