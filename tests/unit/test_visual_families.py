"""Rows with images through each family: tokens, masks, loss and gradients against the family's own processor."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model
from cosmos_core.models.open_causal_lm import open_image_reader
from cosmos_core.models.processor import ImageReader, load_processor
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.run.files import read_json
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.run.stage import Stage
from cosmos_core.train import check
from cosmos_core.train.trainer import Trainer
from tasks.kinds import all_kinds
from tests.unit.tiny_vlms import MIXED, PARTS, VLMS, picture, save_vlm
from tests.unit.trainers import NoView, likelihood, score_in, sft, trainer_of

END = 258
"""The token that closes a turn."""


def image(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


TALKS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": [image("wide.png"), text("What is it?")]},
        {"role": "assistant", "content": [text("A cat.")]},
        {"role": "user", "content": [text("And now?")]},
        {"role": "assistant", "content": [text("A dog, a dog.")]},
    ],
    [
        {"role": "user", "content": [text("Compare "), image("tall.png"), text(" and "), image("wide.png")]},
        {"role": "assistant", "content": [text("One is taller than the other.")]},
    ],
    [{"role": "user", "content": [text("Hello?")]}, {"role": "assistant", "content": [text("Hi.")]}],
    [
        {"role": "user", "content": [image("tall.png"), text("Say it.")]},
        {"role": "assistant", "content": [text("It.")]},
    ],
    [{"role": "user", "content": [text("No images.")]}, {"role": "assistant", "content": [text("None.")]}],
]
PICTURES = {"wide.png": picture(1, 64, 30), "tall.png": picture(2, 30, 64)}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stage]:
    """Stages by family, whose `data` holds `TALKS` for the family's model."""

    @cache
    def stage(name: str) -> Stage:
        folder = tmp_path_factory.mktemp(name)
        return prepared(save_vlm(name, folder / "model"), folder)

    return stage


FEW = pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == "qwen3-vl" else pytest.mark.full) for each in VLMS],
    indirect=True,
)
"""Of what no family does in its own way."""
LIKE_OTHERS = {"llava", "internvl", "qwen2.5-vl"}
"""Their images go the way of those of LLaVA-NeXT, and of Qwen3-VL; each has its own tokens."""


