"""Which weights the recipe leaves to be trained, by exact names, and that the others stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cosmos_core.checkpoint.state import TrainState, named_tensors
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model, model_without_weights
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import NoView, sft, trainer_of

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NORMS = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")


def of_layer(number: int) -> set[str]:
    return {f"model.layers.{number}.{name}.weight" for name in (*PROJECTIONS, *NORMS)}


HEAD = {"lm_head.weight"}
EMBEDDING = {"model.embed_tokens.weight"}
ALL = of_layer(0) | of_layer(1) | HEAD | EMBEDDING | {"model.norm.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


def chosen(folder: Path, *, recompute: bool = False, **policy: Any) -> PreTrainedModel:
    model = load_model(str(folder), dtype=torch.float32, gradient_checkpointing=recompute)
    mark_trained_weights(model, PolicyConfig.model_validate(policy))
    return model


def trained(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, ALL),
        ({"freeze_pattern": ["^model\\.layers\\.0\\.", "embed"]}, ALL - of_layer(0) - EMBEDDING),
        ({"trainable_pattern": ["layers\\.1\\.", "^lm_head"]}, of_layer(1) | HEAD),
        ({"trainable_map": {"model": False}}, HEAD),
        ({"trainable_map": {"model.layers.1": True, "model": False, "lm_head.weight": False}}, of_layer(1)),
        ({"trainable_map": {"model.layers.1": True}}, ALL),
        (
            {"freeze_pattern": ["proj", "embed", "head"], "trainable_map": {"model.layers.1.mlp": True}},
            {name for name in ALL if "norm" in name or "layers.1.mlp" in name},
        ),
    ],
)
def test_exactly_these_weights_are_trained(folder: Path, policy: dict[str, Any], expected: set[str]) -> None:
    assert trained(chosen(folder, **policy)) == expected


def test_a_tied_weight_goes_by_each_of_its_names(tied_folder: Path) -> None:
    for name in ("lm_head", "model.embed_tokens"):
        assert trained(chosen(tied_folder, trainable_pattern=[f"^{name}"])) == EMBEDDING
        assert trained(chosen(tied_folder, freeze_pattern=[f"^{name}"])) == ALL - EMBEDDING - HEAD
        assert trained(chosen(tied_folder, trainable_map={name: False})) == ALL - EMBEDDING - HEAD


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"freeze_pattern": ["model.embed_token$"]}, "policy.freeze_pattern: 'model.embed_token$' matches no weight; "
         "did you mean 'model.embed_tokens.weight'?"),
        ({"trainable_pattern": ["^visual"]}, "policy.trainable_pattern: '^visual' matches no weight; known: "
         "lm_head.weight, model.embed_tokens.weight, model.layers, model.norm.weight"),
        ({"trainable_map": {"model.layer": False}}, "policy.trainable_map: 'model.layer' matches no weight; "
         "did you mean 'model.layers'?"),
        ({"freeze_pattern": ["."]}, "policy.freeze_pattern leaves no weight to train; name fewer in it"),
        ({"trainable_map": {"model": False, "lm_head": False}}, "policy.trainable_map leaves no weight to train"),
        ({"trainable_map": {"model": False}, "lora": {}}, "policy.trainable_map excludes policy.lora"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(folder: Path, policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(folder, **policy)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "method", ["gptq", *(pytest.param(x, marks=pytest.mark.full) for x in ("awq", "bitsandbytes"))]
)
@pytest.mark.parametrize(
    "policy", [{}, {"lora": {}}, {"freeze_pattern": ["norm"]}, {"trainable_map": {"lm_head": False}}], ids=str
)
def test_quantized_weights_are_refused_unless_others_are_named(
    folder: Path, method: str, policy: dict[str, Any]
) -> None:
    """PEFT merges an adapter into none of them without a trace, and each export and weight transfer merges it."""
    model = load_model(str(folder), dtype=torch.float32)
    model.config.quantization_config = {"quant_method": method}
    with pytest.raises(ConfigError, match=rf"quantized \({method}\): .*; take the model without quantization"):
        mark_trained_weights(model, PolicyConfig.model_validate(policy))
    mark_trained_weights(model, PolicyConfig.model_validate({"trainable_pattern": ["norm"]}))
    but_one = {"trainable_pattern": ["norm"], "trainable_map": {"model.norm": False}}
    mark_trained_weights(model, PolicyConfig.model_validate(but_one))
    projection = model.get_submodule("model.layers.0.mlp.up_proj")
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"policy\.trainable_pattern: 'mlp' matches quantized weights"):
        mark_trained_weights(model, PolicyConfig.model_validate({"trainable_pattern": ["mlp"]}))


ADAPTER = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["model.norm"], "init_lora_weights": False}


def test_an_adapter_begins_as_it_would_on_weights_that_are_read_later(tied_folder: Path) -> None:
    with torch.device("meta"):
        later = model_without_weights(str(tied_folder), dtype=torch.float32)
    loaded = load_model(str(tied_folder), dtype=torch.float32)
    for model in (later, loaded):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            mark_trained_weights(model, PolicyConfig.model_validate({"lora": ADAPTER}))
    found, expected = dict(later.named_parameters()), dict(loaded.named_parameters())
    assert found.keys() == expected.keys() and trained(later) == trained(loaded)
    adapters = [name for name in found if ".lora_" in name]
    assert len(adapters) == 2 * 7 * later.config.num_hidden_layers
    assert all(torch.equal(found[name], expected[name]) for name in adapters)
    assert all(found[name].is_meta for name in found if ".lora_" not in name and "modules_to_save" not in name)


def test_an_estimate_has_no_data_in_adapters_either(tied_folder: Path) -> None:
    with torch.device("meta"):
        model = model_without_weights(str(tied_folder), dtype=torch.float32)
        mark_trained_weights(model, PolicyConfig.model_validate({"lora": ADAPTER}))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.full), True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("pattern", ["layers\\.1\\.", "embed_tokens", pytest.param("^lm_head", marks=pytest.mark.full)])
def test_frozen_weights_keep_their_bits_and_the_others_get_the_gradient_of_full_training(
    folder: Path, tmp_path: Path, recompute: bool, pattern: str
) -> None:
    def rank_of(model: PreTrainedModel) -> Trainer:
        train = TrainConfig.model_validate(
            {"param_dtype": "float32", "optm_grad_norm_clip": 0.0, "train_policy": {"type": "sft"}}
        )
        rank = trainer_of(model, train, 0, ProgressWriter(tmp_path / "p.json"))
        (update,) = sft().updates(samples, NoView())
        rank.update(update)
        return rank

    mask = np.array([0, 0, 1, 1, 1, 1, 1], dtype=np.uint8)
    samples = [Sample(np.arange(i, i + 7), mask) for i in range(4)]
    before = load_model(str(folder), dtype=torch.float32).state_dict()
    whole = {name: p.grad for name, p in rank_of(chosen(folder)).adapter.model.named_parameters()}
    rank = rank_of(chosen(folder, recompute=recompute, trainable_pattern=[pattern]))
    names = trained(rank.adapter.model)
    assert names == {name for name in ALL if pattern.strip("^").replace("\\", "") in name}
    for name, parameter in rank.adapter.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in names), name
        if name in names:
            assert torch.equal(parameter.grad, whole[name]), name
    saved = named_tensors(TrainState(rank.adapter.model, rank.optimizer))
    assert {name for name in saved if name.startswith("model.")} == {f"model.{name}" for name in names}
    assert {name.split(".", 2)[2] for name in saved if name.startswith("optimizer.")} == names
