"""Our losses and TRL's, on the same random tensors, in float64.

TRL's GRPO loss lives in a method of its trainer. It is called here on a stand-in that holds the attributes that it
reads and hands it our log-probabilities in place of a model's. Which of its settings are ours:

    ours                                        TRL
    token-mean                                  loss_type "bnpo" (one micro-batch) or "dapo" (any split)
    seq-mean-token-mean                         "grpo"
    ... with unbiased_loss_max_tokens           "dr_grpo" with max_completion_length
    seq-mean-token-sum                          "luspo"
    lower_bound_ratio                           delta (the same while delta > 1 + epsilon_high)
    unbiased_kl_estimate                        use_bias_correction_kl
    unbiased_advantage                          scale_rewards "none"
    advantages over the population std + 1e-6   "group": over the sample std (n - 1) + 1e-4

TRL counts sequences without tokens in its means and divides micro-batches by their number; ours does neither, so the
comparison uses sequences with tokens and, but for "dapo", whole batches.

B sequences, T tokens, V vocabulary, G answers of a group.
"""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from cosmos_core.algorithms.aggregate import add_metrics, aggregate_loss, compute_denominator, compute_means
from cosmos_core.algorithms.correction import ImportanceWeightRule, importance_weights
from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import PolicyLossInputs, policy_loss
from cosmos_core.algorithms.selection import high_entropy_masks
from cosmos_core.algorithms.sft import sft_loss
from cosmos_core.data.sample import Sample
from cosmos_core.models.scorer import LogprobScorer, RequestedOutputs

MAX_TOKENS = 12
ACCELERATOR = SimpleNamespace(
    num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, pad_across_processes=lambda x, **_: x
)


def random_batch(seed=0):
    """Six answers to a vocabulary of seven, with old and reference policies far enough for every clip to act."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"dtype": torch.float64, "generator": generator}
    logits_BTV = (2 * torch.randn(6, 8, 7, **shape)).requires_grad_()
    ids_BT = torch.randint(7, (6, 8), generator=generator)
    mask_BT = (torch.arange(8) < torch.tensor([8, 1, 5, 3, 7, 2]).unsqueeze(-1)).long()
    logprobs_BTV = logits_BTV.log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)
    old_BT = logprobs_BT.detach() + 0.8 * torch.randn(6, 8, **shape)
    ref_BT = logprobs_BT.detach() + torch.randn(6, 8, **shape)
    entropy_BT = -(logprobs_BTV.exp() * logprobs_BTV).sum(-1).detach()
    return logits_BTV, PolicyLossInputs(logprobs_BT, torch.randn(6, **shape), mask_BT, old_BT, ref_BT, entropy_BT)


def trl_loss(inputs, loss_type, settings, accumulation=1, num_tokens=0, **others):
    """GRPOTrainer's loss of one micro-batch, and its metrics."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # imported here: it takes eight seconds

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs.logprobs_BT, inputs.entropy_BT, None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=ACCELERATOR,
        args=SimpleNamespace(
            delta=settings.lower_bound_ratio,
            steps_per_generation=accumulation,
            use_bias_correction_kl=settings.unbiased_kl_estimate,
            sapo_temperature_pos=settings.sapo_temperature_pos,
            sapo_temperature_neg=settings.sapo_temperature_neg,
        ),
        aux_loss_enabled=False,
        beta=settings.kl_beta,
        current_gradient_accumulation_steps=accumulation,
        epsilon_high=settings.epsilon_high,
        epsilon_low=settings.epsilon_low,
        importance_sampling_level="token",
        loss_type=loss_type,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )
    vars(trainer).update(others)
    ids_BT = torch.zeros_like(inputs.mask_BT)
    batch = {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": ids_BT[:, :1],
        "completion_ids": ids_BT,
        "completion_mask": inputs.mask_BT,
        "advantages": inputs.advantages_B,
        "old_per_token_logps": inputs.old_logprobs_BT,
        "ref_per_token_logps": inputs.ref_logprobs_BT,
        "num_items_in_batch": torch.tensor(num_tokens),
        "importance_sampling_ratio": inputs.weights_BT,
    }
    if inputs.rollout_logprobs_BT is not None:
        batch["sampling_per_token_logps"] = inputs.rollout_logprobs_BT
    return GRPOTrainer._compute_loss(trainer, None, batch), trainer._metrics["train"]


