"""DDRL (arXiv 2512.04332): FlowGRPO with the diffusion loss on real data as a regularizer.

FlowGRPO already adds this loss if `base.Algorithm.data_term` is set; DDRL only makes that setting mandatory.
"""

from cosmos_core.algorithms.flow_grpo import FlowGrpo

ALGORITHM = FlowGrpo
