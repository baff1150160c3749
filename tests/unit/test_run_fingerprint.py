"""Same fingerprint, same result: what changes it and what does not."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from cosmos_core import machine_properties
from cosmos_core.config.compose import Pipeline
from cosmos_core.errors import ModelError
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.plan import save_fingerprint
from cosmos_core.train.resume_from import _fingerprint_inputs_without_mesh
from tasks.kinds import all_kinds
from tasks.layout import supersede_outdated_stage
from tests.cells import full
from tests.unit.run_folder import counting, fingerprint_of, load_recipe, make_inputs

STAGES = ("prepare", "sft", "validate", "export")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs that no test changes."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_inputs(tmp_path)
    return tmp_path


def prints(folder: Path, *overrides: str, kind: str = "sft") -> dict[str, str]:
    """The fingerprint of each stage of the recipe."""
    return values_of(load_recipe(folder, *overrides, kind=kind))


def values_of(pipeline: Pipeline) -> dict[str, str]:
    return {stage.name: fingerprint_of(pipeline, stage.name).value for stage in pipeline.stages}


shared_prints = cache(prints)


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def changed_stages(shared: Path, *overrides: str) -> set[str]:
    """The stages of the recipe whose own fingerprint the overrides change, whatever lies behind them."""
    return changed(shared_prints(shared), prints(shared, *overrides))


# The setting, and the stages that must be made again for it.
AFFECTING = [
    ("train.optm_lr=1e-3", {"sft"}),
    ("train.seed=1", {"prepare", "sft", "validate"}),
    ("train.param_dtype='float32'", {"sft", "validate", "export"}),
    ("train.deterministic=true", {"sft", "validate"}),
    ("train.train_policy.system_prompt=hello", {"prepare"}),
    ("train.train_policy.dataset.split=test", {"prepare"}),
    ("policy.model_max_length=128", {"prepare", "sft", "validate"}),
    ("policy.model_revision=v2", {"prepare", "sft", "validate", "export"}),
    ("rollout.max_response_length=7", {"prepare", "sft", "validate"}),
    ("custom.x=1", {"sft", "validate"}),
    ("validation.temperature=0.5", {"sft", "validate"}),
    ("validation.freq=3", {"sft"}),
    ("pipeline.threads=2", {"sft", "validate"}),
]
FURTHER = [
    *((f"train.{key}", {"sft"}) for key in ("epoch=3", "train_batch_per_replica=4")),
    *((f"train.train_policy.dataset.{key}=0.5", {"prepare"}) for key in ("test_size", "max_skipped_fraction")),
    *((key, {"sft", "validate"}) for key in ("rollout.sampling_config.top_p=0.5", "train.train_policy.mini_batch=4")),
    ("validation.max_response_length=7", {"prepare", "sft", "validate"}), ("validation.dataset.split=dev", {"prepare"}),
]  # fmt: skip
"""Of keys that the same stages read whole with another one."""
HARMLESS = [
    "train.output_dir=elsewhere", "pipeline.output_dir=elsewhere", "train.timestamp='1'", "train.ckpt.save_freq=3",
    "train.ckpt.max_keep=2", "train.ckpt.enable_checkpoint=true", "train.ckpt.save_mode=sync", "pipeline.name=other",
    "train.signal_to_handle=[]", "train.save_ckpt_at_exit=false", "logging.logger=[]", "pipeline.grace_seconds=1",
    "rollout.gpu_memory_utilization=0.1", "sft.retries=7", "sft.timeout=1h",
    "train.train_policy.dataloader_num_workers=2",
]  # fmt: skip


@pytest.mark.parametrize(("setting", "stages"), [*AFFECTING, *full(*FURTHER)])
def test_a_value_that_can_change_results_changes_the_stages_that_read_it(
    shared: Path, setting: str, stages: set[str]
) -> None:
    assert changed_stages(shared, setting) == stages


def test_a_value_that_changes_no_result_changes_no_fingerprint(shared: Path) -> None:
    before, after = load_recipe(shared), load_recipe(shared, *HARMLESS)
    for name in STAGES:
        assert fingerprint_of(after, name).describe_difference(fingerprint_of(before, name)) == []
    assert changed_stages(shared, *HARMLESS) == set()


@pytest.mark.parametrize(
    ("setting", "stages"),
    [
        ("rollout.backend='hf'", set()),
        ("rollout.max_response_length=7", set()),
        ("rollout.sampling_config.top_p=0.5", set()),
        ("validation.temperature=0.5", {"validate"}),
        ("validation.freq=3", set()),
        ("custom.x=1", set()),
        ("custom.vision.max_pixels=9", {"prepare", "sft", "validate"}),
        ("train.train_policy.trainer_type='{}/mine.py:score'", {"prepare", "sft", "validate"}),
    ],
)
def test_what_other_settings_leave_unread_changes_nothing(shared: Path, setting: str, stages: set[str]) -> None:
    """Neither rewards nor code of a user's own, and nothing is measured in training."""
    plain = ("validation.reward_function=[]", "sft.validation.enable=false")
    assert changed(shared_prints(shared, *plain), prints(shared, *plain, setting.format(shared))) == stages


