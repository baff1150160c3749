"""Kind `prepare`: read rows, check every one, tokenise once; training ranks only read what it wrote."""

from cosmos_core.run.libraries import ROWS
from cosmos_core.types import StageKind

ROWS_BESIDE = ("name", "subset", "revision", "split", "max_skipped_fraction", "conversation_column_name")
"""What decides about the rows of a data term, of `train.train_policy.data_term`."""
DECIDE_ROWS = (
    "train.train_policy.dataset",
    "train.train_policy.data_packer",
    "train.train_policy.conversation_column_name",
    "train.train_policy.prompt_column_name",
    "train.train_policy.response_column_name",
    "train.train_policy.chosen_column_name",
    "train.train_policy.rejected_column_name",
    "train.train_policy.label_column_name",
    "train.train_policy.system_prompt",
    *(f"train.train_policy.data_term.{name}" for name in ROWS_BESIDE),
    "validation.dataset",
    "validation.max_rows",
)
"""What is read here alone: stages behind this one see the rows that come of it."""
RENDER_PROMPTS = (
    "enable",
    "enable_tools",
    "tools",
    "enable_thinking",
    "custom_chat_template_path",
    "add_generation_prompt",
    "continue_final_message",
)
"""What decides how prompts to complete are rendered, of `rollout.multi_turn_config`."""

ENCODE = (
    "is_diffusers",
    "model_class",
    "diffusers.dtype",
    "diffusers.max_prompt_length",
    "diffusers.inference_size",
    "diffusers.train_frames",
)
"""What decides how text and media become what a diffusion model is trained on, of `policy`."""

KIND = StageKind(
    name="prepare",
    entry="cosmos_core.data.prepare:run",
    result_version=9,
    makes="data",
    reads_model="tokenizer",
    reads_data="source",
    is_numeric=False,
    # Only what decides about the rows: another learning rate must not tokenise again.
    recipe_tables=(
        "train.seed",
        "train.train_policy.type",
        "train.train_policy.trainer_type",
        "train.train_policy.learns_data",
        *DECIDE_ROWS,
        "policy.model_max_length",
        "policy.model_revision",
        "policy.chat_template",
        *(f"policy.{name}" for name in ENCODE),
        "rollout.max_response_length",
        *(f"rollout.multi_turn_config.{name}" for name in RENDER_PROMPTS),
        "validation.max_response_length",
        "validation.reward_function",
        "custom.dataset",
        "custom.vision",
    ),
    reports=("data/*",),
    libraries=(*ROWS, "av", "datasets", "diffusers", "pyarrow"),
)
