"""Log-probabilities of chosen tokens without ever holding the logits of all of them.

The body of the model runs once; the head (a matrix of V rows) runs over the positions that are asked for alone, a
chunk at a time, and again in the backward pass. Where the caller knows what the loss will answer to every
log-probability (SFT: -1/D), the gradient of a chunk is taken while its logits are there, so that nothing runs twice
(the idea of Liger's fused cross-entropy, arXiv 2410.10989, for any head and any loss).

Shape legend: B rows, T tokens, S = T - 1 scored tokens, N chosen tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from cosmos_core.models.shapes import filled

Head = Callable[[Tensor], Tensor]
"""Hidden states to logits: NH to NV."""
Figure = Callable[[Tensor, Tensor], Tensor]
"""Logits NV and labels N to a figure of each label: N."""

CHUNK_BYTES = 64 << 20
"""Logits of one chunk in float32 take about this much."""
PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-4


class Scorer(nn.Module):
    """A language model that answers with log-probabilities in place of logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._has_plain_head: bool | None = None
        """Whether head(body(x)) are the model's own logits; found out at the first call."""

    def forward(
        self,
        inputs: dict[str, Tensor],
        chosen_N: Tensor,
        *,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        figure: Figure | None = None,
        expected: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the chosen tokens, and a figure of each on request (without gradient): N each.

        Args:
            inputs: of the model, with `input_ids` BT; with `inputs_embeds` BTH in their place for the model, where an
                earlier stage of a pipeline has them; with `shift_labels` BT, the token after each, where rows go on
                elsewhere: then places are those of the BT grid.
            chosen_N: places of the chosen tokens in the flat BS grid of predicted tokens: place b * S + s is token
                s + 1 of row b, given those before it.
            temperature: divides the logits.
            dtype: of the log-softmax.
            figure: `entropy`, `is_top`, or another function of the scaled logits.
            expected: what the loss will answer to every log-probability, if that is known; a wrong guess costs time
                and changes nothing.
        """
        is_piece = "shift_labels" in inputs
        labels_BS = inputs["shift_labels"] if is_piece else inputs["input_ids"][:, 1:]
        labels_N = labels_BS.reshape(-1)[chosen_N]
        hidden_BTH, head, parameters = self._body(inputs)
        hidden_BSH = hidden_BTH if is_piece else hidden_BTH[:, :-1]
        hidden_NH = hidden_BSH.reshape(-1, hidden_BTH.shape[-1])[chosen_N]
        weights = [p for p in parameters if p.requires_grad] if torch.is_grad_enabled() else []
        chunk = max(1, CHUNK_BYTES // (4 * self.vocabulary))
        score = _Score(head, temperature, dtype, figure, expected, chunk)
        logprobs_N, figure_N = _ChunkedScore.apply(score, hidden_NH, labels_N, *weights)
        return logprobs_N, None if figure is None else figure_N

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """What the head is applied to, or the next stage of a pipeline: BTH."""
        found: Tensor = self.model.base_model(**_of_model(inputs), use_cache=False).last_hidden_state
        return found

    def probe(self, inputs: dict[str, Tensor]) -> Tensor:
        """`hidden`, called from outside: FSDP brings the weights."""
        return self.hidden(inputs)

    @property
    def vocabulary(self) -> int:
        """Rows of the head."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def _body(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Head, list[nn.Parameter]]:
        """What the head is applied to, the head, and its weights; logits and nothing where the head is not known."""
        if self._has_plain_head is None:
            self._has_plain_head = self._probe()
        if not self._has_plain_head:
            return self.model(**_of_model(inputs), use_cache=False).logits, _identity, []
        return self.hidden(inputs), self._head, list(self.model.get_output_embeddings().parameters())

    def _head(self, hidden_NH: Tensor) -> Tensor:
        """The output embedding and what the families do after it."""
        config = self.model.config.get_text_config()
        logits_NV: Tensor = self.model.get_output_embeddings()(hidden_NH)
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits_NV = logits_NV * scale
        if scaling := getattr(config, "logits_scaling", None):  # Granite
            logits_NV = logits_NV / scaling
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    @torch.no_grad()
    def _probe(self) -> bool:
        """Compare with the model's own logits on a few tokens; a family that does more after its head keeps them."""
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            return False
        if has_no_data(self.model):
            return True
        was_training = self.model.training
        self.model.eval()  # dropout would draw random numbers, and make both differ
        ids = torch.arange(1, PROBE_TOKENS + 1, device=self.model.device).unsqueeze(0) % self.vocabulary
        whole = self.model(input_ids=ids, use_cache=False).logits
        hidden = getattr(self.model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        self.model.train(was_training)
        if hidden is None:
            return False
        parts = self._head(hidden)
        return whole.shape == parts.shape and torch.allclose(whole, parts, atol=_PROBE_TOLERANCE, rtol=_PROBE_TOLERANCE)


def has_no_data(model: nn.Module) -> bool:
    """Whether the weights are shapes alone, as in an estimate of memory."""
    return isinstance(next(model.parameters()), FakeTensor)


def _of_model(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what is for the scorer alone."""
    own = {"shift_labels", *(["input_ids"] if "inputs_embeds" in inputs else [])}
    return {name: tensor for name, tensor in inputs.items() if name not in own}


def _identity(logits_NV: Tensor) -> Tensor:
    return logits_NV


class _Score:
    """Log-probabilities of one chunk, with what `_ChunkedScore` has to know."""

    def __init__(
        self,
        head: Head,
        temperature: float,
        dtype: torch.dtype,
        figure: Figure | None,
        expected: float | None,
        chunk: int,
    ) -> None:
        self._head, self._temperature, self._dtype = head, temperature, dtype
        self.figure, self.expected, self.chunk = figure, expected, chunk

    def __call__(self, hidden_NH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each label, and the scaled logits."""
        count = len(labels_N)
        hidden_NH = filled(hidden_NH, -2)
        labels_N = pad(labels_N, (0, len(hidden_NH) - count))
        scaled_NV = self._head(hidden_NH).to(self._dtype)
        if self._temperature != 1.0:
            scaled_NV = scaled_NV / self._temperature
        chosen_N = scaled_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)
        return (chosen_N - scaled_NV.logsumexp(-1))[:count], scaled_NV[:count]


class _ChunkedScore(torch.autograd.Function):
    """`_Score` over chunks, whose logits die with each chunk."""

    @staticmethod
    def forward(ctx: Any, score: _Score, hidden_NH: Tensor, labels_N: Tensor, *weights: Tensor) -> Any:
        ctx.score, ctx.weights = score, weights
        ctx.autocast = torch.is_autocast_enabled(hidden_NH.device.type)
        ctx.autocast_dtype = torch.get_autocast_dtype(hidden_NH.device.type)
        wants_gradient = any(ctx.needs_input_grad)
        ahead = wants_gradient and score.expected is not None
        total = _Gradients(hidden_NH, weights) if ahead else None
        logprobs, figures = [], []
        for start in range(0, len(labels_N), score.chunk):
            part = slice(start, start + score.chunk)
            labels = labels_N[part]
            if total is not None:
                logprobs_N, scaled_NV = total.add(score, part, labels, None)
            else:
                with torch.no_grad():
                    logprobs_N, scaled_NV = score(hidden_NH[part], labels)
            logprobs.append(logprobs_N)
            if score.figure is not None:
                figures.append(score.figure(scaled_NV, labels))
            del scaled_NV
        ctx.ahead = total.found() if total is not None else None
        ctx.save_for_backward(hidden_NH, labels_N)
        none = [hidden_NH.new_zeros(0, dtype=torch.float32)]
        figure_N = torch.cat(figures or none)
        ctx.mark_non_differentiable(figure_N)
        return torch.cat(logprobs or none), figure_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # type: ignore[override]
        upstream_N, score = upstream[0], ctx.score
        hidden_NH, labels_N = ctx.saved_tensors
        if ctx.ahead is not None and bool((upstream_N == score.expected).all()):
            return None, ctx.ahead[0], None, *ctx.ahead[1:]
        ctx.ahead = None
        total = _Gradients(hidden_NH, ctx.weights)
        with torch.autocast(hidden_NH.device.type, ctx.autocast_dtype, enabled=ctx.autocast, cache_enabled=False):
            for start in range(0, len(labels_N), score.chunk):
                part = slice(start, start + score.chunk)
                total.add(score, part, labels_N[part], upstream_N[part])
        found = total.found()
        return None, found[0], None, *found[1:]


class _Gradients:
    """Gradients of hidden states and head, added up chunk by chunk."""

    def __init__(self, hidden_NH: Tensor, weights: tuple[Tensor, ...]) -> None:
        self._hidden_NH, self._weights = hidden_NH, weights
        self._of_hidden = torch.zeros_like(hidden_NH)
        self._of_weights: list[Tensor] | None = None

    def add(self, score: _Score, part: slice, labels_N: Tensor, upstream_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """One chunk; `upstream_N` None: what was expected. Returns its log-probabilities and scaled logits."""
        with torch.enable_grad():
            hidden = self._hidden_NH[part].detach().requires_grad_()
            logprobs_N, scaled_NV = score(hidden, labels_N)
        if upstream_N is None:
            assert score.expected is not None
            upstream_N = torch.full_like(logprobs_N, score.expected)
        of_hidden, *of_weights = torch.autograd.grad(
            logprobs_N, [hidden, *self._weights], upstream_N.to(logprobs_N.dtype)
        )
        self._of_hidden[part] = of_hidden
        if self._of_weights is None:
            self._of_weights = list(of_weights)
        else:
            for total, more in zip(self._of_weights, of_weights, strict=True):
                total.add_(more)
        return logprobs_N.detach(), scaled_NV.detach()

    def found(self) -> tuple[Tensor, ...]:
        """In the order of the inputs."""
        of_weights = self._of_weights or [torch.zeros_like(weight) for weight in self._weights]
        return (self._of_hidden, *of_weights)


def entropy(scaled_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Of the distribution that each label is drawn from, in nats."""
    logprobs_NV = scaled_NV.log_softmax(-1)
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def is_top(scaled_NV: Tensor, labels_N: Tensor) -> Tensor:
    """1 where no token is likelier than the label, else 0."""
    label_N = scaled_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1)
    return (label_N == scaled_NV.amax(-1)).float()
