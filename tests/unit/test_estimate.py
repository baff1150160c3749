"""`cosmos plan --estimate`: counts and bytes against numbers worked out by hand; the peak itself is measured elsewhere
(`tests/reference/test_estimate_measured.py`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.mesh import check_meshes
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.launch.estimate import estimate_stages_in_worker, render_estimate_table
from cosmos_core.run.plan import StageDecision
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train import estimate as estimate_module
from cosmos_core.train.estimate import TrainingEstimate, estimate, estimate_kv_cache_bytes, shard_memory
from cosmos_core.train.memory import StepMemory, estimate_8bit_moment_bytes
from tasks.kinds import all_kinds
from tests.effects.change import stage_of
from tests.feeds import row_feed
from tests.unit.tiny_model import save_tiny_model

SFT = {"type": "sft", "mini_batch": 2}
GRPO = {"type": "grpo", "mini_batch": 2, "reward_function": "exact_match"}
ROLLOUT = {"n_generation": 4, "batch_size": 2, "max_response_length": 24}


def recipe(train_policy: dict[str, Any], *, mesh: dict[str, Any] | None = None, **train: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "policy": {"model_max_length": 64, "parallelism": mesh or {}},
            "train": {"compile": False, "train_batch_per_replica": 8, "train_policy": train_policy, **train},
            "rollout": ROLLOUT,
        }
    )


def counted(train_policy: dict[str, Any], **train: Any) -> Recipe:
    """A recipe of which no activations are asked: one padded micro-batch, nothing computed again: traced fast."""
    config = recipe({**train_policy, "mini_batch": 8}, sequence_packing=False, **train)
    return config.copy_with(policy=config.policy.copy_with(model_gradient_checkpointing=False))


def of(model: Path, recipe_: Recipe, prepared: Path | None = None) -> TrainingEstimate:
    return estimate(recipe_, str(model), ProgressWriter(model / "progress.json"), prepared)


_TRACES: dict[Any, Any] = {}
_trace_memory = estimate_module._trace_memory


def counts(model: Path, recipe_: Recipe, prepared: Path | None = None) -> TrainingEstimate:
    """Return the estimate of a `counted` recipe with its own rows, steps and sizes, but the memory of the first one of
    this model, algorithm and reference: a trace is what takes long."""

    def trace_once(algorithm: Any, train: Any, policy: Any, path: str, *rest: Any) -> Any:
        key = path, train.train_policy.trainer_type, train.train_policy.auxiliary_model_names
        if key not in _TRACES:
            _TRACES[key] = _trace_memory(algorithm, train, policy, path, *rest)
        return _TRACES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate_module, "_trace_memory", trace_once)
        return of(model, recipe_, prepared)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    config = json.loads((folder / "config.json").read_text())
    one = {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps({**config, **one}))
    return folder


@pytest.fixture(scope="module")
def plain(tiny: Path) -> TrainingEstimate:
    """Of an SFT without anything more."""
    return of(tiny, counted(SFT))


def test_a_model_of_8_billion_parameters_needs_no_memory_for_them(tmp_path: Path) -> None:
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=8192, intermediate_size=212992,
        num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    before = getrusage(RUSAGE_SELF).ru_maxrss
    found = of(tmp_path, counted(SFT))
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 4 << 20, "in KiB; the weights alone are eight times as much"
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 212992 + 2 * 128 + 2 * 8192
    assert found.parameters == found.trainable == 2 * 151936 * 8192 + layer + 8192 == 7874830592
    assert found.memory.gradients == 4 * found.parameters
    assert 4 * found.parameters <= found.memory.weights < 4 * found.parameters + 4096
    assert 8 * found.parameters <= found.memory.optimizer < 8 * found.parameters + 4096
    memory = found.memory
    assert memory.activations is not None and memory.casts is not None
    assert found.peak == memory.weights + memory.gradients + memory.optimizer + memory.casts + memory.activations


def test_disk_is_the_checkpoints_that_are_kept_and_the_model(tiny: Path, tmp_path: Path) -> None:
    data = write_statistics(tmp_path / "data", rows=80, longest=60, mean=50.0)  # 10 steps
    once = counts(tiny, counted(SFT), data)
    assert (once.steps, once.trainable) == (10, once.parameters)
    checkpoint, model = 12 * once.parameters, 2 * once.parameters
    assert 0 <= once.disk - checkpoint - model < 4096, "a counter of each tensor of the optimizer"
    for saving, kept in (({"save_freq": 4}, 3), ({"save_freq": 1, "max_keep": -1}, 10)):
        found = counts(tiny, counted(SFT, ckpt={"enable_checkpoint": True, **saving}), data)
        assert found.disk == kept * (once.disk - model) + model
    validated = counted(SFT, ckpt={"enable_checkpoint": True, "save_freq": 10, "max_keep": 1})
    validated = validated.copy_with(validation=validated.validation.copy_with(enable=True, freq=5))
    assert counts(tiny, validated, data).disk == 2 * (once.disk - model) + model, "the newest and the best"
    assert once.machine["flops"] > 0 and once.machine["memory"] > 1 << 30


def test_tied_embeddings_are_counted_once(tiny: Path, plain: TrainingEstimate) -> None:
    stored = load_file(tiny / "model.safetensors")  # of two layers, and without an output layer
    assert plain.parameters == sum(each.numel() for name, each in stored.items() if ".layers.1." not in name)


def test_a_reference_model_is_held_for_a_kl_penalty_only(tiny: Path) -> None:
    without, with_kl = counts(tiny, counted(GRPO)), counts(tiny, counted({**GRPO, "kl_beta": 0.1}))
    assert (without.memory.reference, with_kl.memory.reference) == (0, 4 * with_kl.trainable)
    assert without.engine_weights == 2 * without.parameters  # vLLM, in bfloat16
    assert counts(tiny, counted(SFT)).engine_weights == 0
    transformers = counted(GRPO).copy_with(rollout=counted(GRPO).rollout.copy_with(backend="hf"))
    mesh = transformers.policy.parallelism.copy_with(dp_shard_size=2)
    on_ranks = transformers.copy_with(policy=transformers.policy.copy_with(parallelism=mesh))
    copies = [counts(tiny, each).engine_weights for each in (transformers, on_ranks)]
    assert copies == [0, 4 * without.parameters], "on several ranks, each has the whole model beside its shard"


def test_less_checkpointing_keeps_more_activations(tmp_path: Path) -> None:
    tiny, config = save_tiny_model(tmp_path / "two layers"), recipe(SFT, train_batch_per_replica=2)
    every, some = (
        config.copy_with(policy=config.policy.copy_with(model_gradient_checkpointing=x)) for x in (False, "selective")
    )
    none_kept, some_kept, all_kept = (of(tiny, each).memory.activations or 0 for each in (config, some, every))
    assert all_kept > some_kept > none_kept > 0


def test_pairs_have_twice_the_activations(tiny: Path, plain: TrainingEstimate) -> None:
    pairs, rows = of(tiny, counted({**SFT, "trainer_type": "dpo"})).memory.activations, plain.memory.activations
    assert pairs and rows and 1.5 < pairs / rows < 2.5  # the gradients of a micro-batch do not grow with it


def sharded(memory: StepMemory, recipe: Recipe) -> StepMemory:
    return shard_memory(memory, recipe.train, recipe.policy.parallelism)


def kv_cache(config: Qwen3Config, recipe: Recipe) -> int | None:
    return estimate_kv_cache_bytes(config, recipe.rollout, recipe.train, recipe.rollout.batch_size, 60)


def test_a_mesh_divides_what_it_shards() -> None:
    mesh = {"dp_shard_size": 4, "tp_size": 2, "cp_size": 1, "pp_size": 2, "dp_replicate_size": 3}
    memory = StepMemory(weights=1600, gradients=1601, optimizer=3200, reference=16, casts=800, activations=1000)
    assert sharded(memory, recipe(SFT, mesh=mesh)) == StepMemory(100, 101, 200, 1, 50, 250)
    unknown = StepMemory(weights=1600, gradients=1600, optimizer=3200, reference=0, casts=None, activations=None)
    offloaded = sharded(memory, recipe(SFT, mesh={"dp_shard_size": 4}, fsdp_offload=True))
    assert (offloaded.weights, offloaded.reference) == (0, 0)
    assert sharded(unknown, recipe(SFT, mesh=mesh)) == StepMemory(100, 100, 200, 0, None, None)


@pytest.mark.parametrize(("schedule", "rows"), [("1F1B", 4), ("Interleaved1F1B", 7), ("GPipe", 8)])
def test_a_pipeline_keeps_the_activations_of_the_rows_that_are_under_way(schedule: str, rows: int) -> None:
    memory = StepMemory(weights=0, gradients=0, optimizer=0, reference=0, casts=0, activations=3200)
    mesh = {"pp_size": 4, "pp_schedule": schedule}
    assert sharded(memory, recipe({**SFT, "mini_batch": 8}, mesh=mesh)).activations == 3200 // 4 * rows // 8


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, 3 * 60),
        ({"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 16}, 60 + 32),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 99}, 3 * 60),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, None),
    ],
)
def test_kv_cache_is_keys_and_values_of_all_that_is_generated_at_once(
    values: dict[str, Any], tokens: int | None
) -> None:
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=3)
    for name, value in values.items():
        setattr(config, name, value)
    # keys and values x heads x head_dim x bfloat16 x tokens of all layers x (2 prompts x 4 completions)
    expected = None if tokens is None else 2 * 2 * 32 * 2 * tokens * 8
    assert kv_cache(config, recipe(GRPO)) == expected


def test_one_train_step_has_no_more_prompts_than_its_batch() -> None:
    config = Qwen3Config(num_key_value_heads=2, head_dim=32, num_hidden_layers=3)
    four = recipe(GRPO, train_batch_per_replica=4)  # 4 completions: one prompt, though rollout.batch_size is 2
    assert kv_cache(config, four) == 2 * 2 * 32 * 2 * 3 * 60 * 4
    few = four.copy_with(rollout=four.rollout.copy_with(n_generation_mini_batch=1))  # one completion of it at a time
    assert kv_cache(config, few) == 2 * 2 * 32 * 2 * 3 * 60


def write_statistics(folder: Path, rows: int, longest: int, mean: float) -> Path:
    folder.mkdir()
    statistics = {"train": {"rows": rows, "length": {"max": longest, "mean": mean}}}
    (folder / "statistics.json").write_text(json.dumps(statistics))
    return folder


def test_an_average_and_moments_in_eight_bits_are_counted(tiny: Path, plain: TrainingEstimate) -> None:
    memory, small = plain.memory, of(tiny, counted(SFT, ema_enable=True, optm_name="AdamW8bit")).memory
    assert (memory.average, small.average) == (0, 4 * plain.trainable) and small.optimizer < 0.4 * memory.optimizer
    assert small == replace(memory, average=small.average, optimizer=small.optimizer)
    assert small.total_bytes == memory.total_bytes + small.average - (memory.optimizer - small.optimizer)


def test_moments_in_eight_bits_take_what_torchao_keeps(tiny: Path) -> None:
    optim = pytest.importorskip("torchao.optim", reason="needs the package torchao")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    optimizer = optim.AdamW8bit(model.parameters())
    moments = [optimizer._new_buffer(p, signed) for p in model.parameters() for signed in (True, False)]
    kept = [[each.codes, each.scale, each.qmap] if hasattr(each, "codes") else [each] for each in moments]
    assert estimate_8bit_moment_bytes(model) == sum(tensor.nbytes for tensors in kept for tensor in tensors)


def balanced(tiny: Path, folder: Path, **policy: Any) -> tuple[Recipe, Path]:
    """A recipe whose batches are filled by tokens, and its prepared rows."""
    rows = folder / "rows.jsonl"
    texts = ["ab" * (1 + i % 9) for i in range(40)]
    rows.write_text("".join(json.dumps({"text": t, "chosen": f"{t}yes", "rejected": f"{t}no"}) + "\n" for t in texts))
    values = {**SFT, "enable_dp_load_balancing": True, "load_balanced_max_tokens_for_batch": 48, **policy}
    config = counted({**values, "dataset": {"name": str(rows)}}, max_num_steps=99, epoch=2)
    prepare.run(stage_of(folder / "prepare", config, kind="prepare", model=tiny))
    return config, folder / "prepare/data"


@pytest.mark.parametrize("trainer", ["sft", pytest.param("dpo", marks=pytest.mark.full)])
def test_steps_of_batches_filled_by_tokens_are_those_that_the_feed_takes(
    tiny: Path, tmp_path: Path, trainer: str
) -> None:
    config, data = balanced(tiny, tmp_path, trainer_type=trainer)
    feed = row_feed((open_pairs if trainer == "dpo" else open_sequences)(data, "train"), config)
    lengths = [len(sample.input_ids) for step in range(feed.total_steps) for sample in feed.samples(step)[0]]
    found, unprepared = counts(tiny, config, data), counts(tiny, config)
    assert (found.steps, found.tokens, found.is_steps_bound) == (feed.total_steps, sum(lengths), False)
    assert found.sequence_length == max(lengths) and found.rows == 40
    assert (unprepared.steps, unprepared.tokens, unprepared.is_steps_bound) == (99, 99 * 48, True)
    assert unprepared.notes == (
        "steps: at most max_num_steps = 99, because batches are filled by tokens, yet to be counted",
    )


@pytest.mark.parametrize(
    ("policy", "train", "expected"),
    [
        (SFT, {"epoch": 3}, (40, 3 * 12, 36 * 8 * 20.5, False)),
        (SFT, {"epoch": 3, "max_num_steps": 5}, (40, 5, 5 * 8 * 20.5, False)),
        (GRPO, {"epoch": 1}, (40 + 24, 50, 50 * 8 * (20.5 + 24), True)),  # 8 completions are 2 prompts
    ],
)
def test_length_steps_and_tokens_come_from_prepared_rows(
    tiny: Path, tmp_path: Path, policy: dict[str, Any], train: dict[str, Any], expected: tuple[int, int, int, bool]
) -> None:
    found = counts(tiny, counted(policy, **train), write_statistics(tmp_path / "data", 100, 40, 20.5))
    assert (found.sequence_length, found.steps, found.tokens, found.is_tokens_bound) == expected
    assert (found.rows, found.notes) == (100, ())


def test_rows_of_a_local_file_are_counted_without_those_held_out(tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 50)
    found = counts(tiny, counted({**SFT, "dataset": {"name": str(rows), "test_size": 10}}, epoch=2))
    assert (found.rows, found.steps, found.sequence_length) == (40, 2 * 5, 64)
    assert (found.tokens, found.is_tokens_bound) == (10 * 8 * 64, True)


def test_rows_elsewhere_are_unknown_and_said_so(tiny: Path) -> None:
    hub = {**SFT, "dataset": {"name": "someone/rows"}}
    found, bounded = counts(tiny, counted(hub)), counts(tiny, counted(hub, max_num_steps=7))
    assert (found.rows, found.steps, found.tokens) == (None, None, None)
    assert found.notes == ("steps and tokens: unknown, because the rows are not on this machine yet",)
    assert (bounded.steps, bounded.tokens, bounded.is_tokens_bound) == (7, 7 * 8 * 64, True)
    assert "at most max_num_steps = 7" in bounded.notes[0]


def test_a_model_that_looks_at_values_has_unknown_activations(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: x if x.sum() > 0 else self.down_proj(self.up_proj(x)))
    found = of(tiny, recipe(SFT))
    assert (found.memory.activations, found.memory.casts) == (None, None)
    assert any(note.startswith("activations: unknown, because the model cannot be traced") for note in found.notes)
    assert found.memory.optimizer == 2 * found.memory.gradients == 8 * found.parameters
    assert found.peak == found.memory.weights + found.memory.gradients + found.memory.optimizer


def test_an_algorithm_may_return_one_update(tiny: Path, plain: TrainingEstimate, tmp_path: Path) -> None:
    body = "    def updates(self, samples, view): return next(iter(super().updates(samples, view)))\n"
    (tmp_path / "mine.py").write_text(f"from cosmos_core.algorithms.sft import Sft\n\nclass Mine(Sft):\n{body}")
    found = of(tiny, counted({**SFT, "trainer_type": f"{tmp_path}/mine.py:Mine"}))
    assert found.memory == plain.memory and found.memory.activations


PIPELINE = """
[pipeline]
threads = 1

