"""Models cut into pipeline stages: one after the other they are the whole model; what cannot be cut is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ModelError
from cosmos_core.models.hf import load_model
from cosmos_core.models.pipeline_runner import PipelineRunner
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel import fsdp
from cosmos_core.parallel.pipeline import apply_pp, extract_pipeline_stage, stage_layer_indices, stages_of_rank
from cosmos_core.train import check
from tests.effects.change import SFT, recipe
from tests.effects.change import stage_of as stage_of_run
from tests.unit.tiny_families import save_family

FAMILIES = ("gemma2", "gpt-oss", "qwen2.5", "deepseek-v3", "qwen3-next")
ALIKE = ("mistral", "gemma3", "phi3", "qwen3", "qwen3-moe", "llama3", "mixtral", "olmo2", "cohere2", "starcoder2")
"""Families that are cut as those above are."""
TWO = ParallelismConfig(pp_size=2, pp_schedule="1F1B")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def inputs() -> dict[str, Tensor]:
    """Two rows of different lengths."""
    ids = torch.randint(5, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(11).expand(2, -1)}


def hidden(model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.base_model(**given, use_cache=False).last_hidden_state
    return found


@torch.no_grad()
def through_stages(model: PreTrainedModel, sizes: ParallelismConfig) -> Tensor:
    """The last hidden states, each rank with its own copy of what it has."""
    ranks = [copy.deepcopy(model) for _ in range(sizes.pp_size)]
    for rank, part in enumerate(ranks):
        apply_pp(part, sizes, rank)
    given = inputs()
    for stage in range(stages_of_rank(ranks[-1], sizes, sizes.pp_size - 1)[-1] + 1):
        given["inputs_embeds"] = hidden(extract_pipeline_stage(ranks[stage % sizes.pp_size], stage, sizes), given)
        given.pop("input_ids", None)
    return given["inputs_embeds"]


def qwen3(layers: int, is_tied: bool = True) -> hf.Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = hf.Qwen3Config(**{**SMALL, "num_hidden_layers": layers}, head_dim=8, tie_word_embeddings=is_tied)
    return hf.Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(each, marks=pytest.mark.full) for each in ALIKE)])
def test_the_stages_of_a_family_are_its_whole_body(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path / name)
    model = load_model(str(folder), dtype=torch.float32)
    with torch.no_grad():
        expected = hidden(model, inputs())
    assert torch.equal(through_stages(model, TWO), expected)
    later = init_on_meta(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert next(later.parameters()).is_meta
    apply_pp(later, TWO, 0)
    names = {name for name, _ in later.named_parameters()}
    assert {name for name in names if ".layers." in name} == {
        name for name, _ in model.named_parameters() if ".layers.0." in name
    }


@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.full)], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "sizes", [{"pp_schedule": "GPipe"}, {"pp_layers_per_stage": 2}, {"pp_size": 3, "pp_layers_per_stage": 2}]
)
def test_seven_layers_make_a_body_however_they_are_cut(sizes: dict[str, Any], is_tied: bool) -> None:
    model = qwen3(7, is_tied)
    settings = ParallelismConfig.model_validate({"pp_size": 2, **sizes})
    with torch.no_grad():
        expected = hidden(model, inputs())
    assert torch.equal(through_stages(model, settings), expected)
    ranks = [copy.deepcopy(model) for _ in range(settings.pp_size)]
    for rank, part in enumerate(ranks):
        apply_pp(part, settings, rank)
    held = [name for part in ranks for name, _ in part.named_parameters()]
    assert set(held) == {name for name, _ in model.named_parameters()}
    assert sorted(name for name in set(held) if held.count(name) > 1) == (
        ["model.embed_tokens.weight"] if is_tied else []
    )


def test_layers_that_do_not_divide_are_one_more_on_the_first_stages() -> None:
    assert [list(stage_layer_indices(stage, 3, 7)) for stage in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "granite": (
        lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, embedding_multiplier=12.0)),
        "cannot be cut into stages (hidden states change outside its layers)",
    ),
    "gemma3n": (
        lambda: hf.Gemma3nForCausalLM(
            hf.Gemma3nTextConfig(
                **{**SMALL, "intermediate_size": [48, 48]}, head_dim=8, hidden_size_per_layer_input=8, laurel_rank=4,
                vocab_size_per_layer_input=64, num_kv_shared_layers=0, layer_types=["full_attention"] * 2,
                activation_sparsity_pattern=[0.0, 0.0],
            )
        ),
        "its plan does not know model.embed_tokens_per_layer.weight",
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
        "has no plan for a pipeline",
    ),
}  # fmt: skip


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="makes 8 stages of 7 layers; lower it, or raise pp_layers_per_stage"):
        apply_pp(qwen3(7), ParallelismConfig(pp_size=2, pp_layers_per_stage=1), 0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_more_than_its_plan_says_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        apply_pp(make(), TWO, 0)
    text = str(caught.value)
    assert text.startswith("policy.parallelism.pp_size = 2: ") and reason in text
    assert text.endswith("; set it to 1 and raise dp_shard_size")


class SeesTokens(hf.Qwen3Model):
    """Gives its layers what only the first stage has."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, tokens=input_ids, **kwargs)


