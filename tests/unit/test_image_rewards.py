"""Rewards of images and videos: what each computes, with tiny random models of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file

from cosmos_core.errors import RewardError
from cosmos_core.rewards import cosmos_reason1, dance_grpo, gen_eval
from cosmos_core.rewards.aesthetic import AestheticReward
from cosmos_core.rewards.base import load_reward
from cosmos_core.rewards.clip_score import ClipScoreReward, clip_score
from cosmos_core.rewards.cosmos_reason1 import CosmosReason1Reward
from cosmos_core.rewards.gen_eval import Detection, GenEvalReward
from cosmos_core.rewards.hpsv2 import Hpsv2Reward
from cosmos_core.rewards.image_reward import ImageRewardReward
from cosmos_core.rewards.jpeg_size import jpeg_size
from cosmos_core.rewards.ocr import ocr, text_similarity
from cosmos_core.rewards.pickscore import PickscoreReward
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, load_scorer, open_model
from cosmos_core.rewards.runner import RewardRunner
from cosmos_core.rewards.service.self_test import make_word_image
from cosmos_core.rewards.unified_reward import UnifiedRewardReward
from tests.unit.chat_server import chat_server
from tests.unit.tiny_vlms import picture, save_vlm


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = hf.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    torch.manual_seed(0)
    model = hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**tower, **ids, "vocab_size": len(words), "projection_dim": 8},
            vision_config={**tower, "image_size": 32, "patch_size": 8, "projection_dim": 8},
            projection_dim=8,
        )
    )
    model.save_pretrained(folder)
    images = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    hf.CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def items(count: int = 3) -> list[RewardInput]:
    return [RewardInput(f"{i} picture", picture(i)) for i in range(count)]


def cosines(folder: Path, of: list[RewardInput]) -> list[float]:
    """The same by the model's own forward."""
    model, processor = hf.CLIPModel.from_pretrained(folder).eval(), hf.CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=[i.prompt for i in of], images=[i.media for i in of], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits_per_text.diagonal()
    return (logits / model.logit_scale.exp()).tolist()


def test_clip_rewards_are_the_cosine_of_text_and_image_each_in_its_scale(clip: Path) -> None:
    settings, expected = RewardModelSettings(str(clip)), cosines(clip, items())
    scale = float(hf.CLIPModel.from_pretrained(clip).logit_scale.detach().exp())
    assert PickscoreReward(settings).score(items()) == {
        "pickscore": pytest.approx([scale * c / 26 for c in expected], abs=1e-5)
    }
    assert Hpsv2Reward(settings).score(items()) == {"hpsv2": pytest.approx(expected, abs=1e-6)}
    found = ClipScoreReward(settings).score(items())["clip_score"]
    assert found == pytest.approx([2.5 * max(c, 0) for c in expected], abs=1e-6)
    custom = {"clip_score": {"model_path": str(clip)}}
    alone = [clip_score("", "", prompt=item.prompt, media=item.media, custom=custom)[0] for item in items()]
    assert alone == pytest.approx(found, abs=1e-6)


def test_aesthetic_is_linear_layers_over_the_image_embedding(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)).eval()
    save_file({f"layers.{name}": value for name, value in layers.state_dict().items()}, tmp_path / "head.safetensors")
    reward = AestheticReward(RewardModelSettings(str(clip), options={"predictor": str(tmp_path / "head.safetensors")}))
    embedded = reward._clip_model.embed_images([item.media for item in items()])
    with torch.no_grad():
        expected = layers(embedded)[:, 0].tolist()
    assert reward.score(items())["aesthetic"] == pytest.approx(expected, abs=1e-6)


def test_jpeg_size_is_less_the_more_an_image_holds() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    plain = Image.new("RGB", (64, 64))
    assert jpeg_size("", "", media=noise) < 5 * jpeg_size("", "", media=plain) < 0
    video = np.stack([np.asarray(noise), np.asarray(plain)])
    mean = (jpeg_size("", "", media=noise) + jpeg_size("", "", media=plain)) / 2
    assert jpeg_size("", "", media=video) == pytest.approx(mean)


