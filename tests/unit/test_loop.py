"""The course of a training: which step is best and stays, what is averaged, and what another run goes on with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.checkpoint.best import BestStep, select_best
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
from cosmos_core.train.loop import Loop
from cosmos_core.train.measure import held_out_batch, row_metrics
from cosmos_core.train.resume_from import adopt_checkpoint
from cosmos_core.train.setup import export_trained, open_trainer
from cosmos_core.train.setup import train as train_stage
from cosmos_core.train.validation import MetricsFn, Validation
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import sft

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
    return Validation(at.recipe.validation, at.progress, measure, **settings)


def train(at: Stage, values: Sequence[float], stop_after: int = 0, metric: str = "validation/loss") -> BestStep | None:
    """A training whose held-out figure after step 1, 2, ... is given; the best step that it names."""
    rank = open_trainer(at)
    assert at.data is not None
    ckpt = at.recipe.train.ckpt
    checkpointer = Checkpointer(
        at.path / "checkpoints", fingerprint="f", max_keep=ckpt.max_keep, asynchronous=ckpt.save_mode == "async"
    )
    at.stop_requested = False

    def measure(step: int) -> dict[str, float]:
        at.stop_requested = step == stop_after
        return {metric: values[step - 1]}

    feed = RowFeed(open_sequences(at.data, "train"), at.recipe)
    loop = Loop(at, rank, feed, sft(), checkpointer, validation(at, measure))
    try:
        loop.run()
    except Preempted:
        assert stop_after
    finally:
        checkpointer.close()
    return loop.validation.best


def kept(at: Stage) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (at.path / "checkpoints").iterdir())


def named(at: Stage) -> Any:
    return json.loads((at.path / "best.json").read_text())


def test_the_lower_loss_and_the_higher_reward_is_better_and_the_earlier_of_equals() -> None:
    best = select_best(None, 5, {"validation/loss": 2.0, "loss": 0.1})
    assert best == BestStep(5, "validation/loss", 2.0)
    assert select_best(best, 6, {"validation/loss": 2.0}) is best
    assert select_best(best, 7, {"validation/loss": 1.5}) == BestStep(7, "validation/loss", 1.5)
    best = select_best(None, 5, {"validation/reward": 0.5, "validation/accuracy": 0.4})
    assert select_best(best, 6, {"validation/reward": 0.4}) is best
    assert select_best(best, 7, {"validation/reward": 0.6}) == BestStep(7, "validation/reward", 0.6)


def test_where_both_are_measured_the_reward_alone_decides() -> None:
    best = select_best(None, 5, {"validation/loss": 0.9, "validation/reward": 0.5})
    assert best == BestStep(5, "validation/reward", 0.5)
    assert select_best(best, 6, {"validation/loss": 0.1, "validation/reward": 0.4}) is best
    assert select_best(best, 7, {"validation/loss": 0.1, "validation/reward": math.nan}) is best
    assert select_best(best, 8, {"validation/loss": 2.0, "validation/reward": 0.6}) == BestStep(
        8, "validation/reward", 0.6
    )
    best = select_best(None, 5, {"validation/loss": 0.9, "validation/reward": math.nan})
    assert select_best(best, 6, {"validation/loss": 2.0, "validation/reward": 0.1}) == BestStep(
        6, "validation/reward", 0.1
    )


def test_nan_and_infinity_are_never_the_best() -> None:
    assert select_best(None, 1, {"validation/loss": math.nan}) is None
    assert select_best(None, 1, {"validation/loss": -math.inf}) is None
    assert select_best(None, 1, {"validation/reward": math.inf}) is None
    assert select_best(None, 1, {}) is None


@pytest.mark.parametrize(
    ("metric", "sign"), [("validation/loss", 1.0), ("validation/reward", -1.0)], ids=["loss", "reward"]
)
def test_the_best_step_is_saved_and_outlives_max_keep(inputs: Path, tmp_path: Path, metric: str, sign: float) -> None:
    at = stage(tmp_path / "sft", inputs, max_keep=1)
    values = [sign * value for value in (3.0, 1.0, 2.0, 2.5, 1.5, 4.0)]
    assert train(at, values, metric=metric) == BestStep(2, metric, sign * 1.0)
    assert kept(at) == [2, 6]
    assert named(at) == {"step": 2, "metric": metric, "value": sign * 1.0}


def test_what_was_best_gives_way_to_what_is_better(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs, max_keep=1)
    assert train(at, [3.0, 1.0, 2.0, 0.5, 1.5, 4.0]) == BestStep(4, "validation/loss", 0.5)
    assert kept(at) == [4, 6]


def test_resume_keeps_what_was_best_and_forgets_what_it_will_measure_again(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs, max_keep=2)
    assert train(at, [3.0, 1.0, 2.0, 0.5, 1.5, 4.0], stop_after=4) == BestStep(4, "validation/loss", 0.5)
    assert kept(at) == [2, 4]
    (at.path / "checkpoints/step_4/policy/manifest.json").write_text("{")  # step 2 is the newest that is whole
    assert train(at, [math.nan, math.nan, 2.0, 2.0, 1.5, 4.0]) == BestStep(2, "validation/loss", 1.0)
    assert 2 in kept(at)
    assert named(at) == {"step": 2, "metric": "validation/loss", "value": 1.0}


def test_another_configuration_inherits_no_best_step(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs)
    at.path.joinpath("best.json").write_text('{"step": 9}')
    assert train(at, [math.nan] * 6) is None
    assert not (at.path / "best.json").exists()


def test_the_result_names_the_best_step(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs)
    trained = train_stage(at)
    assert trained.best == BestStep(6, "validation/loss", trained.metrics["validation/loss"])  # every step lowers it
    assert export_trained(at, trained).info["best"] == named(at)


def test_held_out_figures_are_those_of_the_whole_logits(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "sft", inputs)
    rank = open_trainer(at)
    rows = open_sequences(inputs / "rows/data", "validation")
    figures = row_metrics(rank, sft(), rows, held_out_batch(at.recipe), at.progress)
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


def averaged(at: Stage, stops: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Weights that a training with an average leaves, perhaps stopped and resumed."""
    for step in stops:
        at.progress.step = stops_at(at, step)  # type: ignore[method-assign]
        with pytest.raises(Preempted, match="checkpoint saved"):
            train_stage(at)
        at.stop_requested = False
        torch.manual_seed(999)  # another process would have other random states
    at.__dict__.pop("progress", None)
    return {name: tensor.clone() for name, tensor in train_stage(at).adapter.model.state_dict().items()}


