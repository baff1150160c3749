"""Real model classes, tiny and random, through the one path: loaded, scored, packed, trained, exported.

Each family is compared with transformers itself. In a vision-language model the rows are text, the tower is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.batch import collate_rows
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ModelError
from cosmos_core.models import verify_export
from cosmos_core.models.compilation import compile_blocks
from cosmos_core.models.export import export_model
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.scorer import LogprobScorer
from cosmos_core.run.progress import ProgressWriter
from tests.unit.tiny_families import FAMILIES, WINDOW, save_family
from tests.unit.trainers import NoView, sft, trainer_of

OWN_ATTENTION = {"gemma2": "eager", "gpt-oss": "eager"}
"""Soft caps and sinks, which sdpa does not know."""
NOT_PACKED = {
    "llama4": "layers of kind chunked_attention mix what is packed",
    "qwen3-next": "layers of kind linear_attention mix what is packed",
}
WHOLE_LOGITS = {"llama4"}
"""Where the scorer does not find the body below the head."""
ALIKE = {
    "gemma3", "gemma3-vlm", "phi4", "qwen3", "llama3", "mixtral", "llava-next", "qwen3-vl", "internvl", "olmo2",
    "cohere2", "starcoder2",
}  # fmt: skip
"""Families whose layers and weights have the form of those of another one."""


def one_of_a_kind(*names: str) -> pytest.MarkDecorator:
    """Parametrise a test over all families, of which those that are not named are `full`."""
    families = [pytest.param(each, marks=() if each in names else pytest.mark.full) for each in FAMILIES]
    return pytest.mark.parametrize("family", families, indirect=True)


EACH_FORM = one_of_a_kind(*FAMILIES.keys() - ALIKE)
IMAGES_ALONE = ("vision", "visual", "multi_modal_projector", "image_newline")
"""Parts of names of weights that text does not reach."""
LENGTHS = (20, 13, 3)
PAD = 256


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return save_family(family, tmp_path / "base")


def rows() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length,), generator=generator).numpy() for length in LENGTHS]


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32, **options)


def separate_logprobs(model: PreTrainedModel) -> Tensor:
    """Of tokens 1.. of each row, one row at a time, by the model's own forward pass."""
    return torch.cat([
        model(input_ids=torch.tensor(row)[None], use_cache=False).logits[0, :-1].log_softmax(-1)[
            range(len(row) - 1), row[1:]
        ]
        for row in rows()
    ])  # fmt: skip


