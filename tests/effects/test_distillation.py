"""Keys of a teacher: on two tokens whose losses can be worked out by hand, and on a tiny model that is asked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.distillation import score_with_teacher
from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from cosmos_core.models.scorer import LOGPROBS_ONLY, RequestedOutputs
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.train.setup import open_trainer
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment
from tests.effects.change import GRPO, Change, Settings, changes, difference, stage_of
from tests.effects.change import recipe as recipe_of
from tests.effects.test_model import Passes, samples
from tests.unit.trainers import micro_batch

TAUGHT: Settings = {**GRPO, "distillation.enable": True, "train.compile": False, "train.param_dtype": "float32"}
TOP: Settings = {**TAUGHT, "distillation.top_k": 1}
# Of two drawn tokens the policy says 1/4 and 1/2, the teacher 1/2 and 1/4.
POLICY, TEACHER, LN2 = (math.log(1 / 4), math.log(1 / 2)), (math.log(1 / 2), math.log(1 / 4)), math.log(2)
FORWARD = (1 / 2 * LN2 + 1 / 2 * math.log((1 / 2) / (3 / 4)), -1 / 4 * LN2 + 3 / 4 * math.log((3 / 4) / (1 / 2)))
REVERSE = FORWARD[::-1]


def mixed(one: float, other: float) -> float:
    """The Jensen-Shannon divergence of two coins."""
    m = (one + other) / 2
    return sum(p / 2 * math.log(p / q) for p, q in ((one, m), (1 - one, 1 - m), (other, m), (1 - other, 1 - m)))


class Told:
    """A view whose teacher is given, and who asks what."""

    def __init__(self) -> None:
        self.validation_requests: list[tuple[str, int, bool]] = []

    def reset(self, weights: str, *, optimizer: bool = False) -> None:
        raise AssertionError("asked for other weights")

    def move_towards_policy(self, weights: str, fraction: float) -> None:
        raise AssertionError("asked for other weights")

    def evaluate(
        self, samples: Any, wants: RequestedOutputs = LOGPROBS_ONLY, *, weights: str = "policy", size: int | None = None
    ) -> list[dict[str, torch.Tensor]]:
        self.validation_requests.append((weights, wants.top_k, samples[0].top_ids is not None))
        rows = {"logprobs": torch.tensor(TEACHER)}
        if wants.top_k:
            rows |= {"top_logprobs": rows["logprobs"].unsqueeze(-1), "top_ids": torch.zeros(2, 1, dtype=torch.int64)}
        return [rows]


def algorithm_of(recipe: Recipe) -> Grpo:
    made = make_algorithm(recipe, make_training_sampling(recipe))
    assert isinstance(made, Grpo)
    return made


def drawn() -> Sample:
    mask = np.array([0, 1, 1], dtype=np.uint8)
    return Sample(np.arange(3), mask, rollout_logprobs=np.array(POLICY, dtype=np.float32))


def gradients(recipe: Recipe) -> list[float]:
    """The gradient by the log-probability of each token, with a weight of 1/2 for each of the two."""
    (update,) = algorithm_of(recipe).updates([drawn()], Told())
    logprobs_BS = torch.tensor([POLICY], requires_grad=True)
    outputs = {"top_logprobs": logprobs_BS.unsqueeze(-1)} if update.request.top_k else {}
    mask_BS = torch.ones(1, 2, dtype=torch.bool)
    loss = update.loss(micro_batch(update.samples, logprobs_BS, mask_BS, **outputs))
    loss.value.backward()  # type: ignore[no-untyped-call]
    assert logprobs_BS.grad is not None
    metrics = {name: (sum_ / count).item() for name, (sum_, count) in loss.metrics.items()}
    divergence = metrics.get("teacher/divergence", metrics.get("teacher/reverse_kl", 0.0))
    return [*(2 * logprobs_BS.grad[0]).tolist(), divergence]


def slopes(beta: float) -> tuple[float, float]:
    """The derivative of the divergence of a coin by its log-probability, by a difference."""

    def value(log_p: float, q: float) -> float:
        p = math.exp(log_p)
        m = (1 - beta) * p + beta * q
        if beta == 0:
            return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if beta == 1:
            return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        kl = lambda a, b: a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))  # noqa: E731
        return beta * kl(q, m) + (1 - beta) * kl(p, m)

    found = [
        (value(p + 1e-6, math.exp(q)) - value(p - 1e-6, math.exp(q))) / 2e-6
        for p, q in zip(POLICY, TEACHER, strict=True)
    ]
    return found[0], found[1]


HALF = mixed(1 / 4, 1 / 2)


@changes(
    (Change("distillation.enable", True, GRPO), [-LN2, LN2, 0.0]),
    (Change("distillation.kl_penalty_coef", 0.5, TAUGHT), [-LN2 / 2, LN2 / 2, 0.0]),
    (Change("distillation.kl_discount_factor", 0.5, TAUGHT), [-LN2 + LN2 / 2, LN2, 0.0]),
    (Change("distillation.top_k", 1, TAUGHT), [*slopes(0.5), HALF]),
    (Change("distillation.jsd_beta", 0.0, TOP), [*slopes(0.0), sum(FORWARD) / 2]),
    (Change("distillation.jsd_beta", 1.0, TOP), [*slopes(1.0), sum(REVERSE) / 2]),
    (
        Change("distillation.kl_discount_factor", 0.5, TOP),
        [slopes(0.5)[0] + HALF / 2, slopes(0.5)[1], HALF],
    ),
)
def test_it_changes_what_is_learned_of_a_teacher(change: Change, expected: list[float]) -> None:
    assert gradients(change.after) == pytest.approx(expected, abs=1e-5)
    assert gradients(change.before) != pytest.approx(expected, abs=1e-3)


@changes(
    (Change("distillation.trainer_token_ids_from_teacher", False, TOP), [("policy", 1, False), ("teacher", 1, True)])
)
def test_it_changes_whose_likeliest_tokens_are_compared(change: Change, expected: list[tuple[str, int, bool]]) -> None:
    views = [Told(), Told()]
    for recipe, view in zip((change.before, change.after), views, strict=True):
        (update,) = algorithm_of(recipe).updates([drawn()], view)
        assert update.samples[0].top_ids.tolist() == [[0], [0]]
    assert views[0].validation_requests == [("teacher", 1, False)]
    assert views[1].validation_requests == expected


@changes(Change("distillation.include_prompt", True, TAUGHT))
def test_it_changes_which_tokens_are_learned(change: Change) -> None:
    completion = Completion((Segment((7, 8), True, (-1.0, -2.0), 0),), "stop", "x")
    group = ScoredGroup(Group(Prompt(0, (4, 5, 6), "p", ""), (completion,) * 2, 0), (Score(0.0),) * 2)
    before, after = (algorithm_of(recipe).credit([group])[0][0] for recipe in (change.before, change.after))
    assert before.loss_mask.tolist() == [0, 0, 0, 1, 1] and after.loss_mask.tolist() == [0, 1, 1, 1, 1]
    assert after.rollout_logprobs is not None
    assert np.isnan(after.rollout_logprobs).tolist() == [True, True, False, False]


def with_teacher(recipe: Recipe, model: Path, folder: Path, name: str = "") -> Trainer:
    teacher = recipe.distillation.copy_with(model_name_or_path=name or str(model))
    return open_trainer(stage_of(folder / "stage", recipe.copy_with(distillation=teacher), kind="rl", model=model))


@changes(
    (Change("distillation.mini_batch", 4, TAUGHT), [4, 4]),
    (Change("distillation.max_token_len_per_mini_batch", 18, TAUGHT), [3, 3, 2]),
    (Change("distillation.sequence_packing", True, {**TAUGHT, "distillation.mini_batch": 4}), [1, 1]),
)
def test_it_changes_the_rows_that_a_teacher_is_given(
    change: Change, expected: list[int], model: Path, tmp_path: Path
) -> None:
    found = []
    for recipe in (change.before, change.after):
        trainer = with_teacher(recipe, model, tmp_path)
        trainer.evaluate(samples(1), weights="teacher")  # the first call looks at the head too
        passes = Passes(trainer._extra_models["teacher"].model)
        score_with_teacher(recipe.distillation, samples(), trainer, LOGPROBS_ONLY)
        found.append(passes.rows)
    assert found[1] == expected != found[0]


def facts(recipe: Recipe, model: Path, folder: Path) -> dict[str, Any]:
    """What is seen of a teacher that is asked."""
    trainer = with_teacher(recipe, model, folder)
    teacher: Any = trainer._extra_models["teacher"]
    computed: list[torch.dtype] = []
    teacher.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: computed.append(call[2].dtype))
    row = trainer.evaluate(samples(1), weights="teacher")[0]
    return {
        "weights": {parameter.dtype for parameter in teacher.model.parameters()},
        "computes": set(computed),
        "logprobs": row["logprobs"].dtype,
    }


_FACTS: dict[str, Any] = {}
"""What is seen before any change, found once."""


@changes(
    (Change("distillation.master_dtype", "bfloat16", TAUGHT), {"weights": {torch.bfloat16}}),
    (Change("distillation.param_dtype", "float32", TAUGHT), {"computes": {torch.float32}}),
    (Change("distillation.logprob_dtype", "bfloat16", TAUGHT), {"logprobs": torch.bfloat16}),
)
def test_it_changes_the_precision_of_a_teacher(
    change: Change, expected: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    assert change.base is TAUGHT
    if not _FACTS:
        _FACTS.update(facts(change.before, model, tmp_path))
    before, after = _FACTS, facts(change.after, model, tmp_path)
    assert before == {"weights": {torch.float32}, "computes": {torch.bfloat16}, "logprobs": torch.float32}
    assert difference(before, after) == expected


@changes(
    Change("distillation.model_name_or_path", "org/other", TAUGHT), Change("distillation.model_revision", "v2", TAUGHT)
)
@pytest.mark.usefixtures("hub")
def test_it_changes_which_teacher_is_asked(change: Change, model: Path, tmp_path: Path) -> None:
    found = []
    named = {**change.base, "distillation.model_name_or_path": "org/tiny"}
    for recipe in (recipe_of(named), recipe_of({**named, change.key: change.value})):
        trainer = with_teacher(recipe, model, tmp_path, recipe.distillation.model_name_or_path)
        found.append(trainer._extra_models["teacher"].model.config.tie_word_embeddings)
    assert found == [True, False]
