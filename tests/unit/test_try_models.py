"""`cosmos try`: what it says of a model that cannot be loaded, and how a chat ends."""

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import EXIT_PREEMPTED, ModelError
from cosmos_core.models import try_models
from tests import tiny_pipelines
from tests.unit.tiny_model import save_tiny_model
from tests.unit.tiny_vlms import PARTS, save_vlm


def test_a_pipeline_that_lacks_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tiny_pipelines.save("sd3", tmp_path / "pipe")
    (folder / "vae/config.json").unlink()
    with pytest.raises(ModelError, match="pipe: the pipeline cannot be loaded: ") as caught:
        try_models.open_image_generator(str(folder), "pipe", torch.device("cpu"))
    assert "\n" not in str(caught.value)


def shown(monkeypatch: pytest.MonkeyPatch, prompt: str, *models: str) -> int:
    """Run the program for models that are named as they are."""
    options: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "names": models}
    options["system_prompts"] = [""] * len(models)
    monkeypatch.setattr(sys, "argv", ["try_models", json.dumps(options), *models])
    monkeypatch.setattr(try_models.logging, "disable", lambda level: None)
    return try_models.main()


def test_an_interrupt_ends_a_chat_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Keyboard:
        def isatty(self) -> bool:
            return False

        def __iter__(self) -> Keyboard:
            return self

        def __next__(self) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    assert shown(monkeypatch, "", str(save_tiny_model(tmp_path / "tiny"))) == EXIT_PREEMPTED
    assert capsys.readouterr().err.splitlines()[-1] == "cosmos: interrupted"


def test_prompts_and_completions_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    completion = "[/INST] :smile: [b]" + " word" * 40
    monkeypatch.setattr(try_models, "open_chat", lambda *_: lambda prompt, index: completion)
    for models in (["a"], ["a", "b"]):
        assert shown(monkeypatch, "[/user] hi", *models) == 0
    alone, _, side_by_side = capsys.readouterr().out.partition("\n")
    assert alone == completion
    assert side_by_side.startswith("[/user] hi") and side_by_side.count("[/INST] :smile:") == 2


def test_what_a_model_cannot_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"model_input_names": ["input_ids"]}))
    assert shown(monkeypatch, "half of a pair: \ud83d", str(folder)) == 0
    (folder / "chat_template.jinja").write_text("{{ messages[0].content + 1 }}")
    assert shown(monkeypatch, "hi", str(folder)) == ModelError.exit_code
    assert f"cosmos: {folder}: no response to prompt 1: TypeError: " in capsys.readouterr().err

    def save(prompt: str, index: int) -> str:
        raise PermissionError(13, "Permission denied", "a-0.png")

    monkeypatch.setattr(try_models, "open_chat", lambda *_: save)
    assert shown(monkeypatch, "hi", "a") == ModelError.exit_code
    message = "a: no response to prompt 1: PermissionError: [Errno 13] Permission denied: 'a-0.png'"
    assert capsys.readouterr().err == f"cosmos: {message}\n"


@pytest.mark.parametrize("refuses", ["", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"])
def test_a_chat_begins_with_the_system_prompt_of_the_training(tmp_path: Path, refuses: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    template = refuses + "{% for m in messages %}{{ m.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    start = partial(try_models.open_chat, str(folder), 4, 0.0, torch.device("cpu"))
    separator = "\n\n" if refuses else " "
    assert start("1 + 2")("3 =", 0) == start("")(f"1 + 2{separator}3 =", 0) != start("")("3 =", 0)


@pytest.mark.parametrize("is_of_processor", [False, True])
def test_a_prompt_reaches_a_template_that_renders_parts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_processor: bool
) -> None:
    folder = save_vlm("llava", tmp_path / "llava", PARTS)
    if is_of_processor:  # as the models of LLaVA were published
        (folder / "chat_template.jinja").unlink()
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    rendered: list[str] = []
    tokenise = PreTrainedTokenizerBase.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerBase,
        "__call__",
        lambda self, text, **kw: rendered.append(text) or tokenise(self, text, **kw),
    )
    try_models.open_chat(str(folder), 1, 0.0, torch.device("cpu"), "")("What is it?", 0)
    assert rendered[-1] == "USER: What is it? ASSISTANT: "


def test_a_vision_model_whose_processor_is_damaged_completes_text(tmp_path: Path) -> None:
    folder = save_vlm("llava", tmp_path / "llava", "{{ messages[-1].content }}")
    for file in folder.glob("*processor_config.json"):
        file.write_text("{")
    complete = try_models.open_chat(str(folder), 1, 0.0, torch.device("cpu"), "")
    assert isinstance(complete("What is it?", 0), str)


def test_a_pipeline_without_a_t5_is_loaded_and_one_that_needs_a_package_is_refused_in_one_line(tmp_path: Path) -> None:
    bare = tiny_pipelines.save("sd3", tmp_path / "bare", has_t5=False)
    assert callable(try_models.open_image_generator(str(bare), "bare", torch.device("cpu")))
    index = bare / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"tokenizer": ["no_such_package", "Tokenizer"]}))
    with pytest.raises(ModelError, match=r"bare: the pipeline cannot be loaded: .*no_such_package") as caught:
        try_models.open_image_generator(str(bare), "bare", torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_sana_draws_in_the_size_that_it_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_pipelines.save("sana", tmp_path / "sana")
    config = folder / "transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": 24}))
    monkeypatch.chdir(tmp_path)
    file = try_models.open_image_generator(str(folder), "sana", torch.device("cpu"))("a cat", 0)
    assert Image.open(file).size == (64, 64), "48 pixels are no multiple of 32"


@pytest.mark.parametrize("name", sorted(tiny_pipelines.CLIPS))
def test_a_pipeline_of_videos_is_refused_before_it_is_loaded_and_draws_for_minutes(tmp_path: Path, name: str) -> None:
    folder = tiny_pipelines.save(name, tmp_path / "clips")
    shutil.rmtree(folder / "vae")
    with pytest.raises(ModelError, match="clips: this pipeline draws videos; cosmos try shows text and images"):
        try_models.open_image_generator(str(folder), "clips", torch.device("cpu"))


def test_a_pipeline_of_the_hub_draws_and_a_language_model_of_the_hub_completes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(try_models, "cached_file", lambda source, *_, **__: "file" if source == "org/pipe" else None)
    monkeypatch.setattr(try_models, "open_chat", lambda *_: lambda prompt, index: "a completion")
    monkeypatch.setattr(try_models, "open_image_generator", lambda *_: lambda prompt, index: "an image")
    assert shown(monkeypatch, "hi", "org/pipe", "org/text") == 0
    assert re.search("an image.*a completion", capsys.readouterr().out)


def test_two_pipelines_fit_a_gpu_in_half_precision_as_two_language_models_do() -> None:
    assert [try_models.select_dtype(torch.device(kind)) for kind in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]
