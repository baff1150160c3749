"""What is declared of each kind of stage, and that nobody asks for a kind by its name."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import tomli_w

from cosmos_core.config.load import without_none
from cosmos_core.run.stage import read_kind
from tasks.kinds import all_kinds

ROOT = Path(__file__).parents[2]


def names(**policy: object) -> set[str]:
    return {name for name, kind in all_kinds().items() if all(getattr(kind, k) == v for k, v in policy.items())}


def test_what_the_kinds_are_for() -> None:
    assert {name: kind.makes for name, kind in all_kinds().items()} == {
        "custom": "", "evaluate": "metrics", "export": "model", "gate": "", "merge": "model", "prepare": "data",
        "report": "page", "rl": "model", "sample": "", "select": "model", "sft": "model",
        "upload": "publication", "validate": "metrics",
    }  # fmt: skip
    reads_prepared = {"sft", "rl", "sample", "validate"}
    assert names(has_mesh=True) == names(scores=True) == names(reads_data="prepared") == reads_prepared
    assert (names(trains_model=True), names(feed="rollouts"), names(feed="dataset")) == ({"sft", "rl"}, {"rl"}, {"sft"})
    assert names(selects_branch=True) == {"select"}
    assert names(reads_model="weights") == {"sft", "rl", "sample", "validate", "evaluate", "export", "merge"}
    assert names(reads_model="tokenizer") == names(reads_data="source") == {"prepare"}
    assert {name: set(kind.required_keys) for name, kind in all_kinds().items() if kind.required_keys} == {
        "custom": {"entry"}, "gate": {"require"}, "merge": {"after"}, "select": {"sweep"},
        "upload": {"model", "target"},
    }  # fmt: skip


def test_a_kind_that_a_stage_is_handed_is_the_declared_one() -> None:
    for kind in all_kinds().values():
        assert read_kind(tomllib.loads(tomli_w.dumps(without_none(asdict(kind))))) == kind


def test_no_kind_is_asked_for_by_its_name_outside_the_folder_of_kinds() -> None:
    by_name = re.compile(r"\bkind(\.name)?\s*(==|!=|in|not in)\s*\(?[\"']|\b[A-Z]+_KINDS\b")
    files = [file for top in ("cosmos_core", "flows") for file in (ROOT / top).rglob("*.py")]
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if by_name.search(line)
        and not any(f'"{row}"' in line for row in ("prompts", "pairs", "sequences", "media", "media_prompts"))
    ]
    assert found == []
