"""Entry point of the command `cosmos`, which is the same as `python -m cosmos_core`."""

import sys

from cosmos_core.errors import EXIT_PREEMPTED


def main() -> None:
    """Run the command line, which handles an interrupt itself once it is imported."""
    try:
        from cosmos_core import cli
    except KeyboardInterrupt:
        sys.stderr.write("cosmos: interrupted\n")
        sys.exit(EXIT_PREEMPTED)
    cli.main()


if __name__ == "__main__":
    main()
