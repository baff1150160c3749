"""Recipes of the demos, and the programs that make their data."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # warn of kernels that a CPU does not need, and of an enumeration
    logging.getLogger(_name).setLevel(logging.ERROR)
