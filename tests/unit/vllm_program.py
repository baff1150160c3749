"""What `test_rollout_vllm.py` runs in a process of its own.

vLLM initialises torch's process group and more, which the other tests of a pytest process should not meet. Everything
found is written down; the tests judge it.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.errors import ConfigError, DataError, StageFailed
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.lora import add_adapter
from cosmos_core.rollout import vllm
from cosmos_core.rollout.base import Bucket, Engine, EngineSettings, LoadReceipt, generate
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.registry import make_engine
from cosmos_core.rollout.vllm_adapter import open_adapter
from cosmos_core.train import check
from cosmos_core.types import Group, Prompt, Sampling
from tests.effects.change import GRPO, SFT, recipe, stage_of
from tests.unit.tiny_model import iter_checkpoint_weights, save_tiny_model
from tests.unit.trainers import sequence_logprobs

LENGTHS = (5, 9, 3, 140, 21)  # one is longer than a block of the prefix cache on CPU
PROMPTS = [Prompt(i, tuple((13 * i + 7 * j) % 250 for j in range(n)), "", "") for i, n in enumerate(LENGTHS)]


def sampling(temperature: float, **changes: Any) -> Sampling:
    return Sampling(**{"temperature": temperature, "max_tokens": 12, "num_completions": 4, "seed": 1, **changes})


def process_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": hash(random.getstate()),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__name__,
        "sigterm": repr(signal.getsignal(signal.SIGTERM)),
        "sigint": repr(signal.getsignal(signal.SIGINT)),
        "environment": {n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "DO_NOT_TRACK"))},
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
    }


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in group.completions] for group in groups]


def difference(model: PreTrainedModel, groups: list[Group], temperature: float) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's, one sequence at a time."""
    worst = 0.0
    for group in groups:
        for answer in group.completions:
            ids = torch.tensor([group.prompt.token_ids + answer.token_ids])
            with torch.no_grad():
                own = sequence_logprobs(model, ids, torch.ones_like(ids), temperature=temperature or 1.0)
            found = torch.tensor(answer.logprobs)
            worst = max(worst, (own[0, -len(found) :] - found).abs().max().item())
    return worst


def sampled(engine: Engine, model: PreTrainedModel, hf: Engine) -> dict[str, Any]:
    """Everything under the first weights."""
    groups = generate(engine, PROMPTS, sampling(1.0), 4)
    cooler = generate(engine, PROMPTS, sampling(0.7), 4)
    hot = generate(engine, PROMPTS, sampling(2.0, max_tokens=60, num_completions=4), 4)
    greedy = sampling(0.0, num_completions=1)
    filtered = sampling(0.8, top_k=6, top_p=0.7, repetition_penalty=1.3, num_completions=1)
    penalised = sampling(0.0, repetition_penalty=1.3, num_completions=1)
    # More prompt tokens than one forward pass takes; the last prompt of a pass would be read in two.
    long = [Prompt(90, tuple(range(41)), "", "")]
    many = [generate(engine, long, sampling(1.0, max_tokens=2, num_completions=count), 4) for count in (120, 3)]
    return {
        "many": [tokens(groups)[0] for groups in many],
        "difference": {
            "1.0": difference(model, groups, 1.0),
            "0.7": difference(model, cooler, 0.7),
            "0.0": difference(model, generate(engine, PROMPTS, greedy, 4), 0.0),
        },
        "tokens": tokens(groups),
        "again": tokens(generate(engine, PROMPTS, sampling(1.0), 4)),
        "subset": tokens(generate(engine, PROMPTS[1:4], sampling(1.0), 4)),
        "fewer": tokens(generate(engine, PROMPTS, sampling(1.0, num_completions=2), 4)),
        "next_step": tokens(generate(engine, PROMPTS, sampling(1.0), 5)),
        "greedy": [tokens(generate(e, PROMPTS, greedy, 4)) for e in (engine, hf)],
        "penalised": [tokens(generate(e, PROMPTS, penalised, 4)) for e in (engine, hf)],
        "drawn": [tokens(generate(e, PROMPTS, sampling(1.0), 4)) for e in (engine, hf)],
        "filtered": [tokens(generate(e, PROMPTS, filtered, 4)) for e in (engine, hf)],
        "filtered_least": min(min(g.completions[0].logprobs) for g in generate(engine, PROMPTS, filtered, 4)),
        "long": [
            [[len(c.token_ids), c.finish_reason] for c in group.completions]
            for group in generate(
                engine,
                [Prompt(91 + n, (7,) * n, "", "") for n in (200, 255)],
                sampling(1.0, max_tokens=4096, num_completions=4),
                4,
            )
        ],
        "ends": [[list(a.token_ids), a.finish_reason, a.text, len(a.logprobs)] for g in hot for a in g.completions],
        "versions": [group.version for group in groups],
    }


