"""Engine registry: `rollout.backend` names a file of this folder, or a user-defined class.

The engine of `rollout/some_name.py` is its class `SomeNameEngine`.
"""

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace

from transformers import AutoModelForCausalLM, PretrainedConfig

from cosmos_core.errors import ConfigError
from cosmos_core.models.hf import find_model_class
from cosmos_core.parallel.mesh import all_gather_object, is_single_rank, num_ranks, rank_number
from cosmos_core.registry import import_object, import_user_code, is_import_path, to_class_name
from cosmos_core.rollout.base import Engine, EngineSettings, EngineWrapper
from cosmos_core.rollout.turns import MultiTurnEngine
from cosmos_core.types import Group, Prompt, Sampling

FALLBACK_ENGINE = "hf"
_ARCHITECTURES_REMOVED_FROM_VLLM = frozenset({"MllamaForConditionalGeneration"})
"""Architectures that earlier versions of vLLM supported and later ones do not, according to vLLM's model registry: that
of Llama 3.2 Vision."""

logger = logging.getLogger(__name__)


def check_engine(backend: str, config: PretrainedConfig, folder: str, *, tp_size: int = 1) -> None:
    """Raise a `ConfigError` if the engine that `rollout.backend` names cannot run a model on `tp_size` ranks."""
    if backend == "vllm" and importlib.util.find_spec("vllm") is not None:
        from cosmos_core.rollout.vllm import check_heads

        if removed_names := [name for name in config.architectures or () if name in _ARCHITECTURES_REMOVED_FROM_VLLM]:
            raise ConfigError(f"vLLM has no {removed_names[0]} any more, as {folder!r} is; set rollout.backend = 'hf'")
        check_heads(config, folder, tp_size=tp_size)
    elif is_import_path(backend):
        import_user_code(backend)
    elif (model_class := find_model_class(config)) is not AutoModelForCausalLM:
        from cosmos_core.rollout.hf import find_cache_argument

        find_cache_argument(model_class)


def make_engine(engine_settings: EngineSettings) -> Engine:
    """Return the rollout engine of this rank, which `rollout.backend` names; an `hf` engine if the named one cannot be
    imported. Leave random states and the environment unchanged. Raise a `ConfigError` if the engine does not support
    the model or the settings in `engine_settings`."""
    backend = engine_settings.rollout.backend
    if engine_settings.flow is not None:
        # Do not wrap the engine of a diffusion model, because it distributes samples over the ranks itself.
        return _construct_engine(backend, engine_settings)
    text_config = engine_settings.model.config.get_text_config()
    max_positions = getattr(text_config, "max_position_embeddings", None) or engine_settings.max_model_len
    if max_positions < engine_settings.max_model_len:
        warning_message = "rollout: sequences end at the model's %d positions, not at %d"
        logger.warning(warning_message, max_positions, engine_settings.max_model_len)
        engine_settings = replace(engine_settings, max_model_len=max_positions)
    try:
        engine = _construct_engine(backend, engine_settings)
    except ImportError as error:
        if backend == FALLBACK_ENGINE or is_import_path(backend):
            raise
        warning_message = "rollout.backend = %r cannot be imported (%s); using %r in its place"
        logger.warning(warning_message, backend, " ".join(str(error).split()), FALLBACK_ENGINE)
        engine = _construct_engine(FALLBACK_ENGINE, engine_settings)
    if engine_settings.rollout.multi_turn_config.enable:
        engine = MultiTurnEngine(engine, engine_settings)
    return engine if is_single_rank() else DataParallelEngine(engine)


def _construct_engine(backend: str, settings: EngineSettings) -> Engine:
    class_path = f"cosmos_core.rollout.{backend}:{to_class_name(backend)}Engine"
    return (import_user_code(backend) if is_import_path(backend) else import_object(class_path))(settings)


class DataParallelEngine(EngineWrapper):
    """`Engine` that distributes prompts over the ranks, which call its methods together: the engine of each rank
    completes some of the prompts, and all ranks get all groups."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit this rank's portion of the prompts to the rank's engine; the seeds of completions do not depend on the
        distribution of prompts over ranks."""
        num_engines = num_ranks() // self.ranks_per_engine
        if local_prompts := prompts[rank_number() // self.ranks_per_engine :: num_engines]:
            self._engine.submit(local_prompts, sampling, step)

    def completed(self) -> list[Group]:
        """Wait for all groups of this rank's engine, and return the groups of all ranks."""
        local_groups: list[Group] = []
        while groups := self._engine.completed():
            local_groups += groups
        return [group for groups in all_gather_object(local_groups)[:: self.ranks_per_engine] for group in groups]
