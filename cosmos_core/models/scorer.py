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

from cosmos_core.models.balance import NUM_SEQUENCES, OUTPUT, SEQUENCES, LoadBalancingSettings, balance_loss
from cosmos_core.models.length_rounding import pad_to_kernel

PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-4
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _MEMORY_DIVISOR = 64 << 20, 1 << 30, 64


@dataclass(frozen=True, slots=True)
class RequestedOutputs:
    """Outputs to compute for each selected token in addition to its log-probability."""

    temperature: float = 1.0
    """Temperature by which logits are divided before all outputs are computed."""
    entropy: Literal["", "value", "gradient"] = ""
    """Whether to return the entropy of each token's distribution in nats, with `gradient` or as `value`; empty: off."""
    top_k: int = 0
    """Number of most likely tokens whose ids and log-probabilities (with gradient) are returned for each token."""
    is_top: bool = False
    """Whether to return for each token if its label is the most likely token."""


LOGPROBS = RequestedOutputs()
"""Outputs for a caller that needs only log-probabilities, at temperature 1."""


def chunk_bytes(device: torch.device) -> int:
    """Return the maximum size in bytes of the float32 logits of one chunk: a 64th of the memory of `device` as a power
    of two, from 64 MiB to 1 GiB.

    The peak memory of a chunk is about three times its size, and each chunk reads and writes the gradient of the whole
    head once. The size depends on the total instead of the free memory, because chunks determine the order in which
    gradients are summed, so a resumed run needs the same chunks.
    """
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    total_memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else psutil.virtual_memory().total
    return min(_MAX_CHUNK_BYTES, max(_MIN_CHUNK_BYTES, 1 << ((total_memory // _MEMORY_DIVISOR).bit_length() - 1)))


class Scorer(nn.Module):
    """Language model that returns log-probabilities instead of logits."""

    def __init__(self, model: PreTrainedModel, chunk_bytes: int | None = None) -> None:
        """Store the model. `chunk_bytes`: maximum size of the float32 logits of a chunk; None: see `chunk_bytes`."""
        super().__init__()
        self.model = model
        self._chunk_bytes = chunk_bytes
        self._has_plain_head: bool | None = None
        """Whether head(body(x)) equals the model's own logits; None: not tested before the first call."""
        self.num_ids: int | None = None
        """Number of token ids among which the most likely tokens are selected; None: all rows of the head, which may
        exceed the ids of the tokenizer."""
        self.balance: LoadBalancingSettings | None = None
        """Settings of the load-balancing loss, the output `balance` if gradients are enabled; None: no loss."""

    def forward(
        self,
        inputs: dict[str, Any],
        scored_N: Tensor,
        *,
        request: RequestedOutputs = LOGPROBS,
        dtype: torch.dtype = torch.float32,
        derivative_N: Tensor | None = None,
        top_ids_NK: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return outputs of the selected tokens by name: `logprobs` N and, as requested in `request`, `entropy` N,
        `top_logprobs` and `top_ids` NK, `is_top` N (1 or 0).

        Args:
            inputs: inputs of the model, with `input_ids` BT. If an earlier pipeline stage computed embeddings: also
                `inputs_embeds` BTH, which the model reads instead. If rows continue on another rank: also
                `shift_labels` BT, the next token of each token; `scored_N` are then indices in the flat BT grid.
            scored_N: indices of the selected tokens in the flat BS grid of predicted tokens: index b * S + s is token
                s + 1 of row b, conditioned on the tokens before it.
            request: the outputs and their temperature.
            dtype: dtype of the log-softmax.
            derivative_N: derivative of the loss with respect to each log-probability, if known. A wrong value costs
                time, but changes no result.
            top_ids_NK: ids whose `top_logprobs` are computed instead of the model's own `request.top_k`, such as the
                most likely ids of a teacher.
        """
        has_labels = "shift_labels" in inputs
        labels_BS = inputs["shift_labels"] if has_labels else inputs["input_ids"][:, 1:]
        labels_N = labels_BS.reshape(-1)[scored_N]
        hidden_BTH, head, balance_output = self._run_body(inputs)
        hidden_BSH = hidden_BTH if has_labels else hidden_BTH[:, :-1]
        hidden_NH = hidden_BSH.reshape(-1, hidden_BTH.shape[-1])[scored_N]
        max_chunk_bytes = self._chunk_bytes or chunk_bytes(hidden_NH.device)
        num_ids = min(self.num_ids or self.vocabulary, self.vocabulary)
        num_top_ids = min(request.top_k, num_ids) if top_ids_NK is None else top_ids_NK.shape[-1]
        num_rows = max(1, max_chunk_bytes // (4 * self.vocabulary))
        chunk_scorer = _ChunkScorer(head, request, num_top_ids, num_ids, dtype, num_rows)
        if derivative_N is not None:
            derivative_N = derivative_N.to(dtype)  # the backward pass compares it with the gradient from autograd
        head_weights = head.trained_weights if torch.is_grad_enabled() else []
        outputs = _ChunkedScore.apply(chunk_scorer, hidden_NH, labels_N, top_ids_NK, derivative_N, *head_weights)
        return dict(zip(chunk_scorer.names, outputs, strict=True)) | balance_output

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return the last hidden states BTH, the input of the head or of the next pipeline stage."""
        return self.model.base_model(**_select_model_inputs(inputs), use_cache=False).last_hidden_state

    probe = hidden  # under this name, FSDP gathers the weights for a call as for `forward`

    @property
    def vocabulary(self) -> int:
        """Return the number of rows of the output head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _run_body(self, inputs: dict[str, Any]) -> tuple[Tensor, _OutputHead, dict[str, Tensor]]:
        """Return the hidden states, the head, and the load-balancing loss by name (empty if disabled). If the model's
        logits are not head(body(x)), return the logits and an identity head."""
        if self._has_plain_head is None:
            self._has_plain_head = self._probe(inputs["input_ids"].device)
        body_module = self.model.base_model if self._has_plain_head else self.model
        balance = self.balance if torch.is_grad_enabled() else None
        balance_output: dict[str, Tensor] = {}
        router_options = {"output_router_logits": True} if balance else {}
        output = body_module(**_select_model_inputs(inputs), use_cache=False, **router_options)
        if balance:
            sequence_of_M, num_sequences = inputs[SEQUENCES], int(inputs[NUM_SEQUENCES])
            balance_output = {OUTPUT: balance_loss(balance, output.router_logits, sequence_of_M, num_sequences)}
        if not self._has_plain_head:
            return output.logits, _OutputHead(None, lambda logits: logits), balance_output
        return output.last_hidden_state, self._output_head, balance_output

    @property
    def _output_head(self) -> _OutputHead:
        return _OutputHead(self.model.get_output_embeddings(), self._scale_logits)

    def _scale_logits(self, logits_MV: Tensor) -> Tensor:
        """Apply the scaling or soft cap that some model families apply to logits."""
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):  # attribute of the model family Cohere
            logits_MV = logits_MV * scale
        if scaling := getattr(config, "logits_scaling", None):  # attribute of the model family Granite
            logits_MV = logits_MV / scaling
        if soft_cap := getattr(config, "final_logit_softcapping", None):  # attribute of the model family Gemma
            logits_MV = torch.tanh(logits_MV / soft_cap) * soft_cap
        return logits_MV

    @torch.no_grad()
    def _probe(self, device: torch.device) -> bool:
        """Return True if head(body(x)) equals the model's own logits for a few tokens on `device`."""
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        if is_without_data(self.model):
            return True
        was_training = self.model.training
        self.model.eval()  # dropout would make the two results differ
        token_ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0) % self.vocabulary
        # The autocast cache is disabled: a recomputation in a later pass would not find casts cached here.
        with _open_autocast(device, _autocast_dtype(device)):
            expected_logits = self.model(input_ids=token_ids, use_cache=False).logits
            body_output = self.model.base_model(input_ids=token_ids, use_cache=False)
            hidden_states = getattr(body_output, "last_hidden_state", None)
            self.model.train(was_training)
            if hidden_states is None:
                return False
            logits = self._output_head(hidden_states, {})
        is_same_shape = expected_logits.shape == logits.shape
        return is_same_shape and torch.allclose(expected_logits, logits, atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE)


def is_without_data(model: nn.Module) -> bool:
    """Return True if the weights of a model have shapes but no data, as in an estimate of memory."""
    return isinstance(next(model.parameters()), FakeTensor)


def _select_model_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs for the model: `inputs` without the entries that only the scorer reads."""
    scorer_inputs = {"shift_labels", SEQUENCES, NUM_SEQUENCES, *(["input_ids"] if "inputs_embeds" in inputs else [])}
    return {name: value for name, value in inputs.items() if name not in scorer_inputs}


@dataclass(frozen=True, slots=True)
class _OutputHead:
    """Output head of a language model: converts hidden states MH to logits MV."""

    module: nn.Module | None
    """Output embedding of the model; None: the inputs of the head are logits already."""

    transform_logits: Callable[[Tensor], Tensor]

    @property
    def trained_weights(self) -> list[nn.Parameter]:
        """Return the weights of the head that require a gradient."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad] if self.module else []

    def cast(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the matrices of the head by name in `dtype`, the dtype of autocast; empty if no cast is needed.
        The matrices are cast once instead of once per chunk. Casts of trained matrices are autograd leaves."""
        if self.module is None or dtype is None:
            return {}
        return {
            name: parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
            if parameter.ndim > 1 and parameter.dtype in {torch.float32, torch.float16, torch.bfloat16} - {dtype}
        }

    def differentiated_tensors(self, cast_weights: dict[str, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors to differentiate: for each trained weight its cast, or the weight itself."""
        weight_names = [name for name, p in self.module.named_parameters() if p.requires_grad] if self.module else []
        return [cast_weights.get(name, weight) for name, weight in zip(weight_names, weights, strict=True)]

    def __call__(self, hidden_MH: Tensor, cast_weights: dict[str, Tensor]) -> Tensor:
        """Return the logits MV (M tokens, V vocabulary entries) of hidden states MH, computed with the matrices in
        `cast_weights`, or with the weights of the module if `cast_weights` is empty."""
        if self.module is None:
            return self.transform_logits(hidden_MH)
        if not cast_weights:
            return self.transform_logits(self.module(hidden_MH))
        return self.transform_logits(functional_call(self.module, cast_weights, (hidden_MH,)))


@dataclass(frozen=True, slots=True)
class _ChunkScorer:
    """Settings and formulas of `_ChunkedScore`: outputs of a chunk, and loss derivative with respect to its logits."""

    head: _OutputHead
    request: RequestedOutputs
    num_top_ids: int
    """Number K of token ids whose log-probabilities are returned for each token; 0: none are returned."""
    num_ids: int
    """Number of token ids among which the K most likely ids are selected."""
    dtype: torch.dtype
    num_rows: int
    """Number M of tokens of a full chunk."""

    @property
    def names(self) -> list[str]:
        """Return the names of the outputs in the order of their computation."""
        top = ["top_logprobs", "top_ids"] if self.num_top_ids else []
        return ["logprobs", *["entropy"] * bool(self.request.entropy), *top, *["is_top"] * self.request.is_top]

    @property
    def differentiable_outputs(self) -> set[str]:
        """Return the names of the outputs through which gradients flow."""
        return set(self.names) - {"top_ids", "is_top"} - ({"entropy"} if self.request.entropy != "gradient" else set())

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return the slices of the `num_tokens` selected tokens that form the chunks."""
        return [slice(start, start + self.num_rows) for start in range(0, num_tokens, self.num_rows)]

    def logits(self, hidden_MH: Tensor, cast_weights: dict[str, Tensor]) -> Tensor:
        """Return the logits of a chunk. The head runs on a padded length that is efficient for kernels."""
        logits = self.head(pad_to_kernel(hidden_MH, -2), cast_weights)
        return logits if len(logits) == len(hidden_MH) else logits[: len(hidden_MH)]

    def softmax(self, logits_MV: Tensor) -> tuple[Tensor, Tensor]:
        """Return a chunk's logits divided by the temperature MV, and their logsumexp M1."""
        scaled_MV = logits_MV.detach().to(self.dtype)
        if self.request.temperature != 1.0:
            scaled_MV = scaled_MV / self.request.temperature
        return scaled_MV, scaled_MV.logsumexp(-1, keepdim=True)

    def outputs(self, softmax: tuple[Tensor, Tensor], labels_M: Tensor, top_ids_MK: Tensor | None) -> dict[str, Tensor]:
        """Return the outputs of a chunk of tokens by name."""
        scaled_MV, sums_M1 = softmax
        label_M1 = scaled_MV.gather(-1, labels_M.unsqueeze(-1))
        outputs = {"logprobs": (label_M1 - sums_M1).squeeze(-1)}
        if self.request.entropy:
            logprobs_MV = scaled_MV.log_softmax(-1)
            outputs["entropy"] = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        if self.num_top_ids:
            if top_ids_MK is None:
                top_ids_MK = scaled_MV[:, : self.num_ids].topk(self.num_top_ids, dim=-1).indices
            outputs |= {"top_logprobs": scaled_MV.gather(-1, top_ids_MK) - sums_M1, "top_ids": top_ids_MK}
        if self.request.is_top:
            outputs["is_top"] = (label_M1.squeeze(-1) == scaled_MV.amax(-1)).to(self.dtype)
        return outputs

    def derivative(
        self, softmax: tuple[Tensor, Tensor], labels_M: Tensor, gradients: dict[str, Tensor], top_ids_MK: Tensor | None
    ) -> Tensor:
        """Return the derivative of the loss with respect to the logits of a chunk, MV, from the upstream gradients of
        the outputs.

        With p the softmax and g the upstream gradient of an output, the derivative is g (1[v = t] - p_v) for the
        log-probability of token t, and -g p_v (log p_v + E) for the entropy E.
        """
        gradients = {name: gradient.to(self.dtype) for name, gradient in gradients.items()}
        gradient_M1 = total_gradient_M1 = gradients["logprobs"].unsqueeze(-1)
        if "top_logprobs" in gradients:
            total_gradient_M1 = gradient_M1 + gradients["top_logprobs"].sum(-1, keepdim=True)
        derivative_MV = softmax[0] - softmax[1]
        if "entropy" in gradients:
            probabilities_MV = derivative_MV.exp()
            entropy_M1 = -(probabilities_MV * derivative_MV).sum(-1, keepdim=True)
            derivative_MV.add_(entropy_M1).mul_(gradients["entropy"].unsqueeze(-1))
            derivative_MV.add_(total_gradient_M1).neg_().mul_(probabilities_MV)
        else:
            derivative_MV.exp_().mul_(-total_gradient_M1)
        derivative_MV.scatter_add_(-1, labels_M.unsqueeze(-1), gradient_M1)
        if "top_logprobs" in gradients and top_ids_MK is not None:
            derivative_MV.scatter_add_(-1, top_ids_MK, gradients["top_logprobs"])
        return derivative_MV if self.request.temperature == 1.0 else derivative_MV.div_(self.request.temperature)


class _ChunkedScore(torch.autograd.Function):
    """Autograd function for the outputs of a `_ChunkScorer`, chunk by chunk, so that logits are freed early."""

    @staticmethod
    def forward(
        ctx: Any,
        task: _ChunkScorer,
        hidden_NH: Tensor,
        labels_N: Tensor,
        top_ids_NK: Tensor | None,
        derivative_N: Tensor | None,
        *weights: Tensor,
    ) -> Any:
        ctx.task, ctx.weights = task, weights
        ctx.compute_dtype = _autocast_dtype(hidden_NH.device)
        gradients = None
        if derivative_N is not None and task.differentiable_outputs == {"logprobs"} and any(ctx.needs_input_grad):
            gradients = _Gradients(task, hidden_NH, weights, ctx.compute_dtype)
        chunk_outputs: list[dict[str, Tensor]] = []
        with _open_autocast(hidden_NH.device, ctx.compute_dtype):
            cast_weights = {} if gradients else task.head.cast(ctx.compute_dtype)
            for chunk in task.chunks(len(labels_N)):
                top_ids_MK = None if top_ids_NK is None else top_ids_NK[chunk]
                logits_MV = gradients.logits(chunk) if gradients else task.logits(hidden_NH[chunk], cast_weights)
                softmax = task.softmax(logits_MV)
                del logits_MV
                chunk_outputs.append(task.outputs(softmax, labels_N[chunk], top_ids_MK))
                if gradients and derivative_N is not None:
                    gradients.add(task.derivative(softmax, labels_N[chunk], {"logprobs": derivative_N[chunk]}, None))
                del softmax
        ctx.precomputed = gradients.totals() if gradients else None
        outputs = {
            name: _concatenate_chunks([each[name] for each in chunk_outputs], name, task, hidden_NH)
            for name in task.names
        }
        ctx.save_for_backward(hidden_NH, labels_N, outputs.get("top_ids"), derivative_N)
        ctx.mark_non_differentiable(*(outputs[name] for name in task.names if name not in task.differentiable_outputs))
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # type: ignore[override]
        task: _ChunkScorer = ctx.task
        hidden_NH, labels_N, top_ids_NK, derivative_N = ctx.saved_tensors
        named_upstream = zip(task.names, upstream, strict=True)
        upstream_by_name = {name: each for name, each in named_upstream if name in task.differentiable_outputs}
        precomputed_gradients, ctx.precomputed = ctx.precomputed, None
        # The comparison is exact, because an approximately equal derivative would change the gradient.
        if precomputed_gradients is not None and bool((upstream_by_name["logprobs"] == derivative_N).all()):
            return None, precomputed_gradients[0], None, None, None, *precomputed_gradients[1:]
        del precomputed_gradients
        with _open_autocast(hidden_NH.device, ctx.compute_dtype):
            gradients = _Gradients(task, hidden_NH, ctx.weights, ctx.compute_dtype)
            for chunk in task.chunks(len(labels_N)):
                softmax = task.softmax(gradients.logits(chunk))
                top_ids_MK = None if top_ids_NK is None else top_ids_NK[chunk]
                chunk_gradients = {name: gradient[chunk] for name, gradient in upstream_by_name.items()}
                gradients.add(task.derivative(softmax, labels_N[chunk], chunk_gradients, top_ids_MK))
                del softmax
        total_gradients = gradients.totals()
        return None, total_gradients[0], None, None, None, *total_gradients[1:]


class _Gradients:
    """Gradients of the hidden states and of the weights of the head, accumulated chunk by chunk."""

    def __init__(
        self, task: _ChunkScorer, hidden_NH: Tensor, weights: Sequence[Tensor], compute_dtype: torch.dtype | None
    ) -> None:
        self._chunk_scorer, self._hidden_NH, self._weights = task, hidden_NH, weights
        self._cast = task.head.cast(compute_dtype)
        self._tensors_with_grad = task.head.differentiated_tensors(self._cast, weights)
        self._hidden_gradient = torch.empty_like(hidden_NH)
        self._weight_gradients: list[Tensor] = []
        self._has_many_chunks = len(hidden_NH) > task.num_rows

    def logits(self, chunk: slice) -> Tensor:
        """Return the logits of a chunk, and keep their autograd graph for `add`."""
        self._current_chunk = chunk
        self._hidden_MH = self._hidden_NH[chunk].detach().requires_grad_()
        with torch.enable_grad():
            self._logits_MV = self._chunk_scorer.logits(self._hidden_MH, self._cast)
        return self._logits_MV

    def add(self, derivative_MV: Tensor) -> None:
        """Add the gradients of the newest chunk, given the derivative of the loss with respect to its logits."""
        self._hidden_gradient[self._current_chunk], *weight_gradients = torch.autograd.grad(
            self._logits_MV, [self._hidden_MH, *self._tensors_with_grad], derivative_MV.to(self._logits_MV.dtype)
        )
        del self._logits_MV
        if not self._weight_gradients:
            self._weight_gradients = [
                # A sum of many chunks in half precision would lose small summands.
                gradient.to(torch.promote_types(weight.dtype, torch.float32) if self._has_many_chunks else weight.dtype)
                for gradient, weight in zip(weight_gradients, self._weights, strict=True)
            ]
            return
        for total_gradient, gradient in zip(self._weight_gradients, weight_gradients, strict=True):
            total_gradient.add_(gradient)

    def totals(self) -> tuple[Tensor, ...]:
        """Return the total gradients of the hidden states and of each weight."""
        weight_gradients = self._weight_gradients or [torch.zeros_like(weight) for weight in self._weights]
        return (self._hidden_gradient, *(t.to(w.dtype) for t, w in zip(weight_gradients, self._weights, strict=True)))


def _concatenate_chunks(chunks: Sequence[Tensor], name: str, task: _ChunkScorer, hidden_NH: Tensor) -> Tensor:
    """Concatenate one output of all chunks; if there are no chunks, return an empty tensor."""
    if chunks:
        return torch.cat(list(chunks))
    shape = (0, task.num_top_ids) if name.startswith("top_") else (0,)
    return hidden_NH.new_zeros(shape, dtype=torch.int64 if name == "top_ids" else task.dtype)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _open_autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return an autocast context for `dtype` (None: disabled) without a cache, because a cached cast would belong to
    the autograd graph of an earlier chunk, which is already freed."""
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)
