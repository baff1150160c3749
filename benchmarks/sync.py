"""Time and memory of a weight sync, against a plain `copy_` of the same tensors.

    python -m benchmarks.sync [--ranks 1] [--ranks 2] [--gib 1.0] [--rounds 5] [--engine vllm]

A random Qwen3 in float32 goes to an engine on each rank, by shared memory and by gloo's collectives. The engine `copy`
copies each tensor into memory of its own, as a replica does; `vllm` (1 rank) is the real one, which also packs the
matrices for its kernels. `host link` and `native link` go to a `copy` engine in another thread of the first rank, as to
one in another process: the native link with a queue instead of NCCL, which copies each byte twice more, since there is
no GPU. `delta link` sends what has changed, here every hundredth value, which is changed in the time that is measured.
Memory is anonymous and shared memory of a rank together, sampled every 2 ms, above what it held before the sync; the
first sync, which maps memory, is measured apart. On a busy machine compare the CPU time of the calling thread. `MiB
sent` and `copies`, the bytes that the ranks and the engine copied over those of the model, are counted in a further
round; Ray's object store, which is one more copy of the host link, and the queue are not in them.
`before` is the way that this one replaced: a whole copy on each rank's host, hashed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.parallel.fsdp import copy_without_weights
from cosmos_core.parallel.mesh import rank_number
from cosmos_core.rollout.base import Bucket, EngineSettings, LoadReceipt, WeightFormat, WeightReceiver
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.publish import BUCKET_BYTES, WeightPublisher
from cosmos_core.rollout.registry import make_engine
from cosmos_core.rollout.transfer import DeltaWeightTransfer, NativeWeightTransfer
from cosmos_core.types import Group
from tests.unit.replicas import Threaded
from tests.unit.wire import QueueLink, QueueTransport, Wire

_MIB = 1 << 20


class CopyEngine:
    """Takes a load as a replica does, and can do nothing else."""

    weight_format: WeightFormat = "module"

    def __init__(self, model: PreTrainedModel) -> None:
        self.own = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in model.state_dict().items()}
        self._receiver = WeightReceiver()

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Copy every tensor."""
        with _counting():
            for name, tensor in chain.from_iterable(self._receiver.buckets(buckets)):
                self.own[name].copy_(tensor)
        return self._receiver.acknowledge(version)


