"""A teacher is found, checked and counted like the model of a stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.scorer import RequestedOutputs
from cosmos_core.models.teacher import check_teacher, open_teacher
from cosmos_core.run.hub import pin_hub_revisions
from cosmos_core.run.inputs import check_inputs
from cosmos_core.train.setup import open_trainer
from tasks.kinds import all_kinds
from tests.effects.change import GRPO, Change, stage_of
from tests.effects.test_model import samples
from tests.unit.run_folder import fingerprint_of, load_recipe, make_inputs
from tests.unit.tiny_model import save_tiny_model

KINDS = all_kinds()


def test_a_teacher_counts_where_one_is_asked_and_only_there(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "teacher").mkdir(exist_ok=True)
        (tmp_path / "teacher" / name).write_text("{}")

    def found(*settings: str) -> str:
        named = f"distillation.model_name_or_path={tmp_path}/teacher"
        return fingerprint_of(load_recipe(tmp_path, named, *settings, kind="grpo"), "rl").value

    off, on = found(), found("distillation.enable=true")
    assert found("distillation.jsd_beta=0.1") == off
    assert len({off, on, found("distillation.enable=true", "distillation.jsd_beta=0.1")}) == 3
    assert found("distillation.enable=true", "distillation.mini_batch=4") != on
    (tmp_path / "teacher" / "model.safetensors").write_text("other weights")
    assert found() == off and found("distillation.enable=true") != on
    pipeline = load_recipe(tmp_path, "distillation.enable=true", kind="grpo")
    assert "teacher" not in fingerprint_of(pipeline, "validate").ingredients


def test_a_teacher_that_is_not_there_is_told_before_a_run_is_made(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    for settings, is_missed in (((), False), (("distillation.enable=true",), True)):
        pipeline = load_recipe(tmp_path, "distillation.model_name_or_path=./nowhere", *settings, kind="grpo")
        if not is_missed:
            check_inputs(pipeline)
            continue
        with pytest.raises(ModelError, match=r"stage 'rl': distillation.model_name_or_path = './nowhere': no such fol"):
            check_inputs(pipeline)


def test_a_teacher_on_the_hub_is_pinned(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    commit = "c" * 40
    settings = ("distillation.enable=true", "distillation.model_name_or_path=org/teacher",
                f"distillation.model_revision={commit}")  # fmt: skip
    recipe = pin_hub_revisions(load_recipe(tmp_path, *settings, kind="grpo")).recipes["rl"]
    assert recipe.distillation.model_revision == commit


CHAIN = """
[distillation]
enable = true
model_name_or_path = "stage:{teacher}"

[[pipeline.stages]]
name = "big"
kind = "sft"
data = "{folder}/rows.jsonl"
overrides.train.train_policy = {{ type = "sft" }}
overrides.distillation.enable = false