def our_loss(inputs, loss_type, settings, max_tokens=None):
    result = policy_loss(inputs, settings)
    d = compute_denominator(loss_type, inputs.mask_BT.sum(-1).tolist(), max_tokens)
    return aggregate_loss(result.loss_BT, inputs.mask_BT, loss_type, d, max_tokens), compute_means(result.metrics)


@pytest.mark.parametrize(
    ("loss_type", "max_tokens", "trl_type"),
    [
        ("token-mean", None, "bnpo"),
        ("seq-mean-token-mean", None, "grpo"),
        ("seq-mean-token-mean", MAX_TOKENS, "dr_grpo"),
        ("seq-mean-token-sum", None, "luspo"),
    ],
)
@pytest.mark.parametrize(("beta", "unbiased"), [(0.0, False), (0.2, False), (0.2, True)])
def test_grpo_loss_and_metrics_equal_trl(loss_type, max_tokens, trl_type, beta, unbiased):
    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=beta, unbiased_kl_estimate=unbiased)
    logits_BTV, inputs = random_batch()
    metrics, expected = assert_like_trl(inputs, logits_BTV, settings, loss_type, trl_type, max_tokens)
    assert metrics["clip_high"] == pytest.approx(expected["clip_ratio/high_mean"][0], rel=1e-6)
    assert metrics["clip_low"] == pytest.approx(expected["clip_ratio/low_mean"][0], rel=1e-6)
    assert metrics["entropy"] == pytest.approx(expected["entropy"][0], rel=1e-12)
    assert metrics["clip_high"] > 0 and metrics["clip_low"] > 0
    if beta and not unbiased:  # TRL reports the KL after, we before the ratio
        assert metrics["kl"] == pytest.approx(expected["kl"][0], rel=1e-12)


def assert_like_trl(inputs, logits_BTV, settings, loss_type, trl_type, max_tokens=None, **others):
    """Compare loss and gradient, and return the metrics of both."""
    loss, metrics = our_loss(inputs, loss_type, settings, max_tokens)
    expected, theirs = trl_loss(inputs, trl_type, settings, num_tokens=int(inputs.mask_BT.sum()), **others)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(value, logits_BTV, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)
    return metrics, theirs


def test_gspo_equals_trl():
    settings = PolicySettings(0.1, 0.15, 100.0, objective="gspo")
    logits_BTV, inputs = random_batch()
    by_sequence = {"importance_sampling_level": "sequence"}
    metrics, _ = assert_like_trl(inputs, logits_BTV, settings, "seq-mean-token-mean", "grpo", **by_sequence)
    assert metrics["clip_high"] + metrics["clip_low"] > 0


def test_cispo_equals_trl():
    settings = PolicySettings(objective="cispo", ratio_cap=1.4)
    logits_BTV, inputs = random_batch()
    metrics, _ = assert_like_trl(inputs, logits_BTV, settings, "token-mean", "cispo", epsilon_high=1.4)
    assert metrics["clip_high"] > 0


