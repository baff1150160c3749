"""What `vllm_program.py` runs about native weight transfer, for `test_rollout_vllm.py`.

A vLLM on CPU receives weights by vLLM's own transfer engines for NCCL and CUDA IPC, with queues in NCCL's place and
plain memory in that of a GPU. After each load its parameters and log-probabilities are compared with those after a load
of the same weights by the host path, in which vLLM's `reload_weights` reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.rollout import transfer
from cosmos_core.rollout.base import Bucket, EngineSettings, EngineWrapper, LoadReceipt
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.link import split_bucket
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.transfer import NativeWeightTransfer
from cosmos_core.rollout.transport import IpcTransport, NcclTransport, WeightTransport
from cosmos_core.rollout.vllm import VllmEngine
from cosmos_core.types import Group
from tests.conftest import wait_until
from tests.unit.replicas import Threaded
from tests.unit.vllm_program import PROMPTS, move, publisher_of, sampling
from tests.unit.wire import STREAM, MemoryTransport, QueueTransport, Wire

TOKENS = [5, 9, 200, 33, 1, 77, 140]


def replace_gpu(wire: Wire, memory: MemoryTransport) -> None:
    """Put queues and plain memory in the place of what vLLM's transfer engines need a GPU for."""
    import vllm.distributed.weight_transfer.nccl_engine as nccl
    import vllm.distributed.weight_transfer.packed_tensor as packed
    from torch.multiprocessing import reductions

    def join(info: Any, parallel: Any) -> Any:
        return wire.join(info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank)

    stand_ins: list[tuple[Any, str, Any]] = [
        (nccl, "worker_init_process_group", join),
        (packed, "_get_streams", lambda device, number: (STREAM,) * number),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "current_stream", lambda: STREAM),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=memory.uuid)),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "synchronize", lambda: None),
        (reductions, "rebuild_cuda_tensor", lambda number, *rest: memory.exported[number]),
    ]
    for module, name, stand_in in stand_ins:
        assert hasattr(module, name), name
        setattr(module, name, stand_in)


def ranks_of_two_engines() -> list[tuple[int, int, int]]:
    """Length of the id, rank and size with which vLLM would join a communicator, in each rank of two engines over two
    GPUs each; and check that vLLM takes the other infos."""
    import vllm.distributed.device_communicators.pynccl_wrapper as wrapper
    import vllm.distributed.weight_transfer.nccl_common as common
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    made: list[tuple[int, int, int]] = []
    common.uid_init_process_group = lambda uid, rank, size, device: made.append((len(uid), rank, size))
    unique_id = SimpleNamespace(internal=wrapper.ncclUniqueId().internal)
    wrapper.NCCLLibrary = lambda: SimpleNamespace(ncclGetUniqueId=lambda: unique_id)
    for info in NcclTransport().prepare_connection(2, 2):
        for rank in (0, 1):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
            common.worker_init_process_group(common.NCCLWeightTransferInitInfo(**info), parallel)
    IPCWeightTransferInitInfo(**IpcTransport().prepare_connection(1, 1)[0])
    header, _ = split_bucket([("a", torch.ones(2)), ("b", torch.tensor(1.0))])
    NCCLWeightTransferUpdateInfo(**header.make_update_info())
    sent = header._replace(transport_fields={"ipc_handles": {"GPU": (1,)}, "tensor_sizes": [8, 4]})
    IPCWeightTransferUpdateInfo(**sent.make_update_info())
    return made


