"""The loop, the rank and the feeds, against a plain loop with transformers' own loss and against themselves resumed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.demo import arithmetic
from cosmos_core.algorithms.base import Loss
from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.sample import Sample
from cosmos_core.errors import StageFailed
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import train
from cosmos_core.train.trainer import Trainer, _compute_quantiles
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment
from tasks.kinds import all_kinds
from tests.feeds import row_feed
from tests.unit.trainers import (
    NoView,
    assert_same_weights,
    curve,
    logprobs,
    score_in,
    sft,
    train_until,
    trainer_of,
)

BASE: dict[str, Any] = {
    "policy": {"model_max_length": 32, "model_gradient_checkpointing": False},
    "train": {"param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "optm_warmup_steps": 2},
}
SFT = {"type": "sft", "mini_batch": 4, "conversation_column_name": "messages"}
GRPO = {"type": "grpo", "mini_batch": 8, "reward_function": "exact_match", "kl_beta": 0.01}


def recipe(policy: dict[str, Any], *, distillation: dict[str, Any] | None = None, **train: Any) -> Recipe:
    rollout = {"backend": "hf", "n_generation": 4, "batch_size": 4, "max_response_length": 4}
    values = {**BASE, "train": {**BASE["train"], **train, "train_policy": policy}, "rollout": rollout}
    return Recipe.model_validate({**values, "distillation": distillation or {}})


def make_stage(path: Path, kind: str, recipe_: Recipe, model: Path | str = "", data: Path | None = None) -> Stage:
    path.mkdir(parents=True, exist_ok=True)
    return Stage(
        path, StageConfig(name=path.name, kind=kind), recipe_, str(model), data, {}, "f" * 64, all_kinds()[kind]
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, rows, and both kinds of prepared data."""
    folder = tmp_path_factory.mktemp("task")
    stage = make_stage(folder / "task", "custom", recipe(SFT))
    arithmetic.make(stage, train_rows=64, heldout_rows=16, hidden_size=64, layers=1)
    beside = {"name": str(folder / "task/data"), "weight": 0.1, "conversation_column_name": "messages"}
    for name, policy in (("sft-data", SFT), ("rl-data", {**GRPO, "data_term": beside})):
        prepare.run(make_stage(folder / name, "prepare", recipe(policy), folder / "task/model", folder / "task/data"))
    tokenizer = arithmetic.make_tokenizer()
    for part in (tokenizer, arithmetic.make_model(tokenizer, 32, 2, seed=1)):
        part.save_pretrained(folder / "teacher")
    return folder


def samples(task: Path, count: int) -> list[Sample]:
    rows = open_sequences(task / "sft-data/data", "train")
    return [Sample(*rows[i]) for i in range(count)]


def rank_of(task: Path, tmp_path: Path, config: Recipe, dtype: torch.dtype = torch.float64) -> Trainer:
    rank = trainer_of(
        load_model(str(task / "task/model"), dtype=dtype), config.train, 0, ProgressWriter(tmp_path / "p.json")
    )
    score_in(rank, dtype)
    return rank


