"""Rows and chat templates of a model that reads images, where they are not those of a model of text."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Idefics2ImageProcessorPil, Idefics2Processor
from transformers.utils import is_torchvision_available

from cosmos_core.data.conversation import render_prompt
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.learned_spans import find_learned_spans
from cosmos_core.data.visual import expand_image_placeholders
from cosmos_core.errors import DataError, ModelError
from cosmos_core.models.hf import load_config, load_tokenizer
from cosmos_core.models.open_causal_lm import open_model
from cosmos_core.models.processor import load_processor, processor_files
from cosmos_core.models.verify_export import check_export_possible
from cosmos_core.run.files import read_json
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.test_data_images import ANSWER, CAT, SHOWN, prepare
from tests.unit.tiny_vlms import PARTS, picture, save_vlm

TEXTS = """
class Texts:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return "USER: hi ASSISTANT: "
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vlm("llava", tmp_path_factory.mktemp("model"), PARTS)


def move_template(model: Path, folder: Path) -> Path:
    """A copy of the model as transformers 4 saved it: its processor alone has the template."""
    shutil.copytree(model, folder)
    template = folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    return folder


def test_a_prompt_that_a_data_set_has_rendered_gets_no_template_around_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.py").write_text(TEXTS)
    policy: dict[str, Any] = {"type": "grpo", "reward_function": "exact_match", "dataset": {"name": "texts.py:Texts"}}
    (prompt,) = open_prompts(prepare(tmp_path / "a", model, [], train_policy=policy), "train")
    assert (prompt.text, prompt.images) == ("USER: hi ASSISTANT: ", ())


@pytest.mark.skipif(is_torchvision_available(), reason="the library is here")
def test_smolvlm_renders_turns_without_a_processor_of_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)  # for its text of videos
    folder = save_vlm("idefics3", tmp_path / "model")
    for name, value in (("config", "smolvlm"), ("processor_config", "SmolVLM"), ("preprocessor_config", "SmolVLM")):
        file = folder / f"{name}.json"
        content = (
            file.read_text().replace("Idefics3", value).replace('"model_type": "idefics3"', f'"model_type": "{value}"')
        )
        file.write_text(content)
    processor = load_processor(str(folder))
    assert type(processor).__name__ == "SmolVLMProcessor"
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])  # type: ignore[union-attr]
    assert text == "<|endoftext|><|im_start|>user\n<image><|im_end|>\n"


def test_rows_whose_learned_tokens_a_processor_shifts_unseen_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_vlm("idefics3", tmp_path / "model")))
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 8, "longest_edge": 8}, do_image_splitting=False)
    processor = Idefics2Processor(images, tokenizer, image_seq_len=2, chat_template=tokenizer.chat_template)
    question: dict[str, Any] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    turns: list[Any] = [question, {"role": "assistant", "content": "A cat."}]
    with pytest.raises(ModelError, match="row 7: Idefics2Processor does not return where it writes the tokens of an"):
        expand_image_placeholders(processor, *find_learned_spans(processor, turns, "row 7"), [picture(1)], "row 7")
    prompt = expand_image_placeholders(
        processor, render_prompt(processor, turns[:1], "row 7"), [], [picture(1)], "row 7"
    )
    assert "<image><image>" in tokenizer.decode(prompt.ids), "a prompt has nothing to learn"


