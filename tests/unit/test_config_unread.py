"""Keys that are set and that no stage of a pipeline reads: which are said, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.unread import unread_keys
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds
from tests.unit.config_recipes import CONFIGS
from tests.unit.test_config_compose import stages
from tests.unit.test_config_load import GRPO, SFT, load

P = "train.train_policy"
NFT = ("train.train_policy.trainer_type='diffusion_nft'", "policy.is_diffusers=true")
FIT = 'name = "fit"\nkind = "sft"'


@pytest.mark.parametrize(
    ("recipe", "settings", "unread", "reason"),
    [
        (SFT, ("evaluate.limit=3",), "evaluate.limit = 3", "only stages of kind 'evaluate' read it"),
        (SFT, ("mode='disaggregated'",), "mode = 'disaggregated'", "only stages of kind 'rl' read it"),
        (SFT, ("export.unproven=true", "train.ckpt.export_safetensors=false"), "export.unproven = true",
         "only stages of kind 'export' read it"),
        (SFT, ("export.unproven=true",), "export.unproven = true", "export.formats has no quantised format"),
        (SFT, ("validation.enable=false", "validation.freq=7", "validation.batch_size=2"),
         "validation.freq = 7, validation.batch_size = 2", "validation.enable is off"),
        (SFT, ("rollout.n_generation=4",), "rollout.n_generation = 4", "nothing is generated"),
        (SFT, ("validation.n_generation=4",), "validation.n_generation = 4", "held-out rows are not completed"),
        (SFT, ("train.sync_weight_interval=4",), "train.sync_weight_interval = 4", "no rollouts are trained on"),
        (GRPO, ("judge.model='m'",), "judge.model = 'm'", "no reward function is judge"),
        (GRPO, (f"{P}.allowed_outdated_steps=2",), f"{P}.allowed_outdated_steps = 2", "mode = 'colocated'"),
        (GRPO, (*NFT, "policy.model_max_length=99"), "policy.model_max_length = 99", "policy.is_diffusers is on"),
        (SFT + stages(FIT, 'name = "all"\nkind = "evaluate"\nafter = "fit"\nmodel = "stage:fit"'),
         ("all.train.epoch=9",), "train.epoch = 9", "only stages of kind 'rl' or 'sft' read it"),
    ],
)  # fmt: skip
def test_what_no_stage_of_a_pipeline_reads_is_said(
    recipe: str, settings: tuple[str, ...], unread: str, reason: str, tmp_path: Path
) -> None:
    verb = "have" if ", " in unread else "has"
    assert [*unread_keys(load(tmp_path, recipe, *settings))] == [f"{unread} {verb} no effect here: {reason}"]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (SFT, ("validation.freq=7", "validation.reward_function='exact_match'", "validation.n_generation=4")),
        (SFT + stages(FIT), ("rollout.n_generation=4", "fit.kind='custom'", "fit.entry='json:loads'")),
        (GRPO, (f"{P}.reward_function=['judge']", "judge.model='m'")),
        (GRPO, (f"{P}.datasets=[{{name='a', split='b'}}, {{name='c'}}]", f"{P}.dataset.name=''")),
        (SFT + stages(FIT), ("fit.sweep={grid={'train.optm_lr'=[1e-3, 2e-3]}, metric='validation/loss'}",)),
    ],
)
def test_what_a_stage_reads_is_not_said_to_have_no_effect(
    recipe: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    assert [*unread_keys(load(tmp_path, recipe, *settings))] == []


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_recipe_has_no_key_that_no_stage_reads(file: Path) -> None:
    assert [*unread_keys(load_pipeline(file, [], all_kinds()))] == []


@pytest.mark.parametrize(
    ("settings", "key", "variants"),
    [
        (("variant='cispo'", "epsilon_high=5.0"), "epsilon_high",
         "'grpo' or 'dapo' or 'gspo' or 'dppo_tv' or 'dppo_kl'"),
        (("variant='gspo'", "lower_bound_ratio=4.0", "loss_type='token-mean'"), "lower_bound_ratio",
         "'grpo' or 'dapo'"),
        (("aipo_rho=2.0", "epsilon_low=0.1"), "epsilon_low",
         "'grpo' or 'dapo' or 'gspo' or 'dppo_tv' or 'dppo_kl', without aipo_rho"),
    ],
)  # fmt: skip
def test_a_bound_that_the_loss_of_a_variant_does_not_have_is_told(
    settings: tuple[str, ...], key: str, variants: str, tmp_path: Path
) -> None:
    assert unique_notices(load(tmp_path, GRPO, *(f"{P}.{setting}" for setting in settings))) == [
        f"{P}.{key} has no effect here: it is for variant = {variants}"
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("train.optm_decay_ratio=0.1",), "train.optm_decay_ratio = 0.1 has no effect here: optm_decay_type is off"),
        (("sample.min_margin=0.1",), "sample.min_margin = 0.1 has no effect here: pairs is off"),
        (("train.optm_min_lr_factor=0.1", "train.optm_decay_type='cosine'"), ""),
        ((f"{P}.use_decoupled_loss=true",), ""),
    ],
)
def test_a_key_whose_switch_is_off_is_told_and_one_that_a_rule_has_set_is_not(
    settings: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    sampled = stages('name = "s"\nkind = "sample"', 'name = "fit"\nkind = "rl"')
    assert unique_notices(load(tmp_path, GRPO + sampled, *settings)) == [said] * bool(said)


def test_an_initialisation_that_needs_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="init_lora_weights = 'eva' needs data before the first step; use 'pissa'"):
        check_capabilities(load(tmp_path, SFT, "policy.lora.init_lora_weights='eva'"))
