"""Compute log-probabilities of selected (trained) tokens without ever storing the logits of all positions.

The body of the model runs once. The head (a matrix of V rows) runs only over the selected positions, one chunk at a
time, and again in the backward pass. If the caller knows the derivative of the loss with respect to every
log-probability (SFT: -1/D; GRPO with one update per step: from the advantages), the forward pass computes the gradient
of a chunk while its logits exist, so that the head runs once (the idea of Liger's fused cross-entropy, arXiv
2410.10989, for any head and any loss). The derivatives with respect to the logits are explicit formulas, because
autograd would read a chunk about twice as often.

Shape legend: B rows, T tokens, S = T - 1 predicted tokens, N selected tokens, M selected tokens of a chunk, H hidden
size, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from transformers import PreTrainedModel

from cosmos_core.models import balance
from cosmos_core.models.length_rounding import autocast_dtype, pad_for_kernel

NUM_PROBE_TOKENS = 8
_LOGIT_TOLERANCE = 1e-4
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _MEMORY_CHUNK_RATIO = 64 << 20, 1 << 30, 64


@dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """Outputs to compute for each selected token in addition to its log-probability."""

    temperature: float = 1.0
    """Temperature by which logits are divided before any output is computed."""
    entropy: Literal["", "value", "gradient"] = ""
    """Entropy of each token's distribution, in nats; empty: none, `value`: without, `gradient`: with gradient."""
    top_k: int = 0
    """Number of most likely token ids to return for each token, with their log-probabilities, which have gradients."""
    is_argmax: bool = False
    """Whether to return a mask of the selected tokens that are the most likely token of their position."""


LOGPROBS_ONLY = RequestedOutputs()
"""Outputs for a caller that needs only log-probabilities, at temperature 1."""


