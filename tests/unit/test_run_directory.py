"""Runs on disk: made, listed, found again, locked, moved aside; two of them never make the same thing at once."""

from __future__ import annotations

import errno
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from cosmos_core import cli
from cosmos_core.cli_flow import parse_parameters, resume_flow
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.load import read_toml
from cosmos_core.errors import EXIT_USAGE, ConfigError, DataError, ModelError, RewardError
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.run import directory
from cosmos_core.run.directory import (
    Run,
    claim_run,
    create_run,
    create_writable_folder,
    find_run,
    open_or_create_run,
    open_run,
    read_start_info,
)
from cosmos_core.run.files import read_json
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.process import identify_process
from cosmos_core.run.state import update_state
from tasks.kinds import all_kinds
from tests.unit.run_folder import counting_run, load_recipe, make_inputs


def test_a_run_says_what_it_is_and_where_it_came_from(tmp_path: Path) -> None:
    run = counting_run(tmp_path, "first.train.seed=7")
    facts = read_json(run.path / "run.json")
    assert isinstance(facts, dict)
    assert facts["run_id"] == run.id == run.path.name
    assert facts["pipeline"] == "counting"
    assert facts["seeds"] == {"first": 7, "second": 42}
    assert facts["python"] == sys.version.split()[0]
    assert set(facts["versions"]) >= {"torch", "transformers"}
    assert run.path.parent == tmp_path / "outputs"
    assert read_toml(run.path / "pipeline.toml") == run.pipeline.as_toml()


def test_a_run_is_opened_from_its_directory_alone(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (tmp_path / "counting.toml").unlink()
    again = open_run(run.path, all_kinds())
    assert again.pipeline.recipes == run.pipeline.recipes
    assert again.pipeline.stages == run.pipeline.stages
    with pytest.raises(ConfigError) as caught:
        open_run(tmp_path, all_kinds())
    assert str(caught.value) == f"{tmp_path} is not a run directory: it has no pipeline.toml"
    (run.path / "pipeline.toml").write_text("[pipe")
    with pytest.raises(ConfigError, match=r"pipeline.toml: not valid TOML: "):
        open_run(run.path, all_kinds())


def test_runs_that_begin_in_the_same_second_are_all_made_and_all_listed(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom cosmos_core.config.compose import load_pipeline\n"
        "from cosmos_core.run.directory import create_run\nfrom tasks.kinds import all_kinds\n"
        "pipeline = load_pipeline(Path(sys.argv[1]), (), all_kinds())\n"
        "for _ in range(2): create_run(pipeline)\n"
    )
    pipeline = counting_run(tmp_path).pipeline
    other = subprocess.Popen([sys.executable, "-c", program, str(pipeline.source_path)], cwd=Path(__file__).parents[2])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: create_run(pipeline), range(3)))
    assert other.wait(timeout=120) == 0
    listed = read_json(tmp_path / "outputs" / "runs.json")
    assert isinstance(listed, list)
    made = {path.parent.name for path in (tmp_path / "outputs").glob("*/run.json")}
    assert len(made) == 6
    assert sorted(entry["run_id"] for entry in listed) == sorted(made)


def test_a_run_id_that_is_taken_gets_a_suffix(tmp_path: Path) -> None:
    pipeline = counting_run(tmp_path).pipeline
    names = [create_run(pipeline, run_id="mine").id for _ in range(3)]
    assert names == ["mine", "mine-2", "mine-3"]
    with pytest.raises(ConfigError, match=r"run_id = 'mine' is taken in .*; wait if a process runs it"):
        create_run(pipeline, run_id="mine", requires_exact_id=True)  # another process made it after the first look


def test_a_run_id_is_a_plain_name(tmp_path: Path) -> None:
    pipeline = counting_run(tmp_path).pipeline
    for name in ("a/b", ".hidden", "x" * 101, "two words"):
        with pytest.raises(ConfigError) as caught:
            create_run(pipeline, run_id=name)
        rule = "a plain folder name of letters, digits, '.', '-' and '_', at most 100"
        assert str(caught.value) == f"run_id = {name!r} must be {rule}"


def test_a_run_that_could_not_be_made_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("cosmos_core.run.directory.write_json", full)
        with pytest.raises(OSError, match="Read-only"):
            counting_run(tmp_path)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [".cosmos"]
    assert not list((tmp_path / "outputs" / ".cosmos").glob("new-*"))
    assert counting_run(tmp_path).path.is_dir()


