"""What a fork server does: it forks a process and turns it into the requested program."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NoReturn

from tests.warm.programs import ENVIRONMENT, PROGRAMS, READ, deferred, program_of, read_on_import

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14  # prctl(2)
READY = 900
"""A descriptor that no program is given."""
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[Any] = []
"""What the kernel reads the command line and the environment of this process from, among others."""


@dataclass(frozen=True)
class SpawnRequest:
    """Describes the process to fork; descriptors come beside it, in the order of `targets`."""

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    parent: int
    targets: list[int]
    """What each descriptor is to be in the process."""
    ignored: list[int]
    """Signals that the caller ignores: a process that is executed would go on ignoring them."""
    new_session: bool
    process_group: int
    umask: int
    blocked: list[int] = field(default_factory=list)
    """Signals that the process blocks from its start."""
    companion: int = -1
    """A socket, if not -1, whose other end a process holds that ends with this one, and this one with it."""


def serve(connection: socket.socket, listener: socket.socket) -> NoReturn:
    """Fork processes until the other side is gone: those that `connection` asks for as children of the caller, those of
    clients of `listener` as children of this process."""
    seconds = None  # until the first child
    while True:
        readable, _, _ = select.select([connection, listener], [], [], seconds)
        if listener in readable:
            _fork_child(listener)
            seconds = 0.2
        if seconds is not None:
            _reap()
        if connection not in readable:
            continue
        if not (head := _received(connection)):
            break
        length, descriptors = head
        request = SpawnRequest(**json.loads(_exactly(connection, length)))
        (reader, writer), (begun, ready) = os.pipe(), os.pipe()
        if not (middle := os.fork()):
            if not (pid := os.fork()):
                connection.close()
                become(request, descriptors, None, ready)
            os.write(writer, pid.to_bytes(8, "little"))
            os._exit(0)
        for descriptor in (writer, ready, *descriptors):
            os.close(descriptor)
        answer = os.read(reader, 8)
        os.waitpid(middle, 0)  # from now on the caller is the parent
        os.read(begun, 1)
        os.close(reader)
        os.close(begun)
        connection.sendall(answer)
    os._exit(0)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_child(listener: socket.socket) -> None:
    """Fork what the next client asks for. The client has no answer where libraries would have read other variables."""
    client, _ = listener.accept()
    with client, client.makefile("rb") as stream:
        length, descriptors = _received(client) or (0, [])
        with suppress(ValueError):  # the client was killed
            request = replace(SpawnRequest(**json.loads(stream.read(length))), parent=os.getpid())
            if read_on_import(request.environment) == read_on_import(READ):
                begun, ready = os.pipe()
                if not os.fork():
                    become(request, descriptors, None, ready)
                os.close(ready)
                os.read(begun, 1)
                os.close(begun)
                client.sendall(b"forked")
    for descriptor in descriptors:
        os.close(descriptor)


def _received(connection: socket.socket) -> tuple[int, list[int]] | None:
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
    except OSError:
        return None
    return (int.from_bytes(head, "little"), descriptors) if len(head) == 8 else None


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        if not (part := connection.recv(length - len(found))):
            os._exit(0)
        found += part
    return found


def become(
    request: SpawnRequest, descriptors: Sequence[int], prepare: Callable[[], None] | None, ready: int
) -> NoReturn:
    """Turn this process, just forked, into what was ordered; run it, and end as an interpreter does. The descriptor
    `ready` is closed once others see what they would see of an executed one."""
    code = 1
    try:
        _take(request, [*descriptors, ready])
        if prepare is not None:
            prepare()
        os.close(READY)
        while prepare is None and os.getppid() != request.parent:  # a caller that was killed meanwhile is never seen
            time.sleep(0.0005)
            if os.getppid() == 1:
                os._exit(1)
        _tell_libraries(request)
        program = str(program_of(request.argv))
        if request.companion >= 0:
            threading.Thread(target=_end_with, args=(request.companion,), daemon=True).start()
        if program in PROGRAMS:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif program.endswith(".py"):
            importlib.import_module("cosmos_core.cluster.group")._restrict_ray_access()  # reads variables again
            runpy.run_path(program, run_name="__main__")
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            sys.stderr.write(f"{ending.code}\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    os._exit(code)


def _end_with(companion: int) -> None:
    socket.socket(fileno=companion).recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _take(request: SpawnRequest, descriptors: Sequence[int]) -> None:
    """Take descriptors, session, folder, signals and names from a request."""
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 1000) for each in descriptors]
    for number in set(map(int, os.listdir("/proc/self/fd"))) - set(high):
        with suppress(OSError):
            os.close(number)
    for each, target in zip(high, [*request.targets, READY], strict=True):
        os.dup2(each, target, inheritable=True)
        os.close(each)
    if request.new_session:
        os.setsid()
    if request.process_group >= 0:
        os.setpgid(0, request.process_group)
    if request.umask >= 0:
        os.umask(request.umask)
    os.chdir(request.cwd)
    for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    show(request.argv, request.environment)


def show(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Let `/proc/self/cmdline` and `/proc/self/environ` say what they would after an execution; whether they do."""
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = ctypes.create_string_buffer(words + variables, len(words + variables) + 1)
    _kept.append(memory)
    start, middle = ctypes.addressof(memory), ctypes.addressof(memory) + len(words)
    with open("/proc/self/stat") as file:
        state = file.read().rpartition(")")[2].split()
    start_code, end_code, start_stack = map(int, state[23:26])  # numbers 26 to 28 in proc(5)
    start_data, end_data, start_brk = map(int, state[42:45])
    _libc.sbrk.restype = ctypes.c_void_p
    layout = (ctypes.c_uint64 * 13)(
        start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0), start_stack, start, middle, middle,
        middle + len(variables), 0, 0xFFFFFFFF << 32,  # no other auxiliary vector, no other executable
    )  # fmt: skip
    return not _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(ctypes.sizeof(layout)), ctypes.c_ulong(0))


