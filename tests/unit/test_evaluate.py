"""Benchmarks: the numbers are those of lm-eval's own entry point, and mistakes are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.errors import ConfigError, DataError, ModelError, Preempted
from cosmos_core.evaluate import benchmarks, program
from cosmos_core.evaluate.benchmarks import match_tasks, open_benchmarks
from cosmos_core.evaluate.results import build_item_table, convert_metrics
from tasks.kinds import all_kinds
from tests.unit.benchmark_tasks import ROWS, evaluate_stage, save_model, write_tasks
from tests.unit.run_folder import fingerprint_of
from tests.unit.tiny_vlms import save_vlm


def plain_lm_eval(folder: Path, **settings: Any) -> dict[str, Any]:
    """Call lm-eval as its command line does: `lm_eval --model hf --model_args pretrained=DIR --include_path TASKS`."""
    results = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={folder / 'model'}", device="cpu", tasks=["choice", "copy"],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        **{"batch_size": 1, "fewshot_as_multiturn": False} | settings,
    )  # fmt: skip
    assert results is not None
    return dict(results)


def answerable(folder: Path) -> None:
    """Write the tasks anew so that the model gives half of the answers."""
    save_model(folder / "model")
    model, tokenizer = (each.from_pretrained(folder / "model") for each in (AutoModelForCausalLM, AutoTokenizer))
    said = []
    for row in ROWS:
        ids = tokenizer(f"Question: {row['question']}\nAnswer:", return_tensors="pt").input_ids
        text = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
        said.append(text.partition("\n")[0].strip()[:1])
    rows = [row | {"answer": text if i % 2 else "?"} for i, (row, text) in enumerate(zip(ROWS, said, strict=True))]
    write_tasks(folder / "tasks", rows)


def test_metrics_and_items_are_those_of_lm_eval(tmp_path: Path) -> None:
    answerable(tmp_path)
    settings: dict[str, Any] = {"num_fewshot": 1, "limit": 6, "batch_size": 2, "apply_chat_template": True}
    shares = []
    for ours, theirs in (({}, {}), (settings, settings | {"fewshot_as_multiturn": True})):
        stage = evaluate_stage(tmp_path, **ours)
        outcome, plain = program.run(stage), plain_lm_eval(tmp_path, **theirs)
        choice, copy = plain["results"]["choice"], plain["results"]["copy"]
        shares.append(copy["exact_match,first"])
        names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
        assert outcome.metrics == {f"evaluation/choice/{name}": choice[f"{name},none"] for name in names} | {
            "evaluation/copy/exact_match": copy["exact_match,first"],
            "evaluation/copy/exact_match_stderr": copy["exact_match_stderr,first"],
            "evaluation/copy/exact_match_whole": copy["exact_match,whole"],
            "evaluation/copy/exact_match_whole_stderr": copy["exact_match_stderr,whole"],
        }
        items = pq.read_table(stage.path / "items.parquet").to_pylist()
        for task, metric in (("choice", "acc"), ("copy", "exact_match")):
            samples = [each for each in plain["samples"][task] if each["filter"] in {"none", "first"}]
            mine = [item for item in items if item["task"] == task]
            assert [i["doc_id"] for i in mine] == list(range(ours.get("limit", 8)))
            assert [(i["prompt_hash"], i[metric]) for i in mine] == [(s["prompt_hash"], s[metric]) for s in samples]
    assert 0 < shares[0] <= 0.5
    report = json.loads((stage.path / "evaluation.json").read_text())
    assert (report["engine"], report["settings"]["limit"], report["tasks"]["copy"]["items"]) == ("hf", 6, 6)
    assert report["tasks"]["copy"]["version"] == 1.0 and report["tasks"]["copy"]["generation_kwargs"]["until"] == ["\n"]


@pytest.mark.full  # starts an engine
def test_vllm_gives_the_numbers_of_hf_but_for_rounding(tmp_path: Path) -> None:
    # As on lm-eval's command line, vLLM computes float32 weights in 16 bits.
    found = {}
    for engine in ("hf", "vllm"):
        stage = evaluate_stage(tmp_path, engine=engine, max_length=128, limit=3)
        program.run(stage)
        found[engine] = pq.read_table(stage.path / "items.parquet").to_pylist()
    hf_items, vllm_items = found["hf"], found["vllm"]
    assert [item["prompt_hash"] for item in vllm_items] == [item["prompt_hash"] for item in hf_items]
    logprobs = [[json.loads(item["response"]) for item in items if item["task"] == "choice"]
                for items in (hf_items, vllm_items)]  # fmt: skip
    assert [[one for one, _ in item] for item in logprobs[1]] == [
        pytest.approx([one for one, _ in item], rel=0.01, abs=0.1) for item in logprobs[0]
    ]


@pytest.mark.parametrize("call", [program.check, pytest.param(program.run, marks=pytest.mark.full)])
def test_a_head_size_that_vllm_lacks_on_cpu_is_one_line(tmp_path: Path, call: Any) -> None:
    stage = evaluate_stage(tmp_path, engine="vllm", max_length=128)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with pytest.raises(ConfigError, match=r"vLLM on CPU has no attention for head_dim = 16 .*evaluate.engine = 'hf'"):
        call(stage)


def test_an_engine_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"evaluate.engine = 'vllm': vLLM is not installed; .* set it to 'auto'"):
        program.check(evaluate_stage(tmp_path, engine="vllm"))


def test_a_model_that_reads_images_answers_questions_of_text(tmp_path: Path) -> None:
    """Its class is not among those that lm-eval looks up by itself."""
    folder = save_vlm("qwen2.5-vl", tmp_path / "model")
    stage = evaluate_stage(tmp_path, tasks=["choice"], limit=2)
    program.run(stage)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder)
    plain = lm_eval.simple_evaluate(
        model=HFLM(pretrained=loaded, tokenizer=str(folder)), tasks=["choice"], limit=2,
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
    )  # fmt: skip
    items = pq.read_table(stage.path / "items.parquet").to_pylist()
    expected = [[logprob for logprob, _ in sample["filtered_resps"]] for sample in plain["samples"]["choice"]]
    assert [[logprob for logprob, _ in json.loads(item["response"])] for item in items] == expected


def test_a_task_that_a_named_group_has_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with mmlu and mmlu_anatomy, or a pattern that matches both; lm-eval refuses to run a task twice."""
    plain = TaskManager(include_path=str(write_tasks(tmp_path)), include_defaults=False)
    monkeypatch.setattr(benchmarks, "_open_task_manager", lambda config: plain)
    for names, expected in ((("both", "choice"), ["both"]), (("cho*", "both", "copy"), ["both", "copy"])):
        opened = open_benchmarks(EvaluateConfig(tasks=names))
        assert opened.task_names == expected and opened.num_items_by_task["choice"] == 8
        assert "choice" in plain.load(opened.task_names)["tasks"]


