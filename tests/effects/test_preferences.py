"""Keys of DPO and KTO: what a row is, and the loss of a pair or a label by hand; formulas are in tests/reference."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.dpo import Dpo
from cosmos_core.algorithms.kto import Kto
from cosmos_core.config.schema.dpo import DpoConfig
from cosmos_core.config.schema.kto import KtoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.prepared import read_row_kind
from cosmos_core.data.sample import Sample
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import _TrainingSetup
from tests.effects.change import SFT, Change, changes, stage_of
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import Given, NoView, micro_batch

DPO = {**SFT, "train.train_policy.trainer_type": "dpo"}
BOTH = {**DPO, "train.train_policy.dpo.loss_type": ("sigmoid", "sft")}
KTO = {**SFT, "train.train_policy.trainer_type": "kto"}
SIMPO = {**DPO, "train.train_policy.dpo.loss_type": "simpo"}
# With beta 0.1 the rewards are 0.2 and 0.1.
LOGPS, REFERENCE = {"chosen": -4.0, "rejected": -3.0}, {"chosen": -6.0, "rejected": -4.0}


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def loss(recipe: Recipe) -> float:
    """Of a pair of two and one learned tokens."""
    policy = recipe.train.train_policy
    assert isinstance(policy, DpoConfig)
    samples = [
        Sample(np.arange(3), np.array([0, 1, name == "chosen"], dtype=np.uint8), reference_logprob=REFERENCE[name])
        for name in LOGPS
    ]
    (update,) = Dpo(policy).updates(samples, NoView())
    logprobs_BS = torch.tensor([[LOGPS["chosen"] / 2] * 2, [LOGPS["rejected"], 0.0]], dtype=torch.float64)
    mask_BS = torch.tensor([[True, True], [True, False]])
    return update.loss(micro_batch(samples, logprobs_BS, mask_BS)).value.item()


@changes(
    (Change("train.train_policy.dpo.beta", 0.5, DPO), softplus(-0.5)),
    (Change("train.train_policy.dpo.loss_type", "bco_pair", DPO), softplus(-0.2) + softplus(0.1)),
    (Change("train.train_policy.dpo.loss_weights", (1.0, 0.25), BOTH), softplus(-0.1) + 0.25 * 2.0),
    (Change("train.train_policy.dpo.label_smoothing", 0.2, DPO), 0.8 * softplus(-0.1) + 0.2 * softplus(0.1)),
    (Change("train.train_policy.dpo.simpo_gamma", 1.0, SIMPO), softplus(-0.1 * (-4 / 2 + 3) + 1.0)),
)
def test_it_changes_the_loss_of_a_pair(change: Change, expected: float) -> None:
    assert loss(change.after) == pytest.approx(expected, rel=1e-12)
    assert loss(change.before) != pytest.approx(expected, rel=1e-3)


def loss_of_labelled(recipe: Recipe) -> float:
    """Of a desirable and another response with rewards 0.2 and 0.1, where KL is (1 + 3) / 2 nats."""
    policy = recipe.train.train_policy
    assert isinstance(policy, KtoConfig)
    algorithm = Kto(policy)
    algorithm.max_tokens = 8
    samples = [Sample(np.arange(2), np.array([0, 1], dtype=np.uint8), reward=label) for label in (1.0, 0.0)]
    reference = [torch.tensor([value], dtype=torch.float64) for value in (-6.0, -4.0, -5.0, -7.0)]
    asked = reference if policy.kto.loss_type == "kto" else reference[:2]
    view = Given(policy=[reference[2] + 1, reference[3] + 3], reference=asked)
    (update,) = algorithm.updates(samples, view)
    logprobs_BS = torch.tensor([[-4.0], [-3.0]], dtype=torch.float64)
    return update.loss(micro_batch(samples, logprobs_BS, torch.ones(2, 1).bool())).value.item()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@changes(
    (Change("train.train_policy.kto.beta", 0.5, KTO), (sigmoid(0.0) + sigmoid(0.5 - 1.0)) / 2),
    (Change("train.train_policy.kto.loss_type", "apo_zero_unpaired", KTO), (sigmoid(-0.2) + sigmoid(0.1)) / 2),
    (Change("train.train_policy.kto.desirable_weight", 1.5, KTO), (1.5 * sigmoid(0.0) + sigmoid(-0.1)) / 2),
    (Change("train.train_policy.kto.undesirable_weight", 0.5, KTO), (sigmoid(0.0) + 0.5 * sigmoid(-0.1)) / 2),
)
def test_it_changes_the_loss_of_a_labelled_response(change: Change, expected: float) -> None:
    assert loss_of_labelled(change.after) == pytest.approx(expected, rel=1e-12)
    assert loss_of_labelled(change.before) == pytest.approx((sigmoid(0.0) + sigmoid(-0.1)) / 2, rel=1e-12)


PAIR = {"text": "2+2=4", "chosen": "2+2=4", "rejected": "2+2=5", "good": "2+2=3", "bad": "2+2=7", "ask": "1+"}


def prepared(recipe: Recipe, folder: Path, row: dict[str, Any] = PAIR) -> Stage:
    """A stage whose data are a prepared row, by default one that is a text and a pair of texts."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    dataset = recipe.train.train_policy.dataset.copy_with(name=str(folder / "rows.jsonl"))
    train = recipe.train.copy_with(train_policy=recipe.train.train_policy.copy_with(dataset=dataset))
    stage = stage_of(folder / "stage", recipe.copy_with(train=train), model=save_tiny_model(folder / "model"))
    prepare.run(stage)
    stage.data = stage.path / "data"
    return stage


