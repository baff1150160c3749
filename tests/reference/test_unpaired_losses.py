"""KTO and unpaired APO against TRL's own `KTOTrainer._compute_loss` over a whole model: value and gradient in float64.

TRL's fused head scores in float32, so its trainer is called on a stand-in whose model gives log-probabilities of whole
logits; its collator and its rotation of completions make the mismatched sequences. B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from cosmos_core.algorithms.kto import Kto
from cosmos_core.config.schema.kto import KtoConfig, KtoLossConfig
from cosmos_core.data.sample import Sample, swap_responses
from cosmos_core.run.progress import ProgressWriter
from tests.effects.change import SFT, recipe
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import score_in, trainer_of

MAX_TOKENS = 16
Rows = list[dict[str, Any]]


def rows_of(seed: int) -> Rows:
    """Prompts and completions of odd lengths, down to one token, up to what no longer fits when exchanged."""
    random = np.random.default_rng(seed)
    labels = random.random(6) < 0.5 if seed else np.ones(6, dtype=bool)
    rows = []
    for i, label in enumerate(labels):
        prompt = int(random.integers(1, 12))
        completion = int(random.integers(1, MAX_TOKENS - prompt + 1)) if i else 1
        ids = random.integers(1, 60, prompt + completion).tolist()
        rows.append({"prompt_ids": ids[:prompt], "completion_ids": ids[prompt:], "label": bool(label)})
    return rows


def log_probs(model: nn.Module, *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
    """What TRL's fused head returns."""
    logits_BTV = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    chosen_BT = labels[:, 1:].clamp(min=0).unsqueeze(-1)
    found_BT = logits_BTV.log_softmax(-1).gather(-1, chosen_BT).squeeze(-1).masked_fill(labels[:, 1:] == -100, 0.0)
    return SimpleNamespace(
        log_probs=found_BT, entropy=torch.zeros_like(found_BT), mean_logits=torch.zeros_like(found_BT)
    )


def trl_loss(
    model: nn.Module, reference: nn.Module, rows: Rows, config: KtoLossConfig
) -> tuple[Tensor, dict[str, Any]]:
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    has_kl = config.loss_type == "kto"
    if has_kl:
        completions = [row["completion_ids"] for row in rows]
        rotated = [completions[-1], *completions[:-1]]
        rows = [row | {"KL_completion_ids": ids} for row, ids in zip(rows, rotated, strict=True)]
    trainer: Any = SimpleNamespace(
        model=model, ref_model=partial(log_probs, reference), calculate_KL=has_kl, aux_loss_enabled=False,
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x),
        precompute_ref_logps=False, args=SimpleNamespace(gradient_checkpointing_kwargs=None), beta=config.beta,
        loss_type=config.loss_type, desirable_weight=config.desirable_weight, _total_train_tokens=0, _tp_size=1,
        undesirable_weight=config.undesirable_weight, _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )  # fmt: skip
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=MAX_TOKENS)(rows)
    loss = KTOTrainer._compute_loss(trainer, partial(log_probs, model), batch, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train" if model.training else "eval"].items()}


def sample_of(row: dict[str, Any]) -> Sample:
    lengths = len(row["prompt_ids"]), len(row["completion_ids"])
    mask = np.repeat(np.array([0, 1], dtype=np.uint8), lengths)
    return Sample(np.array(row["prompt_ids"] + row["completion_ids"]), mask, reward=float(row["label"]))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.7, "desirable_weight": 1.33, "undesirable_weight": 0.4},
        {"loss_type": "apo_zero_unpaired", "beta": 0.3},
    ],
)
def test_loss_gradient_and_metrics_equal_those_of_trl_however_the_step_is_split(
    settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    reference = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "model"), dtype=torch.float64)
    rows, config = rows_of(seed), KtoLossConfig(**settings)
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    expected, theirs = trl_loss(model, reference, rows, config)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for size, packed in ((4, False), (2, True)):
        split = {**SFT, "train.train_policy.mini_batch": size, "train.sequence_packing": packed}
        exact = {"train.optm_grad_norm_clip": 0.0, "train.compile": False, "train.param_dtype": "float32"}
        train = recipe({**split, **exact}).train
        rank = trainer_of(copy.deepcopy(reference), train, 0, ProgressWriter(tmp_path / "p.json"))
        score_in(rank, torch.float64)
        rank.weight_sets.add("reference")
        rank.adapter.model.load_state_dict(model.state_dict())
        algorithm = Kto(KtoConfig(type="sft", kto=config))
        algorithm.max_tokens = MAX_TOKENS
        samples = [sample_of(row) for row in rows]
        both = [sample for pair in zip(samples, swap_responses(samples, MAX_TOKENS), strict=True) for sample in pair]
        scored = rank.evaluate(both, weights="reference")
        sums = [row["logprobs"].sum().item() for row in scored]
        rows_of_two = [replace(sample, reference_logprob=value) for sample, value in zip(both, sums, strict=True)]
        held_out = algorithm.measure([rows_of_two], rank, size)
        (update,) = algorithm.updates(samples, rank)
        found = rank.update(update)
        for each in (found, held_out):
            assert each["loss"] == pytest.approx(expected.item(), abs=1e-9)
            shared = theirs.keys() & each.keys()
            assert shared >= {"kl", "rewards/chosen", "logps/chosen"}
            assert {name: each[name] for name in shared} == pytest.approx({name: theirs[name] for name in shared})
        for name, parameter in rank.adapter.model.named_parameters():
            assert (parameter.grad - gradients[name]).abs().max() <= 1e-9, name