def _open_streams(request: SpawnRequest) -> None:
    """Open the standard streams anew: those of the fork server take what it was given for a file that can seek."""
    encoding, _, errors = request.environment.get("PYTHONIOENCODING", "").partition(":")
    is_unbuffered = "-u" in request.argv or bool(request.environment.get("PYTHONUNBUFFERED"))
    for number, name, how in ((1, "stdout", errors or "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding or "utf-8", how, line_buffering=name == "stderr" or raw.isatty(), write_through=is_unbuffered,
        )  # fmt: skip
        setattr(sys, name, stream)


def _tell_libraries(request: SpawnRequest) -> None:
    """Let the interpreter and its libraries be as if this command line had started them in this environment."""
    program = str(program_of(request.argv))
    is_file, arguments = program.endswith(".py"), request.argv[request.argv.index(program) :]
    is_code = program not in PROGRAMS and not is_file
    sys.argv, sys.orig_argv = ["-c", *arguments[1:]] if is_code else arguments, request.argv
    sys.path[0] = os.path.dirname(program) if is_file else "" if is_code else request.cwd
    tempfile.tempdir = None
    time.tzset()
    importlib.invalidate_caches()
    threads = request.environment.get("OMP_NUM_THREADS", "")
    if threads != ENVIRONMENT["OMP_NUM_THREADS"]:
        sys.modules["torch"].set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    if ray_logging := sys.modules.get("ray._private.ray_logging"):
        ray_logging.RAY_DEDUP_LOGS = request.environment.get("RAY_DEDUP_LOGS") != "0"  # type: ignore[attr-defined]
    _open_streams(request)
    importlib.import_module("tests.warm.spawner").renew(program, request.argv)  # before settings are read, once
    if program in deferred:
        importlib.import_module(program)
