"""What the ranks of `test_load.py` run: the same model loaded whole and in parts, and what loading it took."""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import ModelError
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.distributed.matrix import Case, recipe, samples
from tests.unit.tiny_model import iter_checkpoint_weights
from tests.unit.trainers import logprobs, trainer_of

CPU = torch.device("cpu")


class Peak(NamedTuple):
    """Bytes of one rank."""

    shard: int
    """What it holds of the model."""
    most: int
    """Most anonymous memory while it loaded, above what it had before."""


def save_large(folder: Path, layers: int, dtype: torch.dtype) -> tuple[int, int]:
    """Write a model of 12.6 million parameters a layer and 65.5 million beside them; parameters and bytes."""
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=False, dtype=dtype,
    )  # fmt: skip
    with no_init_weights():
        model = Qwen3ForCausalLM._from_config(config)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(folder, max_shard_size="100MB")
    return model.num_parameters(), sum(parameter.nbytes for parameter in model.parameters())


def split(model: PreTrainedModel, mesh: dict[str, int], scratch: Path) -> Trainer:
    """The model over the ranks of a mesh."""
    opened = open_mesh(ParallelismConfig.model_validate(mesh), "cpu")
    return trainer_of(model, recipe(Case()).train, 0, ProgressWriter(scratch / "progress.json"), opened)


def trained(model: PreTrainedModel, policy: dict[str, Any]) -> PreTrainedModel:
    """The model with what a `[policy]` trains of it."""
    torch.manual_seed(0)
    mark_trained_weights(model, PolicyConfig.model_validate(policy))
    return model


def parts(rank: Trainer) -> dict[str, Tensor]:
    """What this rank has of every weight and buffer."""
    found = dict(rank.adapter.model.state_dict()) | dict(rank.adapter.model.named_buffers())
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


def differences(
    cases: list[tuple[Path, dict[str, int], torch.dtype, dict[str, Any]]], scratch: Path, stop: threading.Event
) -> list[list[str]]:
    """Of each case, where a rank's part of a model that it read itself is not that of a model that was split."""
    torch.set_num_threads(1)
    found: list[list[str]] = []
    for folder, mesh, dtype, policy in cases:
        later = init_on_meta(str(folder), dtype=dtype, device=CPU)
        assert all(parameter.is_meta for parameter in later.parameters())
        ours, theirs = (
            split(trained(model, policy), mesh, scratch) for model in (later, load_model(str(folder), dtype=dtype))
        )
        wrong = [
            name
            for (name, one), (other_name, other) in zip(parts(ours).items(), parts(theirs).items(), strict=True)
            if name != other_name or one.dtype != other.dtype or not torch.equal(one, other)
        ]
        of_all: list[Any] = [None] * dist.get_world_size()
        both = [torch.cat(logprobs(rank, samples(0), 1.0)) for rank in (ours, theirs)]
        wrong += [] if torch.equal(*both) and both[0].isfinite().all() else ["log-probabilities"]
        whole = ours.adapter.gather_whole_model()
        wrong += [] if whole is None or has_weights_of(whole, folder, dtype) else ["the whole model"]
        dist.all_gather_object(of_all, wrong)
        found.append(sorted({name for each in of_all for name in each}))
    return found


def has_weights_of(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> bool:
    """Whether an export of the model would have the tensors of the files that it came from."""
    files = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = dict(iter_checkpoint_weights(model))
    return all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in files.items())


def refusals(folders: list[Path], scratch: Path, stop: threading.Event) -> list[list[str]]:
    """What each rank says of each model, which has something wrong with it."""
    found = []
    for folder in folders:
        try:
            split(init_on_meta(str(folder), dtype=torch.float32, device=CPU), {"dp_shard_size": 2}, scratch)
            said = "nothing"
        except ModelError as error:
            said = str(error)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, said)
        found.append(of_all)
    return found


def peaks(folder: Path, mesh: dict[str, int], warm: Path, scratch: Path, stop: threading.Event) -> list[Peak]:
    """What each rank took to load a model with float32 weights; the small one `warm` brings imports and groups."""
    torch.set_num_threads(1)
    split(init_on_meta(str(warm), dtype=torch.float32, device=CPU), mesh, scratch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages that the small model has freed would hold a part of the large one unseen
    with anonymous_memory() as found:
        rank = split(init_on_meta(str(folder), dtype=torch.float32, device=CPU), mesh, scratch)
    shard = sum(tensor.nbytes for tensor in parts(rank).values())
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, Peak(shard, max(found) - found[0]))
    return of_all


@contextmanager
def anonymous_memory() -> Iterator[list[int]]:
    """RssAnon in bytes: before the block, then again and again until it ends."""
    samples, done = [_anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            samples.append(_anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()
        samples.append(_anonymous())


def _anonymous() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10
