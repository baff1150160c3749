"""Log-probabilities of chosen tokens, chunk by chunk: the values and gradients of the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cosmos_core.models import scorer as scorers
from cosmos_core.models.hf import sequence_logprobs
from cosmos_core.models.scorer import Scorer, entropy, is_top

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
FAMILIES = {
    "tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "untied": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "soft caps": (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=8)),
    "divided logits": (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=3.0)),
    "multiplied logits": (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.5)),
}
CHOSEN = torch.tensor([0, 3, 5, 18, 19, 40, 41, 56])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "CHUNK_BYTES", 4 * 500 * 3)  # three tokens


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, config = FAMILIES[request.param]
    made: PreTrainedModel = cls(config).double()
    return made


def inputs() -> dict[str, Tensor]:
    ids = torch.randint(500, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("expected", [None, -0.25, -0.3], ids=["unknown", "right guess", "wrong guess"])
def test_values_entropies_and_gradients_are_those_of_the_whole_logits(
    model: PreTrainedModel, expected: float | None
) -> None:
    batch, scorer = inputs(), Scorer(model)
    settings: dict[str, Any] = {"temperature": 0.7, "dtype": torch.float64}
    whole, entropies = sequence_logprobs(
        model, batch["input_ids"], batch["attention_mask"], **settings, with_entropy=True
    )
    logprobs, found = scorer(batch, CHOSEN, **settings, figure=entropy, expected=expected)

    assert scorer._has_plain_head is True, "the head of this family is known"
    torch.testing.assert_close(logprobs, whole.reshape(-1)[CHOSEN], rtol=0, atol=1e-12)
    torch.testing.assert_close(found, entropies.reshape(-1)[CHOSEN], rtol=0, atol=1e-12)
    ours = gradients(model, -0.25 * logprobs.sum())
    theirs = gradients(model, -0.25 * whole.reshape(-1)[CHOSEN].sum())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12, msg=name)


def test_a_right_guess_saves_the_second_run_of_the_head(model: PreTrainedModel) -> None:
    runs = []
    scorer = Scorer(model)
    scorer(inputs(), CHOSEN)
    model.get_output_embeddings().register_forward_hook(lambda *_: runs.append(1))
    for expected, count in ((-0.25, 3), (-0.3, 6), (None, 6)):  # eight tokens are three chunks
        runs.clear()
        logprobs, _ = scorer(inputs(), CHOSEN, expected=expected)
        (-0.25 * logprobs.sum()).backward()
        assert len(runs) == count


def test_a_label_is_at_the_top_where_the_whole_logits_have_their_largest_value_at_it(model: PreTrainedModel) -> None:
    batch = inputs()
    with torch.no_grad():
        likeliest = model(**batch).logits[:, :-1].argmax(-1).reshape(-1)[CHOSEN]
        (row, place) = divmod(int(CHOSEN[2]), batch["input_ids"].shape[1] - 1)
        # The token after the place becomes the likeliest; a causal model says the same of that place.
        batch["input_ids"][row, place + 1] = likeliest[2]
        likeliest = model(**batch).logits[:, :-1].argmax(-1).reshape(-1)[CHOSEN]
        _, found = Scorer(model)(batch, CHOSEN, figure=is_top)
    labels = batch["input_ids"][:, 1:].reshape(-1)[CHOSEN]
    assert found is not None and found[2] == 1
    assert found.tolist() == (likeliest == labels).float().tolist()
    assert 0 < found.mean() < 1


def test_without_gradient_nothing_is_kept(model: PreTrainedModel) -> None:
    with torch.no_grad():
        logprobs, figure = Scorer(model)(inputs(), CHOSEN, expected=-0.25)
    assert not logprobs.requires_grad and figure is None


def test_no_chosen_token_is_no_gradient(model: PreTrainedModel) -> None:
    logprobs, _ = Scorer(model)(inputs(), CHOSEN[:0])
    assert logprobs.shape == (0,)
    found = gradients(model, logprobs.sum())
    assert all(value.abs().max() == 0 for value in found.values())


def test_a_family_that_does_more_after_its_head_keeps_its_own_logits(model: PreTrainedModel) -> None:
    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.clone()
            output.logits[..., 0] += 3
            return output

    model.__class__ = Shifted
    batch, scorer = inputs(), Scorer(model)
    logprobs, _ = scorer(batch, CHOSEN, dtype=torch.float64)
    whole = sequence_logprobs(model, batch["input_ids"], batch["attention_mask"], dtype=torch.float64)
    assert scorer._has_plain_head is False
    torch.testing.assert_close(logprobs, whole.reshape(-1)[CHOSEN], rtol=0, atol=1e-12)
    ours, theirs = (gradients(model, value.sum()) for value in (logprobs, whole.reshape(-1)[CHOSEN]))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-12) for name in theirs)


def test_half_precision_compute_is_that_of_autocast(model: PreTrainedModel) -> None:
    model.float()
    batch, scorer = inputs(), Scorer(model)
    scorer(batch, CHOSEN)
    found = {}
    for expected in (None, -0.25):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = scorer(batch, CHOSEN, expected=expected)
        found[expected] = gradients(model, -0.25 * logprobs.sum())
    with torch.autocast("cpu", torch.bfloat16):
        whole = sequence_logprobs(model, batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(logprobs, whole.reshape(-1)[CHOSEN], rtol=0, atol=1e-6)
    theirs = gradients(model, -0.25 * whole.reshape(-1)[CHOSEN].sum())
    for name, value in theirs.items():
        assert found[None][name].dtype == torch.float32
        scale = value.abs().max()
        assert (found[None][name] - value).abs().max() <= 0.02 * scale, name
        assert (found[-0.25][name] - value).abs().max() <= 0.02 * scale, name