def test_an_existing_run_id_is_continued_when_it_means_the_same_and_refused_otherwise(tmp_path: Path) -> None:
    kinds = all_kinds()
    pipeline = counting_run(tmp_path).pipeline
    assert open_or_create_run(pipeline, run_id="mine").id == "mine"
    assert open_or_create_run(pipeline, run_id="mine").id == "mine"
    file = tmp_path / "counting.toml"
    other = load_pipeline(file, ("second.arguments.steps=9", "train.epoch=3"), kinds)
    with pytest.raises(ConfigError) as caught:
        open_or_create_run(other, run_id="mine")
    assert str(caught.value) == (
        "run mine exists and was made with other settings (pipeline.stages.first.overrides.train.epoch, "
        "pipeline.stages.second.arguments.steps, pipeline.stages.second.overrides.train.epoch); leave the run id out, "
        "or resume it as it is"
    )


def test_a_run_is_found_by_path_by_id_or_as_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = tmp_path / "outputs"
    with pytest.raises(ConfigError) as caught:
        find_run("", outputs)
    assert str(caught.value) == (f"no run at all in {outputs}; give its path, or the folder of runs with --output-dir")
    pipeline = counting_run(tmp_path).pipeline
    named, last = create_run(pipeline, run_id="zebra"), create_run(pipeline, run_id="ant")
    assert find_run("zebra", outputs) == named.path
    assert find_run(str(named.path), Path("nowhere")) == named.path
    monkeypatch.chdir(named.path)
    assert find_run(".", Path("..")) == find_run("zebra", Path("..")) == named.path, "its name is its id"
    assert find_run("", outputs) == find_run("latest", outputs) == last.path, "the newest, not the last by name"
    own, _ = create_run(pipeline, run_id="latest"), create_run(pipeline, run_id="bee")
    assert find_run("latest", outputs) == own.path, "a name that a user has given"
    with pytest.raises(ConfigError) as caught:
        find_run("zebr", outputs)
    assert "no run 'zebr'" in str(caught.value)
    with pytest.raises(ConfigError, match="no run 'zzz"):
        find_run("z" * 300, outputs)  # longer than a file name may be
    assert str(caught.value).endswith("ant, latest, bee; give its path, or the folder of runs with --output-dir")


def test_an_output_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        counting_run(tmp_path, f"pipeline.output_dir={tmp_path}/file/outputs")
    problem = f"pipeline.output_dir = '{tmp_path}/file/outputs' cannot be written: Not a directory"
    assert str(caught.value) == f"{problem}; choose another folder"
    for name in (f"{tmp_path}/file", "a\0b", "~nobody-of-that-name/x"):  # the last two can be no path
        with pytest.raises(ConfigError, match=r"cannot be written: .*; choose another folder$"):
            create_writable_folder(Path(name))


def test_a_run_whose_folder_cannot_be_written_is_not_resumed_and_says_what_to_do(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    (run.path / "locks").write_text("")  # as a read-only folder, also for root
    with pytest.raises(ConfigError) as caught:
        cli.resume(str(run.path))
    assert caught.value.exit_code == EXIT_USAGE
    assert str(caught.value) == (
        f"run {run.id} cannot be written: {run.path / 'locks'}: File exists; a run goes on in its own folder: make "
        f"{run.path} writable, or start a new run with --set pipeline.output_dir=FOLDER"
    )


WRONG_INPUTS = [
    ("policy.model_name_or_path=./nowhere", ModelError, "stage 'prepare': policy.model_name_or_path = './nowhere': no "
     "such folder; give a Hugging Face model folder or a Hub id"),
    ("sft.model=/nowhere", ModelError, "stage 'sft': model = '/nowhere': no such folder; give a Hugging Face model "
     "folder or a Hub id"),
    ("train.train_policy.dataset.name=none.jsonl", DataError, "stage 'prepare': train.train_policy.dataset.name = "
     "'none.jsonl': no such file or folder"),
    ("train.train_policy.dataset.name=''", DataError, "stage 'prepare': train.train_policy.dataset.name is empty; give "
     "a file, a folder or a Hub id"),
    ("validation.dataset.name=./none", DataError, "stage 'prepare': validation.dataset.name = './none': no such file "
     "or folder"),
    ("validation.reward_function=exact_macth", RewardError, "stage 'sft': validation.reward_function: there is no "
     "reward 'exact_macth'; one of your own is module:function or path/file.py:function; did you mean 'exact_match'?"),
    ("validation.reward_function=runner", RewardError, "stage 'sft': validation.reward_function: there is no "
     "reward 'runner'; one of your own is module:function or path/file.py:function; known: aesthetic, boxed_math, "
     "clip_score, direct_math, exact_match, format, gsm8k, jpeg_size, judge, ocr, overlong, pickscore, reasoning_gym, "
     "single_choice"),
    ("validation.reward_function='none.py:f'", RewardError, "stage 'sft': validation.reward_function: 'none.py:f':"
     " file none.py does not exist"),
    ("validation.reward_function='no_such_module:f'", RewardError, "stage 'sft': validation.reward_function: "
     "'no_such_module:f': module 'no_such_module' was not found"),
    ("validation.reward_function='json.none:f'", RewardError, "stage 'sft': validation.reward_function: "
     "'json.none:f': module 'json.none' was not found"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "error", "said"),
    [
        pytest.param(*each, id=each[0], marks=[pytest.mark.full] * each[0].endswith(("=./none", "''", "'json.none:f'")))
        for each in WRONG_INPUTS
    ],
)
def test_what_is_not_there_is_told_with_stage_and_key_before_a_run_is_made(
    tmp_path: Path, setting: str, error: type[Exception], said: str
) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path, setting)
    with pytest.raises(error) as caught:
        create_run(pipeline)
    assert str(caught.value) == f"{tmp_path}/recipe.toml: {said}"
    assert not (tmp_path / "outputs").exists()


