"""Files of rows whose names are not as their formats or splits write them."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.modality import DATA_FILE_PATTERNS
from cosmos_core.data.rows import load_rows
from cosmos_core.errors import DataError
from cosmos_core.run.content import list_data_files
from tests.unit.test_data_rows import ROWS, WRITERS, values, write_jsonl


@pytest.mark.parametrize("name", [name for name in WRITERS if "." in name])
def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    (tmp_path / name).rename(tmp_path / name.upper())
    for path in (tmp_path / name.upper(), tmp_path):
        assert values(load_rows(DatasetConfig(name=str(path)))) == ROWS
    assert list_data_files(tmp_path, DATA_FILE_PATTERNS) == [tmp_path / name.upper()], "so a change of it is noticed"


def test_lines_are_read_by_their_other_suffix_and_rows_in_one_list_of_an_object(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.ndjson")
    turns = {"messages": [{"role": "user", "content": "q"}]}
    for name, content in {"b.json": {"data": ROWS}, "c.json": turns, "d.json": {"id": 1, "data": ROWS}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "e.json").write_text('{"a": [{"b": 1}]}\n' * 2)
    read = {file.name: values(load_rows(DatasetConfig(name=str(file)))) for file in sorted(tmp_path.iterdir())}
    assert read["a.ndjson"] == read["b.json"] == ROWS
    assert (read["c.json"], read["d.json"]) == ([turns], [{"id": 1, "data": ROWS}])
    assert read["e.json"] == [{"a": [{"b": 1}]}] * 2


def test_a_split_may_be_a_word_inside_the_name_of_a_file(tmp_path: Path) -> None:
    for name, part in [("gsm8k_train", ROWS[:2]), ("gsm8k_test", ROWS[2:3]), ("retrained", ROWS[3:])]:
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS[:2]
    assert values(load_rows(DatasetConfig(name=str(tmp_path), split=("test",)))) == ROWS[2:3]
    (tmp_path / "gsm8k_train.jsonl").unlink()
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS[3:], "a test file is never trained on"


def test_a_subset_that_a_copy_of_a_hub_data_set_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "socratic").mkdir()
    write_jsonl(tmp_path / "socratic" / "train.jsonl")
    (tmp_path / "dataset_infos.json").write_text('{"main": {"features": {}}}')  # no file of rows
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS
    assert values(load_rows(DatasetConfig(name=str(tmp_path), subset="socratic"))) == ROWS
    with pytest.raises(DataError, match=r"^dataset\.subset = 'main' is none of the folders socratic in "):
        load_rows(DatasetConfig(name=str(tmp_path), subset="main"))
    (tmp_path / "socratic").rename(tmp_path / "data")
    assert values(load_rows(DatasetConfig(name=str(tmp_path), subset="main"))) == ROWS


def test_damage_in_the_middle_of_a_compressed_file_is_told(tmp_path: Path) -> None:
    texts = random.Random(0)
    lines = "".join(json.dumps({"text": texts.randbytes(500).hex()}) + "\n" for _ in range(2000))
    content = bytearray(bz2.compress(lines.encode()))
    middle = len(content) * 3 // 4  # behind the first block, which is read without an error
    content[middle : middle + 1000] = bytes(1000)
    (tmp_path / "a.jsonl.bz2").write_bytes(content)
    with pytest.raises(DataError, match=r"^a\.jsonl\.bz2 is damaged: .*; compress it again"):
        load_rows(DatasetConfig(name=str(tmp_path / "a.jsonl.bz2")))


@pytest.mark.parametrize("compression", [bz2, gzip, lzma])
def test_damage_in_a_later_stream_of_a_compressed_file_is_told(tmp_path: Path, compression: Any) -> None:
    file = tmp_path / f"a.jsonl.{'xz' if compression is lzma else compression.__name__.replace('ip', '')}"
    streams = [bytearray(compression.compress(json.dumps(row).encode() + b"\n")) for row in ROWS[:2]]
    file.write_bytes(b"".join(streams))
    assert values(load_rows(DatasetConfig(name=str(file)))) == ROWS[:2]
    streams[1][1] ^= 1
    file.write_bytes(b"".join(streams))
    with pytest.raises(DataError, match=r" is damaged: .*; compress it again"):
        load_rows(DatasetConfig(name=str(file)))


def test_a_copy_of_a_file_is_refused_and_a_missing_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in (0, 2):
        write_jsonl(tmp_path / f"train-0000{index}-of-00003.jsonl", ROWS[index : index + 1])
    assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == [ROWS[0], ROWS[2]]
    assert "dataset: train has 2 of its 3 files; the rows of the others are missing" in caplog.text
    (tmp_path / "train-00000-of-00003.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match=r"has train-0\S*\.jsonl and train-0\S*\.jsonl\.gz, and one is .* a copy"):
        load_rows(DatasetConfig(name=str(tmp_path)))


def test_a_link_to_a_missing_file_is_an_error_and_not_fewer_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    for name in ("test.jsonl", "b.jsonl"):
        assert values(load_rows(DatasetConfig(name=str(tmp_path)))) == ROWS
        (tmp_path / name).symlink_to(tmp_path / "not-fetched")
    with pytest.raises(DataError, match=r"^b\.jsonl cannot be read: .*No such file"):
        load_rows(DatasetConfig(name=str(tmp_path)))


def test_the_advice_for_a_file_in_utf16_is_to_convert_it_from_that(tmp_path: Path) -> None:
    for encoding, said in (("utf-16", "utf-16"), ("cp1252", "cp1252")):
        (tmp_path / "a.csv").write_bytes("prompt,response\né,à\n".encode(encoding))
        with pytest.raises(DataError, match=rf"is not UTF-8; .* iconv -f {said} -t utf-8"):
            load_rows(DatasetConfig(name=str(tmp_path / "a.csv")))


def test_maps_of_a_parquet_file_are_objects(tmp_path: Path) -> None:
    table = pa.table(
        {"turns": pa.array([[[("role", "user"), ("content", "q")]]], pa.list_(pa.map_("string", "string")))}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = load_rows(DatasetConfig(name=str(tmp_path / "a.parquet")))
    assert values(rows) == [{"turns": [{"role": "user", "content": "q"}]}]


@pytest.mark.parametrize("name", ["a.parquet", "saved"])
def test_media_are_left_as_they_are_stored_and_other_columns_are_decoded(tmp_path: Path, name: str) -> None:
    media = {"clip": datasets.Video(), "sound": datasets.Audio(), "image": datasets.Image()}
    features = datasets.Features({"id": datasets.Value("int64"), **media, "answer": datasets.Json()})
    stored = {"bytes": b"none of their formats", "path": None}
    columns = {"id": pa.array([1]), **{column: pa.array([stored], features[column].pa_type) for column in media}}
    table = pa.table({**columns, "answer": pa.array(['{"x": [1, "a"]}'], pa.json_())}, schema=features.arrow_schema)
    if name == "saved":
        datasets.Dataset(table).save_to_disk(str(tmp_path / name))
    else:
        pyarrow.parquet.write_table(table, tmp_path / name)
    (row,) = values(load_rows(DatasetConfig(name=str(tmp_path / name))))
    assert row == {"id": 1, **dict.fromkeys(media, stored), "answer": {"x": [1, "a"]}} and [*row] == [*features]


def test_the_format_of_a_saved_data_set_does_not_change_its_rows(tmp_path: Path) -> None:
    row = {"prompt": "Is it?", "completion": "Yes.", "label": True}
    datasets.Dataset.from_list([row]).with_format("numpy", columns=["label"]).save_to_disk(str(tmp_path / "saved"))
    assert repr([values for _, values in load_rows(DatasetConfig(name=str(tmp_path / "saved")))]) == repr([row])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_missing_value_of_pandas_is_a_null(tmp_path: Path, name: str) -> None:
    text = json.dumps({"prompt": "q", "image": float("nan"), "score": float("inf")})
    (tmp_path / name).write_text(text if name.endswith("l") else f"[{text}]")
    [(_, row)] = load_rows(DatasetConfig(name=str(tmp_path / name)))
    assert row == {"prompt": "q", "image": None, "score": float("inf")}


def test_cleared_rows_of_a_spreadsheet_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt;completion;label\nq;a;TRUE\n;;\n\n;;\n")
    rows = load_rows(DatasetConfig(name=str(tmp_path / "rows.csv")))
    assert list(rows) == [("rows.csv:2", {"prompt": "q", "completion": "a", "label": "TRUE"})] and len(rows) == 1