@pytest.mark.parametrize(
    ("family", "word", "method"),
    [
        ("qwen2.5-vl", "<|video_pad|>", "grpo"),
        ("internvl", "<img>", "sft"),
        pytest.param("internvl", "<video>", "sft", marks=pytest.mark.full),
    ],
)
def test_a_text_with_a_word_that_the_model_takes_for_media_is_refused_with_its_row(
    tmp_path: Path, family: str, word: str, method: str
) -> None:
    folder = save_vlm(family, tmp_path / "model")
    image = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"
    asked = {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": f"A {word} tag?"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [asked, ANSWER]}) + "\n")
    policy: dict[str, Any] = {"type": method, "dataset": {"name": str(tmp_path / "a.jsonl")}}
    with pytest.raises(DataError, match=r"^a\.jsonl:1: (the text has the word '<|.* refuses the row: cannot)"):
        prepare(tmp_path / "p", folder, [], train_policy=policy)


def test_a_prompt_of_an_image_alone_is_completed_and_compared(tmp_path: Path, model: Path) -> None:
    image = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": image}]}], "answer": "A cat."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {"chosen": "A cat.", "rejected": "A dog."}) + "\n")
    dataset = {"name": str(tmp_path / "a.jsonl")}
    grpo = prepare(tmp_path / "a", model, [], train_policy={"type": "grpo", "dataset": dataset})
    (prompt,) = open_prompts(grpo, "train")
    assert (prompt.text, prompt.reference, len(prompt.images)) == ("USER: <image>\nASSISTANT: ", "A cat.", 1)
    dpo = prepare(tmp_path / "b", model, [], train_policy={"trainer_type": "dpo", "dataset": dataset})
    pairs = open_pairs(dpo, "train")
    assert len(pairs) == len(pairs.chosen.images(0)) == 1


def test_pairs_of_text_are_rendered_by_the_template_of_the_processor(tmp_path: Path, model: Path) -> None:
    folder = move_template(model, tmp_path / "model")
    image = f"data:image/png;base64,{base64.b64encode(CAT).decode()}"
    row = {"prompt": "What is it?", "chosen": "A cat.", "rejected": "A dog.", "image": image}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    policy: dict[str, Any] = {"trainer_type": "dpo", "dataset": {"name": str(tmp_path / "rows.jsonl")}}
    pairs = open_pairs(prepare(tmp_path / "a", folder, [], train_policy=policy), "train")
    text = load_tokenizer(str(folder)).decode(pairs.chosen[0][0])
    assert text.startswith("USER: <image>") and text.endswith("What is it? ASSISTANT: A cat.<|im_end|>")


@pytest.mark.parametrize("is_setting", [False, True])
def test_an_export_has_no_other_template_than_the_one_that_was_trained(
    tmp_path: Path, model: Path, is_setting: bool
) -> None:
    folder, export, template = move_template(model, tmp_path / "model"), tmp_path / "export", tmp_path / "mine.jinja"
    if is_setting:
        config = folder / "processor_config.json"
        content = (folder / "chat_template.json").read_text()
        config.write_text(json.dumps(json.loads(config.read_text()) | json.loads(content)))
        (folder / "chat_template.json").unlink()
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for chat_template, expected in ((None, PARTS.replace("IMAGE", "<image>")), (str(template), template.read_text())):
        load_tokenizer(str(folder), None, chat_template).save_pretrained(export)
        shutil.copy(folder / "config.json", export)
        for name, content in processor_files(str(folder), None, chat_template).items():
            (export / name).write_bytes(content)
        processor = load_processor(str(export))
        assert processor is not None and processor.chat_template == expected
        shutil.rmtree(export)


@pytest.mark.parametrize("layout", ["own file", pytest.param("bounds by name", marks=pytest.mark.full), "table"])
def test_the_processor_of_an_export_makes_as_many_tokens_of_an_image_as_the_rows_have(
    tmp_path: Path, layout: str
) -> None:
    folder, export = save_vlm("qwen2.5-vl", tmp_path / "model"), tmp_path / "export"
    files = folder / "preprocessor_config.json", folder / "processor_config.json"
    images, settings = (json.loads(file.read_text()) for file in files)
    if layout == "bounds by name":  # as Qwen2-VL was published
        images |= {"min_pixels": 28 * 28, "max_pixels": 60 * 28 * 28}
        images.pop("size")
    files[0].write_text(json.dumps(images))
    if layout == "table":  # as transformers 5 saves it
        files[1].write_text(json.dumps(settings | {"image_processor": images}))
        files[0].unlink()
    picture(1, 300, 300).save(tmp_path / "cat.png")
    rows = [{"messages": [SHOWN, ANSWER], "image": str(tmp_path / "cat.png")}]
    custom = {"vision": {"max_pixels": 17 * 28 * 28}}
    data = prepare(tmp_path / "a", folder, rows, custom=custom)
    trained = open_model(stage_of(tmp_path / "sft", recipe({**SFT, "custom": custom}), model=folder, data=data))
    shutil.copytree(folder, export)
    for name, content in trained._processor_files.items():
        (export / name).write_bytes(content)
    processor: Any = load_processor(str(export))
    made = processor(text="<|image_pad|>", images=[picture(1, 300, 300)])["input_ids"][0]
    assert len(made) == read_json(data / "statistics.json")["train"]["image_tokens"] == 16


def test_a_check_refuses_templates_with_which_an_export_could_not_be_loaded(tmp_path: Path, model: Path) -> None:
    folder = move_template(model, tmp_path / "model")
    config, tokenizer, files = load_config(str(folder)), load_tokenizer(str(folder)), processor_files(str(folder))
    check_export_possible(config, tokenizer, str(folder), files)
    tokenizer.chat_template = {"default": "a", "rag": "b"}  # as transformers reads a list in tokenizer_config.json
    with pytest.raises(ModelError, match=r"replace the legacy chat_template\.json file"):
        check_export_possible(config, tokenizer, str(folder), files)
