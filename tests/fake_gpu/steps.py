"""One optimizer step of each named cell on the fake GPU: `python -m tests.fake_gpu.steps LIBRARY NAME ...`.

A step is the trainer's own update of a tiny model of a real class, traced with `trace_step_memory`. Each is a line of
JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fake_gpu.device import install

if __name__ == "__main__":
    install(sys.argv[1])

import torch
import transformers.integrations.moe as moe
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.kernels import enable_fp8_if_supported
from cosmos_core.models.recompute import recompute_activations
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.estimate import _use_fake_tensors
from cosmos_core.train.memory import _LiveByteCounter, trace_step_memory
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import DiffusionSample, Prompt
from tests.effects.change import recipe

LAYERS, LENGTH, FP8_PRODUCT = 2, 512, "fp8 mm"
SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "attn_implementation": "sdpa",
}  # fmt: skip
BASE: dict[str, Any] = {
    "train.compile": False, "train.train_batch_per_replica": 2, "train.train_policy.mini_batch": 2,
    "policy.model_gradient_checkpointing": False,
}  # fmt: skip
SFT: dict[str, Any] = {"train.train_policy.type": "sft"}
GRPO: dict[str, Any] = {"train.train_policy.type": "grpo", "rollout.n_generation": 2}
CELLS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "sft padded": {**SFT, "train.sequence_packing": False},
    "sft recomputed": {**SFT, "policy.model_gradient_checkpointing": True},
    "sft recomputed padded": {**SFT, "policy.model_gradient_checkpointing": True, "train.sequence_packing": False},
    "sft selective": {**SFT, "policy.model_gradient_checkpointing": "selective"},
    "sft float32": {**SFT, "train.param_dtype": "float32"},
    "grpo": GRPO,
    "grpo with reference": {**GRPO, "train.train_policy.kl_beta": 0.1},
    "dpo": {**SFT, "train.train_policy.trainer_type": "dpo"},
    "lora": {**SFT, "policy.lora.r": 8, "policy.lora.lora_alpha": 8.0},
    "fp8": {**SFT, "train.fp8.enable_fp8": True},
    "moe": SFT,
    "nft": {
        "policy.is_diffusers": True, "policy.diffusers.inference_size": [16, 16],
        "policy.diffusers.sample.num_steps": 4, "train.train_policy.type": "grpo",
        "train.train_policy.trainer_type": "diffusion_nft", "train.train_policy.kl_beta": 0.01,
    },
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts the calls of attention and of products in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.equal.default:
            return False  # named weights have moved away from the policy
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if any(type(arg).__name__ == "Float8TrainingTensor" for arg in args) and name == "mm":
            name = FP8_PRODUCT
        if "attn" in name or "attention" in name or name == FP8_PRODUCT:
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def model_of(name: str) -> PreTrainedModel:
    """Make the cell's model, on the meta device."""
    if name != "moe":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, experts_implementation="grouped_mm"))


@contextmanager
def dtypes_of_experts(found: set[str]) -> Iterator[None]:
    """Note the dtypes of the weights by which experts multiply."""
    multiply: Callable[..., Any] = moe._grouped_mm

    def noted(states: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        found.add(str(weight.dtype))
        product: torch.Tensor = multiply(states, weight, offs)
        return product

    moe._grouped_mm = noted
    try:
        yield
    finally:
        moe._grouped_mm = multiply


def step(name: str) -> dict[str, Any]:
    """Trace one step of a cell; return its peak in bytes, its kernels and the dtypes of its experts."""
    chosen, kernels, dtypes = recipe({**BASE, **CELLS[name]}), Kernels(), set[str]()
    with tempfile.TemporaryDirectory() as folder, dtypes_of_experts(dtypes):
        trace = traced_denoiser if chosen.policy.is_diffusers else traced_text
        model, peak = trace(chosen, name, Path(folder), kernels)
    devices = {p.grad.device.type for p in model.parameters() if p.grad is not None}
    return {
        "name": name, "peak": peak, "kernels": kernels.counts, "experts": sorted(dtypes), "devices": sorted(devices)
    }  # fmt: skip


def traced_text(chosen: Recipe, name: str, folder: Path, kernels: Kernels) -> tuple[nn.Module, int]:
    """Trace the step of a language model; return the model and its peak."""
    train, policy = chosen.train, chosen.policy
    with torch.device("meta"):
        model = model_of(name)
        mark_trained_weights(model, policy)
        recompute_activations(model, policy.model_gradient_checkpointing)
    if train.fp8.enable_fp8:
        enable_fp8_if_supported(model, train.fp8)
    with FakeTensorMode():
        with torch.device("cuda"):
            _use_fake_tensors(model)
        trainer = Trainer(CausalLM(model, train, InputProcessing(0)), train, ProgressWriter(folder / "progress.json"))
        algorithm = train.train_policy
        for named in () if algorithm.precomputes_reference_logprobs else algorithm.auxiliary_model_names:
            trainer.weight_sets.add(named)
        with kernels:
            return model, trace_step_memory(trainer, make_algorithm(chosen), train, LENGTH).total_bytes


def traced_denoiser(chosen: Recipe, name: str, folder: Path, kernels: Kernels) -> tuple[nn.Module, int]:
    """Trace the step of a diffusion model that learns from what it drew; return its denoiser and its peak."""
    from cosmos_core.algorithms.flow_credit import FlowRollout
    from cosmos_core.models.denoiser import Denoiser
    from cosmos_core.models.families import open_pipeline
    from cosmos_core.models.flow import flow_schedule
    from cosmos_core.train.rollout_feed import make_training_sampling
    from tests import tiny_pipelines

    pipeline = tiny_pipelines.save("sd3", folder / "model")
    family = open_pipeline(str(pipeline), chosen.policy, torch.device("cuda"))
    model = family.load_denoiser(torch.float32)
    times, live = tuple(flow_schedule(4, 3.0).tolist()), _LiveByteCounter()
    with FakeTensorMode():
        with torch.device("cuda"):
            _use_fake_tensors(model)
        trainer = Trainer(Denoiser(model, family, chosen.train), chosen.train, ProgressWriter(folder / "progress.json"))
        for named in chosen.train.train_policy.auxiliary_model_names:
            trainer.weight_sets.add(named)
        shapes = {"prompt_embeds": (85, 32), "pooled_prompt_embeds": (32,)}
        rollouts = [
            FlowRollout(
                DiffusionSample(None, torch.zeros(4, 8, 8), times, 0),
                Prompt(i, (), "", "", embedding={key: torch.zeros(shape) for key, shape in shapes.items()}),
                1.0 - i % 2 * 2, i,
            )
            for i in range(4)
        ]  # fmt: skip
        with kernels, live:
            for update in make_algorithm(chosen, make_training_sampling(chosen)).updates(rollouts, trainer):
                trainer.update(update)
    return model, live.peak_memory().total_bytes


def main() -> None:
    """Run the cells; one that fails has its error in place of what was found."""
    for name in sys.argv[2:]:
        try:
            found = step(name)
        except Exception:  # noqa: BLE001 - the other cells go on
            found = {"name": name, "error": traceback.format_exc(limit=-8)[:3000]}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
