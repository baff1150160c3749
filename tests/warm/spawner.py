"""Programs that start in a tenth of a second, because a process that has imported everything forks them.

`install` replaces what `subprocess.Popen` calls to start a process. A command `python -m PROGRAM ...` of `PROGRAMS` is
then forked from a fork server: a child of the calling process that has imported torch, transformers, Prefect and the
project, and has run nothing. Whatever else is started, or differs in a variable that libraries read while they are
imported, is executed as usual.

The forked process is what the executed one would be, to itself and to others: a child of the caller (it loses its
first parent, and the caller adopts it), with the same descriptors, session, signals, working directory, environment and
command line, in `/proc` too. What it starts is forked from a fork server of its own. Where the kernel does not let a
process say where its command line is (Linux without CONFIG_CHECKPOINT_RESTORE), every command is executed.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.parent import kill_with_parent
from tests.warm.process import SpawnRequest, become, serve, show
from tests.warm.programs import (
    ADDRESS_VARIABLE,
    ENVIRONMENT,
    MULTIPROCESSING_FORK_SERVER,
    READ,
    SUPERVISOR,
    program_of,
    read_on_import,
    starts_others,
)

_PR_SET_SUBREAPER, _PR_GET_SUBREAPER = 36, 37  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)
_EXECUTE = subprocess._fork_exec  # type: ignore[attr-defined]
_SPAWN = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_POSIX_SPAWN = os.posix_spawn
_started: list[subprocess.Popen[bytes]] = []


class ForkServer:
    """The caller's side of a process that forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(self, request: SpawnRequest, descriptors: Sequence[int]) -> int | None:
        """Return the pid of the new child of this process; None: the fork server is gone."""
        with self._lock, _adopting():
            try:
                text = json.dumps(asdict(request)).encode()
                socket.send_fds(self._connection, [len(text).to_bytes(8, "little")], descriptors)
                self._connection.sendall(text)
                answer = self._connection.recv(8)
            except OSError:
                return None
            return int.from_bytes(answer, "little") if len(answer) == 8 else None


