"""What the ranks of `test_invariance.py` run: one update under a mesh, and its loss and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ModelError
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model
from cosmos_core.models.lora import needs_base_weights
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel.fsdp import full_tensors
from cosmos_core.parallel.mesh import Mesh, is_first_rank, open_mesh
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.unit.trainers import likelihood, score_in, trainer_of

VOCABULARY = 260
_ADAPTER = {"r": 4, "init_lora_weights": False}  # not at zero, where half of the gradients are
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapter": {"lora": {**_ADAPTER, "target_modules": "all-linear"}},
    "adapter on attention": {"lora": {**_ADAPTER, "target_modules": ["q_proj", "v_proj", "o_proj"]}},
    "adapter and norm": {"lora": {**_ADAPTER, "target_modules": ["q_proj"], "modules_to_save": ["model.norm"]}},
    "adapter and embedding": {"lora": {**_ADAPTER, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}},
    "adapter taken from the base": {"lora": {**_ADAPTER, "init_lora_weights": "pissa", "target_modules": ["q_proj"]}},
    "attention": {"freeze_pattern": ["mlp", "embed", "norm"]},
    "not experts": {"freeze_pattern": ["experts"]},
}
"""What of the model, as `[policy]` says it."""
LENGTHS = (5, 19, 8, 13, 21, 11, 7)
"""Seven: not every rank has as many."""


@dataclass(frozen=True)
class Case:
    """One way to compute the same update."""

    mesh: tuple[tuple[str, int | str], ...] = ()
    mini_batch: int = 8
    packed: bool = False
    algorithm: str = "sft"
    masked: int = 0
    """That many of the longest samples, dealt to the first ranks, have nothing to learn."""
    idle: int = 0
    """That many of the longest samples have an advantage of 0, and need not be run through the model."""
    dtype: str = "float64"
    checkpointing: bool = False
    model: str = "tied"
    trained: str = "all"
    """A key of `TRAINED`."""
    train: tuple[tuple[str, bool | str], ...] = ()
    """Further keys of `[train]`."""
    balance: float = 0.0
    """Weight of the routers' loss."""

    @property
    def name(self) -> str:
        """For the test's id."""
        mesh = "-".join(f"{axis.removesuffix('_size')}{size}" for axis, size in self.mesh) or "one rank"
        flags = [word for word, is_set in (("packed", self.packed), ("recomputed", self.checkpointing)) if is_set]
        flags += [self.model] if self.model != "tied" else []
        flags += [self.trained] if self.trained != "all" else []
        flags += [f"{key} = {value}" for key, value in self.train]
        flags += ["balanced"] if self.balance else []
        masked = [f"{self.masked} masked"] if self.masked else []
        masked += [f"{self.idle} idle"] if self.idle else []
        return ", ".join([mesh, f"{self.mini_batch} rows", self.algorithm, *flags, *masked, self.dtype])


def samples(masked: int, idle: int = 0) -> list[Sample]:
    """Sequences of different lengths; prompts of three tokens and more."""
    random = np.random.default_rng(0)
    by_length = sorted(range(len(LENGTHS)), key=lambda i: -LENGTHS[i])
    longest = by_length[:masked]
    found = []
    for i, length in enumerate(LENGTHS):
        mask = np.zeros(length, dtype=np.uint8)
        mask[3 + i % 2 :] = i not in longest
        ids = random.integers(1, VOCABULARY - 1, length)
        logprobs = -random.random(int(mask.sum())).astype(np.float32)
        advantage = float(random.normal()) * (i not in by_length[:idle])
        found.append(Sample(ids, mask, advantage, float(i % 2), logprobs))
    return found


