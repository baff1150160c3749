"""Rewards whose model classes are in packages of their own: what we ask of those, with fakes of the packages.

A fake has the package's signature, and inside a tiny random vision-language model of transformers' real classes in
place of Qwen2-VL 7B; a published one has never run here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cosmos_core.errors import RewardError
from cosmos_core.rewards.dance_grpo import DanceGrpoReward
from cosmos_core.rewards.hpsv3 import Hpsv3Reward
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, load_scorer
from cosmos_core.rewards.service.request import parse_request
from cosmos_core.rewards.service.self_test import _make_test_request
from cosmos_core.rewards.service.worker import make_reward_inputs
from tests.unit.tiny_vlms import picture, save_vlm

MODEL = """
import torch
import transformers as hf


class Model:
    def __init__(self, folder, numbers):
        self.model = hf.AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.images = hf.AutoImageProcessor.from_pretrained(folder)
        self.tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        self.head = torch.nn.Linear(self.model.config.text_config.hidden_size, numbers)

    def __call__(self, prompt, images):
        inputs, shown = self.images(images=images, return_tensors="pt"), ""
        for grid in inputs["image_grid_thw"]:
            count = int(grid.prod()) // self.model.config.vision_config.spatial_merge_size**2
            shown += "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>"
        ids = self.tokenizer(shown + prompt, return_tensors="pt")["input_ids"]
        kinds = (ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
        with torch.no_grad():
            read = self.model.model(input_ids=ids, mm_token_type_ids=kinds, **inputs).last_hidden_state
        return self.head(read[:, -1])
"""
HPSV3 = """
from pathlib import Path

import torch
from PIL import Image

from tiny_judge import Model


class HPSv3RewardInferencer:
    def __init__(self, config_path=None, checkpoint_path=None, device="cuda", differentiable=False):
        assert device == "cpu" and not differentiable
        self.model = Model(Path(checkpoint_path).parent, 2)

    def reward(self, prompts, image_paths):
        assert all(isinstance(image, Image.Image) and image.mode == "RGB" for image in image_paths)
        return torch.cat([self.model(p, [image]) for p, image in zip(prompts, image_paths, strict=True)])
"""
VIDEOALIGN = """
import os

import av
import torch

from tiny_judge import Model


class VideoVLMRewardInference:
    def __init__(self, load_from_pretrained, load_from_pretrained_step=-1, device="cuda", dtype=torch.bfloat16):
        assert os.path.isdir("./Qwen2-VL-2B-Instruct") and os.path.isabs(load_from_pretrained)
        assert (device, dtype) == ("cpu", torch.float32)
        self.model = Model(load_from_pretrained, 3)

    def reward(self, video_paths, prompts, fps=None, num_frames=None, max_pixels=None, use_norm=True):
        assert use_norm
        found = []
        for path, prompt in zip(video_paths, prompts, strict=True):
            with av.open(path) as container:
                frames = [frame.to_image() for frame in container.decode(video=0)]
            vq, mq, ta = self.model(prompt, frames)[0].tolist()
            found.append({"VQ": vq, "MQ": mq, "TA": ta, "Overall": vq + mq + ta})
        return found
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "packages"
    inner = folder / "fastvideo" / "models" / "videoalign"
    inner.mkdir(parents=True)
    (folder / "hpsv3").mkdir()
    (folder / "tiny_judge.py").write_text(MODEL)
    (folder / "hpsv3" / "__init__.py").write_text(HPSV3)
    (inner / "inference.py").write_text(VIDEOALIGN)
    for each in (inner, inner.parent, inner.parent.parent):
        (each / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in {"hpsv3", "fastvideo", "tiny_judge"}]:
        del sys.modules[name]


def test_a_metric_with_the_name_of_its_reward_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def accuracy(completion):\n    return 0.5, {"accuracy": 1.0, "form": 0.25}\n')
    scorer = load_scorer("accuracy", f"{tmp_path}/mine.py:accuracy", RewardModelSettings())
    expected = {"accuracy": [0.5], "accuracy/accuracy": [1.0], "form": [0.25]}
    assert scorer.score([RewardInput("x")]) == expected


def test_a_service_takes_the_classes_that_a_recipe_takes(tmp_path: Path) -> None:
    """As of ms-swift, which are made without arguments and called, unlike a class with `score`."""
    (tmp_path / "mine.py").write_text(
        "class Length:\n    def __call__(self, completions, **columns): return [float(len(c)) for c in completions]\n"
        "class Batch:\n    def __init__(self, settings): self.dtype = settings.dtype\n"
        "    def score(self, items): return {'mine': [self.dtype for _ in items]}\n"
    )
    items = [RewardInput("p", to_be_evaluated=text) for text in ("a", "four")]
    for name, expected in (("Length", [1.0, 4.0]), ("Batch", ["float32"] * 2)):
        scorer = load_scorer("mine", f"{tmp_path}/mine.py:{name}", RewardModelSettings())
        assert scorer.score(items) == {"mine": expected}


def test_the_self_test_of_a_service_gives_a_function_all_facts_of_a_completion(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def facts(completion, reference, num_tokens, finish_reason, turns):\n"
        "    flags = completion == reference, num_tokens > 99, finish_reason == 'stop', len(turns)\n"
        "    return sum(2**i * flag for i, flag in enumerate(flags))\n"
    )
    request = parse_request("self-test", _make_test_request("facts"), {"facts"})
    scorer = load_scorer("facts", f"{tmp_path}/mine.py:facts", RewardModelSettings())
    assert scorer.score(make_reward_inputs(request.fields | {"media": request.media_type}, request.array)) == {
        "facts": [13.0, 10.0]
    }


def test_hpsv3_gives_the_mean_of_each_image_and_the_spread_where_asked(tmp_path: Path, packages: Path) -> None:
    folder = save_vlm("qwen2.5-vl", tmp_path / "hpsv3")
    (folder / "HPSv3.safetensors").write_bytes(b"")
    items = [RewardInput(f"picture {i}", picture(i)) for i in range(3)]
    settings = RewardModelSettings(download_path=str(tmp_path), device="cuda")
    columns = Hpsv3Reward(settings).score(items)
    assert list(columns) == ["hpsv3"], "as Cosmos-RL's service says it"
    from tiny_judge import Model

    expected = [Model(folder, 2)(item.prompt, [item.media])[0].tolist() for item in items]
    assert columns["hpsv3"] == pytest.approx([mean for mean, _ in expected], abs=1e-6)
    both = Hpsv3Reward(RewardModelSettings(download_path=str(tmp_path), options={"sigma": True})).score(items)
    assert both["hpsv3_sigma"] == pytest.approx([spread for _, spread in expected], abs=1e-6)
    assert len(set(columns["hpsv3"])) == 3


def test_dance_grpo_gives_quality_motion_fit_and_their_sum(tmp_path: Path, packages: Path) -> None:
    folder = save_vlm("qwen2.5-vl", tmp_path / "VideoReward")
    (tmp_path / "Qwen2-VL-2B-Instruct").mkdir()
    videos = [np.stack([np.asarray(picture(10 * i + j, 64, 48)) for j in range(3)]) for i in range(2)]
    reward = DanceGrpoReward(RewardModelSettings(str(folder), download_path=str(tmp_path)))
    columns = reward.score([RewardInput("a cat runs", video, info={"video_fps": 8.0}) for video in videos])
    assert list(columns) == ["vq_reward", "mq_reward", "ta_reward", "overall_reward"]
    for vq, mq, ta, overall in zip(*columns.values(), strict=True):
        assert overall == pytest.approx(vq + mq + ta)
    assert len(set(columns["vq_reward"])) == 2
    with pytest.raises(RewardError, match=r"cannot load 'absent': no such folder; download KwaiVGI/VideoReward"):
        DanceGrpoReward(RewardModelSettings("absent"))
