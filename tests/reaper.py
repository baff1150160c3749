"""A process that outlives a test run, and removes what it left: processes and, if the run was killed, folders.

    python tests/reaper.py PIPE

It reads the run's folders from the pipe, a line each, the first of which all processes of the run have in their
environment, and cleans up at the end of the pipe. After the line `done`, pytest itself removes the folders.
"""

import os
import shutil
import signal
import sys
import time


def users_of(folder: str) -> list[int]:
    """Processes whose environment names the folder."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                is_user = folder.encode() in file.read()
        except OSError:
            continue
        if is_user and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def main() -> None:
    """Wait for the end of the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(int(sys.argv[1])) as pipe:
        lines = pipe.read().split("\n")
    is_done, folders = "done" in lines, [line for line in lines if line not in {"", "done"}]
    deadline = time.monotonic() + 30
    while (pids := users_of(folders[0])) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    for folder in () if is_done else folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
