"""Vision-language models as a user trains them: rows in the format of LLaVA, one rank and two, a damaged picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from cosmos_core.run.files import read_json
from cosmos_core.run.progress import read_metrics
from tests.conftest import Workspace
from tests.unit.tiny_vlms import PARTS, save_vlm

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 40), "blue": (30, 30, 220)}
RECIPE = """
[policy]
model_name_or_path = "model"
model_max_length = 64
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
epoch = 100
max_num_steps = 12
optm_lr = 5e-3
optm_warmup_steps = 0
train_batch_per_replica = 10

[train.train_policy]
type = "sft"
mini_batch = 2
dataset = { test_size = 2 }

[validation]
enable = true
freq = 6

[custom.dataset]
annotation_path = "rows/annotations.json"
media_path = "rows/media"
"""
RANKS = """
[pipeline]
name = "ranks"
threads = 1

[[pipeline.stages]]
name = "rows"
kind = "prepare"
recipe = "recipe.toml"
"""
STAGE = """
[[pipeline.stages]]
name = "NAME"
kind = "sft"
recipe = "recipe.toml"
after = ["rows"]
data = "stage:rows"
overrides = { train.max_num_steps = 3, policy.parallelism.dp_shard_size = SIZE, validation.enable = false }
"""


def write(workspace: Workspace, *, without: int = 0) -> Path:
    """A model and twelve pictures of one colour each; the last `without` rows show none."""
    model = save_vlm("llava", workspace.path / "model", PARTS)
    media = workspace.path / "rows" / "media"
    media.mkdir(parents=True)
    rows = []
    for i in range(12):
        name = sorted(COLOURS)[i % 3]
        Image.new("RGB", (20 + i, 30), COLOURS[name]).save(media / f"{i}.png")
        turns = [{"from": "human", "value": "<image>\nWhich colour?"}, {"from": "gpt", "value": name}]
        row = {"id": str(i), "image": f"{i}.png", "conversations": turns}
        if i >= 12 - without:
            turns[0]["value"] = "Say yes."
            del row["image"]
        rows.append(row)
    (workspace.path / "rows" / "annotations.json").write_text(json.dumps(rows))
    workspace.write("recipe.toml", RECIPE)
    return model


@pytest.mark.full
def test_a_recipe_in_the_format_of_llava_learns_and_publishes_a_whole_model(workspace: Workspace) -> None:
    write(workspace)
    assert "train: 10 rows" in (said := workspace.cosmos("check", "recipe.toml").stdout.replace("\n", " "))
    assert "10 images of 40 tokens" in said
    assert "model = AutoModelForImageTextToText.from_pretrained(" in workspace.cosmos("run", "recipe.toml").stdout
    by_kind = {path.name: path for path in (workspace.run / "stages").iterdir()}
    trained = next(path for path in by_kind.values() if (path / "checkpoints").is_dir())
    curve = [line for line in read_metrics(trained / "metrics.jsonl") if "loss" in line]
    assert len(curve) == 12 and curve[-1]["loss"] < 0.5 * curve[0]["loss"]
    assert curve[-1]["validation/loss"] < curve[5]["validation/loss"] < curve[0]["loss"]
    published = next(path for name, path in by_kind.items() if "export" in name)
    (export,) = (published / "safetensors").iterdir()
    processor = AutoProcessor.from_pretrained(export)
    with Image.open(workspace.path / "rows/media/0.png") as picture:
        content = [{"type": "image", "image": picture.copy()}, {"type": "text", "text": "Which colour?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=True,
    )  # fmt: skip
    logits = []
    for folder in (export, *(trained / "safetensors").iterdir()):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        logits.append(model(**inputs).logits)
    assert torch.equal(*logits)
    assert processor.tokenizer.decode(logits[0][0, -1].argmax()) == sorted(COLOURS)[0][0]
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.jinja"):
        assert (export / name).read_bytes() == (workspace.path / "model" / name).read_bytes()


@pytest.mark.full
def test_two_ranks_train_what_one_trains_when_some_rows_show_no_image(workspace: Workspace) -> None:
    """Ten rows a step, three of the twelve without an image: batches of one rank alone would not have one."""
    write(workspace, without=3)
    pipeline = RANKS + "".join(STAGE.replace("NAME", f"on{size}").replace("SIZE", str(size)) for size in (1, 2))
    workspace.write("p.toml", pipeline)
    workspace.cosmos("run", "p.toml")
    one, two = (load_file(workspace.stage(f"on{size}") / "safetensors/step_3/model.safetensors") for size in (1, 2))
    before = load_file(workspace.path / "model" / "model.safetensors")
    assert one.keys() == two.keys() == before.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-5, msg=name)
    assert any("vision_tower" in name and not torch.equal(one[name], before[name]) for name in one)


@pytest.mark.full
def test_a_row_with_a_broken_image_is_named(workspace: Workspace) -> None:
    write(workspace)
    (workspace.path / "rows/media/7.png").write_text("not found")
    done = workspace.cosmos("run", "recipe.toml", code=64)
    assert "annotations.json row 7: image" in done.stdout + done.stderr
    assert "7.png is no image" in done.stdout + done.stderr
    assert read_json(workspace.run / "run.json") is not None
