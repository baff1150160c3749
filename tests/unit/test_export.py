"""Exports: transformers loads them to the same numbers, and a damaged one is caught by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from cosmos_core.checkpoint import export
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import StageFailed
from cosmos_core.models.chat_templates import CHAT_TEMPLATES
from cosmos_core.models.export import _make_export_config, export_model
from cosmos_core.models.verify_export import _MAX_MEMORY_FRACTION, _compute_trainer_logits, verify_export
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds
from tests.conftest import wait_until
from tests.unit.tiny_families import save_family

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 259,
}  # fmt: skip
FAMILIES = {"qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config), "llama": (hf.LlamaForCausalLM, hf.LlamaConfig)}


def make_tokenizer() -> hf.Qwen2Tokenizer:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(ByteLevel.alphabet()), *special])}
    return hf.Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", chat_template=TEMPLATE)


def make_model(family: str, *, tied: bool, seed: int = 0) -> hf.PreTrainedModel:
    torch.manual_seed(seed)
    model_class, config_class = FAMILIES[family]
    model = model_class(config_class(**SIZES, tie_word_embeddings=tied))
    # Norms start at exactly 1, which every dtype holds: noise makes the cast visible in them too.
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    return model


def rewrite(file: Path, change: str, key: str) -> None:
    """Write a weight file again with one key dropped or added."""
    tensors = load_file(file)
    if change == "drop":
        del tensors[key]
    else:
        tensors[key] = torch.zeros(2)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_export_holds_exactly_the_cast_weights_and_the_dtype(tmp_path: Path, family: str, tied: bool) -> None:
    model = make_model(family, tied=tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float32):
        target = tmp_path / str(dtype)
        export_model(model, make_tokenizer(), target, dtype=dtype)
        reloaded, loading = hf.AutoModelForCausalLM.from_pretrained(target, dtype="auto", output_loading_info=True)
        assert not any(loading.values())
        assert type(reloaded) is type(model)
        for name, tensor in reloaded.state_dict().items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, before[name].to(dtype)), name
        assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert ("lm_head.weight" in load_file(target / "model.safetensors")) == (not tied)
        assert hf.AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_names_no_code_that_it_does_not_have(tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen3", tied=True), make_tokenizer()
    model.config.auto_map = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["mine.Tokenizer", None]}
    export_model(model, tokenizer, tmp_path / "m", dtype=None)
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "m" / name).read_text())
    assert model.config.auto_map


@pytest.mark.usefixtures("own_interpreter")
@pytest.mark.parametrize(
    ("family", "tied", "dtype"), [("qwen3", True, torch.bfloat16), ("llama", False, torch.float32)]
)
def test_a_fresh_interpreter_computes_the_same_logits_bit_for_bit(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype
) -> None:
    model = make_model(family, tied=tied)
    tokenizer = make_tokenizer()
    export_model(model, tokenizer, tmp_path / "m", dtype=dtype, max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("model-*-of-*.safetensors"))) > 2
    checks = verify_export(model, tmp_path / "m", dtype=dtype, tokenizer=tokenizer)
    assert checks == ["keys", "bytes", "reload: bit-identical", "tokenizer"]


def test_the_logits_of_the_trainer_are_those_of_blocks_that_are_not_compiled() -> None:
    """Blocks that were compiled for a GPU would be compiled again for the host, which may have no compiler."""
    model = make_model("qwen3", tied=True)
    expected = _compute_trainer_logits(model, None)

    def fail(*arguments: object) -> None:
        raise AssertionError("compiled")

    for block in model.model.layers:
        block.compile(backend=fail)
    assert torch.equal(_compute_trainer_logits(model, None), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_model_whose_scale_is_rounded_to_its_dtype_is_proven(family: str, tmp_path: Path) -> None:
    """The scale of embeddings, the root of 32, is a buffer that no checkpoint holds."""
    base = save_family(family, tmp_path / "base")
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    export_model(model, hf.AutoTokenizer.from_pretrained(base), tmp_path / "m", dtype=None)
    assert "reload: bit-identical" in verify_export(model, tmp_path / "m", dtype=None)


def test_the_bias_with_which_a_router_selects_experts_is_not_rounded(tmp_path: Path) -> None:
    """As in the published files of DeepSeek-V3, whose biases differ by less than bfloat16 tells apart."""
    base = save_family("deepseek-v3", tmp_path / "base")
    model, name = hf.AutoModelForCausalLM.from_pretrained(base), "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.tensor([8.01, 8.0, 7.99, 8.02]))
    export_model(model, hf.AutoTokenizer.from_pretrained(base), tmp_path / "m", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "m/model.safetensors")
    assert torch.equal(tensors.pop(name), model.get_buffer(name))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    verify_export(model, tmp_path / "m", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        pytest.param(0, " (first 1 of 5 layers)", marks=pytest.mark.full),
        (2.5, " (first 2 of 5 layers)"),
        pytest.param(5.0, "", marks=pytest.mark.full),
    ],
)
def test_where_memory_does_not_hold_the_model_twice_its_first_layers_are_compared(
    tmp_path: Path, layers: float, named: str
) -> None:
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**SIZES, "num_hidden_layers": 5}))
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=torch.bfloat16)
    a_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    others = sum(p.numel() for p in model.parameters()) - 5 * a_layer
    two_copies = 2 * 4  # weights rounded to bfloat16 in this process, and the fresh one's
    memory = int((others + layers * a_layer) * two_copies / _MAX_MEMORY_FRACTION) + 1
    checks = verify_export(model, tmp_path / "m", dtype=torch.bfloat16, memory_bytes=memory)
    assert checks == ["keys", "bytes", f"reload{named}: bit-identical"]
    assert len(model.model.layers) == 5


def test_one_flipped_bit_is_caught_and_its_tensor_named(tmp_path: Path) -> None:
    model = make_model("qwen3", tied=True)
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=torch.bfloat16)
    file = tmp_path / "m" / "model.safetensors"
    content = bytearray(file.read_bytes())
    header_size = int.from_bytes(content[:8], "little")
    name = "model.layers.1.mlp.down_proj.weight"
    start, _ = json.loads(content[8 : 8 + header_size])[name]["data_offsets"]
    content[8 + header_size + start + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(StageFailed, match=r"check 'bytes': model\.layers\.1\.mlp\.down_proj\.weight on disk"):
        verify_export(model, tmp_path / "m", dtype=torch.bfloat16)


def test_an_export_in_another_dtype_than_said_is_caught(tmp_path: Path) -> None:
    model = make_model("llama", tied=False)
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=torch.bfloat16)
    with pytest.raises(StageFailed, match="check 'bytes'"):
        verify_export(model, tmp_path / "m", dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ("drop", "model.norm.weight", "missing model.norm.weight, unexpected none"),
        ("drop", "model.embed_tokens.weight", "missing lm_head.weight, unexpected none"),
        ("add", "model.extra.weight", "missing none, unexpected model.extra.weight"),
    ],
)
def test_a_missing_or_left_over_key_is_caught_and_named(tmp_path: Path, change: str, key: str, message: str) -> None:
    model = make_model("qwen3", tied=True)
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=None)
    rewrite(tmp_path / "m" / "model.safetensors", change, key)
    with pytest.raises(StageFailed, match=message):
        verify_export(model, tmp_path / "m", dtype=None)


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    model = make_model("qwen3", tied=True)
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=None)
    file = tmp_path / "m" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(StageFailed, match=r"model\.safetensors is damaged"):
        verify_export(model, tmp_path / "m", dtype=None)


def test_right_bytes_under_a_wrong_config_fail_the_reload(tmp_path: Path) -> None:
    model = make_model("llama", tied=False)
    export_model(model, make_tokenizer(), tmp_path / "m", dtype=torch.float32)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageFailed, match="check 'reload': logits of the reloaded model differ by"):
        verify_export(model, tmp_path / "m", dtype=torch.float32)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_export import make_model, make_tokenizer
from cosmos_core.models.export import export_model
from cosmos_core.errors import StageFailed
model, tokenizer = make_model("qwen3", tied=True), make_tokenizer()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    export_model(model, tokenizer, Path(sys.argv[1]) / "m", dtype=None)
except StageFailed as error:
    sys.stdout.write(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        f"disk full while saving export {tmp_path / 'm'}; nothing is left of it; free space and run again"
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_fresh_interpreter_does_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_export import make_model, make_tokenizer
from cosmos_core.models.export import export_model
from cosmos_core.models.verify_export import verify_export
model, target = make_model("qwen3", tied=True), Path(sys.argv[1]) / "m"
export_model(model, make_tokenizer(), target, dtype=None)
while True:
    verify_export(model, target, dtype=None)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = psutil.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment, stderr=subprocess.DEVNULL)
    try:
        children = wait_until(trainer.children, 120, "a proof begins")
    finally:
        trainer.kill()
        trainer.wait()
    _, alive = psutil.wait_procs(children, timeout=300)
    assert alive == []


def test_the_export_stage_proves_and_describes_what_it_wrote(tmp_path: Path) -> None:
    source, stage_path = tmp_path / "trained", tmp_path / "20260101000000" / "stages" / "export"
    stage_path.mkdir(parents=True)
    export_model(make_model("qwen3", tied=True), make_tokenizer(), source, dtype=torch.float32)
    upstream = {
        "kind": "sft", "digest": "d1g3st", "fingerprint": "f1", "metrics": {"validation/accuracy": 0.5},
        "info": {"model": "final", "step": 12, "dtype": "float32"},
        "inputs": {"prepare": {"digest": "d4ta", "fingerprint": "f0"}},
    }  # fmt: skip
    stage = Stage(
        path=stage_path,
        config=StageConfig(name="export", kind="export", model="stage:sft", after=("sft",)),
        recipe=Recipe.model_validate({"policy": {"model_name_or_path": "not/used", "chat_template": "plain"}}),
        model=str(source),
        data=None,
        inputs={"sft": upstream},
        fingerprint="abc",
        kind=all_kinds()["export"],
        origin={"base_model": "Qwen/Qwen3-0.6B", "revision": "c0ffee", "data": ["rows.jsonl", "org/rows@c0de"]},
    )
    outcome = export.run(stage)
    assert outcome.outputs == ("safetensors/step_12",)
    assert outcome.info == {
        "model": "safetensors/step_12",
        "step": 12,
        "checks": ["keys", "bytes", "reload: bit-identical", "tokenizer"],
        "dtype": "bfloat16",
    }
    target = stage_path / "safetensors" / "step_12"
    assert outcome.metrics == {"export/bytes": (target / "model.safetensors").stat().st_size}
    assert hf.AutoTokenizer.from_pretrained(target).chat_template == CHAT_TEMPLATES["plain"]
    card = (target / "README.md").read_text()
    for line in [
        "base_model: Qwen/Qwen3-0.6B", "- Base model: `Qwen/Qwen3-0.6B` at `c0ffee`",
        "- Data: `rows.jsonl`, `org/rows@c0de`", "## From stage `sft` (sft)", "- Run: `20260101000000`",
        "- digest: `d1g3st`", "- made from `prepare`: `d4ta`",
        "- Precision: bfloat16, cast from float32, in which it was trained",
        "| validation/accuracy | 0.5 |", 'model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")',
    ]:  # fmt: skip
        assert line in card.splitlines()
    stage.origin = {"made_by": "mine.py:make", "data": []}
    card = export.model_card(stage, export.loading_instructions(stage, "AutoModelForCausalLM"))
    assert "base_model" not in card and "- Base model: made by `mine.py:make`" in card.splitlines()
    assert "not/used" not in card and "- Data" not in card
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: mine\ntags: [a]\n---\n")
    (source / "LICENSE.txt").write_text("Be kind.")
    stage.origin = {"base_model": str(source), "data": []}
    card = export.model_card(stage, export.loading_instructions(stage, "AutoModelForCausalLM"))
    assert card.splitlines()[:5] == ["---", "library_name: transformers", "license: other", "license_name: mine", "---"]
    assert export.license_files(stage) == {"LICENSE.txt": b"Be kind."}


def test_a_model_without_its_optional_towers_is_exported_in_another_dtype() -> None:
    config = hf.Gemma4Config()
    assert config.audio_config is None
    exported = _make_export_config(SimpleNamespace(config=config), torch.bfloat16)
    assert exported.dtype == exported.text_config.dtype == torch.bfloat16
