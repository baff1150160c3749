"""Every way in which a data file was ever wrong: one line that names file or row, or the row is skipped and counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from cosmos_core.data import template_limits
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.errors import EXIT_USAGE, DataError, ModelError
from cosmos_core.types import Outcome
from tests.effects.change import GRPO, SFT, recipe, stage_of
from tests.unit.data_tokenizers import CHATML, byte_tokenizer, learned

GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LINE = json.dumps(GOOD).encode() + b"\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(CHATML).save_pretrained(folder)
    return folder


def prepare(model: Path, file: Path, max_length: int = 4096, max_skipped: float = 0.01) -> Outcome:
    """The outcome; the stage lies beside the file."""
    dataset = {"name": str(file), "max_skipped_fraction": max_skipped}
    settings = {**SFT, "train.train_policy.dataset": dataset, "policy.model_max_length": max_length}
    return run(stage_of(file.parent / "stage", recipe(settings), kind="prepare", model=model))


def parquet(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    return lambda path: pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def truncated(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def write_half(path: Path) -> None:
        write(path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return write_half


def arrow(path: Path, table: pa.Table | None = None) -> None:
    table = pa.Table.from_pylist([GOOD] * 99) if table is None else table
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


def wrong_bytes(path: Path) -> None:
    """A column of strings that are no UTF-8."""
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    arrow(path, pa.table({"text": text}))


def saved_and_damaged(path: Path) -> None:
    datasets.Dataset.from_list([GOOD] * 99).save_to_disk(str(path))
    (file,) = path.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:700])


def saved_with(name: str, text: str) -> Callable[[Path], None]:
    """A saved data set of which one file says something else."""

    def write(path: Path) -> None:
        datasets.Dataset.from_list([GOOD]).save_to_disk(str(path))
        (path / name).write_text(text)

    return write


def column(values: pa.Array) -> Callable[[Path], None]:
    return lambda path: arrow(path, pa.table({"text": ["t"] * len(values), "x": values}))


def features(text: str) -> Callable[[Path], None]:
    """A parquet file with this for `datasets` to read in its head."""
    table = pa.Table.from_pylist([GOOD]).replace_schema_metadata({"huggingface": text})
    return lambda path: pa.parquet.write_table(table, path)


def in_folder(name: str, data: bytes | None) -> Callable[[Path], None]:
    """A folder that holds one file, or one folder."""

    def write(path: Path) -> None:
        path.mkdir()
        (path / name).mkdir() if data is None else (path / name).write_bytes(data)

    return write


def content(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


NESTED = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
WRONG = {
    "a truncated parquet": ("a.parquet", truncated(parquet([GOOD] * 99)), "a.parquet is not a readable parquet file:"),
    "a truncated arrow": ("a.arrow", truncated(arrow), "a.arrow is not a readable Arrow file:"),
    "an empty arrow": ("a.arrow", content(b""), "a.arrow is not a readable Arrow file:"),
    "an empty parquet": ("a.parquet", content(b""), "a.parquet is not a readable parquet file:"),
    "a parquet without rows": ("a.parquet", parquet([GOOD][:0]), "a.parquet: file holds no rows"),
    "strings that are no UTF-8": ("a.arrow", wrong_bytes, "a.arrow is not a readable Arrow file:"),
    "a truncated saved data set": ("saved", saved_and_damaged, "train.train_policy.dataset.name:"),
    "a column of numbers": ("a.parquet", parquet([{"text": 3}]), "a.parquet row 0: column 'text' holds '3'; write"),
    "a column of strings": ("a.parquet", parquet([{"messages": ["a", "b"]}]), "a.parquet row 0, turn 1 of 'messages'"),
    "a null": ("a.jsonl", content(LINE + b'{"messages": null}\n'), "a.jsonl:2: no conversation among the columns mes"),
    "a NUL byte in a line": ("a.jsonl", content(LINE + LINE.replace(b"q", b"\0")), "a.jsonl:2: malformed JSON, Inval"),
    "NUL bytes after a crash": ("a.jsonl", content(LINE + bytes(512)), "a.jsonl:2: malformed JSON, Expecting value a"),
    "bytes that are no UTF-8": ("a.jsonl", content(LINE + LINE.replace(b"q", b"\xe9")), "a.jsonl:2: byte 131 is not"),
    "UTF-16": ("a.jsonl", content(LINE.decode().encode("utf-16")), "a.jsonl:1: byte 0 is not UTF-8; save the file as"),
    "an empty file": ("a.jsonl", content(b""), "a.jsonl: file holds no rows; train.train_policy.dataset.name needs a"),
    "blank lines alone": ("a.jsonl", content(b"\n \r\n\t\n"), "a.jsonl: file holds no rows"),
    "byte order marks alone": ("a.jsonl", content(b"\xef\xbb\xbf" * 2), "a.jsonl: file holds no rows"),
    "a mark in the middle": ("a.jsonl", content(LINE + b"\xef\xbb\xbf" + LINE), "a.jsonl:2: malformed JSON, Unexpect"),
    "half a line": ("a.jsonl", content(LINE + LINE[:40]), "a.jsonl:2: malformed JSON,"),
    "a number of 5000 digits": ("a.jsonl", content(b'{"x": ' + b"9" * 5000 + b"}\n"), "a.jsonl:1: malformed JSON, Ex"),
    "brackets 100,000 deep": ("a.jsonl", content(NESTED), "a.jsonl:1: malformed JSON,"),
    "brackets 100,000 deep in an array": ("a.json", content(b"[" + NESTED + b"]"), "a.json: malformed JSON,"),
    "a CSV without rows": ("a.csv", content(b"prompt,response\n"), "a.csv: file holds no rows"),
    "a CSV with a column twice": ("a.csv", content(b"prompt,prompt\na,b\n"), "a.csv: the header names 'prompt' twice"),
    "a CSV with NUL": ("a.csv", content(b"prompt,response\na,\0\nb\n"), "a.csv:3: the line does not have the 2 field"),
    "a role that is a list": (
        "a.jsonl", content(LINE + LINE.replace(b'"user"', b'["user"]')),
        "a.jsonl:2, turn 1 of 'messages': unknown role ['user']; known: system, ",
    ),
    "a role that is an object": (
        "a.jsonl", content(LINE.replace(b'"assistant"', b'{"a": 1}')), "a.jsonl:1, turn 2 of 'messages': unknown role",
    ),
    "pairs of key and value": (
        "a.arrow", column(pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))),
        "a.arrow is not a readable Arrow file: Arrow type map<string, int64",
    ),
    "a union": (
        "a.arrow", column(pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])),
        "a.arrow is not a readable Arrow file: Arrow type sparse_union<0: int64=0> does not have",
    ),
    "a date that Python has not": ("a.arrow", column(pa.array([2**30], pa.date32())), "a.arrow row 0 cannot be read:"),
    "features that are no JSON": ("a.parquet", features("{"), "a.parquet is not a readable parquet file: Expecting "),
    "unknown features": (
        "a.parquet", features('{"info": {"features": {"x": {"_type": "No"}}}}'),
        "a.parquet is not a readable parquet file: Feature type 'No' not found",
    ),
    "a saved data set without a state": (
        "saved", saved_with("state.json", "[]"), "train.train_policy.dataset.name: ",
    ),
    "a saved data set of numbers": (
        "saved", saved_with("dataset_info.json", '{"features": 3}'), "train.train_policy.dataset.name: ",
    ),
    "saved splits that are a number": (
        "saved", in_folder("dataset_dict.json", b'{"splits": 3}'), "train.train_policy.dataset.name: ",
    ),
    "a folder that is named like a file": ("a.jsonl", in_folder("b", b""), "train.train_policy.dataset.name: "),
    "a folder in place of a file": ("folder", in_folder("train.jsonl", None), "train.train_policy.dataset.name: "),
    "a name of two lines": ("folder", in_folder("a\n.jsonl", LINE), "'a\\n.jsonl': the name of a data file must"),
    "a name that is no UTF-8": ("folder", in_folder("\udcff.jsonl", LINE), "'\\udcff.jsonl': the name of a data file"),
    "a column of two lines": ("a.csv", content(b'"a\nb",c\n1,2\n'), "a.csv:3: no conversation among the columns a\\nb"),
    "a column with half a character": ("a.jsonl", content(b'{"\\ud800": 1}'), "a.jsonl:1: no conversation among t"),
    "ten thousand columns": (
        "a.jsonl", content(json.dumps({f"c{i}": i for i in range(10_000)}).encode()),
        "a.jsonl:1: no conversation among the columns c0, c1, c2, c3",
    ),
    "silence": ("a.jsonl", content(b'{"text": " "}\n' * 2), "train: 2 of 2 rows skipped: 2 empty (first: a.jsonl:1);"),
}  # fmt: skip


def test_it_is_one_line_that_names_the_place(model: Path, tmp_path: Path) -> None:
    for number, (case, (name, write, message)) in enumerate(WRONG.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / name)
        with pytest.raises(DataError) as caught:
            prepare(model, folder / name)
        said = str(caught.value)
        assert said.startswith(message) and said.isprintable() and len(said) < 600, case
        assert caught.value.exit_code == EXIT_USAGE and not (folder / "stage" / "data").exists(), case


def test_a_row_that_is_nested_too_deeply_to_be_handed_to_rewards_is_skipped_and_named(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "q"}\n{"prompt": "q", "more": ' + "[" * 800 + "]" * 800 + "}\n")
    dataset = {"name": str(tmp_path / "a.jsonl"), "max_skipped_fraction": 0.5}
    settings = {**GRPO, "train.train_policy.dataset": dataset, "rollout.max_response_length": 8}
    outcome = run(stage_of(tmp_path / "stage", recipe(settings), kind="prepare", model=model))
    assert outcome.info["notices"] == [
        "train: 1 of 2 rows skipped: 1 that cannot be read (first: a.jsonl:2: nested too deeply)"
    ]


RIGHT = {
    "two byte order marks": ("a.jsonl", content(b"\xef\xbb\xbf" * 2 + LINE)),
    "two byte order marks in a CSV": ("a.csv", content(b"\xef\xbb\xbf" * 2 + b"prompt,response\nq,a\n")),
    "line breaks of Windows": ("a.jsonl", content(LINE.replace(b"\n", b"\r\n"))),
    "empty columns at the end of a CSV": ("a.csv", content(b"prompt,response,,\nq,a,,\n")),
    "line breaks of Windows in a CSV": ("a.csv", content(b"prompt,response\r\nq,a\r\n")),
    "no last line break": ("a.jsonl", content(LINE.strip())),
    "a conversation as JSON in a CSV": (
        "a.csv", content(b'messages\n"' + json.dumps(GOOD["messages"]).replace('"', '""').encode() + b'"\n'),
    ),
    "a line separator of Unicode": ("a.csv", content("prompt,response\nq,a\u2028b\x85c\n".encode()), "a\u2028b\x85c"),
    "an escaped NUL": ("a.jsonl", content(LINE.replace(b'"a"', b'"a\\u0000b"')), "a\0b"),
}  # fmt: skip


def test_it_is_no_mistake(model: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML)
    for number, (described, case) in enumerate(RIGHT.items()):
        name, write, answer = (*case, "a")[:3]
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / name)
        prepare(model, folder / name)
        ids, _ = open_sequences(folder / "stage" / "data", "train")[0]
        expected = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert tokenizer.decode(ids) == expected, described


LONG = {
    "a thousand turns": [(("user", "assistant")[i % 2], "answer 42 is " * 22) for i in range(1000)],
    "one answer": [("user", "q"), ("assistant", "answer 42 is " * 220_000)],
    "one question": [("user", "answer 42 is " * 220_000), ("assistant", "a")],
    "many turns": [(("user", "assistant")[i % 2], "answer 42 is " * 220) for i in range(1000)],
}


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(turns, marks=[pytest.mark.full] * (name != "a thousand turns"), id=name)
        for name, turns in LONG.items()
    ],
)
def test_a_very_long_row_is_cut_in_seconds(model: Path, tmp_path: Path, turns: list[tuple[str, str]]) -> None:
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "a.jsonl").write_bytes(LINE + json.dumps(row).encode() + b"\n" + LINE)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before, began = memory("VmRSS"), time.process_time()
    outcome = prepare(model, tmp_path / "a.jsonl", max_length=2048)
    assert time.process_time() - began < 30
    assert memory("VmHWM") - before < 2e9
    lengths = open_sequences(tmp_path / "stage" / "data", "train").lengths.tolist()
    if turns is LONG["one question"]:
        assert lengths == [lengths[0]] * 2
        reason = "longer than policy.model_max_length with nothing left to learn"
        assert outcome.info["notices"] == [f"train: 1 of 3 rows skipped: 1 {reason} (first: a.jsonl:2)"]
    else:
        assert lengths == [lengths[0], 2048, lengths[0]]
        assert "notices" not in outcome.info


def memory(key: str) -> int:
    """Bytes that this process has now (VmRSS), or had at most (VmHWM)."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def template_model(folder: Path, template: str) -> Path:
    byte_tokenizer(template).save_pretrained(folder / "model")
    return folder / "model"