@changes(Change("train.train_policy.trainer_type", "dpo"))
def test_it_changes_what_a_row_is(change: Change, tmp_path: Path) -> None:
    kinds = [read_row_kind(prepared(side, tmp_path).path / "data", "train") for side in (change.before, change.after)]
    assert kinds == ["sequences", "pairs"]


@changes(
    (Change("train.train_policy.chosen_column_name", "good", DPO), ["2+2=3", "2+2=5"]),
    (Change("train.train_policy.rejected_column_name", "bad", DPO), ["2+2=4", "2+2=7"]),
    (Change("train.train_policy.prompt_column_name", "ask", DPO), ["1+2+2=4", "1+2+2=5"]),
)
def test_it_changes_which_responses_are_compared(change: Change, expected: list[str], tmp_path: Path) -> None:
    found = []
    for side in (change.before, change.after):
        stage = prepared(side, tmp_path)
        pairs, tokenizer = open_pairs(stage.path / "data", "train"), load_tokenizer(stage.model)
        found.append(
            [str(tokenizer.decode(rows[0][0], skip_special_tokens=True)) for rows in (pairs.chosen, pairs.rejected)]
        )
    assert found == [["2+2=4", "2+2=5"], expected]


@changes(Change("train.train_policy.dpo.reference_free", True, {**DPO, "train.compile": False}))
def test_it_changes_whether_there_is_a_reference(change: Change, tmp_path: Path) -> None:
    found = []
    for side in (change.before, change.after):
        stage = prepared(side, tmp_path)
        pairs = open_pairs(stage.path / "data", "train")
        with ExitStack() as exit_stack:
            _TrainingSetup(stage, exit_stack)._compute_reference_logprobs(pairs, "train", np.arange(1))
        found.append(pairs.reference_logprobs)
    assert found[0] is not None and found[0][0].max() < 0
    assert found[1] is None


@changes(Change("train.train_policy.label_column_name", "flag", {**KTO, "policy.chat_template": "chatml"}))
def test_it_changes_which_column_is_the_label(change: Change, tmp_path: Path) -> None:
    found = []
    for side in (change.before, change.after):
        row = {"prompt": "2+2", "completion": "4", "label": True, "flag": 0}
        stage = prepared(side, tmp_path, row)
        rows = load_row_kind("labelled").open(stage.path / "data", "train", stage.recipe.policy)
        found.append([sample.reward for sample in rows.samples([0], (0, 0))])
    assert found == [[1.0], [0.0]]