def test_items_have_the_truth_values_of_numpy() -> None:
    sample = {"doc_id": 0, "filter": "none", "metrics": ["same"], "same": np.True_, "resps": [["x"]]}
    assert build_item_table({"a": [sample | {"doc_hash": "d", "prompt_hash": "p"}]})["same"].to_pylist() == [1.0]


def test_a_group_has_metrics_too(tmp_path: Path) -> None:
    results = {"both": {"alias": "both", "acc,none": 0.5, "acc_stderr,none": "N/A"}}
    assert convert_metrics(results) == {"evaluation/both/acc": 0.5}


def test_a_stopped_evaluation_goes_on_after_its_last_response(tmp_path: Path) -> None:
    whole, stopped = program.run(evaluate_stage(tmp_path, limit=3)), evaluate_stage(tmp_path, limit=3)
    stopped.stop_requested = True
    for _ in range(2):
        with pytest.raises(Preempted, match="stopped after 1 responses, which are kept"):
            program.run(stopped)
    stopped.stop_requested = False
    assert program.run(stopped).metrics == whole.metrics
    assert {file.name for file in stopped.path.iterdir()} >= {"evaluation.json", "items.parquet"}
    assert not list(stopped.path.glob("responses*"))


def test_a_model_without_a_chat_template_gets_the_one_of_the_recipe(tmp_path: Path) -> None:
    stage = evaluate_stage(tmp_path, limit=1, apply_chat_template=True)
    prompts = [program.run(stage) and pq.read_table(stage.path / "items.parquet")["prompt_hash"].to_pylist()]
    template = (tmp_path / "model" / "chat_template.jinja").rename(tmp_path / "mine.jinja")
    stage = evaluate_stage(tmp_path, limit=1, apply_chat_template=True)
    stage.recipe = stage.recipe.copy_with(policy=stage.recipe.policy.copy_with(chat_template=str(template)))
    assert "choice" in str(program.check(stage).info["found"])
    prompts += [program.run(stage) and pq.read_table(stage.path / "items.parquet")["prompt_hash"].to_pylist()]
    assert prompts[0] == prompts[1]


