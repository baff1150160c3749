"""`policy.lora.lora_path`: a training that goes on with an adapter, ours or PEFT's, and one that does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.export_pipeline import export_pipeline
from cosmos_core.models.hf import model_without_weights
from cosmos_core.models.lora import add_adapter, get_lora_scales, save_adapter
from tasks.kinds import all_kinds
from tests import tiny_pipelines
from tests.cells import cells, full
from tests.effects.change import recipe
from tests.unit.test_diffusion_models import opened
from tests.unit.test_lora import BEGUN_ALIKE, EVERY, LIKE_OTHERS, TAKING, disturb, logits, ours, theirs
from tests.unit.tiny_families import FAMILIES
from tests.unit.tiny_model import save_tiny_model
from tests.unit.tiny_vlms import save_vlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the model, which no test changes."""
    path = tmp_path_factory.mktemp("adapter") / "lora"
    save_adapter(ours(folder, {"target_modules": ["q_proj", "v_proj"]}), path)
    return path


@pytest.mark.parametrize("name", cells(EVERY, LIKE_OTHERS | BEGUN_ALIKE))
def test_an_adapter_is_gone_on_with_from_its_folder(folder: Path, tmp_path: Path, name: str) -> None:
    model = ours(folder, EVERY[name])
    disturb(model)
    save_adapter(model, tmp_path / "first")
    found = ours(folder, {"lora_path": str(tmp_path / "first"), "lora_dropout": 0.0 if name == "random" else 0.2})
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-4 if name in TAKING else 0)
    one, other = ({n for n, p in each.named_parameters() if p.requires_grad} for each in (model, found))
    assert one == other
    save_adapter(found, tmp_path / "second")
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(second[key], tensor) for key, tensor in first.items())
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("first", "second")]
    changed = {key for key, value in configs[0].items() if (configs[1][key] or None) != (value or None)}
    assert changed <= {"lora_dropout"}, configs


def test_an_adapter_of_peft_s_own_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    model = theirs(folder, {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False})
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(ours(folder, {"lora_path": str(tmp_path)})), logits(model))


@pytest.mark.filterwarnings("error:Unexpected keyword")
@pytest.mark.parametrize("pattern", [{"r_pattern": {"q_proj": 4}}, *full({}, {"alpha_pattern": {"q_proj": 4.0}})])
def test_an_adapter_that_cosmos_rl_exported_is_gone_on_with(
    folder: Path, tmp_path: Path, pattern: dict[str, Any]
) -> None:
    model = ours(folder, {"target_modules": ["q_proj", "v_proj"], **pattern})
    disturb(model)
    save_adapter(model, tmp_path / "lora")
    config = tmp_path / "lora/adapter_config.json"
    saved = json.loads(config.read_text())
    kept = {key: saved[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "peft_type", "use_rslora")}
    nothing = dict.fromkeys(("lora_names", "lora_path", "primary_adapter", "modules_to_save"))
    patterns = {"r_pattern": None, "alpha_pattern": None, **pattern}
    config.write_text(json.dumps({**kept, **nothing, **patterns}))
    assert torch.equal(logits(ours(folder, {"lora_path": str(tmp_path / "lora")})), logits(model))