def stops_at(at: Stage, stop: int) -> Callable[..., None]:
    def step(step: int, total: int | None = None, **metrics: float) -> None:
        at.stop_requested = step == stop

    return step


def test_a_resumed_average_is_the_uninterrupted_one_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    whole = averaged(stage(tmp_path / "whole", inputs, average=True))
    cut = averaged(stage(tmp_path / "cut", inputs, average=True), stops=(2, 3))
    plain = averaged(stage(tmp_path / "plain", inputs))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    assert not torch.equal(whole["model.norm.weight"], plain["model.norm.weight"])


def test_validation_and_the_hand_over_are_of_the_average_and_the_training_is_not(inputs: Path, tmp_path: Path) -> None:
    at, other = stage(tmp_path / "average", inputs, average=True), stage(tmp_path / "plain", inputs)
    trained, plain = train_stage(at), train_stage(other)
    export_trained(at, trained)
    exported = load_file(at.path / "safetensors/step_6/model.safetensors")
    rows = open_sequences(inputs / "rows/data", "validation")
    rank = open_trainer(at)
    rank.adapter.model.load_state_dict(exported, strict=False)
    measured = row_metrics(rank, sft(), rows, held_out_batch(at.recipe), at.progress)
    assert measured["validation/loss"] == pytest.approx(trained.metrics["validation/loss"], rel=1e-6)
    assert trained.metrics["validation/loss"] > plain.metrics["validation/loss"]  # the average is behind
    assert trained.metrics["loss"] == plain.metrics["loss"]


