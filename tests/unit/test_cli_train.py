"""Commands that write a recipe for a user's rows: what they refuse before they look at model and rows."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from cosmos_core import cli_train
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.types import Outcome
from tests.unit.observed_runs import STARTED, finished_run, write


@pytest.mark.parametrize(
    ("reward", "message"),
    [("boxd_math", "did you mean 'boxed_math'"), ("nofile.py:f", "nofile.py"), ("mine.py:g", "mine.py.*'?g"),
     ("mine.py:", "mine.py"), ("mine.py", "mine.py:FUNCTION"), ("mine.py:f,boxd_math", "'boxed_math'"),
     ("", "no such")],
)  # fmt: skip
def test_a_reward_that_is_not_there_is_refused_before_model_and_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completion):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=message):
        cli_train.grpo(model="none", data="none", reward=[reward], dry_run=True)


SETTINGS = [("policy.model_name_or_path", "tiny", "--model")]


@pytest.mark.parametrize(
    ("save", "reason"), [("folder", "Is a directory"), ("none/x.toml", "No such file"), ("file/x.toml", "Not a direct")]
)
def test_a_recipe_that_cannot_be_written_is_a_mistake_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{save}: the recipe cannot be written: {reason}.* with --save"):
        cli_train._write_recipe({"method": "sft", "model": "tiny"}, SETTINGS, save)


def test_a_recipe_survives_any_name_of_a_column_and_refuses_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    asked = {"method": "sft", "model": "tiny", "response": "Ant\nwort"}
    path = cli_train._write_recipe(asked, [("train.response", "Ant\nwort", "--response")], str(tmp_path / "x.toml"))
    assert tomllib.loads(path.read_text()) == {"train": {"response": "Ant\nwort"}}
    with pytest.raises(ConfigError, match=r"r\\udce9.*: it is not UTF-8"):
        cli_train._write_recipe(asked, [("train.data", "r\udce9.csv", "--data")], str(path))
    assert "wort" in path.read_text(), "what was there stays"


def test_overrides_are_part_of_the_command_that_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    executed: list[list[str]] = []
    monkeypatch.setattr(cli_train.os, "execv", lambda _, arguments: executed.append(arguments))
    for dry_run in (True, False):
        cli_train._save_and_run_recipe({"method": "sft", "model": "tiny"}, SETTINGS, "", dry_run, ["train.epoch=2"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2] == "# run with --set train.epoch=2"
    assert printed.endswith("run it again: cosmos run tiny-sft.toml --set train.epoch=2\n")
    assert executed[0][1:] == ["-m", "cosmos_core", "run", "tiny-sft.toml", "--set", "train.epoch=2"]


def test_a_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="is there and was edited"):
        cli_train._write_recipe({"method": "sft", "model": "tiny"}, SETTINGS, str(tmp_path / "x.toml"))
    assert (tmp_path / "x.toml").read_bytes() == b"\xff\n"


def test_a_number_is_the_id_of_a_run_and_never_a_model_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run '20200101000000'"):
        cli_train._resolve_model("20200101000000", tmp_path)
    with pytest.raises(ConfigError, match=f"^no run '{tmp_path}/nope' in {tmp_path}"):
        cli_train._resolve_model(f"{tmp_path}/nope", tmp_path)
    assert cli_train._resolve_model("org/model", tmp_path) == "org/model"


def test_the_system_prompt_of_the_training_is_found_for_its_export_too(tmp_path: Path) -> None:
    run = tmp_path / "outputs/1"
    (run / "stages/publishable/safetensors").mkdir(parents=True)
    (run / "pipeline.toml").write_text(
        '[pipeline]\nname = "p"\n[[pipeline.stages]]\nname = "sft"\nkind = "sft"\n'
        '[[pipeline.stages]]\nname = "publishable"\nkind = "export"\nmodel = "stage:sft"\nafter = ["sft"]\n'
        '[policy]\nmodel_name_or_path = "m"\n[train.train_policy]\ntype = "sft"\nsystem_prompt = "Be brief."\n'
        '[train.train_policy.dataset]\nname = "rows.jsonl"\n'
    )
    (run / "stages/publishable/result.json").write_text("{}")
    assert cli_train._find_system_prompt(str(run / "stages/publishable/safetensors")) == "Be brief."


def test_a_reward_that_does_not_exist_is_refused_by_init_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["grpo", "none", "none", "boxd_math"])
    monkeypatch.setattr(cli_train.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(cli_train.typer, "prompt", lambda *_, **__: next(answers))
    with pytest.raises(ConfigError, match="did you mean 'boxed_math'"):
        cli_train.init()


def test_the_model_of_a_run_that_is_not_done_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training before the last one may have made it, or the stage that all began from."""
    run = finished_run(tmp_path)
    assert cli_train._resolve_model(str(run), tmp_path) == f"{run}/stages/export/safetensors/step_80"
    assert capsys.readouterr().err == ""
    for name in ("grpo", "export"):
        (run / "stages" / name / "result.json").unlink()
    write(run / "stages/grpo/state.json", {"state": "failed", "error": "boom", "spans": [[STARTED, STARTED + 1]]})
    model = f"{run}/stages/sft/safetensors/step_40"
    assert cli_train._resolve_model(str(run), tmp_path) == model
    assert capsys.readouterr().err == f"cosmos: note: run {run.name} is failed; its last model so far is {model}\n"


