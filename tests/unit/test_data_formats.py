"""Files of rows whose names are not as their formats or splits write them."""

import bz2
import json
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.modality import DATA_FILES
from cosmos_core.data.rows import load_rows
from cosmos_core.errors import DataError
from cosmos_core.run.content import files_of
from tests.unit.test_data_rows import ROWS, WRITERS, values, write_jsonl


@pytest.mark.parametrize("name", [name for name in WRITERS if "." in name])
def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    (tmp_path / name).rename(tmp_path / name.upper())
    for path in (tmp_path / name.upper(), tmp_path):
        assert values(load_rows(DatasetConfig(name=str(path)))) == ROWS
    assert files_of(tmp_path, DATA_FILES) == [tmp_path / name.upper()], "so a change of it is noticed"


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
