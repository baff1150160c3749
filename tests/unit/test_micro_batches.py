"""Micro-batches by length and by prompt: the loss and gradient of rows one by one, with less to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import collate_shared_prompts
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM
from cosmos_core.models.micro_batches import merge_prompts, shared_prompt_length, split_by_length
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.unit.trainers import NoView, score_in, trainer_of

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "qwen": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
}


def samples(lengths: list[int], *, prompt: int = 0, group: int = 1) -> list[Sample]:
    """Completions of these lengths, `group` after each prompt of `prompt` tokens or one more or less."""
    random = np.random.default_rng(0)
    found = []
    for i, length in enumerate(lengths):
        if i % group == 0:
            ids = random.integers(0, 300, prompt + int(random.integers(-1, 2)) if prompt else 3)
        row = np.concatenate([ids, random.integers(0, 300, length)])
        mask = np.zeros(len(row), dtype=np.uint8)
        mask[len(ids) :] = 1
        mask[len(ids) + 2 : len(ids) + 4] = 0  # what a tool said, which is not learned
        logprobs = -random.random(int(mask.sum())).astype(np.float32)
        found.append(Sample(row, mask, float(random.normal()), 1.0, logprobs))
    return found


def make(family: str, **train: Any) -> tuple[PreTrainedModel, TrainConfig]:
    cls, config = FAMILIES[family]
    torch.manual_seed(0)
    policy = {"type": "grpo", "mini_batch": 4, **train.pop("policy", {})}
    values = {"param_dtype": "float32", "optm_grad_norm_clip": 0.0, "optm_lr": 1e-9, **train, "train_policy": policy}
    return cls._from_config(config, attn_implementation="sdpa"), TrainConfig.model_validate(values)


def step(
    model: PreTrainedModel, train: TrainConfig, batch: list[Sample], tmp_path: Path, *, plain: bool
) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """Return figures, gradients and the number of tokens that the model ran, padding included."""
    trainer: Trainer = trainer_of(model.double(), train, 0, ProgressWriter(tmp_path / "progress.json"))
    score_in(trainer, torch.float64)
    adapter: Any = trainer.adapter
    assert isinstance(adapter, CausalLM)
    if plain:
        adapter._merges_prompts = adapter._packs_rows = False
        train = train.copy_with(train_policy=train.train_policy.copy_with(mini_batch=1))
        trainer._train_config = train
    counted = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: counted.append(output.shape[:-1]))
    figures: dict[str, float] = {}
    assert isinstance(train.train_policy, GrpoConfig)
    for update in Grpo(train.train_policy).updates(batch, trainer):
        figures = trainer.update(update)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return figures, gradients, sum(shape.numel() for shape in counted)


def compare(family: str, batch: list[Sample], tmp_path: Path, **train: Any) -> tuple[int, int]:
    """Compare a step with that of rows one by one, in float64; return the numbers of tokens that both ran."""
    found, expected = (step(*make(family, **dict(train)), batch, tmp_path, plain=plain) for plain in (False, True))
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-8)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        atol = 1e-8 * max(1.0, expected[1][name].abs().max().item())
        torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=atol, msg=name)
    return found[2], expected[2]


LENGTHS = [9, 20, 33, 5, 14, 14, 40, 7, 11, 30, 6, 21]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param("qwen", {}, marks=pytest.mark.full), ("qwen", {"batch_size_per_optimize": 8, "mu_iterations": 2}),
        pytest.param("llama", {"mini_batch": 8}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_a_prompt_is_run_once_for_its_completions_with_the_same_loss_and_gradient(
    family: str, policy: dict[str, Any], tmp_path: Path
) -> None:
    batch = samples(LENGTHS, prompt=70, group=4)
    shared, plain = compare(family, batch, tmp_path, policy=policy)
    assert shared < 0.5 * plain


def test_short_prompts_of_equal_length_are_not_mixed_up(tmp_path: Path) -> None:
    batch = samples([5, 6, 5, 8, 5, 7] * 4, prompt=10, group=4)  # six prompts of 9, 10 or 11 tokens
    shared, plain = compare("llama", batch, tmp_path, policy={"mini_batch": 24}, train_batch_per_replica=24)
    assert shared < 0.6 * plain


def test_prompts_are_shared_beside_completions_that_are_alone(tmp_path: Path) -> None:
    batch = [*samples(LENGTHS, prompt=70, group=4)[:-3], *samples([8], prompt=3)]
    shared, plain = compare("qwen", batch, tmp_path)
    assert shared < 0.6 * plain


def test_short_prompts_and_models_with_windows_or_dropout_keep_their_micro_batches(tmp_path: Path) -> None:
    assert merge_prompts(samples(LENGTHS, prompt=4, group=4), range(12), 4, 1) is None

    def shares(model: PreTrainedModel, **train: Any) -> bool:
        config = TrainConfig.model_validate({"param_dtype": "float32", **train, "train_policy": {"type": "grpo"}})
        adapter: Any = trainer_of(model, config, 0, ProgressWriter(tmp_path / "progress.json")).adapter
        return bool(adapter._merges_prompts)

    assert shares(make("qwen")[0]) and not shares(make("qwen")[0], sequence_packing=False)
    windows = MistralConfig(**SIZES, sliding_window=4)
    assert not shares(MistralForCausalLM._from_config(windows, attn_implementation="sdpa"))
    dropout = LlamaConfig(**SIZES, attention_dropout=0.1)
    assert not shares(LlamaForCausalLM._from_config(dropout, attn_implementation="sdpa"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("arrange", [split_by_length, merge_prompts])
def test_every_sample_is_in_one_micro_batch_and_ranks_get_equal_shares(arrange: Any, num_ranks: int) -> None:
    random = np.random.default_rng(num_ranks)
    lengths = [int(n) for n in random.geometric(1 / 60, 96)]
    batch = samples(lengths, prompt=500 if arrange is merge_prompts else 0, group=8)
    ordered = sorted(range(96), key=lambda i: -len(batch[i].input_ids))
    found = arrange(batch, ordered, 16, num_ranks)
    assert sorted(i for each in found for i in each) == list(range(96)) and all(found)
    costs = [max(len(batch[i].input_ids) for i in each) * len(each) for each in found]
    if arrange is split_by_length:
        assert max(map(len, found)) <= 16
        assert sum(costs) < sum(len(sample.input_ids) for sample in batch) / 0.85
    else:
        for each in found:
            tokens = sum(len(batch[i].input_ids) for i in each)
            prompts = {batch[i].input_ids[: shared_prompt_length(batch[i])].tobytes() for i in each}
            assert tokens - (len(each) - len(prompts)) * 500 <= 16 * len(batch[ordered[0]].input_ids) + 1000


def test_a_shared_row_has_the_prompt_once_and_positions_that_go_on_behind_it() -> None:
    rows = [np.array(row) for row in ([1, 2, 3, 10, 11], [7, 8], [1, 2, 3, 20])]
    found = collate_shared_prompts(rows, [((0, 2), 3), ((1,), 0)], 99, lambda length: length + 2)
    assert found.inputs["input_ids"].tolist() == [[1, 2, 3, 10, 11, 20, 7, 8, 99, 99]]
    assert found.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 0, 1]]
    bounds = found.inputs["sequence_bounds"]
    assert bounds.boundaries.tolist() == [0, 3, 5, 6, 8, 10] and bounds.prompt_indices == [-1, 0, 0, -1, -1]
    assert found.row_start_indices == [0, 6, 2]  # tokens 3 and 4 of row 0 are at 0 + 3 and 0 + 4


def test_ragged_padded_rows_are_cut_where_lengths_change_with_the_same_gradient(tmp_path: Path) -> None:
    lengths = [200, 90, 60, 50, 44, 30, 21, 20, 19, 12, 11, 10, 9, 8, 7, 6]
    batch = samples(lengths)
    cut, plain = compare("qwen", batch, tmp_path, sequence_packing=False, policy={"mini_batch": 8})
    real = sum(len(sample.input_ids) for sample in batch)
    assert plain >= real and cut - (plain - real) <= real / 0.9  # both run a few tokens to try the head


def test_rows_of_similar_length_stay_in_equal_micro_batches() -> None:
    assert split_by_length(samples([30, 29, 29, 28, 28, 28, 27, 27]), range(8), 4, 1) is None


def test_each_optimizer_step_fills_its_micro_batches_of_tokens() -> None:
    """Of both optimizer steps together, each micro-batch would have one row of either."""
    settings = {"batch_size_per_optimize": 4, "max_token_len_per_mini_batch": 46, "use_rollout_logprobs_for_loss": True}
    steps = Grpo(GrpoConfig.model_validate(settings)).updates(samples([20, 18, 16, 14] * 2), NoView())
    batches = [[sample.micro_batch for sample in update.samples] for update in steps]
    assert [len(set(each)) for each in batches] == [2, 2]
