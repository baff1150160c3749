"""Read logged completions with their rewards, for `cosmos samples`: those of training or, if training logged none,
those of validation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.observe.formatting import float_or_inf, make_sort_key
from cosmos_core.run.files import parse_json_objects
from cosmos_core.run.progress import has_step
from cosmos_core.run.tail import FileTail

COMPLETIONS_FOLDER = "completions"


def iter_completions(run_path: Path, stage: str, step: int | None, reward_order: str, max_texts: int) -> Iterator[str]:
    """Yield at most `max_texts` completions of a train step (None: the newest) as text, grouped by prompt or, if
    `reward_order` is `best` or `worst`, sorted by reward. An empty `stage` means the newest training that has logged
    completions or, if there is none, the newest other stage with completions. Raise ConfigError if the stage or the
    step does not exist."""
    path = _find_stage_path(run_path, stage)
    completion_lines = _read_completions(path, step)
    if reward_order:
        completion_lines = [line for line in completion_lines if isinstance(line.get("reward"), int | float)]
        sort_sign = -1.0 if reward_order == "best" else 1.0
        completion_lines.sort(key=lambda line: make_sort_key(float_or_inf(line["reward"]), sort_sign))
    if not completion_lines:
        raise ConfigError(f"stage {path.name!r} has no completions{'' if step is None else f' of step {step}'} on disk")
    prompt = None
    for line in completion_lines[:max_texts]:
        if line.get("prompt") != prompt:
            prompt = line.get("prompt")
            yield f"--- {path.name}, step {line['step']}, prompt (reference {line.get('reference', '')!r}):\n{prompt}"
        yield f"--- {_format_scores(line)}:\n{format_completion(line, path)}"


def read_newest_completions(stage_path: Path, max_texts: int) -> list[dict[str, Any]]:
    """Return the first `max_texts` completions with text from a stage's newest logged step; empty if none exist."""
    completion_lines = [line for line in _read_completions(stage_path, None) if not line.get("media")]
    return [line for line in completion_lines if format_completion(line, stage_path)][:max_texts]


def _format_scores(line: dict[str, Any]) -> str:
    has_reward = isinstance(line.get("reward"), int | float)
    scores = [f"reward {float_or_inf(line['reward']):.4g}" if has_reward else f"no reward ({line.get('error', '')})"]
    scores += [f"{name} {float_or_inf(value):.4g}" for name, value in (line.get("metrics") or {}).items()]
    if line.get("tokens"):
        scores.append(f"{line['tokens']} tokens" + ", cut off" * (line.get("finish_reason") == "length"))
    return ", ".join(scores)


def format_completion(line: dict[str, Any], stage: Path) -> str:
    """Return a logged completion as text: its chat turns, its plain text, or the paths of its images or videos."""
    media_paths, turns = line.get("media") or [], line.get("turns") or []
    if media_paths:
        return "\n".join(str(stage / name) for name in ([media_paths] if isinstance(media_paths, str) else media_paths))
    return "\n".join(f"[{turn['role']}] {turn['text']}" for turn in turns) if turns else str(line.get("completion", ""))


def _find_stage_path(run: Path, name: str) -> Path:
    stage_paths = [path for path in run.glob("stages/*") if _list_completion_files(path)]
    stage_paths.sort(key=lambda path: path.stat().st_mtime)
    matching_stage_paths = [path for path in stage_paths if not name or path.name == name]
    if not matching_stage_paths:
        logging_hint = "only RL and validations of it log completions"
        no_stages_text = f"none, since {logging_hint}; complete prompts with cosmos try {run.name}"
        stage_list, stage_clause = ", ".join(path.name for path in stage_paths), f" of a stage {name!r}" if name else ""
        raise ConfigError(f"{run.name}: no completions{stage_clause}; stages with some: {stage_list or no_stages_text}")
    training_stage_paths = [path for path in matching_stage_paths if (path / COMPLETIONS_FOLDER).is_dir()]
    return (training_stage_paths or matching_stage_paths)[-1]


def _list_completion_files(stage_path: Path) -> list[Path]:
    """Return the files with completions of training by step or, if none exist, the file with those of validation."""
    return sorted((stage_path / COMPLETIONS_FOLDER).glob("step_*.jsonl")) or list(stage_path.glob("samples.jsonl"))


def _read_completions(stage_path: Path, step: int | None) -> list[dict[str, Any]]:
    completion_files = _list_completion_files(stage_path)
    if step is not None and len(completion_files) > 1:
        completion_files = [file for file in completion_files if file.stem == f"step_{step:06d}"]
    if not completion_files:
        return []
    lines = [line for line in parse_json_objects(FileTail(completion_files[-1]).read_lines()) if has_step(line)]
    selected_step = max((line["step"] for line in lines), default=0) if step is None else step
    return [line for line in lines if line["step"] == selected_step]
