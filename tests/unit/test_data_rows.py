"""Reading rows from every kind of file, and the place that each error names."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import socket

import datasets
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data import formats
from cosmos_core.data.messages import read_conversation
from cosmos_core.data.rows import has_local_split, load_rows, split_rows
from cosmos_core.errors import DataError

ROWS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(5)]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(rows):
    return [row for _, row in rows]


def locations(rows):
    return [where for where, _ in rows]


def write_arrow(path, rows=ROWS, new_file=pa.ipc.new_file):
    table = pa.Table.from_pylist(rows)
    with new_file(path, table.schema) as file:
        file.write_table(table)


def packed(path, compress, write):
    """Write a file with `write`, and compress it."""
    write(path)
    path.write_bytes(compress(path.read_bytes()))


WRITERS = {
    "rows.jsonl": write_jsonl,
    "lines.json": write_jsonl,
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "rows.csv": lambda path: pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), path),
    "rows.tsv": lambda path: path.write_text(
        "".join("\t".join(each) + "\n" for each in [ROWS[0], *map(dict.values, ROWS)])
    ),
    "rows.v1.jsonl.gz": lambda path: packed(path, gzip.compress, write_jsonl),
    "array.json.gz": lambda path: packed(path, gzip.compress, lambda file: file.write_text(json.dumps(ROWS))),
    "rows.csv.bz2": lambda path: packed(path, bz2.compress, WRITERS["rows.csv"]),
    "rows.tsv.xz": lambda path: packed(path, lzma.compress, WRITERS["rows.tsv"]),
    "rows.parquet": lambda path: pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path),
    "file.arrow": write_arrow,
    "stream.arrow": lambda path: write_arrow(path, new_file=pa.ipc.new_stream),
    "saved": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(str(path)),
    "saved_splits": lambda path: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(path)),
}


@pytest.mark.parametrize("name", ["rows.v1.jsonl.gz", "array.json.gz", "rows.csv.bz2", "rows.tsv.xz"])
def test_a_compressed_file_that_is_damaged_is_told_and_a_line_keeps_its_number(tmp_path, name):
    WRITERS[name](tmp_path / name)
    for content in ((tmp_path / name).read_bytes()[:-12], b"no archive", b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"^{name}"):
            values(load_rows(DatasetConfig(name=str(tmp_path / name))))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n{"a": "\xff"}\n'))
    with pytest.raises(DataError, match=r"^b\.jsonl\.gz:2: byte 16 is not UTF-8"):
        values(load_rows(DatasetConfig(name=str(tmp_path / "b.jsonl.gz"))))


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert values(load_rows(DatasetConfig(name=str(tmp_path / name)))) == ROWS


TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
TALKS = {"OpenAI": {"messages": TALK}, "ShareGPT": {"conversations": SHAREGPT}, "pair": {"prompt": TALK[:1],
         "completion": TALK[1:]}, "columns": {"question": "q", "answer": "a"}}  # fmt: skip
WIDE = pa.large_list(pa.struct({"role": pa.dictionary(pa.int32(), pa.string()), "content": pa.large_string()}))


def write_csv(path, rows):
    fields = [[value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([rows[0].keys(), *fields])


WRITERS_OF_ROWS = {
    "a.jsonl": write_jsonl,
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "a.parquet": lambda path, rows: pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path),
    "wide.parquet": lambda path, rows: pyarrow.parquet.write_table(
        pa.table({name: pa.array([row[name] for row in rows], WIDE) for name in rows[0]}), path
    ),
    "a.arrow": write_arrow,
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(str(path)),
    "a.csv": write_csv,
}


@pytest.mark.parametrize("name", WRITERS_OF_ROWS)
def test_every_format_holds_conversations(tmp_path, name):
    for talk in list(TALKS.values())[: 1 if name == "wide.parquet" else None]:
        path = tmp_path / "_".join(talk) / name
        path.parent.mkdir()
        WRITERS_OF_ROWS[name](path, [talk])
        (row,) = values(load_rows(DatasetConfig(name=str(path))))
        assert read_conversation(row, "row") == TALK, talk


def test_a_tool_call_has_the_arguments_that_it_was_written_with(tmp_path):
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        for name, arguments in (("weather", {"city": "Paris", "days": [1]}), ("add", {"a": {"x": 1}}))
    ]
    row = {"messages": [TALK[0], *calls]}
    datasets.Dataset.from_list([row]).save_to_disk(str(tmp_path / "saved"))
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", [row])
    for name in ("saved", "a.parquet", "a.jsonl"):
        found = values(load_rows(DatasetConfig(name=str(tmp_path / name))))[0]
        assert read_conversation(found, "row")[1:] == calls, name
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}]}
    write_jsonl(tmp_path / "a.jsonl", [{"messages": [TALK[0], said]}])
    found = values(load_rows(DatasetConfig(name=str(tmp_path / "a.jsonl"))))[0]
    assert read_conversation(found, "row")[1] == said, "a null that somebody wrote is learned"


def test_a_shard_without_rows_is_passed_over_where_others_have_some(tmp_path):
    write_jsonl(tmp_path / "train-0.jsonl", [])
    write_jsonl(tmp_path / "train-1.jsonl")
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS
    write_jsonl(tmp_path / "train-1.jsonl", [])
    with pytest.raises(DataError, match=r"^train-0\.jsonl: file holds no rows"):
        load_rows(DatasetConfig(name=str(tmp_path)))


def test_a_copy_of_a_hub_data_set_is_read_from_the_folder_of_its_files(tmp_path):
    for folder, part in [("main", ROWS[:2]), ("socratic", ROWS[2:]), (".cache", ROWS)]:
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train-00000-of-00001.jsonl", part)
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=r"its folders are not looked into; name .*/main' or .*/socratic'$"):
        load_rows(DatasetConfig(name=str(tmp_path)))
    rows = load_rows(DatasetConfig(name=str(tmp_path), subset="socratic"))
    assert values(rows) == ROWS[2:] and rows.folder == tmp_path / "socratic"
    (tmp_path / "socratic" / "train-00000-of-00001.jsonl").unlink()
    rows = load_rows(DatasetConfig(name=str(tmp_path)))
    assert values(rows) == ROWS[:2] and rows.folder == tmp_path / "main"
    write_jsonl(tmp_path / "train.jsonl", ROWS[4:])
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS[4:]


def test_the_readme_of_a_folder_declares_subsets_and_the_files_of_their_splits(tmp_path, caplog):
    configs = """
    - {config_name: default, data_files: [{split: train, path: data/a-*}, {split: test, path: held/b.jsonl}]}
    - {config_name: plain, data_files: "**/b.jsonl"}
    - {config_name: named, data_dir: held/more}
    """
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nconfigs:{configs}\n---\n# Rows\n", encoding="utf-8")
    for name, part in [("data/a-00000-of-00002", ROWS[:1]), ("held/b", ROWS[1:2]), ("held/more/dev", ROWS[2:])]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    for subset, split, expected in [
        ("", "train", ROWS[:1]),
        ("", "test[:1]", ROWS[1:2]),
        ("plain", "train", ROWS[1:2]),
    ]:
        dataset = DatasetConfig(name=str(tmp_path), subset=subset, split=(split,))
        assert values(load_rows(dataset)) == expected, (subset, split)
        assert list(datasets.load_dataset(str(tmp_path), subset or None, split=split)) == expected
    assert values(load_rows(DatasetConfig(name=str(tmp_path), subset="named", split=("validation",)))) == ROWS[2:]
    assert "has 1 of its 2 files" in caplog.text and has_local_split(tmp_path, "test")
    with pytest.raises(DataError, match=r"'dev', but of the data files that README.md declares those of train, test"):
        load_rows(DatasetConfig(name=str(tmp_path), split=("dev",)))
    with pytest.raises(DataError, match=r"BuilderConfig 'none' not found\. Available: \['default', 'plain', 'named'\]"):
        load_rows(DatasetConfig(name=str(tmp_path), subset="none"))
    (tmp_path / "data" / "a-00000-of-00002.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"`configs` in the README\.md of .* cannot be read \(complete the copy, or give"
    ):
        load_rows(DatasetConfig(name=str(tmp_path)))


def test_a_folder_with_the_name_of_a_split_has_its_rows_in_files_of_any_name(tmp_path):
    for split, part in [("train", ROWS[:2]), ("test", ROWS[2:])]:
        (tmp_path / "main" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "main" / split / "0000.jsonl", part)
    for subset in ({"name": str(tmp_path), "subset": "main"}, {"name": str(tmp_path / "main")}):
        assert values(load_rows(DatasetConfig(**subset))) == ROWS[:2]
        assert values(load_rows(DatasetConfig(**subset, split=("test[1:]", "train")))) == ROWS[3:] + ROWS[:2]
    with pytest.raises(DataError, match=r"no file for the split 'dev'.*name .*/test' or .*/train'$"):
        load_rows(DatasetConfig(name=str(tmp_path / "main"), split=("dev",)))


def test_shards_are_of_the_split_that_they_name_and_of_no_other(tmp_path):
    for name, part in [("train_sft", ROWS[:1]), ("train_prefs", ROWS[1:2]), ("test_prefs", ROWS[2:])]:
        write_jsonl(tmp_path / f"{name}-00000-of-00001-0a1b.jsonl", part)
    assert values(load_rows(DatasetConfig(name=str(tmp_path), split=("train_prefs",)))) == ROWS[1:2]
    with pytest.raises(DataError, match=r"split 'train'; .*; set dataset\.split to one of test_prefs, train_prefs, "):
        load_rows(DatasetConfig(name=str(tmp_path)))
    (tmp_path / "shards").mkdir()
    for i in range(2):
        write_jsonl(tmp_path / "shards" / f"part-0000{i}-of-00002.jsonl", ROWS[i : i + 1])
    assert values(load_rows(DatasetConfig(name=str(tmp_path / "shards")))) == ROWS[:2]


def test_a_row_knows_its_line_although_blank_lines_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"x": 1}\n\n{"x": 2}\r\n', encoding="utf-8")
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.jsonl")))
    assert locations(rows) == ["a.jsonl:1", "a.jsonl:3"]
    assert values(rows)[1] == {"x": 2}


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"prompt,response\nq,{'a' * 200_000}\n")
    assert values(load_rows(DatasetConfig(name=str(tmp_path / "a.csv")))) == [
        {"prompt": "q", "response": "a" * 200_000}
    ]


def test_a_file_that_is_not_there_is_told_with_the_folders_that_were_looked_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_rows(DatasetConfig(name="rows.jsonl"))
    assert f"'rows.jsonl': it does not exist in {str(tmp_path)!r} or beside the file that is run; " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": }\n', r"^a\.jsonl:2: malformed JSON, Expecting value at column 7"),
        ("a.jsonl", '{"x": 1}\n[1, 2]\n', r"^a\.jsonl:2: a line must be a JSON object .*'\[1, 2\]'"),
        ("a.json", '[{"x": 1},\n {"x": }]', r"^a\.json:2: malformed JSON"),
        ("a.json", '{\n "data": [\n  {"x": 1}]}', r"^a\.json:1: the JSON object does not end on its line; write an"),
        ("a.json", '[{"x": 1}, 3]', r"^a\.json row 1: a row must be a JSON object, not '3'"),
        ("a.json", "[]", r"^a\.json: file holds no rows"),
        ("a.csv", "x,y\n1,2\n3\n", r"^a\.csv:3: the line does not have the 2 fields"),
        ("a.csv", "x,y\n1,2,3\n", r"^a\.csv:2: the line does not have the 2 fields"),
        ("a.csv", 'x,y\n1,"2\n', r"^a\.csv:2: malformed CSV"),
        ("a.txt", "no", r"a\.txt has the suffix '\.txt'; known: \.jsonl"),
    ],
)
def test_a_malformed_file_is_a_data_error_that_names_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(DatasetConfig(name=str(tmp_path / name)))


NAMES = ["./no.jsonl", "no.parquet", "~no-such-user/no.csv", f"{'no' * 200}.json", "no\0.jsonl", "no\n.jsonl"]


@pytest.mark.parametrize("name", ["/no/such/folder", *NAMES])
def test_a_missing_file_is_a_data_error_that_names_key_and_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"validation\.dataset\.name = '.*no.*': .*does not exist"):
        load_rows(DatasetConfig(name=name), "validation.dataset")


@pytest.mark.parametrize("is_told", [True, False], ids=["told to stay offline", "nobody to ask"])
def test_a_hub_id_without_a_network_is_a_data_error_at_once(monkeypatch, is_told):
    asked = []

    def unknown(*host):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", is_told)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"dataset\.name = 'nobody/nothing' is no local file and could not be had"):
        load_rows(DatasetConfig(name="nobody/nothing"))
    assert len(asked) <= 2, "it looks for a network before and after, and tries nothing again"
    assert constants.HF_HUB_OFFLINE is datasets.config.HF_HUB_OFFLINE is is_told


def test_a_name_longer_than_a_path_can_be_is_a_data_error(monkeypatch):
    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    for name in ("a" * 300, "org/" + "a" * 300):
        with pytest.raises(DataError, match="is no local file and could not be had"):
            load_rows(DatasetConfig(name=name))


def test_a_folder_gives_the_files_of_each_split_in_the_order_asked_for(tmp_path):
    parts = {"train-00001": ROWS[1:2], "train-00000": ROWS[:1], "test": ROWS[4:], "trains": ROWS[2:3]}
    for name, part in parts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    folder = str(tmp_path)
    assert values(load_rows(DatasetConfig(name=folder))) == ROWS[:2]
    assert values(load_rows(DatasetConfig(name=folder, split=("test", "train")))) == [ROWS[4], *ROWS[:2]]
    windows = {"[:1]": ROWS[:1], "[1:]": ROWS[1:2], "[-1:]": ROWS[1:2], "[:50%]": ROWS[:1], "[:9]": ROWS[:2]}
    for window, chosen in windows.items():
        rows = load_rows(DatasetConfig(name=folder, split=(f"train{window}",)))
        assert values(rows) == chosen and len(rows) == len(chosen)
    assert values(load_rows(DatasetConfig(name=folder, split=("train[:1]", "test[:1]")))) == [ROWS[0], ROWS[4]]
    with pytest.raises(DataError, match=r"split = 'train\[7:\]' names no row of 2"):
        load_rows(DatasetConfig(name=folder, split=("train[7:]",)))
    with pytest.raises(DataError, match=r"has no file for the split 'test\.jsonl'; it holds"):
        load_rows(DatasetConfig(name=folder, split=("test.jsonl",)))
    with pytest.raises(DataError, match=r"has no file for the split 'validation'; it holds test\.jsonl, train-00000"):
        load_rows(DatasetConfig(name=folder, split=("validation",)))
    assert has_local_split(tmp_path, "test") and not has_local_split(tmp_path, "validation")


def test_files_that_are_named_for_no_split_are_all_training_rows_but_held_out_files_never_are(tmp_path, caplog):
    for name, part in [("b", ROWS[1:2]), ("a", ROWS[:1]), ("test", ROWS[4:]), ("c.jsonl.zst", ROWS[2:3])]:
        write_jsonl(tmp_path / (f"{name}.jsonl" if "." not in name else name), part)
    rows = load_rows(DatasetConfig(name=str(tmp_path)))
    assert (values(rows), locations(rows)) == (ROWS[:2], ["a.jsonl:1", "b.jsonl:1"])
    assert f"dataset.name: c.jsonl.zst in {tmp_path} is not read" in caplog.text


def test_a_single_file_or_a_saved_data_set_has_no_other_split(tmp_path):
    write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"split = 'test', but .*a\.jsonl is one file"):
        load_rows(DatasetConfig(name=str(tmp_path / "a.jsonl"), split=("test",)))
    WRITERS["saved_splits"](tmp_path / "saved")
    with pytest.raises(DataError, match=r"split = 'test', but .*saved has train"):
        load_rows(DatasetConfig(name=str(tmp_path / "saved"), split=("test",)))
    assert locations(load_rows(DatasetConfig(name=str(tmp_path / "saved"))))[2] == "saved[train] row 2"


def test_held_out_rows_are_disjoint_complete_ordered_and_depend_on_the_seed_alone(tmp_path):
    rows = load_rows(DatasetConfig(name=str(write_jsonl(tmp_path / "a.jsonl", [{"x": i} for i in range(100)]))))
    train, held_out = split_rows(rows, 20, seed=1)
    kept, rest = [row["x"] for row in values(train)], [row["x"] for row in values(held_out)]
    assert len(rest) == 20 and sorted(kept + rest) == list(range(100))
    assert kept == sorted(kept) and rest == sorted(rest)
    assert locations(held_out)[0] == f"a.jsonl:{rest[0] + 1}"
    assert [row["x"] for row in values(split_rows(rows, 0.2, seed=1)[1])] == rest
    assert [row["x"] for row in values(split_rows(rows, 20, seed=2)[1])] != rest
    with pytest.raises(DataError, match=r"test_size = 100 of 100 rows leaves none to train on"):
        split_rows(rows, 100, seed=1)


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_larger_than_a_block_is_read_element_by_element(tmp_path, indent, monkeypatch):
    monkeypatch.setattr(formats, "_CHARACTERS_PER_READ", 16)
    elements = [{"x": i, "text": "é😀[{,]}" * (i % 7), "deep": [{"a": [1, "]"]}]} for i in range(50)]
    (tmp_path / "a.json").write_text("\ufeff " + json.dumps(elements, indent=indent, ensure_ascii=False) + "\n")
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.json")))
    assert values(rows) == elements and values(rows) == elements  # a second time, for the second pass


@pytest.mark.parametrize("text", ['[{"x": 1}] {}', '[{"x": 1} {"x": 2}]', '[{"x": 1},', '[{"x": 1},]'])
def test_an_array_that_does_not_end_well_is_malformed(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"^a\.json:1: malformed JSON"):
        load_rows(DatasetConfig(name=str(tmp_path / "a.json")))


def test_parquet_rows_are_read_a_batch_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_ROWS_PER_BATCH", 4)
    table = pa.Table.from_pylist([{"x": i} for i in range(30)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.parquet")))
    assert [row["x"] for row in values(rows)] == list(range(30))
    assert locations(rows)[29] == "a.parquet row 29"


def test_csv_rows_of_several_lines_are_read_alone_and_keep_leading_zeros(tmp_path):
    (tmp_path / "a.csv").write_bytes('prompt,answer\r\n"a\r\nb, ""é""",007\r\n\r\nc,2'.encode())
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.csv")))
    assert values(rows) == [{"prompt": 'a\r\nb, "é"', "answer": "007"}, {"prompt": "c", "answer": "2"}]
    assert locations(rows) == ["a.csv:3", "a.csv:5"]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(("separator", "said"), [(";", "semicolons"), (",", "commas"), ("\t", "tabs")])
def test_a_spreadsheet_is_read_with_the_separator_of_its_header(tmp_path, separator, said, mark):
    lines = [("Frage", '"Antwort, kurz; gut"'), ("Was ist 1+1?", '"2; also 1+1"'), ('"a, b\r\nc"', "d")]
    text = mark + "".join(separator.join(line) + "\r\n" for line in lines)
    (tmp_path / "a.csv").write_bytes(text.encode())
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.csv")))
    assert values(rows) == [
        {"Frage": "Was ist 1+1?", "Antwort, kurz; gut": "2; also 1+1"},
        {"Frage": "a, b\r\nc", "Antwort, kurz; gut": "d"},
    ]
    (tmp_path / "a.csv").write_bytes((text + "one\r\n").encode())
    with pytest.raises(DataError, match=rf"a\.csv:5: the line .* quote fields that contain {said}"):
        load_rows(DatasetConfig(name=str(tmp_path / "a.csv")))