def test_a_model_whose_layers_see_tokens_is_refused() -> None:
    model = qwen3(2)
    model.model.__class__ = SeesTokens
    with pytest.raises(ModelError, match=r"its layers are given 'tokens', which is made of tokens"):
        apply_pp(model, TWO, 0)


def test_a_check_refuses_a_model_before_a_rank_starts(tmp_path: Path) -> None:
    two = recipe({**SFT, "policy.parallelism.pp_size": 2, "policy.parallelism.pp_schedule": "1F1B"})
    check.run(stage_of_run(tmp_path / "text", two, model=save_family("qwen3", tmp_path / "qwen3")))
    vlm = stage_of_run(tmp_path / "vlm", two, model=save_family("qwen3-vl", tmp_path / "qwen3-vl"))
    with pytest.raises(ModelError, match="Qwen3VLForConditionalGeneration has no plan for a pipeline; set it to 1"):
        check.run(vlm)


@pytest.mark.parametrize("axis", ["tp_size", "cp_size"])
def test_a_check_refuses_heads_that_ranks_cannot_split(axis: str, tmp_path: Path) -> None:
    """Also of a model on the Hub, whose config.json is not read before."""
    three = recipe({**SFT, f"policy.parallelism.{axis}": 3})
    with pytest.raises(ModelError, match=f"{axis} = 3 does not divide the 4 num_attention_heads of Qwen3ForCausalLM"):
        check.run(stage_of_run(tmp_path / "text", three, model=save_family("qwen3", tmp_path / "qwen3")))


@pytest.mark.parametrize(
    ("family", "mesh", "message"),
    [
        ("qwen3", {"tp_size": 2, "cp_size": 4},
         "cp_size = 4 does not divide the 4 num_attention_heads of Qwen3ForCausalLM, 2 on a rank of tp_size = 2"),
        ("qwen3", {"ep_size": 2, "dp_shard_size": 2}, "ep_size = 2: Qwen3ForCausalLM has no plan that sends tokens to"),
        ("mamba", {"tp_size": 2}, "tp_size = 2: MambaForCausalLM has no plan; set it to 1"),
        ("odd features", {"tp_size": 2}, "tp_size = 2 does not divide the 49 features of model.layers.0.mlp.gate_proj"),
        ("qwen3-moe", {"ep_size": 8, "dp_shard_size": 8}, "ep_size = 8: Qwen3MoeForCausalLM has 4 experts, which do"),
    ],
)  # fmt: skip
def test_a_check_refuses_what_a_mesh_cannot_split(
    family: str, mesh: dict[str, int], message: str, tmp_path: Path
) -> None:
    """Of the policy, and of a teacher, whose weights lie on the same ranks."""
    settings = {f"policy.parallelism.{axis}": size for axis, size in mesh.items()}
    folder = save_family(family, tmp_path / family)
    with pytest.raises(ModelError, match=f"^policy.parallelism.{message}"):
        check.run(stage_of_run(tmp_path / "policy", recipe({**SFT, **settings}), model=folder))
    parallelism = recipe(settings).policy.parallelism
    with pytest.raises(ModelError, match=f"^distillation.model_name_or_path: policy.parallelism.{message}"):
        check.check_teacher_parallelism(str(folder), None, "float32", parallelism)


def test_hidden_states_are_received_on_the_device_that_computes() -> None:
    """The shards of the weights may be elsewhere, in host memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = SimpleNamespace(get_group=lambda: dist.group.WORLD, get_local_rank=lambda: 0)
        mesh: Any = SimpleNamespace(parallelism=TWO, pp=group, dp=SimpleNamespace(device_type="meta"))
        runner = PipelineRunner(qwen3(2), TrainConfig(), mesh, torch.float32)
        assert runner._build_schedule(2, 8, lambda output, number: None)._stage.device == torch.device("meta")
    finally:
        dist.destroy_process_group()


def test_a_stage_receives_weights_of_another_stage_on_the_device_of_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the holder broadcasts by NCCL and the receiver by gloo, and both wait for ever."""
    sent: list[Any] = []
    received: list[str] = []
    monkeypatch.setattr(fsdp, "num_ranks", lambda: 2)
    monkeypatch.setattr(fsdp.dist, "broadcast", lambda tensor, src: received.append(f"{tensor.device} from {src}"))
    monkeypatch.setattr(fsdp, "all_gather_object", lambda value: sent.append(value) or [{}, value])
    holder = dict(fsdp.full_tensors({"layers.1.weight": torch.empty(2, 3, device="meta")}))
    monkeypatch.setattr(fsdp, "all_gather_object", lambda value: [value, *sent])
    receiver = dict(fsdp.full_tensors({}))
    assert received == ["meta from 1"] * 2
    assert [t.shape for t in receiver.values()] == [t.shape for t in holder.values()] == [(2, 3)]