@pytest.fixture(params=VLMS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prepared(model: Path, folder: Path) -> Stage:
    """A stage whose `data` holds `TALKS`, tokenised."""
    rows = folder / "rows"
    rows.mkdir(parents=True)
    for name, shown in PICTURES.items():
        shown.save(rows / name)
    (rows / "train.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    recipe = Recipe.model_validate({"train": {"train_policy": {"type": "sft", "dataset": {"name": str(rows)}}}})
    (folder / "stage").mkdir()
    stage = Stage(
        path=folder / "stage", config=StageConfig(name="data", kind="prepare"), recipe=recipe, model=str(model),
        data=None, inputs={}, fingerprint="f", kind=all_kinds()["prepare"],
    )  # fmt: skip
    run(stage)
    return stage


def opened(talk: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with their images."""

    def shown(part: dict[str, str]) -> dict[str, Any]:
        return part | {"image": PICTURES[part["image"]]} if part["type"] == "image" else part

    return [turn | {"content": [shown(part) for part in turn["content"]]} for turn in talk]


def own_inputs(processor: ProcessorMixin, talk: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the processor makes of a conversation, as its documentation says."""
    return dict(processor.apply_chat_template(opened(talk), tokenize=True, return_dict=True, return_tensors="pt"))


def labels(processor: ProcessorMixin, talk: list[dict[str, Any]], ids: list[int]) -> list[int]:
    """By hand: 1 for the words of each answer and the token behind them, found from the left."""
    mask, start = [0] * len(ids), 0
    for turn in talk:
        if turn["role"] == "assistant":
            answer = [*processor.tokenizer(turn["content"][0]["text"], add_special_tokens=False)["input_ids"], END]
            start = next(i for i in range(start, len(ids)) if ids[i : i + len(answer)] == answer)
            mask[start : start + len(answer)] = [1] * len(answer)
    assert sum(mask) == sum(len(turn["content"][0]["text"]) + 1 for turn in talk if turn["role"] == "assistant")
    return mask


def samples(data: Path) -> list[Sample]:
    rows = open_sequences(data, "train")
    return [Sample(*rows[i], images=rows.images(i)) for i in range(len(rows))]


def make_rank(
    model: PreTrainedModel, processor: ProcessorMixin, folder: Path, mesh: Mesh | None = None, **train: Any
) -> Trainer:
    settings = {
        "param_dtype": "float32", "compile": False, "optm_grad_norm_clip": 0.0, "optm_lr": 1e-2,
        "optm_warmup_steps": 0, "train_policy": {"type": "sft", "mini_batch": 2}, **train,
    }  # fmt: skip
    recipe = Recipe.model_validate({"policy": {"model_max_length": 256}, "train": settings})
    own = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "float32"}[model.dtype]
    config = recipe.train.copy_with(fsdp_reduce_dtype=own)  # no recipe may ask for float64
    return trainer_of(model, config, 256, ProgressWriter(folder / "progress.json"), mesh, ImageReader(processor))


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loaded(model: str, **options: Any) -> tuple[PreTrainedModel, ProcessorMixin]:
    processor = load_processor(model)
    assert processor is not None
    return load_model(model, dtype=torch.float32, **options), processor


@pytest.mark.parametrize(
    ("settings", "train", "said"),
    [
        ({"policy": {"parallelism": {"cp_size": 2}}}, {}, "policy.parallelism.cp_size = 2: this version shards models"),
        ({}, {"enable_dp_load_balancing": True}, "enable_dp_load_balancing = true: rows with images go apart"),
        ({"distillation": {"enable": True}}, {"type": "grpo"}, "distillation.enable = true: .* not to a teacher"),
    ],
    ids=["cp", "balancing", "teacher"],
)
def test_what_rows_with_images_exclude_is_one_line(
    stages: Callable[[str], Stage], settings: dict[str, Any], train: dict[str, Any], said: str
) -> None:
    stage = stages("llava")
    asked = Recipe.model_validate({**settings, "train": {"max_num_steps": 1, "train_policy": {"type": "sft", **train}}})
    kind = all_kinds()["rl" if train.get("type") == "grpo" else stage.kind.name]
    with pytest.raises(ConfigError, match=said):
        open_image_reader(replace(stage, data=stage.path / "data", recipe=asked, kind=kind))


def test_a_check_says_that_rows_have_images(tmp_path: Path) -> None:
    assert check.run(prepared(save_vlm("llava", tmp_path / "model"), tmp_path)).info["has_images"] is True


# Mllama's processor wants a template that writes the first token.
TEMPLATES = [
    *(pytest.param(each, MIXED, id=f"{each}-mixed") for each in VLMS),
    *(
        pytest.param(each, PARTS, id=f"{each}-parts", marks=[pytest.mark.full] * (each != "llava"))
        for each in VLMS if each != "mllama"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "template"), TEMPLATES)
def test_tokens_and_masks_are_those_of_the_processor(
    family: str, template: str, stages: Callable[[str], Stage], tmp_path: Path
) -> None:
    stage = stages(family) if template == MIXED else prepared(save_vlm(family, tmp_path / "model", PARTS), tmp_path)
    processor = load_processor(stage.model)
    assert processor is not None
    rows = open_sequences(stage.path / "data", "train")
    num_image_tokens = 0
    for i, talk in enumerate(TALKS):
        ids, mask = rows[i]
        own = own_inputs(processor, talk)["input_ids"][0].tolist()
        assert ids.tolist() == own
        assert mask.tolist() == labels(processor, talk, own)
        shown = [part["image"] for turn in talk for part in turn["content"] if part["type"] == "image"]
        assert [ref.path for ref in rows.images(i)] == [str(stage.path.parent / "rows" / name) for name in shown]
        assert all(ref.content is None for ref in rows.images(i))
        bare = processor.apply_chat_template(talk, tokenize=False).replace(processor.image_token, "")
        num_image_tokens += len(own) - len(processor.tokenizer(bare)["input_ids"])
    said = read_json(stage.path / "data" / "statistics.json")["train"]
    assert said["images"] == 4 and said["image_tokens"] == num_image_tokens


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.full] * (n in LIKE_OTHERS)) for n in VLMS], indirect=True
)
def test_loss_and_gradients_are_those_of_the_models_own_forward(
    family: str, stages: Callable[[str], Stage], tmp_path: Path
) -> None:
    """All rows in batches of two, with and without images, against one row at a time with labels masked by hand."""
    stage = stages(family)
    trained, processor = loaded(stage.model)
    model = copy.deepcopy(trained.double()).train()
    rank = make_rank(trained, processor, tmp_path)
    score_in(rank, torch.float64)
    (update,) = sft().updates(samples(stage.path / "data"), NoView())
    figures = rank.update(update)
    ours = gradients(trained)
    total, num_labels = torch.zeros(()), 0
    for talk in TALKS:
        inputs = own_inputs(processor, talk)
        inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
        ids = inputs["input_ids"][0]
        mask = torch.tensor(labels(processor, talk, ids.tolist()))[1:].bool()
        logprobs = model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
        total = total - logprobs[torch.arange(len(ids) - 1), ids[1:]][mask].sum()
        num_labels += int(mask.sum())
    loss = total / num_labels
    loss.backward()
    theirs = gradients(model)
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert ours.keys() == theirs.keys()
    assert any("vision" in name or "visual" in name for name in theirs)
    for name, gradient in theirs.items():
        assert (gradient - ours[name]).abs().max() <= 1e-6 * gradient.abs().max() + 1e-13, name  # norms are in float32


