"""Stage kind `rl`: train a policy with rollouts and updates, such as GRPO, resumable from the newest checkpoint."""

from dataclasses import replace

from tasks.stages import sft

KIND = replace(
    sft.KIND,
    name="rl",
    result_version=4,
    feed="rollouts",
    recipe_tables=("train", "policy", "rollout", "validation", "custom", "judge", "distillation", "mode"),
)