def synced(engine: Engine, model: PreTrainedModel) -> dict[str, Any]:
    """Change the trainer's weights and hand them over, rightly and wrongly."""
    before = tokens(generate(engine, PROMPTS, sampling(1.0), 4))
    move(model)
    model.train()
    publisher = publisher_of(engine, model)
    found_at_first = publisher.publish(7)
    groups = generate(engine, PROMPTS, sampling(1.0), 4)
    found = {
        "before": before,
        "after": tokens(groups),
        "difference": difference(model.eval(), groups, 1.0),
        "metrics": found_at_first,
        "versions": [group.version for group in groups],
    }
    off = [(name, tensor + 0.1 if "up_proj" in name else tensor) for name, tensor in iter_checkpoint_weights(model)]
    found["wrong"] = message(lambda: publisher_of(Wrong(engine, off), model).publish(8))
    move(model)
    partial = [(name, tensor) for name, tensor in iter_checkpoint_weights(model) if name != "lm_head.weight"]
    found["partial"] = message(lambda: engine.load_weights(8, [partial]))
    found["interrupted"] = message(lambda: engine.load_weights(8, interrupted(model)))
    publisher.publish(9)
    found["last"] = tokens(generate(engine, PROMPTS, sampling(1.0), 4))
    return found


def swapped(engine: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Load new weights, twice, while completions are in flight, and probe them; then forget what is in flight."""
    own: dict[int, dict[str, torch.Tensor]] = {}
    publisher = publisher_of(engine, model)

    def publish(version: int) -> None:
        publisher.publish(version)
        own[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    publish(20)
    engine.submit(PROMPTS[:4], sampling(1.0, max_tokens=40), 4)
    groups: list[Group] = []
    for version in (21, 22):
        for _ in range(6):
            groups += engine.step()
        move(model)
        publish(version)
    while done := engine.completed():
        groups += done
    worst, versions = 0.0, set()
    for group in groups:
        for answer in group.completions:
            ids = torch.tensor([group.prompt.token_ids + answer.token_ids])
            start = len(group.prompt.token_ids)
            for segment in answer.segments:
                model.load_state_dict(own[segment.version])
                with torch.no_grad():
                    logprobs = sequence_logprobs(model, ids, torch.ones_like(ids))[0]
                end = start + len(segment.token_ids)
                worst = max(worst, (logprobs[start - 1 : end - 1] - torch.tensor(segment.logprobs)).abs().max().item())
                start = end
            versions.add(tuple(segment.version for segment in answer.segments))
    model.load_state_dict(own[22])
    engine.submit(PROMPTS, sampling(1.0), 4)
    engine.step()
    engine.abort()
    return {
        "difference": worst,
        "versions": sorted(versions),
        "groups": sorted(group.prompt.id for group in groups),
        "aborted": len(engine.completed()),
        "again": tokens(generate(engine, PROMPTS, sampling(1.0), 4))
        == tokens(generate(engine, PROMPTS, sampling(1.0), 4)),
    }


def adapted(folder: str, tokenizer: Any) -> dict[str, Any]:
    """An engine that gets an adapter alone, twice, the second time while completions are in flight."""
    model = load_model(folder, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", r_pattern={"v_proj": 6}, use_rslora=True)
    add_adapter(model, lora)
    engine: Any = make_engine(EngineSettings(model, tokenizer, folder, RolloutConfig(), 256, torch.float32))
    factors = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    publisher = publisher_of(engine, model)
    found: dict[str, Any] = {"format": engine.weight_format, "bytes": sum(p.nbytes for p in factors.values())}
    found["metrics"] = [publisher.publish(0)]
    found["base"] = tokens(generate(engine, PROMPTS, sampling(1.0), 4))
    disturb(factors.values())
    found["metrics"].append(publisher.publish(1))
    groups = generate(engine, PROMPTS, sampling(0.7), 4)
    found["difference"], found["tokens"] = difference(model, groups, 0.7), tokens(groups)
    engine.submit(PROMPTS[:2], sampling(1.0, max_tokens=20), 4)
    for _ in range(6):
        engine.step()
    disturb(factors.values())
    found["metrics"].append(publisher.publish(2))
    groups = []
    while done := engine.completed():
        groups += done
    found["versions"] = sorted({tuple(s.version for s in c.segments) for g in groups for c in g.completions})
    last = generate(engine, PROMPTS, sampling(0.7), 4)
    found["second"] = [difference(model, last, 0.7), tokens(last)]
    found["partial"] = message(lambda: engine.load_weights(3, [list(factors.items())[1:]]))
    merged = EngineSettings(model, tokenizer, folder, RolloutConfig(quantization="fp8"), 256, torch.float32)
    found["quantised"] = open_adapter(merged) is None
    engine.close()
    return found


def spread(folder: str, tokenizer: Any) -> dict[str, Any]:
    """An engine apart from the trainer with two ranks of its own."""
    model = load_model(folder, dtype=torch.float32)
    rollout = RolloutConfig.model_validate({"parallelism": {"tp_size": 2}})
    settings = EngineSettings(model, tokenizer, folder, rollout, 256, torch.float32, is_separate=True)
    state = process_state()
    engine = make_engine(settings)
    groups = [generate(engine, PROMPTS, sampling(0.7), 4)]
    found: dict[str, Any] = {"state": [state, process_state()], "difference": [difference(model, groups[0], 0.7)]}
    move(model)
    publisher = publisher_of(engine, model)
    publisher.publish(3)
    found["interrupted"] = message(lambda: engine.load_weights(4, interrupted(model)))
    move(model)
    publisher.publish(5)
    groups.append(generate(engine, PROMPTS, sampling(0.7), 4))
    found["difference"].append(difference(model.eval(), groups[1], 0.7))
    found["versions"] = [group.version for group in groups[1]]
    found["ranks"] = [child.name() for child in psutil.Process().children(recursive=True)]
    engine.close()
    found["left"] = [child.name() for child in psutil.Process().children(recursive=True)]
    return found


def interrupted(model: PreTrainedModel) -> Iterator[Bucket]:
    """Half of a layer that the engine fuses, of other weights, from a trainer that dies before it has sent the rest."""
    yield [(name, tensor.detach() + 1) for name, tensor in iter_checkpoint_weights(model) if "gate_proj" in name]
    raise StageFailed("weight sync: the trainer has gone")


def disturb(factors: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for factor in factors:
            factor.add_(torch.randn_like(factor) * 0.2)


def publisher_of(engine: Engine, model: PreTrainedModel) -> WeightPublisher:
    def logprobs(token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            return sequence_logprobs(model.eval(), ids, torch.ones_like(ids))[0]

    return WeightPublisher(engine, model, logprobs, torch.float32, bucket_bytes=50_000)


class Wrong:
    """An engine that takes other weights than it is sent, and acknowledges them all."""

    def __init__(self, engine: Engine, weights: Bucket) -> None:
        self.engine, self.weights, self.weight_format = engine, weights, engine.weight_format
        self.logprobs = engine.logprobs

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        for _ in buckets:
            pass
        return self.engine.load_weights(version, [self.weights])


def move(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def message(call: Any) -> str:
    try:
        call()
    except (ConfigError, DataError, StageFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def checked(folder: Path) -> dict[str, str]:
    """What `cosmos check` says of a model by the kind of its stage."""
    scored = {**SFT, "validation.reward_function": "exact_match"}
    found: dict[str, str] = {}
    for kind, settings in (("rl", GRPO), ("sample", GRPO), ("validate", scored), ("sft", SFT)):
        config = recipe({**settings, "policy.model_max_length": 64})
        stage = stage_of(folder.parent / kind, config, kind=kind, model=folder)
        found[kind] = message(lambda stage=stage: check.run(stage))
    return found


def use_small_caches() -> None:
    """Give the cache of each engine room for 512 blocks; the gigabyte that it has takes seconds to clear and to own."""
    arguments = vllm._make_llm_arguments
    vllm._make_llm_arguments = lambda settings: arguments(settings) | {"num_gpu_blocks_override": 512}


def main(folder: str, out: str, *, further_engines: bool) -> None:
    use_small_caches()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: None)
    torch.manual_seed(5)
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)

    def make(backend: str, source: str = folder) -> Engine:
        recipe = RolloutConfig(backend=backend)
        return make_engine(EngineSettings(model, tokenizer, source, recipe, 256, torch.float32))

    before = process_state()
    engine = make("vllm")
    found: dict[str, Any] = {"name": engine.name, "state": [before, process_state()]}
    found["sampled"] = sampled(engine, model, make("hf"))
    found["state"].append(process_state())
    found["too_cold"] = message(lambda: generate(engine, PROMPTS, sampling(0.005), 4))
    found["too_hot"] = message(lambda: generate(engine, PROMPTS, sampling(2.5), 4))
    found["too_long"] = message(lambda: generate(engine, [Prompt(8, (1,) * 256, "", "")], sampling(1.0), 4))
    found["synced"] = synced(engine, model)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found["swapped"] = swapped(engine, model)
    model.load_state_dict(kept)
    engine.close()
    model.config.head_dim = 16
    found["head_dim"] = message(lambda: make("vllm"))
    model.config.head_dim = 32
    found["checked"] = checked(save_tiny_model(Path(out).parent / "narrow", head_dim=24))
    found["closed"] = not torch.distributed.is_initialized()
    if model.config.tie_word_embeddings:
        found["adapted"] = adapted(folder, tokenizer)
    if further_engines:
        second = make("vllm")
        publisher_of(second, model).publish(9)
        found["second"] = tokens(generate(second, PROMPTS, sampling(1.0), 4))
        second.close()
        found["spread"] = spread(folder, tokenizer)
    else:
        from tests.unit.transfer_program import transferred

        found["transferred"] = transferred(folder, model, tokenizer)
    Path(out).write_text(json.dumps(found))
