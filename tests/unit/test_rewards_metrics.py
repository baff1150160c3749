"""The values of a reward service's functions under names of their own, and what credit by each of them learns."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from cosmos_core.algorithms.base import metric_weights
from cosmos_core.algorithms.flow_credit import AdvantageSettings, diffusion_advantages
from cosmos_core.config.schema.flow_rl import FlowPolicyConfig
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.types import Score
from tests.unit.reward_server import serving


def policy(*functions: dict[str, Any]) -> FlowPolicyConfig:
    return FlowPolicyConfig.model_validate({
        "use_remote_reward": True, "normalise_each_reward": True,
        "remote_reward": {"reward_fns": functions, "batch_size": 4},
    })  # fmt: skip


def scored(config: FlowPolicyConfig, said: dict[str, list[float]]) -> list[Score]:
    assert config.remote_reward_config is not None
    requests = [{"prompt": "p", "media": Image.new("RGB", (2, 2))}] * 4
    with serving(score=lambda fields, array, name: said) as server:
        return RemoteRewards(config.remote_reward_config, server.service).score(requests)


def test_two_functions_of_one_reward_are_normalised_each_by_itself() -> None:
    config = policy({"name": "v", "score_key": "vq"}, {"name": "v", "score_key": "mq", "weight": 0.5})
    weights = metric_weights(config)
    assert weights == {"v/vq": 1.0, "v/mq": 0.5}
    scores = scored(config, {"vq": [0.0, 0.0, 1.0, 1.0], "mq": [0.0, 1.0, 0.0, 1.0]})
    [advantages] = diffusion_advantages([scores], AdvantageSettings(std_scope="group", reward_weights=weights))[0]
    assert advantages == pytest.approx([-1.5, -0.5, 0.5, 1.5], rel=1e-3)


def test_a_metric_of_a_function_holds_its_clipped_value_and_one_that_is_only_watched_its_own() -> None:
    config = policy(
        {"name": "v", "score_key": "vq", "clip_max": 1.0},
        {"name": "v", "score_key": "mq", "clip_min": -1.0},
        {"name": "v", "score_key": "vq+mq", "weight": 0.0},
    )
    first, *_ = scored(config, {"vq": [100.0] * 4, "mq": [-7.0] * 4})
    assert first.value == 1.0 - 1.0
    assert first.metrics == {"v/vq": 1.0, "v/mq": -1.0, "v/vq+mq": 93.0}


def test_a_function_that_does_not_apply_to_a_prompt_leaves_its_completions_to_the_others() -> None:
    scores = [Score(value, {"a": value}) for value in (0.0, 2.0)]
    [advantages] = diffusion_advantages([scores], AdvantageSettings("group", reward_weights={"a": 1.0, "b": 1.0}))[0]
    assert advantages == pytest.approx([-1.0, 1.0], rel=1e-3)