@pytest.mark.parametrize("temperatures", [(1.0, 1.0625), (0.25, 2.0)])  # TRL rounds them to float32
def test_sapo_equals_trl(temperatures):
    settings = PolicySettings(
        objective="sapo", sapo_temperature_pos=temperatures[0], sapo_temperature_neg=temperatures[1], kl_beta=0.1
    )
    for seed in range(5):
        logits_BTV, inputs = random_batch(seed)
        assert_like_trl(inputs, logits_BTV, settings, "seq-mean-token-mean", "sapo")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_mask_of_high_entropy_equals_trl(share):
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=0.1)
    for seed in range(5):
        logits_BTV, inputs = random_batch(seed)
        inputs = replace(inputs, entropy_BT=inputs.entropy_BT.float())  # TRL's quantile is of float32
        masks = [np.concatenate([[0], row]).astype(np.uint8) for row in inputs.mask_BT.numpy()]
        samples = [Sample(np.arange(len(mask)), mask) for mask in masks]
        kept_BT = torch.stack(high_entropy_masks(samples, list(inputs.entropy_BT), share))
        assert 0 < kept_BT.sum() < inputs.mask_BT.sum()
        trl = {"accelerator": ACCELERATOR, "top_entropy_quantile": share}
        trl["get_high_entropy_mask"] = partial(GRPOTrainer.get_high_entropy_mask, SimpleNamespace(**trl))
        loss, _ = our_loss(replace(inputs, weights_BT=kept_BT.double()), "token-mean", settings)
        expected, _ = trl_loss(inputs, "bnpo", settings, **trl)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = [torch.autograd.grad(value, logits_BTV, retain_graph=True)[0] for value in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_the_off_policy_mask_equals_trl():
    settings = PolicySettings(0.2, 0.28, 3.0, off_policy_masking_delta=0.05)
    logits_BTV, inputs = random_batch(seed=1)
    rollout_BT = inputs.old_logprobs_BT + 0.3
    inputs = replace(inputs, rollout_logprobs_BT=rollout_BT)
    metrics, _ = assert_like_trl(inputs, logits_BTV, settings, "token-mean", "bnpo", off_policy_mask_threshold=0.05)
    assert 0 < metrics["off_policy_masked"] < 1


@pytest.mark.parametrize("rule", ["truncate", "mask", "sequence-truncate", "sequence-mask"])
def test_weights_for_tokens_of_the_engine_equal_trl(rule):
    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=0.1)
    logits_BTV, inputs = random_batch(seed=2)
    noise_BT = 0.4 * torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    rollout_BT, mask_BT = inputs.old_logprobs_BT - noise_BT, inputs.mask_BT
    weights_BT, metrics = importance_weights(
        inputs.old_logprobs_BT, rollout_BT, mask_BT, ImportanceWeightRule(rule, 0.8, 1.5)
    )
    noise_BT = noise_BT * mask_BT
    if rule.startswith("sequence"):
        noise_BT = noise_BT.sum(-1, keepdim=True).expand_as(noise_BT)
    ratio_BT = noise_BT.exp()
    is_out_BT = (ratio_BT < 0.8) | (ratio_BT > 1.5)
    expected_BT = ratio_BT.clamp(max=1.5) if "truncate" in rule else ratio_BT.masked_fill(is_out_BT, 0.0)
    torch.testing.assert_close(weights_BT, expected_BT * mask_BT)
    assert compute_means(metrics)["rollout/weight_capped"] > 0
    weighted = replace(inputs, weights_BT=weights_BT)
    assert_like_trl(
        weighted, logits_BTV, settings, "token-mean", "bnpo", use_vllm=True, vllm_importance_sampling_correction=True
    )


def test_the_dual_clip_bites_in_the_comparison_with_delta():
    logits_BTV, inputs = random_batch(seed=3)
    metrics, _ = assert_like_trl(inputs, logits_BTV, PolicySettings(0.2, 0.28, 1.5), "token-mean", "bnpo")
    assert metrics["clip_dual"] > 0


