"""DDRL (arXiv 2512.04332): FlowGRPO with the diffusion loss on real data as a regularizer.

The data term is the one of `flow_rl.FlowRl.data_term`; DDRL only makes it mandatory.
"""

from __future__ import annotations

from cosmos_core.algorithms.flow_grpo import FlowGrpo

ALGORITHM = FlowGrpo
