"""Rows end to end: the logits of separate rows, beyond sliding windows too, and families for which it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import collate_rows
from cosmos_core.data.sample import Sample
from cosmos_core.models import packing
from cosmos_core.models.packing import PACKED_ATTENTION, enable_packing, find_unsupported_varlen_reason
from cosmos_core.run.progress import ProgressWriter
from tests.unit.trainers import trainer_of

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "full": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=4)),
    "both": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=LAYERS)),
}


def make(cls: Any, config: Any, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = cls._from_config(config, attn_implementation=attention).double().eval()
    return made


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(500, (length,), generator=generator) for length in (7, 12, 1, 3)]


def packed_logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    found: Tensor = model(
        **collate_rows([s.numpy() for s in sequences], 0, is_packed=True).inputs, use_cache=False
    ).logits[0]
    return found


def check_packed(family: str, *, recompute: bool, calls: list[Any] | None = None) -> None:
    """Check that packed rows have the logits and gradients of separate ones; `calls` are those of a fake kernel."""
    model = make(*FAMILIES[family])
    separate = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows()])
    separate.sin().sum().backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert not calls
    assert enable_packing(model) == ""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    model.zero_grad()
    if calls is not None:
        calls.clear()
    packed = packed_logits(model, rows())
    if calls is not None:
        windows = {"full": [-1, -1], "sliding": [3, 3], "both": [3, -1]}[family]
        assert calls == [([0, 7, 19, 20, 23], 12, 12, (left, 0)) for left in windows]
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)
    packed.sin().sum().backward()
    tolerance = 1e-5 if family == "both" else 1e-11  # Gemma's norms are computed in float32
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.full), True])
def test_packed_rows_have_the_logits_and_gradients_of_separate_ones(family: str, recompute: bool) -> None:
    check_packed(family, recompute=recompute)


@pytest.mark.parametrize("family", [pytest.param(n, marks=[pytest.mark.full] * (n != "both")) for n in FAMILIES])
def test_padded_rows_and_generation_stay_what_they_were(family: str) -> None:
    model, plain = make(*FAMILIES[family]), make(*FAMILIES[family])
    assert enable_packing(model) == ""
    inputs = collate_rows([row.numpy() for row in rows()], 0, is_packed=False).inputs
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        model(**inputs, use_cache=False).logits[real], plain(**inputs, use_cache=False).logits[real], rtol=0, atol=1e-12
    )
    left, mask = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours = model.generate(left, attention_mask=mask, **settings)
    assert torch.equal(ours, plain.generate(left, attention_mask=mask, **settings))


def test_a_row_sees_nothing_of_its_neighbours() -> None:
    model = make(*FAMILIES["full"])
    enable_packing(model)
    first, second, *_ = rows()
    other = second.clone()
    other[:] = 499
    before, after = packed_logits(model, [first, second, first]), packed_logits(model, [first, other, first])
    assert torch.equal(before[: len(first)], after[: len(first)])
    assert torch.equal(before[-len(first) :], after[-len(first) :])
    assert not torch.equal(before, after)


def test_families_that_mix_what_is_packed_keep_the_padding() -> None:
    linear = Qwen3NextConfig(
        **SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = make(Qwen3NextForCausalLM, linear)
    assert enable_packing(model) == "layers of kind linear_attention mix what is packed"
    flex = make(*FAMILIES["full"], attention="flex_attention")
    assert enable_packing(flex) == "attention is computed by 'flex_attention'"
    assert PACKED_ATTENTION not in {model.config._attn_implementation, flex.config._attn_implementation}


def test_rows_are_packed_by_default_unless_the_model_mixes_them_or_blocks_are_compiled_for_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def width(config: Qwen3Config | PhimoeConfig, **train: Any) -> tuple[int, ...]:
        model = make(Qwen3ForCausalLM if isinstance(config, Qwen3Config) else PhimoeForCausalLM, config).float()
        trainer = trainer_of(model, TrainConfig(**train), 0, ProgressWriter(tmp_path / "progress.json"))
        ids = [row.numpy() for row in rows()]
        samples = [Sample(each, np.ones(len(each), dtype=np.uint8)) for each in ids]
        return tuple(trainer.adapter.collate(samples, range(4), samples[0]).inputs["input_ids"].shape)

    mixing = PhimoeConfig(**SIZES, sliding_window=4000, num_local_experts=2)
    assert width(FAMILIES["full"][1], compile=False, param_dtype="float32") == (1, 23)
    assert width(FAMILIES["full"][1], compile=True, param_dtype="float32") == (4, 12)
    with caplog.at_level("INFO", "cosmos_core"):
        assert width(mixing, compile=False, param_dtype="float32") == (4, 12)
        assert width(mixing, compile=False, param_dtype="float32", sequence_packing=True) == (4, 12)
    assert [record.levelname for record in caplog.records if "rows are padded" in record.message] == ["INFO", "WARNING"]


def test_a_family_whose_attention_is_not_told_its_window_keeps_the_padding() -> None:
    config = PhimoeConfig(**SIZES, sliding_window=4000, num_local_experts=2)  # no row of the probe is that long
    model = make(PhimoeForCausalLM, config).float()  # experts know no float64
    assert enable_packing(model) == "packed sequences have other logits than separate ones"
    assert model.config.sliding_window == 4000


def test_a_family_whose_attention_cannot_be_exchanged_keeps_the_padding() -> None:
    options = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    config = GPTNeoConfig(vocab_size=500, max_position_embeddings=32, **options)
    model = make(GPTNeoForCausalLM, config, attention="eager")
    assert enable_packing(model) == "attention is computed by code of its family"


def test_a_probe_that_differs_gives_the_old_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(*FAMILIES["full"])
    plain = Qwen3ForCausalLM.forward
    # a family that ignores the bounds between rows
    ignores = lambda self, *a, sequence_bounds=None, **k: plain(self, *a, **k)  # noqa: E731
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", ignores)
    assert enable_packing(model) == "packed sequences have other logits than separate ones"
    assert model.config._attn_implementation == "sdpa"


class FakeVarlen:
    """`torch.nn.attention.varlen.varlen_attn` by a loop over sequences: its signature, its meaning of windows."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(  # noqa: PLR0913 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
        assert query.shape[1] == key.shape[1] or enable_gqa
        left, right = window_size
        self.calls.append((cu_seq_q.tolist(), max_q, max_k, window_size))
        found = []
        for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
            q, k, v = (state[start:stop].transpose(0, 1) for state in (query, key, value))
            distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            sees = (distance >= -right) & ((distance <= left) | (left < 0))
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=sees, scale=scale, enable_gqa=enable_gqa
            )
            found.append(attended[0].transpose(0, 1))
        return torch.cat(found)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> FakeVarlen:
    """The kernel of CUDA, as if it were one of the CPU and took every dtype."""
    fake = FakeVarlen()
    monkeypatch.setattr(packing, "varlen_attn", fake)
    monkeypatch.setattr(packing, "_VARLEN_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(packing, "_VARLEN_DTYPES", {torch.float64, torch.float32})
    return fake


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.full)])
def test_one_call_of_the_kernel_per_layer_gives_the_logits_and_gradients_of_separate_rows(
    family: str, recompute: bool, varlen: FakeVarlen
) -> None:
    check_packed(family, recompute=recompute, calls=varlen.calls)
    assert len(varlen.calls) == 4 if recompute else 2


