"""Stage kind `prepare`: read the rows, check and tokenise each row once; training ranks only read the result."""

from cosmos_core.run.libraries import ROW_PREPARATION_LIBRARIES
from cosmos_core.types import StageKind

_TRAIN_POLICY_ROW_SETTINGS = (
    "dataset", "clean", "data_packer", "conversation_column_name", "prompt_column_name", "response_column_name",
    "chosen_column_name", "rejected_column_name", "label_column_name", "system_prompt",
)  # fmt: skip
"""Keys of `train.train_policy` that determine the prepared rows."""
DATASET_ROW_SETTINGS = (
    "name", "label", "weight", "arguments", "subset", "revision", "split", "test_size", "max_skipped_fraction",
    "columns", "system_prompt", "keep", "pass_rates",
)  # fmt: skip
"""Keys of `train.train_policy.datasets` that determine the rows of the data sets."""
DATA_TERM_ROW_SETTINGS = ("name", "subset", "revision", "split", "max_skipped_fraction", "conversation_column_name")
"""Keys of `train.train_policy.data_term` that determine the rows of the supervised loss."""
ROW_SETTINGS = (
    *(f"train.train_policy.{name}" for name in _TRAIN_POLICY_ROW_SETTINGS),
    *(f"train.train_policy.datasets.{name}" for name in DATASET_ROW_SETTINGS),
    *(f"train.train_policy.data_term.{name}" for name in DATA_TERM_ROW_SETTINGS),
    "validation.dataset",
    "validation.max_rows",
)
"""Recipe keys that only stages of kind `prepare` read; later stages read the prepared rows."""
PROMPT_RENDERING_KEYS = (
    "enable", "enable_tools", "tools", "enable_thinking", "custom_chat_template_path", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
"""Keys of `rollout.multi_turn_config` that determine how prompts are rendered."""
DIFFUSION_ENCODING_KEYS = (
    "is_diffusers", "model_class", "diffusers.dtype", "diffusers.max_prompt_length", "diffusers.inference_size",
    "diffusers.train_frames", "diffusers.flow_rl.max_conditional_frames",
)  # fmt: skip
"""Keys of `policy` that determine how text and media are encoded for the training of a diffusion model."""

KIND = StageKind(
    name="prepare",
    entry="cosmos_core.data.prepare:run",
    result_version=12,
    makes="data",
    reads_model="tokenizer",
    reads_data="source",
    is_numeric=False,
    # Only keys that determine the rows are listed, so that a changed learning rate does not repeat the tokenisation.
    recipe_tables=(
        "train.seed",
        "train.train_policy.type",
        "train.train_policy.trainer_type",
        "train.train_policy.learns_data",
        *ROW_SETTINGS,
        "policy.model_max_length",
        "policy.model_revision",
        "policy.chat_template",
        *(f"policy.{name}" for name in DIFFUSION_ENCODING_KEYS),
        "rollout.max_response_length",
        *(f"rollout.multi_turn_config.{name}" for name in PROMPT_RENDERING_KEYS),
        "validation.max_response_length",
        "validation.reward_function",
        "custom.dataset",
        "custom.vision",
    ),
    reports=("data/*",),
    libraries=(*ROW_PREPARATION_LIBRARIES, "av", "datasets", "diffusers", "pyarrow"),
)
