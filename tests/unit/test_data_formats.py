"""Files of rows whose names are not as their formats write them."""

from pathlib import Path

import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.modality import DATA_FILES
from cosmos_core.data.rows import load_rows
from cosmos_core.run.content import files_of
from tests.unit.test_data_rows import ROWS, WRITERS, values


@pytest.mark.parametrize("name", [name for name in WRITERS if "." in name])
def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    (tmp_path / name).rename(tmp_path / name.upper())
    for path in (tmp_path / name.upper(), tmp_path):
        assert values(load_rows(DatasetConfig(name=str(path)))) == ROWS
    assert files_of(tmp_path, DATA_FILES) == [tmp_path / name.upper()], "so a change of it is noticed"
