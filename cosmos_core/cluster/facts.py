"""`python -m cosmos_core.cluster.facts LIBRARY ...`: what the Ray cluster of `RAY_ADDRESS` has, as one line of JSON.

The facts are those of a machine that a rank would get: one with a GPU where the cluster has any.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from cosmos_core.cluster.join import joined
from cosmos_core.facts import Facts, measure

_NAMES = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "HF_HOME", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE", "MKL_NUM_THREADS",
    "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_OFFLINE",
})  # fmt: skip
_PREFIXES = ("GLOO_", "NCCL_", "TORCH", "VLLM_")


def measure_cluster(libraries: Sequence[str]) -> Facts:
    """Return the facts of a machine of the cluster, with the GPUs of all of them."""
    import ray

    with joined():
        ray.init(logging_level=logging.ERROR, log_to_driver=False, runtime_env={"env_vars": variables_of_ranks()})
        try:
            num_gpus = int(ray.cluster_resources().get("GPU", 0))
            remote: Any = ray.remote  # its types know functions alone
            ask = remote(num_cpus=1, num_gpus=1 if num_gpus else 0)(measure)
            found: Facts = ray.get(ask.remote(list(libraries)))
        finally:
            ray.shutdown()
    model = found.gpus[0] if found.gpus else "GPU"
    return replace(found, gpus=(model,) * num_gpus)


def variables_of_ranks() -> dict[str, str]:
    """Return what processes on other machines need of this one's environment: what a worker sets for its stage, and
    what its user set for the libraries that compute."""
    return {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_cluster(sys.argv[1:]))) + "\n")