def test_custom_counts_where_code_of_a_users_own_is_read(shared: Path) -> None:
    assert changed_stages(shared, "custom.x=1", "sft.validation.enable=false") >= {"validate"}
    own = f"train.train_policy.trainer_type='{shared}/mine.py:score'"
    assert "sft" in changed(prints(shared, own), prints(shared, own, "custom.x=1"))


def changed_by(folder: Path, file: str, content: str = "other", kind: str = "sft") -> set[str]:
    """The stages whose fingerprint a change of a file's content changes."""
    pipeline = load_recipe(folder, kind=kind)
    before = values_of(pipeline)
    (folder / file).write_text(content)
    return changed(before, values_of(pipeline))


def test_content_counts_for_the_stages_that_read_it(folder: Path) -> None:
    before = values_of(pipeline := load_recipe(folder))
    for name, stages in {
        "rows.jsonl": {"prepare"}, "held_out/test.jsonl": {"prepare"}, "held_out/NOTES.txt": set(),
        **{f"model/{name}": {"prepare", "sft"} for name in ("tokenizer.json", "tekken.json", "qwen.tiktoken")},
        "model/config.json": {"sft"}, "model/model.safetensors": {"sft"},  # rows survive other weights
        "model/README.md": set(), "model/.cache": set(), "mine.py": {"sft", "validate"}, "README.md": set(),
    }.items():  # fmt: skip
        file = folder / name
        content = file.read_text() if file.exists() else ""
        file.write_text("other")
        assert changed(before, values_of(pipeline)) == stages, name
        file.write_text(content) if content else file.unlink()


def test_code_of_a_reward_counts_for_reinforcement_learning_too(folder: Path) -> None:
    assert changed_by(folder, "mine.py", kind="grpo") == {"rl", "validate"}


def test_a_file_more_counts(folder: Path) -> None:
    assert changed_by(folder, "model/adapter.safetensors") == {"sft"}
    assert changed_by(folder, "held_out/more.jsonl") == {"prepare"}
    declared = "---\nconfigs:\n- data_files: test.jsonl\n---\n"
    assert changed_by(folder, "held_out/README.md", declared) == {"prepare"}
    assert changed_by(folder, "held_out/README.md", f"{declared}words") == set()


def test_a_file_that_enters_no_weight_changes_the_export_and_leaves_every_checkpoint(folder: Path) -> None:
    (folder / "model/notes").mkdir()
    names = ("LICENSE", "training_args.bin", "notes/results.json", "generation_config.json")
    for file in (files := [folder / "model" / name for name in names]):
        file.write_text('{"eos_token_id": 3, "temperature": 0.6}')
    pipeline = load_recipe(folder)
    before, values = fingerprint_of(pipeline, "sft"), values_of(pipeline)
    for file in files:
        file.write_text('{"eos_token_id": 3}')
        last, values = values, values_of(pipeline)
        assert changed(last, values) == {"sft"}, file
        after = fingerprint_of(pipeline, "sft")
        assert after.training_hash == before.training_hash != before.value, file

    stage = folder / "stages/sft"
    (stage / "checkpoints/step_3").mkdir(parents=True)
    save_fingerprint(stage, before)
    supersede_outdated_stage(stage, after)
    assert (stage / "checkpoints/step_3").exists()
    supersede_outdated_stage(stage, fingerprint_of(load_recipe(folder, "train.seed=1"), "sft"))
    assert not (stage / "checkpoints").exists()


def test_the_tokens_that_end_a_completion_count_for_rows_and_training(folder: Path) -> None:
    assert changed_by(folder, "model/generation_config.json", '{"eos_token_id": [3, 4]}') == {"prepare", "sft"}