def test_micro_batches_add_up_to_what_trl_gets_with_dapo():
    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=0.2)
    _, inputs = random_batch()
    num_tokens = int(inputs.mask_BT.sum())
    ours, theirs, metrics = 0.0, 0.0, {}
    for start in range(0, 6, 2):
        rows = slice(start, start + 2)
        given = {name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__}
        part = PolicyLossInputs(**{name: value[rows] for name, value in given.items() if value is not None})
        result = policy_loss(part, settings)
        ours += aggregate_loss(result.loss_BT, part.mask_BT, "token-mean", num_tokens).item()
        theirs += trl_loss(part, "dapo", settings, accumulation=3, num_tokens=num_tokens)[0].item()
        metrics = add_metrics(metrics, result.metrics)
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert compute_means(metrics) == pytest.approx(our_loss(inputs, "token-mean", settings)[1], rel=1e-12)


def test_on_the_first_update_trl_and_we_take_the_policy_itself_as_the_old_one():
    logits_BTV, inputs = random_batch()
    first = PolicyLossInputs(inputs.logprobs_BT, inputs.advantages_B, inputs.mask_BT, entropy_BT=inputs.entropy_BT)
    assert_like_trl(first, logits_BTV, PolicySettings(), "token-mean", "bnpo")


def test_log_probabilities_and_entropy_equal_trls_selective_log_softmax():
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model, ids_BT, _ = sft_batch()
    logits_BSV, labels_BS = model(ids_BT).logits[:, :-1], ids_BT[:, 1:]
    chosen_N = torch.arange(labels_BS.numel())
    for temperature in (1.0, 0.7):
        wants = RequestedOutputs(temperature, entropy="value")
        found = LogprobScorer(model)({"input_ids": ids_BT}, chosen_N, output_request=wants, dtype=torch.float64)
        theirs_BS = selective_log_softmax(logits_BSV, labels_BS, temperature)
        torch.testing.assert_close(found["logprobs"].view_as(theirs_BS), theirs_BS, rtol=0, atol=1e-13)
        theirs_BS = entropy_from_logits(logits_BSV / temperature)
        torch.testing.assert_close(found["entropy"].view_as(theirs_BS), theirs_BS.detach(), rtol=0, atol=1e-13)


def sft_batch():
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    ids_BT = torch.randint(32, (4, 10))
    labels_BT = ids_BT.masked_fill(torch.rand(4, 10) < 0.4, -100)
    labels_BT[2] = -100
    return model, ids_BT, labels_BT


def our_sft_loss(model, ids_BT, labels_BT, num_labels):
    targets_BT = labels_BT[:, 1:]
    mask_BT = targets_BT != -100
    found = LogprobScorer(model)({"input_ids": ids_BT}, torch.arange(targets_BT.numel()), dtype=torch.float64)
    logprobs_BT = found["logprobs"].view_as(targets_BT)
    return sft_loss(logprobs_BT, mask_BT, num_labels)[0]


def gradients(loss, model):
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("peer", ["transformers", "trl"])
def test_sft_loss_and_gradient_equal_those_of_the_peers_however_the_step_is_split(peer):
    from trl.trainer.utils import add_fused_lm_head

    model, ids_BT, labels_BT = sft_batch()
    num_labels = int((labels_BT[:, 1:] != -100).sum())
    loss = our_sft_loss(model, ids_BT, labels_BT, compute_denominator("token-mean", [num_labels]))
    gradient = gradients(loss, model)
    parts = [our_sft_loss(model, ids_BT[k : k + 1], labels_BT[k : k + 1], num_labels) for k in range(4)]
    if peer == "trl":  # what SFTTrainer trains with
        add_fused_lm_head(model)
        expected = model(ids_BT, labels=labels_BT, fused_lm_head=True, num_items_in_batch=num_labels).loss
    else:
        expected = ForCausalLMLoss(model(ids_BT).logits, labels_BT, 32, num_items_in_batch=torch.tensor(num_labels))
    # Both peers compute the log-softmax in float32, whatever the model.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (gradient - gradients(expected, model)).abs().max() <= 1e-6 * gradient.abs().max()
    assert sum(part.item() for part in parts) == pytest.approx(loss.item(), rel=1e-12)
