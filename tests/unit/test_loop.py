"""The course of a training: which step is best and stays, what is averaged, and what another run goes on with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.checkpoint.best import BestStep, select_best_step
from cosmos_core.checkpoint.resume import resume_obstacle
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, ModelError, Preempted
from cosmos_core.models.hf import load_model
from cosmos_core.run.files import write_json
from cosmos_core.run.progress import read_metrics, read_progress
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.loop import TrainLoop
from cosmos_core.train.measure import row_metrics
from cosmos_core.train.resume_from import adopt_checkpoint
from cosmos_core.train.setup import TrainingResult, export_trained, open_trainer
from cosmos_core.train.setup import train as train_stage
from cosmos_core.train.validation import MetricsFn, Validation
from tests.effects.change import SFT, recipe, stage_of
from tests.feeds import row_feed
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import assert_same_weights, curve, sft, train_until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter

STEPS: dict[str, Any] = {
    **SFT, "train.compile": False, "train.param_dtype": "float32", "train.train_batch_per_replica": 1,
    "train.optm_lr": 1e-3, "train.ckpt.enable_checkpoint": True, "train.ckpt.save_freq": 100,
    "policy.model_max_length": 32, "validation.enable": True, "validation.freq": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prepared rows: six to learn, which are six steps, and two held out."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(8)))
    dataset = {"train.train_policy.dataset.name": str(folder / "rows.jsonl"), "train.train_policy.dataset.test_size": 2}
    save_tiny_model(folder / "model")
    prepare.run(stage_of(folder / "rows", recipe({**STEPS, **dataset}), kind="prepare", model=folder / "model"))
    return folder


def stage(path: Path, inputs: Path, **settings: Any) -> Stage:
    names = {
        "max_keep": "train.ckpt.max_keep", "average": "train.ema_enable", "resume": "train.resume",
        "rate": "train.optm_lr", "steps": "train.max_num_steps",
    }  # fmt: skip
    config: Recipe = recipe({**STEPS, **{names[key]: value for key, value in settings.items()}})
    return stage_of(path, config, model=inputs / "model", data=inputs / "rows/data")


def validation(at: Stage, measure: MetricsFn, **settings: Any) -> Validation:
    return Validation(at.recipe.validation, at, measure, **settings)


def loop_of(
    at: Stage, measure: MetricsFn, feed: type[RowFeed] = RowFeed, algorithm: Algorithm | None = None, **settings: Any
) -> TrainLoop:
    """A training of rows whose held-out figures are given."""
    assert at.data is not None
    checkpointer = Checkpointer(
        at.path / "checkpoints", fingerprint="f", max_keep=at.recipe.train.ckpt.max_keep, is_async=False
    )
    rows = row_feed(open_sequences(at.data, "train"), at.recipe, feed)
    held_out = validation(at, measure, **settings)
    return TrainLoop(at, at.recipe.train, open_trainer(at), rows, algorithm or sft(), checkpointer, held_out)


def train(at: Stage, values: Sequence[float], stop_after: int = 0) -> BestStep | None:
    """A training whose held-out loss after step 1, 2, ... is given; the best step that it names."""
    at.stop_requested = False

    def measure(step: int) -> dict[str, float]:
        at.stop_requested = step == stop_after
        return {"validation/loss": values[step - 1]}

    loop = loop_of(at, measure)
    with pytest.raises(Preempted) if stop_after else nullcontext():
        loop.run()
    loop.checkpointer.close()
    return loop.validation.best_step


def kept(at: Stage) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (at.path / "checkpoints").iterdir())


def named(at: Stage) -> Any:
    return json.loads((at.path / "best.json").read_text())


def test_the_lower_loss_and_the_higher_reward_is_better_and_the_earlier_of_equals() -> None:
    best = select_best_step(None, 5, {"validation/loss": 2.0, "loss": 0.1})
    assert best == BestStep(5, "validation/loss", 2.0)
    assert select_best_step(best, 6, {"validation/loss": 2.0}) is best
    assert select_best_step(best, 7, {"validation/loss": 1.5}) == BestStep(7, "validation/loss", 1.5)
    best = select_best_step(None, 5, {"validation/reward": 0.5, "validation/accuracy": 0.4})
    assert select_best_step(best, 6, {"validation/reward": 0.4}) is best
    assert select_best_step(best, 7, {"validation/reward": 0.6}) == BestStep(7, "validation/reward", 0.6)


def test_where_both_are_measured_the_reward_alone_decides() -> None:
    best = select_best_step(None, 5, {"validation/loss": 0.9, "validation/reward": 0.5})
    assert best == BestStep(5, "validation/reward", 0.5)
    assert select_best_step(best, 6, {"validation/loss": 0.1, "validation/reward": 0.4}) is best
    assert select_best_step(best, 7, {"validation/loss": 0.1, "validation/reward": math.nan}) is best
    better = {"validation/loss": 2.0, "validation/reward": 0.6}
    assert select_best_step(best, 8, better) == BestStep(8, "validation/reward", 0.6)
    best = select_best_step(None, 5, {"validation/loss": 0.9, "validation/reward": math.nan})
    assert select_best_step(best, 6, better) == BestStep(6, "validation/reward", 0.6)


def test_nan_and_infinity_are_never_the_best() -> None:
    assert select_best_step(None, 1, {"validation/loss": math.nan}) is None
    assert select_best_step(None, 1, {"validation/loss": -math.inf}) is None
    assert select_best_step(None, 1, {"validation/reward": math.inf}) is None
    assert select_best_step(None, 1, {}) is None


def test_the_best_step_is_saved_outlives_max_keep_and_gives_way_to_a_better_one(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs, max_keep=1)
    assert train(at, [3.0, 1.0, 2.0, 0.5, 1.5, 4.0]) == BestStep(4, "validation/loss", 0.5)
    assert kept(at) == [4, 6]
    assert named(at) == {"step": 4, "metric": "validation/loss", "value": 0.5}


def test_resume_keeps_what_was_best_and_forgets_what_it_will_measure_again(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs, max_keep=2)
    assert train(at, [3.0, 1.0, 2.0, 0.5, 1.5, 4.0], stop_after=4) == BestStep(4, "validation/loss", 0.5)
    assert kept(at) == [2, 4]
    (at.path / "checkpoints/step_4/policy/manifest.json").write_text("{")  # step 2 is the newest that is whole
    assert train(at, [math.nan, math.nan, 2.0, 2.0, 1.5, 4.0]) == BestStep(2, "validation/loss", 1.0)
    assert 2 in kept(at)
    assert named(at) == {"step": 2, "metric": "validation/loss", "value": 1.0}


def test_another_configuration_inherits_no_best_step(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs, steps=1)
    at.path.joinpath("best.json").write_text('{"step": 9}')
    assert train(at, [math.nan]) is None
    assert not (at.path / "best.json").exists()


@pytest.fixture(scope="module")
def plain(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, TrainingResult]:
    """A training that nothing interrupts."""
    at = stage(tmp_path_factory.mktemp("plain") / "stages/sft", inputs)
    return at, train_stage(at)


@pytest.fixture(scope="module")
def average(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, TrainingResult]:
    """The same with a moving average."""
    at = stage(tmp_path_factory.mktemp("average") / "stages/sft", inputs, average=True)
    return at, train_stage(at)


@pytest.fixture(scope="module")
def interrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose training stopped after step 3."""
    path = tmp_path_factory.mktemp("interrupted")
    train_until(stage(path / "stages/sft", inputs), 3)
    return path


