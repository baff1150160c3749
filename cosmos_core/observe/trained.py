"""What each training of a run learned, from what, and how: base model, data, learning rate, batch, length.

From the resolved settings in `pipeline.toml` and from what the stages left; what is not known is left out.
"""

from __future__ import annotations

from typing import Any

from cosmos_core.config.difference import flat
from cosmos_core.observe import wording
from cosmos_core.observe.record import RunRecord, StageRecord, read_pipeline
from cosmos_core.run.files import read_object

_STAGE = "stage:"


def trained(run: RunRecord) -> list[tuple[StageRecord, list[tuple[str, str]]]]:
    """Return each stage that trains with its facts: name and value."""
    entries = {entry["name"]: entry for entry in read_pipeline(run.path).get("stages", []) if _is_entry(entry)}
    rows = []
    for stage in run.stages:
        entry = entries.get(stage.name)
        if stage.kind.trains and entry and isinstance(entry.get("overrides"), dict):
            settings, is_generated = flat(entry["overrides"]), stage.kind.feed == "rollouts"
            facts = [
                ("base model", _model(entry, settings)),
                ("data", _data(run, entries, stage.name)),
                ("algorithm", _algorithm(settings)),
                ("trains", _weights(settings)),
                ("learning rate", _learning_rate(settings)),
                ("batch", _batch(settings, is_generated)),
                ("steps", _steps(stage, settings)),
                ("reward", _reward(settings) if is_generated else ""),
                ("seed", str(settings.get("train.seed", ""))),
            ]
            rows.append((stage, [(name, value) for name, value in facts if value]))
    return rows


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _model(entry: dict[str, Any], settings: dict[str, Any]) -> str:
    model = str(entry.get("model") or "")
    return f"what stage {model.removeprefix(_STAGE)} made" if model.startswith(_STAGE) else model or str(
        settings.get("policy.model_name_or_path", "")
    )  # fmt: skip


def _data(run: RunRecord, entries: dict[str, dict[str, Any]], name: str) -> str:
    """Return the name of the rows, followed through the stages that prepared them, and how many there are."""
    seen: list[str] = []
    source = ""
    while name in entries and name not in seen and not source:
        seen.append(name)
        settings = flat(entries[name].get("overrides") or {})
        named = [settings.get(f"train.train_policy.dataset.{key}") for key in ("name", "local_dir")]
        source = next((str(value) for value in named if value), "")
        before = str(entries[name].get("data") or "")
        if not before.startswith(_STAGE):
            source = source or before
        name = before.removeprefix(_STAGE)
    source = source or (f"what stage {seen[-1]} made" if len(seen) > 1 else "")
    paths = [stage.path / "data" / "statistics.json" for stage in run.stages if stage.name in seen]
    counted = next((found for path in paths if (found := read_object(path))), {})
    rows = [
        f"{wording.number(part['rows'])} rows{' held out' if split == 'validation' else ''}"
        for split in ("train", "validation")
        if isinstance(part := counted.get(split), dict) and isinstance(part.get("rows"), int)
    ]
    return ", ".join([source, *rows] if source else rows)


def _algorithm(settings: dict[str, Any]) -> str:
    policy = "train.train_policy."
    kind, variant = str(settings.get(f"{policy}type", "")), settings.get(f"{policy}variant")
    named = str(settings.get(f"{policy}trainer_type") or kind)
    return f"{named}, {variant}" if named == kind and variant not in {None, "", named} else named


def _weights(settings: dict[str, Any]) -> str:
    rank = settings.get("policy.lora.r")
    dtype = settings.get("train.param_dtype", "")
    return f"{f'LoRA of rank {rank}' if rank else 'all weights'}{f', computed in {dtype}' if dtype else ''}"


def _learning_rate(settings: dict[str, Any]) -> str:
    rates = settings.get("train.optm_lr")
    if rates is None:
        return ""
    shown = ", ".join(f"{rate:g}" for rate in (rates if isinstance(rates, list) else [rates]))
    decay, warmup = settings.get("train.optm_decay_type"), settings.get("train.optm_warmup_steps")
    parts = [shown, f"{settings.get('train.optm_name', '')}", f"{decay} decay" if decay else "constant"]
    return ", ".join(filter(None, [*parts, f"{warmup:g} steps of warmup" if warmup else ""]))


def _batch(settings: dict[str, Any], is_generated: bool) -> str:
    batch, micro = settings.get("train.train_batch_per_replica"), settings.get("train.train_policy.mini_batch")
    unit = "completions" if is_generated else "rows"
    generations = settings.get("rollout.n_generation") if is_generated else None
    parts = [f"{batch} {unit} per replica" if batch else "", f"{generations} of each prompt" if generations else ""]
    return ", ".join(filter(None, [*parts, f"micro-batch {micro}" if micro else ""]))


def _steps(stage: StageRecord, settings: dict[str, Any]) -> str:
    (step, total), epochs = stage.position, settings.get("train.epoch")
    most = f"at most {epochs} epoch{'' if epochs == 1 else 's'}" if epochs else ""
    return ", ".join(filter(None, [f"{step} of {total}" if step and total else "", most]))


def _reward(settings: dict[str, Any]) -> str:
    prefix = "train.train_policy.reward_function"
    value = settings.get(prefix)
    if value is None:
        weighted = {key.removeprefix(f"{prefix}."): v for key, v in settings.items() if key.startswith(f"{prefix}.")}
        return ", ".join(f"{name} x {weight:g}" for name, weight in weighted.items())
    return ", ".join(value) if isinstance(value, list) else str(value)
