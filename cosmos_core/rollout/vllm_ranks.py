"""vLLM engine of a separate process with tensor-parallel ranks, which are child processes.

vLLM starts the ranks on the GPUs of the engine's process and communicates over its own queues, which also carry the
weights, bucket by bucket, unless a native link does (`vllm_link`). Ranks and engine end together; the process manager
then starts another engine. Ranks on GPUs are untested.
"""

from collections.abc import Iterable
from typing import Any

from cosmos_core.parallel.mesh import is_single_rank
from cosmos_core.parent import kill_with_parent
from cosmos_core.rollout.base import Bucket, EngineSettings
from cosmos_core.rollout.replica import PackedBucket, pack_bucket, unpack_bucket
from cosmos_core.rollout.vllm_process import unlink_shared_memory

RANK_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child may deadlock on a lock of another thread
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on one machine, so loopback suffices
}
"""Environment variables of a vLLM engine whose tensor-parallel ranks are its child processes."""


def has_child_ranks(engine_settings: EngineSettings) -> bool:
    """Return whether a vLLM engine starts tensor-parallel ranks as child processes, not in the trainer's ranks."""
    return engine_settings.is_separate and engine_settings.rollout.parallelism.tp_size > 1 and is_single_rank()


def load_on_ranks(llm: Any, buckets: Iterable[Bucket]) -> None:
    """Replace the weights of all ranks of a vLLM engine. For a bucket on the meta device, each rank loads the bucket
    that its native link received."""
    llm.collective_rpc(initialize_weight_reload)
    for packed_bucket in buckets:
        llm.collective_rpc(load_bucket, args=() if packed_bucket[0][1].is_meta else (pack_bucket(packed_bucket),))
    llm.collective_rpc(end_weight_load)


# vLLM calls the following functions in each rank, with the rank's worker.


def end_weight_load(vllm_worker: Any) -> None:
    """End the weight load of a rank. Without this call, vLLM would continue an incomplete load with the tensors of the
    next."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(vllm_worker.vllm_config):
        finalize_layerwise_reload(vllm_worker.model_runner.get_model(), vllm_worker.model_runner.model_config)
    if weight_link := getattr(vllm_worker, "weight_link", None):
        weight_link.end_weight_load()


def exit_with_parent(vllm_worker: Any, parent_pid: int) -> None:
    """Make the kernel kill this rank when its parent process ends. Unlink the shared memory of the rank already now, so
    that it is freed even if the rank is killed."""
    kill_with_parent(parent_pid)
    unlink_shared_memory()


def initialize_weight_reload(vllm_worker: Any) -> None:
    """Prepare a rank to load all weights, as `GPUModelRunner.reload_weights` does."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(vllm_worker.vllm_config):
        initialize_layerwise_reload(vllm_worker.model_runner.get_model())


def load_bucket(vllm_worker: Any, packed_bucket: PackedBucket | None = None) -> None:
    """Load the next bucket of weights into a rank; without `packed_bucket`, the one that its native link received."""
    from vllm.config import set_current_vllm_config

    tensors = unpack_bucket(packed_bucket) if packed_bucket is not None else vllm_worker.weight_link.take_bucket()
    with set_current_vllm_config(vllm_worker.vllm_config):
        vllm_worker.model_runner.get_model().load_weights(tensors)