@pytest.mark.parametrize("settings", [{"quality": 10}, {"options": {"quality": 10}}])
def test_options_of_a_packaged_reward_may_be_in_a_table_of_their_own(settings: dict[str, Any]) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    [score] = open_model("jpeg_size", {"jpeg_size": settings}).score([RewardInput(media=noise)])["jpeg_size"]
    assert 0 > score > jpeg_size("", "", media=noise) / 2
    assert jpeg_size("", "", media=noise, custom={"jpeg_size": settings}) == score
    assert "custom" in load_reward("jpeg_size").binding.declared_parameters


@pytest.mark.parametrize(
    ("read", "wanted", "expected"),
    [("HELLO", "hello", 1.0), ("say hel lo!", "Hello", 1.0), ("hallo", "hello", 0.8), ("", "hello", 0.0),
     ("zzzzzzzzzz", "hello", 0.0), ("new york", "New York", 1.0), ("newyerk", "New York", 1 - 1 / 8)],
)  # fmt: skip
def test_ocr_counts_edits_as_the_original_does(read: str, wanted: str, expected: float) -> None:
    assert text_similarity(read, wanted) == pytest.approx(expected)


def test_ocr_reads_what_an_image_shows() -> None:
    pytest.importorskip("rapidocr_onnxruntime", reason="the extra ocr is not installed")
    image = make_word_image("HELLO")
    assert ocr("", "", prompt='a card that says "Hello"', media=image) == 1.0
    assert ocr("", "HELP", prompt="a card", media=image) < 1.0
    assert ocr("", "", prompt='a card that says "Hello"', media=Image.new("RGB", (64, 64))) == 0.0
    with pytest.raises(ValueError, match="no text in quotes"):
        ocr("", "", prompt="a card", media=image)


def found(*box: float) -> Detection:
    mask = np.zeros((100, 100), bool)
    x0, y0, x1, y1 = map(int, box)
    mask[y0:y1, x0:x1] = True
    return Detection(box, mask, 0.9)  # type: ignore[arg-type]


LEFT, RIGHT, MIDDLE = found(0, 40, 20, 60), found(80, 40, 100, 60), found(45, 45, 55, 55)


def test_gen_eval_judges_numbers_colours_and_positions() -> None:
    objects = {"dog": [LEFT, RIGHT], "cat": [MIDDLE]}
    colors = {"dog": ["red", "blue"], "cat": ["black"]}
    judge, strictly = gen_eval.has_requested_objects, gen_eval.score_object_requests

    def one(name: str, count: int = 1, **asked: Any) -> dict[str, Any]:
        return {"class": name, "count": count, **asked}

    assert judge([one("dog")], [], objects, colors) and strictly([one("dog")], objects, colors) == (0.0, False)
    assert strictly([one("dog", 2)], objects, colors) == (1.0, True)
    assert not judge([one("dog", 3)], [], objects, colors)
    assert strictly([one("dog", 4)], objects, colors) == (0.5, False)
    assert judge([one("cat", color="black")], [], objects, colors)
    assert strictly([one("cat", color="white")], objects, colors) == (0.5, False)
    assert not judge([one("dog", 2, color="red")], [], objects, colors)
    assert not judge([one("cat")], [one("dog", 2)], objects, colors)
    beside = {"dog": [LEFT], "cat": [MIDDLE]}
    assert judge([one("cat"), one("dog", position=["left of", 0])], [], beside, colors)
    assert strictly([one("cat"), one("dog", position=["right of", 0])], beside, colors) == (2 / 3, False)
    assert gen_eval.find_spatial_relations(LEFT, MIDDLE) == {"left of"}
    assert gen_eval.find_spatial_relations(RIGHT, MIDDLE) == {"right of"}
    assert gen_eval.find_spatial_relations(found(45, 0, 55, 10), MIDDLE) == {"above"}
    assert gen_eval.find_spatial_relations(MIDDLE, found(44, 44, 56, 56)) == set()


