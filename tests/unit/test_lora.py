"""Adapters: PEFT's own model is the oracle for start, gradient, step, merge and format; a resumed training is exact."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM, PreTrainedModel, Qwen3Config

from configs.demo import arithmetic
from cosmos_core.checkpoint import export
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data import prepare
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.models.export import export_model
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.lora import add_adapter, merge_adapter, merged_state_dict, needs_base_weights, save_adapter
from cosmos_core.models.verify_export import verify_export
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.train.setup import run, train
from tests.unit.test_train import GRPO, SFT, make_stage, recipe
from tests.unit.tiny_families import save_family
from tests.unit.tiny_model import iter_checkpoint_weights, save_tiny_model
from tests.unit.trainers import NoView, curve, score_in, sft, train_until, trainer_of

IDS = torch.arange(3, 27).reshape(2, 12) % 250
MASK = np.array([0, 0, 0] + [1] * 9, dtype=np.uint8)
SAMPLES = [Sample(row[: 12 - i].numpy(), MASK[: 12 - i]) for i, row in enumerate(IDS)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "default": {},
    "all linear": {"target_modules": "all-linear", "r": 4, "lora_alpha": 16.0},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True,
        "r_pattern": {"v_proj": 3, "layers\\.1\\..*": 2}, "alpha_pattern": {"q_proj": 2.0},
    },
    "gaussian": {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"},
    "random": {"target_modules": ["o_proj", "embed_tokens", "lm_head"], "init_lora_weights": False},
    "whole modules": {"modules_to_save": ["lm_head", "model.norm"]},
}  # fmt: skip
TAKING: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa", "target_modules": "all-linear", "modules_to_save": ["model.norm"]},
    "pissa, few iterations": {"init_lora_weights": "pissa_niter_4"},
    "olora": {
        "init_lora_weights": "olora", "use_rslora": True, "r": 4, "target_modules": ["q_proj", "v_proj"],
        "r_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 2.0},
    },
}  # fmt: skip
EVERY = {**ADAPTERS, **TAKING}
LIKE_OTHERS = {"default", "all linear", "gaussian", "pissa, few iterations", "olora"}
"""Merged and saved as others are, or as families are: they differ in where they start."""
BEGUN_ALIKE = {"all linear", "patterns"}
"""Begun as the default is: they differ in what is merged."""
QUERIES = "model.layers.0.self_attn.q_proj.weight"
REWARD = "def parity(completion, reference):\n    return sum(map(ord, completion)) % 2\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


def ours(folder: Path, settings: dict[str, Any], *, dtype: torch.dtype = torch.float32, **load: Any) -> PreTrainedModel:
    model = load_model(str(folder), dtype=dtype, **load)
    torch.manual_seed(3)
    mark_trained_weights(model, PolicyConfig.model_validate({"lora": settings}))
    return model


def theirs(folder: Path, settings: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> Any:
    renamed = {"rank_pattern" if key == "r_pattern" else key: value for key, value in settings.items()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    torch.manual_seed(3)
    build: Any = peft.LoraConfig
    return peft.get_peft_model(model, build(task_type="CAUSAL_LM", **renamed))


def disturb(model: PreTrainedModel) -> None:
    """What training would do: no trained weight is left where it began."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def step(model: PreTrainedModel, path: Path, **train: Any) -> None:
    """One update by gradient descent through the rank."""
    settings = {
        "param_dtype": "float32", "optm_grad_norm_clip": 0.0, "train_policy": {"type": "sft", "mini_batch": 2}, **train,
    }  # fmt: skip
    rank = trainer_of(model, TrainConfig.model_validate(settings), 0, ProgressWriter(path / "p.json"))
    score_in(rank, model.dtype)
    rank.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    (update,) = sft().updates(SAMPLES, NoView())
    rank.update(update)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in BEGUN_ALIKE)) for n in ADAPTERS])
