"""Teacher of a distillation: a causal language model that scores the policy's samples and is not trained.

The weights of the teacher are sharded over the policy's mesh. Its architecture can differ from the policy's, but its
token ids must be the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.config.schema.precision import FP8Config
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.base import ModelAdapter
from cosmos_core.models.causal_lm import CausalLM, make_input_processing
from cosmos_core.models.hf import check_row_length, load_config, load_model, load_tokenizer
from cosmos_core.models.model_files import MODEL_RECIPE_KEY, check_weights
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel.fsdp import move_buffers

TEACHER_WEIGHTS = "teacher"
"""Name of the teacher's weights for `TrainerView.evaluate`."""

TEACHER_RECIPE_KEY = "distillation.model_name_or_path"
_TEACHER_TRAIN_SETTINGS = (
    "master_dtype", "param_dtype", "logprob_dtype", "fsdp_offload", "fsdp_reshard_after_forward", "sequence_packing",
)  # fmt: skip


def open_teacher(distillation_config: DistillationConfig, recipe: Recipe, policy_adapter: ModelAdapter) -> CausalLM:
    """Load the teacher model of a distillation, sharded over the mesh of the policy. Raise ModelError if the teacher
    cannot be loaded, has other token ids than the policy, or does not support rows of the length
    `policy.model_max_length`."""
    tokenizer = policy_adapter.tokenizer
    check_vocabulary(distillation_config, tokenizer)
    teacher_train_config = make_teacher_train_config(distillation_config, recipe.train)
    with name_teacher_in_errors():
        load_model_function = init_on_meta if policy_adapter.mesh else load_model
        model = load_model_function(
            distillation_config.model_name_or_path,
            revision=distillation_config.model_revision,
            dtype=getattr(torch, teacher_train_config.master_dtype),
            device=torch.device("cpu") if teacher_train_config.fsdp_offload else policy_adapter.device,
        )
        move_buffers(model, policy_adapter.device)
        model.requires_grad_(False)
        check_row_length(model.config, recipe.policy.model_max_length)
        return CausalLM(model, teacher_train_config, make_input_processing(tokenizer, model), policy_adapter.mesh)


def check_teacher(distillation_config: DistillationConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
    """Check a teacher as `open_teacher` does, but without its weights, and return the line about the teacher that
    `cosmos check` prints."""
    check_vocabulary(distillation_config, tokenizer)
    with name_teacher_in_errors():
        config = load_config(distillation_config.model_name_or_path, distillation_config.model_revision)
        check_row_length(config, recipe.policy.model_max_length)
        check_weights(distillation_config.model_name_or_path)
    return f"teacher {(config.architectures or [type(config).__name__])[0]}"


def check_vocabulary(distillation_config: DistillationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if a token of the policy has another id in the teacher or none. The teacher can have more
    tokens."""
    model = distillation_config.model_name_or_path
    with name_teacher_in_errors():
        teacher_ids = load_tokenizer(model, distillation_config.model_revision).get_vocab()
    policy_ids = tokenizer.get_vocab()
    if differing_tokens := [token for token, token_id in policy_ids.items() if teacher_ids.get(token) != token_id]:
        example_token = min(differing_tokens, key=lambda token: policy_ids[token])
        teacher_id_text = f"is {teacher_ids[example_token]}" if example_token in teacher_ids else "does not exist"
        raise ModelError(
            f"{TEACHER_RECIPE_KEY} = {model!r}: {len(differing_tokens)} of {len(policy_ids)} "
            f"tokens of the policy have another id in its tokenizer or none: {example_token!r} is "
            f"{policy_ids[example_token]} here and {teacher_id_text} there; take a teacher of the policy's family"
        )


def make_teacher_train_config(distillation_config: DistillationConfig, train_config: TrainConfig) -> TrainConfig:
    """Return a copy of the policy's `train_config` with the dtypes and sharding settings that `distillation_config`
    sets for the teacher, and without compilation and fp8."""
    teacher_settings = {name: getattr(distillation_config, name) for name in _TEACHER_TRAIN_SETTINGS}
    return train_config.copy_with(**teacher_settings, fp8=FP8Config(), compile=False)


@contextmanager
def name_teacher_in_errors() -> Iterator[None]:
    """In errors that the `with` block raises, replace the recipe key of the policy's model by the teacher's."""
    try:
        yield
    except (ModelError, ConfigError) as error:
        message = str(error).replace(MODEL_RECIPE_KEY, TEACHER_RECIPE_KEY)
        raise type(error)(message if TEACHER_RECIPE_KEY in message else f"{TEACHER_RECIPE_KEY}: {message}") from error