def test_an_update_is_a_step_of_a_plain_loop_with_the_loss_of_transformers(task: Path, tmp_path: Path) -> None:
    config = recipe(SFT, optm_grad_norm_clip=0.5, optm_weight_decay=0.0)
    batch, rank = samples(task, 10), rank_of(task, tmp_path, config, torch.float32)
    rank.set_learning_rate(5, 10)
    (update,) = sft().updates(batch, NoView())
    metrics = rank.update(update)

    model = AutoModelForCausalLM.from_pretrained(task / "task/model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)
    count = sum(int(sample.loss_mask[1:].sum()) for sample in batch)
    loss = torch.zeros(())
    for sample in batch:
        labels = torch.tensor(np.where(sample.loss_mask == 1, sample.input_ids, -100))[None]
        loss = loss + model(torch.tensor(sample.input_ids)[None], labels=labels, num_items_in_batch=count).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for (name, ours), theirs in zip(rank.adapter.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=name)


def passes_and_gradients(
    task: Path, tmp_path: Path, batch: list[Sample], size: int, packed: bool = False
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The rows of each forward pass of an update in float64, and its gradients."""
    settings = {"train_batch_per_replica": 10, "optm_grad_norm_clip": 0.0, "sequence_packing": packed}
    rank = rank_of(task, tmp_path, recipe({**SFT, "mini_batch": size}, **settings))
    model = rank.adapter.model
    logprobs(rank, batch[:1], 1.0)  # the first call looks at the head too
    passes: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, inputs: passes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    (update,) = sft().updates(batch, NoView())
    rank.update(update)
    return passes, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(task: Path, tmp_path: Path) -> None:
    batch = samples(task, 10)
    _, whole = passes_and_gradients(task, tmp_path, batch, 10)
    for size, packed in ((1, False), (5, False), (2, True), (10, True)):
        _, split = passes_and_gradients(task, tmp_path, batch, size, packed)
        assert whole.keys() == split.keys()
        for name, gradient in whole.items():
            assert (gradient - split[name]).abs().max() <= 1e-9 * gradient.abs().max(), (size, packed, name)


def test_what_the_feed_put_together_goes_through_the_model_together(task: Path, tmp_path: Path) -> None:
    batch, numbers = samples(task, 6), [0, 1, 0, 2, 1, 0]
    alone, gradients = passes_and_gradients(task, tmp_path, batch, 1)
    planned = [replace(sample, micro_batch=n) for sample, n in zip(batch, numbers, strict=True)]
    together, other = passes_and_gradients(task, tmp_path, planned, 1)
    assert alone == [1] * 6 and sorted(together) == [1, 2, 3]
    for name, gradient in gradients.items():
        assert (gradient - other[name]).abs().max() <= 1e-9 * gradient.abs().max(), name


def test_a_balanced_training_sees_every_row_once_an_epoch_and_stays_in_its_budget(task: Path, tmp_path: Path) -> None:
    policy = {**SFT, "mini_batch": 4, "enable_dp_load_balancing": True, "load_balanced_max_tokens_for_batch": 96}
    stage = make_stage(tmp_path / "s", "sft", recipe(policy, max_num_steps=99, epoch=2), task / "task/model",
                       task / "sft-data/data")  # fmt: skip
    trained = train(stage)
    metrics = [point for point in read_metrics(stage.path / "metrics.jsonl") if "loss" in point]
    lengths = open_sequences(task / "sft-data/data", "train").lengths
    assert sum(point["tokens"] for point in metrics) == 2 * lengths.sum()
    assert max(point["tokens"] for point in metrics) <= 96
    assert len(metrics) == trained.step < 99 and metrics[-1]["epoch"] == 2.0


def test_a_loss_that_is_not_finite_touches_no_weight(task: Path, tmp_path: Path) -> None:
    rank = rank_of(task, tmp_path, recipe(SFT))
    model = rank.adapter.model
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("inf")
    before = {name: p.clone() for name, p in model.named_parameters()}
    (update,) = sft().updates(samples(task, 4), NoView())
    with pytest.raises(StageFailed, match="not finite"):
        rank.update(update)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_another_model_is_asked_by_its_name_and_not_trained(task: Path, tmp_path: Path) -> None:
    rank, teacher = rank_of(task, tmp_path, recipe(SFT)), load_model(str(task / "teacher"), dtype=torch.float64)
    expected = logprobs(rank, samples(task, 2))
    rank.add_model("teacher", CausalLM(teacher, recipe(SFT).train, InputProcessing(0)))
    rows = rank.evaluate(samples(task, 2), weights="teacher")
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(row, own) for row, own in zip(logprobs(rank, samples(task, 2)), expected, strict=True))
    assert all((row["logprobs"] - own).abs().max() > 1e-3 for row, own in zip(rows, expected, strict=True))


def test_quantiles_are_those_of_all_micro_batches_together(task: Path, tmp_path: Path) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)) + 1.0
    losses = [Loss(torch.tensor(0.0), {}, {"difference": rows}) for rows in (order[:7], order[7:90], order[90:])]
    _, _, values = rank_of(task, tmp_path, recipe(SFT))._reduce_losses(losses)
    assert _compute_quantiles(values) == {"difference_p50": 51.0, "difference_p95": 96.0, "difference_max": 100.0}
    assert _compute_quantiles({"difference": [torch.zeros(0)]}) == {}


SAVED = {"enable_checkpoint": True, "save_freq": 2}
VARIETY = "def variety(completion, reference):\n    return float(len(set(completion)) > 2)\n"
DAPO = {
    "type": "grpo", "variant": "dapo", "mini_batch": 8, "reward_function": "reward.py:variety", "mu_iterations": 2,
    "epsilon_high": 0.28, "entropy_coeff": 0.01, "rollout_correction": "truncate", "kl_beta": 0.01,
    "kl_estimator": "k2", "reference_reset_interval": 2,
}  # fmt: skip
GSPO = {
    "type": "grpo", "variant": "gspo", "algo": "rloo", "reward_function": "reward.py:variety", "mu_iterations": 2,
    "use_decoupled_loss": True, "off_policy_masking_delta": 0.5, "max_token_len_per_mini_batch": 64,
}  # fmt: skip
AIPO = {
    "type": "grpo", "aipo_rho": 2.0, "reward_function": "reward.py:variety", "algo": "reinforce++-baseline",
    "batch_size_per_optimize": 3, "mini_batch": 3, "data_term": {"name": "rows", "weight": 0.1, "batch_size": 6},
}  # fmt: skip
TEACHER = {"enable": True, "model_name_or_path": "teacher", "param_dtype": "float32", "mini_batch": 4}
BY_TOKEN = {**TEACHER, "kl_discount_factor": 0.9, "max_token_len_per_mini_batch": 48}
BY_TOP_K = {**TEACHER, "top_k": 8, "jsd_beta": 0.5, "include_prompt": True, "sequence_packing": True}
TAUGHT = {"type": "grpo", "mini_batch": 8, "rollout_correction": "truncate", "mu_iterations": 2}
TRAININGS = {
    "sft": ("sft", recipe(SFT, train_batch_per_replica=8, max_num_steps=5, epoch=2, ckpt=SAVED)),
    "grpo": ("rl", recipe(GRPO, train_batch_per_replica=16, max_num_steps=5, optm_lr=3e-3, ckpt={"save_mode": "sync"})),
    "groups over several steps": ("rl", recipe({**GRPO, "mini_batch": 2}, train_batch_per_replica=6, max_num_steps=5)),
    "dapo": ("rl", recipe(DAPO, train_batch_per_replica=16, max_num_steps=5, ckpt=SAVED)),
    "gspo": ("rl", recipe(GSPO, train_batch_per_replica=16, max_num_steps=5)),
    "aipo with a data term": ("rl", recipe(AIPO, train_batch_per_replica=6, max_num_steps=4)),
    "distilled by token": ("rl", recipe(TAUGHT, distillation=BY_TOKEN, train_batch_per_replica=16, max_num_steps=5)),
    "distilled by top k": ("rl", recipe(TAUGHT, distillation=BY_TOP_K, train_batch_per_replica=16, max_num_steps=4)),
}
SHORT = {"aipo with a data term", "distilled by top k"}
"""Those with state of each kind: of unfinished groups and of a second feed, of a teacher."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.full) for name in TRAININGS]
)
def test_stopped_twice_and_resumed_ends_with_the_same_bits_and_the_same_curve(
    task: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(VARIETY)
    (tmp_path / "teacher").symlink_to(task / "teacher")
    monkeypatch.chdir(tmp_path)
    kind, config = TRAININGS[name]
    data = task / f"{kind}-data" / "data"
    whole = make_stage(tmp_path / "whole", kind, config, task / "task/model", data)
    expected = train(whole)

    for step in (1, 3):
        train_until(make_stage(tmp_path / "cut", kind, config, task / "task/model", data), step)
        np.random.seed(999)
    resumed = make_stage(tmp_path / "cut", kind, config, task / "task/model", data)
    found = train(resumed)
    assert found.metrics.keys() == expected.metrics.keys()
    assert_same_weights(found.adapter.model, expected.adapter.model)
    assert curve(resumed) == curve(whole)


def test_every_row_is_seen_once_an_epoch_in_an_order_of_its_own(task: Path) -> None:
    rows = open_sequences(task / "sft-data/data", "train")
    feed = row_feed(rows, recipe(SFT, train_batch_per_replica=8, epoch=2))
    assert feed.total_steps == 16
    epochs = []
    for epoch in range(2):
        seen = [tuple(s.input_ids) for step in range(8 * epoch, 8 * epoch + 8) for s in feed.samples(step)[0]]
        assert sorted(seen) == sorted(tuple(rows[i][0]) for i in range(len(rows)))
        epochs.append(seen)
    assert epochs[0] != epochs[1]


def scored(*rewards: float | None) -> ScoredGroup:
    """A group of one prompt, whose completion i has the tokens i and 9."""
    drawn = (Completion((Segment((i, 9), True, (-0.1, -0.2), 0),), "stop", "x") for i in range(len(rewards)))
    return ScoredGroup(Group(Prompt(0, (5, 6), "2+2=", "4"), tuple(drawn), 0), tuple(map(Score, rewards)))


def test_completions_are_compared_inside_of_their_group_without_those_of_an_invalid_reward() -> None:
    found, _ = Grpo(GrpoConfig(unbiased_advantage=True)).credit([scored(1.0, None, 0.0), scored(10.0, 4.0, 1.0)])
    assert [sample.advantage for sample in found] == [0.5, -0.5, 5.0, -1.0, -4.0]
    assert [list(sample.input_ids) for sample in found[:2]] == [[5, 6, 0, 9], [5, 6, 2, 9]]
    assert [list(sample.loss_mask) for sample in found[:2]] == [[0, 0, 1, 1]] * 2


def test_tokens_without_a_finite_log_probability_of_the_engine_are_left_out_and_counted() -> None:
    drawn = (math.nan, -0.2, -math.inf, -0.4)
    answers = [Completion((Segment((1, 2, 3, 4), True, each, 0),), "stop", "x") for each in (drawn, (-0.1,) * 4)]
    group = ScoredGroup(Group(Prompt(0, (5, 6), "", ""), tuple(answers), 0), (Score(1.0), Score(0.0)))
    (sample, other), metrics = Grpo(GrpoConfig(min_filter_prefix_tokens=9)).credit([group])
    assert list(sample.loss_mask) == [0, 0, 0, 1, 0, 1] and sample.num_learned == 2 and other.num_learned == 4
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs.tolist() == pytest.approx([-0.2, -0.4])
    assert metrics["rollout/tokens_not_finite"] == 2.0 and metrics["completion/shared_prefix"] == 0.0


def test_an_hf_engine_has_the_newest_weights_and_the_log_probabilities_of_the_trainer(
    task: Path, tmp_path: Path
) -> None:
    config = recipe(GRPO, train_batch_per_replica=8, max_num_steps=2, sync_weight_interval=2)
    stage = make_stage(tmp_path / "rl", "rl", config, task / "task/model", task / "rl-data/data")
    train(stage)
    lines = read_metrics(stage.path / "metrics.jsonl")
    assert [(line["rollout/version_lag"], line["sync/version"]) for line in lines] == [(0.0, 1.0), (0.0, 2.0)]
    assert all(0 < line["rollout/logprob_difference_max"] < 1e-4 and line["ratio"] == 1.0 for line in lines)
