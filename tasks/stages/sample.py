"""Stage kind `sample`: complete prompts, score the completions and keep the best ones as rows for SFT or DPO."""

from cosmos_core.run.libraries import TRAINING_LIBRARIES
from cosmos_core.types import StageKind
from tasks.stages.prepare import PROMPT_RENDERING_KEYS, ROW_SETTINGS

_REWARD_KEYS = (
    "type", "trainer_type", "reward_function", "reward_env", "reward_timeout_seconds", "use_remote_reward",
    "remote_reward", "bypass_reward", "group_reward_calculation", "overlong_reward", "system_prompt", "datasets",
)  # fmt: skip
"""Keys of `train.train_policy` that determine how completions are scored."""

_OUTPUT_ROW_SETTINGS = {"enable", "enable_tools", "tools", "continue_final_message"}
"""Keys of `rollout.multi_turn_config` that determine the output rows, in addition to the prepared prompts."""

KIND = StageKind(
    name="sample",
    entry="cosmos_core.sample.program:run",
    result_version=2,
    has_mesh=True,
    scores=True,
    allowed_keys=("reward_service", "reward_service_pool"),
    reads_model="weights",
    reads_data="prepared",
    table="sample",
    recipe_tables=(
        "train.seed",
        "train.master_dtype",
        "train.param_dtype",
        *(f"train.train_policy.{name}" for name in _REWARD_KEYS),
        "policy",
        "rollout",
        "custom",
        "judge",
        "sample",
    ),
    unread=(
        *(key for key in ROW_SETTINGS if key != "train.train_policy.system_prompt"),
        *(f"rollout.multi_turn_config.{name}" for name in PROMPT_RENDERING_KEYS if name not in _OUTPUT_ROW_SETTINGS),
        "policy.lora",
    ),
    reports=("sample/*",),
    libraries=TRAINING_LIBRARIES,
)