def test_the_result_names_the_best_step(plain: tuple[Stage, TrainingResult]) -> None:
    at, trained = plain
    assert trained.best_step == BestStep(6, "validation/loss", trained.metrics["validation/loss"])  # all steps lower it
    assert export_trained(at, trained, "float32", "base").info["best"] == named(at)


def test_held_out_figures_are_those_of_the_whole_logits(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs)
    rank = open_trainer(at)
    rows = open_sequences(inputs / "rows/data", "validation")
    figures = row_metrics(at, rank, sft(), rows, 2)
    model = load_model(str(inputs / "model"), dtype=torch.float32).eval()
    losses, hits = [], []
    for sample in (Sample(*rows[i]) for i in range(len(rows))):
        ids = torch.as_tensor(sample.input_ids)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        learned = torch.as_tensor(sample.loss_mask[1:]).bool()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[learned])
        hits.append((logits.argmax(-1) == ids[1:])[learned])
    assert figures["validation/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert figures["validation/token_accuracy"] == pytest.approx(torch.cat(hits).float().mean().item())
    assert figures["validation/tokens"] == len(torch.cat(hits))


def test_a_resumed_average_is_the_uninterrupted_one_bit_for_bit(
    inputs: Path, tmp_path: Path, plain: tuple[Stage, TrainingResult], average: tuple[Stage, TrainingResult]
) -> None:
    cut = stage(tmp_path / "cut", inputs, average=True)
    for step in (2, 3):
        train_until(cut, step)
    model, other = (trained.adapter.model for _, trained in (average, plain))
    assert_same_weights(train_stage(cut).adapter.model, model)
    assert not torch.equal(model.state_dict()["model.norm.weight"], other.state_dict()["model.norm.weight"])


def test_validation_and_the_hand_over_are_of_the_average_and_the_training_is_not(
    inputs: Path, plain: tuple[Stage, TrainingResult], average: tuple[Stage, TrainingResult]
) -> None:
    at, trained = average
    export_trained(at, trained, "float32", "base")
    rank = open_trainer(at)
    exported = load_file(at.path / "safetensors/step_6/model.safetensors")
    rank.adapter.model.load_state_dict(exported, strict=False)
    measured = row_metrics(at, rank, sft(), open_sequences(inputs / "rows/data", "validation"), 2)
    assert measured["validation/loss"] == pytest.approx(trained.metrics["validation/loss"], rel=1e-6)
    assert trained.metrics["validation/loss"] > plain[1].metrics["validation/loss"]  # the average is behind
    assert trained.metrics["loss"] == plain[1].metrics["loss"]


def test_progress_of_a_step_has_its_time_and_the_memory_in_use(plain: tuple[Stage, TrainingResult]) -> None:
    at, _ = plain
    shown = read_progress(at.path).metrics  # type: ignore[union-attr]
    assert shown["time/train"] > 0
    assert 2**-5 < shown["memory/host_gib"] < psutil.virtual_memory().total / 2**30
    lines = [line for line in read_metrics(at.path / "metrics.jsonl") if "memory/host_gib" in line]
    assert shown["memory/host_gib"] == pytest.approx(lines[-1]["memory/host_gib"], rel=1e-3) and len(lines) == 6


def test_the_process_that_verifies_the_export_is_started_by_the_last_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of(stage(tmp_path, inputs), lambda step: {"validation/loss": 1.0})
    started_after: list[int] = []
    monkeypatch.setattr(loop.trainer.adapter, "prestart_verification", lambda: started_after.append(loop.step))
    loop.run()
    loop.checkpointer.close()
    assert started_after[-1] == loop.feed.total_steps


def test_resume_true_takes_over_an_interrupted_run_and_ends_as_if_nothing_had_happened(
    inputs: Path, tmp_path: Path, plain: tuple[Stage, TrainingResult], interrupted: Path
) -> None:
    whole, expected = plain
    shutil.copytree(interrupted, tmp_path / "first")
    later = stage(tmp_path / "second/stages/sft", inputs, resume=True)
    steps: list[int] = []
    later.progress.step = lambda step, *_, **__: steps.append(step)  # type: ignore[method-assign]
    found = train_stage(later)
    assert steps == [3, 4, 5, 6]
    assert_same_weights(found.adapter.model, expected.adapter.model)
    assert found.best_step == expected.best_step
    assert curve(later) == curve(whole)
    shutil.rmtree(tmp_path / "first")
    assert resume_obstacle(later.path / "checkpoints", 3, later.fingerprint) is None


def test_resume_true_takes_over_what_another_mesh_left(inputs: Path, tmp_path: Path, interrupted: Path) -> None:
    def prints(value: str, size: int, rate: float = 1e-3) -> dict[str, Any]:
        config = {
            "policy.model_max_length": 32, "policy.parallelism.dp_shard_size": size, "train.optm_lr": rate,
            "rollout.parallelism.n_init_replicas": 3 - size,
        }  # fmt: skip
        return {"value": value, "ingredients": {"config": config, "world_size": size, "model": "m"}}

    shutil.copytree(interrupted, tmp_path / "first")
    earlier = stage(tmp_path / "first/stages/sft", inputs)
    other = stage(tmp_path / "second/stages/sft", inputs, resume=True)
    other.fingerprint = "0" * 64
    write_json(earlier.path / "fingerprint.json", prints(earlier.fingerprint, 2))
    write_json(other.path / "fingerprint.json", prints(other.fingerprint, 1, rate=1e-4))
    adopt_checkpoint(other, other.fingerprint)
    assert not (other.path / "checkpoints").exists()
    write_json(other.path / "fingerprint.json", prints(other.fingerprint, 1))
    adopt_checkpoint(other, other.fingerprint)
    assert resume_obstacle(other.path / "checkpoints", 3, other.fingerprint) is None
    assert resume_obstacle(earlier.path / "checkpoints", 3, earlier.fingerprint) is None
    assert curve(other) == curve(earlier)


def test_random_numbers_begin_anew_where_the_mesh_gives_a_rank_other_samples(inputs: Path, tmp_path: Path) -> None:
    loop = loop_of(stage(tmp_path / "stages/sft", inputs), lambda _: {})
    for step, rank in ((0, 0), (0, 1), (1, 0), (2, 1)):  # step 0: nothing is saved yet
        mesh = SimpleNamespace(dp=SimpleNamespace(get_local_rank=lambda rank=rank: rank))
        loop.step, loop.trainer.adapter.mesh = step, mesh
        _ = loop._save_checkpoint() if step else None
        saved, loop.trainer.adapter.mesh = torch.get_rng_state(), None if step else mesh
        loop._restore_checkpoint()
        assert torch.equal(torch.get_rng_state(), saved) == (rank == 0)


def test_the_best_step_of_the_interrupted_run_comes_along(inputs: Path, tmp_path: Path) -> None:
    earlier = stage(tmp_path / "out/first/stages/sft", inputs)
    train(earlier, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0], stop_after=4)
    assert kept(earlier) == [1, 2, 4]
    later = stage(tmp_path / "out/second/stages/sft", inputs)
    later.fingerprint = "f"
    adopt_checkpoint(later, later.fingerprint)
    assert kept(later) == [2, 4]