def test_check_says_what_will_be_run(tmp_path: Path) -> None:
    assert program.check(evaluate_stage(tmp_path, limit=3)).info == {
        "found": "Qwen3ForCausalLM, engine hf; choice (3 items), copy (3 items)"
    }


@pytest.mark.parametrize("call", [program.check, program.run])
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no time is spent on looking for a network
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def refusal(kind: type[Exception], **settings: Any) -> str:
        with pytest.raises(kind) as error:
            call(evaluate_stage(tmp_path, **settings))
        assert "\n" not in str(error.value)
        return str(error.value)

    write_tasks(tmp_path / "unsafe", unsafe_code=True)
    assert "set evaluate.confirm_run_unsafe_code = true" in refusal(ConfigError, include_path=str(tmp_path / "unsafe"))
    write_tasks(tmp_path / "away", dataset_path="nobody/nothing", dataset_kwargs={})
    message = refusal(DataError, include_path=str(tmp_path / "away"), tasks=["copy"])
    assert message.startswith("evaluate.tasks: the rows of 'copy', nobody/nothing, cannot be read (")
    assert "set HF_HOME to that cache, or name a task of local files in evaluate.include_path" in message
    evaluate_stage(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    message = refusal(ModelError, apply_chat_template=True)
    assert "has no chat template; set it to false, or policy.chat_template" in message
    (tmp_path / "tasks" / "test.jsonl").unlink()
    assert "test.jsonl" in refusal(DataError)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        (tmp_path / "model" / name).unlink(missing_ok=True)
    assert "the folder has no tokenizer" in refusal(ModelError)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_split": "tset"}, "KeyError: 'tset'"),
        ({"doc_to_txt": ""}, "TypeError: .*'doc_to_txt'"),
        ({"doc_to_text": "{{qestion}}"}, "UndefinedError: 'qestion' is undefined"),
        ({"doc_to_text": "{{question"}, "TemplateSyntaxError: .*"),
        ({"filter_list": [{"name": "x", "filter": [{"function": "no"}]}]}, "KeyError: .*Unknown filter 'no'.*"),
    ],
)
def test_a_mistake_in_the_file_of_a_task_is_one_line(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    task = yaml.safe_load((tasks / "copy.yaml").read_text())
    (tasks / "copy.yaml").write_text(yaml.safe_dump(task | changes))
    with pytest.raises(ConfigError, match=rf"^evaluate.tasks: lm-eval cannot load 'copy' \({reason}\); correct its"):
        open_benchmarks(EvaluateConfig(tasks=("copy",), include_path=str(tasks)))


def test_a_task_without_rows_is_one_line(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "test.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"lm-eval cannot load 'copy' \(.*\); correct its YAML file or its rows"):
        open_benchmarks(EvaluateConfig(tasks=("copy",), include_path=str(tasks)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_length": 8}, r"AssertionError: .*tokens to generate \(8\).*maximum sequence length \(8\)\."),
        ({"num_fewshot": 50}, "ValueError: Sample larger than population or is negative"),
    ],
)
def test_settings_that_do_not_fit_a_task_are_one_line(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    message = rf"^evaluate.tasks: lm-eval cannot run them with these rows and settings \({reason}\); see the rows of"
    with pytest.raises(ConfigError, match=message):
        program.run(evaluate_stage(tmp_path, tasks=["copy"], **settings))


def test_a_failure_of_the_network_is_no_mistake_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**settings: Any) -> None:
        raise ValueError("no answer") from ConnectionError("reset")

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", fail)
    with pytest.raises(ValueError, match="no answer"):
        program.run(evaluate_stage(tmp_path, tasks=["copy"]))


def pipeline_with(folder: Path, *settings: str) -> Pipeline:
    file = folder / "pipeline.toml"
    file.write_text(
        '[[pipeline.stages]]\nname = "scores"\nkind = "evaluate"\nmodel = "model"\n'
        '[evaluate]\ntasks = ["choice"]\ninclude_path = "suite"\n'
    )
    return load_pipeline(file, settings, all_kinds())


def fingerprint_with(folder: Path, *settings: str) -> str:
    return fingerprint_of(pipeline_with(folder, *settings), "scores").value


def test_models_tasks_rows_and_settings_count_by_content(tmp_path: Path) -> None:
    write_tasks(tmp_path / "suite", dataset_kwargs={"data_files": {"test": [str(tmp_path / "elsewhere.jsonl")]}})
    save_model(tmp_path / "model")
    seen = [fingerprint_with(tmp_path)]
    for file, content in (
        ("elsewhere.jsonl", "{}"), ("elsewhere.jsonl", "{ }"), ("suite/choice.yaml", "task: choice"),
        ("model/generation_config.json", '{"eos_token_id": 3}'),
    ):  # fmt: skip
        (tmp_path / file).write_text(content)
        seen.append(fingerprint_with(tmp_path))
    for setting in ("evaluate.limit=3", 'evaluate.engine="hf"', 'rollout.backend="hf"', "evaluate.seed=0"):
        seen.append(fingerprint_with(tmp_path, setting))
    assert len(set(seen)) == len(seen)
    (tmp_path / "suite" / "__pycache__").mkdir()
    (tmp_path / "suite" / "__pycache__" / "utils.cpython-311.pyc").write_bytes(b"0")
    unread = ("policy.model_max_length=99", "train.seed=3", "evaluate.fewshot_as_multiturn=true")
    assert {fingerprint_with(tmp_path, setting) for setting in ("pipeline.name=a", *unread)} == {seen[4]}


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("_shared_yaml", "dataset_kwargs: { data_files: { test: [ROWS/test.jsonl] } }"),
        ("folder.yaml", "dataset_kwargs: { data_dir: ROWS }"),
        ("path.yaml", "dataset_path: ROWS"),
    ],
)
def test_local_rows_count_however_a_task_names_them(tmp_path: Path, file: str, task: str) -> None:
    save_model(tmp_path / "model")
    for folder in ("rows", "suite"):
        (tmp_path / folder).mkdir()
    (tmp_path / "suite" / file).write_text(task.replace("ROWS", str(tmp_path / "rows")))
    seen = set()
    for rows in ("{}", "{ }"):
        (tmp_path / "rows" / "test.jsonl").write_text(rows)
        seen.add(fingerprint_with(tmp_path))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("evaluate.tasks=[]", "evaluate.tasks is empty; name tasks of lm-eval"),
        ("policy.is_diffusers=true", "evaluate.tasks is for language models"),
    ],
)
def test_a_stage_without_tasks_or_a_model_of_text_is_refused(tmp_path: Path, setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_capabilities(pipeline_with(tmp_path, setting))


def test_an_unknown_task_is_refused_with_a_near_name(tmp_path: Path) -> None:
    manager = TaskManager(include_path=str(write_tasks(tmp_path / "tasks")), include_defaults=False)
    with pytest.raises(ConfigError, match=r"have no task 'choise'; did you mean 'choice'\?"):
        match_tasks(manager, "choise")
    assert match_tasks(manager, "c*") == ["choice", "copy"]