class LinkedEngine(CopyEngine):
    """Takes a load in another thread, from host memory or from a queue instead of NCCL."""

    name, ranks_per_engine = "copy", 1

    def __init__(self, model: PreTrainedModel, wire: Wire) -> None:
        super().__init__(model)
        self.link = QueueLink(wire)

    def completed(self) -> list[Group]:
        """Return no group, because none is requested."""
        return []

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Copy every tensor."""
        return super().load_weights(version, (self.link.take_bucket() if b[0][1].is_meta else b for b in buckets))


class _Copies(TorchDispatchMode):
    """Counts the bytes that this thread copies."""

    num_bytes = 0
    is_on = False
    counted = {torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat, torch.ops.aten._to_copy}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.counted:
            _Copies.num_bytes += result.nbytes
        return result


_THREAD = threading.local()


@contextmanager
def _counting() -> Iterator[None]:
    """Count the copies of this thread, once, in the round that is for that."""
    if not _Copies.is_on or getattr(_THREAD, "is_counted", False):
        yield
        return
    _THREAD.is_counted = True
    with _Copies():
        yield
    _THREAD.is_counted = False


def main() -> None:
    """Run each number of ranks in processes of its own, and print the table."""
    options = _options()
    if options.rank is not None:
        _rank(options)
        return
    table = Table(
        "ranks",
        "way",
        "seconds",
        "of a plain copy",
        "CPU of one",
        "extra MiB per rank",
        "of a bucket",
        "first sync: MiB",
        "MiB sent",
        "copies",
    )
    for ranks in options.ranks or [1, 2]:
        for row in _run(options, ranks):
            table.add_row(str(ranks), *row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES // _MIB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=("copy", "vllm"), default="copy")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(options: argparse.Namespace, ranks: int) -> list[list[str]]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        passed = {"gib": options.gib, "rounds": options.rounds, "bucket-mib": options.bucket_mib,
                  "engine": options.engine, "size": ranks, "port": port, "out": folder}  # fmt: skip
        arguments = [text for name, value in passed.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "benchmarks.sync", *arguments]
        children = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(ranks)]
        codes = [child.wait() for child in children]
        assert not any(codes)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = []
    for way in found[0]:
        seconds, plain = (statistics.median(found[0][name]["seconds"][1:]) for name in (way, "plain copy"))
        work, plain_work = (statistics.median(found[0][name]["work"][1:]) for name in (way, "plain copy"))
        most = max(max(each[way]["bytes"][1:]) for each in found)
        first = max(each[way]["bytes"][0] for each in found)
        times = [f"{seconds:.2f}", f"{seconds / plain:.2f}", f"{work / plain_work:.2f}"]
        sent, copied = (sum(each[way][name][0] for each in found) for name in ("sent", "copied"))
        memory = [f"{most / _MIB:.0f}", f"{most / _MIB / options.bucket_mib:.2f}", f"{first / _MIB:.0f}"]
        rows.append([way, *times, *memory, f"{sent / ranks / _MIB:.0f}", f"{copied / options.gib / _MIB / 1024:.2f}"])
    return rows


def _rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.size > 1:
        address = f"tcp://127.0.0.1:{options.port}"
        dist.init_process_group("gloo", init_method=address, rank=options.rank, world_size=options.size)
    model, whole = _model(options)
    engine = CopyEngine(model)
    # Of a sharded model there is no whole tensor to copy from.
    source = {name: torch.ones(t.shape) for name, t in engine.own.items()} if whole else dict(model.state_dict())

    def plain() -> None:
        for name, tensor in source.items():
            engine.own[name].copy_(tensor)

    fleets: list[EngineFleet] = []
    ways: dict[str, Callable[[], object]] = {"plain copy": plain}
    if options.engine == "vllm":
        ways["publish to vLLM"] = _vllm(options, model)
    else:
        ways |= _published(engine, model, whole, options.bucket_mib * _MIB)
        ways |= _linked(model, whole, options.bucket_mib * _MIB, fleets)
        ways["before: a copy, and sha256"] = _before(model)
    found = {name: _measured(way, options.rounds) for name, way in ways.items()}
    for fleet in fleets:
        fleet.close()
    Path(options.out, f"{options.rank}.json").write_text(json.dumps(found))


def _published(
    engine: Any, model: PreTrainedModel, whole: PreTrainedModel | None, bucket_bytes: int
) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {}
    for name in ("publish", "publish, collectives") if whole else ("publish",):
        publisher = WeightPublisher(
            engine, model, lambda ids: torch.zeros(1), torch.float32, meta_copy=whole, bucket_bytes=bucket_bytes
        )
        publisher._probed_sleep_levels = {0}  # what is measured is the transfer
        ways[name] = _by_collectives(publisher) if "collectives" in name else partial(publisher.publish, 1)
    return ways


def _linked(
    model: PreTrainedModel, whole: PreTrainedModel | None, bucket_bytes: int, fleets: list[EngineFleet]
) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {}
    for name in ("host link", "native link", "delta link"):
        wire = Wire()
        handles = [Threaded(partial(LinkedEngine, model, wire))] if rank_number() == 0 else []
        native = NativeWeightTransfer(QueueTransport(wire), 1) if name == "native link" else None
        transfer = DeltaWeightTransfer() if name == "delta link" else native
        fleet = EngineFleet(partial(list, handles), max_groups=1, timeout_seconds=600.0, weight_transfer=transfer)
        fleets.append(fleet)
        fleet.load_weights(0, ())  # connects, so that no engine is new and probed
        publisher = WeightPublisher(
            fleet, model, lambda ids: torch.zeros(1), torch.float32, meta_copy=whole, bucket_bytes=bucket_bytes
        )
        publisher._probed_sleep_levels = {0}
        ways[name] = partial(publisher.publish, 1)
    ways["delta link"] = partial(_publish_changed, model, ways["delta link"])
    return ways


def _publish_changed(model: PreTrainedModel, publish: Callable[[], object]) -> object:
    """Change every hundredth value, and publish."""
    for parameter in model.parameters():
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).data.view(-1)[::100] += 0.5
    return publish()


def _by_collectives(publisher: WeightPublisher) -> Callable[[], object]:
    def publish() -> None:
        if publisher._weight_buckets is None:
            publisher.publish(1)
        assert publisher._weight_buckets is not None and publisher._weight_buckets._gatherer is not None
        publisher._weight_buckets._gatherer._uses_shared_memory = False
        publisher._weight_buckets._gatherer._shared_memories = [None, None]
        publisher.publish(1)

    return publish


def _before(model: PreTrainedModel) -> Callable[[], object]:
    def copy_and_hash() -> str:
        tensors = {}
        for name, tensor in model.state_dict().items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensors[name] = full.detach().to("cpu", copy=True) if dist.is_initialized() else full.detach()
        digest = hashlib.sha256()
        for _, tensor in sorted(tensors.items()):
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    return copy_and_hash


def _model(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Layers of 48 MiB and an embedding of 64 MiB, until the size is reached; sharded where there are ranks to."""
    layers = round((options.gib * 1024 - 64) / 48.0)
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    with no_init_weights():
        model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    if options.size == 1:
        return model, None
    whole = copy_without_weights(model)
    mesh = init_device_mesh("cpu", (options.size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, whole


def _vllm(options: argparse.Namespace, model: PreTrainedModel) -> Callable[[], object]:
    assert options.size == 1, "a vLLM on each rank: see tests/distributed/test_rollouts.py"
    folder = Path(options.out, "model")
    model.save_pretrained(folder)
    tokenizer = _tokenizer(folder)
    settings = EngineSettings(model, tokenizer, str(folder), RolloutConfig(), 512, torch.float32)
    publisher = WeightPublisher(make_engine(settings), model, lambda ids: torch.zeros(1), torch.float32)
    publisher._probed_sleep_levels = {0}
    return lambda: publisher.publish(1)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from tests.unit.tiny_model import save_tiny_model

    return load_tokenizer(str(save_tiny_model(folder.parent / "tiny")))


def _measured(way: Callable[[], object], rounds: int) -> dict[str, list[float]]:
    seconds, work, most = [], [], []
    for _ in range(rounds + 1):
        if dist.is_initialized():
            dist.barrier()
        with _Memory() as memory:
            began, worked = time.perf_counter(), time.thread_time()
            way()
            seconds.append(time.perf_counter() - began)
            work.append(time.thread_time() - worked)
        most.append(float(memory.most))
    _Copies.num_bytes, _Copies.is_on = 0, True
    with _counting():
        metrics = way()
    _Copies.is_on = False
    sent: Any = metrics.get("sync/sent_bytes", metrics.get("sync/bytes", 0.0)) if isinstance(metrics, dict) else 0.0
    return {"seconds": seconds, "work": work, "bytes": most, "sent": [sent], "copied": [float(_Copies.num_bytes)]}


class _Memory:
    """The most memory that this process held in a while, above what it held at its beginning."""

    def __enter__(self) -> _Memory:
        self._start = self.most_held = _held()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def most(self) -> int:
        """Return the most bytes above the beginning."""
        return self.most_held - self._start

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.most_held = max(self.most_held, _held())


def _held() -> int:
    """Anonymous and shared memory, without files: what a sync could add."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


if __name__ == "__main__":
    main()