def test_what_is_there_passes_and_hub_names_are_left_to_the_workers(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    check_inputs(load_recipe(tmp_path))
    check_inputs(load_recipe(tmp_path, "policy.model_name_or_path=org/model", "validation.dataset.name=org/rows"))
    check_inputs(load_recipe(tmp_path, "validation.reward_function={gsm8k=1.0, 'json.decoder:JSONDecoder'=0.5}"))


def test_code_of_a_user_is_found_from_the_current_folder_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cosmos_core.registry import locate_code

    inner = tmp_path / "user_pkg_of_test" / "inner"
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "rewards.py"):  # a folder without __init__.py
        file.write_text("raise RuntimeError('imported')\ndef score(): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert locate_code("user_pkg_of_test.inner.rewards:score") == inner / "rewards.py"
    assert locate_code("user_pkg_of_test:score") == inner.parent / "__init__.py"
    assert "user_pkg_of_test" not in sys.modules
    for wrong in ("user_pkg_of_test.inner:score", "sys:path", ".x:y", "a..b:c"):
        with pytest.raises(ConfigError, match="was not found"):
            locate_code(wrong)
    for wrong in ("rewards", ":f", "rewards:"):
        with pytest.raises(ConfigError, match="is not an import path"):
            locate_code(wrong)


def test_a_resumed_run_goes_on_where_it_began_and_does_not_take_a_folder_for_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = counting_run(tmp_path)
    settings = read_toml(run.path / "pipeline.toml")
    for stage in settings["pipeline"]["stages"]:
        stage["overrides"]["policy"]["model_name_or_path"] = "org/model"
    (run.path / "pipeline.toml").write_text(tomli_w.dumps(settings))
    (tmp_path / "elsewhere/org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    models: list[str] = []

    def open_and_stop(path: Path, kinds: Any) -> Run:
        models.extend(recipe.policy.model_name_or_path for recipe in open_run(path, kinds).pipeline.recipes.values())
        raise ConfigError("stopped")

    monkeypatch.setattr(directory, "open_run", open_and_stop)
    result = CliRunner().invoke(cli.app, ["resume", f"../outputs/{run.id}"])
    assert models == ["org/model", "org/model"] and "where it was started" in result.output


@pytest.mark.parametrize(("folder", "quote"), [("runs", ""), ("my runs", "'")], ids=["plain", "a quoted path"])
def test_a_run_has_one_process_that_runs_it(tmp_path: Path, folder: str, quote: str) -> None:
    (tmp_path / folder).mkdir()
    run = counting_run(tmp_path / folder)
    mine = claim_run(run)
    with pytest.raises(ConfigError) as caught:
        claim_run(run)
    command = f"cosmos status {quote}{run.path}{quote}"
    assert str(caught.value) == f"run {run.id} is being run by another process; wait for it ({command}) or stop it"
    mine.release()
    claim_run(run).release()


def test_a_claim_removes_the_temporary_files_of_killed_writers_but_none_of_another_machine(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    update_state(run.stage_path("first"), **identify_process())
    update_state(run.stage_path("second"), **identify_process() | {"launcher_host": "node-3"})
    here, there = (run.stage_path(name) / ".step_1.4194305.tmp" for name in ("first", "second"))
    for folder in (here, there):  # no process of this machine has a pid above 4194304
        (folder / "policy").mkdir(parents=True)
    claim_run(run).release()
    assert not here.exists() and (there / "policy").is_dir()


def test_the_number_of_threads_is_fixed_when_a_run_is_made(tmp_path: Path) -> None:
    counting_run(tmp_path)
    text = (tmp_path / "counting.toml").read_text().replace("threads = 1\n", "")
    (tmp_path / "counting.toml").write_text(text)
    pipeline = load_pipeline(tmp_path / "counting.toml", (), all_kinds())
    run = open_or_create_run(pipeline, run_id="mine")
    assert run.pipeline.config.threads == count_usable_cores()
    assert open_or_create_run(pipeline, run_id="mine").path == run.path


def test_moving_a_stage_aside_keeps_every_older_one(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    aside = run.path / "superseded"
    for content in ("one", "two", "three"):
        run.stage_path("first").mkdir()
        (run.stage_path("first") / "x").write_text(content)
        directory.supersede_stage(run.stage_path("first"))
    assert [(aside / f"first.{n}" / "x").read_text() for n in (1, 2, 3)] == ["one", "two", "three"]
    shutil.rmtree(aside / "first.1")
    run.stage_path("first").mkdir()
    directory.supersede_stage(run.stage_path("first"))
    assert sorted(path.name for path in aside.iterdir()) == ["first.2", "first.3", "first.4"]
    directory.supersede_stage(run.stage_path("first"))  # nothing there: nothing to do


def test_time_passes_between_runs_without_a_suffix(tmp_path: Path) -> None:
    before = time.strftime("%Y%m%d%H%M%S")
    run = counting_run(tmp_path)
    assert before <= run.id <= time.strftime("%Y%m%d%H%M%S")
    assert counting_run(tmp_path, "train.timestamp='20010203040506'").id == "20010203040506"


@pytest.mark.parametrize(
    ("command", "setting", "file"),
    [
        (["scale", "--rollouts", "3"], "mode='disaggregated'", "engines.json"),
        (["profile"], "profiler.enable_profiler=true", "profile_asked"),
    ],
    ids=["scale", "profile"],
)
def test_a_training_that_runs_is_asked_by_a_file_in_its_stage(
    tmp_path: Path, command: list[str], setting: str, file: str
) -> None:
    make_inputs(tmp_path)
    plain = create_run(load_recipe(tmp_path, kind="grpo"))
    name, *options = command
    with pytest.raises(ConfigError, match="has no training with"):
        cli.app([name, str(plain.path), *options], standalone_mode=False)
    run = create_run(load_recipe(tmp_path, setting, kind="grpo"))
    with pytest.raises(ConfigError, match="rl has not begun; try again when it has"):
        cli.app([name, str(run.path), *options], standalone_mode=False)
    stage = run.stage_path("rl")
    stage.mkdir(parents=True)
    (stage / "stage.toml").touch()
    cli.app([name, str(run.path), *options], standalone_mode=False)
    assert (stage / file).is_file()
    update_state(stage, state="done")
    with pytest.raises(ConfigError, match="rl has ended; only a training that runs can be changed"):
        cli.app([name, str(run.path), *options], standalone_mode=False)


def test_each_data_set_of_a_mixture_is_compared_with_that_of_the_existing_run(tmp_path: Path) -> None:
    make_inputs(tmp_path)

    def mixture(weight: float) -> Pipeline:
        tables = (f"{{name='{tmp_path}/rows.jsonl', label='{n}', weight={w}}}" for n, w in (("a", weight), ("b", 1.0)))
        load_recipe(tmp_path)
        text = (tmp_path / "recipe.toml").read_text()
        dataset = f'dataset.name = "{tmp_path}/rows.jsonl"'
        (tmp_path / "recipe.toml").write_text(text.replace(dataset, f"datasets = [{', '.join(tables)}]"))
        return load_pipeline(tmp_path / "recipe.toml", (), all_kinds())

    open_or_create_run(mixture(1.0), run_id="mine")
    with pytest.raises(ConfigError, match=r"datasets\.[^ ]*rows\.jsonl\[0\]\.weight"):
        open_or_create_run(mixture(2.0), run_id="mine")
    assert open_or_create_run(mixture(1.0), run_id="mine").id == "mine"


def test_a_secret_parameter_of_a_flow_is_not_kept_and_a_resume_asks_for_it(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    service: dict[str, Any] = {"password": ["battery"], "rate": 0.5}
    parameters = {
        "api_key": "correct horse",
        "base": "a b",
        "hf_token": "",
        "size": "3",
        "n": 3,
        "service": service,
    }
    run = create_run(load_recipe(tmp_path), run_id="r", entrypoint="f.py:flow", parameters=parameters)
    start_info = read_start_info(run.path)
    assert start_info is not None
    assert start_info.parameters == {**parameters, "api_key": "***", "service": {"password": ["***"], "rate": 0.5}}
    with pytest.raises(ConfigError, match=r"keep the secret -p api_key=... -p service=...;") as refused:
        resume_flow(run.path)
    folder, _, options = str(refused.value).partition(" cosmos run f.py:flow ")
    assert folder.endswith(f"COSMOS_OUTPUT_DIR={run.path.parent}")
    command = shlex.split(options)
    assert command[::2] == ["-p"] * 6 + ["--run-id"] and command[-1] == "r"
    assert parse_parameters(command[1:-2:2]) == {**parameters, "api_key": "...", "service": "..."}
