"""The `prepare` stage from rows to memory-mapped tokens: content, kinds, splits, identical bytes, and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.data.prepared import has_split
from cosmos_core.errors import DataError, ModelError, Preempted
from cosmos_core.run.files import read_json, sha256
from cosmos_core.run.stage import Stage
from tests.effects.change import stage_of
from tests.unit.data_tokenizers import CHATML, MISTRAL, byte_tokenizer, learned

RL_LENGTHS = {"policy": {"model_max_length": 64}, "rollout": {"max_response_length": 16}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(CHATML).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {i}+1?", "answer": f"It is {i + 1}."} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_stage(path: Path, model: Path, recipe: dict, data: Path | None = None) -> Stage:
    return stage_of(path, Recipe.model_validate(recipe), kind="prepare", model=model, data=data)


def sft(name: Path | str, **policy) -> dict:
    dataset = {"name": str(name), **policy.pop("dataset", {})}
    return {"train": {"train_policy": {"type": "sft", "dataset": dataset, **policy}}}


def grpo(name: Path | str, **policy) -> dict:
    recipe = sft(name, **policy)
    recipe["train"]["train_policy"]["type"] = "grpo"
    return {**recipe, **RL_LENGTHS}


def test_sft_rows_come_back_as_tokens_and_masks_with_true_statistics(tmp_path, model):
    outcome = run(make_stage(tmp_path / "s", model, sft(write_rows(tmp_path / "a.jsonl", 600))))
    tokenizer = byte_tokenizer(CHATML)
    sequences = open_sequences(tmp_path / "s" / "data", "train")
    assert len(sequences) == 600
    for i in (0, 255, 256, 599, -1):  # across the borders of record batches
        ids, mask = sequences[i]
        assert ids.dtype == np.int64 and mask.dtype == np.uint8
        assert learned(tokenizer, ids.tolist(), mask.tolist()) == [f"It is {i % 600 + 1}.<|im_end|>"]
    lengths = [len(sequences[i][0]) for i in range(600)]
    assert sequences.lengths.tolist() == lengths
    said = read_json(tmp_path / "s" / "data" / "statistics.json")
    assert said == {
        "train": {
            "kind": "sequences", "rows": 600, "tokens": sum(lengths), "truncated_rows": 0,
            "skipped_rows": 0, "skipped": {}, "merged_rows": 0,
            "label_tokens": sum(int(sequences[i][1].sum()) for i in range(600)),
            "length": {
                "min": min(lengths), "mean": sum(lengths) / 600, "p50": float(np.median(lengths)),
                "p95": float(np.percentile(lengths, 95)), "max": max(lengths),
            },
        }
    }  # fmt: skip
    assert outcome.outputs == ("data",) and outcome.info == {"data": "data"}
    numbers = {"rows": 600.0, "tokens": float(sum(lengths)), "skipped_rows": 0.0}
    assert outcome.metrics == {f"data/train_{name}": number for name, number in numbers.items()}
    progress = read_json(tmp_path / "s" / "progress.json")
    assert (progress["phase"], progress["step"], progress["total"]) == ("prepare", 600, 600)
    assert not has_split(tmp_path / "s" / "data", "validation")
    with pytest.raises(IndexError):
        sequences[600]


def test_grpo_rows_come_back_as_prompts_with_references(tmp_path, model):
    run(make_stage(tmp_path / "s", model, grpo(write_rows(tmp_path / "a.jsonl", 300), system_prompt="Add.")))
    prompts = open_prompts(tmp_path / "s" / "data", "train")
    prompt = prompts[260]
    assert prompt.id == 260 and prompt.reference == "It is 261."
    assert prompt.text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is 260+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert byte_tokenizer(CHATML).decode(list(prompt.token_ids)) == prompt.text
    assert [p.id for p in prompts[298:]] == [298, 299] and len(list(prompts)) == 300


def test_rows_of_a_stage_win_over_the_recipe_and_bring_their_held_out_rows(tmp_path, model):
    write_rows(tmp_path / "made" / "train.jsonl", 3, first=70)
    write_rows(tmp_path / "made" / "validation.jsonl", 1, first=90)
    run(make_stage(tmp_path / "s", model, grpo("missing.jsonl"), data=tmp_path / "made"))
    for split, numbers in {"train": (71, 72, 73), "validation": (91,)}.items():
        prompts = open_prompts(tmp_path / "s" / "data", split)
        assert [prompt.reference for prompt in prompts] == [f"It is {i}." for i in numbers]


@pytest.mark.parametrize("layout", ["folders", "saved"])
def test_held_out_rows_of_a_stage_are_found_in_folders_of_splits_and_in_a_saved_data_set(tmp_path, model, layout):
    made = tmp_path / "made"
    files = {
        "train": write_rows(tmp_path / "a.jsonl", 3, first=70),
        "validation": write_rows(tmp_path / "b.jsonl", 1, 90),
    }
    if layout == "saved":
        datasets.DatasetDict({k: datasets.Dataset.from_json(str(file)) for k, file in files.items()}).save_to_disk(made)
    else:
        for split, file in files.items():
            (made / split).mkdir(parents=True)
            file.rename(made / split / "rows.jsonl")
    run(make_stage(tmp_path / "s", model, grpo("missing.jsonl"), data=made))
    for split, numbers in {"train": (71, 72, 73), "validation": (91,)}.items():
        prompts = open_prompts(tmp_path / "s" / "data", split)
        assert [prompt.reference for prompt in prompts] == [f"It is {i}." for i in numbers]


@pytest.mark.parametrize("policy_of", [sft, pytest.param(grpo, marks=pytest.mark.full)])
def test_the_bytes_depend_neither_on_the_run_nor_on_the_number_of_processes(tmp_path, model, policy_of):
    rows = write_rows(tmp_path / "a.jsonl", 520)
    with open(rows, "a", encoding="utf-8") as file:
        file.write('{"text": ""}\n')
    before = set(psutil.Process().children(recursive=True))
    digests = []
    for name, workers in (("one", 0), ("again", 1), ("two", 2)):
        run(make_stage(tmp_path / name, model, policy_of(rows, dataloader_num_workers=workers)))
        digests.append([sha256(tmp_path / name / "data" / file) for file in ("train.arrow", "statistics.json")])
    assert digests[0] == digests[1] == digests[2]
    left = {child for child in psutil.Process().children(recursive=True) if child not in before}
    kept = ("resource_tracker", "tests.warm")  # until this process ends
    assert all(any(name in " ".join(child.cmdline()) for name in kept) for child in left)


WRONG = '{"messages": [{"role": "boss", "content": "hi"}]}\n'


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_too_many_wrong_rows_end_the_stage_and_the_first_is_named(tmp_path, model, workers):
    rows = write_rows(tmp_path / "a.jsonl", 300)
    with open(rows, "a", encoding="utf-8") as file:
        file.write(WRONG * 4)
    message = (
        r"^a\.jsonl:301, turn 1 of 'messages': unknown role 'boss'.*; 4 of 304 rows cannot be used so far, more than "
        r"dataset\.max_skipped_fraction = 0\.01 allows; mend them, or raise it$"
    )
    with pytest.raises(DataError, match=message):
        run(make_stage(tmp_path / "s", model, sft(rows, dataloader_num_workers=workers)))
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["progress.json"]


def test_one_wrong_row_of_four_hundred_is_skipped_and_counted(tmp_path, model):
    rows = write_rows(tmp_path / "a.jsonl", 399)
    with open(rows, "a", encoding="utf-8") as file:
        file.write(WRONG)
    outcome = run(make_stage(tmp_path / "s", model, sft(rows)))
    (notice,) = outcome.info["notices"]
    assert notice.startswith(
        "train: 1 of 400 rows skipped: 1 that cannot be read (first: a.jsonl:400, turn 1 of 'messages': unknown role"
    )
    assert len(open_sequences(tmp_path / "s" / "data", "train")) == 399


def test_a_template_that_never_writes_the_end_token_is_told(tmp_path):
    byte_tokenizer(CHATML, end_token="<|eot_id|>").save_pretrained(tmp_path / "model")
    outcome = run(make_stage(tmp_path / "s", tmp_path / "model", sft(write_rows(tmp_path / "a.jsonl", 3))))
    (notice,) = outcome.info["notices"]
    assert notice.startswith("train: no row teaches the end token '<|eot_id|>', so the model would not learn to stop")
    assert read_json(tmp_path / "s" / "data" / "statistics.json")["train"]["teaches_end"] is False
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [END]}))
    outcome = run(make_stage(tmp_path / "t", tmp_path / "model", sft(tmp_path / "a.jsonl")))
    assert "notices" not in outcome.info


END = byte_tokenizer(CHATML, end_token="<|eot_id|>").convert_tokens_to_ids("<|im_end|>")


def test_a_column_of_tools_reaches_the_template(tmp_path):
    with_tools = "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}" + CHATML
    byte_tokenizer(with_tools).save_pretrained(tmp_path / "model")
    row = {"question": "q", "answer": "a", "tools": json.dumps([{"type": "function", "function": {"name": "add"}}])}
    broken = {**row, "tools": json.dumps([{"type": "function", "function": {"name": "half \ud800"}}])}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(broken) + "\n")
    run(make_stage(tmp_path / "s", tmp_path / "model", sft(tmp_path / "a.jsonl")))
    skipped = read_json(tmp_path / "s" / "data" / "statistics.json")["train"]["skipped"]
    assert list(skipped) == ["with half a character (a lone surrogate)"]
    ids, _ = open_sequences(tmp_path / "s" / "data", "train")[0]
    assert byte_tokenizer(with_tools).decode(ids).startswith("add\n<|im_start|>user\nq<|im_end|>")
    run(make_stage(tmp_path / "rl", tmp_path / "model", grpo(tmp_path / "a.jsonl")))
    assert open_prompts(tmp_path / "rl" / "data", "train")[0].text.startswith("add\n<|im_start|>user\nq<|im_end|>")


def test_rows_with_nothing_to_learn_are_left_out_and_counted_by_reason(tmp_path, model, caplog):
    rows = write_rows(tmp_path / "a.jsonl", 300)
    silent, half = {"messages": [{"role": "user", "content": "hi"}]}, {"question": "\ud83d", "answer": "a"}
    long = {"question": "x" * 90, "answer": "late"}
    extra = [silent, {"text": ""}, long, half, *[{"question": f"{i}?", "answer": "Yes."} for i in range(290)], silent]
    with open(rows, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in extra)
    outcome = run(make_stage(tmp_path / "one", model, {**sft(rows), "policy": {"model_max_length": 64}}))
    said = read_json(tmp_path / "one" / "data" / "statistics.json")["train"]
    assert (said["rows"], said["skipped_rows"]) == (590, 5)
    too_long = "longer than policy.model_max_length with nothing left to learn"
    assert said["skipped"] == {
        "without an assistant turn to learn": {"rows": 2, "first": "a.jsonl:301"},
        "empty": {"rows": 1, "first": "a.jsonl:302"},
        too_long: {"rows": 1, "first": "a.jsonl:303"},
        "with half a character (a lone surrogate)": {"rows": 1, "first": "a.jsonl:304"},
    }
    notice = (
        "train: 5 of 595 rows skipped: 2 without an assistant turn to learn (first: a.jsonl:301), 1 empty (first: "
        f"a.jsonl:302), 1 {too_long} (first: a.jsonl:303), 1 with half a character (a lone surrogate) (first: "
        "a.jsonl:304)"
    )
    assert outcome.info["notices"] == [notice] and caplog.messages.count(notice) == 1
    assert outcome.metrics["data/train_skipped_rows"] == 5.0
    sequences = open_sequences(tmp_path / "one" / "data", "train")
    texts = [byte_tokenizer(CHATML).decode(sequences[i][0]) for i in (299, 300, 589)]
    assert [text.split("\n")[1].removesuffix("<|im_end|>") for text in texts] == ["What is 299+1?", "0?", "289?"]


@pytest.mark.parametrize("longest", [16, 63, 64, 2048])
def test_prompts_that_leave_no_token_are_left_out_and_those_that_leave_few_are_counted(tmp_path, model, longest):
    rows = write_rows(tmp_path / "a.jsonl", 2)
    tokens = len(byte_tokenizer(CHATML)("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    with open(rows, "a", encoding="utf-8") as file:
        too_long, full = ({"question": "x" * (64 - tokens + more), "answer": "b"} for more in (0, -1))
        extra = [too_long, {"question": "q", "answer": "\udc00"}, full, {"question": "last", "answer": "a"}]
        file.writelines(json.dumps(row) + "\n" for row in extra)
    recipe = {**grpo(rows), "rollout": {"max_response_length": longest}}
    outcome = run(make_stage(tmp_path / "s", model, recipe))
    assert outcome.metrics["data/train_skipped_rows"] == 2.0
    skipped, short = outcome.info["notices"]
    assert skipped == (
        "train: 2 of 6 rows skipped: 1 with a prompt that leaves no room for a completion in policy.model_max_length "
        "(first: a.jsonl:3), 1 with half a character (a lone surrogate) (first: a.jsonl:4)"
    )
    num_short = 1 if longest == 16 else 4
    assert short == (
        f"train: {num_short} of 4 prompts leave less room in policy.model_max_length than the {longest} tokens of "
        f"max_response_length: their completions end earlier"
    )
    prompts = list(open_prompts(tmp_path / "s" / "data", "train"))
    assert len(prompts[2].token_ids) == 63 and (prompts[3].id, prompts[3].reference) == (3, "a")


def test_no_row_left_is_an_error_that_says_why(tmp_path, model):
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": ""}\n{"text": " "}\n')
    message = r"^train: 2 of 2 rows skipped: 2 empty \(first: a\.jsonl:1\); no row is left, give others"
    with pytest.raises(DataError, match=message):
        run(make_stage(tmp_path / "s", model, sft(rows)))
    assert not (tmp_path / "s" / "data").exists()


def test_turns_that_the_template_refuses_are_put_together_and_said_once(tmp_path, caplog):
    byte_tokenizer(MISTRAL, end_token="</s>").save_pretrained(tmp_path / "mistral")
    system, asks, more, answers = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "One?"), ("user", "Two?"), ("assistant", "Yes."))
    )
    conversations = [[asks, answers], [system, asks, answers], [asks, more, answers, answers], [answers, asks]]
    rows = tmp_path / "a.jsonl"
    rows.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations * 2))
    allowed = {"max_skipped_fraction": 0.5}
    outcome = run(make_stage(tmp_path / "s", tmp_path / "mistral", sft(rows, dataset=allowed)))
    sequences, tokenizer = open_sequences(tmp_path / "s" / "data", "train"), byte_tokenizer(MISTRAL, end_token="</s>")
    assert [tokenizer.decode(sequences[i][0]) for i in range(3)] == [
        "<s>[INST] One?[/INST] Yes.</s>",
        "<s>[INST] Be brief.\n\nOne?[/INST] Yes.</s>",
        "<s>[INST] One?\n\nTwo?[/INST] Yes.\n\nYes.</s>",
    ]
    assert [learned(tokenizer, *map(list, sequences[i])) for i in range(3)] == [
        [" Yes.</s>"], [" Yes.</s>"], [" Yes.\n\nYes.</s>"]
    ]  # fmt: skip
    assert outcome.info["notices"] == [
        "train: 2 of 8 rows skipped: 2 refused by the chat template (roles must alternate) (first: a.jsonl:4)",
        "train: turns put together in 4 of 6 rows (first: a.jsonl:2): the chat template refuses a system turn, or "
        "turns of one role in a row",
    ]
    assert [message for message in caplog.messages if message.startswith("train: ")] == outcome.info["notices"]
    recipe = {**grpo(rows, dataset=allowed), "policy": {"model_max_length": 99}}
    asked = run(make_stage(tmp_path / "rl", tmp_path / "mistral", recipe))
    prompts = open_prompts(tmp_path / "rl" / "data", "train")
    assert prompts[1].text == "<s>[INST] Be brief.\n\nOne?[/INST]"
    assert "put together in 4 of" in asked.info["notices"][-1]


def test_a_stop_leaves_nothing_behind(tmp_path, model):
    stage = make_stage(tmp_path / "s", model, sft(write_rows(tmp_path / "a.jsonl", 600)))
    stage.stop_requested = True
    with pytest.raises(Preempted, match=r"stopped after 256 of 600 rows"):
        run(stage)
    assert not (tmp_path / "s" / "data").exists()


def test_the_wrong_kind_a_missing_split_and_a_damaged_file_are_data_errors(tmp_path, model):
    run(make_stage(tmp_path / "s", model, sft(write_rows(tmp_path / "a.jsonl", 10))))
    folder = tmp_path / "s" / "data"
    with pytest.raises(DataError, match=r"holds sequences, but prompts to complete .* are needed"):
        open_prompts(folder, "train")
    with pytest.raises(DataError, match=r"validation\.arrow does not exist; run the prepare stage"):
        open_sequences(folder, "validation")
    content = (folder / "train.arrow").read_bytes()
    middle = len(content) // 2
    for damaged in (content[:-40], b"", content[: middle - 600] + b"\0" * 1200 + content[middle + 600 :]):
        (folder / "train.arrow").write_bytes(damaged)
        with pytest.raises(DataError, match=r"train\.arrow is damaged"):
            open_sequences(folder, "train")


def test_the_processes_of_a_killed_stage_end_too(tmp_path, model):
    rows = write_rows(tmp_path / "a.jsonl", 30_000)
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.test_data_prepare import make_stage, run, sft\n"
        "recipe = sft(sys.argv[1], dataloader_num_workers=2)\n"
        "run(make_stage(Path(sys.argv[2]), Path(sys.argv[3]), recipe))\n"
    )
    arguments = [str(rows), str(tmp_path / "s"), str(model)]
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=root, start_new_session=True)
    try:
        while not (read_json(tmp_path / "s" / "progress.json") or {}).get("step"):
            assert parent.poll() is None
            time.sleep(0.05)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert not psutil.wait_procs(children, timeout=300)[1]
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()


def test_a_tokenizer_with_neither_pad_nor_end_token_is_one_line(tmp_path):
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=r"the tokenizer has neither a pad_token nor an eos_token; name one of its"):
        run(make_stage(tmp_path / "s", tmp_path / "model", sft(write_rows(tmp_path / "a.jsonl", 3))))