def test_gen_eval_takes_a_key_without_a_value_for_a_missing_one() -> None:
    """Entries of a column of parquet all have the same keys."""

    class Seen(GenEvalReward):
        def __init__(self) -> None:
            pass

        def detect(self, image: Image.Image, class_names: set[str], threshold: float) -> dict[str, list[Detection]]:
            return {"dog": [LEFT]}

        def classify_color(self, image: Image.Image, detection: Detection, class_name: str) -> str:
            return "red"

    row = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": None, "position": None}], "exclude": None}
    columns = Seen().score([RewardInput("a dog", picture(0), info=row), RewardInput("", picture(0), info={"tag": "x"})])
    assert [columns[f"gen_eval_{name}"] for name in ("score", "reward", "strict")] == [[1.0, None]] * 3


def test_gen_eval_detects_with_a_mask2former_and_names_colours_with_clip(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    swin = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = hf.Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=5, num_labels=2,
        id2label={0: "dog", 1: "mouse"}, label2id={"dog": 0, "mouse": 1}, use_pretrained_backbone=False,
    )  # fmt: skip
    hf.Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    _save_processor(tmp_path)
    reward = GenEvalReward(RewardModelSettings(str(tmp_path), options={"clip": str(clip)}))
    seen = reward.detect(picture(0), {"dog", "computer mouse"}, 0.0)
    assert sum(map(len, seen.values())) > 0
    each = next(f for objects in seen.values() for f in objects)
    assert each.mask.shape == (30, 40) and each.mask.any()
    assert reward.classify_color(picture(0), each, "dog") in gen_eval._COLORS
    row = {"tag": "counting", "include": [{"class": "dog", "count": 1, "color": "red"}]}
    columns = reward.score([RewardInput("a red dog", picture(0), info=row), RewardInput("nothing said", picture(1))])
    assert columns["gen_eval_score"][0] is not None and columns["gen_eval_score"][1] is None
    assert columns["gen_eval_group"]["colors"] == [-10.0, -10.0]
    assert reward.errors[0] == "" and "needs tag and include" in reward.errors[1]


def _save_processor(folder: Path) -> None:
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)


def test_cosmos_reason1_reads_patches_as_the_models_own_processor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_vlm("qwen2.5-vl", tmp_path)
    reward = CosmosReason1Reward(RewardModelSettings(str(folder), options={"system_prompt": "Look."}))
    size = reward._model.config.vision_config.patch_size * reward._model.config.vision_config.spatial_merge_size
    image = picture(0, 4 * size, 3 * size)
    processor: Any = hf.AutoImageProcessor.from_pretrained(folder)
    theirs = processor(images=[image], return_tensors="np", do_resize=False)
    ours, grid = reward.extract_patches([image, image])
    assert grid == tuple(theirs["image_grid_thw"][0])
    assert np.allclose(ours, theirs["pixel_values"], atol=1e-5)
    video = np.stack([np.asarray(picture(i, 4 * size, 3 * size)) for i in range(5)])
    columns = reward.score([RewardInput("p", video, info={"video_fps": 8.0}), RewardInput("p", image)])
    yes, no = columns["yes_logit"][0], columns["no_logit"][0]
    assert columns["no_score"][0] == pytest.approx(float(np.exp(no) / (np.exp(no) + np.exp(yes))))
    assert columns["prediction"][0] == ("Bad" if yes > no else "Good")
    assert columns["no_score"][0] != columns["no_score"][1]
    assert cosmos_reason1.fit_frame_size((1000, 2000), 28, 28 * 28 * 100) == (196, 392)
    counts: list[int] = []
    monkeypatch.setattr(cosmos_reason1, "_MAX_FRAMES", 4)
    extract = reward.extract_patches
    monkeypatch.setattr(reward, "extract_patches", lambda frames: counts.append(len(frames)) or extract(frames))
    reward.score([RewardInput("p", video[:4]), RewardInput("p", video)])
    assert counts == [4, 3], "at most so many, and all if there are no more"


