"""Records of completed prompts, one per line of `completions.jsonl`, from which a resumed stage continues."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosmos_core.rollout.base import request_seed
from cosmos_core.run.files import parse_json_objects, raise_disk_full, write_text
from cosmos_core.types import Sampling, ScoredGroup

COMPLETIONS_FILE = "completions.jsonl"


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """Completion of a prompt, with its rewards."""

    text: str
    """Text of the completion; if the completion has several turns, the text of its last turn."""
    turns: list[dict[str, str]]
    """Assistant turns and tool results of the completion, as conversation turns with `role` and `content`."""
    reward: float | None
    """Weighted sum of the values of the reward functions for the completion; None: one of these values is invalid."""
    rewards: dict[str, float]
    """Value of each reward function for the completion, by the name of the reward function."""
    error: str
    """Reason why the completion's reward is invalid; empty if the reward is valid."""
    seed: int
    num_tokens: int
    is_finished: bool
    """Whether the model ended the completion itself, before the length limit."""


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt with its scored completions."""

    id: int
    """Row number of the prompt in the prepared rows."""
    candidates: list[ScoredCompletion]


def make_prompt_record(scored_group: ScoredGroup, sampling: Sampling) -> SampledPrompt:
    """Convert a scored group, a prompt with its completions and their scores, to a record of `completions.jsonl`."""
    prompt, candidates = scored_group.group.prompt, []
    for k, (completion, score) in enumerate(zip(scored_group.group.completions, scored_group.scores, strict=True)):
        turns = [{"role": turn.role, "content": turn.text} for turn in completion.turns]
        candidates.append(ScoredCompletion(
            completion.text, turns or [{"role": "assistant", "content": completion.text}],
            score.value, score.metrics, score.error, request_seed(sampling.seed, 0, prompt.id, k),
            completion.num_sampled, completion.finish_reason == "stop",
        ))  # fmt: skip
    return SampledPrompt(prompt.id, candidates)


def read_records(folder: Path, batch_size: int, num_prompts: int) -> list[dict[str, Any]]:
    """Return the prompt records in the file `completions.jsonl` of `folder`, as JSON objects. Records of an incomplete
    batch (fewer than `batch_size` prompts, unless it is the last batch) are removed from the file, so that a resumed
    stage generates the same batches as an uninterrupted one."""
    completions_file = folder / COMPLETIONS_FILE
    if not completions_file.is_file():
        return []
    records = parse_json_objects(completions_file.read_text(encoding="utf-8", errors="replace").split("\n"))
    # If a damaged file lacks a record, drop all records after it: the number of records determines the next prompt.
    records = records[: next((i for i, json_record in enumerate(records) if json_record.get("id") != i), None)]
    records = records[: num_prompts if len(records) >= num_prompts else len(records) // batch_size * batch_size]
    with raise_disk_full(folder):
        write_text(completions_file, "".join(json.dumps(json_record) + "\n" for json_record in records))
    return records


def parse_record(json_record: Mapping[str, Any]) -> SampledPrompt:
    """Convert a line of `completions.jsonl`, read as a JSON object, to the record of a prompt."""
    return SampledPrompt(json_record["id"], [ScoredCompletion(**each) for each in json_record["candidates"]])


def append_records(folder: Path, records: Sequence[SampledPrompt]) -> None:
    """Append the prompt records of a batch to `completions.jsonl` in `folder`, and wait until they are on the disk."""
    json_records: list[dict[str, Any]] = [asdict(record) for record in records]
    with raise_disk_full(folder), (folder / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(json_record) + "\n" for json_record in json_records))
        file.flush()
        os.fsync(file.fileno())
