"""`cosmos config ...`, several files on one command line, and `extends`, as a user types them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema  # which Prefect needs
import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.schema.recipe import Recipe
from tasks.kinds import all_kinds
from tests.command_line import InProcess
from tests.commands.test_cli import refusal
from tests.conftest import Workspace
from tests.unit.config_recipes import valid_configurations

ROOT = Path(__file__).parents[2]
BASE = """
[policy]
model_name_or_path = "org/model"

[train]
epoch = 2

[train.train_policy]
type = "sft"
mini_batch = 4
dataset = { name = "org/rows" }
"""
OLD = """
extends = "base.toml"

[train]
validation_step = 5
moe_backend = "fast"

[train.train_policy]
enable_validation = true
dataset_train_split = "rows"

[pipeline]
name = "old"

[[pipeline.stages]]
name = "only"
kind = "sft"
overrides.train.validation_batch_per_replica = 2
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workspace:
    return InProcess(tmp_path, monkeypatch, capsys)


def loaded(file: Path) -> Pipeline:
    return load_pipeline(file, [], all_kinds())


def test_a_key_is_explained(workspace: Workspace) -> None:
    lines = workspace.cosmos("config", "explain", "train.optm_lr").stdout.splitlines()
    assert lines[:2] == [
        "train.optm_lr  (TrainConfig)",
        "  Peak learning rate: one number, or a table of rates by module path, where the deepest path that contains a "
        "parameter applies and `global` is the rate of all other parameters; a list has one rate per model part, and "
        "there is one model part.",
    ]
    assert lines[2:7] == [
        "  type      number or list of numbers or table of numbers",
        "  default   1e-06",
        "  since     Cosmos-RL",
        "  used by   rl, sft",
        "  status    used",
    ]
    file, _, name = lines[7].removeprefix("  test      ").partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_a_key_of_two_kinds_of_training_is_explained_for_both(workspace: Workspace) -> None:
    lines = workspace.cosmos("config", "explain", "train.train_policy.mini_batch").stdout.splitlines()
    assert [line for line in lines if line.startswith("train.")] == [
        f"train.train_policy.mini_batch  ({name}Config)"
        for name in ("Sft", "DiffusionSft", "Dpo", "Kto", "Grpo", "DiffusionNft", "FlowGrpo", "Ddrl")
    ]
    units = [line.split()[1] for line in lines if line.startswith("  unit")]
    assert units == ["rows"] * 4 + ["completions"] * 4