def test_unified_reward_asks_a_judge_and_takes_no_number_for_none() -> None:
    def complete(asked: dict[str, Any]) -> str | bytes:
        question = asked["messages"][0]["content"][1]["text"]
        if "silence" in question:
            return b'{"choices": [{"message": {"content": null}}]}'
        score = "**4**" if "dog" in question else "4.5"
        return "I do not know" if "nothing" in question else f"Well. Final Score: {score}"

    with chat_server(complete=complete) as (url, _):
        reward = UnifiedRewardReward(RewardModelSettings(endpoint_url=url, endpoint_api_key="key"))
        found = reward.score([RewardInput(name, picture(0)) for name in ("a cat", "a dog", "nothing", "silence")])
    assert found == {"unified_reward": [0.9, 0.8, None, None]}
    assert reward.errors == ["", "", *(f"the judge gives no score: '{it}'" for it in ("I do not know", "None"))]


def test_dance_grpo_hands_on_the_video_that_it_was_given(tmp_path: Path) -> None:
    import av

    video = np.stack([np.full((16, 20, 3), level, np.uint8) for level in (10, 120, 240)])
    dance_grpo.write_video(tmp_path / "a.mp4", video, 12.0)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert float(stream.average_rate or 0) == 12.0
    assert [int(frame.mean().round()) for frame in frames] == pytest.approx([10, 120, 240], abs=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hpsv2", "'hpsv2' needs hpsv2, not installed here; install hpsv2 in its own environment"),
        ("hpsv3", "'hpsv3' needs hpsv3, not installed here; install hpsv3 in its own environment"),
        ("dance_grpo", "'dance_grpo' needs fastvideo, not installed here; install av and DanceGRPO's fastvideo"),
        ("unified_reward", "needs endpoint_url"),
        ("aesthetic", "needs predictor, in [custom.aesthetic] of a recipe"),
        ("nothing", "there is no such reward"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_scorer(name, "", RewardModelSettings())
    assert reason in str(caught.value) and str(caught.value).isprintable()


def test_a_predictor_that_is_not_there_is_named() -> None:
    with pytest.raises(RewardError, match=r"predictor = 'lost/layers\.pth': no such file in '/"):
        load_scorer("aesthetic", "", RewardModelSettings(options={"predictor": "lost/layers.pth"}))


@pytest.fixture(scope="module")
def image_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random ImageReward in the names of its own code, and the modules of transformers that it came from."""
    folder = tmp_path_factory.mktemp("image_reward")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join([*words, *(f"##{word}" for word in words[5:])]))
    hf.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = hf.BlipVisionModel(
        hf.BlipVisionConfig(**size, image_size=32, patch_size=8, layer_norm_eps=1e-6, initializer_range=0.1)
    )
    text = hf.BlipTextModel(
        hf.BlipTextConfig(**size, vocab_size=100, encoder_hidden_size=128, max_position_embeddings=40),
        add_pooling_layer=False,
    )
    layers = torch.nn.Sequential(*(torch.nn.Linear(*each) for each in ((128, 8), (8, 4), (4, 1))))
    state = {f"mlp.layers.{2 * int(name[0])}{name[1:]}": value for name, value in layers.state_dict().items()}
    state |= {f"blip.text_encoder.{name}": value for name, value in text.state_dict().items()}
    renames = (
        ("embeddings.class_embedding", "cls_token"), ("embeddings.position_embedding", "pos_embed"),
        ("embeddings.patch_embedding", "patch_embed.proj"), ("encoder.layers", "blocks"), ("self_attn", "attn"),
        ("projection", "proj"), ("post_layernorm", "norm"), ("layer_norm", "norm"),
    )  # fmt: skip
    for name, value in vision.state_dict().items():
        for new, old in renames:
            name = name.replace(new, old)
        state[f"blip.visual_encoder.{name}"] = value
    assert "blip.visual_encoder.blocks.1.attn.qkv.weight" in state and "blip.visual_encoder.norm.bias" in state
    torch.save(state, folder / "ImageReward.pt")
    torch.save((vision, text, layers), folder / "modules.pt")
    return folder


def test_image_reward_reads_the_prompt_while_it_looks_at_the_image(image_reward: Path) -> None:
    options = {"tokenizer": str(image_reward / "tokenizer")}
    reward = ImageRewardReward(RewardModelSettings(str(image_reward / "ImageReward.pt"), options=options))
    found = reward.score(items())["image_reward"]
    vision, text, layers = torch.load(image_reward / "modules.pt", weights_only=False)
    processor = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    tokenizer = hf.AutoTokenizer.from_pretrained(image_reward / "tokenizer")
    for item, score in zip(items(), found, strict=True):
        words = tokenizer(item.prompt, return_tensors="pt")
        with torch.no_grad():
            seen = vision.eval()(processor(images=[item.media], return_tensors="pt")["pixel_values"])[0]
            read = text.eval()(**{k: words[k] for k in ("input_ids", "attention_mask")}, encoder_hidden_states=seen)[0]
            expected = (layers(read[:, 0]).item() - 0.16717362830052426) / 1.0333394966054072
        assert score == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 5) for score in found}) == 3
    again = ImageRewardReward(RewardModelSettings(download_path=str(image_reward), options=options)).score(items()[1:2])
    assert again["image_reward"] == pytest.approx(found[1:2], abs=1e-5), "alone as in a batch"


def test_what_is_no_image_reward_is_refused(image_reward: Path, tmp_path: Path) -> None:
    torch.save({"blip.text_encoder.a": torch.zeros(1)}, tmp_path / "other.pt")
    settings = RewardModelSettings(str(tmp_path / "other.pt"), options={"tokenizer": str(image_reward / "tokenizer")})
    with pytest.raises(RewardError, match=r"other.pt' is no checkpoint of ImageReward: 'patch_embed"):
        ImageRewardReward(settings)
    with pytest.raises(RewardError, match=r"image_reward.*cannot load .*absent.pt"):
        ImageRewardReward(RewardModelSettings(str(tmp_path / "absent.pt")))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"cannot load .*; download it and set model_path"):
        ClipScoreReward(RewardModelSettings(str(tmp_path)))


@pytest.mark.parametrize("settings", [{"device": "no-device"}, {"dtype": "float7"}, {"options": "x"}, "x"])
def test_settings_with_which_a_model_cannot_be_loaded_are_named(settings: Any, clip: Path) -> None:
    if isinstance(settings, dict):
        settings = {"model_path": str(clip), "device": "meta", **settings}
    with pytest.raises(RewardError, match=r"'clip_score' cannot be loaded with the settings in \[custom.clip_score\]"):
        open_model("clip_score", {"clip_score": settings})


def test_a_recipe_may_name_them_as_reward_functions() -> None:
    for name in ("jpeg_size", "ocr", "clip_score", "aesthetic", "pickscore"):
        assert {"media"} <= set(load_reward(name).binding.declared_parameters)


def test_a_reward_function_loads_its_model_before_its_first_call_in_one_process(clip: Path, tmp_path: Path) -> None:
    def runner(model: Path) -> RewardRunner:
        custom = {"clip_score": {"model_path": str(model)}}
        return RewardRunner({"clip_score": 1.0}, timeout_seconds=60, request_constants={"custom": custom})

    [item] = items(1)
    with runner(clip) as running:
        assert running._num_workers == 1
        [score] = running.score([{"to_be_evaluated": "", "reference": "", "prompt": item.prompt, "media": item.media}])
    assert score.value == pytest.approx(2.5 * max(cosines(clip, [item])[0], 0), abs=1e-6)
    with pytest.raises(RewardError, match=r"cannot load .*; download it and set model_path"), runner(tmp_path):
        pass


def test_a_model_may_take_longer_to_load_than_a_process_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be downloaded first, for which a reward service has 15 minutes as well."""
    monkeypatch.setattr("cosmos_core.rewards.runner.WORKER_START_TIMEOUT", 0.0)
    file = tmp_path / "large.py"
    file.write_text("import time\n\ntime.sleep(1.2)\n\n\ndef f(to_be_evaluated):\n    return 1.0\n")
    with RewardRunner({f"{file}:f": 1.0}, timeout_seconds=5, num_workers=1) as running:
        assert [score.value for score in running.score([{"to_be_evaluated": "", "reference": ""}])] == [1.0]
