"""The engine on the trainer's module against transformers' own `generate`, and the pieces that both engines share."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cosmos_core.algorithms.grpo import make_sample
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError, DataError, ModelError
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.rollout import hf
from cosmos_core.rollout.base import EngineSettings, generate, request_seed
from cosmos_core.rollout.hf import HfEngine, process_logits
from cosmos_core.rollout.registry import check_engine, make_engine
from cosmos_core.rollout.sample_tokens import sample_tokens
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.types import Group, Prompt, Sampling
from tests.cells import full
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import logprobs, sequence_logprobs, trainer_of

PROMPTS = [Prompt(id=i, token_ids=tuple((13 * i + 7 * j) % 250 for j in range(3 + 2 * i)), text="", reference="")
           for i in range(5)]  # fmt: skip
SAMPLED = Sampling(temperature=1.0, max_tokens=12, num_completions=3, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(str(folder), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, folder: Path) -> HfEngine:
    tokenizer = load_tokenizer(str(folder))
    return HfEngine(EngineSettings(model, tokenizer, str(folder), RolloutConfig(), 64, torch.float32))


def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
    return [c.token_ids for group in groups for c in group.completions]


@pytest.mark.parametrize("penalty", [1.3, *full(1.0)])
def test_greedy_answers_are_those_of_generate(engine: HfEngine, model: Any, penalty: float) -> None:
    sampling = Sampling(temperature=0, repetition_penalty=penalty, max_tokens=12)
    for group in generate(engine, PROMPTS, sampling, step=0):
        ids = torch.tensor([group.prompt.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, repetition_penalty=penalty
        )
        assert list(group.completions[0].token_ids) == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [0.7, *full(1.0)])
def test_logprobs_are_those_of_the_trainer(engine: HfEngine, model: PreTrainedModel, temperature: float) -> None:
    for group in generate(engine, PROMPTS, dataclasses.replace(SAMPLED, temperature=temperature), step=4):
        for answer in group.completions:
            ids = torch.tensor([group.prompt.token_ids + answer.token_ids])
            with torch.no_grad():
                expected = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=temperature)
            found = torch.tensor(answer.logprobs)
            assert (expected[0, -len(answer.token_ids) :] - found).abs().max() < 1e-5


def test_answers_depend_on_seed_and_step_alone_not_on_the_batch(engine: HfEngine) -> None:
    state = torch.get_rng_state()
    everything = generate(engine, PROMPTS, SAMPLED, step=4)
    assert torch.equal(state, torch.get_rng_state())
    assert tokens(generate(engine, PROMPTS, SAMPLED, step=4)) == tokens(everything)
    assert tokens(generate(engine, PROMPTS[1:3], SAMPLED, step=4)) == tokens(everything[1:3])
    fewer = dataclasses.replace(SAMPLED, num_completions=1)
    assert tokens(generate(engine, PROMPTS, fewer, step=4)) == [g.completions[0].token_ids for g in everything]
    assert tokens(generate(engine, PROMPTS, SAMPLED, step=5)) != tokens(everything)
    assert tokens(generate(engine, PROMPTS, dataclasses.replace(SAMPLED, seed=2), step=4)) != tokens(everything)
    assert len(set(tokens(everything))) == len(PROMPTS) * SAMPLED.num_completions


def test_a_group_may_be_generated_in_several_batches(engine: HfEngine, model: PreTrainedModel, folder: Path) -> None:
    forward, sizes = model.forward, []

    def counted(**inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        return forward(**inputs)

    settings = EngineSettings(model, load_tokenizer(str(folder)), str(folder), RolloutConfig(n_generation_mini_batch=2),
                              64, torch.float32)  # fmt: skip
    model.forward = counted  # type: ignore[method-assign]
    try:
        found = generate(HfEngine(settings), PROMPTS, SAMPLED, 3)
    finally:
        model.forward = forward  # type: ignore[method-assign]
    assert tokens(found) == tokens(generate(engine, PROMPTS, SAMPLED, 3))
    assert max(sizes) == 2 * len(PROMPTS)


def test_an_answer_ends_with_its_end_token_or_at_the_limit(engine: HfEngine, folder: Path) -> None:
    eos = load_tokenizer(str(folder)).eos_token_id
    answers = [
        answer
        for step in range(3)
        for group in generate(engine, PROMPTS, dataclasses.replace(SAMPLED, temperature=3.0, max_tokens=30), step)
        for answer in group.completions
    ]
    stopped = [a for a in answers if a.finish_reason == "stop"]
    assert stopped and all(a.token_ids[-1] == eos and eos not in a.token_ids[:-1] for a in stopped)
    assert all("<|im_end|>" not in a.text and len(a.logprobs) == len(a.token_ids) for a in answers)
    assert all(len(a.token_ids) == 30 and eos not in a.token_ids for a in answers if a.finish_reason == "length")


def test_rows_that_have_ended_leave_the_batch_and_change_no_other(
    engine: HfEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_stop_token_ids", list(range(0, 250, 12)))  # a completion in twelve tokens ends
    monkeypatch.setattr(hf, "_MIN_CACHE_GROWTH_TOKENS", 4)  # room is made again and again
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, arguments, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    sampling = dataclasses.replace(SAMPLED, max_tokens=40)
    try:
        found = generate(engine, PROMPTS, sampling, step=3)
        shrinking, sizes[:] = sizes[:], []
        with monkeypatch.context() as patch:
            patch.setattr(hf, "DynamicLayer", None)  # no layer is replaced
            whole = generate(engine, PROMPTS, sampling, step=3)
    finally:
        hook.remove()
    assert tokens(found) == tokens(whole) and len(set(map(len, tokens(found)))) > 5
    for a, b in zip(found, whole, strict=True):
        for one, other in zip(a.completions, b.completions, strict=True):
            assert one.finish_reason == other.finish_reason
            torch.testing.assert_close(
                torch.tensor(one.segments[0].logprobs), torch.tensor(other.segments[0].logprobs), atol=1e-5, rtol=0
            )
    assert shrinking[0] == sizes[0] == len(PROMPTS) and set(sizes[1:]) == {15}
    assert shrinking[1:] == sorted(shrinking[1:], reverse=True) and len(set(shrinking[1:])) > 2


def test_a_prompt_may_have_image_tokens_of_which_the_head_knows_nothing() -> None:
    found = hf._make_used_token_mask(torch.tensor([[8, 2, 5]]), torch.tensor([[1, 1, 0]]), vocab_size=8)
    assert found.shape == (1, 8) and found.nonzero().tolist() == [[0, 2]]


def test_only_what_was_drawn_is_learned_whatever_its_ids_are(engine: HfEngine, folder: Path, tmp_path: Path) -> None:
    """An end token that is drawn is learned, one in a prompt or in the padding is not, and there may be none at all."""
    model, tokenizer = load_model(str(folder), dtype=torch.float32), load_tokenizer(str(folder))
    eos = tokenizer.eos_token_id
    prompts = [dataclasses.replace(p, token_ids=(p.token_ids[0], eos, *p.token_ids[1:])) for p in PROMPTS]
    hot = dataclasses.replace(SAMPLED, temperature=3.0, max_tokens=30, num_completions=10)

    def drawn(stops: bool) -> list[Group]:
        tokenizer.pad_token = "<|im_end|>" if stops else "<|endoftext|>"
        tokenizer.eos_token = "<|im_end|>" if stops else None
        model.generation_config.eos_token_id = eos if stops else None
        made = HfEngine(EngineSettings(model, tokenizer, str(folder), RolloutConfig(), 64, torch.float32))
        return generate(made, prompts, hot, 1)

    groups = drawn(stops=True)
    assert tokens(groups) == tokens(generate(engine, prompts, hot, 1)), "padding with the end token changes something"
    samples = [make_sample(group.prompt, made, 1.0, 1.0) for group in groups for made in group.completions]
    for group in groups:
        for made in group.completions:
            mask = make_sample(group.prompt, made, 1.0, 1.0).loss_mask.tolist()
            assert mask == [0] * len(group.prompt.token_ids) + [1] * len(made.token_ids)
    assert {made.finish_reason for group in groups for made in group.completions} == {"stop", "length"}
    train = TrainConfig.model_validate({"param_dtype": "float32", "sequence_packing": False})
    rows = logprobs(trainer_of(model, train, eos, ProgressWriter(tmp_path / "p.json")), samples, temperature=3.0)
    for sample, row in zip(samples, rows, strict=True):
        expected = torch.as_tensor(sample.rollout_logprobs)
        assert (row[torch.as_tensor(sample.loss_mask[1:]).bool()] - expected).abs().max() < 1e-5
    endless = [made for group in drawn(stops=False) for made in group.completions]
    assert {(made.finish_reason, made.num_sampled) for made in endless} == {("length", 30)}
    assert any(eos in made.token_ids for made in endless)


def test_prompt_and_answer_together_never_pass_the_longest_sequence(engine: HfEngine) -> None:
    long = Prompt(id=9, token_ids=tuple(range(60)), text="", reference="")
    short, cut = generate(engine, [PROMPTS[0], long], Sampling(temperature=0, max_tokens=10), step=0)
    assert len(cut.completions[0].token_ids) <= 4 < len(short.completions[0].token_ids)
    with pytest.raises(DataError, match=r"prompt 9 has 64 tokens.*fewer than 64, .*model_max_length = 64"):
        generate(engine, [dataclasses.replace(long, token_ids=tuple(range(64)))], SAMPLED, step=0)


def test_generating_leaves_the_mode_of_the_trainer_as_it_was(engine: HfEngine, model: PreTrainedModel) -> None:
    for training in (True, False):
        model.train(training)
        generate(engine, PROMPTS[:1], SAMPLED, step=0)
        assert model.training is training


def test_deterministic_training_leaves_sampling_possible_on_a_gpu(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, beats, forward = set[bool](), list[None](), engine._forward

    def look(*arguments: Any) -> torch.Tensor:
        modes.add(torch.is_deterministic_algorithms_warn_only_enabled())
        return forward(*arguments)

    monkeypatch.setattr(engine, "_forward", look)
    monkeypatch.setattr(engine, "_send_heartbeat", lambda: beats.append(None))
    torch.use_deterministic_algorithms(True)
    try:
        [group] = generate(engine, PROMPTS[:1], Sampling(num_completions=1, max_tokens=3, seed=1), 0)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == {True} and len(beats) == group.completions[0].num_sampled, "each pass is a sign of life"


def test_the_processed_distribution_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    logits, history = torch.randn(6, 40) * 3, torch.randint(0, 40, (6, 8))
    seen = torch.zeros(6, 40, dtype=torch.bool).scatter_(-1, history, True)
    sampling = Sampling(temperature=0.6, top_k=12, top_p=0.8, repetition_penalty=1.4)
    warpers: Any = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.6), TopKLogitsWarper(12), TopPLogitsWarper(0.8)
    ])  # fmt: skip
    expected = warpers(history, logits.clone()).log_softmax(-1)
    torch.testing.assert_close(process_logits(logits, seen, sampling), expected)


def test_draws_follow_the_distribution_and_never_take_an_impossible_token() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    n = 20_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = sample_tokens(probabilities.log().expand(n, -1), uniforms)
    assert (drawn.bincount(minlength=6) / n - probabilities).abs().max() < 1e-3
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(probabilities.log().expand(2, -1), edges).tolist() == [1, 4]


def test_logits_that_are_no_numbers_are_refused() -> None:
    logprobs = torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 0.0]]).log_softmax(-1)
    assert sample_tokens(logprobs[:1], torch.tensor([0.5], dtype=torch.float64)).tolist() == [2]
    assert sample_tokens(logprobs[:1], None).tolist() == [2], "the most probable one"
    for uniforms in (torch.tensor([0.5, 0.0], dtype=torch.float64), None):
        with pytest.raises(ModelError, match=r"not finite \(NaN\).*; set train.param_dtype = 'float32'"):
            sample_tokens(logprobs, uniforms)
        tokens = sample_tokens(logprobs, uniforms, torch.tensor([True, False]))
        assert tokens[0] == 2 and 0 <= tokens[1] < 3, "a finished row may hold anything"


def test_request_seeds_are_stable_and_all_different() -> None:
    digest = hashlib.sha256(b"42/7/3/0").digest()
    assert request_seed(42, 7, 3, 0) == int.from_bytes(digest, "big") >> 193
    seeds = {request_seed(s, t, p, k) for s in range(3) for t in range(8) for p in range(20) for k in range(8)}
    assert len(seeds) == 3 * 8 * 20 * 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_make_engine_gives_hf_and_keeps_to_the_positions_of_the_model(
    model: PreTrainedModel, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = RolloutConfig(backend="hf")
    tokenizer = load_tokenizer(str(folder))
    engine = make_engine(EngineSettings(model, tokenizer, str(folder), recipe, 4096, torch.float32))
    assert engine.name == "hf" and "256 positions, not at 4096" in caplog.text
    with pytest.raises(DataError, match="256"):
        generate(engine, [Prompt(id=0, token_ids=(1,) * 256, text="", reference="")], SAMPLED, step=0)


_SMALL: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "decoder_layers": 2, "pad_token_id": 0,
    "decoder_attention_heads": 4, "num_attention_heads": 4, "decoder_ffn_dim": 48, "intermediate_size": 48,
    "initializer_range": 0.3, "init_std": 0.3, "max_position_embeddings": 80,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (transformers.BartForCausalLM, transformers.BartConfig, {}),  # takes no positions
        (transformers.MambaForCausalLM, transformers.MambaConfig, {"state_size": 8}),  # another name of the cache
        *full((transformers.RobertaForCausalLM, transformers.RobertaConfig, {"pad_token_id": 1, "is_decoder": True})),
    ],
)
def test_models_without_padding_or_positions_get_prompts_of_one_length(
    model_class: Any, config_class: Any, options: dict[str, Any], folder: Path
) -> None:
    model = model_class(config_class(**_SMALL | options)).eval()
    engine = HfEngine(EngineSettings(model, load_tokenizer(str(folder)), "", RolloutConfig(), 64, torch.float32))
    for group in generate(engine, PROMPTS, SAMPLED, step=0):
        for answer in group.completions:
            ids = torch.tensor([group.prompt.token_ids + answer.token_ids])
            logprobs_V = (
                model(input_ids=ids, use_cache=False).logits[0, -len(answer.token_ids) - 1 : -1].log_softmax(-1)
            )
            expected = logprobs_V.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            # RoBERTa's positions leave out padding tokens, but with a cache they count the ones before the last token.
            num_compared = (*answer.token_ids, 1).index(1) + 1 if "is_decoder" in options else len(answer.token_ids)
            assert (expected - torch.tensor(answer.logprobs))[:num_compared].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_changes_the_logits_is_refused_in_any_dtype(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL | {"vocab_size": 20})).to(dtype).eval()
    settings = EngineSettings(model, load_tokenizer(str(folder)), "", RolloutConfig(), 64, dtype)
    HfEngine(settings)  # the vocabulary has fewer entries than the probe has tokens
    monkeypatch.setattr(hf._PreallocatedCacheLayer, "update", lambda self, keys, values: (keys, values))
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes other logits with a cache"):
        HfEngine(settings)


def test_a_cache_whose_rows_cannot_be_repeated_is_one_line(folder: Path) -> None:
    options = {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8}
    layers = ["heavily_compressed_attention", "sliding_attention"]
    config = transformers.DeepseekV4Config(**_SMALL | options, layer_types=layers, n_routed_experts=4, sliding_window=6)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with pytest.raises(
        ConfigError, match=r"DeepseekV4ForCausalLM fails with a cache of repeated rows \(.*; use a model"
    ):
        HfEngine(EngineSettings(model, load_tokenizer(str(folder)), "", RolloutConfig(), 64, torch.float32))


def test_a_model_without_a_cache_is_refused_by_the_check() -> None:
    config = transformers.RwkvConfig(architectures=["RwkvForCausalLM"])
    with pytest.raises(ConfigError, match="RwkvForCausalLM takes no DynamicCache"):
        check_engine("hf", config, "rwkv")


def test_an_engine_of_a_user_that_cannot_be_imported_is_refused_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Engine(:\n")
    with pytest.raises(ConfigError, match=r"mine.py:Engine' cannot be imported: SyntaxError.*mine.py:1\)"):
        check_engine(f"{tmp_path}/mine.py:Engine", transformers.LlamaConfig(), "llama")