@contextmanager
def _adopting() -> Iterator[None]:
    """Let this process be the parent of what loses its own below it, within the block."""
    was = ctypes.c_int()
    _libc.prctl(_PR_GET_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    _libc.prctl(_PR_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_SUBREAPER, was.value, 0, 0, 0)


class Spawner:
    """Stands in for `_posixsubprocess.fork_exec` in this process."""

    def __init__(self, open_fork_server: Callable[[], ForkServer | None]) -> None:
        self._open_fork_server = open_fork_server
        self._fork_server: ForkServer | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> int:
        return self.start(given, lambda: int(_EXECUTE(*given)))

    def start(self, given: Sequence[Any], execute: Callable[[], int], blocked: Iterable[int] = ()) -> int:
        """Return the pid of a process that is started as `fork_exec` was asked to, with the signals `blocked` blocked;
        `execute` starts it as usual."""
        close_all, gid, prepare = given[2], given[17], given[21]
        if program_of(given[0]) is None or not close_all or gid is not None:
            return execute()
        if os.getpid() != self._owner:  # forked by something else: what its fork server forks would not be its child
            return execute()
        request, descriptors = request_of(given)
        request = replace(request, blocked=sorted(map(int, blocked)))
        if read_on_import(request.environment) != read_on_import(READ):
            return execute()
        if prepare is not None:  # what is called in the child cannot be sent: only a supervisor has such a thing
            return _fork_here(request, descriptors, prepare) if _is_plain() else execute()
        for _ in range(2):
            with self._lock:
                server = self._fork_server = self._fork_server or self._open_fork_server()
            if server is None:
                break
            if pid := server.fork(request, descriptors):
                return pid
            with self._lock:  # the fork server is gone: open another one, once
                self._fork_server = None if self._fork_server is server else self._fork_server
        return execute()


def _is_plain() -> bool:
    """Whether this process is a supervisor, which has one thread and has run next to nothing."""
    return program_of(sys.orig_argv) == SUPERVISOR and threading.active_count() == 1


def _fork_here(request: SpawnRequest, descriptors: Sequence[int], prepare: Callable[[], None]) -> int:
    begun, ready = os.pipe()
    if not (pid := os.fork()):
        become(request, descriptors, prepare, ready)
    os.close(ready)
    os.read(begun, 1)
    os.close(begun)
    return pid


def request_of(given: Sequence[Any]) -> tuple[SpawnRequest, list[int]]:
    """What `fork_exec` was given, and the descriptors that the child has."""
    command, _, _, kept, cwd, environment = given[:6]
    streams = {0: given[6], 1: given[9], 2: given[11]}
    pairs = {target: number if number >= 0 else target for target, number in streams.items()}
    pairs |= {number: number for number in kept if number != given[13]}  # that one tells of a failed execution
    halves = (os.fsdecode(each).partition("=") for each in environment or ())
    request = SpawnRequest(
        argv=[os.fsdecode(word) for word in command], cwd=os.fsdecode(cwd) if cwd else os.getcwd(),
        environment=dict(os.environ) if environment is None else {name: value for name, _, value in halves},
        parent=os.getpid(), targets=list(pairs),
        ignored=[number for number in range(1, 32) if signal.getsignal(number) is signal.SIG_IGN],
        new_session=bool(given[15]), process_group=int(given[16]), umask=int(given[20]),
    )  # fmt: skip
    return request, list(pairs.values())


def install(meanwhile: Callable[[], None] | None = None) -> None:
    """Let this process fork programs where it can; the fork server is started with the first of them. While it imports
    everything, this process calls `meanwhile`."""
    is_installed = isinstance(subprocess._fork_exec, Spawner)  # type: ignore[attr-defined]
    is_known = sys.platform == "linux" and sys.version_info[:2] in {(3, 11), (3, 12)}
    if is_known and not is_installed and _can_show():
        READ.update(os.environ)
        use(Spawner(partial(_start_fork_server, meanwhile)))


def restore_environment() -> None:
    """Give the variables that libraries read when they are imported the values that they had at `install`."""
    if READ:
        for name in read_on_import(os.environ):
            del os.environ[name]
        os.environ.update(read_on_import(READ))


def use(spawner: Spawner) -> None:
    """Let `subprocess`, `multiprocessing` and the worker processes of rewards and tools start so."""

    def spawn(path: bytes, arguments: Sequence[Any], kept: Sequence[int]) -> int:
        return spawner.start(_given(arguments, path, kept, None), lambda: int(_SPAWN(path, arguments, kept)))

    def posix_spawn(path: Any, arguments: Any, environment: Any, *, file_actions: Any = (), **options: Any) -> int:
        def execute() -> int:
            return _POSIX_SPAWN(path, arguments, environment, file_actions=file_actions, **options)

        kept = [action[1] for action in file_actions]
        is_known = options.keys() <= {"setsigmask"} and all(
            tuple(action) == (os.POSIX_SPAWN_DUP2, action[1], action[1]) for action in file_actions
        )
        if not is_known:
            return execute()
        variables = [f"{name}={value}".encode() for name, value in environment.items()]
        return spawner.start(_given(arguments, path, kept, variables), execute, options.get("setsigmask", ()))

    _replace(spawner, spawn, posix_spawn)


def _given(
    arguments: Sequence[Any], path: Any, kept: Sequence[int], environment: list[bytes] | None
) -> tuple[Any, ...]:
    """The arguments of `fork_exec` for a process that inherits the standard streams and the descriptors `kept`."""
    none = (-1,) * 8
    inherited = (arguments, [path], True, kept, None, environment, *none)
    return (*inherited, False, False, -1, None, None, None, -1, None, False)


def _replace(fork_exec: Any, spawn: Any, posix_spawn: Any) -> None:
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[attr-defined]
    os.posix_spawn = posix_spawn


@contextmanager
def off() -> Iterator[None]:
    """Let this process execute programs as usual within the block."""
    used = subprocess._fork_exec, multiprocessing.util.spawnv_passfds, os.posix_spawn  # type: ignore[attr-defined]
    _replace(_EXECUTE, _SPAWN, _POSIX_SPAWN)
    try:
        yield
    finally:
        _replace(*used)


def renew(program: str, argv: Sequence[str]) -> None:
    """Let this process, just forked, start programs in its turn."""
    _replace(_EXECUTE, _SPAWN, _POSIX_SPAWN)
    if starts_others(program, argv):
        _use_own_fork_server(with_fork_server=program != SUPERVISOR)
        if program.startswith(MULTIPROCESSING_FORK_SERVER):
            os.register_at_fork(after_in_child=partial(_renew_in_child, os.getpid()))


def _use_own_fork_server(*, with_fork_server: bool = True) -> None:
    spawner = Spawner(lambda: None)
    spawner._fork_server = split_fork_server() if with_fork_server else None
    use(spawner)


def _renew_in_child(server: int) -> None:
    """Let a process that a fork server of multiprocessing has forked start programs in its turn."""
    if os.getppid() == server:
        _use_own_fork_server()


def _can_show() -> bool:
    """Whether the kernel lets a process say where its command line is."""
    if not (pid := os.fork()):
        os._exit(0 if show(["x"], {}) else 1)
    return os.waitpid(pid, 0)[1] == 0


def _start_fork_server(meanwhile: Callable[[], None] | None = None) -> ForkServer | None:
    """Start one that imports everything by itself."""
    ours, theirs = socket.socketpair()
    listener = _listen()
    environment = {k: v for k, v in READ.items() if not k.startswith("PREFECT")} | ENVIRONMENT
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the other one starts a thread
    sockets = [theirs.fileno(), listener.fileno()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", *map(str, sockets)], cwd=Path(__file__).parents[2], env=environment,
        pass_fds=sockets, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _started.append(process)
    theirs.close()
    listener.close()
    if meanwhile is not None:
        meanwhile()
    return ForkServer(ours) if ours.recv(5) == b"ready" else None


def _listen() -> socket.socket:
    """Return a socket at which a fork server waits for workers of Ray; what this process starts is told its name."""
    name = f"cosmos-tests-{os.getpid()}-{time.monotonic_ns()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # a name that is no file
    listener.listen(64)
    os.environ[ADDRESS_VARIABLE] = name
    return listener


def split_fork_server() -> ForkServer | None:
    """Fork one off this process, which has run nothing yet. It ends with this process, and nobody takes it for what
    this process started: its command line and environment are empty."""
    ours, theirs = socket.socketpair()
    listener, me = _listen(), os.getpid()
    if os.fork():
        theirs.close()
        listener.close()
        return ForkServer(ours)
    kill_with_parent(me)
    ours.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number < 3:
            os.dup2(nothing, number)
        elif number not in {theirs.fileno(), listener.fileno()}:
            with suppress(OSError):
                os.close(number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show(["fork server"], {})
    serve(theirs, listener)