def test_start_gradient_and_step_are_those_of_peft(folder: Path, tmp_path: Path, name: str) -> None:
    expected = theirs(folder, ADAPTERS[name], dtype=torch.float64)
    wanted = {n.removeprefix("base_model.model."): p for n, p in expected.named_parameters() if p.requires_grad}
    models = [ours(folder, ADAPTERS[name], dtype=torch.float64, gradient_checkpointing=True) for _ in range(2)]
    for model, packed in zip(models, (False, True), strict=True):
        found = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n], p) for n, p in wanted.items())
        step(model, tmp_path, sequence_packing=packed)
    count = sum(int(sample.loss_mask[1:].sum()) for sample in SAMPLES)
    for sample in SAMPLES:
        ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.loss_mask)
        logprobs = expected(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        (-(logprobs * mask[1:]).sum() / count).backward()
    torch.optim.SGD(wanted.values(), lr=0.5).step()
    for model in models:
        found = dict(model.named_parameters())
        for n, parameter in wanted.items():
            assert (parameter.grad - found[n].grad).abs().max() <= 1e-9 * parameter.grad.abs().max(), n
        assert logits(expected).sub(logits(model)).abs().max() < 1e-9


@pytest.mark.parametrize("name", TAKING)
def test_a_start_that_takes_from_the_base_is_that_of_peft_and_leaves_the_logits(folder: Path, name: str) -> None:
    model, expected = ours(folder, TAKING[name]), theirs(folder, TAKING[name])
    wanted = {n.removeprefix("base_model.model."): p for n, p in expected.named_parameters()}
    found = dict(model.named_parameters())
    assert all(torch.equal(found[n], p) for n, p in wanted.items())
    base = load_model(str(folder), dtype=torch.float32)
    changed = [n for n, p in base.named_parameters() if not torch.equal(p, wanted.get(n, torch.zeros(())))]
    assert {n.rpartition(".")[0] for n in changed} >= {n for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    torch.testing.assert_close(logits(model), logits(base), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LIKE_OTHERS)) for n in EVERY])
