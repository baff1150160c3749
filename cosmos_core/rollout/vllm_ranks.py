"""An engine of vLLM whose ranks are processes of its own: one apart from the trainer has no others to be spread over.

vLLM starts them, on the GPUs that the engine's process was given, and talks to them over queues of its own, on which
weights travel too, bucket by bucket. Ranks and engine end together: whoever started the engine starts another one. On
GPUs this was never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from cosmos_core.parent import die_with_parent
from cosmos_core.rollout.base import Bucket, EngineSettings
from cosmos_core.rollout.replica import Packed, packed, unpacked
from cosmos_core.rollout.vllm_memory import drop_name

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # what is forked beside threads may wait for a lock that nobody holds
    "GLOO_SOCKET_IFNAME": "lo",  # they are on one machine
}
_CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""For the reason of `vllm._import_vllm`, which is not called in a rank."""


def has_ranks(settings: EngineSettings) -> bool:
    """Return whether the engine has ranks of its own."""
    return settings.is_apart and settings.rollout.parallelism.tp_size > 1


def ranks_arguments(*, is_cpu: bool) -> dict[str, Any]:
    """Return what vLLM is started with, and prepare the environment that its ranks inherit."""
    for name, value in (_ENVIRONMENT | _CPU_ENVIRONMENT if is_cpu else _ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    return {"distributed_executor_backend": "mp", "worker_extension_cls": f"{__name__}.{RankExtension.__name__}"}


def end_together(llm: Any) -> None:
    """Let this process end when a rank dies, and the ranks when this process does."""
    llm.llm_engine.model_executor.register_failure_callback(lambda: os._exit(1))
    llm.collective_rpc("end_with", args=(os.getpid(),))


def load_on_ranks(llm: Any, buckets: Iterable[Bucket]) -> None:
    """Replace the weights of all ranks, each of which takes what it computes with."""
    llm.collective_rpc("begin_weights")
    for bucket in buckets:
        llm.collective_rpc("take_weights", args=(packed(bucket),))
    llm.collective_rpc("end_weights")


def forget_weights(worker: Any) -> None:
    """Give up a load that was cut off, of which vLLM would take the next for the rest; called in each rank."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_runner.model_config)


class RankExtension:
    """What a rank can beside what vLLM's own can, which it is mixed into."""

    vllm_config: Any
    model_runner: Any

    def end_with(self, pid: int) -> None:
        """Have the kernel end this process with its parent, whatever it waits for, and nothing stay behind."""
        die_with_parent(pid)
        drop_name()

    def begin_weights(self) -> None:
        """Expect all weights, as `GPUModelRunner.reload_weights` does."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def take_weights(self, bucket: Packed) -> None:
        """Take the next bucket."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(unpacked(bucket))

    def end_weights(self) -> None:
        """Compute with what has come."""
        forget_weights(self)
        self.model_runner.reset_encoder_cache()