# Every second is a cell of `make acceptance`: another way to an end that one of the others has.
ENDLESS = {
    "'a' * 10 ** 10": "takes more than 2 GiB of memory",
    "'{:>9999999999}'.format(1)": "takes more than 2 GiB of memory",
    "m.content * 10 ** 8": "(writes 300,000,0.. characters|runs on beyond 0.5 s)",
    "9 ** (9 ** 9)": "runs on beyond 0.5 s",
    "1 }}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ 1": "runs on beyond 0.5 s",
}


@pytest.mark.parametrize(
    "expression", [pytest.param(each, marks=[pytest.mark.full] * (i % 2)) for i, each in enumerate(ENDLESS)]
)
def test_a_chat_template_without_bounds_is_ended_and_named(
    tmp_path: Path, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_TEMPLATE_SECONDS", 0.5 if "runs on" in ENDLESS[expression] else 7200.0)
    endless = f"{{% for m in messages if m.content == 'bad' %}}{{{{ {expression} }}}}{{% endfor %}}{CHATML}"
    (tmp_path / "a.jsonl").write_bytes(LINE + LINE.replace(b'"q"', b'"bad"'))
    with pytest.raises(ModelError, match=rf"^a\.jsonl:[12]: the chat template {ENDLESS[expression]}"):
        prepare(template_model(tmp_path, endless), tmp_path / "a.jsonl")


BREAKS = {
    "m.content + 1": 'TypeError: can only concatenate str (not "int") to str',
    "1 // 0": "ZeroDivisionError: integer division or modulo by zero",
    "range(10 ** 9)": "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
}


@pytest.mark.parametrize("expression", BREAKS)
def test_a_row_at_which_the_chat_template_breaks_is_skipped_and_named(tmp_path: Path, expression: str) -> None:
    broken = f"{{% for m in messages if m.content == 'bad' %}}{{{{ {expression} }}}}{{% endfor %}}{CHATML}"
    model, bad = template_model(tmp_path, broken), LINE.replace(b'"q"', b'"bad"')
    (tmp_path / "a.jsonl").write_bytes(LINE + bad)
    outcome = prepare(model, tmp_path / "a.jsonl", max_skipped=0.5)
    skipped = f"refused by the chat template ({BREAKS[expression]}) (first: a.jsonl:2)"
    assert outcome.info["notices"] == [f"train: 1 of 2 rows skipped: 1 {skipped}"]
    assert len(open_sequences(tmp_path / "stage" / "data", "train")) == 1
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "a.jsonl").write_bytes(bad)
    message = r"^train: 1 of 1 rows skipped: 1 refused by the chat template .*no row is left"
    with pytest.raises(DataError, match=message):
        prepare(model, tmp_path / "all" / "a.jsonl", max_skipped=1)