def pairs(found: list[Sample], mini_batch: int) -> list[Sample]:
    """Three pairs: not every rank has as many."""
    return [
        replace(sample, micro_batch=i // 2 // mini_batch, reference_logprob=-float(sample.num_learned))
        for i, sample in enumerate(found[:6])
    ]


def recipe(case: Case) -> Recipe:
    """What the case says in TOML."""
    policy: dict[str, Any] = {"type": case.algorithm, "mini_batch": case.mini_batch}
    if case.algorithm == "dpo":
        policy |= {"type": "sft", "trainer_type": "dpo", "dpo": {"loss_type": ["sigmoid", "bco_pair", "sft"]}}
    if case.algorithm == "kto":
        policy |= {"type": "sft", "trainer_type": "kto"}
    if case.algorithm in {"grpo", "taught"}:
        policy |= {"type": "grpo"}
        policy |= {"mu_iterations": 1, "batch_size_per_optimize": None if case.idle else 4}
    train = {
        "param_dtype": "float32", "compile": False, "train_batch_per_replica": 8, "optm_grad_norm_clip": 0.0,
        "train_policy": policy, "sequence_packing": case.packed, **dict(case.train),
    }  # fmt: skip
    taught = {"enable": True, "top_k": 4, "kl_discount_factor": 0.5} if case.algorithm == "taught" else {}
    found = Recipe.model_validate({"train": train, "distillation": taught})
    return found.copy_with(train=found.train.copy_with(fsdp_reduce_dtype=case.dtype))  # no recipe may ask it of float64


@cache
def mesh_of(sizes: tuple[tuple[str, int | str], ...]) -> Mesh | None:
    """Return a mesh, whose process groups take longer to open than a case to compute."""
    return open_mesh(ParallelismConfig.model_validate(dict(sizes)), "cpu")


def computed(case: Case, models: Path, scratch: Path) -> dict[str, Any]:
    """Figures of the last update and every gradient, on the first rank."""
    torch.manual_seed(0)
    config = recipe(case).train
    mesh = mesh_of(case.mesh)
    trained = PolicyConfig.model_validate(TRAINED[case.trained])
    load = init_on_meta if mesh and not needs_base_weights(trained.lora) else load_model
    loaded = load(
        str(models / case.model), dtype=torch.float32, device=torch.device("cpu"),
        gradient_checkpointing=case.checkpointing,
    )  # fmt: skip
    loaded = loaded.to(getattr(torch, case.dtype))
    if case.dtype == "float64" and loaded._can_set_experts_implementation():
        loaded.set_experts_implementation("eager")  # the grouped product knows no float64
    mark_trained_weights(loaded, trained)
    rank = trainer_of(loaded, config, 0, ProgressWriter(scratch / "progress.json"), mesh, None, case.balance)
    score_in(rank, getattr(torch, case.dtype))
    rank.adapter.check_parallel_plan()
    policy = config.train_policy
    batch = samples(case.masked, case.idle)
    algorithm = make_algorithm(recipe(case))
    algorithm.has_separate_gradients = bool(case.idle)
    algorithm.teacher = recipe(case).teacher
    if algorithm.teacher:
        add_teacher(rank, load(str(models / "deep"), dtype=torch.float32, device=torch.device("cpu")), case, config)
    if case.algorithm == "kto":
        rank.weight_sets.add("reference")
        for tensor in rank.weight_sets.tensors["reference"].values():
            tensor.mul_(0.9)  # so that KL is not 0
    if policy.rows == "pairs":
        batch = pairs(batch, case.mini_batch)
    evaluated = dict(zip(("logprob", "num_top"), likelihood(rank, batch, size=3), strict=True))
    rank.set_learning_rate(5, 10)
    figures: dict[str, float] = {}
    for update in algorithm.updates(batch, rank):
        figures = rank.update(update)
    figures |= evaluated
    gradients: dict[str, Tensor] = {
        name: p.grad for name, p in rank.adapter.model.named_parameters() if p.grad is not None
    }
    whole = rank.adapter.gather_whole_model()
    weights = {} if whole is None else {name: p.detach().clone() for name, p in whole.named_parameters()}
    return {
        "figures": figures,
        "gradients": {name: tensor.clone() for name, tensor in full_tensors(gradients) if is_first_rank()},
        "weights": weights,
    }


def add_teacher(rank: Trainer, model: PreTrainedModel, case: Case, config: TrainConfig) -> None:
    """Let another model be asked, sharded over the same mesh."""
    teacher: Any = CausalLM(model.to(getattr(torch, case.dtype)), config, InputProcessing(0), rank.adapter.mesh)
    for part in (teacher, *teacher.runner.root_modules):
        part._logprob_dtype = getattr(torch, case.dtype)
    rank.add_model("teacher", teacher)


def cells(cases: Sequence[Case], values_of: Callable[[Case], set[Any]]) -> list[Any]:
    """Return the parameters of a test: the index of each case. The suite takes as few cases as have every value between
    them; the others are `full`."""
    values = [values_of(case) for case in cases]
    missing, taken = set[Any]().union(*values), set[int]()
    while missing:
        taken.add(best := max(range(len(cases)), key=lambda index: (len(values[index] & missing), -index)))
        missing -= values[best]
    return [
        pytest.param(index, marks=() if index in taken else pytest.mark.full, id=case.name)
        for index, case in enumerate(cases)
    ]


def axes(case: Case) -> set[Any]:
    """Return the axes of the case's mesh that have several ranks."""
    return {tuple(sorted(axis for axis, size in case.mesh if isinstance(size, int)))}


def settings(case: Case) -> set[Any]:
    """Return all settings of the case, those of its mesh as one."""
    return {(field.name, getattr(case, field.name)) for field in fields(case) if field.name != "mini_batch"}


def chosen(request: pytest.FixtureRequest, test: str) -> set[int]:
    """Return the indices for which a test of this file runs."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return {item.callspec.params["index"] for item in items if item.path == request.path and item.originalname == test}


def run_cases(cases: dict[int, Case], models: Path, scratch: Path, stop: threading.Event) -> None:
    """Every case on one rank of a group; the first rank writes the answers, or why there are none."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for index, case in cases.items():
        try:
            found = computed(case, models, scratch)
        except ModelError as error:
            (scratch / f"{index}.txt").write_text(str(error))
            continue
        if found["gradients"]:
            torch.save(found, scratch / f"{index}.pt")
