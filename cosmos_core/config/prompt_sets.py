"""Prompt sets that papers on reinforcement learning of diffusion models train on, by the names that they have there.

A set is a folder with one file per split, given by its path or, where it lies in the folder of prompt sets, by its
name: `ocr`, `pickscore`, `geneval`, `dance_grpo_t2v`. Nothing is downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cosmos_core.errors import DataError

_FLOW_GRPO = "https://github.com/yifan123/flow_grpo/tree/main/dataset/"
SETS = {
    "pickscore": f"{_FLOW_GRPO}pickscore",
    "ocr": f"{_FLOW_GRPO}ocr",
    "geneval": f"{_FLOW_GRPO}geneval",
    "dance_grpo_t2v": "https://github.com/XueZeyue/DanceGRPO/tree/main/assets",
}
"""Each known set and where its files come from."""
FOLDER = Path("data") / "prompts"
"""Where a set is looked for by its name, below the current folder."""
_FORMS = ("{}.txt", "{}_metadata.jsonl", "{}_prompts.txt")
_QUOTED = re.compile(r"[\"“](.+?)[\"”]")


def named_set(name: str, key: str) -> Path | None:
    """Return the folder or file of a known set; None: the name is not that of one.

    Raises:
        DataError: it is one, and it is not on this machine.
    """
    if name not in SETS:
        return None
    for found in (FOLDER / name, FOLDER / f"{name}.txt"):
        if found.exists():
            return found
    raise DataError(
        f"{key} = {name!r} is a known prompt set and not on this machine; download {SETS[name]} to "
        f"{FOLDER / name}, or give the path of a folder or a file"
    )


def prompt_files(path: Path, split: str) -> list[Path]:
    """Return the files of prompts at a path, a line each: of a folder those of the split; none: it has other rows."""
    if path.is_file():
        return [path] if path.suffix == ".txt" else []
    if not path.is_dir():
        return []
    names = {"train": ("train", "video"), "validation": ("validation", "test")}.get(split, (split,))
    candidates = (path / form.format(name) for name in names for form in _FORMS)
    return [file for file in candidates if file.is_file()][:1]


def metadata_of(prompt: str, path: Path) -> dict[str, Any]:
    """Return what a reward may compare with: of the set `ocr`, whose prompts quote it, the text that is to be seen."""
    if not any(part.name == "ocr" or part.stem == "ocr" for part in (path, path.parent)):
        return {}
    found = _QUOTED.search(prompt)
    return {"text": found[1]} if found else {}