def test_a_row_that_the_assistant_begins_is_learned_or_skipped_and_never_ends_the_stage(tmp_path: Path) -> None:
    line = json.dumps({"messages": [GOOD["messages"][1], *GOOD["messages"]]}).encode() + b"\n"
    seen = {}
    for name, template in (("plain", CHATML), ("hides", "{{ messages[0].content }}\n" + CHATML)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(LINE + line)
        outcome = prepare(template_model(folder, template), folder / "a.jsonl")
        rows = open_sequences(folder / "stage" / "data", "train")
        answers = [learned(byte_tokenizer(template), *map(list, rows[i])) for i in range(len(rows))]
        seen[name] = answers, outcome.info.get("notices")
    answer = "a<|im_end|>"
    reason = "that begins with the assistant, in a way that the chat template hides (first: a.jsonl:2)"
    assert seen == {
        "plain": ([[answer], [answer, answer]], None),
        "hides": ([[answer]], [f"train: 1 of 2 rows skipped: 1 {reason}"]),
    }


def test_a_chat_template_that_says_something_else_of_each_row_is_quoted_five_times(tmp_path: Path) -> None:
    checks = "{% if m.content.startswith('bad') %}{{ raise_exception(m.content) }}{% endif %}"
    model = template_model(tmp_path, f"{{% for m in messages %}}{checks}{{% endfor %}}{CHATML}")
    bad = [LINE.replace(b'"q"', b'"bad %d"' % i) for i in range(9)]
    (tmp_path / "a.jsonl").write_bytes(LINE + b"".join(bad))
    (notice,) = prepare(model, tmp_path / "a.jsonl", max_skipped=1).info["notices"]
    assert notice.startswith("train: 9 of 10 rows skipped: 1 refused by the chat template (bad 0) (first: a.jsonl:2), ")
    assert notice.endswith("(bad 4) (first: a.jsonl:6), 4 for other reasons")
    saved = json.loads((tmp_path / "stage/data/statistics.json").read_text())["train"]
    assert len(saved["skipped"]) == 9
