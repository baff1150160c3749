"""Log-probabilities of chosen tokens, chunk by chunk: the values and gradients of the whole logits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_core.models import scorer as scorers
from cosmos_core.models.recompute import recompute_activations
from cosmos_core.models.scorer import LogprobScorer, RequestedOutputs, choose_chunk_bytes
from tests.unit.trainers import sequence_logprobs

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_implementation": "eager",
}  # fmt: skip
FAMILIES = {
    "tied": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "untied": (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES)),
    "soft caps": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**SIZES, head_dim=8)),
    "divided logits": (hf.GraniteForCausalLM, hf.GraniteConfig(**SIZES, logits_scaling=3.0)),
    "multiplied logits": (hf.CohereForCausalLM, hf.CohereConfig(**SIZES, logit_scale=0.5)),
}
CHOSEN = torch.tensor([0, 3, 5, 18, 19, 40, 41, 56])


CHUNK_BYTES = 4 * 500 * 3
"""Three tokens."""
EVERYTHING = RequestedOutputs(0.7, entropy="gradient", top_k=4)


PLAIN = {"tied", "soft caps"}
"""What no family does in its own way: a head that is shared, and logits that are changed behind a head."""


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    cls, config = FAMILIES[request.param]
    made: hf.PreTrainedModel = cls(config).double()
    return made


FEW = pytest.mark.parametrize(
    "model", [pytest.param(n, marks=[pytest.mark.full] * (n not in PLAIN)) for n in FAMILIES], indirect=True
)


def inputs() -> dict[str, Tensor]:
    ids = torch.randint(500, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model: hf.PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(model: hf.PreTrainedModel, wants: RequestedOutputs, top_ids: Tensor | None = None) -> dict[str, Tensor]:
    """The oracle: all logits at once, and autograd."""
    batch = inputs()
    logits = model(**batch).logits[:, :-1].reshape(-1, 500)[CHOSEN].double()
    logprobs = (logits / wants.temperature).log_softmax(-1)
    labels = batch["input_ids"][:, 1:].reshape(-1)[CHOSEN]
    ids = logprobs.topk(wants.top_k).indices if top_ids is None else top_ids
    return {
        "logprobs": logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "top_logprobs": logprobs.gather(-1, ids),
        "top_ids": ids,
    }


def scorer_of(model: hf.PreTrainedModel) -> LogprobScorer:
    return LogprobScorer(model, CHUNK_BYTES)


def random_like(found: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(value.shape, generator=generator, dtype=torch.float64) for name, value in found.items()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    "wants",
    [RequestedOutputs(0.7), RequestedOutputs(entropy="gradient"), RequestedOutputs(top_k=4), EVERYTHING],
    ids=repr,
)
def test_all_outputs_and_their_gradients_are_those_of_the_whole_logits(
    model: hf.PreTrainedModel, wants: RequestedOutputs
) -> None:
    scorer = scorer_of(model)
    found = scorer(inputs(), CHOSEN, output_request=wants, dtype=torch.float64)
    assert scorer._are_logits_plain_head_output is True, "the head of this family is known"
    theirs = whole(model, wants)
    assert found.keys() == {
        "logprobs", *["entropy"] * bool(wants.entropy), *["top_logprobs", "top_ids"] * (wants.top_k > 0),
    }  # fmt: skip
    assert_close(found, {name: theirs[name] for name in found})
    weights = {name: weight for name, weight in random_like(theirs).items() if name in found and name != "top_ids"}
    ours = gradients(model, sum((found[name] * weight).sum() for name, weight in weights.items()))
    assert_close(ours, gradients(model, sum((theirs[name] * weight).sum() for name, weight in weights.items())))


@FEW
def test_ids_of_the_caller_are_scored_in_place_of_the_likeliest(model: hf.PreTrainedModel) -> None:
    ids = torch.randint(500, (len(CHOSEN), 5), generator=torch.Generator().manual_seed(3))
    ids[:, 1] = ids[:, 0]  # the same twice
    found = scorer_of(model)(inputs(), CHOSEN, dtype=torch.float64, top_ids_NK=ids)
    theirs = whole(model, RequestedOutputs(), ids)
    del theirs["entropy"]
    assert_close(found, theirs)
    weight = random_like(theirs)["top_logprobs"]
    ours = gradients(model, (found["top_logprobs"] * weight).sum())
    assert_close(ours, gradients(model, (theirs["top_logprobs"] * weight).sum()))


@FEW
def test_a_head_that_says_nothing_is_uniform(model: hf.PreTrainedModel) -> None:
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    wants = RequestedOutputs(entropy="value", is_argmax=True)
    found = scorer_of(model)(inputs(), CHOSEN, output_request=wants, dtype=torch.float64)
    for name, value in (("logprobs", -math.log(500)), ("entropy", math.log(500)), ("is_argmax", 1.0)):
        assert found[name].tolist() == pytest.approx([value] * len(CHOSEN), rel=1e-12)


GUESSES = ("unknown", "right", "one wrong")
DERIVATIVE = torch.linspace(-1, 2, len(CHOSEN)).double()


def guessed(guess: str) -> Tensor | None:
    wrong = torch.cat([DERIVATIVE[:-1], DERIVATIVE[-1:] * (1 + 1e-15)])
    return {"unknown": None, "right": DERIVATIVE, "one wrong": wrong}[guess]


@FEW
@pytest.mark.parametrize("guess", GUESSES)
def test_a_guess_of_the_derivative_changes_no_gradient(model: hf.PreTrainedModel, guess: str) -> None:
    wants = RequestedOutputs(0.7, entropy="value")
    found = scorer_of(model)(
        inputs(), CHOSEN, output_request=wants, dtype=torch.float64, loss_gradient_N=guessed(guess)
    )
    assert found["logprobs"].requires_grad and not found["entropy"].requires_grad, "it is for a metric"
    theirs = whole(model, EVERYTHING)
    assert_close(found, {name: theirs[name] for name in ("logprobs", "entropy")})
    ours = gradients(model, (DERIVATIVE * found["logprobs"]).sum())
    assert_close(ours, gradients(model, (DERIVATIVE * theirs["logprobs"]).sum()))


@FEW
@pytest.mark.parametrize("guess", GUESSES)
def test_a_right_guess_saves_the_second_run_of_the_head(model: hf.PreTrainedModel, guess: str) -> None:
    runs: list[int] = []
    scorer = scorer_of(model)
    scorer(inputs(), CHOSEN)
    model.get_output_embeddings().register_forward_hook(lambda *_: runs.append(1))
    settings: dict[str, Any] = {"dtype": torch.float64, "loss_gradient_N": guessed(guess)}
    # Eight tokens are three chunks.
    for wants, count in ((RequestedOutputs(), 3 if guess == "right" else 6), (RequestedOutputs(top_k=2), 6)):
        runs.clear()
        (DERIVATIVE * scorer(inputs(), CHOSEN, output_request=wants, **settings)["logprobs"]).sum().backward()
        assert len(runs) == count


@FEW
def test_a_label_is_at_the_top_where_the_whole_logits_have_their_largest_value_at_it(model: hf.PreTrainedModel) -> None:
    batch = inputs()
    with torch.no_grad():
        likeliest = model(**batch).logits[:, :-1].argmax(-1).reshape(-1)[CHOSEN]
        row, position = divmod(int(CHOSEN[2]), batch["input_ids"].shape[1] - 1)
        # The next token becomes the likeliest; a causal model says the same of that position.
        batch["input_ids"][row, position + 1] = likeliest[2]
        likeliest = model(**batch).logits[:, :-1].argmax(-1).reshape(-1)[CHOSEN]
        found = scorer_of(model)(batch, CHOSEN, output_request=RequestedOutputs(is_argmax=True))["is_argmax"]
    labels = batch["input_ids"][:, 1:].reshape(-1)[CHOSEN]
    assert found[2] == 1
    assert found.tolist() == (likeliest == labels).float().tolist()
    assert 0 < found.mean() < 1


@FEW
def test_without_gradient_nothing_is_kept(model: hf.PreTrainedModel) -> None:
    with torch.no_grad():
        found = scorer_of(model)(inputs(), CHOSEN, loss_gradient_N=DERIVATIVE)
    assert list(found) == ["logprobs"] and not found["logprobs"].requires_grad


@FEW
def test_no_chosen_token_is_no_gradient(model: hf.PreTrainedModel) -> None:
    wants = RequestedOutputs(entropy="gradient", top_k=3, is_argmax=True)
    found = scorer_of(model)(
        inputs(), CHOSEN[:0], output_request=wants, dtype=torch.float64, loss_gradient_N=DERIVATIVE[:0]
    )
    assert {name: (tuple(value.shape), value.dtype) for name, value in found.items()} == {
        "logprobs": ((0,), torch.float64), "entropy": ((0,), torch.float64), "top_logprobs": ((0, 3), torch.float64),
        "top_ids": ((0, 3), torch.int64), "is_argmax": ((0,), torch.float64),
    }  # fmt: skip
    none = gradients(model, found["logprobs"].sum() + found["entropy"].sum() + found["top_logprobs"].sum())
    assert all(value.abs().max() == 0 for value in none.values())


@FEW
def test_a_family_that_does_more_after_its_head_keeps_its_own_logits(model: hf.PreTrainedModel) -> None:
    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.clone()
            output.logits[..., 0] += 3
            return output

    model.__class__ = Shifted
    scorer = scorer_of(model)
    found = scorer(inputs(), CHOSEN, output_request=EVERYTHING, dtype=torch.float64)
    theirs = whole(model, EVERYTHING)
    assert scorer._are_logits_plain_head_output is False
    assert_close(found, theirs)
    del theirs["top_ids"]
    ours, expected = (gradients(model, sum(each[name].sin().sum() for name in theirs)) for each in (found, theirs))
    assert_close(ours, expected)


@FEW
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sequences_have_the_log_probabilities_of_transformers_whatever_the_padding_side(
    model: hf.PreTrainedModel, temperature: float
) -> None:
    model.float().eval()  # eager masks of float64 overflow where a row is all padding
    sequences = [[5, 9, 200, 31, 7], [44, 3, 120]]
    with torch.no_grad():
        expected = [
            (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
            for ids in sequences
        ]
        right = torch.tensor([sequences[0], [*sequences[1], 256, 256]])
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        on_right = sequence_logprobs(model, right, mask, temperature=temperature)
        left = torch.tensor([sequences[0], [256, 256, *sequences[1]]])
        on_left = sequence_logprobs(model, left, mask.flip(-1), temperature=temperature)
    torch.testing.assert_close(on_right[0], expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(on_right[1], torch.cat([expected[1], torch.zeros(2)]), atol=1e-5, rtol=0)
    torch.testing.assert_close(on_left[1], torch.cat([torch.zeros(2), expected[1]]), atol=1e-5, rtol=0)


@FEW
def test_half_precision_compute_is_that_of_autocast(model: hf.PreTrainedModel) -> None:
    model.float()
    scorer = scorer_of(model)
    scorer(inputs(), CHOSEN)
    found = {}
    for is_known in (False, True):
        expected = torch.full((len(CHOSEN),), -0.25) if is_known else None
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = scorer(inputs(), CHOSEN, loss_gradient_N=expected)["logprobs"]
        found[is_known] = gradients(model, -0.25 * logprobs.sum())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs()).logits[:, :-1].reshape(-1, 500)[CHOSEN].float()
    labels = inputs()["input_ids"][:, 1:].reshape(-1, 1)[CHOSEN]
    expected_logprobs = logits.log_softmax(-1).gather(-1, labels).squeeze(-1)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-6)
    theirs = gradients(model, -0.25 * expected_logprobs.sum())
    for name, value in theirs.items():
        assert found[False][name].dtype == torch.float32
        scale = value.abs().max()
        assert (found[False][name] - value).abs().max() <= 0.02 * scale, name
        assert (found[True][name] - value).abs().max() <= 0.02 * scale, name


def test_the_head_is_cast_once_whatever_the_number_of_chunks() -> None:
    """Counted by the copies of its size that a pass makes."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].shape == (500, 32):
                self.count += kwargs["dtype"] == torch.bfloat16
            return func(*args, **(kwargs or {}))

    scorer = scorer_of(model)
    scorer(inputs(), CHOSEN)
    for expected, count in ((torch.full((len(CHOSEN),), -0.25), 1), (None, 2)):
        with Casts() as casts:
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = scorer(inputs(), CHOSEN, loss_gradient_N=expected)["logprobs"]
            (-0.25 * logprobs.sum()).backward()
        assert casts.count == count


