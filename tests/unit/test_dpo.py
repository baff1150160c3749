"""DPO against a plain loop over transformers' own logits, and against itself split, resumed and validated apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cosmos_core.algorithms.aggregate import compute_means
from cosmos_core.algorithms.dpo import Dpo
from cosmos_core.config.schema.dpo import DpoConfig, DpoLossConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.pairs import PreferencePairs, open_pairs
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, Preempted
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import reference, validate
from cosmos_core.train.setup import open_trainer, run, train
from tests.effects.change import SFT, recipe, stage_of
from tests.feeds import row_feed
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import NoView, assert_same_weights, micro_batch, score_in, train_until, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter

NUM_PAIRS, BATCH = 12, 4
DPO: dict[str, Any] = {
    **SFT, "train.train_policy.trainer_type": "dpo", "train.train_policy.dpo.beta": 0.5, "train.optm_lr": 1e-3,
    "train.compile": False, "train.param_dtype": "float32", "train.train_batch_per_replica": BATCH,
    "train.optm_warmup_steps": 0, "policy.model_max_length": 64, "validation.enable": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prepared pairs: twelve to learn, which are three steps an epoch, and four held out."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = [
        {"chosen": f"{i}+{i}? {2 * i}" * (1 + i % 3), "rejected": f"{i}+{i}? no idea" + "!" * (i % 2)}
        for i in range(NUM_PAIRS + 4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"train.train_policy.dataset.name": str(folder / "rows.jsonl"), "train.train_policy.dataset.test_size": 4}
    save_tiny_model(folder / "model")
    prepare.run(stage_of(folder / "rows", recipe({**DPO, **dataset}), kind="prepare", model=folder / "model"))
    return folder


def stage(inputs: Path, path: Path, **settings: Any) -> Stage:
    return stage_of(path, recipe({**DPO, **settings}), model=inputs / "model", data=inputs / "rows/data")


def pairs_of(inputs: Path, split: str = "train") -> PreferencePairs:
    return open_pairs(inputs / "rows/data", split)


def answer_logprob(model: torch.nn.Module, ids: np.ndarray, mask: np.ndarray) -> Tensor:
    """The sum over learned tokens, read off whole logits one token at a time."""
    logits_TV = model(torch.tensor(ids)[None]).logits[0]
    learned = [t for t in range(1, len(ids)) if mask[t]]
    return torch.stack([logits_TV[t - 1].log_softmax(-1)[int(ids[t])] for t in learned]).sum()


def plain_loss(
    model: torch.nn.Module, frozen: torch.nn.Module, pairs: PreferencePairs, places: list[int], beta: float
) -> Tensor:
    """-log sigmoid(beta (log pi(c)/ref(c) - log pi(r)/ref(r))), the mean over pairs."""
    losses = []
    for i in places:
        policy = answer_logprob(model, *pairs.chosen[i]) - answer_logprob(model, *pairs.rejected[i])
        with torch.no_grad():
            fixed = answer_logprob(frozen, *pairs.chosen[i]) - answer_logprob(frozen, *pairs.rejected[i])
        losses.append(torch.log1p(torch.exp(-beta * (policy - fixed))))
    return torch.stack(losses).mean()


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model a little away from where it starts, so that rewards are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def test_loss_and_gradients_are_those_of_a_plain_loop_however_pairs_are_split(inputs: Path, tmp_path: Path) -> None:
    pairs, folder = pairs_of(inputs), str(inputs / "model")
    frozen, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2))
    loss = plain_loss(moved(model), frozen, pairs, list(range(BATCH)), beta=0.5)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    for settings in ({"mini_batch": 1}, {"mini_batch": 4}, {"mini_batch": 2, "packed": True}):
        split = {
            **DPO, "train.optm_grad_norm_clip": 0.0, "train.train_policy.dataloader_shuffle": False,
            "train.train_policy.mini_batch": settings["mini_batch"], "train.sequence_packing": "packed" in settings,
        }  # fmt: skip
        config = recipe(split)
        rank = trainer_of(load_model(folder, dtype=torch.float64), config.train, 0, ProgressWriter(tmp_path / "p.json"))
        score_in(rank, torch.float64)
        feed = row_feed(pairs, config)
        pairs.reference_logprobs = reference.compute_pair_logprobs(rank, pairs, range(len(pairs)))
        moved(rank.adapter.model)
        samples, _ = feed.samples(0)
        (update,) = Dpo(DpoConfig(type="sft", dpo=DpoLossConfig(beta=0.5))).updates(samples, NoView())
        figures = rank.update(update)
        assert figures["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert figures["rewards/margin"] != 0
        for name, parameter in rank.adapter.model.named_parameters():
            difference = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
            assert difference <= 1e-9, (settings, name)


# Two pairs: three chosen and two rejected tokens, then one and one. Rewards are 0.5 and 0, then 0.25 and -0.5.
LOGPS, REFERENCE, COUNTS = (-3.0, -2.0, -1.0, -4.0), (-4.0, -2.0, -1.5, -3.0), (3, 2, 1, 1)


@pytest.mark.parametrize("loss_type", [("sigmoid",), ("sigmoid", "bco_pair", "sft")])
def test_loss_and_metrics_by_hand_whatever_the_order_of_rows(loss_type: tuple[str, ...]) -> None:
    samples, rows = [], []
    for i, (logprob, reference_logprob, num) in enumerate(zip(LOGPS, REFERENCE, COUNTS, strict=True)):
        mask = np.array([0] + [1] * num, dtype=np.uint8)
        samples.append(Sample(np.arange(1 + num), mask, reference_logprob=reference_logprob, source="aabb"[i]))
        rows.append([logprob / num] * num + [99.0] * (3 - num))
    config = DpoLossConfig.model_validate({"beta": 0.5, "loss_type": loss_type})
    (update,) = Dpo(DpoConfig(type="sft", dpo=config)).updates(samples, NoView())
    logprobs_BS = torch.tensor(rows, dtype=torch.float64)
    found = update.loss(micro_batch(samples[::-1], logprobs_BS.flip(0), logprobs_BS.flip(0) != 99, [3, 2, 1, 0]))
    metrics = compute_means(found.metrics)
    losses = [metrics.pop("loss/a"), metrics.pop("loss/b")]
    assert sum(losses) / 2 == pytest.approx(found.value.item(), rel=1e-12)
    if loss_type == ("sigmoid",):
        assert losses == pytest.approx([math.log1p(math.exp(-margin)) for margin in (0.5, 0.75)], rel=1e-12)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.375, "rewards/rejected": -0.25, "rewards/margin": 0.625, "rewards/accuracy": 1.0,
            "logps/chosen": -2.0, "logps/rejected": -3.0,
        }
    )  # fmt: skip


def test_preferences_are_learned_and_measured_on_what_was_held_out(inputs: Path, tmp_path: Path) -> None:
    settings = {"train.epoch": 4, "train.optm_lr": 3e-3, "validation.freq": 12, "validation.val_before_train": True}
    at = stage(inputs, tmp_path / "dpo", **settings)
    outcome = run(at)
    lines = read_metrics(at.path / "metrics.jsonl")
    first, last = lines[1], lines[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margin"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.1 and last["rewards/accuracy"] == 1.0
    assert last["rewards/margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])
    assert lines[0]["validation/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["validation/loss"] < 0.2 and last["validation/rewards/accuracy"] == 1.0
    assert last["validation/pairs"] == 4 and last["tokens"] > 0
    assert outcome.info["best"]["metric"] == "validation/loss" and "reference" in outcome.outputs

    apart = stage(inputs, tmp_path / "validate")
    apart.model, apart.inputs = str(at.path / outcome.info["model"]), {"dpo": {"path": str(at.path)}}
    apart.config = apart.config.model_copy(update={"kind": "validate"})
    figures = validate.run(apart).metrics
    for name in ("loss", "rewards/margin", "rewards/accuracy", "pairs"):
        assert figures[f"validation/{name}"] == pytest.approx(last[f"validation/{name}"], rel=1e-4), name


def test_held_out_pairs_of_a_model_without_a_reference_are_refused_by_name(inputs: Path, tmp_path: Path) -> None:
    apart = stage(inputs, tmp_path / "validate")
    apart.config = apart.config.model_copy(update={"kind": "validate"})
    with pytest.raises(ConfigError, match="under a reference; name the stage that trained with the same"):
        validate.run(apart)
    apart.recipe = recipe({**DPO, "train.train_policy.dpo.reference_free": True})
    assert validate.run(apart).metrics["validation/pairs"] == 4


def test_without_a_reference_a_reward_is_the_log_probability(inputs: Path, tmp_path: Path) -> None:
    at = stage(inputs, tmp_path / "free", **{"train.train_policy.dpo.reference_free": True, "train.max_num_steps": 1})
    train(at)
    (line,) = read_metrics(at.path / "metrics.jsonl")
    assert line["rewards/chosen"] == pytest.approx(0.5 * line["logps/chosen"], rel=1e-9)
    assert line["rewards/margin"] == pytest.approx(0.5 * (line["logps/chosen"] - line["logps/rejected"]), rel=1e-9)
    assert not (at.path / "reference").exists()


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.full), {"policy.lora.r": 4}], ids=["all weights", "LoRA"]
)
def test_stopped_and_resumed_ends_with_the_same_bits(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(reference, "REFERENCE_BATCH_ROWS", 4)
    settings = {**settings, "train.epoch": 2}
    expected = train(stage(inputs, tmp_path / "whole", **settings))
    cut = stage(inputs, tmp_path / "cut", **settings)
    cut.stop_requested = True
    with pytest.raises(Preempted, match="reference log-probabilities of 0 of 12 rows"):
        train(cut)
    cut.stop_requested = False
    train_until(cut, 4)
    found = train(stage(inputs, tmp_path / "cut", **settings))
    assert_same_weights(found.adapter.model, expected.adapter.model)
    assert found.metrics["loss"] == expected.metrics["loss"]


def test_the_reference_is_computed_once_for_the_pairs_that_are_trained(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "REFERENCE_BATCH_ROWS", 4)
    pairs, at = pairs_of(inputs), stage(inputs, tmp_path / "s", **{"train.max_num_steps": 2})
    rank = open_trainer(at)
    calls: list[int] = []
    compute = reference.compute_pair_logprobs

    def counted(*args: Any) -> np.ndarray:
        calls.append(len(args[2]))
        if len(calls) == 2 and not at.stop_requested:
            at.stop_requested = True
        return compute(*args)

    monkeypatch.setattr(reference, "compute_pair_logprobs", counted)
    places = np.arange(NUM_PAIRS)
    with pytest.raises(Preempted, match="reference log-probabilities of 8 of 12 rows"):
        reference.reference_logprobs(at, rank, pairs, "train", places, at.fingerprint)
    at.stop_requested = False
    found = reference.reference_logprobs(at, rank, pairs, "train", places, at.fingerprint)
    assert calls == [4, 4, 4]
    again = reference.reference_logprobs(at, rank, pairs, "train", places, at.fingerprint)
    assert len(calls) == 3 and np.array_equal(found, again)
    at.fingerprint = "0" * 64  # another model or other settings
    reference.reference_logprobs(at, rank, pairs, "train", places, at.fingerprint)
    assert len(calls) == 6
    feed = row_feed(pairs, at.recipe)
    trained = {tuple(sample.input_ids) for step in range(2) for sample in feed.samples(step)[0]}
    both = (pairs.chosen, pairs.rejected)
    assert {tuple(rows[int(i)][0]) for i in feed.trained_row_numbers for rows in both} == trained
    assert len(feed.trained_row_numbers) == 8

    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    with torch.no_grad():
        for i in range(NUM_PAIRS):
            for answer, rows in enumerate((pairs.chosen, pairs.rejected)):
                assert found[i, answer] == pytest.approx(answer_logprob(model, *rows[i]).item(), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"dp_shard_size": 2}], ids=["one rank", "two ranks"])
def test_a_pair_is_in_one_micro_batch_and_each_rank_has_some(inputs: Path, settings: dict[str, int]) -> None:
    mesh = {f"policy.parallelism.{key}": value for key, value in settings.items()}
    config: Recipe = recipe({**DPO, "train.train_policy.mini_batch": 4, **mesh})
    samples, _ = row_feed(pairs_of(inputs), config).samples(0)
    assert [sample.micro_batch for sample in samples] == ([0] * 8 if not settings else [0] * 4 + [1] * 4)
    lengths = [max(len(a.input_ids), len(b.input_ids)) for a, b in zip(samples[::2], samples[1::2], strict=True)]
    assert lengths == sorted(lengths, reverse=True)


def test_pairs_fill_a_budget_of_tokens(inputs: Path) -> None:
    pairs = pairs_of(inputs)
    balanced = {
        **DPO, "train.train_policy.enable_dp_load_balancing": True, "train.max_num_steps": 99,
        "train.train_policy.load_balanced_max_tokens_for_batch": 200,
    }  # fmt: skip
    feed = row_feed(pairs, recipe(balanced))
    steps = [feed.samples(step)[0] for step in range(feed.total_steps)]
    assert sum(len(samples) for samples in steps) == 2 * NUM_PAIRS
    for samples in steps:
        assert max(len(sample.input_ids) for sample in samples) * len(samples) <= 200
    assert len(steps) < NUM_PAIRS
