"""A folder of a model that is wrong: one line, the same from a process alone, from a mesh and from `cosmos check`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoProcessor

from cosmos_core.errors import EXIT_USAGE, ConfigError, ModelError
from cosmos_core.models.hf import load_config, load_model, load_tokenizer
from cosmos_core.models.model_files import translate_load_errors
from cosmos_core.models.processor import load_processor
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.train import check
from tests.cells import cells, full
from tests.unit.test_train import GRPO, SFT, make_stage, recipe
from tests.unit.tiny_model import save_tiny_model
from tests.unit.tiny_vlms import save_vlm

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
UP, EMBEDDING = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in one file, and in two with an index."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "single")
    shutil.copytree(folder / "single", folder / "sharded")
    (folder / "sharded/model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder / "single").save_pretrained(folder / "sharded", max_shard_size="200KB")
    assert (folder / "sharded" / SHARD).is_file()
    return folder


def config(*, file: str = "config.json", **changes: Any) -> Damage:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def written(name: str, content: Any) -> Damage:
    return lambda folder: (folder / name).write_text(json.dumps(content))


index = partial(config, file=INDEX)


def pickled(change: Callable[[dict[str, Any]], Any], size: int | None = None) -> Damage:
    """The weights in a file of torch, as `change` gives them; cut off at `size`."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        file = folder / "pytorch_model.bin"
        torch.save(change(weights), file)
        file.write_bytes(file.read_bytes()[:size])

    return damage


def replaced(make: Damage) -> Damage:
    """Something else at the place of the weights."""
    return lambda folder: ((folder / "model.safetensors").unlink(), make(folder / "model.safetensors"))


