"""Entry point of the command `cosmos`, which is the same as `python -m cosmos_core`."""

import os
import sys

from cosmos_core.errors import EXIT_PREEMPTED


def main() -> None:
    """Import the command line and run it. Ctrl-C during the import ends the process with one line, without a traceback;
    after the import, `cli.main` handles Ctrl-C."""
    _open_closed_streams()
    try:
        from cosmos_core import cli
    except KeyboardInterrupt:
        sys.stderr.write("cosmos: interrupted\n")
        sys.exit(EXIT_PREEMPTED)
    cli.main()


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed, as with `cosmos run FILE >&-`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # `os.open` returns the lowest free descriptor, which is the number of the closed stream.
            null_descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null_descriptor, True)
            setattr(sys, name, os.fdopen(null_descriptor, mode, encoding="utf-8"))


if __name__ == "__main__":
    # `python -m` puts the working directory first in `sys.path`, where a user's `tasks.py` would hide the package
    # `tasks`. So the working directory is removed, unless it contains this package.
    if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]
    main()