def test_the_same_content_at_another_place_is_the_same(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make_inputs(here)
    shutil.copytree(here, there)
    assert prints(here) == prints(there)


def test_the_checkpoint_that_a_training_begins_from_counts_wherever_it_lies(folder: Path) -> None:
    found = []
    for run, content in (("first", "a"), ("second", "a"), ("third", "b")):
        policy = folder / run / "stages/sft/checkpoints/step_3/policy"
        policy.mkdir(parents=True)
        (policy / "manifest.json").write_text(content)
        found.append(prints(folder, f"train.resume='{policy}'"))
    assert found[0] == found[1] and changed(found[0], found[2]) == {"sft"}
    plain = prints(folder)
    assert changed(plain, found[2]) == {"sft"}
    assert prints(folder, "train.resume=true") == plain


@pytest.mark.parametrize(
    ("files", "place", "said"),
    [
        ([], "run/step_3/policy", "no checkpoint; give the folder .../checkpoints/step_N/policy of a run"),
        (["policy/manifest.json"], "run/step_3",
         "no checkpoint; give the folder .../checkpoints/step_N/policy of a run"),
        (["policy/model_rank_0.pth"], "run/step_3/policy",
         "a pickled checkpoint of Cosmos-RL, which could run any code when read; start from the safetensors folder of "
         "that run: policy.model_name_or_path = '.../safetensors/step_N'"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_to_begin_from_is_told_before_anything_runs(
    folder: Path, files: list[str], place: str, said: str
) -> None:
    for name in files:
        file = folder / "run/step_3" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    pipeline = load_recipe(folder, f"train.resume='{folder / place}'")
    with pytest.raises(ModelError) as caught:
        check_inputs(pipeline)
    assert str(caught.value).endswith(f"stage 'sft': train.resume = '{folder / place}': {said}")


def test_what_a_stage_was_given_changes_it(folder: Path) -> None:
    pipeline = load_recipe(folder)
    one, again, other = (fingerprint_of(pipeline, "sft", prepare=digest).value for digest in "aab")
    assert one == again != other


def test_another_version_of_a_library_changes_what_workers_make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, before = load_recipe(folder), prints(folder)
    machine_properties._measure_machine.cache_clear()
    site = folder / "site"  # a newer torch in front of the installed one
    (site / "torch-99.0.dist-info").mkdir(parents=True)
    (site / "torch-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(site))
    try:
        after = {name: fingerprint_of(pipeline, name) for name in STAGES}
    finally:
        monkeypatch.undo()
        machine_properties._measure_machine.cache_clear()
    for name in STAGES:
        assert after[name].value != before[name]
        assert after[name].ingredients["versions"]["torch"] == "99.0"


def test_a_stage_depends_on_the_libraries_that_its_kind_computes_with(shared: Path) -> None:
    expected = {
        "torch": {*STAGES}, "tokenizers": {*STAGES}, "jinja2": {*STAGES}, "datasets": {"prepare"}, "prefect": set(),
        "pyarrow": {"prepare", "sft", "validate"}, "pillow": {"prepare", "sft", "validate"},
        "safetensors": {"sft", "validate", "export"}, "accelerate": {"sft", "validate", "export"},
        "math-verify": {"sft", "validate"},
    }  # fmt: skip
    pipeline = load_recipe(shared)
    found = {name: fingerprint_of(pipeline, name).ingredients["versions"] for name in STAGES}
    assert {library: {name for name in STAGES if library in found[name]} for library in expected} == expected


def test_a_custom_stage_depends_on_its_code_arguments_files_and_the_recipe_that_it_is_handed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def make(stage, **arguments): ...\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("{}")

    def value(*overrides: str) -> str:
        settings = (f"first.entry='{tmp_path}/code.py:make'", f"first.data='{tmp_path}/rows'", *overrides)
        return fingerprint_of(counting(tmp_path, *settings), "first").value

    base = value()
    assert value("train.output_dir=x", "first.retries=9") == base
    different = [value("first.arguments.steps=9"), value("train.seed=1"), value("custom.x=1"),
                 value("train.optm_lr=1"), value("first.entry='json:loads'")]  # fmt: skip
    texts = {"code.py": "def make(stage, **arguments): pass\n", "rows/a.jsonl": "{ }", "rows/notes.txt": "may be read"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        different.append(value())
    assert len({base, *different}) == 9


def test_the_code_and_the_models_of_a_reward_service_count(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def score(to_be_evaluated, reference): return 1.0\n")
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "model.safetensors").write_text("weights")
    mine = '[[reward_args]]\nreward_type = "mine"\nentry = "scores.py:score"\n'
    judge = '[[reward_args]]\nreward_type = "pickscore"\nmodel_path = "judge"\n'
    (tmp_path / "rewards.toml").write_text(
        mine + judge + '[[reward_args]]\nreward_type = "other"\nentry = "gone.py:f"\n'
    )

    pipeline = counting(tmp_path, f"first.reward_service='{tmp_path}/rewards.toml'")

    def value() -> str:
        return fingerprint_of(pipeline, "first").value

    found = [value(), value()]
    for name, text in {"scores.py": "score = 1\n", "judge/model.safetensors": "others", "rewards.toml": "{"}.items():
        (tmp_path / name).write_text(text)
        found.append(value())
    assert found[0] == found[1] and len(set(found)) == 4
    (tmp_path / "rewards.toml").write_text("reward_args = 3")  # the service reports it
    assert value() not in found
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "mine"\nentry = "json:loads"\n')
    inputs = pipeline.inputs(pipeline.stage("first"))
    assert [each.key for each in inputs if each.role == "rewards"] == ["json:loads"]


def test_a_difference_is_told_by_key_with_the_old_and_the_new_value(folder: Path) -> None:
    pipeline = load_recipe(folder)
    old = fingerprint_of(pipeline, "sft")
    new = fingerprint_of(load_recipe(folder, "train.optm_lr=1e-3", "train.max_num_steps=5"), "sft")
    assert new.describe_difference(old) == ["train.max_num_steps nothing -> 5", "train.optm_lr 1e-06 -> 0.001"]
    assert new.describe_difference(new) == []
    given = fingerprint_of(pipeline, "sft", prepare="0" * 64)
    assert given.describe_difference(old) == ["result of stage prepare changed"]
    (folder / "mine.py").write_text("def score(completion, reference): return 2.0\n")
    assert fingerprint_of(pipeline, "sft").describe_difference(old) == ["mine.py:score changed"]


def test_a_kind_reads_only_tables_that_a_recipe_has() -> None:
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.config.schema.table import all_fields

    known = {key for key, *_ in all_fields(Recipe)}
    for kind in all_kinds().values():
        tables = {key for key in kind.recipe_tables if not key.startswith("custom.")}  # whose keys are a user's own
        assert tables <= known, kind.name


def test_an_adapter_to_go_on_with_counts_by_its_content_and_has_to_be_there(folder: Path) -> None:
    first, second = folder / "first", folder / "second"
    for path in (first, second):
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text("weights")
    values, no_adapter = [], r"lora_path = '.*second': no adapter; give a folder with adapter_config\.json"
    for path, text in ((first, "weights"), (second, "weights"), (second, "others")):
        (path / "adapter_model.safetensors").write_text(text)
        values.append(fingerprint_of(load_recipe(folder, f"policy.lora.lora_path='{path}'"), "sft").value)
    assert values[0] == values[1] != values[2]
    (second / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=no_adapter):
        check_inputs(load_recipe(folder, f"policy.lora.lora_path='{second}'"))
    (second / "adapter_model.safetensors").rename(second / "model.safetensors")  # the export of a diffusion model
    check_inputs(load_recipe(folder, f"policy.lora.lora_path='{second}'"))


@pytest.mark.parametrize("key", ["train.train_policy.trainer_type", *full("rollout.backend")])
def test_code_of_the_users_counts_by_what_is_in_it_and_not_by_where_it_lies(folder: Path, key: str) -> None:
    found = []
    for name, text in (("a", "Mine = 1\n"), ("b", "Mine = 1\n"), ("a", "Mine = 2\n")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "mine.py").write_text(text)
        found.append(prints(folder, f"{key}='{folder}/{name}/mine.py:Mine'"))
    assert found[0] == found[1] and changed(found[0], found[2]) == {"sft", "validate"}


def test_code_of_a_users_family_counts_where_it_encodes(folder: Path) -> None:
    found = []
    for text in ("Mine = 1\n", "Mine = 2\n"):
        (folder / "mine.py").write_text(text)
        found.append(prints(folder, "policy.is_diffusers=true", f"policy.model_class='{folder}/mine.py:Mine'"))
    assert changed(*found) >= {"prepare", "sft"}


def test_images_beside_prompts_are_other_rows(shared: Path) -> None:
    nft = ("policy.is_diffusers=true", "train.train_policy.trainer_type='diffusion_nft'")
    learns = (*nft, "train.train_policy.learns_data=true", "policy.diffusers.flow_rl.data_beta=0.1")
    before, after = (load_recipe(shared, *settings, kind="grpo") for settings in (nft, learns))
    assert fingerprint_of(before, "prepare").value != fingerprint_of(after, "prepare").value


def test_rows_without_the_images_that_rollouts_from_frames_leave_out_are_other_rows(shared: Path) -> None:
    nft = ("policy.is_diffusers=true", "train.train_policy.trainer_type='diffusion_nft'")
    found = [
        fingerprint_of(load_recipe(shared, *nft, *settings, kind="grpo"), "prepare").value
        for settings in ((), *((f"policy.diffusers.flow_rl.max_conditional_frames={n}",) for n in (0, 1)))
    ]
    assert found[0] == found[1] != found[2]


def test_a_stage_that_differs_in_its_mesh_and_engines_alone_is_known_by_its_real_fingerprint(folder: Path) -> None:
    mesh = ("policy.parallelism.dp_shard_size=2", "rollout.parallelism.n_init_replicas=3")

    def without_mesh(*overrides: str) -> object:
        found = fingerprint_of(load_recipe(folder, *overrides), "sft")
        return _fingerprint_inputs_without_mesh({"value": found.value, "ingredients": found.ingredients})

    assert without_mesh() == without_mesh(*mesh) != without_mesh(*mesh, "train.seed=1")
