"""Keys of older generations whose meaning depends on the training, and those that `--set` and `explain` are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.compat.translate import current_key
from cosmos_core.config.describe import find_keys
from cosmos_core.config.schema.dpo import DpoConfig
from cosmos_core.config.schema.sft import SftConfig
from cosmos_core.errors import ConfigError
from tests.unit.test_config_load import GRPO, SFT, load, refused

OF_DPO = '\n[custom]\ndpo_beta = 0.3\ndpo_loss_type = ["sigmoid", "sft"]\ndpo_loss_weights = [1.0, 0.5]\n'
KEPT = {"dpo_beta": 0.3, "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]}
DPO = SFT.replace('type = "sft"', 'type = "sft"\ntrainer_type = "dpo"')
OWN = SFT.replace('type = "sft"', 'type = "sft"\ntrainer_type = "mine.py:MyDPO"')
BOTH = ("[train]\n", "[train]\nvalidation_batch_per_replica = 8\n")


def of_rollouts(text: str) -> str:
    """The recipe with both keys for the rows of a validation step."""
    return text.replace(*BOTH).replace("[rollout]", "[rollout]\nval_batch_size = 4")


@pytest.mark.parametrize("text", [SFT, OWN, GRPO])
def test_keys_of_dpo_are_the_users_own_where_another_algorithm_trains(tmp_path: Path, text: str) -> None:
    pipeline = load(tmp_path, text + OF_DPO)
    assert all(recipe.custom == KEPT for recipe in pipeline.recipes.values())
    assert not any("dpo" in notice for notice in pipeline.notices)


def test_keys_of_dpo_are_todays_where_the_files_together_say_that_it_trains(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(OF_DPO)
    pipeline = load(tmp_path, 'extends = "base.toml"\n' + DPO, "custom.dpo_beta=0.2")
    policy = pipeline.recipes["sft"].train.train_policy
    assert isinstance(policy, DpoConfig)
    assert (policy.dpo.beta, policy.dpo.loss_type, policy.dpo.loss_weights) == (0.2, ("sigmoid", "sft"), (1.0, 0.5))
    assert pipeline.recipes["sft"].custom == {}
    assert "custom.dpo_beta is today's train.train_policy.dpo.beta" in pipeline.notices


def test_a_key_of_today_wins_over_one_of_custom_and_that_is_told(tmp_path: Path) -> None:
    pipeline = load(tmp_path, DPO + OF_DPO, "train.train_policy.dpo.beta=0.1")
    policy = pipeline.recipes["sft"].train.train_policy
    assert isinstance(policy, DpoConfig) and policy.dpo.beta == 0.1
    told = "custom.dpo_beta = 0.3 is ignored: today's train.train_policy.dpo.beta says 0.1"
    assert told in pipeline.notices


def test_a_sweep_over_a_key_of_dpo_changes_each_branch(tmp_path: Path) -> None:
    stages = (
        '[[pipeline.stages]]\nname = "sft"\nkind = "sft"\n[pipeline.stages.sweep]\nmetric = "validation/loss"\n'
        'through = ["measure"]\ngrid = { "custom.dpo_beta" = [0.2, 0.4] }\n'
        '[[pipeline.stages]]\nname = "measure"\nkind = "validate"\nmodel = "stage:sft"\nafter = "sft"\n'
    )
    pipeline = load(tmp_path, DPO + OF_DPO + stages)
    policies = [pipeline.recipes[f"sft-dpo_beta-{beta}"].train.train_policy for beta in ("0_2", "0_4")]
    assert [policy.dpo.beta for policy in policies if isinstance(policy, DpoConfig)] == [0.2, 0.4]


@pytest.mark.parametrize(
    ("rows", "prompt"), [('annotation_path = "rows.json"\n', "Be brief."), ("", ""), ('annotation_path = ""\n', "")]
)
def test_a_system_prompt_beside_annotations_is_that_of_their_rows(tmp_path: Path, rows: str, prompt: str) -> None:
    text = f'[train.train_policy]\ntype = "sft"\n[custom.dataset]\nsystem_prompt = "Be brief."\n{rows}'
    pipeline = load(tmp_path, text)
    policy = pipeline.recipes["sft"].train.train_policy
    assert isinstance(policy, SftConfig) and policy.system_prompt == prompt
    told = "custom.dataset.system_prompt is today's train.train_policy.system_prompt"
    assert (told in pipeline.notices) == bool(prompt)
    assert pipeline.recipes["sft"].custom["dataset"]["system_prompt"] == "Be brief.", (
        "for packers and rewards of the user"
    )


@pytest.mark.parametrize(
    ("text", "stage", "rows", "lost"),
    [
        (
            of_rollouts(GRPO), "rl", 4,
            "train.validation_batch_per_replica = 8 is ignored: rollout.val_batch_size is that",
        ),
        (
            of_rollouts(SFT + "\n[rollout]\n"), "sft", 8,
            "rollout.val_batch_size = 4 is ignored: train.validation_batch_per_replica is that",
        ),
    ],
)  # fmt: skip
def test_of_two_keys_of_the_first_generation_the_one_of_the_training_counts(
    tmp_path: Path, text: str, stage: str, rows: int, lost: str
) -> None:
    pipeline = load(tmp_path, text)
    assert pipeline.recipes[stage].validation.batch_size == rows
    assert f"{lost} of this type of training" in pipeline.notices


def test_a_column_of_conversations_is_ignored_where_the_type_is_inferred(tmp_path: Path) -> None:
    text = '[train.train_policy]\nepsilon_low = 0.1\nconversation_column_name = "x"\n'
    [notice] = load(tmp_path, text).notices
    assert notice == (
        "train.train_policy.conversation_column_name = 'x' is ignored; it would have meant the column of the "
        "conversation: set prompt_column_name"
    )


@pytest.mark.parametrize(
    ("key", "now"),
    [
        ("policy.diffusers_config.is_video", "policy.diffusers.is_video"),
        ("sft.policy.diffusers_config.timestep_fraction", "sft.policy.diffusers.timesteps_fraction"),
        ("train.validation_step", "validation.freq"),
        ("custom.rollout.val_batch_size", "custom.rollout.val_batch_size"),
        ("train.validation_steps", "train.validation_steps"),
    ],
)
def test_a_key_in_an_older_table_has_todays_name(key: str, now: str) -> None:
    assert current_key(key) == now


def test_a_key_of_an_older_table_is_set_and_explained(tmp_path: Path) -> None:
    pipeline = load(tmp_path, SFT, "policy.diffusers_config.max_prompt_length=77")
    assert pipeline.recipes["sft"].policy.diffusers.max_prompt_length == 77
    [key] = find_keys("policy.diffusers_config.is_video")
    assert key.name == "policy.diffusers.is_video"
    with pytest.raises(ConfigError, match="does nothing in any version; it would have meant the dtype of compute"):
        find_keys("policy.diffusers_config.training_dtype")


@pytest.mark.parametrize("stage", ["", "sft."])
def test_a_key_that_does_nothing_is_ignored_on_the_command_line_as_in_a_file(tmp_path: Path, stage: str) -> None:
    setting = f"{stage}policy.parallelism.cp_rotate_method"
    assert load(tmp_path, SFT, f"{setting}=allgather").notices == (
        f"{setting} = 'allgather' is ignored; it would have meant how context-parallel ranks passed keys and values "
        "on, before Ulysses",
    )


def test_a_key_of_another_type_is_told_with_the_type_that_nobody_wrote(tmp_path: Path) -> None:
    assert refused(tmp_path, '[train.train_policy]\nreward_function = "gsm8k"\n') == (
        'recipe.toml: train.train_policy.reward_function: unknown key here; set train.train_policy.type = "grpo"'
    )


def test_a_stage_that_is_implied_has_to_be_written_out_to_be_set(tmp_path: Path) -> None:
    stages = '[[pipeline.stages]]\nname = "sft"\nkind = "sft"\n'
    setting = 'sft-data.timeout="1h"'
    assert refused(tmp_path, SFT + stages, setting) == (
        f"--set {setting!r}: stage 'sft-data' is implied by 'sft'; write it out in [[pipeline.stages]] to set a key of "
        "it, or set one of its recipe with sft.KEY=VALUE"
    )
