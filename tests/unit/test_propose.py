"""What `cosmos sft` and its relatives choose for rows, a model and a machine, and the recipe that they write."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core import cli_train
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, DataError, ModelError, RewardError
from cosmos_core.models.try_models import open_chat
from cosmos_core.run.directory import create_run, open_run
from cosmos_core.train.propose import CliOptions, Hardware, propose
from tasks.kinds import all_kinds
from tests import tiny_pipelines
from tests.unit.tiny_model import save_tiny_model
from tests.unit.tiny_vlms import picture, save_vlm

CPU = Hardware(8 << 30, 0)


def write_csv(path: Path, header: list[str], count: int = 60) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [[str(i), f"Was ist {i} plus 1?", f"Das ist {i + 1}.", f"Text {i}"][: len(header)] for i in range(count)]
        csv.writer(file).writerows([header, *rows])
    return str(path)


def write_rows(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def settings(asked: CliOptions, here: Hardware = CPU) -> dict[str, Any]:
    return {key: value for key, value, reason in propose(asked, here) if reason}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize("header", [["nr", "Frage", "Antwort"], ["id", "Eingabe", "Ausgabe"]])
def test_two_columns_of_text_with_unknown_names_are_prompt_and_response(
    tmp_path: Path, model: str, header: list[str]
) -> None:
    found = settings(CliOptions("sft", model, write_csv(tmp_path / "rows.csv", header)))
    policy = "train.train_policy."
    assert (found[f"{policy}prompt_column_name"], found[f"{policy}response_column_name"]) == tuple(header[1:])
    assert found["train.train_policy.dataset.test_size"] == 3 and found["train.epoch"] == 3
    longest = len("Was ist 59 plus 1?") + len("Das ist 60.") + 2 * 8  # a byte is a token
    assert found["policy.model_max_length"] == 64 >= longest


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        *(("sft", *names) for names in [("answer", "problem"), ("completion", "Frage"), ("Antwort", "query")]),
        *(("sft", *names) for names in [("summary", "instruction"), ("Antwort", "input"), ("solution", "instruction")]),
        *(("grpo", *names) for names in [("solution", "task"), ("ground_truth", "input"), ("output", "instruction")]),
    ],
)
def test_a_known_name_says_which_of_two_columns_is_the_prompt(
    tmp_path: Path, model: str, method: str, first: str, second: str
) -> None:
    data = write_rows(tmp_path, {first: "Das ist 2.", second: "Was ist 1 plus 1?"})
    found = settings(CliOptions(method, model, data, reward="exact_match" * (method == "grpo")))
    names = [found[f"train.train_policy.{name}_column_name"] for name in ("prompt", "response")]
    assert names == [second, first]


def test_columns_that_could_be_several_things_are_named_and_asked_for(tmp_path: Path, model: str) -> None:
    data = write_csv(tmp_path / "rows.csv", ["nr", "Frage", "Antwort", "Quelle"])
    with pytest.raises(DataError, match=r"Frage, Antwort, Quelle.*--prompt COLUMN and --response COLUMN"):
        settings(CliOptions("sft", model, data))
    found = settings(CliOptions("sft", model, data, prompt="Frage", response="Quelle"))
    assert found["train.train_policy.response_column_name"] == "Quelle"


@pytest.mark.parametrize(
    ("here", "asked", "rank"),
    [(CPU, 0, None), (Hardware(1 << 20, 0), 0, 16), (Hardware(80 << 30, 8), 0, None), (CPU, 8, 8)],
)
def test_an_adapter_is_trained_where_all_weights_do_not_fit_or_set_asks_for_one(
    tmp_path: Path, model: str, here: Hardware, asked: int, rank: int | None
) -> None:
    data = write_csv(tmp_path / "rows.csv", ["nr", "prompt", "completion"])
    found = settings(CliOptions("sft", model, data, lora_rank=asked), here)
    assert (found.get("policy.lora.r"), found["train.optm_lr"]) == (rank, 1e-4 if rank else 1e-3)
    assert "train.train_policy.prompt_column_name" not in found, "the names are known"
    assert found.get("policy.parallelism.dp_shard_size") == (-1 if here.num_gpus else None)
    assert found.get("train.param_dtype") == (None if here.num_gpus else "float32")


@pytest.mark.parametrize("num_gpus", [3, 6, 8])
def test_all_gpus_have_the_same_number_of_completions_of_a_step(tmp_path: Path, model: str, num_gpus: int) -> None:
    found = settings(asked_of("grpo", tmp_path, model), Hardware(80 << 30, num_gpus))
    batch, micro_batch = found["train.train_batch_per_replica"], found["train.train_policy.mini_batch"]
    assert batch % (num_gpus * micro_batch) == batch % found["rollout.n_generation"] == 0


def test_the_reason_of_a_length_says_what_the_model_takes(tmp_path: Path, model: str) -> None:
    found = {key: f"{value}: {reason}" for key, value, reason in propose(asked_of("grpo", tmp_path, model), CPU)}
    assert re.fullmatch(r"256: .* tokens, a completion 128; the model takes 256", found["policy.model_max_length"])


def asked_of(method: str, folder: Path, model: str) -> CliOptions:
    """Rows of each method."""
    if method == "diffusion-sft":
        for index in range(12):
            Image.new("RGB", (40, 32)).save(folder / f"{index}.png")
            (folder / f"{index}.txt").write_text("a black square")
        return CliOptions(method, str(tiny_pipelines.save("sd3", folder / "pipe")), str(folder))
    if method == "sft":
        return CliOptions(method, model, write_csv(folder / "rows.csv", ["nr", "Frage", "Antwort"]))
    if method == "dpo":
        rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(12)]
        return CliOptions(method, model, write_rows(folder, *rows))
    table = pa.table({"question": [f"{i}+1=" for i in range(40)], "answer": [str(i + 1) for i in range(40)]})
    pa.parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    return CliOptions(method, model, str(folder / "train-00000-of-00001.parquet"), reward="exact_match, format")


@pytest.mark.parametrize("method", ["sft", pytest.param("dpo", marks=pytest.mark.full), "grpo", "diffusion-sft"])
def test_the_recipe_is_valid_says_why_and_is_kept_once_it_was_edited(tmp_path: Path, model: str, method: str) -> None:
    asked = asked_of(method, tmp_path, model)
    proposed = list(propose(asked, CPU))
    path = cli_train._write_recipe(asked._asdict(), proposed, str(tmp_path / "own.toml"))
    pipeline = load_pipeline(path, [f"pipeline.output_dir={str(tmp_path / 'outputs')!r}"], all_kinds())
    assert open_run(create_run(pipeline).path, all_kinds()).pipeline.recipes == pipeline.recipes
    assert [stage.kind for stage in pipeline.stages][-1] == "export"
    trained = next(pipeline.recipes[s.name] for s in pipeline.stages if pipeline.stage_kind(s).trains_model)
    assert trained.policy.model_name_or_path == asked.model
    assert trained.policy.chat_template == ("chatml" if method == "grpo" else None), "the model has none"
    lines = path.read_text().splitlines()
    assert all("  # " in line for line in lines if " = " in line and not line.startswith("#"))
    cli_train._write_recipe(asked._asdict(), [*proposed, ("train.seed", 7, "another")], str(path))  # nobody edited it
    path.write_text(path.read_text().replace("seed = 7", "seed = 8"))
    with pytest.raises(ConfigError, match="was edited"):
        cli_train._write_recipe(asked._asdict(), proposed, str(path))


def write_images(folder: Path, names: dict[str, str]) -> str:
    """Write an image for each name that is not empty of a caption; return the folder."""
    folder.mkdir()
    for name, caption in names.items():
        Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
        if caption:
            (folder / f"{name}.txt").write_text(caption)
    return str(folder)


@pytest.mark.parametrize(
    ("method", "row", "message"),
    [
        ("sft", {"messages": [{"role": "boss", "content": "x"}]}, r"rows\.jsonl:1, turn 1 .*unknown role 'boss'"),
        ("sft", {"question": "q", "x": "y", "z": "w"}, "--prompt COLUMN and --response COLUMN"),
        ("sft", {"prompt": None, "response": "a"}, r"the columns are prompt \(null\), response; .*--prompt COLUMN"),
        ("dpo", {"q": "q", "good": "y", "bad": "w"}, "--prompt COLUMN and --chosen COLUMN and --rejected COLUMN"),
        ("dpo", {"prompt": "q", "chosen": 3, "rejected": 4}, "column 'chosen' holds '3'"),
        ("dpo", {"prompt": "q", "chosen": "y", "rejected": "y"}, r"rows\.jsonl:1.* with equal chosen and rejected"),
    ],
)
def test_the_first_row_that_is_wrong_is_told_with_options_for_columns_only_where_one_is_missing(
    tmp_path: Path, model: str, method: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        settings(CliOptions(method, model, write_rows(tmp_path, row)))
    assert ("COLUMN" in str(caught.value)) == ("COLUMN" in message)


@pytest.mark.parametrize("option", ["prompt", "response"])
def test_one_named_column_of_two_asks_for_the_option_of_the_other(tmp_path: Path, model: str, option: str) -> None:
    data = write_csv(tmp_path / "rows.csv", ["nr", "Frage", "Antwort"])
    with pytest.raises(DataError, match="columns are nr, Frage, Antwort; name them: --prompt COLUMN and --response"):
        settings(CliOptions("sft", model, data)._replace(**{option: "Frage"}))


def test_rows_of_a_split_that_is_set_are_looked_at_and_named_in_the_recipe(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, column in (("test_sft", "nothing"), ("train_sft", "Antwort")):
        table = pa.table({"Frage": [f"Was ist {i}?" for i in range(20)], column: ["Das ist eine Zahl."] * 20})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"no file for the split 'train'.*dataset\.split to one of test_sft, train_sft"):
        settings(CliOptions("sft", model, str(tmp_path)))
    overrides = ["train.train_policy.dataset.split=train_sft", "train.epoch=1"]
    cli_train.sft(model=model, data=str(tmp_path), dry_run=True, overrides=overrides)
    recipe = capsys.readouterr().out
    assert 'split = "train_sft"  # --set' in recipe and 'response_column_name = "Antwort"' in recipe
    with pytest.raises(ConfigError, match=r"--set: train\.train_policy\.dataset\.subset"):
        settings(CliOptions("sft", model, str(tmp_path), rows={"subset": 3}))


@pytest.mark.parametrize(("method", "key"), [("sft", "conversation"), ("grpo", "prompt")])
def test_the_only_column_of_turns_is_the_conversation_whatever_its_name(
    tmp_path: Path, model: str, method: str, key: str
) -> None:
    turns = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
    for name, column, option in (("a", turns, ""), ("b", json.dumps(turns), ""), ("c", turns, "dialog")):
        data = write_rows(tmp_path, *[{"id": name, "topic": "y", "dialog": column}] * 2)
        found = settings(CliOptions(method, model, data, prompt=option, reward="exact_match" * (method == "grpo")))
        assert (found[f"train.train_policy.{key}_column_name"], found["policy.chat_template"]) == ("dialog", "chatml")


@pytest.mark.parametrize(
    ("rows", "template"),
    [
        # A null, or half a character, is left to the preparation.
        ([{"messages": None},
          {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}], "chatml"),
        ([{"prompt": prompt, "response": "yes"} for prompt in ("\ud83d?", "Is it?")], None),
        ([{"question": "1 + 1?", "answer": "2"}], "chatml"),
    ],
)  # fmt: skip
def test_turns_and_two_known_columns_of_text_need_a_template(
    tmp_path: Path, model: str, rows: list[dict[str, Any]], template: str | None
) -> None:
    found = settings(CliOptions("sft", model, write_rows(tmp_path, *rows)))
    assert (found.get("policy.chat_template"), found["policy.model_max_length"]) == (template, 64)


def test_images_tools_and_calls_count_towards_the_length(tmp_path: Path) -> None:
    vlm = save_vlm("qwen2.5-vl", tmp_path / "vlm")
    picture(1, 64, 64).save(vlm / "a.png")
    row: dict[str, Any] = {"question": "Same?", "answer": "Yes.", "images": ["a.png"] * 12}
    folder = {"dataset": {"media_path": str(vlm)}}
    found = settings(CliOptions("sft", str(vlm), write_rows(tmp_path, row), custom=folder))
    assert found["policy.model_max_length"] == 128 > len("Same?Yes.") + 12 * 4 > 56, "64 is less than 1.1 times that"
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "text"))
    tokenizer.chat_template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "text")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "1" * 70}}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add", "description": "x" * 70}}]
    data = write_rows(tmp_path, {"messages": turns, "tools": tools})
    found = settings(CliOptions("sft", str(tmp_path / "text"), data))
    assert found["policy.model_max_length"] == 256


def test_a_pass_of_pairs_has_twice_the_sequences(tmp_path: Path, model: str) -> None:
    row = {"prompt": "?", "chosen": "y" * 200, "rejected": "n" * 200, "response": "y" * 200}
    data, small = write_rows(tmp_path, *[row] * 64), Hardware(26_000_000, 0)
    sft, dpo = (settings(CliOptions(each, model, data), small) for each in ("sft", "dpo"))
    assert sft["policy.model_max_length"] == dpo["policy.model_max_length"] == 256
    assert sft["train.train_policy.mini_batch"] == 2 * dpo["train.train_policy.mini_batch"] > 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(completion)\n", r"SyntaxError: expected ':' .*mine\.py:1"),
        ("import no_such_module\n\ndef f(completion): return 1.0\n", "no_such_module"),
        ("f = 1 / 0\n", r"ZeroDivisionError.*mine\.py:1"),
        ("def f(c, r): return 1.0\n", r"takes c, r: no parameter is the completion"),
        ("def f(completion): return 1.0\n\nraise SystemExit(0)\n", r"SystemExit: 0 .*mine\.py:3"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused_before_rows_are_read(
    tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(RewardError, match=message):
        settings(CliOptions("grpo", "none", "none", reward=f"boxed_math, {tmp_path}/mine.py:f"))


def test_pairs_with_columns_of_any_name_are_named_by_options(tmp_path: Path, model: str) -> None:
    data = write_rows(tmp_path, {"q": "q", "good": "y", "bad": "w"})
    named = CliOptions("dpo", model, data, prompt="q", chosen="good", rejected="bad")
    found = settings(named)
    keys = [found[f"train.train_policy.{name}_column_name"] for name in ("prompt", "chosen", "rejected")]
    assert keys == ["q", "good", "bad"]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no column 'god'"):
        settings(named._replace(chosen="god"))


def test_a_pipeline_of_diffusers_is_refused_where_text_is_learned(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_index.json").write_text("{}")
    with pytest.raises(ModelError, match="pipeline of diffusers, which cosmos diffusion-sft trains"):
        settings(
            CliOptions("sft", str(tmp_path / "model"), write_csv(tmp_path / "rows.csv", ["nr", "Frage", "Antwort"]))
        )


def test_images_of_a_parquet_file_are_counted(tmp_path: Path) -> None:
    write_images(tmp_path / "images", {"a": "a square"})
    image = {"bytes": (tmp_path / "images/a.png").read_bytes(), "path": "a.png"}
    table = pa.table({"image": [image] * 300, "text": ["a square"] * 300})
    pa.parquet.write_table(table, tmp_path / "train.parquet")
    found = settings(CliOptions("diffusion-sft", "some/model", str(tmp_path / "train.parquet")))
    assert found["train.epoch"] == 6, "2,000 images are seen in all"


@pytest.mark.parametrize(
    ("names", "message"),
    [({}, "images"), ({"a": ""}, "caption; a.png: there is no a.txt")],
)
def test_images_without_captions_are_refused_in_one_line(tmp_path: Path, names: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        settings(CliOptions("diffusion-sft", "some/model", write_images(tmp_path / "images", names)))


def test_a_few_images_without_captions_are_left_out_by_the_recipe(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", {"a": "", **{f"b{i}": "a square" for i in range(9)}})
    found = settings(CliOptions("diffusion-sft", "some/model", folder))
    assert found["train.train_policy.dataset.max_skipped_fraction"] == 0.1
    (tmp_path / "images/a.txt").write_text("a square")
    assert "train.train_policy.dataset.max_skipped_fraction" not in settings(
        CliOptions("diffusion-sft", "some/model", folder)
    )


def test_a_model_of_another_kind_is_refused_where_images_are_learned(tmp_path: Path, model: str) -> None:
    data = write_images(tmp_path / "images", {"a": "a square"})
    with pytest.raises(ModelError, match="no pipeline of diffusers; cosmos sft"):
        settings(CliOptions("diffusion-sft", model, data))


def test_images_are_held_out_and_drawn_before_and_after(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", {str(i): "a square" for i in range(40)})
    found = settings(CliOptions("diffusion-sft", str(tiny_pipelines.save("sd3", tmp_path / "pipe")), data))
    assert found["train.train_policy.dataset.local_dir"] == data
    assert (found["train.train_policy.dataset.test_size"], found["validation.val_before_train"]) == (2, True)
    assert (found["policy.diffusers.inference_size"], found["policy.diffusers.max_prompt_length"]) == ([16, 16], 77)


@pytest.mark.parametrize(
    ("family", "limit", "expected"), [("sd3", 512, 256), ("sana", None, None), ("cosmos_predict", None, 512)]
)
def test_prompts_are_padded_as_the_pipeline_pads_them(
    tmp_path: Path, family: str, limit: int | None, expected: int | None
) -> None:
    """The defaults of `max_sequence_length` in the pipelines; 300 is that of the recipe."""
    model = Path(tiny_pipelines.save(family, tmp_path / "pipe"))
    if limit:
        file = model / "tokenizer_3" / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": limit}))
    found = settings(CliOptions("diffusion-sft", str(model), write_images(tmp_path / "images", {"a": "a square"})))
    assert found.get("policy.diffusers.max_prompt_length") == expected


def test_try_completes_as_transformers_does(model: str) -> None:
    respond = open_chat(model, 12, 0.0, torch.device("cpu"), "")
    tokenizer, plain = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer("What?", return_tensors="pt")
    made = plain.generate(**{k: ids[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=12, do_sample=False)
    assert respond("What?", 0) == tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_eval_writes_a_pipeline_of_benchmarks(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli_train.evaluate(model=model, tasks="gsm8k, mmlu_*", limit=20, chat=True, dry_run=True)
    path = tmp_path / "own.toml"
    path.write_text(capsys.readouterr().out)
    pipeline = load_pipeline(path, [], all_kinds())
    assert [stage.kind for stage in pipeline.stages] == ["evaluate"]
    recipe = pipeline.recipes["evaluate"]
    assert recipe.policy.model_name_or_path == model and recipe.evaluate.tasks == ("gsm8k", "mmlu_*")
    assert (recipe.evaluate.limit, recipe.evaluate.apply_chat_template) == (20, True)
    assert path.read_text().splitlines()[1] == f"# cosmos eval --model {model} --tasks 'gsm8k, mmlu_*'"


def test_the_size_of_a_pipeline_is_read_from_its_configuration(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", {"a": "a square"})
    wide, half = (tiny_pipelines.save("sana", tmp_path / name) for name in ("wide", "half"))
    pipeline = diffusers.SanaPipeline.from_pretrained(half)
    pipeline.transformer.to(torch.bfloat16).save_pretrained(half / "transformer")
    said = [
        [f"{key} {reason}" for key, _, reason in propose(CliOptions("diffusion-sft", str(each), data), CPU)]
        for each in (wide, half)
    ]
    assert said[0] == said[1], "the dtype of the files does not count"
    found = settings(CliOptions("diffusion-sft", str(wide), data))
    assert found["policy.diffusers.inference_size"] == [64, 64]


def test_clips_have_the_size_that_the_pipeline_draws_and_one_at_a_time_fits_a_gpu(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", dict.fromkeys(map(str, range(32)), "a square"))
    found = settings(CliOptions("diffusion-sft", str(tiny_pipelines.save("sana_video", tmp_path / "pipe")), data))
    assert found["policy.diffusers.inference_size"] == [480, 832]
    assert (found["train.train_batch_per_replica"], found["train.train_policy.mini_batch"]) == (4, 1)