def test_init_takes_a_run_and_prints_a_command_that_a_shell_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, options = finished_run(tmp_path), list[dict[str, str]]()
    answers = iter(["sft", run.name, "my rows.csv", "my rows-sft.toml"])
    monkeypatch.setattr(cli_train.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(cli_train.typer, "prompt", lambda *_, **__: next(answers))
    monkeypatch.setattr(cli_train.typer, "confirm", lambda *_: False)
    monkeypatch.setattr(cli_train, "_propose_settings", lambda given: options.append(given) or SETTINGS)
    cli_train.init()
    assert options[0]["model"] == f"{run}/stages/export/safetensors/step_80"
    assert capsys.readouterr().out == "run it with: cosmos run 'my rows-sft.toml'\n"
    Path("my rows-sft.toml").write_text("edited")
    with pytest.raises(ConfigError, match=r"run it with cosmos run 'my rows-sft\.toml', or"):
        cli_train._write_recipe({"method": "sft", "model": "m"}, SETTINGS, "my rows-sft.toml")


def test_a_stage_is_named_by_the_id_of_its_run_and_a_folder_may_be_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for stage, model in (("sft", "safetensors"), ("publish", "s3://bucket/prefix")):
        folder = tmp_path / f"outputs/20260101000000/stages/{stage}"
        folder.mkdir(parents=True)
        commit_manifest(folder, Outcome(info={"model": model}), kind="sft", fingerprint="f", inputs={})
    (tmp_path / "2024").mkdir()
    found = {
        name: cli_train._resolve_model(name, Path("outputs"))
        for name in ("20260101000000/stages/sft", "outputs/20260101000000/stages/publish", "2024")
    }
    assert [*found.values()] == ["outputs/20260101000000/stages/sft/safetensors", "s3://bucket/prefix", "2024"]
    asked = {"method": "sft", "model": "m", "data": "./-rows.csv"}
    assert str(cli_train._make_recipe_path(asked, "")) == "rows-sft.toml", "no option of cosmos run"


def test_a_stage_without_a_model_and_one_whose_result_is_damaged_are_no_model(tmp_path: Path) -> None:
    stages = [tmp_path / f"1/stages/{name}" for name in ("prepare", "sample", "damaged")]
    for stage in stages:
        stage.mkdir(parents=True)
    for stage, outcome in zip(stages, (Outcome(), Outcome(info={"model": ""})), strict=False):
        commit_manifest(stage, outcome, kind="prepare", fingerprint="f", inputs={})
    (stages[2] / "result.json").write_text("{")
    for stage in stages:
        with pytest.raises(ConfigError, match=f"^1/stages/{stage.name}: this stage made no model$"):
            cli_train._resolve_model(f"1/stages/{stage.name}", tmp_path)


def test_a_home_folder_that_no_shell_has_expanded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli_train._resolve_model("~/model", Path("outputs")) == f"{tmp_path}/model"
    assert cli_train._make_recipe_path({"method": "sft", "model": "m"}, "~/x.toml") == tmp_path / "x.toml"


def test_the_rank_of_an_adapter_that_set_names_reaches_the_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 0, json.dumps([["rank", json.loads(command[-1]).get("lora_rank"), ""]])
        )

    monkeypatch.setattr(cli_train.subprocess, "run", run)
    asked = {"method": "sft", "model": "m", "data": "hub/rows"}
    found = {each: cli_train._propose_settings(asked, [each])[0][1] for each in ("policy.lora.r=8", "policy.lora={}")}
    assert found == {"policy.lora.r=8": 8, "policy.lora={}": 16}
    assert cli_train._propose_settings(asked, ["train.epoch=2"])[0][1] is None


