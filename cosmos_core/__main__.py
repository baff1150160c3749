"""`python -m cosmos_core` is `cosmos`."""

from cosmos_core.cli import main

main()
