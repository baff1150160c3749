"""What a policy gradient pushes on: one file for each `variant` of `[train.train_policy]`, a pure function each.

A file NAME.py has `def NAME(terms: Terms, settings: PolicySettings) -> tuple[Tensor, Metrics]`: the loss of each token
(B, T), to be minimised, and metrics over the mask.
"""
