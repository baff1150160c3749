"""Files of rows whose names are not as their formats or splits write them."""

import json
from pathlib import Path

import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.modality import DATA_FILES
from cosmos_core.data.rows import load_rows
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