@pytest.mark.parametrize("name", ["cosmos_predict", *full("sd3")])
def test_an_adapter_of_a_diffusion_model_that_cosmos_rl_exported_is_gone_on_with(tmp_path: Path, name: str) -> None:
    family = opened(tiny_pipelines.save(name, tmp_path / name))
    first, found = family.load_denoiser(torch.float32), family.load_denoiser(torch.float32)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k"]}
    first.add_adapter(peft.LoraConfig(**settings, init_lora_weights=False), adapter_name="default")
    tensors = {key: tensor.clone() for key, tensor in peft.get_peft_model_state_dict(first).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    written = {**settings, "peft_type": "LORA", "lora_names": ["default"], "alpha_pattern": None, "r_pattern": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    add_adapter(found, LoraConfig(lora_path=str(tmp_path)), family.lora_targets)
    again = peft.get_peft_model_state_dict(found)
    assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)
    config = recipe(
        {"policy.is_diffusers": True, "policy.lora.lora_path": str(tmp_path), "train.train_policy.type": "sft"}
    )
    assert [*config.policy.unsupported_setting_errors(StageContext(config, all_kinds()["sft"]))] == []


@pytest.mark.parametrize("name", ["sd3", *full("sana", "cosmos_predict")])
def test_an_adapter_of_a_diffusion_model_is_gone_on_with_from_its_own_export(tmp_path: Path, name: str) -> None:
    family = opened(tiny_pipelines.save(name, tmp_path / name))
    first = family.load_denoiser(torch.float32)
    settings = {"r": 4, "lora_alpha": 8.0, "r_pattern": {"to_q": 2}, "use_rslora": True, "init_lora_weights": False}
    add_adapter(first, LoraConfig.model_validate(settings), family.lora_targets)
    export_pipeline(family, first, tmp_path / "exported")
    folder = tmp_path / "exported/lora"
    with pytest.raises(ModelError, match=r"adapter_config.json'; its adapter is in .*/exported/lora$"):
        add_adapter(family.load_denoiser(torch.float32), LoraConfig(lora_path=str(folder.parent)), family.lora_targets)
    for file in ("model.safetensors", "pytorch_lora_weights.safetensors"):  # the second is what diffusers writes
        found = family.load_denoiser(torch.float32)
        if not (folder / file).exists():
            (folder / "model.safetensors").rename(folder / file)
        add_adapter(found, LoraConfig(lora_path=str(folder)), family.lora_targets)
        again, tensors = (peft.get_peft_model_state_dict(model) for model in (found, first))
        assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)
        assert get_lora_scales(found) == get_lora_scales(first)
    save_file(load_file(folder / file), folder / file)  # without the settings
    with pytest.raises(ModelError, match=r"lora_path = '.*': .*No such file or directory: '.*adapter_config.json'"):
        add_adapter(family.load_denoiser(torch.float32), LoraConfig(lora_path=str(folder)), family.lora_targets)


def test_an_adapter_that_an_older_diffusers_saved_has_its_rank_as_alpha(tmp_path: Path) -> None:
    family = opened(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    first, found, loaded = (family.load_denoiser(torch.float32) for _ in range(3))
    targets = ["attn.to_q", "attn.to_out.0"]
    first.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    tensors = peft.get_peft_model_state_dict(first)
    family.folder.pipeline_class.save_lora_weights(tmp_path, transformer_lora_layers=tensors)
    add_adapter(found, LoraConfig(lora_path=str(tmp_path)), family.lora_targets)
    again = peft.get_peft_model_state_dict(found)
    assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    loaded.load_lora_adapter(load_file(file), prefix="transformer", adapter_name="default")
    assert get_lora_scales(found) == get_lora_scales(loaded)


def test_a_saved_adapter_on_a_tied_head_is_refused(tmp_path: Path) -> None:
    tied = save_tiny_model(tmp_path / "tied")
    theirs(tied, {"target_modules": ["q_proj", "lm_head"]}).save_pretrained(tmp_path / "lora")
    with pytest.raises(ConfigError, match=r"lora_path = '.*' names 'lm_head', whose weight is model.embed_tokens and"):
        ours(tied, {"lora_path": str(tmp_path / "lora")})


@pytest.mark.parametrize("name", ["embed_tokens", *full("lm_head")])
def test_base_weights_that_peft_copied_into_an_adapter_are_named_with_the_remedy(
    folder: Path, tmp_path: Path, name: str
) -> None:
    model = theirs(folder, {"target_modules": ["q_proj", name], "init_lora_weights": False})
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"{name}.base_layer.weight, which PEFT .*; save .* save_embedding_layers"):
        ours(folder, {"lora_path": str(tmp_path)})
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert torch.equal(logits(ours(folder, {"lora_path": str(tmp_path)})), logits(model))


def test_an_adapter_with_the_names_of_an_older_transformers_is_gone_on_with(tmp_path: Path) -> None:
    folder = save_vlm("llava", tmp_path / "llava")
    model = ours(folder, {"target_modules": ["self_attn.q_proj"]})
    disturb(model)
    save_adapter(model, tmp_path / "lora")
    file = tmp_path / "lora/adapter_model.safetensors"
    new = {key: tensor for key, tensor in load_file(file).items() if "language_model" in key}
    save_file({key.replace("model.language_model", "language_model.model"): new[key] for key in new}, file)
    config = tmp_path / "lora/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "exclude_modules": ".*vision.*"}))
    found = peft.get_peft_model_state_dict(ours(folder, {"lora_path": str(tmp_path / "lora")}))
    assert {f"base_model.model.{name}" for name in found} == new.keys()
    assert all(torch.equal(tensor, new[f"base_model.model.{name}"]) for name, tensor in found.items())


