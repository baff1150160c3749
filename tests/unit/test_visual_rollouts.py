"""Prompts and pairs that show images: prepared, completed by the engine on the trainer's module, and trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_core.algorithms.grpo import make_sample
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data import prepare
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.prepared import has_images
from cosmos_core.errors import DataError
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.processor import ImageReader, load_processor
from cosmos_core.rollout.base import EngineSettings, generate
from cosmos_core.rollout.registry import make_engine
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.train.setup import train
from cosmos_core.types import Sampling
from tests.unit.test_train import make_stage
from tests.unit.tiny_vlms import picture, save_vlm
from tests.unit.trainers import curve, logprobs, train_until, trainer_of

ALIKE = {"llava", "llava-next", "qwen2.5-vl", "internvl", "gemma3-vlm"}
"""Families whose prompts and images go through the engine as those of another one."""
FAMILIES = [
    pytest.param(each, marks=[pytest.mark.full] * (each in ALIKE))
    for each in ("llava", "llava-next", "qwen2.5-vl", "qwen3-vl", "internvl", "gemma3-vlm", "mllama")
]
REWARD = """
def bright(completion, reference):
    return len(set(completion)) / 10 + (reference == "light")
"""


def recipe(policy: dict[str, Any], folder: Path, **train: Any) -> Recipe:
    values: dict[str, Any] = {
        "policy": {"model_max_length": 120, "model_gradient_checkpointing": False},
        "train": {
            "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "optm_warmup_steps": 1, "epoch": 4,
            "train_batch_per_replica": 8, "max_num_steps": 2, "ckpt": {"enable_checkpoint": True, "save_freq": 1},
            "train_policy": {"mini_batch": 4, "dataset": {"name": str(folder / "rows.jsonl")}, **policy}, **train,
        },
        "rollout": {"backend": "hf", "n_generation": 4, "batch_size": 2, "max_response_length": 6},
    }  # fmt: skip
    return Recipe.model_validate(values)


GRPO = {"type": "grpo", "reward_function": "reward.py:bright", "kl_beta": 0.01}
DPO = {"type": "sft", "trainer_type": "dpo"}


def write(folder: Path) -> Path:
    """Rows that are prompts and pairs at once: six with an image, and two without."""
    (folder / "reward.py").write_text(REWARD)
    rows = []
    for i in range(8):
        row = {"prompt": f"Is it light? {i}", "answer": "light", "chosen": f"Yes {i}.", "rejected": "No."}
        if i < 6:
            picture(i, 20 + 10 * (i % 2), 30).save(folder / f"{i}.png")
            row["image"] = f"{i}.png"
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path)


def prepared(folder: Path, model: Path, policy: dict[str, Any]) -> Path:
    prepare.run(make_stage(folder / f"{policy['type']}-rows", "prepare", recipe(policy, folder), model))
    return folder / f"{policy['type']}-rows" / "data"


def test_prompts_have_the_tokens_of_the_processor_and_keep_their_images(folder: Path) -> None:
    model = save_vlm("llava", folder / "model")
    data = prepared(folder, model, GRPO)
    prompts, processor = open_prompts(data, "train"), load_processor(str(model))
    assert processor is not None and has_images(data)
    for prompt in (prompts[1], prompts[7]):
        parts = [{"type": "image"}] * len(prompt.images) + [{"type": "text", "text": f"Is it light? {prompt.id}"}]
        text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        images = [Image.open(ref.path) for ref in prompt.images if ref.path]
        expected = processor(text=text, images=images or None, add_special_tokens=False)["input_ids"][0]
        assert (prompt.text, list(prompt.token_ids)) == (text, list(expected))
    assert [len(prompt.images) for prompt in prompts] == [1] * 6 + [0] * 2
    assert prompts[1].images[0].path == str(folder / "1.png")


def test_pairs_show_the_images_of_their_prompt_and_learn_their_responses_alone(folder: Path) -> None:
    model = save_vlm("llava", folder / "model")
    pairs, tokenizer = open_pairs(prepared(folder, model, DPO), "train"), load_tokenizer(str(model))
    assert list(pairs.chosen.num_images) == [1] * 6 + [0] * 2
    for i in (1, 7):
        for sequences, words in ((pairs.chosen, f"Yes {i}."), (pairs.rejected, "No.")):
            ids, mask = sequences[i]
            assert tokenizer.decode(ids[mask == 1]) == f"{words}<|im_end|>"
            assert sequences.images(i) == pairs.chosen.images(i)
    row = {"chosen": [{"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": "?"}]},
                      {"role": "assistant", "content": "A."}], "prompt": None}  # fmt: skip
    other = [{**row["chosen"][0], "content": [{"type": "image", "image": "1.png"}]}, *row["chosen"][1:]]  # type: ignore[index]
    (folder / "rows.jsonl").write_text(json.dumps({**row, "rejected": other}) + "\n")
    with pytest.raises(DataError):
        prepared(folder, model, DPO)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_completions_of_prompts_with_images(family: str, folder: Path) -> None:
    path = save_vlm(family, folder / "model")
    prompts = list(open_prompts(prepared(folder, path, GRPO), "train"))[:7]
    model, tokenizer, processor = (
        load_model(str(path), dtype=torch.float32),
        load_tokenizer(str(path)),
        load_processor(str(path)),
    )
    for name, parameter in model.named_parameters():
        if name.endswith("_gate"):  # images have no effect on the text until the gates of cross-attention open
            parameter.data.fill_(1.0)
    assert processor is not None
    vision = ImageReader(processor)
    settings = EngineSettings(
        model, tokenizer, str(path), RolloutConfig(backend="hf"), 200, torch.float32, vision=vision
    )
    engine = make_engine(settings)
    sampling = Sampling(max_tokens=8, num_completions=3, seed=1)
    groups = generate(engine, prompts, sampling, 0)
    assert [group.prompt for group in groups] == prompts
    config = TrainConfig.model_validate({"param_dtype": "float32", "compile": False})
    trainer = trainer_of(model, config, int(tokenizer.pad_token_id), ProgressWriter(folder / "p.json"), vision=vision)
    samples = [make_sample(group.prompt, made, 1.0, 1.0) for group in groups for made in group.completions]
    for sample, row in zip(samples, logprobs(trainer, samples), strict=True):
        learned = np.flatnonzero(sample.loss_mask[1:])
        assert sample.rollout_logprobs is not None
        assert np.abs(row.numpy()[learned] - sample.rollout_logprobs).max() < 1e-4
    alone = generate(engine, prompts[1:2], sampling, 0)
    assert [made.token_ids for made in alone[0].completions] == [made.token_ids for made in groups[1].completions]
    if len(prompts[1].token_ids) == len(prompts[3].token_ids):
        other = replace(prompts[1], images=prompts[3].images)
        [blind] = generate(engine, [other], sampling, 0)
        assert [made.logprobs for made in blind.completions] != [made.logprobs for made in groups[1].completions]


@pytest.mark.parametrize(
    ("kind", "policy"), [("rl", GRPO), pytest.param("sft", DPO, marks=pytest.mark.full)], ids=["grpo", "dpo"]
)
def test_stopped_and_resumed_ends_with_the_same_bits_and_the_same_curve(
    kind: str, policy: dict[str, Any], folder: Path
) -> None:
    model = save_vlm("llava", folder / "model")
    data, config = prepared(folder, model, policy), recipe(policy, folder)
    whole = make_stage(folder / "whole", kind, config, model, data)
    expected = train(whole).adapter.model.state_dict()
    train_until(make_stage(folder / "cut", kind, config, model, data), 1)
    resumed = make_stage(folder / "cut", kind, config, model, data)
    found = train(resumed).adapter.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert curve(resumed) == curve(whole)
    start = load_model(str(model), dtype=torch.float32).state_dict()
    tower = next(name for name in start if "vision_tower" in name and name.endswith("q_proj.weight"))
    assert not torch.equal(start[tower], expected[tower]), "images have a gradient"
    for line in read_metrics(whole.path / "metrics.jsonl"):
        assert line.get("rollout/logprob_difference_max", 0) < 1e-4