@FEW
def test_recomputation_keeps_the_gradient_and_half_precision_comes_near(
    family: str, stages: Callable[[str], Stage], tmp_path: Path
) -> None:
    stage, found = stages(family), []
    for dtype, recomputes in (("float32", False), ("float32", True), ("bfloat16", False)):
        model, processor = loaded(stage.model, gradient_checkpointing=recomputes)
        rank = make_rank(model, processor, tmp_path, param_dtype=dtype)
        (update,) = sft().updates(samples(stage.path / "data"), NoView())
        found.append(rank.update(update))
    plain, again, half = found
    assert (again["loss"], again["grad_norm"]) == (plain["loss"], pytest.approx(plain["grad_norm"], rel=1e-6))
    assert half["loss"] == pytest.approx(plain["loss"], rel=5e-3) and half["loss"] != plain["loss"]


@FEW
def test_another_image_is_another_loss_and_sft_lowers_it(
    family: str, stages: Callable[[str], Stage], tmp_path: Path
) -> None:
    stage = stages(family)
    rank = make_rank(*loaded(stage.model), tmp_path)
    rows, losses = samples(stage.path / "data"), []
    changed = PICTURES["wide.png"].transpose(Image.Transpose.FLIP_TOP_BOTTOM).rotate(90)
    changed.resize(PICTURES["wide.png"].size).save(tmp_path / "other.png")
    other = replace(rows[0].images[0], path=None, content=(tmp_path / "other.png").read_bytes())
    shown = [rows[0], Sample(rows[0].input_ids, rows[0].loss_mask, images=(other,))]
    before, after = (likelihood(rank, [row], size=1)[0] for row in shown)
    assert abs(after - before) > 1e-3
    for step in range(5):
        rank.set_learning_rate(step, 5)
        (update,) = sft().updates(rows, NoView())
        losses.append(rank.update(update)["loss"])
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "frozen", "key"),
    [
        ("llava", "vision_tower", "trainable_map"),
        ("qwen2.5-vl", "visual", "freeze_pattern"),
        pytest.param("mllama", "vision_model", "freeze_pattern", marks=pytest.mark.full),
    ],
)
def test_a_frozen_tower_stays_as_it_is_and_the_rest_learns(
    name: str, frozen: str, key: str, stages: Callable[[str], Stage], tmp_path: Path
) -> None:
    stage = stages(name)
    model, processor = loaded(stage.model)
    tower = next(module for module, _ in model.named_modules() if module.endswith(frozen))
    settings: dict[str, Any] = {"freeze_pattern": [frozen]} if key == "freeze_pattern" else {key: {tower: False}}
    mark_trained_weights(model, PolicyConfig.model_validate(settings))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rank = make_rank(model, processor, tmp_path)
    rank.set_learning_rate(0, 1)
    (update,) = sft().updates(samples(stage.path / "data"), NoView())
    rank.update(update)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(tower in name for name in moved)
    assert any("projector" in name or "language_model" in name for name in moved)


def test_packing_pads_rows_with_images_and_says_so(
    stages: Callable[[str], Stage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage, found = stages("qwen2.5-vl"), []
    for packing in (False, True):
        rank = make_rank(*loaded(stage.model), tmp_path, sequence_packing=packing)
        found.append(likelihood(rank, samples(stage.path / "data"), size=2))
    assert found[0] == found[1]
    assert "train.sequence_packing: rows are padded, because some show images" in caplog.text


def test_rows_of_a_group_fill_the_batches(tmp_path: Path) -> None:
    counts = [2, 0, 1, 0, 2, 1]
    rows = [Sample(np.zeros(3, np.int64), np.zeros(3, np.uint8), images=(None,) * n) for n in counts]  # type: ignore[arg-type]
    for name, expected in (("llava", [[0, 0], [2, 1, 2, 1]]), ("mllama", [[0, 0], [1, 1], [2, 2]])):
        processor = load_processor(str(save_vlm(name, tmp_path / name)))
        assert processor is not None
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(ImageReader(processor).batching_key(row), []).append(len(row.images))
        assert [groups[number] for number in sorted(groups)] == expected
