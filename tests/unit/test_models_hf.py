"""Loading and auditing models, and log-probabilities against closed forms and transformers itself."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    RecurrentGemmaConfig,
)

from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.data.chat import make_prompt_rendering
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.base import has_dropout
from cosmos_core.models.chat_templates import set_chat_template
from cosmos_core.models.hf import (
    check_row_length,
    describe_nonfinite_values,
    load_config,
    load_model,
    load_tokenizer,
)
from cosmos_core.models.recompute import RecomputeMode
from cosmos_core.models.sharded_load import init_on_meta
from tests.unit.data_tokenizers import byte_tokenizer
from tests.unit.tiny_model import iter_checkpoint_weights, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def load(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32)


def test_a_loaded_model_has_the_bytes_of_the_file_and_uses_sdpa(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    loaded = dict(iter_checkpoint_weights(model))
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config._attn_implementation == "sdpa"
    assert set(loaded) == {*stored, "lm_head.weight"}  # the file leaves the tied tensor out
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    assert loaded["lm_head.weight"].data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()


class Counted(TorchDispatchMode):
    """How often each operation of torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_gradient_checkpointing_leaves_the_gradient_as_it_is(folder: Path) -> None:
    ids = torch.arange(12).reshape(2, 6)
    gradients, calls = [], []
    for checkpointing in (False, "selective", True):
        model = load_model(str(folder), dtype=torch.float32, gradient_checkpointing=checkpointing).train()
        assert model.is_gradient_checkpointing is bool(checkpointing)
        loss = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 7].sum()
        with Counted() as counted:
            loss.backward()
        gradients.append(model.get_input_embeddings().weight.grad)
        calls.append(counted.calls)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
    nothing, selective, everything = calls
    assert nothing["mm"] < selective["mm"] < everything["mm"]
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert (nothing[attention], selective[attention], everything[attention]) == (0, 0, model.config.num_hidden_layers)


@pytest.mark.parametrize("how", [True, "selective"])
@pytest.mark.parametrize("is_later", [False, True], ids=["whole", "in parts"])
def test_a_family_that_cannot_recompute_keeps_everything_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: RecomputeMode, is_later: bool
) -> None:
    config = JetMoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8, intermediate_size=48,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    JetMoeForCausalLM(config).save_pretrained(tmp_path)
    if is_later:
        cpu = torch.device("cpu")
        model = init_on_meta(str(tmp_path), dtype=torch.float32, device=cpu, gradient_checkpointing=how)
    else:
        model = load_model(str(tmp_path), dtype=torch.float32, gradient_checkpointing=how)
    assert model.is_gradient_checkpointing is False
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("cosmos_core")]
    assert said == (
        "policy.model_gradient_checkpointing has no effect, every activation is kept: JetMoeForCausalLM does not "
        "support gradient checkpointing."
    )


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere/at/all"])
def test_a_missing_folder_is_named_with_its_key(name: str) -> None:
    for loader in (load_tokenizer, load_config):
        with pytest.raises(ModelError, match=r"policy.model_name_or_path = .*does not exist") as caught:
            loader(name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_hub_id_that_cannot_be_had_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'no-such-org/no-such-model'.*cannot be reached.*local folder"):
        load_tokenizer("no-such-org/no-such-model")


def test_a_folder_without_tokenizer_or_config_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(str(copy))
    (copy / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="no_such_model"):
        load_config(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(copy)


class OfAnotherLibraryConfig(Qwen3Config):
    model_type = "of-another-library"


class OfAnotherLibrary(Qwen3ForCausalLM):
    config_class = OfAnotherLibraryConfig


@pytest.mark.parametrize(("name", "text", "said"), [("a.jinja", "\n", "empty"), ("a.JSON", '{"x": "y"}', "JSON")])
def test_a_chat_template_in_an_empty_file_or_in_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    said = rf" = '{name}' is {said}; .* as a \.jinja file$"
    with pytest.raises(ConfigError, match=rf"^policy\.chat_template{said}"):
        set_chat_template(byte_tokenizer(None), name)
    with pytest.raises(ConfigError, match=rf"^rollout\.multi_turn_config\.custom_chat_template_path{said}"):
        make_prompt_rendering(MultiTurnRolloutConfig(enable=True, custom_chat_template_path=name))


def test_a_class_of_another_library_is_found_where_it_is_registered(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    changed = {"architectures": ["OfAnotherLibrary"], "model_type": "of-another-library"}
    (copy / "config.json").write_text(json.dumps(config | changed))
    AutoConfig.register("of-another-library", OfAnotherLibraryConfig)
    AutoModelForCausalLM.register(OfAnotherLibraryConfig, OfAnotherLibrary)
    try:
        assert type(load(copy)) is OfAnotherLibrary
    finally:
        CONFIG_MAPPING._extra_content.pop("of-another-library")
        AutoModelForCausalLM._model_mapping._extra_content.pop(OfAnotherLibraryConfig)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0] * 8,
          "long_factor": [3.0] * 8}, 16),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, None),
        ({"rope_type": "default"}, None),
    ],
)  # fmt: skip
def test_rows_whose_positions_depend_on_their_neighbours_are_refused(rope: dict[str, Any], limit: int | None) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=50,
        max_position_embeddings=64, initializer_range=0.2, rope_parameters={"rope_theta": 10000.0, **rope},
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    length = limit or 64

    def moves(longest: int) -> bool:
        """Whether a row of five tokens has other logits beside one of `longest`."""
        ids = torch.arange(2 * longest).reshape(2, -1) % 50
        with torch.no_grad():
            return not torch.allclose(model(ids).logits[0, :5], model(ids[:1, :5]).logits[0], atol=1e-5)

    assert not moves(length)
    check_row_length(config, length)
    check_row_length(RecurrentGemmaConfig(), 1 << 20)  # has positions without a limit
    if limit is None:
        check_row_length(config, 10 * length)
    else:
        assert moves(limit + 1)
        with pytest.raises(ModelError, match=rf"model_max_length = {limit + 1}.*{rope['rope_type']}.* at most {limit}"):
            check_row_length(config, limit + 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_values_of_weights_in_8_bit_floats_are_looked_at(dtype: torch.dtype) -> None:
    """As in the files of an export in fp8, which `cosmos try` loads."""
    values = torch.tensor([2.0**-6, 2.0**7]).to(dtype)
    assert describe_nonfinite_values("w", values) == ""
    nan = torch.tensor([1.0, torch.nan]).to(dtype)
    assert describe_nonfinite_values("w", nan) == "tensor w holds NaN or infinity; take an undamaged checkpoint"


def test_a_dropout_rate_without_a_module_is_dropout() -> None:
    sizes = {"hidden_size": 8, "ffn_dim": 8, "word_embed_proj_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    assert [has_dropout(OPTForCausalLM(OPTConfig(**sizes, dropout=rate))) for rate in (0.1, 0.0)] == [True, False]
    experts = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    config = PhimoeConfig(vocab_size=8, hidden_size=8, intermediate_size=8, **experts)  # chooses experts at random
    assert has_dropout(PhimoeForCausalLM(config))