def test_an_adapter_whose_experts_do_not_fit_together_is_refused_by_name(tmp_path: Path) -> None:
    FAMILIES["mixtral"]().save_pretrained(tmp_path / "mixtral")
    targets = {"target_modules": ["w1", "w2", "w3"]}
    save_adapter(ours(tmp_path / "mixtral", targets), tmp_path / "lora")
    expert = "base_model.model.model.layers.0.block_sparse_moe.experts.{}.{}.lora_{}.weight"
    shapes = {"A": (8, 64), "B": (64, 8)}
    old = {expert.format(i, w, m): torch.zeros(shapes[m]) for i in range(4) for w in ("w1", "w3") for m in "AB"}
    for name in (expert.format(2, "w3", "B"), expert.format(1, "w1", "A")):
        save_file(
            {key: tensor for key, tensor in old.items() if key != name}, tmp_path / "lora/adapter_model.safetensors"
        )
        with pytest.raises(
            ModelError, match=r"^policy\.lora\.lora_path: .*adapter_model.safetensors (does not fit|has)"
        ):
            ours(tmp_path / "mixtral", {"lora_path": str(tmp_path / "lora")})


def test_an_adapter_of_transposed_layers_is_gone_on_with(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=264, bos_token_id=None, eos_token_id=258)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    model = ours(tmp_path / "gpt2", {"target_modules": ["c_attn"]})
    disturb(model)
    save_adapter(model, tmp_path / "lora")
    assert torch.equal(logits(ours(tmp_path / "gpt2", {"lora_path": str(tmp_path / "lora")})), logits(model))


@pytest.mark.parametrize(
    ("settings", "harm", "message"),
    [
        ({"r": 16}, "", "policy.lora.r = 16, but the adapter in lora_path has 8; leave it out"),
        ({"target_modules": ["o_proj"]}, "", r"target_modules = \['o_proj'\], but .* has \['q_proj', 'v_proj'\]"),
        ({}, "none", "No such file or directory: '.*adapter_config.json'"),
        ({}, "list", "'list' object has no attribute"),
        ({}, "dora", "its use_dora = True is not trained here; merge it into the model"),
        ({}, "pissa", "began with a part of the base weights"),
        ({}, "cut", "adapter_model.safetensors cannot be read"),
        ({}, "less", "has no .*lora_A.weight; it is of another model or adapter"),
        ({}, "more", "has the unknown ghost; it is of another model or adapter"),
        ({}, "narrow", r"of shape \(8, 1\), the model needs \(8, 64\)"),
        ({}, "nan", "holds NaN or infinity in .*lora_A.weight; take an undamaged adapter"),
        ({}, "bin", "adapter_model.safetensors cannot be read: .*; save the adapter as safetensors"),
        ({}, "names", "lora_path = '.*': PEFT refuses Qwen3ForCausalLM: Target modules .*qkv"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    folder: Path, saved: Path, tmp_path: Path, settings: dict[str, Any], harm: str, message: str
) -> None:
    shutil.copytree(saved, tmp_path / "lora")
    weights, config = tmp_path / "lora/adapter_model.safetensors", tmp_path / "lora/adapter_config.json"
    state, values = load_file(weights), json.loads(config.read_text())
    name = min(key for key in state if "lora_A" in key)
    changed: dict[str, Any] = {
        "less": {key: tensor for key, tensor in state.items() if key != name},
        "more": {**state, "base_model.model.ghost": torch.zeros(1)},
        "narrow": {**state, name: torch.zeros(8, 1)},
        "nan": {**state, name: torch.full((8, 64), torch.nan)},
    }
    if harm in changed:
        save_file(changed[harm], weights)
    elif harm == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif harm == "none":
        config.unlink()
    elif harm == "list":
        config.write_text("[]")
    elif harm == "bin":
        torch.save(state, weights.with_suffix(".bin"))
        weights.unlink()
    else:
        extra: dict[str, dict[str, Any]] = {
            "dora": {"use_dora": True}, "pissa": {"init_lora_weights": "pissa"}, "": {},
            "names": {"target_modules": ["qkv_proj"]},
        }  # fmt: skip
        config.write_text(json.dumps({**values, **extra[harm]}))
    lora = {"lora_path": str(tmp_path / "lora"), **settings}
    with pytest.raises((ConfigError, ModelError), match=message) as caught:
        ours(folder, lora)
    assert "\n" not in str(caught.value)
    with torch.device("meta"), pytest.raises(type(caught.value), match=message):  # as `cosmos check` does
        add_adapter(model_without_weights(str(folder), dtype=torch.float32), LoraConfig.model_validate(lora))