def test_the_kernel_that_leaks_between_sequences_is_found_out(
    varlen: FakeVarlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Tensor:
        whole = torch.tensor([0, len(query)], dtype=torch.int32)
        return varlen(query, key, value, whole, whole, len(query), len(query), **settings)

    monkeypatch.setattr(packing, "varlen_attn", leaking)
    model = make(*FAMILIES["full"])
    assert enable_packing(model) == "packed sequences have other logits than separate ones"
    assert model.config._attn_implementation == "sdpa"


def test_the_dtype_of_training_is_probed_too_where_there_is_a_kernel(
    varlen: FakeVarlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_VARLEN_DTYPES", {torch.bfloat16})
    model = make(*FAMILIES["full"]).float()
    assert enable_packing(model) == "" and varlen.calls == []
    model.set_attn_implementation("sdpa")
    assert enable_packing(model, compute_dtype=torch.bfloat16) == ""
    assert varlen.calls == [([0, 5, 14], 9, 9, (-1, 0))] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "value_size", "dropout", "reason"),
    [
        ((1, 4, 9, 64), torch.bfloat16, 64, 0.0, ""),
        ((1, 4, 9, 64), torch.float32, 64, 0.0, "its kernel takes half precision, and this is float32"),
        ((1, 4, 9, 60), torch.float16, 60, 0.0, "kernel takes heads of a multiple of 8 up to 256, and these have 60"),
        ((1, 4, 9, 264), torch.float16, 264, 0.0, "a multiple of 8 up to 256, and these have 264"),
        ((1, 4, 9, 192), torch.bfloat16, 128, 0.0, "values as wide as keys, and these have 128 and 192"),
        ((1, 4, 9, 64), torch.bfloat16, 64, 0.1, "its kernel knows no dropout, and attention_dropout is 0.1"),
    ],
)
def test_what_the_kernel_cannot_is_named(
    shape: tuple[int, ...], dtype: torch.dtype, value_size: int, dropout: float, reason: str
) -> None:
    state = torch.zeros(shape, dtype=dtype)
    found = find_unsupported_varlen_reason(state, state, torch.zeros(*shape[:-1], value_size, dtype=dtype), dropout)
    assert found.endswith(reason) and bool(found) is bool(reason)


def test_what_the_kernel_cannot_runs_over_groups_of_sequences_and_says_why_once(
    varlen: FakeVarlen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "_VARLEN_DTYPES", {torch.bfloat16})
    packing._log_fallback_once.cache_clear()
    model = make(*FAMILIES["full"])
    with caplog.at_level("INFO", "cosmos_core.models.packing"):
        assert enable_packing(model) == ""
        packed_logits(model, rows())
    assert varlen.calls == []
    said = "packed attention runs over groups of sequences, because its kernel takes half precision, and this is"
    assert [record.getMessage() for record in caplog.records] == [f"{said} float64"]


def test_positions_that_do_not_begin_at_0_are_those_of_the_model(tmp_path: Path) -> None:
    model: Any = transformers.RobertaForCausalLM(
        transformers.RobertaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=40, pad_token_id=1, is_decoder=True, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    rows = [Sample(np.arange(8, 8 + n), np.ones(n, dtype=np.uint8)) for n in (5, 9)]
    train = TrainConfig(param_dtype="float32")
    found = trainer_of(model, train, 1, ProgressWriter(tmp_path / "progress")).evaluate(rows)
    for row, outputs in zip(rows, found, strict=True):
        ids = torch.from_numpy(row.input_ids)
        expected = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(outputs["logprobs"], expected, atol=1e-5)
