"""Summary of each training of a run: base model, data with a sample row, learning rate, batch, steps and reward.

The summary is made from the resolved settings in `pipeline.toml` and the files of the stages; unknown values are left
out.
"""

from typing import Any

from cosmos_core.config.difference import flat
from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, StageRecord, read_pipeline
from cosmos_core.observe.sample_row import sample_row
from cosmos_core.run.files import read_object

_STAGE = "stage:"
_DIGEST_LETTERS = 12


def training_properties(run: RunRecord) -> list[tuple[StageRecord, list[tuple[str, str]]]]:
    """Return each training stage with its properties as pairs of name and text."""
    entries = _entries(run)
    rows = []
    for stage in run.stages:
        entry = entries.get(stage.name)
        if stage.kind.trains_model and entry and isinstance(entry.get("overrides"), dict):
            model = str(entry.get("model") or flat(entry["overrides"]).get("policy.model_name_or_path", ""))
            base = f"what stage {model.removeprefix(_STAGE)} made" if model.startswith(_STAGE) else model
            chain = _chain(entries, stage.name)
            facts = [
                ("base model", base), ("digest of the model", _digests(run, chain[:1], "model")),
                ("data", _data(run, entries, chain)), ("digest of the data", _digests(run, chain, "data")),
                *_settings(stage, flat(entry["overrides"])),
            ]  # fmt: skip
            rows.append((stage, [(name, value) for name, value in facts if value]))
    return rows


def sample_rows(run: RunRecord) -> list[tuple[StageRecord, list[tuple[str, bool]]]]:
    """Return each training stage with its first row as a list of texts, each with whether the loss includes it. A data
    set that several stages use is shown once."""
    entries = _entries(run)
    stages = {stage.name: stage for stage in run.stages}
    shown_rows: dict[str, tuple[StageRecord, list[tuple[str, bool]]]] = {}
    for stage in run.stages:
        entry = entries.get(stage.name)
        if stage.kind.trains_model and entry:
            chain = _chain(entries, stage.name)
            prepare_stages = [name for name in chain if name in stages and (stages[name].path / "data").is_dir()]
            base = str(entry.get("model") or flat(entry.get("overrides") or {}).get("policy.model_name_or_path", ""))
            maker = stages.get(base.removeprefix(_STAGE)) if base.startswith(_STAGE) else None
            models = [each.path / str(each.info["model"]) for each in (stage, maker) if each and each.info.get("model")]
            for name in prepare_stages[:1]:
                if name not in shown_rows and (row := sample_row(stages[name].path / "data", [*models, base])):
                    shown_rows[name] = (stage, row)
    return list(shown_rows.values())


def _entries(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the entries of the stages in `pipeline.toml` by stage name."""
    stages = read_pipeline(run.path).get("stages", [])
    return {e["name"]: e for e in stages if isinstance(e, dict) and isinstance(e.get("name"), str)}


def _chain(entries: dict[str, dict[str, Any]], name: str) -> list[str]:
    """Return the names of a stage and of the stages that prepared its rows, from the last to the first."""
    chain: list[str] = []
    while name in entries and name not in chain:
        chain.append(name)
        name = str(entries[name].get("data") or "").removeprefix(_STAGE)
    return chain


def _digests(run: RunRecord, chain: list[str], kind: str) -> str:
    """Return the digests of the external models or external data sets (`model` or `data`) that a chain of stages
    has read."""
    results = [stage.result for stage in run.stages if stage.name in chain and stage.result]
    sources = [source for result in results for source in result.get("sources", ()) if source["kind"] == kind]
    return ", ".join(dict.fromkeys(source["digest"][:_DIGEST_LETTERS] for source in sources))


def _data(run: RunRecord, entries: dict[str, dict[str, Any]], chain: list[str]) -> str:
    """Return the name of the data set, resolved through the given stages, and its number of rows."""
    source = ""
    for name in chain:
        settings = flat(entries[name].get("overrides") or {})
        dataset_names = [settings.get(f"train.train_policy.dataset.{key}") for key in ("name", "local_dir")]
        mixture = settings.get("train.train_policy.datasets")
        dataset_names += [_mixture(mixture)] if isinstance(mixture, list) else []
        source = source or next((str(value) for value in dataset_names if value), "")
        reference = str(entries[name].get("data") or "")
        if not reference.startswith(_STAGE):
            source = source or reference
    source = source or (f"what stage {chain[-1]} made" if len(chain) > 1 else "")
    paths = [stage.path / "data" / "statistics.json" for stage in run.stages if stage.name in chain]
    statistics_of_rows = next((statistics for path in paths if (statistics := read_object(path))), {})
    rows = [
        f"{formatting.number(part['rows'])} rows{' held out' if split_name == 'validation' else ''}"
        for split_name in ("train", "validation")
        if isinstance(part := statistics_of_rows.get(split_name), dict) and isinstance(part.get("rows"), int)
    ]
    return ", ".join([source, *rows] if source else rows)


def _mixture(datasets: list[Any]) -> str:
    """Return the names of mixed data sets as text, each with its weight if it has one."""
    weights = [(each.get("name"), each.get("weight")) for each in datasets if isinstance(each, dict)]
    return ", ".join(f"{name}{f' x {weight:g}' if weight else ''}" for name, weight in weights)


def _settings(stage: StageRecord, settings: dict[str, Any]) -> list[tuple[str, str]]:
    def setting_text(key: str, words: str = "{}") -> str:
        value = settings.get(f"train.{key}")
        return "" if value in {None, "", 0} else words.format(f"{value:g}" if isinstance(value, float) else value)

    policy = "train_policy."
    (step, total), is_generated = stage.position, stage.kind.feed == "rollouts"
    rank, generations = settings.get("policy.lora.r"), settings.get("rollout.n_generation")
    rates = settings.get("train.optm_lr", "")
    reward = f"train.{policy}reward_function"
    rewards = [
        settings.get(reward),
        *(f"{key.removeprefix(f'{reward}.')} x {weight:g}"
          for key, weight in settings.items() if key.startswith(f"{reward}.")),
    ]  # fmt: skip
    kind, variant = setting_text(f"{policy}type"), setting_text(f"{policy}variant")
    algorithm_name = setting_text(f"{policy}trainer_type") or kind
    warmup = "warmup of {} steps" if settings.get("train.optm_warmup_steps", 1) >= 1 else "warmup of {} of all steps"
    listed: list[tuple[str, list[Any]]] = [
        ("algorithm", [algorithm_name, variant if algorithm_name == kind != variant else ""]),
        ("trains", [f"LoRA of rank {rank}" if rank else "all weights", setting_text("param_dtype", "computed in {}")]),
        ("learning rate", [*(f"{rate:g}" for rate in (rates if isinstance(rates, list) else [rates]) if rate),
                           setting_text("optm_name"), setting_text("optm_decay_type", "{} decay") or "constant",
                           setting_text("optm_warmup_steps", warmup)]),
        ("batch", [setting_text("train_batch_per_replica", "{} completions" if is_generated else "{} rows"),
                   f"{generations} of each prompt" if is_generated and generations else "",
                   setting_text(f"{policy}mini_batch", "micro-batch {}")]),
        ("steps", [f"{step} of {total}" if step and total else "", setting_text("epoch", "at most {} epochs")]),
        ("reward", rewards if is_generated else []),
        ("seed", [setting_text("seed")])
    ]  # fmt: skip
    return [(name, ", ".join(str(value) for value in values if value)) for name, values in listed]