def gradients(model: PreTrainedModel, value: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    """Largest difference as a share of the largest entry of each tensor; None where none is there."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        other = ours[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert (gradient - other).abs().max() <= 1e-5 * gradient.abs().max(), name


def scored_logprobs(scorer: LogprobScorer, *, packed: bool) -> Tensor:
    batch = collate_rows(rows(), PAD, is_packed=packed)
    chosen = [start + torch.arange(length - 1) for start, length in zip(batch.row_start_indices, LENGTHS, strict=True)]
    logprobs: Tensor = scorer(batch.inputs, torch.cat(chosen))["logprobs"]
    return logprobs


def train(model: PreTrainedModel, folder: Path, steps: int, **settings: Any) -> Iterator[float]:
    """SFT on the same rows again and again; the loss of each step."""
    recipe = Recipe.model_validate({
        "policy": {"model_max_length": 32},
        "train": {
            "param_dtype": "float32", "compile": False, "optm_lr": 1e-2, "optm_warmup_steps": 0,
            "optm_grad_norm_clip": 0.0, "train_policy": {"type": "sft", "mini_batch": 2}, **settings,
        },
    })  # fmt: skip
    rank = trainer_of(model, recipe.train, PAD, ProgressWriter(folder / "progress.json"))
    samples = [Sample(row, np.ones(len(row), np.uint8)) for row in rows()]
    for step in range(steps):
        rank.set_learning_rate(step, steps)
        (update,) = sft().updates(samples, NoView())
        yield rank.update(update)["loss"]


@EACH_FORM
def test_logits_are_those_of_transformers(family: str, folder: Path) -> None:
    model, attention = load(folder), OWN_ATTENTION.get(family, "sdpa")
    theirs = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    ids = torch.randint(256, (2, 3 * WINDOW), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits, expected = (each(input_ids=ids, use_cache=False).logits for each in (model, theirs))
        theirs.set_attn_implementation("eager")
        written_out = theirs(input_ids=ids, use_cache=False).logits
    assert type(model) is type(FAMILIES[family]())
    assert logits.std() > 0.3, "weights large enough to tell models apart"
    assert torch.equal(logits, expected)
    torch.testing.assert_close(logits, written_out, rtol=0, atol=1e-5)


@EACH_FORM
def test_padded_and_packed_rows_are_separate_rows_or_packing_is_refused_with_the_reason(
    family: str, folder: Path
) -> None:
    model = load(folder)
    separate, scorer = separate_logprobs(model), LogprobScorer(model)
    theirs = gradients(model, separate.sum())
    with torch.no_grad():
        torch.testing.assert_close(scored_logprobs(scorer, packed=False), separate, rtol=0, atol=1e-5)
        assert scorer._are_logits_plain_head_output is (family not in WHOLE_LOGITS)
        assert enable_packing(model) == NOT_PACKED.get(family, "")
        torch.testing.assert_close(scored_logprobs(scorer, packed=False), separate, rtol=0, atol=1e-5)
    if family in NOT_PACKED:
        return
    packed = scored_logprobs(scorer, packed=True)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, packed.sum()), theirs)


@pytest.mark.parametrize(
    "name", ["gpt-oss", "gemma3-vlm", *(pytest.param(each, marks=pytest.mark.full) for each in ("gemma2", "mistral"))]
)
def test_packing_leaves_generation_as_it_was(name: str, tmp_path: Path) -> None:
    left = torch.tensor([[PAD] * 5 + [5, 6, 7], list(range(10, 18))])
    settings: dict[str, Any] = {"max_new_tokens": WINDOW, "do_sample": False, "eos_token_id": None}
    model: Any = load(save_family(name, tmp_path))
    before = model.generate(left, attention_mask=(left != PAD).long(), **settings)
    assert enable_packing(model) == ""
    assert torch.equal(model.generate(left, attention_mask=(left != PAD).long(), **settings), before)


@one_of_a_kind("gemma2", "qwen3-moe", "mllama", "qwen3-next")
def test_sft_lowers_the_loss_and_recomputation_keeps_the_gradient(family: str, folder: Path, tmp_path: Path) -> None:
    found, losses = [], []
    for checkpointing, steps in ((True, 1), (False, 5)):
        model = load(folder, gradient_checkpointing=checkpointing)
        training = train(model, tmp_path, steps)
        losses.append(next(training))
        assert model.is_gradient_checkpointing is checkpointing
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same_gradients(*found)
    for name in (name for name, gradient in found[1].items() if gradient is None):
        is_cross_attention = family == "mllama" and ".layers.1." in name
        assert is_cross_attention or any(part in name for part in IMAGES_ALONE), name
    losses += training
    assert losses[-1] < 0.65 * losses[0], losses


class ThisProcess:
    """A pool whose one process is this one."""

    def __enter__(self) -> ThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stop(self) -> None: ...

    def schedule(self, function: Callable[..., Any], args: Any, timeout: float) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done


@one_of_a_kind("qwen2.5", "gpt-oss", "qwen3-moe", "llava")
def test_a_trained_export_is_proven(family: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fresh interpreter takes seconds; two families have it below.
    monkeypatch.setattr(verify_export, "open_interpreter_pool", ThisProcess)
    model, tokenizer = load(folder), load_tokenizer(str(folder))
    next(train(model, tmp_path, 1, sequence_packing=True))
    for dtype in (None, torch.bfloat16) if family in {"mistral", "qwen2.5", "llava"} else (None,):
        target = tmp_path / str(dtype)
        export_model(model, tokenizer, target, dtype=dtype)
        checks = verify_export.verify_export(model, target, dtype=dtype, tokenizer=tokenizer)
        assert checks == ["keys", "bytes", "reload: bit-identical", "tokenizer"]
    num_layers = model.config.get_text_config().num_hidden_layers
    found = verify_export.verify_export(model, target, dtype=dtype, memory_bytes=0)
    assert found[2:] == [f"reload (first 1 of {num_layers} layers): bit-identical"]
    ids = torch.tensor(rows()[0])[None]
    reloaded = load(tmp_path / "None")
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.usefixtures("own_interpreter")
@pytest.mark.parametrize("name", ["llava", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_fresh_interpreter_proves_what_was_trained_on_packed_rows(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path / "base")
    model, tokenizer = load(folder), load_tokenizer(str(folder))
    next(train(model, tmp_path, 1, sequence_packing=True))
    export_model(model, tokenizer, tmp_path / "out", dtype=None)
    checks = verify_export.verify_export(model, tmp_path / "out", dtype=None, tokenizer=tokenizer)
    assert checks == ["keys", "bytes", "reload: bit-identical", "tokenizer"]


@pytest.mark.parametrize(
    "name",
    ["llava", "qwen3-moe", *(pytest.param(each, marks=pytest.mark.full) for each in ("gemma3-vlm", "qwen2.5-vl"))],
)
def test_an_export_has_the_names_of_the_checkpoint_that_it_came_from(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    # As on the Hub, where towers have a level more than in the classes of transformers 5.
    hub = {key.replace("vision_tower.", "vision_tower.vision_model."): tensor for key, tensor in weights.items()}
    save_file(hub, folder / "model.safetensors", metadata={"format": "pt"})
    export_model(load(folder), load_tokenizer(str(folder)), tmp_path / "out", dtype=None)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == hub.keys()
    assert all(torch.equal(exported[key], hub[key]) for key in hub)


def test_a_tekken_file_beside_the_tokenizer_changes_no_token(tmp_path: Path) -> None:
    # transformers takes it first if mistral_common is there, which comes with vLLM.
    folder = save_family("mistral", tmp_path)
    before = load_tokenizer(str(folder))
    (folder / "tekken.json").write_text("{}")
    found = load_tokenizer(str(folder))
    assert (
        type(found) is type(before) and found("<|im_start|> hi")["input_ids"] == before("<|im_start|> hi")["input_ids"]
    )


def test_packing_leaves_the_vision_tower_alone(tmp_path: Path) -> None:
    model = load(save_family("qwen2.5-vl", tmp_path))
    assert enable_packing(model) == ""
    assert model.config.text_config._attn_implementation == "packed_sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["qwen2.5", pytest.param("qwen3-vl", marks=pytest.mark.full)])
def test_tied_weights_are_one_tensor_and_two_different_ones_are_refused(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path)
    file = folder / "model.safetensors"
    model, weights = load(folder), load_file(file)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in weights
    (embedding,) = (weights[key] for key in weights if key.endswith("embed_tokens.weight"))
    save_file({**weights, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    model = load(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    save_file({**weights, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors that config\.json ties to others.*: lm_head\.weight;"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["llama3", "gemma3", *(pytest.param(each, marks=pytest.mark.full) for each in ("phi3", "qwen3-vl"))]
)
def test_rotary_buffers_are_those_of_the_config_and_stay_in_float32(name: str, tmp_path: Path) -> None:
    fresh = dict(FAMILIES[name]().named_buffers())
    loaded = dict(load_model(str(save_family(name, tmp_path)), dtype=torch.bfloat16).named_buffers())
    rotary = [key for key in fresh if "inv_freq" in key]
    assert rotary and fresh.keys() == loaded.keys()
    for key in rotary:
        assert loaded[key].dtype == torch.float32
        assert torch.equal(loaded[key], fresh[key]), key


DAMAGE: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "dropped": ("mistral", "model.layers.1.mlp.up_proj.weight", lambda _: None, "missing from the files"),
    "dropped expert": ("qwen3-moe", "model.layers.0.mlp.experts.3.up_proj.weight", lambda _: None, "experts of"),
    "extra in a tower": ("qwen2.5-vl", "visual.blocks.9.norm1.weight", lambda _: torch.ones(4), "in the files but not"),
    "wrong shape": ("gemma2", "model.embed_tokens.weight", lambda t: t[:-1].clone(), "of another shape"),
    "wrong shape of an expert": (
        "qwen3-moe", "model.layers.0.mlp.experts.0.up_proj.weight", lambda t: t[:, 1:].clone(), "experts of a layer"
    ),
    "NaN in an expert": (
        "qwen3-moe", "model.layers.1.mlp.experts.2.down_proj.weight", lambda t: t * math.nan, "holds NaN or infinity"
    ),
    "infinity": ("llama4", "language_model.model.norm.weight", lambda t: t / 0, "holds NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_tensor_is_named(damage: str, tmp_path: Path) -> None:
    name, key, change, message = DAMAGE[damage]
    folder = save_family(name, tmp_path)
    weights = load_file(folder / "model.safetensors")
    assert (key in weights) is not damage.startswith("extra")
    changed = change(weights.pop(key, torch.empty(0)))
    if changed is not None:
        weights[key] = changed
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert (key in str(caught.value) or "expert" in damage) and "\n" not in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(("name", "packed"), [("qwen3", False), ("gemma3-vlm", True)])
def test_compiled_blocks_give_the_same_logprobs_and_gradients(name: str, packed: bool, tmp_path: Path) -> None:
    found = []
    for is_compiled in (False, True):
        model = load(save_family(name, tmp_path)).train()
        if is_compiled:
            compile_blocks(model)
        assert not packed or enable_packing(model) == ""
        logprobs = scored_logprobs(LogprobScorer(model), packed=packed)
        found.append((logprobs.detach(), gradients(model, logprobs.sum())))
    (plain, theirs), (compiled, ours) = found
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)
    assert_same_gradients(ours, theirs)