def line(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    assert caught.value.exit_code == EXIT_USAGE and str(caught.value).isprintable()
    return str(caught.value)


def lines(folder: Path) -> set[str]:
    """What is said of a folder by a process alone, by a rank of a mesh, and by `cosmos check`."""
    model, stage = str(folder), make_stage(folder.parent / "stage", "sft", recipe(SFT), folder)
    return {
        line(lambda: load_model(model, dtype=torch.float32)),
        line(lambda: init_on_meta(model, dtype=torch.float32, device=CPU)),
        line(lambda: check.run(stage)),
    }


SINGLE: dict[str, tuple[Damage, str]] = {
    "no heads": (config(num_attention_heads=0), "cannot load the architecture: .* by zero"),
    "heads in words": (config(num_attention_heads="two"), r"config\.json: .*num_attention_heads.*'two'"),
    "no such dtype": (config(dtype="float7"), r"cannot load the config\.json: .*float7"),
    "a word for rope": (config(rope_parameters="x", rope_scaling="x"), r"cannot load the config\.json: .*rope"),
    "a word for quantization": (config(quantization_config="x"), r"cannot load the config\.json: 'str'"),
    "no such activation": (config(hidden_act="nope"), r"cannot load the architecture: KeyError\('nope'\)"),
    "a negative width": (config(hidden_size=-4), r"cannot load the architecture: .*negative dimension -4"),
    "padding outside the vocabulary": (config(vocab_size=10), "cannot load the architecture: Padding_idx must be"),
    "quantized, without the package": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"cannot load the quantized weights \(to train, take the model without quantization\): .*pip install optimum",
    ),
    "half a character for the model": (config(model_type="\ud800"), r"cannot load the config\.json: .*\\ud800"),
    "a number for the classes": (config(architectures=5), "has architectures = 5, .* no model for"),
    "a number for a class": (config(architectures=[3]), r"has architectures = \[3\], .* no model for"),
    "no list of classes": (config(architectures="Qwen3ForCausalLM"), "architectures = 'Qwen3ForCausalLM', .* no model"),
    "any model": (config(architectures=["AutoModel"]), r"has architectures = \['AutoModel'\], .* no model for"),
    "a tokenizer": (config(architectures=["Qwen2Tokenizer"]), r"\['Qwen2Tokenizer'\], .* no model for"),
    "a table of classes": (config(architectures={"a": 1}), r"has architectures = \{'a': 1\}, .* no model for"),
    "a module": (config(architectures=["models"]), r"has architectures = \['models'\], .* no model for"),
    "without a head": (config(architectures=["Qwen3Model"]), "Qwen3Model does not generate text"),
    "attention to later tokens": (config(use_bidirectional_attention=True), "Qwen3ForCausalLM attend to the tokens af"),
    "checkpoints of a training": (
        lambda folder: shutil.copytree(folder, folder / "checkpoint-5") and (folder / "config.json").unlink(),
        "the folder has no config.json; give a folder in Hugging Face format, such as .*/model/checkpoint-5$",
    ),
    "an encoder with a head": (config(model_type="bert", architectures=["BertLMHeadModel"]), "has is_decoder = false"),
    "logits of later tokens": (config(model_type="cpmant", architectures=None), "logits of .cpmant. depend on the t"),
    "an encoder": (
        config(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), "T5ForCondi.* attend to the tok"
    ),
    "of another family": (config(architectures=["OPTForCausalLM"]), r"ForCausalLM'\] and model_type = 'qwen3', which"),
    "attentions as outputs": (config(output_attentions=True), "config.json has output_attentions = True"),
    "tuples as outputs": (config(return_dict=False), "config.json has return_dict = False"),
    "a head that no file has": (config(tie_word_embeddings=False), "1 tensors missing from the files: lm_head.weight"),
    "another width": (config(intermediate_size=8), "tensors of another shape than config.json says"),
    "another layer": (config(num_hidden_layers=1, layer_types=["full_attention"]), "tensors in the files but not in"),
    "a list for the generation": (written("generation_config.json", []), r"generation_config\.json is not a JSON obj"),
    "a list for the config": (written("config.json", []), r"/config\.json is not a JSON object"),
    "a link to nothing": (replaced(lambda file: file.symlink_to("nowhere")), r"model\.safetensors is no file"),
    "a folder of weights": (replaced(lambda file: file.mkdir()), r"model\.safetensors is no file"),
    "no weights": (replaced(lambda file: None), r"cannot load the weights: the folder has no model\.safetensors"),
    "weights of another format": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-Q4.gguf"), "it has model-Q4.gguf, which is"
    ),
    "a file cut off": (
        lambda folder: os.truncate(folder / "model.safetensors", 1000), r"model\.safetensors is damaged .*; copy it"
    ),
    "a pickled path": (pickled(lambda weights: weights | {"at": Path("x")}), r"pytorch_model\.bin .* run any code"),
    "a pickle cut off": (pickled(dict, 5000), r"pytorch_model\.bin is damaged"),
    "a pickled number": (pickled(lambda weights: weights | {"epoch": 3}), r"pytorch_model\.bin holds 'epoch', which"),
    "pickled tensors without names": (pickled(lambda weights: list(weights.values())), r"\.bin holds no tensors by"),
}  # fmt: skip
SHARDED: dict[str, tuple[Damage, str]] = {
    "a list": (written(INDEX, []), rf"{INDEX} is not a JSON object"),
    "nothing": (written(INDEX, {}), rf"{INDEX} has no weight_map"),
    "a map of null": (index(weight_map=None), rf"{INDEX} has no weight_map"),
    "a list for a map": (index(weight_map=[SHARD]), rf"{INDEX} has no weight_map"),
    "an empty map": (index(weight_map={}), rf"{INDEX} has no weight_map"),
    "numbers for files": (index(weight_map={"lm_head.weight": 3}), rf"{INDEX} has no weight_map"),
    "no metadata": (index(metadata=None), rf"{INDEX} has no metadata"),
    "a folder for an index": (lambda f: ((f / INDEX).unlink(), (f / INDEX).mkdir()), rf"{INDEX} has no weight_map"),
    "a file outside": (index(weight_map={"lm_head.weight": f"../outside/{SHARD}"}), "which lies outside of its folder"),
    "a path": (index(weight_map={"lm_head.weight": f"/outside/{SHARD}"}), "which lies outside of its folder"),
    "a lost file": (lambda folder: (folder / SHARD).unlink(), rf"{SHARD} is no file"),
    "an empty file": (lambda folder: (folder / SHARD).write_bytes(b""), rf"{SHARD} is damaged"),
    "a lost index": (lambda folder: (folder / INDEX).unlink(), rf"the folder has no model\.safetensors and no {INDEX}"),
}


