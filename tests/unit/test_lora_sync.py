"""What of a model with an adapter reaches an engine in another process: the adapter alone, or all weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.lora import get_lora_scales
from cosmos_core.parallel.fsdp import copy_without_weights
from cosmos_core.rollout.base import Bucket, EngineSettings, LoadReceipt
from cosmos_core.rollout.hf import HfEngine
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.replica import pack_bucket, unpack_bucket
from cosmos_core.rollout.vllm_adapter import VllmAdapter
from tests.cells import full
from tests.unit.test_lora import disturb, folder, ours, tied_folder  # noqa: F401 - fixtures
from tests.unit.tiny_families import save_family


def publisher_of(model: PreTrainedModel, base: Path) -> tuple[WeightPublisher, HfEngine, Callable[..., Tensor]]:
    """Weights on their way to an engine in another process, that engine, and the model's own log-probabilities."""

    def own(token_ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits = model.eval()(torch.tensor([list(token_ids)])).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]

    tokenizer, config = load_tokenizer(str(base)), RolloutConfig()
    engine = HfEngine(EngineSettings(model, tokenizer, str(base), config, 64, torch.float32, is_separate=True))
    return WeightPublisher(engine, model, own, torch.float32), engine, own


@pytest.mark.parametrize(("lora", "form"), [({}, "adapter"), ({"modules_to_save": ["lm_head"]}, "module")])
def test_an_engine_in_another_process_gets_the_adapter_alone_where_nothing_else_is_trained(
    folder: Path,  # noqa: F811
    lora: dict[str, Any],
    form: str,
) -> None:
    settings = {"target_modules": ["q_proj", "up_proj"], "r_pattern": {"up_proj": 3}, **lora}
    model = ours(folder, settings)
    disturb(model)
    publisher, engine, own = publisher_of(model, folder)
    for version in (1, 2):
        metrics = publisher.publish(version)
        found = torch.tensor(engine.logprobs([5, 6, 7, 8, 9, 10]))
        torch.testing.assert_close(found, own([5, 6, 7, 8, 9, 10]), rtol=0, atol=1e-5)
        disturb(model)
    factors = sum(p.nbytes for name, p in model.named_parameters() if ".lora_" in name)
    assert engine.weight_format == form
    assert (metrics["sync/bytes"] == factors) == (form == "adapter")


@pytest.mark.parametrize(("targets", "form"), [*full((["q_proj"], "adapter")), (["q_proj", "lm_head"], "module")])
def test_an_engine_beside_one_stage_of_a_pipeline_knows_the_adapter_of_all_layers(
    folder: Path,  # noqa: F811
    targets: list[str],
    form: str,
) -> None:
    model = ours(folder, {"target_modules": targets, "r_pattern": {"layers.1.self_attn.q_proj": 3}})
    whole, part = copy_without_weights(model), copy.deepcopy(model)
    decoder: Any = part.get_base_model() if hasattr(part, "get_base_model") else part
    del decoder.model.layers[1:]
    decoder.lm_head = torch.nn.Identity()
    settings = EngineSettings(
        part, load_tokenizer(str(folder)), str(folder), RolloutConfig(), 64, torch.float32, is_separate=True,
        meta_copy=whole,
    )  # fmt: skip
    assert HfEngine(settings).weight_format == form
    adapter = VllmAdapter(settings)
    ranks = [len(p) for name, p in model.named_parameters() if ".lora_A." in name]
    assert adapter._lora_scale_by_layer == get_lora_scales(model) and adapter.lora_rank == max(ranks)


def test_tied_weights_are_sent_once(tied_folder: Path) -> None:  # noqa: F811
    model = load_model(str(tied_folder), dtype=torch.float32)
    publisher, *_ = publisher_of(model, tied_folder)
    assert publisher.publish(1)["sync/bytes"] == sum(parameter.nbytes for parameter in model.parameters())
    tied, other = torch.randn(64, 8), torch.randn(64)
    bucket = [("embed", tied), ("head", tied), ("norm", other), ("half", tied[:32])]
    sent = pack_bucket(bucket)
    assert sent.data.nbytes == tied.nbytes + other.nbytes + tied[:32].nbytes
    found = dict(unpack_bucket(sent))
    assert len(found) == len(bucket) and all(torch.equal(found[name], tensor) for name, tensor in bucket)


def test_the_bias_with_which_a_router_selects_experts_is_sent_as_it_is(tmp_path: Path) -> None:
    """vLLM keeps it in float32, as the trainer does: rounded, it would select other experts than the trainer."""
    base, sent = save_family("deepseek-v3", tmp_path), dict[str, Tensor]()

    def load(version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        sent.update((name, tensor.clone()) for bucket in buckets for name, tensor in bucket)
        return LoadReceipt(version, len(sent))

    model, name = load_model(str(base), dtype=torch.float32), "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([8.01, 8.0, 7.99, 8.02]))
    engine: Any = SimpleNamespace(weight_format="checkpoint", load_weights=load, logprobs=lambda ids: [0.0] * 15)
    cast = {"transfer_dtype": torch.bfloat16}
    WeightPublisher(engine, model, lambda ids: torch.zeros(15), torch.bfloat16, **cast).publish(1)
    assert torch.equal(sent.pop(name), model.get_buffer(name))
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
