"""Entry point of `python -m cosmos_core`, which is the same as the command `cosmos`."""

from cosmos_core.cli import main

main()