def test_resume_true_begins_anew_where_no_run_has_the_same_settings_and_says_so(
    inputs: Path, tmp_path: Path, interrupted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(interrupted, tmp_path / "first")
    later = stage(tmp_path / "second/stages/sft", inputs, resume=True)
    later.fingerprint = "0" * 64
    adopt_checkpoint(later, later.fingerprint)
    assert not (later.path / "checkpoints").exists()
    policy = tmp_path / "first/stages/sft/checkpoints/step_3/policy"
    assert caplog.messages[-1] == (
        f"train.resume = true: no other run below {tmp_path} has a checkpoint with these settings and inputs, "
        f"so this one starts at step 0; to go on from other settings: train.resume = '{policy}'"
    )


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.full), {"average": True}], ids=["plain", "average"]
)
def test_a_named_checkpoint_is_gone_on_from_with_other_settings(
    inputs: Path, tmp_path: Path, interrupted: Path, settings: dict[str, Any]
) -> None:
    policy = interrupted / "stages/sft/checkpoints/step_3/policy"
    later = stage(tmp_path / "stages/sft", inputs, resume=str(policy), rate=1e-30, **settings)
    later.fingerprint = "0" * 64
    left = train_stage(later).adapter.model
    saved = {k: v for file in policy.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, tensor in left.named_parameters():  # a rate of 1e-30 moves nothing, and the average begins there
        torch.testing.assert_close(tensor, saved[f"model.{name}"], rtol=0, atol=1e-6 if settings else 0, msg=name)
    assert [line["step"] for line in curve(later)] == [4, 5, 6]
    assert saved.keys() >= {"optimizer.step.model.norm.weight"}


def damaged(policy: Path) -> str:
    file = next(policy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    return r"bytes instead of \d+; name another one, or none"


def of_another_model(policy: Path) -> str:
    for path, model in ((policy.parents[2], "a"), (policy.parents[4] / "sft", "b")):
        path.mkdir(exist_ok=True)
        (path / "fingerprint.json").write_text(json.dumps({"ingredients": {"model": model, "inputs": {}}}))
    return "began from another model than"


@pytest.mark.parametrize("change", [damaged, of_another_model])
def test_a_named_checkpoint_that_cannot_be_gone_on_from_is_refused(
    inputs: Path, tmp_path: Path, interrupted: Path, change: Callable[[Path], str]
) -> None:
    shutil.copytree(interrupted / "stages/sft", tmp_path / "out/stages/first")
    policy = tmp_path / "out/stages/first/checkpoints/step_3/policy"
    reason = change(policy)
    with pytest.raises(ModelError, match=reason):
        train_stage(stage(tmp_path / "out/sft", inputs, resume=str(policy)))


def test_a_named_checkpoint_at_the_end_of_the_training_is_refused(
    inputs: Path, tmp_path: Path, interrupted: Path
) -> None:
    policy = interrupted / "stages/sft/checkpoints/step_3/policy"
    with pytest.raises(ConfigError, match=r"is at step 3 and this training ends at step 3; raise train\.epoch"):
        train_stage(stage(tmp_path / "second", inputs, resume=str(policy), steps=3))