def stopped(at: Stage, step: int) -> Stage:
    """The stage, trained up to a step."""
    at.progress.step = stops_at(at, step)  # type: ignore[method-assign]
    with pytest.raises(Preempted, match="checkpoint saved"):
        train_stage(at)
    return at


def test_progress_of_a_step_has_its_time_and_the_memory_in_use(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "run/stages/sft", inputs)
    train_stage(at)
    shown = read_progress(at.path).metrics  # type: ignore[union-attr]
    assert shown["time/train"] > 0
    assert 2**-5 < shown["memory/host_gib"] < psutil.virtual_memory().total / 2**30
    lines = [line for line in read_metrics(at.path / "metrics.jsonl") if "memory/host_gib" in line]
    assert shown["memory/host_gib"] == pytest.approx(lines[-1]["memory/host_gib"], rel=1e-3) and len(lines) == 6


def curve(at: Stage) -> list[dict[str, float]]:
    """The metrics, without times."""
    lines = read_metrics(at.path / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time", "throughput", "memory"))} for line in lines]


def test_resume_true_takes_over_an_interrupted_run_and_ends_as_if_nothing_had_happened(
    inputs: Path, tmp_path: Path
) -> None:
    whole = stage(tmp_path / "other/run/stages/sft", inputs)
    expected = train_stage(whole)
    earlier = stopped(stage(tmp_path / "out/first/stages/sft", inputs), 3)
    later = stage(tmp_path / "out/second/stages/sft", inputs, resume=True)
    steps: list[int] = []
    later.progress.step = lambda step, *_, **__: steps.append(step)  # type: ignore[method-assign]
    found = train_stage(later)
    assert steps == [3, 4, 5, 6]
    assert found.adapter.model is not None and expected.adapter.model is not None
    weights = found.adapter.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.adapter.model.state_dict().items())
    assert found.best == expected.best
    assert curve(later) == curve(whole)
    shutil.rmtree(earlier.path)
    assert resume_obstacle(later.path / "checkpoints", 3, later.fingerprint) is None


def test_resume_true_takes_over_what_another_mesh_left(inputs: Path, tmp_path: Path) -> None:
    def prints(value: str, size: int, rate: float = 1e-3) -> dict[str, Any]:
        config = {
            "policy.model_max_length": 32, "policy.parallelism.dp_shard_size": size, "train.optm_lr": rate,
            "rollout.parallelism.n_init_replicas": 3 - size,
        }  # fmt: skip
        return {"value": value, "ingredients": {"config": config, "world_size": size, "model": "m"}}

    earlier = stopped(stage(tmp_path / "out/first/stages/sft", inputs), 3)
    other = stage(tmp_path / "out/second/stages/sft", inputs, resume=True)
    other.fingerprint = "0" * 64
    write_json(earlier.path / "fingerprint.json", prints(earlier.fingerprint, 2))
    write_json(other.path / "fingerprint.json", prints(other.fingerprint, 1, rate=1e-4))
    adopt_checkpoint(other)
    assert not (other.path / "checkpoints").exists()
    write_json(other.path / "fingerprint.json", prints(other.fingerprint, 1))
    adopt_checkpoint(other)
    assert resume_obstacle(other.path / "checkpoints", 3, other.fingerprint) is None
    assert resume_obstacle(earlier.path / "checkpoints", 3, earlier.fingerprint) is None
    assert curve(other) == curve(earlier)


def test_random_numbers_begin_anew_where_the_mesh_gives_a_rank_other_samples(inputs: Path, tmp_path: Path) -> None:
    at = stage(tmp_path / "stages/sft", inputs)
    checkpoints = Checkpointer(at.path / "checkpoints", fingerprint="f", max_keep=-1, asynchronous=False)
    feed = RowFeed(open_sequences(inputs / "rows/data", "train"), at.recipe)
    loop = Loop(at, open_trainer(at), feed, sft(), checkpoints, validation(at, lambda _: {}))
    for step, rank in ((0, 0), (0, 1), (1, 0), (2, 1)):  # step 0: nothing is saved yet
        mesh = SimpleNamespace(data=SimpleNamespace(get_local_rank=lambda rank=rank: rank))
        loop.step, loop.trainer.adapter.mesh = step, mesh
        _ = loop._save_checkpoint() if step else None
        saved, loop.trainer.adapter.mesh = torch.get_rng_state(), None if step else mesh
        loop._restore()
        assert torch.equal(torch.get_rng_state(), saved) == (rank == 0)


