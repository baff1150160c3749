"""Keys that are set and that no stage of a pipeline reads: which are said, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.mesh import resolve_gpu_settings
from cosmos_core.config.unread import unread_key_notices
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
    pipeline = load(tmp_path, recipe, *settings)
    assert [*unread_key_notices(pipeline, pipeline.recipes)] == [f"{unread} {verb} no effect here: {reason}"]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (SFT, ("validation.freq=7", "validation.reward_function='exact_match'", "validation.n_generation=4")),
        (SFT + stages(FIT), ("rollout.n_generation=4", "fit.kind='custom'", "fit.entry='json:loads'")),
        (GRPO, (f"{P}.reward_function=['judge']", "judge.model='m'")),
        (GRPO, (f"{P}.datasets=[{{name='a', split='b'}}, {{name='c'}}]", f"{P}.dataset.name=''")),
        (GRPO, ("policy.parallelism.dp_shard_size=-1", "redis='12800'", "rollout.parallelism.tp_size=4")),
        (SFT + stages(FIT), ("fit.sweep={grid={'train.optm_lr'=[1e-3, 2e-3]}, metric='validation/loss'}",)),
    ],
)
def test_what_a_stage_reads_is_not_said_to_have_no_effect(
    recipe: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    pipeline = load(tmp_path, recipe, *settings, "pipeline.gpus=2")
    assert [*unread_key_notices(resolve_gpu_settings(pipeline), pipeline.recipes)] == []