def test_the_first_pass_of_a_scorer_can_be_recomputed_in_half_precision() -> None:
    """The probe before it must leave no casts in autocast's cache, which selective recomputation would miss."""
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM._from_config(hf.Qwen3Config(**SIZES, head_dim=8), attn_implementation="sdpa").train()
    found = []
    for how in (False, "selective"):
        recompute_activations(model, how)
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = scorer_of(model)(inputs(), CHOSEN)["logprobs"]
        found.append(gradients(model, logprobs.sum()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_trained_head_in_half_precision_sums_its_chunks_in_float32() -> None:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16()
    chosen = torch.arange(57)
    found = []
    for size in (4 * 500, 1 << 30):  # one token a chunk, and all
        logprobs = LogprobScorer(model, size)({"input_ids": inputs()["input_ids"]}, chosen)["logprobs"]
        found.append(gradients(model, logprobs.sum())["lm_head.weight"].float())
    assert (found[0] - found[1]).abs().max() <= 2**-7 * found[1].abs().max()


def test_the_size_of_a_chunk_follows_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib, mib in ((2, 64), (8, 128), (24, 256), (31.5, 256), (32, 512), (500, 1024)):
        monkeypatch.setattr(scorers.psutil, "virtual_memory", lambda gib=gib: SimpleNamespace(total=int(gib * 2**30)))
        assert choose_chunk_bytes(torch.device("cpu")) == mib << 20


def test_the_first_pass_runs_where_its_tokens_are() -> None:
    """With `fsdp_offload` the first weight of a pipeline stage is in host memory until its block runs."""
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)).eval()
    expected = LogprobScorer(model)(inputs(), CHOSEN)["logprobs"]
    model.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(1, device="meta")))
    assert model.device.type == "meta"
    assert torch.equal(LogprobScorer(model)(inputs(), CHOSEN)["logprobs"], expected)


@FEW
def test_the_most_likely_ids_are_at_most_the_rows_of_the_head(model: hf.PreTrainedModel) -> None:
    scorer = scorer_of(model)
    scorer.num_token_ids = 600  # the tokenizer has ids that the model lacks
    found = scorer(inputs(), CHOSEN, output_request=RequestedOutputs(top_k=550), dtype=torch.float64)
    assert found["top_ids"].shape == (len(CHOSEN), 500)
