"""`python -m cosmos_core.cluster.properties LIBRARY ...`: print the properties of the Ray cluster at `RAY_ADDRESS` as
one line of JSON, measured on a machine on which a rank could run: with a GPU if the cluster has GPUs."""

import json
import logging
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from cosmos_core.cluster.join import join_cluster
from cosmos_core.imports import without_garbage_collection
from cosmos_core.machine_properties import MachineProperties, measure_machine

_RANK_ENVIRONMENT_NAMES = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "HF_HOME", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_OFFLINE",
})  # fmt: skip
_RANK_ENVIRONMENT_PREFIXES = ("GLOO_", "NCCL_", "PYTORCH_", "TORCH", "VLLM_")
_SERVICE_ENVIRONMENT_PREFIXES = ("COSMOS_", "HF_", "MLFLOW_", "REMOTE_REWARD_", "TRACKIO_", "WANDB_")


def collect_cluster_properties(libraries: Sequence[str]) -> MachineProperties:
    """Return the properties of the machine with the most GPUs (then the most CPUs) in the Ray cluster at `RAY_ADDRESS`.
    They include its versions of the packages `libraries`, but the GPUs of the whole cluster."""
    import ray

    with join_cluster():
        ray.init(logging_level=logging.ERROR, log_to_driver=False, runtime_env={"env_vars": get_rank_environment()})
        try:
            num_gpus = int(ray.cluster_resources().get("GPU", 0))
            untyped_ray_remote: Any = ray.remote  # untyped, because `ray.remote` is annotated for functions only
            live_nodes = [node for node in ray.nodes() if node["Alive"]]
            largest_node = max(live_nodes, key=lambda node: [node["Resources"].get(name, 0) for name in ("GPU", "CPU")])
            # Request no CPU or GPU of the node, because another training may hold all of them for days.
            node_resource = f"node:{largest_node['NodeManagerAddress']}"
            read_node_properties = untyped_ray_remote(num_cpus=0, resources={node_resource: 0.001})(measure_machine)
            node_properties: MachineProperties = ray.get(read_node_properties.remote(list(libraries)))
        finally:
            ray.shutdown()
    gpu_model = node_properties.gpus[0] if node_properties.gpus else "GPU"
    return replace(node_properties, gpus=(gpu_model,) * num_gpus)


def get_rank_environment() -> dict[str, str]:
    """Return the environment variables of this process that ranks and actors on other machines need, such as `HF_HOME`,
    `OMP_NUM_THREADS`, and all variables whose names begin with `NCCL_` or `TORCH`."""
    environment = _select_environment_variables(_RANK_ENVIRONMENT_NAMES, _RANK_ENVIRONMENT_PREFIXES)
    environment.pop("VLLM_HOST_IP", None)  # remove the address of this machine, which is wrong on other machines
    return environment


def get_service_environment(variable_names: Collection[str]) -> dict[str, str]:
    """Return the environment variables of this process with which ranks and actors reach services and metric sinks, and
    those in `variable_names`. Pass them as arguments of calls: they may be secrets, and Ray logs `runtime_env`."""
    return _select_environment_variables(variable_names, _SERVICE_ENVIRONMENT_PREFIXES)


def _select_environment_variables(variable_names: Collection[str], name_prefixes: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name in variable_names or name.startswith(name_prefixes)
    }


def wrap_with_environment(environment: Mapping[str, str], wrapped_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a picklable function that sets the variables `environment`, then unpickles and calls `wrapped_function`.
    They are set first, because unpickling imports libraries, such as huggingface_hub, that read them at import."""
    from ray import cloudpickle

    return partial(_call_with_environment, environment, cloudpickle.dumps(wrapped_function))


def _call_with_environment(environment: Mapping[str, str], pickled_function: bytes, *function_arguments: Any) -> Any:
    os.environ.update(environment)
    with without_garbage_collection():
        wrapped_function = pickle.loads(pickled_function)
    return wrapped_function(*function_arguments)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(collect_cluster_properties(sys.argv[1:]))) + "\n")
