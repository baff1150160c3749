"""Recipes of the demos, and the programs that make their data."""

import cosmos_core  # noqa: F401 - turns off warnings of libraries
