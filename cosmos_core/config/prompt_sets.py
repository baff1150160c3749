"""Prompt sets: lists of prompts from papers on reinforcement learning of diffusion models, under their usual names.

A prompt set is a folder with one file per split. It is selected by its path or, below the folder of prompt sets, by its
name: `ocr`, `pickscore`, `geneval`, `dance_grpo_t2v`. Nothing is downloaded.
"""

import re
from pathlib import Path
from typing import Any

from cosmos_core.errors import DataError

_FLOW_GRPO_URL = "https://github.com/yifan123/flow_grpo/tree/main/dataset/"
KNOWN_PROMPT_SETS = {
    "pickscore": f"{_FLOW_GRPO_URL}pickscore",
    "ocr": f"{_FLOW_GRPO_URL}ocr",
    "geneval": f"{_FLOW_GRPO_URL}geneval",
    "dance_grpo_t2v": "https://github.com/XueZeyue/DanceGRPO/tree/main/assets",
}
"""URL of the files of each known prompt set, by name of the set."""
PROMPT_SETS_FOLDER = Path("data") / "prompts"
"""Folder of downloaded prompt sets, relative to the current folder."""
_SPLIT_FILE_NAMES = ("{}.txt", "{}_metadata.jsonl", "{}_prompts.txt")
_QUOTED_TEXT_PATTERN = re.compile(r"[\"“](.+?)[\"”]")


def find_prompt_set(name: str, key: str) -> Path | None:
    """Return the folder or file of the known prompt set `name`; None if `name` is not a known set. Raises `DataError`,
    which names the configuration key `key`, if the known prompt set is not on this machine."""
    if name not in KNOWN_PROMPT_SETS:
        return None
    for path in (PROMPT_SETS_FOLDER / name, PROMPT_SETS_FOLDER / f"{name}.txt"):
        if path.exists():
            return path
    prompt_set_path_text = f"{PROMPT_SETS_FOLDER / name}, or give the path of a folder or a file"
    remedy = f"download {KNOWN_PROMPT_SETS[name]} to {prompt_set_path_text}"
    raise DataError(f"{key} = {name!r} is a known prompt set and not on this machine; {remedy}")


def prompt_files(path: Path, split: str) -> list[Path]:
    """Return a list with the prompt file, which has one prompt per line, at `path`: the file itself, or the file of the
    split in a folder. The list is empty if the rows at `path` have another format."""
    if path.is_file():
        return [path] if path.suffix.lower() == ".txt" else []
    if not path.is_dir():
        return []
    split_names = {"train": ("train", "video"), "validation": ("validation", "test")}.get(split, (split,))
    possible_files = (path / file_pattern.format(name) for name in split_names for file_pattern in _SPLIT_FILE_NAMES)
    return [prompt_file for prompt_file in possible_files if prompt_file.is_file()][:1]


def prompt_metadata(prompt: str, path: Path) -> dict[str, Any]:
    """Return the metadata that rewards read for a prompt of the prompt set at `path`: for the set `ocr`, the quoted
    text that the image must show; for any other set, an empty dictionary."""
    if not {path.name, path.stem, path.parent.name, path.parent.stem} & {"ocr"}:
        return {}
    quoted_text_match = _QUOTED_TEXT_PATTERN.search(prompt)
    return {"text": quoted_text_match[1]} if quoted_text_match else {}
