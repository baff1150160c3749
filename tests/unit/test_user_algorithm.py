"""An algorithm of a user that returns something else than it should: one line names it, with its file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.algorithms.data_term import DataTermAlgorithm
from cosmos_core.algorithms.registry import algorithm_class, credit_groups, iterate_optimizer_updates, make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from tests.effects.change import GRPO, recipe
from tests.unit.trainers import NoView

HEAD = "from cosmos_core.algorithms.base import Algorithm, Update\n\nclass Mine(Algorithm):\n"


def settings(folder: Path, body: str) -> Recipe:
    (folder / "mine.py").write_text(HEAD + body)
    return recipe({**GRPO, "train.train_policy.trainer_type": f"{folder}/mine.py:Mine"})


@pytest.mark.parametrize("arguments", ["config", "config, custom, sampling, extra", "config, *, custom, sampling"])
def test_a_class_that_takes_other_arguments_is_refused(arguments: str, tmp_path: Path) -> None:
    config = settings(tmp_path, f"    def __init__(self, {arguments}): pass\n")
    with pytest.raises(ConfigError, match=r"mine\.py:Mine': __init__: it is called with config, .*mine\.py:4\)$"):
        algorithm_class(config.train.train_policy)


@pytest.mark.parametrize("arguments", ["config, custom, sampling", "*arguments", "config, custom=None, sampling=None"])
def test_a_class_need_not_call_the_constructor_of_its_base(arguments: str, tmp_path: Path) -> None:
    config = settings(tmp_path, f"    def __init__(self, {arguments}): self.custom = 1\n")
    algorithm = make_algorithm(config)
    algorithm.after_train_step(1, NoView())  # reads the parameters
    assert algorithm.custom == 1 and algorithm.config is config.train.train_policy


@pytest.mark.parametrize(
    "result", ["[1.0, 2.0]", "None", "([], None)", "([], {'a': 'b'})", "(None, {})", "([], [], {})"]
)
@pytest.mark.parametrize("has_data_term", [False, True])
def test_a_credit_that_is_not_samples_and_metrics_is_refused(result: str, has_data_term: bool, tmp_path: Path) -> None:
    config = settings(tmp_path, f"    scale = 2\n\n    def credit(self, groups): return {result}\n")
    algorithm = make_algorithm(config)
    if has_data_term:
        algorithm = DataTermAlgorithm(algorithm, lambda number: Update((), lambda batch: batch))
    expected = r"mine\.py:Mine': credit: it returned a \w+, not a tuple of samples and a dict .*mine\.py:6\)$"
    with pytest.raises(ConfigError, match=expected):
        credit_groups(algorithm, [])


def test_numbers_of_other_libraries_are_metrics(tmp_path: Path) -> None:
    values = "{'a': np.float32(0.5), 'b': torch.tensor(2), 'c': True}"
    body = f"    def credit(self, groups):\n        import numpy as np, torch\n        return (1,), {values}\n"
    samples, metrics = credit_groups(make_algorithm(settings(tmp_path, body)), [])
    assert samples == [1] and metrics == {"a": 0.5, "b": 2.0, "c": 1.0}
    assert {type(value) for value in metrics.values()} == {float}


def test_an_error_inside_a_generator_of_samples_is_the_users(tmp_path: Path) -> None:
    body = "    def credit(self, groups): return (int(x) for x in 'a'), {}\n"
    with pytest.raises(ValueError, match="invalid literal for int"):
        credit_groups(make_algorithm(settings(tmp_path, body)), [])


@pytest.mark.parametrize("has_data_term", [False, True])
@pytest.mark.parametrize("body", ["return None", "return [None]", "yield len(samples)"])
def test_updates_that_are_no_updates_are_refused(body: str, has_data_term: bool, tmp_path: Path) -> None:
    algorithm = make_algorithm(settings(tmp_path, f"    def updates(self, samples, view): {body}\n"))
    if has_data_term:
        algorithm = DataTermAlgorithm(algorithm, lambda number: Update((), lambda batch: batch))
    with pytest.raises(ConfigError, match=r"mine\.py:Mine': updates: it gave a \w+, not an Update of .*mine\.py:4\)$"):
        list(iterate_optimizer_updates(algorithm, [], NoView()))


@pytest.mark.parametrize("body", ["yield Update(samples, None)", "return [Update(samples, None)]",
                                  "return Update(samples, None)"])  # fmt: skip
def test_one_update_is_taken_however_it_is_given(body: str, tmp_path: Path) -> None:
    algorithm = make_algorithm(settings(tmp_path, f"    def updates(self, samples, view): {body}\n"))
    [update] = iterate_optimizer_updates(algorithm, [7], NoView())
    assert update.samples == [7]


def test_a_number_is_the_metric_of_a_micro_batch() -> None:
    numbers: dict[str, Any] = {"a": 0.5, "b": np.float32(2), "c": torch.tensor(3.0, requires_grad=True), "d": 1}
    loss = Loss(torch.zeros(()), {**numbers, "e": torch.tensor([6.0, 4.0]), "g": [6, 4], "h": (torch.tensor(6.0), 4)})
    assert {name: metric.tolist() for name, metric in loss.metrics.items()} == {
        "a": [0.5, 1.0], "b": [2.0, 1.0], "c": [3.0, 1.0], "d": [1.0, 1.0], "e": [6.0, 4.0],
        "g": [6.0, 4.0], "h": [6.0, 4.0],
    }  # fmt: skip
    for value in (torch.zeros(3), [0, 0, 0]):
        with pytest.raises(TypeError, match=r"metric 'f' has the shape \(3,\); give a number, or \[sum, count\]"):
            Loss(torch.zeros(()), {"f": value})
    for value in ("a", ["a", 1], [None, 1], [torch.zeros(2), 2]):
        with pytest.raises(TypeError, match=r"metric 'f' .*; give a number, or \[sum, count\]"):
            Loss(torch.zeros(()), {"f": value})