def test_peft_merges_the_same_and_loads_the_adapter_onto_the_untouched_base(
    folder: Path, tmp_path: Path, name: str
) -> None:
    model, peft_model = ours(folder, EVERY[name]), theirs(folder, EVERY[name])
    disturb(model)
    disturb(peft_model.base_model.model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapted = logits(model)
    expected = peft_model.merge_and_unload()
    with merge_adapter(model):
        state = merged_state_dict(model)
        assert torch.equal(logits(model), logits(expected))
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.state_dict().items())
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), adapted), "every bit is back"

    save_adapter(model, tmp_path / "lora")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    assert state.keys() == base.state_dict().keys()
    loaded = logits(peft.PeftModel.from_pretrained(base, tmp_path / "lora"))
    torch.testing.assert_close(loaded, adapted, rtol=0, atol=1e-4 if name in TAKING else 0)
    names = load_file(tmp_path / "lora/adapter_model.safetensors").keys()
    assert all(key.startswith("base_model.model.") and "default" not in key for key in names)
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["target_modules"] == sorted(config["target_modules"])


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
@pytest.mark.full
def test_a_tied_head_that_is_trained_whole_stays_tied(tied_folder: Path, tmp_path: Path, name: str) -> None:
    model = ours(tied_folder, {"modules_to_save": [name]})
    assert sum("modules_to_save" in n for n, p in model.named_parameters() if p.requires_grad) == 1
    step(model, tmp_path)
    weights = dict(iter_checkpoint_weights(model))
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    export_model(model, load_tokenizer(str(tied_folder)), tmp_path / "m", dtype=None)
    assert "lm_head.weight" not in load_file(tmp_path / "m/model.safetensors")
    assert verify_export(model, tmp_path / "m", dtype=None)[2] == "reload: bit-identical"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "vproj"]}, "policy.lora.target_modules = 'vproj' matches no module; "
         "did you mean 'v_proj'?"),
        ({"modules_to_save": ["lm_haed"]}, "policy.lora.modules_to_save = 'lm_haed' matches no module; "
         "did you mean 'lm_head'?"),
        ({"r_pattern": {"qproj": 2}}, "policy.lora.r_pattern = 'qproj' matches no module; did you mean 'q_proj'?"),
        ({"alpha_pattern": {"mlp": 2.0}}, "policy.lora.alpha_pattern = 'mlp' matches no module; known: q_proj, v_proj"),
        ({"r": 65, "r_pattern": {"q_proj": 8}, "init_lora_weights": "pissa"}, "policy.lora.r = 65: init_lora_weights "
         "decomposes model.layers.0.self_attn.v_proj, whose rank is at most 32; lower r"),
        ({"target_modules": ["self_attn"]}, "policy.lora: PEFT refuses Qwen3ForCausalLM: Target module Qwen3Attention"),
        ({"target_modules": ["lm_head"], "lora_dropout": 0.1}, "policy.lora.lora_dropout = 0.1 excludes an adapter on "
         "the head"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ours(folder, settings)
    assert str(error.value).startswith(message)


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        LoraConfig.model_validate({"r_pattern": {"(": 2}})
    with pytest.raises(ValueError, match="greater than 0"):  # the adapter would change nothing
        LoraConfig.model_validate({"alpha_pattern": {"q_proj": 0.0}})


def test_a_tied_head_gets_no_adapter_of_its_own(tied_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'lm_head', whose weight is model\.embed_tokens and lm_head in one"):
        ours(tied_folder, {"target_modules": ["q_proj", "lm_head"]})


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
def test_export_and_adapter_are_proven_by_transformers_and_by_peft(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = ours(folder, {"target_modules": "all-linear"}, dtype=dtype)
    disturb(model)
    tokenizer = load_tokenizer(str(folder))
    export_model(model, tokenizer, tmp_path / "m", dtype=None)
    keys, bytes_, reload, tokens, merge, adapter = verify_export(model, tmp_path / "m", dtype=None, tokenizer=tokenizer)
    assert [keys, bytes_, reload, tokens] == ["keys", "bytes", "reload: bit-identical", "tokenizer"]
    assert merge.startswith("merge: max difference ")
    assert adapter == "adapter: bit-identical"
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto").state_dict()
    with merge_adapter(model):
        assert all(torch.equal(state[name], tensor) for name, tensor in merged_state_dict(model).items())

    file = tmp_path / "m/lora/adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"] += 0.2
    save_file(tensors, file)
    with pytest.raises(StageFailed, match="failed the check 'adapter': logits of the adapter on its base differ by"):
        verify_export(model, tmp_path / "m", dtype=None)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, rows, both kinds of prepared data, and a reward that tells the answers of a random model apart."""
    folder = tmp_path_factory.mktemp("task")
    (folder / "reward.py").write_text(REWARD)
    arithmetic.make(
        make_stage(folder / "task", "custom", recipe(SFT)), train_rows=64, heldout_rows=16, hidden_size=64, layers=1
    )
    for name, policy in (("sft-data", SFT), ("rl-data", GRPO)):
        prepare.run(make_stage(folder / name, "prepare", recipe(policy), folder / "task/model", folder / "task/data"))
    return folder


def adapted(base: Any, **lora: Any) -> Any:
    return base.model_copy(update={"policy": base.policy.model_copy(update={"lora": LoraConfig(**lora)})})


@pytest.mark.parametrize(("kind", "start"), [("sft", "pissa"), pytest.param("rl", True, marks=pytest.mark.full)])
def test_stopped_and_resumed_ends_with_the_same_bits(task: Path, tmp_path: Path, kind: str, start: bool | str) -> None:
    size = 8 if kind == "sft" else 16
    policy = SFT if kind == "sft" else {**GRPO, "reward_function": str(task / "reward.py:parity")}
    config = adapted(
        recipe(policy, train_batch_per_replica=size, max_num_steps=4, optm_lr=1e-2, ckpt={"save_mode": "sync"}),
        lora_dropout=0.2, init_lora_weights=start, target_modules="all-linear",
    )  # fmt: skip
    data, model = task / f"{kind}-data/data", task / "task/model"
    whole = make_stage(tmp_path / "whole", kind, config, model, data)
    expected = train(whole)
    stage = make_stage(tmp_path / "cut", kind, config, model, data)
    train_until(stage, 2)
    (file,) = stage.path.glob("checkpoints/step_2/policy/*.safetensors")
    assert all(".lora_" in name for name in load_file(file))
    resumed = make_stage(tmp_path / "cut", kind, config, model, data)
    found = train(resumed)
    assert found.adapter.model is not None and expected.adapter.model is not None
    weights = found.adapter.model.state_dict()
    assert weights[QUERIES.replace("weight", "lora_B.default.weight")].any()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.adapter.model.state_dict().items())
    assert curve(resumed) == curve(whole)


def test_rollouts_follow_the_adapter(task: Path, tmp_path: Path) -> None:
    policy = {**GRPO, "reward_function": str(task / "reward.py:parity")}
    config = adapted(recipe(policy, train_batch_per_replica=16, max_num_steps=3, optm_lr=1e-2), r=4)
    stage = make_stage(tmp_path / "rl", "rl", config, task / "task/model", task / "rl-data/data")
    model = train(stage).adapter.model
    assert model is not None
    trained = dict(iter_checkpoint_weights(model))[QUERIES]
    base = load_file(task / "task/model/model.safetensors")[QUERIES]
    assert (trained - base).abs().max() > 1e-3
    for line in read_metrics(stage.path / "metrics.jsonl"):
        assert 0 < line["rollout/logprob_difference_max"] < 1e-4


def test_a_stage_hands_over_the_merged_model_and_the_adapter_and_both_are_exported(task: Path, tmp_path: Path) -> None:
    settings = recipe(SFT, max_num_steps=2, optm_lr=1e-2, train_batch_per_replica=8, sequence_packing=True)
    config = adapted(settings, r=4)
    stage = make_stage(tmp_path / "sft", "sft", config, task / "task/model", task / "sft-data/data")
    outcome = run(stage)
    assert outcome.outputs == ("safetensors/step_2",)
    assert outcome.info["model"] == "safetensors/step_2" and outcome.info["adapter"] == "safetensors/step_2/lora"
    checks: Any = outcome.info["checks"]
    assert checks[-1] == "adapter: bit-identical"
    handed = stage.path / "safetensors/step_2"
    base = AutoModelForCausalLM.from_pretrained(task / "task/model", dtype=torch.float32)
    by_peft = logits(peft.PeftModel.from_pretrained(base, handed / "lora"))
    by_transformers = logits(AutoModelForCausalLM.from_pretrained(handed, dtype=torch.float32))
    torch.testing.assert_close(by_peft, by_transformers, rtol=0, atol=1e-4)
    publishing = make_stage(tmp_path / "export", "export", config, handed)
    publishing.origin = {"base_model": str(task / "task/model"), "data": [str(task / "x")]}
    assert export.adapter_files(publishing) == {}, "of a folder that no stage made, the base is not known"
    assert "lora/" not in export.model_card(publishing, export.loading_instructions(publishing, "AutoModel"))
    publishing.config = publishing.config.copy_with(model="stage:sft")
    result: dict[str, Any] = {"kind": "sft", "digest": "d", "fingerprint": "f", "metrics": {}, "inputs": {}}
    publishing.inputs = {"sft": {**result, "info": {**outcome.info, "base": "model"}}}
    exported = export.run(publishing)
    assert exported.info["base"] == "model", "for an export of this export"
    assert exported.info["adapter"] == f"{exported.info['model']}/lora"
    target = publishing.path / str(exported.info["model"])
    assert len({(each / "lora/adapter_model.safetensors").read_bytes() for each in (target, handed)}) == 1
    text = (target / "README.md").read_text() + (target / "lora/adapter_config.json").read_text()
    assert "`lora/` has it alone" in text and '"base_model_name_or_path": "model"' in text and str(task) not in text
    exported_checks: Any = exported.info["checks"]
    assert exported_checks[-1] == "adapter: bytes"


OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("gemma2", "phi4", "qwen3-moe", "llama4")]


@pytest.mark.parametrize("family", ["gpt-oss", "qwen2.5-vl", *OTHERS])
def test_any_family_is_adapted_merged_and_exported(tmp_path: Path, family: str) -> None:
    base = save_family(family, tmp_path / "base")
    model = ours(base, {"target_modules": "all-linear"})
    before = logits(model)
    disturb(model)
    adapted_logits = logits(model)
    assert (adapted_logits - before).abs().max() > 0.1
    export_model(model, load_tokenizer(str(base)), tmp_path / "m", dtype=None)
    torch.testing.assert_close(logits(load_model(str(tmp_path / "m"), dtype=torch.float32)), adapted_logits,
                               rtol=0, atol=1e-4)  # fmt: skip
    plain = load_model(str(base), dtype=torch.float32)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(plain, tmp_path / "m/lora")), adapted_logits)


def test_all_linear_is_every_layer_that_multiplies_a_matrix_whatever_its_class(tmp_path: Path) -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    FalconForCausalLM(FalconConfig(**settings)).save_pretrained(tmp_path / "falcon")
    falcon = ours(tmp_path / "falcon", {"target_modules": "all-linear"})
    llama4 = ours(save_family("llama4", tmp_path / "llama4"), {"target_modules": "all-linear"})
    adapted = [{n for n, m in model.named_modules() if isinstance(m, LoraLayer)} for model in (falcon, llama4)]
    block = "transformer.h.0."
    names = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    assert adapted[0] == {block + name for name in names}
    assert any("shared_expert" in name for name in adapted[1]) and not any("router" in name for name in adapted[1])
    before = logits(falcon)
    disturb(falcon)
    moved = logits(falcon)
    assert (moved - before).abs().max() > 0.1
    with merge_adapter(falcon):
        torch.testing.assert_close(logits(falcon), moved, rtol=0, atol=1e-4)


def test_the_scale_of_a_pattern_is_its_own_alpha_over_its_own_rank(folder: Path) -> None:
    model = ours(folder, ADAPTERS["patterns"])
    scales = {n.removeprefix("model.layers."): m.scaling["default"] for n, m in model.named_modules()
              if isinstance(m, LoraLayer)}  # fmt: skip
    assert [scales[f"0.self_attn.{name}_proj"] for name in "qv"] == [2.0 / math.sqrt(8), 8.0 / math.sqrt(3)]
    assert [scales[f"{layer}.mlp.down_proj"] for layer in (0, 1)] == [8.0 / math.sqrt(8), 8.0 / math.sqrt(2)]


def test_only_a_new_adapter_that_takes_from_the_base_needs_its_weights() -> None:
    for start in ("pissa", "pissa_niter_4", "olora"):
        assert needs_base_weights(LoraConfig(init_lora_weights=start))
        assert not needs_base_weights(LoraConfig(init_lora_weights=start, lora_path="saved"))
    assert not any(needs_base_weights(LoraConfig(init_lora_weights=start)) for start in (True, False, "gaussian"))
    assert not needs_base_weights(None)


def test_a_family_that_peft_does_not_know_needs_target_modules(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.float32)
    model.config.__class__ = type("Unheard", (Qwen3Config,), {"model_type": "unheard_of"})
    with pytest.raises(ConfigError, match=r"target_modules is left out, and PEFT has none for Qwen3ForCausalLM; give"):
        add_adapter(model, LoraConfig())
