"""A fork server: imports everything, then forks the programs that are requested."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys

from tests.warm import spawner  # noqa: F401
from tests.warm.process import serve
from tests.warm.programs import READ, import_all

_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)


def _take_large_pages() -> None:
    """Let the kernel put the memory of this process into large pages, where it can: forks take a third of the time."""
    size = 2 << 20
    with open("/proc/self/maps") as file:
        mapped = [line.split() for line in file]
    for bounds, rights, *_, name in ([*line[:2], *(line[5:] or [""])] for line in mapped):
        if rights.startswith("rw") and name in {"", "[heap]"}:
            start, end = (int(each, 16) for each in bounds.split("-"))
            for address in range(-(-start // size) * size, end // size * size, size):
                _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_COLLAPSE)


def main() -> None:
    """Be a fork server."""
    READ.update(os.environ)
    gc.disable()
    import_all()
    gc.collect()
    gc.freeze()
    gc.enable()
    _take_large_pages()
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.sendall(b"ready")
    serve(connection)


if __name__ == "__main__":
    main()