[policy]
model_name_or_path = "MODEL"
model_max_length = 64
model_gradient_checkpointing = false

[train]
compile = false
sequence_packing = false
train_batch_per_replica = 8

[[pipeline.stages]]
name = "sft"
kind = "sft"
overrides.train.train_policy = { type = "sft", mini_batch = 8, dataset.name = "ROWS" }

[[pipeline.stages]]
name = "grpo"
kind = "rl"
model = "stage:sft"
after = "sft"
overrides.train.train_policy = { type = "grpo", mini_batch = 8, reward_function = "exact_match", dataset.name = "a/b" }
overrides.rollout = { n_generation = 4, max_response_length = 24 }

[[pipeline.stages]]
name = "maker"
kind = "custom"
entry = "PROGRAM"

[[pipeline.stages]]
name = "later"
kind = "sft"
model = "stage:maker"
after = "maker"
overrides.train.train_policy = { type = "sft", mini_batch = 8, dataset.name = "ROWS" }
"""


def test_each_training_stage_of_a_pipeline_is_estimated_in_a_worker(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 50)
    (tmp_path / "maker.py").write_text("def make(stage): ...\n")
    text = PIPELINE.replace("MODEL", str(tiny)).replace("ROWS", str(tmp_path / "rows.jsonl"))
    (tmp_path / "p.toml").write_text(text.replace("PROGRAM", f"{tmp_path}/maker.py:make"))
    pipeline = load_pipeline(tmp_path / "p.toml", (), all_kinds())
    data = write_statistics(tmp_path / "prepared", 30, 20, 10.0)
    done = StageDecision("adopt", "same", tmp_path, {"info": {"data": data.name}})

    found = dict(estimate_stages_in_worker(pipeline, {"grpo-data": done, "maker": StageDecision("run", "new")}))

    said = "not estimated: it starts from a model that another stage will make; once that is made, ask again"
    assert found["later"] == said
    sft, grpo = found["sft"], found["grpo"]
    assert isinstance(sft, dict) and isinstance(grpo, dict)
    assert (sft["rows"], sft["steps"], sft["kv_cache"]) == (50, 6, 0)
    assert grpo["parameters"] == sft["parameters"]
    assert grpo["kv_cache"] == 2 * 1 * 32 * 2 * 44 * 4
    assert (grpo["rows"], grpo["steps"], grpo["sequence_length"]) == (30, 15, 44)

    console = Console(width=200)
    with console.capture() as captured:
        console.print(render_estimate_table(list(found.items()), check_meshes(pipeline), 8))
    assert "later: not estimated" in captured.get()
    [unknown] = [line for line in captured.get().splitlines() if line.startswith("│ later")]
    assert [cell.strip() for cell in unknown.split("│")[1:-1]] == ["later", *["?"] * 11, "1", "1"]


def test_the_table_says_gib_bounds_and_nodes() -> None:
    gib = 2**30
    memory = {"weights": 4, "casts": 1, "reference": 1, "gradients": 2, "optimizer": 3, "activations": 2, "average": 0}
    sizes = {
        "parameters": 8_190_735_360, "trainable": 450_000, "peak": 13 * gib, "engine_weights": gib,
        "kv_cache": gib // 2, "memory": {name: size * gib for name, size in memory.items()}, "sequence_length": 4096,
        "rows": 1000, "steps": 1234, "is_steps_bound": False, "tokens": 5_600_000, "is_tokens_bound": True, "notes": [],
    }  # fmt: skip
    unknown = {
        **sizes, "memory": {**sizes["memory"], "casts": None, "activations": None}, "kv_cache": None, "steps": None,
        "tokens": None, "notes": ["KV cache: unknown, because it is another kind"],
    }  # fmt: skip
    console = Console(width=220)
    with console.capture() as captured:
        console.print(render_estimate_table([("a", sizes), ("b", unknown)], {"a": 17, "b": 16}, 8))
    lines = [line for line in captured.get().splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert rows[0] == [
        "a", "8.19B", "450,000", "6.0", "2.0", "3.0", "2.0", "13.0", "1.5", "4,096", "1,234", "<= 5.60M", "17", "3",
    ]  # fmt: skip
    assert rows[1][6:] == ["?", "> 13.0", "?", "4,096", "?", "?", "16", "2"]
