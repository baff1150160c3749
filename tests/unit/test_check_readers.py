"""What a check finds out about rows, refused for the stages behind them that could not begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import DataError
from cosmos_core.launch.check import check_downstream_stages
from tasks.kinds import all_kinds

RECIPE = '[policy]\nmodel_name_or_path = "model"\n[train.train_policy]\ntype = "sft"\ndataset.name = "rows.jsonl"\n'


def test_a_stage_that_measures_is_refused_rows_of_which_none_are_held_out(tmp_path: Path) -> None:
    for name, more in (("plain", ""), ("measured", "[validation]\nenable = true\n")):
        (tmp_path / f"{name}.toml").write_text(RECIPE + more)
    plain, measured = (load_pipeline(tmp_path / f"{name}.toml", [], all_kinds()) for name in ("plain", "measured"))
    check_downstream_stages(plain, "prepare", {"no_held_out": "no row is held out"})
    check_downstream_stages(measured, "prepare", {})
    with pytest.raises(DataError, match=r"measured\.toml: stage 'sft': no row is held out"):
        check_downstream_stages(measured, "prepare", {"no_held_out": "no row is held out"})
    with pytest.raises(DataError, match=r"plain\.toml: stage 'sft': the data set has 1 rows"):
        check_downstream_stages(plain, "prepare", {"too_few": "the data set has 1 rows"})
