"""DDRL (arXiv 2512.04332): FlowGRPO with the diffusion loss on real data as its regulariser.

The data term is that of any algorithm (`flow_rl.FlowRl.data_term`); here is only that this one always has it.
"""

from __future__ import annotations

from cosmos_core.algorithms.flow_grpo import FlowGrpo

ALGORITHM = FlowGrpo