class Loads:
    """A trainer's model, a fleet of one vLLM, and what was found after each load."""

    def __init__(self, handle: Threaded, model: PreTrainedModel) -> None:
        self.handle, self.model, self.version = handle, model, 0
        self.found: list[dict[str, Any]] = []

    def compare(self, fleet: EngineFleet, name: str, cut: Wire | None = None) -> None:
        """Move the weights, send them on both ways, every second time while completions are in flight."""
        move(self.model)
        self.version += 1
        is_busy = self.version % 2 == 0
        replica, engine = self.handle._replica, self.handle.engine
        enough = replica._num_forward_passes + 3
        engine.waits = lambda: replica._num_forward_passes >= enough and replica._engine_commands.empty()
        requests = [fleet.request(prompt, sampling(1.0, max_tokens=40), 4) for prompt in PROMPTS[:2] * is_busy]
        if is_busy:
            wait_until(
                lambda: replica._num_groups_in_flight == 2 and replica._num_forward_passes >= enough, 60, "it generates"
            )
        in_flight = replica._num_groups_in_flight
        before = len(engine.received)
        target: Any = fleet if cut is None else Cutting(fleet, cut)
        publisher_of(target, self.model).publish(self.version)
        native = self.state()
        engine.waits = lambda: False
        groups = [request.result() for request in requests]
        engine.link, link = None, engine.link  # so that it loads as engines without a link do
        by_host = WeightPublisher(engine, self.model, lambda ids: torch.zeros(1), torch.float32, bucket_bytes=50_000)
        self.on_engine(lambda engine: by_host_without_probe(by_host).publish(self.version))
        engine.link = link
        host = self.state()
        self.found.append({
            "name": name, "in_flight": in_flight, "buckets": len(engine.received) - before,
            "versions": sorted({segment.version for g in groups for c in g.completions for segment in c.segments}),
            "different": [key for key in host if not torch.equal(host[key], native[key])],
            "names_agree": host.keys() == native.keys(), "parameters": len(host),
        })  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers of vLLM's model, and log-probabilities."""

        def of_worker(worker: Any) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in worker.model_runner.get_model().state_dict().items()}

        [state] = self.on_engine(lambda engine: engine._llm.collective_rpc(of_worker))
        state["logprobs"] = torch.tensor(self.on_engine(lambda engine: engine.logprobs(TOKENS)))
        return state

    def on_engine(self, call: Any) -> Any:
        return self.handle._replica._run_on_engine_thread(call)


def by_host_without_probe(publisher: WeightPublisher) -> WeightPublisher:
    publisher._probed_sleep_levels = {0}
    publisher.probe_interval = 1 << 30
    return publisher


class Cutting(EngineWrapper):
    """A fleet to which the second broadcast of each load ends in its middle."""

    def __init__(self, fleet: Any, wire: Wire) -> None:
        super().__init__(fleet)
        self._wire = wire

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        def noted() -> Iterator[Bucket]:
            for i, bucket in enumerate(buckets):
                self._wire.is_cut = i == 1
                yield bucket

        return self._engine.load_weights(version, noted())


class Counting(VllmEngine):
    """vLLM that notes what its link received."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.received: list[list[str]] = []
        link: Any = self.link
        receive = link.receive

        def noted(header: Any, seconds: float) -> None:
            receive(header, seconds)
            self.received.append(header.names)

        link.receive = noted
        self.waits: Callable[[], bool] = lambda: False
        """Whether to make no further pass yet."""

    def step(self) -> list[Group]:
        groups = super().step()
        while self.waits():
            time.sleep(0.001)
        return groups


def transferred(folder: str, model: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """Eight loads; what vLLM needs a GPU for stays replaced."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(transfer.__name__).addHandler(handler)
    rollout = RolloutConfig(weight_transfer="native")
    settings = EngineSettings(model, tokenizer, folder, rollout, 256, torch.float32, is_separate=True)
    handle = Threaded(lambda: Counting(settings))
    wire, memory = Wire(), MemoryTransport()
    loads = Loads(handle, model)

    def fleet(transport: WeightTransport) -> EngineFleet:
        made = EngineFleet(
            lambda: [handle], max_groups=4, timeout_seconds=600.0, weight_transfer=NativeWeightTransfer(transport, 1)
        )
        replace_gpu(wire, memory)
        return made

    packed = fleet(QueueTransport(wire))
    for _ in range(2):
        loads.compare(packed, "packed")
    seconds, transfer._BUCKET_TIMEOUT_SECONDS = transfer._BUCKET_TIMEOUT_SECONDS, 1.0
    loads.compare(packed, "cut off", cut=wire)
    transfer._BUCKET_TIMEOUT_SECONDS = seconds
    loads.compare(packed, "after it")
    packed.close()
    for name, transport in (("unpacked", QueueTransport(wire, packed=False)), ("ipc", memory)):
        other = fleet(transport)
        for _ in range(2):
            loads.compare(other, name)
        other.close()
    return {"loads": loads.found, "worlds": wire.worlds, "messages": messages, "ranks": ranks_of_two_engines()}