def test_a_look_that_crashes_says_its_error_in_one_line() -> None:
    asked = {"method": "sft", "no_such_option": "x"}
    with pytest.raises(CosmosError, match=r"ended with 1: TypeError: .*no_such_option") as caught:
        cli_train._propose_settings(asked)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("name", ["none/rows.jsonl", "./none/rows", "https://host/rows.csv"])
def test_rows_that_are_not_there_are_named_by_their_option(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^--data '(none/rows\.jsonl|none/rows|https://host/rows.csv)': it does not exist in '[^']*'; give",
    ):
        cli_train._propose_settings({"method": "sft", "model": "tiny", "data": name})


def test_an_evaluation_has_tasks_of_a_language_model_or_prompts_and_rewards_of_a_diffusion_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options in ({}, {"tasks": "gsm8k", "prompts": "a.txt", "reward": "x"}, {"prompts": "a.txt"}, {"reward": "x"}):
        with pytest.raises(ConfigError, match="give --tasks for a language model, or --prompts and --reward for"):
            cli_train.evaluate(model="org/model", dry_run=True, **options)
    cli_train.evaluate(model="org/model", prompts="a.txt, b.jsonl", reward="clip_score", size=512, dry_run=True)
    recipe = tomllib.loads(capsys.readouterr().out)
    assert recipe["evaluate"] == {"prompts": ["a.txt", "b.jsonl"], "rewards": ["clip_score"]}
    assert recipe["policy"]["is_diffusers"] and recipe["policy"]["diffusers"]["inference_size"] == [512, 512]


def test_the_recipe_of_a_command_that_runs_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, path = {"method": "sft", "model": "tiny"}, str(tmp_path / "x.toml")
    monkeypatch.setattr(cli_train.os, "execv", lambda *_: None)
    for _ in range(2):  # the same recipe serves both commands
        cli_train._save_and_run_recipe(asked, SETTINGS, path, False, [])
    with pytest.raises(ConfigError, match=r"x\.toml is the recipe of a command that still runs; .* --save FILE"):
        cli_train._write_recipe(asked, [("policy.model_name_or_path", "other", "--model")], path)
    assert "tiny" in Path(path).read_text()


def test_an_override_that_no_recipe_has_is_refused_before_the_recipe_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for override, message in (
        ("train.epoh=2", "^train.epoh: unknown key; did you mean"),
        ("trian.epoch=2", "^--set"),
    ):
        with pytest.raises(ConfigError, match=message):
            cli_train._save_and_run_recipe({"method": "sft", "model": "tiny"}, SETTINGS, "", False, [override])
    assert not list(tmp_path.iterdir())