def test_the_best_step_of_the_interrupted_run_comes_along(inputs: Path, tmp_path: Path) -> None:
    earlier = stage(tmp_path / "out/first/stages/sft", inputs)
    train(earlier, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0], stop_after=4)
    assert kept(earlier) == [1, 2, 4]
    later = stage(tmp_path / "out/second/stages/sft", inputs)
    later.fingerprint = "f"
    adopt_checkpoint(later)
    assert kept(later) == [2, 4]


def test_resume_true_begins_anew_where_no_run_has_the_same_settings_and_says_so(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = stopped(stage(tmp_path / "out/first/stages/sft", inputs), 2)
    later = stage(tmp_path / "out/second/stages/sft", inputs, resume=True)
    later.fingerprint = "0" * 64
    adopt_checkpoint(later)
    assert not (later.path / "checkpoints").exists()
    policy = earlier.path / "checkpoints/step_2/policy"
    assert caplog.messages[-1] == (
        f"train.resume = true: no other run below {tmp_path / 'out'} has a checkpoint with these settings and inputs, "
        f"so this one starts at step 0; to go on from other settings: train.resume = '{policy}'"
    )


def test_a_named_checkpoint_is_gone_on_from_with_other_settings(inputs: Path, tmp_path: Path) -> None:
    earlier = stopped(stage(tmp_path / "out/first/stages/sft", inputs), 3)
    policy = earlier.path / "checkpoints/step_3/policy"
    later = stage(tmp_path / "second/out/stages/sft", inputs, resume=str(policy), rate=1e-30)
    later.fingerprint = "0" * 64
    left = train_stage(later).adapter.model
    assert left is not None
    saved = {k: v for file in policy.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, tensor in left.named_parameters():  # a rate of 1e-30 moves nothing
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    assert [line["step"] for line in curve(later)] == [4, 5, 6]
    assert saved.keys() >= {"optimizer.step.model.norm.weight"}


def test_a_named_checkpoint_without_an_average_begins_it_at_its_weights(inputs: Path, tmp_path: Path) -> None:
    earlier = stopped(stage(tmp_path / "first/out/stages/sft", inputs), 3)
    policy = str(earlier.path / "checkpoints/step_3/policy")
    left = [
        train_stage(
            stage(tmp_path / f"{name}/out/stages/sft", inputs, resume=policy, rate=1e-30, **settings)
        ).adapter.model
        for name, settings in (("plain", {}), ("average", {"average": True}))
    ]
    for plain, average in zip(*(model.parameters() for model in left if model is not None), strict=True):
        torch.testing.assert_close(average, plain, rtol=0, atol=1e-6)


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
    inputs: Path, tmp_path: Path, change: Callable[[Path], str]
) -> None:
    earlier = stopped(stage(tmp_path / "out/stages/first", inputs), 2)
    policy = earlier.path / "checkpoints/step_2/policy"
    reason = change(policy)
    with pytest.raises(ModelError, match=reason):
        train_stage(stage(tmp_path / "out/sft", inputs, resume=str(policy)))


def test_a_named_checkpoint_at_the_end_of_the_training_is_refused(inputs: Path, tmp_path: Path) -> None:
    earlier = stopped(stage(tmp_path / "out/stages/first", inputs), 3)
    policy = earlier.path / "checkpoints/step_3/policy"
    with pytest.raises(ConfigError, match=r"is at step 3 and this training ends at step 3; raise train\.epoch"):
        train_stage(stage(tmp_path / "out/stages/second", inputs, resume=str(policy), steps=3))
