"""Adapters of mixtures of experts: every linear map that is named is adapted, and PEFT loads what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.hf import load_model
from cosmos_core.models.lora import add_adapter, save_adapter
from cosmos_core.models.lora_targets import describe_adapter, find_adapted_layers
from tests.unit.test_lora import disturb, logits, ours
from tests.unit.tiny_families import save_family
from tests.unit.tiny_model import iter_checkpoint_weights, save_tiny_model

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES = [
    "deepseek-v3", "qwen3-moe with a dense layer", "qwen3-moe", "qwen2-moe", "qwen3-next", "mixtral", "gpt-oss",
    "granite-moe",
]  # fmt: skip
ATTENTION = {f"self_attn.{name}": 2 for name in SEVEN[:4]}
EXPERTS = {"gate_up_proj": 2, "down_proj": 2}
DENSE = {f"mlp.{name}": 1 for name in SEVEN[4:]}


def of(container: str, kinds: dict[str, int]) -> dict[str, int]:
    return {f"{container}.{kind}": count for kind, count in kinds.items()}


# What the seven usual names mean, by the module of the family's code and the number of layers that have it.
NAMED = {
    "deepseek-v3": {
        "self_attn.o_proj": 2, **DENSE, **of("mlp.shared_experts", dict.fromkeys(SEVEN[4:], 1)),
        **of("mlp.experts", {"gate_up_proj": 1, "down_proj": 1}),
    },
    "qwen3-moe with a dense layer": {
        **ATTENTION, **DENSE, **of("mlp.experts", {"gate_up_proj": 1, "down_proj": 1}),
    },
    "qwen3-moe": {**ATTENTION, **of("mlp.experts", EXPERTS)},
    "qwen2-moe": {
        **ATTENTION, **of("mlp.shared_expert", dict.fromkeys(SEVEN[4:], 2)), **of("mlp.experts", EXPERTS),
    },
    "qwen3-next": {
        **dict.fromkeys(ATTENTION, 1), **of("mlp.shared_expert", dict.fromkeys(SEVEN[4:], 2)),
        **of("mlp.experts", EXPERTS),
    },
    "mixtral": {**ATTENTION, **of("mlp.experts", EXPERTS)},
    "gpt-oss": {**ATTENTION, **of("mlp.experts", EXPERTS)},
}  # fmt: skip


def adapted(model: Any) -> dict[str, int]:
    """How many layers of each kind are adapted, as `cosmos check` says it."""
    said = describe_adapter(model, None).removeprefix("LoRA on ").split(", ")
    pairs = [one.removesuffix(" of 4 experts").split(" ", 1) for one in said]
    return {kind: int(count) for count, kind in pairs}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(n, marks=[pytest.mark.full] * (n in {"qwen2-moe", "mixtral", "qwen3-moe", "qwen3-next"}))
        for n in NAMED
    ],
)
def test_the_usual_names_mean_every_projection_of_that_name_and_peft_loads_the_adapter(
    tmp_path: Path, family: str
) -> None:
    names = SEVEN if family != "deepseek-v3" else SEVEN[3:]
    model = ours(save_family(family, tmp_path), {"target_modules": names, "r": 4})
    assert adapted(model) == NAMED[family]
    ranks = {name: layer.r["default"] for name, layer in find_adapted_layers(model).items()}
    assert set(ranks.values()) == {4, 8}, "the gate and the up projection in one have twice the rank"
    check_saved(model, tmp_path)


ALIKE = {"qwen3-moe", "qwen3-moe with a dense layer", "qwen2-moe", "mixtral", "gpt-oss"}


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=pytest.mark.full if each in ALIKE else ()) for each in FAMILIES]
)
def test_all_linear_is_every_matrix_but_those_that_one_line_names(tmp_path: Path, family: str) -> None:
    model = ours(save_family(family, tmp_path), {"target_modules": "all-linear", "r": 4})
    layers, said = find_adapted_layers(model), describe_adapter(model, "all-linear")
    inside = {id(p) for layer in layers.values() for p in layer.get_base_layer().parameters(recurse=False)}
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.ndim >= 2 and id(p) not in inside]
        if own and ".lora_" not in name and not isinstance(module, torch.nn.Embedding):
            leaf = name.rpartition(".")[2]
            assert f"{leaf} (" in said.partition("; not on ")[2], name
    check_saved(model, tmp_path)


@torch.no_grad()
def check_saved(model: Any, folder: Path) -> None:
    """PEFT, and a training that goes on, load the saved adapter onto the untouched base and compute the same."""
    disturb(model)
    moved = logits(model)
    save_adapter(model, folder / "lora")
    base = load_model(str(folder), dtype=torch.float32)
    untouched = logits(base)
    assert (moved - untouched).abs().max() > 0.05
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base, folder / "lora")), moved, rtol=0, atol=1e-4)
    again = ours(folder, {"lora_path": str(folder / "lora")})
    assert adapted(again) == adapted(model)
    assert torch.equal(logits(again), moved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ["gate_proj", "down_proj"]},
            r"'gate_proj' alone, but .* hold gate_proj and up_proj in one",
        ),
        ({"target_modules": SEVEN, "init_lora_weights": "pissa"}, r"'pissa' starts from linear layers, and mlp.expert"),
        ({"target_modules": "all-linear", "init_lora_weights": "olora"}, r"'olora' starts from linear layers, and mlp"),
        ({"target_modules": ["gate_projection"]}, r"'gate_projection' matches no module"),
        ({"target_modules": SEVEN, "r_pattern": {"experts": 2}}, r"r_pattern = 'experts' matches no module"),
    ],
)
def test_what_experts_cannot_have_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(save_family("qwen3-moe", tmp_path), settings)


def test_a_router_that_is_named_is_adapted(tmp_path: Path) -> None:
    model = ours(save_family("mixtral", tmp_path), {"target_modules": ["gate", "q_proj"]})
    assert adapted(model) == {"self_attn.q_proj": 2, "mlp.gate.weight": 2}
    check_saved(model, tmp_path)


def test_a_name_with_its_layer_means_that_layer(tmp_path: Path) -> None:
    names = ["layers.1.mlp.experts.down_proj", "layers.0.mlp.gate"]
    model = ours(save_family("qwen3-moe", tmp_path), {"target_modules": names})
    assert list(find_adapted_layers(model)) == ["model.layers.0.mlp.gate", "model.layers.1.mlp.experts"]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param({"use_rslora": True}, [4, 8], marks=pytest.mark.full),
        ({"r_pattern": {"experts\\..*": 2}, "alpha_pattern": {"layers\\.1\\..*": 3}}, [2, 4]),
    ],
    ids=["rslora", "patterns"],
)
def test_gate_and_up_projection_in_one_have_the_scale_of_the_others(
    tmp_path: Path, settings: dict[str, Any], ranks: list[int]
) -> None:
    model = ours(save_family("qwen3-moe", tmp_path), {"target_modules": SEVEN, "r": 4, **settings})
    experts = [layer for name, layer in find_adapted_layers(model).items() if "layers.1.mlp" in name]
    assert [layer.r["default"] for layer in experts] == ranks
    scale = 4.0 if "use_rslora" in settings else 1.5
    assert [layer.scaling["default"] for layer in experts] == pytest.approx([scale, scale])
    check_saved(model, tmp_path)


def test_a_saved_adapter_that_separates_tied_weights_is_refused(tmp_path: Path) -> None:
    base = load_model(str(save_tiny_model(tmp_path / "base")), dtype=torch.float32)
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "lora")
    with pytest.raises(
        ModelError, match=r"'lm_head' separately, whose weight is model\.embed_tokens and lm_head in one"
    ):
        ours(tmp_path / "base", {"lora_path": str(tmp_path / "lora")})


def test_layers_whose_weights_the_family_reads_itself_are_left_out_of_all_linear() -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    add_adapter(model, LoraConfig(target_modules="all-linear"))
    assert {name.rpartition(".")[2] for name in find_adapted_layers(model)} == {"in_proj"}
    assert "1 mixer.out_proj (Linear)" in describe_adapter(model, "all-linear")


@pytest.mark.parametrize(
    ("config", "layer", "adapted_kinds", "reason"),
    [
        (
            transformers.Zamba2Config(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=2,
                layers_block_type=["hybrid", "hybrid"], num_mem_blocks=1, mamba_d_state=2, mamba_headdim=8,
                n_mamba_heads=2, mamba_ngroups=1, chunk_size=4,
            ),
            "shared_transformer.self_attn.q_proj", {"linear": 2, "mamba_decoder.mamba.in_proj": 2}, "2 layers share",
        ),
        (
            transformers.LagunaConfig(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1,
                head_dim=8, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                shared_expert_intermediate_size=8, mlp_layer_types=["sparse"], num_attention_heads_per_layer=[1],
            ),
            "mlp.shared_experts.up_proj",
            {**{f"self_attn.{name}_proj": 1 for name in "qkvog"}, **of("mlp.experts", dict.fromkeys(EXPERTS, 1))},
            "PEFT does not find again",
        ),
    ],
)  # fmt: skip
def test_layers_whose_adapter_could_not_be_exported_are_left_out_and_refused_by_name(
    config: Any, layer: str, adapted_kinds: dict[str, int], reason: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"{layer}.*{reason}; leave it out of target_modules"):
        add_adapter(model, LoraConfig(target_modules=(layer,)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    add_adapter(model, LoraConfig(target_modules="all-linear"))
    assert adapted(model) == adapted_kinds


def test_weights_that_are_reversed_by_their_shape_are_written_with_an_adapter(tmp_path: Path) -> None:
    text = {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "intermediate_size": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    model = transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    )
    expected = dict(iter_checkpoint_weights(model))
    add_adapter(model, LoraConfig(r=2, target_modules=("gate_proj", "up_proj", "down_proj")))
    found = dict(iter_checkpoint_weights(model))  # a new adapter changes nothing
    assert found.keys() == expected.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama4", pytest.param("qwen2.5-vl", marks=pytest.mark.full)])
def test_a_string_is_matched_with_whole_names_as_peft_does_and_says_no_vision_tower(
    tmp_path: Path, family: str
) -> None:
    file = Path(__file__).parents[2] / "configs/vlm/llama-4-scout-sft-lora.toml"
    targets = read_toml(file)["policy"]["lora"]["target_modules"]
    model = ours(save_family(family, tmp_path), {"target_modules": targets, "r": 4})
    assert adapted(model) == ATTENTION
    as_peft = peft.get_peft_model(
        load_model(str(tmp_path), dtype=torch.float32), peft.LoraConfig(target_modules=targets)
    )
    assert {f"base_model.model.{name}" for name in find_adapted_layers(model)} == set(find_adapted_layers(as_peft))
    check_saved(model, tmp_path)
    both = ours(tmp_path, {"target_modules": SEVEN[:1] if family == "llama4" else ["q_proj", "qkv"]})
    assert "vis" in describe_adapter(both, None) and "language_model" in describe_adapter(both, None)
    with pytest.raises(ConfigError, match=r"'q_proj' matches no whole name, such as '.*'; give a list to match the en"):
        ours(tmp_path, {"target_modules": "q_proj"})