def test_an_older_name_is_explained_as_todays(workspace: Workspace) -> None:
    old = workspace.cosmos("config", "explain", "train.validation_step").stdout.splitlines()
    new = workspace.cosmos("config", "explain", "validation.freq").stdout.splitlines()
    assert old == [new[0], "  was       train.validation_step", *new[1:]]
    assert new[0] == "validation.freq  (ValidationConfig)"
    assert "  unit      train steps" in new


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("n_generatoin", "n_generatoin: unknown key; did you mean 'rollout.n_generation'?"),
        ("lr", "lr: unknown key; did you mean 'train.optm_lr' or 'train.optm_min_lr_factor'?"),
        ("epochs", "epochs: unknown key; did you mean 'train.epoch'?"),
        ("reward", "reward: unknown key; `cosmos config coverage | grep reward` lists the keys with this word"),
        ("zzz", "zzz: unknown key; `cosmos config coverage` lists them all"),
        ("train.moe_backend", "train.moe_backend does nothing in any version; it would have meant the kernels of "
         "expert layers, which transformers chooses"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_one_line(workspace: Workspace, key: str, said: str) -> None:
    assert refusal(workspace, "config", "explain", key) == said


def test_two_files_differ_in_what_they_do_not_in_what_they_say(workspace: Workspace) -> None:
    workspace.write("base.toml", BASE)
    workspace.write("same.toml", BASE + 'conversation_column_name = "conversations"\n[pipeline]\nname = "base"')
    assert workspace.cosmos("config", "diff", "base.toml", "same.toml").stdout == ""
    workspace.write("other.toml", 'extends = "base.toml"\n[train]\nepoch = 3\nckpt.export_safetensors = false')
    assert workspace.cosmos("config", "diff", "base.toml", "other.toml").stdout.splitlines() == [
        'pipeline.name: "base" -> "other"',
        "export: only in the first",
        "train.epoch: 2 -> 3",
        "train.ckpt.export_safetensors: true -> false",
    ]


def test_the_difference_of_one_stage_has_its_name(workspace: Workspace) -> None:
    stages = "".join(f"[[pipeline.stages]]\nname = '{name}'\nkind = 'sft'\n" for name in ("a", "b"))
    workspace.write("first.toml", f"{BASE}[pipeline]\nname = 'p'\n{stages}")
    workspace.write("second.toml", f"{BASE}[pipeline]\nname = 'p'\n{stages}overrides.train.seed = 1\nretries = 9\n")
    assert workspace.cosmos("config", "diff", "first.toml", "second.toml").stdout.splitlines() == [
        "b-data.train.seed: 42 -> 1",
        "b.retries: 2 -> 9",
        "b.train.seed: 42 -> 1",
    ]


def test_the_schema_for_editors_accepts_our_files_and_marks_mistakes_and_old_keys(workspace: Workspace) -> None:
    schema = json.loads(workspace.cosmos("config", "schema").stdout)
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(schema)
    clean = {"decontaminate_against": ["org/benchmark", {"name": "org/other", "split": "test"}]}
    assert checker.is_valid({"train": {"train_policy": {"type": "sft", "clean": clean}}})
    assert set(schema["properties"]) >= {*Recipe.model_fields, "pipeline", "extends"}
    for name, values in valid_configurations().items():
        if name != "deprecated":  # another schema
            assert [error.message for error in checker.iter_errors(values)] == [], name

    def mistakes(text: str) -> list[str]:
        return [error.message for error in checker.iter_errors(tomllib.loads(text))]

    assert mistakes("train.epoc = 2") == ["Additional properties are not allowed ('epoc' was unexpected)"]
    assert mistakes("train.epoch = 'two'") == ["'two' is not of type 'integer'"]
    assert mistakes("rollout.parallelism.tp_size = 0") == ["0 is less than or equal to the minimum of 0"]
    assert len(mistakes("train.train_policy.kl_bet = 0.1")) == 1
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert train["validation_step"] == {"deprecated": True, "description": "today's validation.freq"}
    assert train["epoch"]["description"] == "Number of passes over the training rows."
    assert schema["properties"]["redis"]["description"].endswith("there is no controller to find]")


def test_a_converted_file_means_the_same_in_todays_names(workspace: Workspace) -> None:
    workspace.write("base.toml", BASE)
    old = workspace.write("old.toml", OLD)
    done = workspace.cosmos("config", "convert", "old.toml")
    assert done.stderr.splitlines() == [
        "cosmos: note: train.validation_step is today's validation.freq",
        "cosmos: note: train.train_policy.enable_validation is today's validation.enable",
        "cosmos: note: train.train_policy.dataset_train_split is today's train.train_policy.dataset.split",
        "cosmos: note: train.moe_backend = 'fast' is ignored; it would have meant the kernels of expert layers, which "
        "transformers chooses",
        "cosmos: note: train.validation_batch_per_replica is today's validation.batch_size",
    ]
    assert tomllib.loads(done.stdout) == {
        "policy": {"model_name_or_path": "org/model"},
        "train": {
            "epoch": 2,
            "train_policy": {"type": "sft", "mini_batch": 4, "dataset": {"name": "org/rows", "split": "rows"}},
        },
        "validation": {"freq": 5, "enable": True},
        "pipeline": {
            "name": "old",
            "stages": [{"name": "only", "kind": "sft", "overrides": {"validation": {"batch_size": 2}, "train": {}}}],
        },
    }
    new = workspace.write("new.toml", done.stdout)
    assert loaded(new).as_toml() == loaded(old).as_toml()
    again = workspace.cosmos("config", "convert", "new.toml")
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_paths_of_an_extended_file_in_another_folder_are_found_from_the_converted_one(workspace: Workspace) -> None:
    policy = """type = "grpo"\ndataset = { name = "rows.jsonl" }\nreward_function = { "reward.py:f" = 2.0 }\n"""
    workspace.write("shared/base.toml", f"[train.train_policy]\n{policy}")
    workspace.write("shared/rows.jsonl", "{}")
    workspace.write("shared/reward.py", "")
    workspace.write("shared/epoch/file", "")  # the name of a key is no path, nor is that of a pipeline
    changes = 'train.epoch = 2\npipeline.name = "rows.jsonl"\n'
    old = workspace.write("mine/old.toml", f'extends = "../shared/base.toml"\n{changes}')
    new = workspace.write("mine/new.toml", workspace.cosmos("config", "convert", "mine/old.toml").stdout)
    assert loaded(new).as_toml() == loaded(old).as_toml()
    assert tomllib.loads(new.read_text())["train"]["epoch"] == 2


def test_older_keys_of_dpo_are_converted_too(workspace: Workspace) -> None:
    workspace.write("dpo.toml", '[train.train_policy]\ntype = "sft"\ntrainer_type = "dpo"\n[custom]\ndpo_beta = 0.3\n')
    assert tomllib.loads(workspace.cosmos("config", "convert", "dpo.toml").stdout) == {
        "train": {"train_policy": {"type": "sft", "trainer_type": "dpo", "dpo": {"beta": 0.3}}}, "custom": {}
    }  # fmt: skip


def test_what_is_wrong_is_not_converted(workspace: Workspace) -> None:
    workspace.write("wrong.toml", "train.enable_validation = 3")
    assert refusal(workspace, "config", "convert", "wrong.toml") == (
        "wrong.toml: validation.enable = 3: must be true or false"
    )


def test_the_coverage_ends_in_the_number_of_keys_by_status(workspace: Workspace) -> None:
    *lines, last = workspace.cosmos("config", "coverage").stdout.splitlines()
    counts = {name: int(number) for number, name in (part.split(" ", 1) for part in last.split(", "))}
    assert set(counts) == {"used", "no effect", "unsupported"}
    assert {name: sum(line[:12].rstrip() == name for line in lines) for name in counts} == counts
    assert sum(counts.values()) == len(lines)
    assert "no effect    redis  stages are processes on their own; there is no controller to find" in lines


def test_later_files_win_over_earlier_ones_and_set_over_all(workspace: Workspace) -> None:
    workspace.write("base.toml", BASE)
    workspace.write("no-export.toml", "train.ckpt.export_safetensors = false")
    workspace.write("export.toml", "train.ckpt.export_safetensors = true\nvalidation.enable = true")

    def stages(*arguments: str) -> str:
        out = workspace.cosmos("check", "--schema-only", *arguments).stdout
        return out.partition(": ok ")[2].strip()

    assert stages("base.toml", "no-export.toml") == "(2 stages: prepare, sft)"
    both = ("base.toml", "no-export.toml", "export.toml")
    assert stages(*both) == "(4 stages: prepare, sft, validate, export)"
    assert stages(*both, "--set", "validation.enable=false") == "(3 stages: prepare, sft, export)"
    workspace.write("sub/extending.toml", 'extends = ["../base.toml", "../export.toml"]\nvalidation.enable = false')
    assert stages("sub/extending.toml", "no-export.toml") == "(2 stages: prepare, sft)"