ALIKE = {
    "heads in words", "no such dtype", "a word for quantization", "a negative width", "padding outside the vocabulary",
    "a number for a class", "no list of classes", "any model", "a tokenizer", "a table of classes", "a module",
    "logits of later tokens", "tuples as outputs", "another width", "a list for the config", "a folder of weights",
    "a pickled number", "pickled tensors without names", "a map of null", "a list for a map", "numbers for files",
    "an empty map", "a path", "nothing",
}  # fmt: skip
"""Further mistakes that the same line of the product finds."""


@pytest.mark.parametrize("case", cells([*SINGLE, *SHARDED], ALIKE))
def test_what_is_wrong_with_a_model_is_one_line_and_the_same_everywhere(
    folders: Path, tmp_path: Path, case: str
) -> None:
    kind = "single" if case in SINGLE else "sharded"
    damage, message = {**SINGLE, **SHARDED}[case]
    folder = Path(shutil.copytree(folders / kind, tmp_path / "model"))
    shutil.copytree(folder, tmp_path / "outside")
    damage(folder)
    found = lines(folder)
    assert len(found) == 1, found
    assert f"policy.model_name_or_path = '{folder}': " in next(iter(found))
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), dtype=torch.float32)


def valued(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Other values in the file that has a tensor."""

    def damage(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            if name in (weights := load_file(file)):
                change(weights)
                save_file(weights, file, {"format": "pt"})

    return damage


def first_value(value: float) -> Damage:
    return valued(UP, lambda weights: weights[UP][0].fill_(value))


OWN_HEAD = valued(EMBEDDING, lambda weights: weights.update({"lm_head.weight": weights[EMBEDDING] + 1}))
VALUES: dict[str, tuple[str, Damage, str]] = {
    "NaN": ("single", first_value(math.nan), f"tensor {UP} holds NaN"),
    "infinity": ("single", first_value(-math.inf), f"tensor {UP} holds NaN or inf"),
    "NaN in a shard": ("sharded", first_value(math.nan), f"tensor {UP} holds NaN"),
    "a head of its own": ("single", OWN_HEAD, "ties (to others, but|.*weight to a tensor that has other)"),
    "NaN of torch": ("single", pickled(lambda weights: {k: v * math.nan for k, v in weights.items()}), "holds NaN"),
    "a lost tensor of torch": ("single", pickled(lambda weights: dict([*weights.items()][1:])), r"\d tensors missing"),
}


@pytest.mark.parametrize("case", cells(VALUES, {"infinity", "NaN of torch"}))
def test_wrong_values_are_told_by_the_check_as_by_a_load(folders: Path, tmp_path: Path, case: str) -> None:
    kind, damage, message = VALUES[case]
    folder = Path(shutil.copytree(folders / kind, tmp_path / "model"))
    damage(folder)
    stage = make_stage(tmp_path / "stage", "sft", recipe(SFT), folder)
    for call in (lambda: check.run(stage), lambda: load_model(str(folder), dtype=torch.float32)):
        assert re.search(message, line(call))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_nothing_is_said_of_a_model_that_is_right(folders: Path, tmp_path: Path, kind: str) -> None:
    stage = make_stage(tmp_path / "stage", "sft", recipe(SFT), folders / kind)
    assert check.run(stage).info["found"] == "Qwen3ForCausalLM, vocabulary of 259"
    whole, other = (load_model(str(folders / each), dtype=torch.float32) for each in ("single", kind))
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_a_rate_of_a_module_that_is_not_there_is_told_by_the_check(folders: Path, tmp_path: Path) -> None:
    rates = recipe(SFT, optm_lr={"global": 1e-5, "model.layer": 1e-4})
    with pytest.raises(ConfigError, match=r"train\.optm_lr: no weight is trained with the rate of 'model\.layer'"):
        check.run(make_stage(tmp_path / "stage", "sft", rates, folders / "single"))


def test_a_table_for_the_kind_of_rope_is_no_crash(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "single", tmp_path / "model"))
    config(rope_parameters={"rope_type": {"a": 1}, "rope_theta": 1e4})(folder)
    line(lambda: check.run(make_stage(tmp_path / "stage", "sft", recipe(SFT), folder)))


def test_an_adapter_in_place_of_a_model_or_beside_it_is_told_what_it_is(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="it is an adapter: name its base here, and the folder in"):
        load_config(str(tmp_path))
    shutil.copytree(folders / "single", tmp_path, dirs_exist_ok=True)
    with pytest.raises(ModelError, match=r"a model and an adapter \(adapter_config\.json\); move the adapter to a fol"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_code_in_the_folder_of_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "yes")  # transformers asks on a terminal
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Mine: pass\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    mapped = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoTokenizer": ["mine.Mine", None]}}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(mapped))
    for load, part in ((load_config, "config.json"), (load_tokenizer, "tokenizer")):
        with pytest.raises(ModelError, match=rf"its {part} needs code .* \(auto_map\), which is never run; take"):
            load(str(tmp_path))
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("names", [[], ["QWen3LMHeadModel"], *full(None)])
def test_a_config_that_names_no_class_is_that_of_its_model_type(
    folders: Path, tmp_path: Path, names: list[str] | None
) -> None:
    folder = Path(shutil.copytree(folders / "single", tmp_path / "model"))
    config(architectures=names)(folder)
    later = init_on_meta(str(folder), dtype=torch.float32, device=CPU)
    assert type(load_model(str(folder), dtype=torch.float32)).__name__ == type(later).__name__ == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is not a JSON object"),
        ("tokenizer.json", "[]", r"/tokenizer\.json is not a JSON object"),
        ("tokenizer.json", "{}", "cannot load the tokenizer: "),
        ("tokenizer.json", "[" * 100_000, r"/tokenizer\.json is not valid JSON"),
        ("tokenizer_config.json", '{"model_max_length": "x"}', r"model_max_length = 'x', which is no number of tokens"),
        ("chat_template.jinja", b"\xff\xfe", "cannot load the tokenizer: .*utf-8"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_one_line_and_that_of_the_check(
    folders: Path, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    folder = Path(shutil.copytree(folders / "single", tmp_path / "model"))
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    stage = make_stage(tmp_path / "stage", "sft", recipe(SFT), folder)
    found = {line(lambda: load_tokenizer(str(folder))), line(lambda: check.run(stage))}
    assert len(found) == 1
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(28, "No space left on device"), RuntimeError("can't allocate memory: you tried")],
    ids=["memory", "disk", "memory of torch"],
)
def test_what_the_machine_lacks_is_not_blamed_on_the_model(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, translate_load_errors("weights", "any/model"):
        raise error
    assert caught.value is error


def test_a_full_disk_is_not_blamed_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", fail)
    with pytest.raises(OSError, match="No space left on device"):
        load_processor(str(save_vlm("llava", tmp_path)))


@pytest.mark.parametrize("name", ["a" * 300, "org/" + "a" * 300, "./" + "a" * 300, "~" + "a" * 300])
def test_a_name_longer_than_a_path_can_be_is_one_line(name: str) -> None:
    assert f"policy.model_name_or_path = '{name}': " in line(lambda: load_tokenizer(name))
    assert f"policy.model_name_or_path = '{name}': " in line(lambda: load_config(name))


@pytest.mark.parametrize("kind", ["sft", *full("rl", "sample")])
def test_what_vllm_refuses_of_a_generation_config_is_told_wherever_it_generates(
    folders: Path, tmp_path: Path, kind: str
) -> None:
    folder = Path(shutil.copytree(folders / "single", tmp_path / "model"))
    written("generation_config.json", {"num_return_sequences": 3})(folder)
    asked = recipe(SFT if kind == "sft" else GRPO)
    held_out = asked.validation.copy_with(enable=True, reward_function={"exact_match": 1.0} if kind == "sft" else {})
    asked = asked.copy_with(rollout=asked.rollout.copy_with(backend="vllm"), validation=held_out)
    stage = make_stage(tmp_path / "stage", kind, asked, folder)
    assert "vLLM refuses to load num_return_sequences" in line(lambda: check.run(stage))
    following = replace(stage, config=stage.config.copy_with(model="stage:first"))
    assert check.run(following).info["found"], "the export of the stage before it has no such setting"