def choose_chunk_bytes(device: torch.device) -> int:
    """Return the maximum size in bytes of the float32 logits of one chunk: a 64th of the memory of `device`, rounded
    down to a power of two, but from 64 MiB to 1 GiB.

    The peak memory of a chunk is about three times its size, and each chunk reads and writes the gradient of the whole
    head once. The size depends on the total instead of the free memory, because chunks determine the order in which
    gradients are summed, so a resumed run needs the same chunks.
    """
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    total_bytes = torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
    return min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, 1 << ((total_bytes // _MEMORY_CHUNK_RATIO).bit_length() - 1)))


class LogprobScorer(nn.Module):
    """Language model that returns log-probabilities instead of logits."""

    def __init__(self, model: PreTrainedModel, chunk_bytes: int | None = None) -> None:
        """Store the language model. `chunk_bytes`: maximum size of the float32 logits of one chunk of tokens; None:
        `choose_chunk_bytes`."""
        super().__init__()
        self.model = model
        self._chunk_bytes = chunk_bytes
        self._are_logits_plain_head_output: bool | None = None
        """Whether the model's logits equal its output head applied to the hidden states of its body; None until the
        first call, which tests this."""
        self.num_token_ids: int | None = None
        """Number of token ids among which the most likely tokens are selected; None: all rows of the output head."""
        self.load_balancing: balance.LoadBalancingSettings | None = None
        """Settings of the load-balancing loss of experts, which is the output `balance` if gradients are enabled; None:
        the model has no such loss."""

    def forward(
        self,
        inputs: dict[str, Any],
        scored_index_N: Tensor,
        *,
        output_request: RequestedOutputs = LOGPROBS_ONLY,
        dtype: torch.dtype = torch.float32,
        loss_gradient_N: Tensor | None = None,
        top_ids_NK: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return outputs of the N selected tokens by name: `logprobs` N and, if `output_request` requests them,
        `entropy` N, `top_logprobs` and `top_ids` NK, `is_argmax` N (1 or 0).

        Args:
            inputs: inputs of the model, with `input_ids` BT. If an earlier pipeline stage computed embeddings: also
                `inputs_embeds` BTH, which the model reads instead. If rows continue on another rank: also
                `shift_labels` BT, the next token of each token; `scored_index_N` are then indices in the flat BT grid.
            scored_index_N: indices of the selected tokens in the flat BS grid of predicted tokens: index b * S + s is
                token s + 1 of row b, conditioned on the tokens before it.
            output_request: the outputs and their temperature.
            dtype: dtype of the log-softmax.
            loss_gradient_N: derivative of the loss for each log-probability, if known; a wrong one only costs time.
            top_ids_NK: ids, such as those of a teacher, whose `top_logprobs` are computed instead of the model's own.
        """
        has_shifted_labels = "shift_labels" in inputs
        labels_BS = inputs["shift_labels"] if has_shifted_labels else inputs["input_ids"][:, 1:]
        labels_N = labels_BS.reshape(-1)[scored_index_N]
        hidden_BTH, output_head, auxiliary_loss = self._run_without_head(inputs)
        hidden_BSH = hidden_BTH if has_shifted_labels else hidden_BTH[:, :-1]
        hidden_NH = hidden_BSH.reshape(-1, hidden_BTH.shape[-1])[scored_index_N]
        max_chunk_bytes = self._chunk_bytes or choose_chunk_bytes(hidden_NH.device)
        num_token_ids = min(self.num_token_ids or self.vocab_size, self.vocab_size)
        num_top_ids = min(output_request.top_k, num_token_ids) if top_ids_NK is None else top_ids_NK.shape[-1]
        chunk_size = max(1, max_chunk_bytes // (4 * self.vocab_size))
        chunk_scorer = _ChunkScorer(output_head, output_request, num_top_ids, num_token_ids, dtype, chunk_size)
        if loss_gradient_N is not None:
            # Convert to the dtype in which `_ChunkedScoring.backward` compares this gradient with that of autograd.
            loss_gradient_N = loss_gradient_N.to(dtype)
        head_weights = output_head.trained_weights.values() if torch.is_grad_enabled() else ()
        outputs = _ChunkedScoring.apply(chunk_scorer, hidden_NH, labels_N, top_ids_NK, loss_gradient_N, *head_weights)
        return dict(zip(chunk_scorer.output_names, outputs, strict=True)) | auxiliary_loss

    def score_batch(
        self, batch: Any, output_request: RequestedOutputs, dtype: torch.dtype, inputs: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Return the requested outputs for a `TokenBatch`. The model gets `inputs` or, if None, those of the batch."""
        return self(
            inputs or batch.inputs, batch.scored_index_N, output_request=output_request, dtype=dtype,
            loss_gradient_N=batch.loss_gradient_N, top_ids_NK=batch.top_ids_NK,
        )  # fmt: skip

    def compute_hidden_states(self, inputs: dict[str, Any]) -> Tensor:
        """Return the last hidden states BTH, the input of the head or of the next pipeline stage."""
        return self.model.base_model(**_select_model_inputs(inputs), use_cache=False).last_hidden_state

    # `apply_fsdp` registers the name `probe_hidden_states` with FSDP, so that calls by this name gather the weights.
    probe_hidden_states = compute_hidden_states

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _run_without_head(self, inputs: dict[str, Any]) -> tuple[Tensor, _OutputHead, dict[str, Tensor]]:
        """Return the last hidden states, the output head, and a dictionary with the load-balancing loss (empty if
        disabled). If the model's logits are not its head applied to these hidden states, return the logits and an
        identity head."""
        if self._are_logits_plain_head_output is None:
            self._are_logits_plain_head_output = self._check_head_matches_logits(inputs["input_ids"].device)
        called_module = self.model.base_model if self._are_logits_plain_head_output else self.model
        balance_settings = self.load_balancing if torch.is_grad_enabled() else None
        router_options = {"output_router_logits": True} if balance_settings else {}
        model_output = called_module(**_select_model_inputs(inputs), use_cache=False, **router_options)
        auxiliary_loss: dict[str, Tensor] = {}
        if balance_settings:
            sequence_arguments = inputs[balance.SEQUENCE_INDEX_KEY], int(inputs[balance.NUM_SEQUENCES_KEY])
            loss = balance.load_balancing_loss(balance_settings, model_output.router_logits, *sequence_arguments)
            auxiliary_loss = {balance.LOAD_BALANCING_OUTPUT: loss}
        if not self._are_logits_plain_head_output:
            return model_output.logits, _OutputHead(None, lambda logits: logits), auxiliary_loss
        output_head = _OutputHead(self.model.get_output_embeddings(), self._scale_logits)
        return model_output.last_hidden_state, output_head, auxiliary_loss

    def _scale_logits(self, logits_MV: Tensor) -> Tensor:
        """Return logits after the scaling or soft cap that some model families apply to the outputs of their head."""
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):  # Cohere models multiply their logits by `logit_scale`
            logits_MV = logits_MV * scale
        if scaling := getattr(config, "logits_scaling", None):  # Granite models divide their logits by `logits_scaling`
            logits_MV = logits_MV / scaling
        if soft_cap := getattr(config, "final_logit_softcapping", None):  # Gemma models limit their logits to this cap
            logits_MV = torch.tanh(logits_MV / soft_cap) * soft_cap
        return logits_MV

    @torch.no_grad()
    def _check_head_matches_logits(self, device: torch.device) -> bool:
        output_head = self.model.get_output_embeddings()
        if output_head is None or self.model.base_model is self.model:
            return False
        if is_without_weight_data(self.model):
            return True
        was_training = self.model.training
        self.model.eval()  # disable dropout, which would change the logits
        token_ids = torch.arange(1, NUM_PROBE_TOKENS + 1, device=device).unsqueeze(0) % self.vocab_size
        # The autocast cache is disabled, because a recomputation in a later pass would not find the cached casts.
        with _open_autocast(device, autocast_dtype(device)):
            expected_logits = self.model(input_ids=token_ids, use_cache=False).logits
            model_output = self.model.base_model(input_ids=token_ids, use_cache=False)
            hidden_states = getattr(model_output, "last_hidden_state", None)
            self.model.train(was_training)
            if hidden_states is None or hidden_states.shape[-1] != output_head.weight.shape[-1]:
                return False
            logits = self._scale_logits(output_head(hidden_states))
        is_same_shape = expected_logits.shape == logits.shape
        return is_same_shape and torch.allclose(expected_logits, logits, atol=_LOGIT_TOLERANCE, rtol=_LOGIT_TOLERANCE)


def is_without_weight_data(model: nn.Module) -> bool:
    """Return True if a model has fake tensors as weights, with shapes but no data, as in an estimate of memory."""
    return isinstance(next(model.parameters()), FakeTensor)


def _select_model_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the model: `inputs` without the entries that only `LogprobScorer` reads."""
    scorer_input_names = {"shift_labels", balance.SEQUENCE_INDEX_KEY, balance.NUM_SEQUENCES_KEY}
    scorer_input_names |= {"input_ids"} if "inputs_embeds" in inputs else set()
    return {name: value for name, value in inputs.items() if name not in scorer_input_names}


@dataclass(frozen=True, slots=True)
class _OutputHead:
    """Output head of a language model, which converts hidden states to logits."""

    module: nn.Module | None
    """Output embedding of the model; None: the model itself computes logits, which the head returns unchanged."""

    transform_logits: Callable[[Tensor], Tensor]

    @property
    def trained_weights(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad} if self.module else {}

    def make_autocast_weights(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return copies of the output head's weight matrices in the autocast dtype `dtype`, by name, as leaves of the
        autograd graph, which all chunks of tokens share; empty if no weight needs a cast."""
        if self.module is None or dtype is None:
            return {}
        return {
            name: parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
            if parameter.ndim > 1 and parameter.dtype in {torch.float32, torch.float16, torch.bfloat16} - {dtype}
        }

    def __call__(self, hidden_MH: Tensor, autocast_weights: dict[str, Tensor]) -> Tensor:
        """Return the logits MV (M tokens, V vocabulary entries) of the hidden states `hidden_MH`, computed with
        `autocast_weights`, the result of `make_autocast_weights`. If these are empty, the head's own weights are
        used."""
        if self.module is None:
            return self.transform_logits(hidden_MH)
        if not autocast_weights:
            return self.transform_logits(self.module(hidden_MH))
        return self.transform_logits(functional_call(self.module, autocast_weights, (hidden_MH,)))


@dataclass(frozen=True, slots=True)
class _ChunkScorer:
    """Settings and formulas with which `_ChunkedScoring` computes outputs and gradients of one chunk of tokens."""

    head: _OutputHead
    output_request: RequestedOutputs
    num_top_ids: int
    """Number K of token ids whose log-probabilities are returned at each selected token; 0: none are returned."""
    num_token_ids: int
    """Number of token ids among which the K most likely are selected; the output head can have more rows."""
    dtype: torch.dtype
    chunk_size: int
    """Number M of tokens whose logits are computed at once; the last chunk can have fewer."""

    @property
    def output_names(self) -> list[str]:
        """Return the names of the outputs of a chunk of tokens, such as `logprobs`, in the order of
        `compute_outputs`."""
        request = self.output_request
        top_names = ["top_logprobs", "top_ids"] * bool(self.num_top_ids)
        return ["logprobs", *["entropy"] * bool(request.entropy), *top_names, *["is_argmax"] * request.is_argmax]

    @property
    def differentiable_outputs(self) -> set[str]:
        """Return the names of those outputs of a chunk of tokens through which gradients flow, such as `logprobs`."""
        entropy_without_gradient = ["entropy"] * (self.output_request.entropy != "gradient")
        return set(self.output_names) - {"top_ids", "is_argmax", *entropy_without_gradient}

    def make_chunk_slices(self, num_tokens: int) -> list[slice]:
        return [slice(start, start + self.chunk_size) for start in range(0, num_tokens, self.chunk_size)]

    def compute_logits(self, hidden_MH: Tensor, autocast_weights: dict[str, Tensor]) -> Tensor:
        """Return the logits of a chunk of tokens from its hidden states, which are padded to a number of tokens that is
        efficient for kernels."""
        logits_MV = self.head(pad_for_kernel(hidden_MH, -2), autocast_weights)
        return logits_MV if len(logits_MV) == len(hidden_MH) else logits_MV[: len(hidden_MH)]

    def scale_logits(self, logits_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a chunk of M tokens, divided by the temperature, and their logsumexp, shape M1."""
        logits_MV = logits_MV.detach().to(self.dtype)
        if self.output_request.temperature != 1.0:
            logits_MV = logits_MV / self.output_request.temperature
        return logits_MV, logits_MV.logsumexp(-1, keepdim=True)

    def compute_outputs(
        self, logits_MV: Tensor, logsumexp_M1: Tensor, labels_M: Tensor, top_ids_MK: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the outputs of a chunk of M tokens by name: log-probabilities of the tokens `labels_M` and other
        requested outputs. The logits and their logsumexp are the results of `scale_logits`."""
        label_logits_M1 = logits_MV.gather(-1, labels_M.unsqueeze(-1))
        outputs = {"logprobs": (label_logits_M1 - logsumexp_M1).squeeze(-1)}
        if self.output_request.entropy:
            logprobs_MV = logits_MV.log_softmax(-1)
            outputs["entropy"] = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        if self.num_top_ids:
            if top_ids_MK is None:
                top_ids_MK = logits_MV[:, : self.num_token_ids].topk(self.num_top_ids, dim=-1).indices
            outputs |= {"top_logprobs": logits_MV.gather(-1, top_ids_MK) - logsumexp_M1, "top_ids": top_ids_MK}
        if self.output_request.is_argmax:
            outputs["is_argmax"] = (label_logits_M1.squeeze(-1) == logits_MV.amax(-1)).to(self.dtype)
        return outputs

    def compute_logit_gradient(
        self,
        logits_MV: Tensor,
        logsumexp_M1: Tensor,
        labels_M: Tensor,
        output_gradients: dict[str, Tensor],
        top_ids_MK: Tensor | None,
    ) -> Tensor:
        """Return the gradient of the loss with respect to the logits of a chunk of M tokens, shape MV, from its
        gradients with respect to the outputs, by name.

        With p the softmax and g the gradient of an output, the gradient is g (1[v = t] - p_v) for the
        log-probability of token t, and -g p_v (log p_v + E) for the entropy E.
        """
        output_gradients = {name: gradient.to(self.dtype) for name, gradient in output_gradients.items()}
        logprob_gradient_M1 = total_gradient_M1 = output_gradients["logprobs"].unsqueeze(-1)
        if "top_logprobs" in output_gradients:
            total_gradient_M1 = logprob_gradient_M1 + output_gradients["top_logprobs"].sum(-1, keepdim=True)
        gradient_MV = logits_MV - logsumexp_M1
        if "entropy" in output_gradients:
            probabilities_MV = gradient_MV.exp()
            entropy_M1 = -(probabilities_MV * gradient_MV).sum(-1, keepdim=True)
            gradient_MV.add_(entropy_M1).mul_(output_gradients["entropy"].unsqueeze(-1))
            gradient_MV.add_(total_gradient_M1).neg_().mul_(probabilities_MV)
        else:
            gradient_MV.exp_().mul_(-total_gradient_M1)
        gradient_MV.scatter_add_(-1, labels_M.unsqueeze(-1), logprob_gradient_M1)
        if "top_logprobs" in output_gradients and top_ids_MK is not None:
            gradient_MV.scatter_add_(-1, top_ids_MK, output_gradients["top_logprobs"])
        temperature = self.output_request.temperature
        return gradient_MV if temperature == 1.0 else gradient_MV.div_(temperature)


class _ChunkedScoring(torch.autograd.Function):
    """Autograd function that computes log-probabilities and other outputs of tokens from hidden states. It processes
    one chunk of tokens at a time, so that the logits of all tokens are never in memory together."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_scorer: _ChunkScorer,
        hidden_NH: Tensor,
        labels_N: Tensor,
        top_ids_NK: Tensor | None,
        loss_gradient_N: Tensor | None,
        *head_weights: Tensor,
    ) -> Any:
        ctx.chunk_scorer, ctx.head_weights = chunk_scorer, head_weights
        ctx.compute_dtype = autocast_dtype(hidden_NH.device)
        grad_accumulator, output_names = None, chunk_scorer.output_names
        is_loss_derivative_known = loss_gradient_N is not None and chunk_scorer.differentiable_outputs == {"logprobs"}
        if is_loss_derivative_known and any(ctx.needs_input_grad):
            grad_accumulator = _GradientAccumulator(chunk_scorer, hidden_NH, head_weights, ctx.compute_dtype)
        chunk_outputs: list[dict[str, Tensor]] = []
        with _open_autocast(hidden_NH.device, ctx.compute_dtype):
            autocast_weights = {} if grad_accumulator else chunk_scorer.head.make_autocast_weights(ctx.compute_dtype)
            for chunk in chunk_scorer.make_chunk_slices(len(labels_N)):
                labels_M, top_ids_MK = labels_N[chunk], None if top_ids_NK is None else top_ids_NK[chunk]
                if grad_accumulator:
                    logits_MV = grad_accumulator.compute_logits(chunk)
                else:
                    logits_MV = chunk_scorer.compute_logits(hidden_NH[chunk], autocast_weights)
                scaled_MV, logsumexp_M1 = chunk_scorer.scale_logits(logits_MV)
                del logits_MV
                chunk_outputs.append(chunk_scorer.compute_outputs(scaled_MV, logsumexp_M1, labels_M, top_ids_MK))
                if grad_accumulator and loss_gradient_N is not None:
                    chunk_gradients = {"logprobs": loss_gradient_N[chunk]}
                    grad_accumulator.add_chunk_gradients(
                        chunk_scorer.compute_logit_gradient(scaled_MV, logsumexp_M1, labels_M, chunk_gradients, None)
                    )
                del scaled_MV, logsumexp_M1
        ctx.precomputed_gradients = grad_accumulator.get_total_gradients() if grad_accumulator else None
        outputs = {
            name: _concatenate_chunks([outputs_M[name] for outputs_M in chunk_outputs], name, chunk_scorer, hidden_NH)
            for name in output_names
        }
        ctx.save_for_backward(hidden_NH, labels_N, outputs.get("top_ids"), loss_gradient_N)
        ctx.mark_non_differentiable(*(outputs[name] for name in {*output_names} - chunk_scorer.differentiable_outputs))
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:  # type: ignore[override]
        chunk_scorer: _ChunkScorer = ctx.chunk_scorer
        hidden_NH, labels_N, top_ids_NK, loss_gradient_N = ctx.saved_tensors
        gradients_by_name = dict(zip(chunk_scorer.output_names, output_gradients, strict=True))
        precomputed_gradients, ctx.precomputed_gradients = ctx.precomputed_gradients, None
        # The precomputed gradients are valid only if autograd passes exactly the derivative they were computed with.
        if precomputed_gradients is not None and bool((gradients_by_name["logprobs"] == loss_gradient_N).all()):
            return None, precomputed_gradients[0], None, None, None, *precomputed_gradients[1:]
        del precomputed_gradients
        with _open_autocast(hidden_NH.device, ctx.compute_dtype):
            grad_accumulator = _GradientAccumulator(chunk_scorer, hidden_NH, ctx.head_weights, ctx.compute_dtype)
            for chunk in chunk_scorer.make_chunk_slices(len(labels_N)):
                labels_M, top_ids_MK = labels_N[chunk], None if top_ids_NK is None else top_ids_NK[chunk]
                scaled_MV, logsumexp_M1 = chunk_scorer.scale_logits(grad_accumulator.compute_logits(chunk))
                chunk_gradients = {name: gradients_by_name[name][chunk] for name in chunk_scorer.differentiable_outputs}
                grad_accumulator.add_chunk_gradients(
                    chunk_scorer.compute_logit_gradient(scaled_MV, logsumexp_M1, labels_M, chunk_gradients, top_ids_MK)
                )
                del scaled_MV, logsumexp_M1
        total_gradients = grad_accumulator.get_total_gradients()
        return None, total_gradients[0], None, None, None, *total_gradients[1:]


class _GradientAccumulator:
    """Accumulator of the gradients of hidden states and output head, which adds one chunk of tokens at a time."""

    def __init__(
        self, chunk_scorer: _ChunkScorer, hidden_NH: Tensor, head_weights: Sequence[Tensor], dtype: torch.dtype | None
    ) -> None:
        self._chunk_scorer, self._hidden_NH, self._head_weights = chunk_scorer, hidden_NH, head_weights
        self._autocast_weights = chunk_scorer.head.make_autocast_weights(dtype)
        named_weights = zip(chunk_scorer.head.trained_weights, head_weights, strict=True)
        self._differentiable_weights = [self._autocast_weights.get(name, weight) for name, weight in named_weights]
        self._hidden_gradient = torch.empty_like(hidden_NH)
        self._weight_gradients: list[Tensor] = []
        self._has_many_chunks = len(hidden_NH) > chunk_scorer.chunk_size

    def compute_logits(self, chunk_slice: slice) -> Tensor:
        """Return the logits of the chunk of tokens `chunk_slice`, and keep their autograd graph for
        `add_chunk_gradients`."""
        self._current_chunk_slice = chunk_slice
        self._hidden_MH = self._hidden_NH[chunk_slice].detach().requires_grad_()
        with torch.enable_grad():
            self._logits_MV = self._chunk_scorer.compute_logits(self._hidden_MH, self._autocast_weights)
        return self._logits_MV

    def add_chunk_gradients(self, gradient_MV: Tensor) -> None:
        """Add the gradients of the chunk of tokens of the last `compute_logits` to those of the hidden states and of
        the head; `gradient_MV` is the gradient of the loss for the logits of the chunk: M tokens, V vocabulary
        entries."""
        self._hidden_gradient[self._current_chunk_slice], *weight_gradients = torch.autograd.grad(
            self._logits_MV, [self._hidden_MH, *self._differentiable_weights], gradient_MV.to(self._logits_MV.dtype)
        )
        del self._logits_MV
        if not self._weight_gradients:
            self._weight_gradients = [
                # Gradients of many chunks are summed in float32, as half precision would lose small summands.
                gradient.to(torch.promote_types(weight.dtype, torch.float32) if self._has_many_chunks else weight.dtype)
                for gradient, weight in zip(weight_gradients, self._head_weights, strict=True)
            ]
            return
        for total_gradient, gradient in zip(self._weight_gradients, weight_gradients, strict=True):
            total_gradient.add_(gradient)

    def get_total_gradients(self) -> tuple[Tensor, ...]:
        weights = self._head_weights
        weight_gradients = self._weight_gradients or [torch.zeros_like(weight) for weight in weights]
        return (self._hidden_gradient, *(t.to(w.dtype) for t, w in zip(weight_gradients, weights, strict=True)))


def _concatenate_chunks(chunks: Sequence[Tensor], name: str, chunk_scorer: _ChunkScorer, hidden_NH: Tensor) -> Tensor:
    if chunks:
        return torch.cat(list(chunks))
    empty_shape = (0, chunk_scorer.num_top_ids) if name.startswith("top_") else (0,)
    return hidden_NH.new_zeros(empty_shape, dtype=torch.int64 if name == "top_ids" else chunk_scorer.dtype)


def _open_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return an autocast context for `dtype` (None: disabled) without a cache, because a cached cast would belong to
    the autograd graph of an earlier chunk, which is already freed."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
