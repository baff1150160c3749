"""Files and command lines that nobody should write: each is valid, or one line says what is wrong with it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config import compose
from cosmos_core.config.compose import Pipeline, append_stage, load_pipeline
from cosmos_core.config.files import read_config
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.errors import EXIT_USAGE
from tasks.kinds import all_kinds
from tests.command_line import InProcess
from tests.unit.test_config_load import GRPO, SFT, load, refused
from tests.unit.test_config_mutations import in_file, told

# What a file holds, and what is said of it; empty: it is valid.
FILES = {
    "empty": (b"", ""),
    "comments of 200 kB": ((b"# no more than this" + b"." * 180 + b"\n") * 1_000, ""),
    "text of 100 kB": (b"[custom]\ntext = '" + b"a" * 100_000 + b"'", ""),
    "2,000 free keys": (b"[custom]\n" + b"".join(b"key%d = 1\n" % n for n in range(2_000)), ""),
    "2,000 unknown keys": (b"".join(b"key%d = 1\n" % n for n in range(2_000)),
                           "key0: unknown key (and key1, key2, key3, 1996 more)"),
    "2,000 unknown tables": (b"".join(b"[table%d]\n" % n for n in range(2_000)),
                             "table0: unknown key (and table1, table2, table3, 1996 more)"),
    "lines of Windows": (b"[train]\r\nepoch = 2\r\n", ""),
    "UTF-8 with its mark": (b"\xef\xbb\xbf[train]\n", ""),
    "UTF-16": ("[train]".encode("utf-16"), "not UTF-8 text at byte 0"),
    "cut in a character": ("[custom]\nx = 'größe'".encode()[:-3], "not UTF-8 text at byte 18"),
    "null byte": (b"[train]\0\n", "not valid TOML: Expected newline or end of document after a statement (at line 1, "
                  "column 8)"),
    "null character": (b'[train]\noutput_dir = "a\\u0000b"\n',
                       "a text with null characters or with bytes that are not UTF-8"),
    "half a pair": (b'[train]\noutput_dir = "\\ud800"\n', "not valid TOML: Escaped character is not a Unicode scalar "
                    "value (at line 2, column 21)"),
    "terminal escapes": (b'[train]\n"\\u001b[31mred\\n" = 1', r"train.'\x1b[31mred\n': unknown key"),
    "two lines in a value": (b'mode = "a\\nb"', r"mode = 'a\nb': input should be 'disaggregated', 'colocated' or "
                             "'colocated_separated'"),
    "two lines in a pattern": (b'policy.freeze_pattern = ["\\n\\u001b["]', r"policy.freeze_pattern: '\n\x1b[' is not a "
                               "regular expression: unterminated character set at position 2 (line 2, column 2)"),
    "an open string": (b"[train]\noutput_dir = 'a\nepoch = 1\n",
                       "not valid TOML: Expected \"'\" (at end of document)"),
    "a key twice": (b"[train]\nepoch = 1\nepoch = 2\n",
                    "not valid TOML: Cannot overwrite a value (at line 3, column 10)"),
    "a table twice": (b"[train]\n[train]\n", "not valid TOML: Cannot declare ('train',) twice (at line 2, column 7)"),
    "a table in a value": (b"train = 1\n[train.ckpt]\n",
                           "not valid TOML: Cannot overwrite a value (at line 2, column 12)"),
    "arrays in arrays": (b"[custom]\nx = " + b"[" * 5000 + b"]" * 5000, "nested more than 32 tables deep"),
    "tables in tables": (b"[custom" + b".a" * 5000 + b"]", "nested more than 32 tables deep"),
    "inline tables": (b"[custom]\nx = " + b"{a=" * 5000 + b"1" + b"}" * 5000, "nested more than 32 tables deep"),
    "too deep below a stage": (b"[custom" + b".a" * 29 + b"]", "nested more than 32 tables deep"),
    "no value": (b"a = \n", "not valid TOML: Invalid value (at line 1, column 5)"),
    "a date": (b"[train]\nepoch = 2020-01-01", "train.epoch = datetime.date(2020, 1, 1): must be an integer"),
    "free dates": (b"[custom]\nwhen = 2020-01-01T12:00:00Z\nthen = 12:00:00", ""),
    "no number": (b"[train]\noptm_lr = nan", "train.optm_lr = nan: input should be a finite number"),
    "free no number": (b"[custom]\nx = [nan, -inf, inf]", ""),
    "an endless number": (b"[train]\noptm_weight_decay = inf",
                          "train.optm_weight_decay = inf: input should be a finite number"),
    "4301 digits": (b"[train]\nepoch = " + b"9" * 4301, "not valid TOML: Exceeds the limit (4300 digits) for integer "
                    "string conversion: value has 4301 digits; use sys.set_int_max_str_digits() to increase the limit"),
    "5000 hexadecimal digits": (b"[custom]\nx = 0x" + b"f" * 5000,
                                "an integer of more than 64 bits, the most that TOML has"),
    "a key without a name": (b'"" = 1', "'': unknown key"),
    "an array for a table": (b"[[train]]\nepoch = 1", "train = [{'epoch': 1}]: must be a table"),
    "a table for a value": (b"[train.epoch]\nx = 1", "train.epoch = {'x': 1}: must be an integer"),
    "extends a number": (b"extends = 3", "extends = 3: must be a file or a list of files, relative to this one"),
    "extends nothing": (b"extends = ''", "extends = ['']: must be a file or a list of files, relative to this one"),
    "extends no files": (b"extends = []", ""),
    "extends what is not there": (b"extends = 'none.toml'", "extends = 'none.toml': no such file (FOLDER/none.toml)"),
    "extends a folder": (b"extends = '.'", "is a folder; name a .toml file in it"),
    "extends itself": (b"extends = 'hostile.toml'", "extends itself: FOLDER/hostile.toml -> FOLDER/hostile.toml"),
    "extends two lines": (b'extends = "a\\n\\u001b[31m"',
                          r"extends = 'a\n\x1b[31m': no such file (FOLDER/a \x1b[31m)"),
    "extends a long name": (b"extends = '" + b"a" * 300 + b"'", f"extends = '{'a' * 300}': no such file "
                            f"(FOLDER/{'a' * 300})"),
    "a recipe of a long name": (b"[[pipeline.stages]]\nname = 'a'\nkind = 'sft'\nrecipe = '" + b"a" * 300 + b"'",
                                f"stage 'a': recipe = '{'a' * 300}': no such file (FOLDER/{'a' * 300})"),
}  # fmt: skip


def test_a_hostile_file_is_valid_or_one_line(tmp_path: Path) -> None:
    for name, (content, said) in FILES.items():
        found = told(in_file(content, tmp_path / "hostile.toml"))
        assert found.partition(": ")[2] == said.replace("FOLDER", str(tmp_path)), name


def test_a_text_that_is_too_large_once_each_stage_has_it_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "MAX_FILE_BYTES", 200_000)  # 16 MiB otherwise
    said = told(in_file(b"[custom]\ntext = '" + b"a" * 80_000 + b"'", tmp_path / "hostile.toml"))
    assert said.endswith(": more than 200000 bytes once it is written out for 3 stages")


def test_files_that_extend_each_other_are_one_line(tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    in_file("extends = 'b.toml'", first)
    in_file("extends = ['a.toml']", second)
    assert told(first) == f"{first}: extends itself: {first} -> {second} -> {first}"
    for number in range(40):
        in_file(f"extends = '{number + 1}.toml'", tmp_path / f"{number}.toml")
    last = tmp_path / "32.toml"
    assert told(tmp_path / "0.toml") == f"{last}: behind 32 files that extend each other, the most that there may be"
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    assert told(loop) == f"{loop}: cannot be read: Too many levels of symbolic links"


ARGUMENTS: list[tuple[list[Any], str]] = [
    (["misspelt.toml"], "misspelt.toml: train.epoc: unknown key; did you mean train.epoch?"),
    (["escapes.toml"], r"escapes.toml: 'a\n\x1b[31m': unknown key"),
    (["bytes.toml"], "bytes.toml: not UTF-8 text at byte 0"),
    (["."], ".: is a folder; name a .toml file in it"),
    (["none\n\x1b[31m.toml"], r"none \x1b[31m.toml: no such file"),
    (["orphan.toml"], "orphan.toml: extends = 'none.toml': no such file (none.toml)"),
    (["good.toml", "misspelt.toml"], "good.toml: train.epoc: unknown key; did you mean train.epoch?"),
    (["good.toml", "--set", "train.epoch=0x" + "f" * 20],
     "good.toml: train.epoch = '0xffffffffffffffffffff': must be an integer"),
    (["good.toml", "--set", "train.epo\nch=1"],
     r"good.toml: train.'epo\nch': unknown key; did you mean train.epoch?"),
    (["good.toml", "--set", b"train.output_dir=\xff"],
     "good.toml: a text with null characters or with bytes that are not UTF-8"),
    ([b"\xff.toml"], r"\udcff.toml: a text with null characters or with bytes that are not UTF-8"),
]  # fmt: skip


def test_the_command_says_it_in_one_line_with_exit_code_64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (
        ("good.toml", "train.epoch = 2"), (os.fsdecode(b"\xff.toml"), ""), ("misspelt.toml", "train.epoc = 2"),
        ("escapes.toml", '"a\\n\\u001b[31m" = 2'), ("bytes.toml", b"\xff\xfe"),
        ("orphan.toml", "extends = 'none.toml'"),
    ):  # fmt: skip
        in_file(content, tmp_path / name)
    workspace = InProcess(tmp_path, monkeypatch, capsys)
    for arguments, said in ARGUMENTS:
        done = workspace.cosmos("check", "--schema-only", *arguments, code=EXIT_USAGE)
        assert (done.stdout, done.stderr) == ("", f"cosmos: {said}\n")


def test_a_file_is_read_once_so_that_it_may_be_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "recipe.toml"
    os.mkfifo(pipe)

    def write() -> None:
        with open(pipe, "w", encoding="utf-8") as file:
            file.write(SFT)
            pipe.unlink()

    threading.Thread(target=write, daemon=True).start()
    assert load_pipeline(pipe, [], all_kinds()).recipes["sft"].train.epoch == 2


def test_a_link_to_a_file_without_a_suffix_keeps_its_name(tmp_path: Path) -> None:
    for name in ("blob", "real.jsonl"):
        (tmp_path / name).write_text("{}\n")
    for link, target, found in (("a.jsonl", "blob", "a.jsonl"), ("b.jsonl", "real.jsonl", "real.jsonl")):
        (tmp_path / link).symlink_to(target)  # as in the cache of the Hub, whose files have no suffix
        recipe = load(tmp_path, SFT.replace("org/rows", link)).recipes["sft"]
        assert recipe.train.train_policy.dataset.name == str(tmp_path / found)


def test_the_interpreter_of_workers_is_the_same_from_any_folder(tmp_path: Path) -> None:
    for python, found in (("venv/bin/python", f"{os.getcwd()}/venv/bin/python"), ("python3", "python3")):
        assert load(tmp_path, SFT, f"pipeline.python={python}").config.python == found


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.timestamp='a b'", "train.timestamp = 'a b': string should match pattern"),
        ("sft.timeout='0s'", "timeout = '0s' must be above 0; leave it out for no limit"),
        ("evaluate.seed=4294967296", "evaluate.seed = 4294967296: input should be less than 4294967296"),
        ("rollout.gpu_memory_utilization=0", "rollout.gpu_memory_utilization = 0: input should be greater than 0"),
        ("sft.sweep={metric='loss', branches=[{stages=[]}]}", "0.stages = []: value should have at least 1 item"),
        ("train.optm_impl=[]", "train.optm_impl: it is an empty list; give one value per model part"),
    ],
)
def test_a_value_that_would_fail_in_a_run_is_refused_by_the_schema(tmp_path: Path, setting: str, said: str) -> None:
    assert said in refused(tmp_path, SFT, setting)


def test_an_empty_string_in_place_of_a_list_of_names_is_an_empty_list(tmp_path: Path) -> None:
    settings = (f"train.train_policy.{each}=''" for each in ("filter_reward_metric", "reward_env", "dataset.split"))
    policy = load(tmp_path, GRPO, *settings).recipes["rl"].train.train_policy
    assert isinstance(policy, GrpoConfig)
    assert (policy.filter_reward_metric, policy.reward_env, policy.dataset.split) == ((), (), ("train",))


def test_weights_of_a_user_that_is_not_there_are_missing(tmp_path: Path) -> None:
    pipeline = load(tmp_path, SFT, "policy.model_safetensor_path=~nobody-of-that-name/w.safetensors")
    [weights] = [each for each in pipeline.inputs(pipeline.stage("sft")) if each.role == "weights"]
    assert weights.location == "~nobody-of-that-name/w.safetensors"


def test_the_recipe_of_a_flow_names_files_that_are_beside_the_recipe_it_extends(tmp_path: Path) -> None:
    for name, text in (("base/mine.py", ""), ("base/b.toml", SFT + 'reward_function = "mine.py:f"\n'),
                       ("recipes/r.toml", 'extends = "../base/b.toml"')):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = tmp_path / "recipes/r.toml"
    empty = Pipeline(source, PipelineConfig(), {}, all_kinds())
    recipe = append_stage(empty, {"name": "s", "kind": "sft"}, read_config(source, [])[0], source).recipes["s"]
    assert recipe.validation.reward_function == {f"{tmp_path}/base/mine.py:f": 1.0}
