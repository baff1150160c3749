"""A fake H100 for the CPU build of torch: FakeTensorMode runs code on device "cuda", without values.

Shapes, dtypes, dispatch and bytes are those of CUDA; streams, NCCL, CUDA graphs and the caching allocator are missing.

`build` compiles the library; `install` loads it into a process that has not imported torch yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cosmos_core.run.files import user_cache_folder

SOURCE = Path(__file__).with_name("device.cpp")
MEMORY = 80 << 30
CAPABILITY = (9, 0)
_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def obstacle() -> str:
    """Return why the device cannot be built here; an empty string: it can."""
    if not shutil.which("g++"):
        return "needs g++ to build the fake CUDA device"
    if "+cpu" not in (found := importlib.metadata.version("torch")):
        return f"needs the CPU build of torch, and this is {found}"
    return ""


def build() -> Path:
    """Return the compiled library, which is kept in the cache of the user: 20 s the first time."""
    digest = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    target = user_cache_folder() / f"fake-gpu-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{_torch() / 'include'}", f"-L{_torch() / 'lib'}"]
        subprocess.run(["g++", *flags, SOURCE, "-o", unfinished, "-ltorch_cpu", "-lc10"], check=True)
        os.replace(unfinished, target)
    return target


def install(library: str) -> None:
    """Make torch see the device in this process, from its first import on."""
    for name in _LIBRARIES:
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import torch
    import torch.cuda.random

    torch.set_num_threads(1)
    properties = SimpleNamespace(
        total_memory=MEMORY, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, name="fake H100",
        warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="",
        shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, uuid="0",
    )  # fmt: skip
    constants: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": CAPABILITY, "get_device_name": properties.name,
        "max_memory_allocated": 0, "memory_allocated": 0, "_lazy_init": None, "synchronize": None, "empty_cache": None,
        "set_device": None, "reset_peak_memory_stats": None, "get_rng_state_all": (),
    }  # fmt: skip
    for name, value in constants.items():
        setattr(torch.cuda, name, _returning(value))
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Nothing)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, _returning(_Nothing()))
    for name in ("stream", "device"):
        setattr(torch.cuda, name, lambda *args: nullcontext())
    for module in (torch.cuda, torch.cuda.random):
        setattr(module, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8))  # noqa: B010
        setattr(module, "set_rng_state", _returning(None))  # noqa: B010
    for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_getCurrentRawStream"):
        setattr(torch._C, name, _returning(0))
    setattr(torch._C, "_cuda_isInBadFork", _returning(False))  # noqa: B010
    # The C++ behind these never asks the mode.
    tensor, item = torch.tensor, torch.Tensor.__getitem__

    def make(data: Any, device: Any = None, **other: Any) -> torch.Tensor:
        made = tensor(data, **other)
        is_here = device is None or torch.device(device).type == "cpu"
        return made if is_here else torch.empty(made.shape, dtype=made.dtype, device=device)

    def new(self: torch.Tensor, data: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return make(data, self.device, dtype=dtype or self.dtype)

    def chosen(self: torch.Tensor, index: Any) -> Any:
        return item(self, make(index, self.device) if isinstance(index, list) else index)

    torch.tensor, torch.Tensor.new_tensor, torch.Tensor.__getitem__ = make, new, chosen  # type: ignore[assignment, method-assign]


class _Nothing:
    """A stream or an event on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args: _Nothing() if name == "record_event" else None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True


def _returning(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
