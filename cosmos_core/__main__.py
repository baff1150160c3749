"""Entry point of the command `cosmos`, which is the same as `python -m cosmos_core`."""

import sys

from cosmos_core.errors import EXIT_PREEMPTED


def main() -> None:
    """Import the command line and run it. Ctrl-C during the import ends the process with one line, without a traceback;
    after the import, `cli.main` handles Ctrl-C."""
    try:
        from cosmos_core import cli
    except KeyboardInterrupt:
        sys.stderr.write("cosmos: interrupted\n")
        sys.exit(EXIT_PREEMPTED)
    cli.main()


if __name__ == "__main__":
    main()