[[pipeline.stages]]
name = "small"
kind = "rl"
after = {after}
data = "{folder}/rows.jsonl"
overrides.train.train_policy = {{ type = "grpo" }}
"""


def chain(folder: Path, teacher: str = "big", after: str = "['big']") -> Path:
    file = folder / "chain.toml"
    file.write_text(CHAIN.format(folder=folder, teacher=teacher, after=after))
    return file


def test_what_another_stage_exports_may_teach(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    pipeline = load_pipeline(chain(tmp_path), [], KINDS)
    small = pipeline.stage("small")
    assert set(small.after) == {"big", "small-data"}
    found = fingerprint_of(pipeline, "small", big="one", **{"small-data": "d"})
    assert found.ingredients["teacher"] == "stage:big"
    for teacher, after, said in (
        ("bug", "['big']", "distillation.model_name_or_path = 'stage:bug' is no stage of this pipeline"),
        ("big", "[]", "'big' is not in its `after`"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_pipeline(chain(tmp_path, teacher, after), [], KINDS)


@pytest.mark.parametrize(
    ("kind", "setting", "said"),
    [
        ("sft", "distillation.top_k=2", "a teacher judges completions that the policy draws"),
        ("grpo", "distillation.master_dtype='bfloat16'", None),
        ("grpo", "distillation.param_dtype='float32'", None),
        ("grpo", "distillation={enable=true,master_dtype='bfloat16',param_dtype='float32'}", "is wider than"),
    ],
)
def test_what_a_teacher_cannot_do_is_refused_by_name(tmp_path: Path, kind: str, setting: str, said: str | None) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path, "distillation.enable=true", setting, kind=kind)
    if said is None:
        return check_capabilities(pipeline)
    with pytest.raises(ConfigError, match=said):
        check_capabilities(pipeline)


def test_the_prompt_has_no_log_probabilities_of_the_rollout(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    settings = ("distillation.enable=true", "distillation.include_prompt=true",
                "train.train_policy.use_rollout_logprobs_for_loss=true")  # fmt: skip
    with pytest.raises(ConfigError, match="include_prompt = true excludes"):
        check_capabilities(load_recipe(tmp_path, *settings, kind="grpo"))


def test_no_group_is_dropped_where_every_reward_is_zero(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path, "distillation.enable=true", "train.train_policy.variant=dapo", kind="grpo")
    assert pipeline.recipes["rl"].train.train_policy.dynamic_sampling is None
    assert "train.train_policy.variant = 'dapo' drops no group here, because every reward is 0" in unique_notices(
        pipeline
    )


def with_tokens(folder: Path, *, removed: int = 0, added: int = 0) -> Path:
    """A model whose tokenizer has other tokens."""
    save_tiny_model(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    ordinary = [token for token in vocabulary if not token.startswith("<|")]
    for token in ordinary[:removed]:
        vocabulary[f"{token}?"] = vocabulary.pop(token)
    vocabulary |= {f"new {i}": len(vocabulary) + i for i in range(added)}
    file.write_text(json.dumps(content))
    return folder


def test_a_teacher_must_have_the_tokens_of_the_policy_and_may_have_more(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "model"))
    recipe = Change("distillation.enable", True, {**GRPO, "policy.model_max_length": 64}).after

    def look(folder: Path) -> str:
        return check_teacher(DistillationConfig(enable=True, model_name_or_path=str(folder)), recipe, tokenizer)

    assert look(with_tokens(tmp_path / "more", added=2)) == "teacher Qwen3ForCausalLM"
    with pytest.raises(ModelError, match=r"^distillation.model_name_or_path = .*2 of 259 tokens .*or none"):
        look(with_tokens(tmp_path / "fewer", removed=2))
    with pytest.raises(ModelError, match=r"^distillation.model_name_or_path = .*does not exist") as caught:
        look(tmp_path / "nowhere")
    assert "policy." not in str(caught.value)


def test_a_teacher_is_asked_about_ids_that_the_policy_has(tmp_path: Path) -> None:
    """Heads may have more rows than there are tokens: their likeliest row may be none."""
    folder = save_tiny_model(tmp_path / "model")
    settings = {**GRPO, "train.compile": False, "distillation.enable": True, "policy.model_max_length": 64}
    recipe = Change("distillation.model_name_or_path", str(folder), settings).after
    trainer = open_trainer(stage_of(tmp_path / "stage", recipe, kind="rl", model=folder))
    teacher = open_teacher(recipe.distillation, recipe, trainer.adapter)
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    trainer.add_model("teacher", teacher)
    with torch.no_grad():
        teacher.model.get_output_embeddings().weight[-1] *= 1000  # the row beyond the tokens
    rows = trainer.evaluate(samples(4), RequestedOutputs(top_k=1000), weights="teacher")
    assert max(row["top_ids"].max().item() for row in rows) == 258
    assert all(row["top_ids"].shape[-1] == 259 for row in rows)


def test_an_algorithm_of_a_users_own_is_told_of_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cosmos_core.train.rollout_feed import make_training_sampling

    (tmp_path / "own.py").write_text("from cosmos_core.algorithms.base import Algorithm\nclass Own(Algorithm): ...\n")
    monkeypatch.chdir(tmp_path)
    own = {"train": {"train_policy": {"type": "grpo", "trainer_type": "own.py:Own"}}}
    for is_on in (False, True):
        recipe = Recipe.model_validate({**own, "distillation": {"enable": is_on}})
        assert (make_algorithm(recipe, make_training_sampling(recipe)).teacher is not None) == is_on
    assert make_algorithm(recipe).teacher is None


def test_a_teacher_without_an_embedding_of_the_pad_token_scores_padded_rows(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    assert tokenizer.pad_token_id >= 260, "the model has 260 embeddings"
    settings = {**GRPO, "train.compile": False, "distillation.enable": True, "policy.model_max_length": 64}
    recipe = Change("distillation.model_name_or_path", str(folder), {**settings, "distillation.mini_batch": 4}).after
    trainer = open_trainer(stage_of(tmp_path / "stage", recipe, kind="rl", model=folder))
    trainer.add_model("teacher", open_teacher(recipe.distillation, recipe, trainer.adapter))
    longer, shorter = samples(2)
    rows = [longer, replace(shorter, input_ids=shorter.input_ids[:5], loss_mask=shorter.loss_mask[:5])]
    assert len(trainer.evaluate(rows, RequestedOutputs(), weights="teacher")) == 2
