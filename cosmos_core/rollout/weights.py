"""Proof that the weights of the trainer reached a rollout engine: a checksum, and a comparison after the load."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.errors import StageFailed
from cosmos_core.models.scorer import sequence_logprobs

# Mean absolute difference of log-probabilities that rounding explains; a tensor in the wrong place costs whole nats.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
_PROBE_TOKENS = 16


def checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Hex sha256 over name, dtype, shape and bytes of each tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def probe_tokens(vocab_size: int, max_model_len: int) -> list[int]:
    """A short sequence spread over the vocabulary, to be scored by trainer and engine."""
    length = min(_PROBE_TOKENS, max_model_len - 1)
    return [(7919 * (i + 1)) % vocab_size for i in range(length)]  # a prime stride: no token twice in a row


def check_probe(
    model: PreTrainedModel, probe: Sequence[int], engine_logprobs: Sequence[float], dtype: torch.dtype
) -> None:
    """Compare the engine's log-probabilities of tokens 1.. of `probe` with those of the trainer's `model`.

    Raises:
        StageFailed: they differ by more than rounding in `dtype`, the engine's precision.
    """
    input_ids = torch.tensor([list(probe)], device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, dtype=dtype, enabled=dtype != model.dtype):
            expected = sequence_logprobs(model, input_ids, torch.ones_like(input_ids))[0].cpu()
    finally:
        model.train(was_training)
    difference = (expected - torch.tensor(engine_logprobs)).abs().mean().item()
    if not difference <= _TOLERANCE[dtype]:  # written so that NaN fails too
        raise StageFailed(
            f"weight sync: engine and trainer differ by {difference:.3g} nats a token, more than {_TOLERANCE[dtype]} "
            f"in {str(dtype).removeprefix('torch.')}; the engine did not take all weights"
        )


def check_norms(sent: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
    """Compare the norm weights bit for bit: engines keep them as they are, and each optimizer step changes them.

    A probe alone would not notice an engine that is one small step behind.

    Raises:
        StageFailed: one of them is not what was sent.
    """
    for name, tensor in loaded.items():
        if not name.endswith("norm.weight") or name not in sent:
            continue
        if not torch.equal(tensor, sent[name].to(tensor.device, tensor.dtype)):
            raise StageFailed(f"weight sync: {name} in the engine is not what the trainer sent; the load did not take")
