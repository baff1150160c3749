"""Weight sync from the trainer to a rollout engine: complete tensors in buckets, one bucket in memory at a time.

No rank holds a second copy of the model, and weights are not hashed: the engine acknowledges the number of loaded
tensors, and a probe compares log-probabilities. `Engine.load_weights` loads each bucket.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.errors import StageFailed
from cosmos_core.models.export import make_float32_predicate
from cosmos_core.models.lora import find_adapted_layers, map_keys_to_base_model, merge_adapter
from cosmos_core.parallel.gather import FullTensorGatherer
from cosmos_core.rollout.base import Bucket, Engine, WeightFormat, get_storage_key
from cosmos_core.rollout.fleet import EngineFleet

BUCKET_BYTES = 256 << 20
"""Maximum size in bytes of a bucket of weights, in the trainer's dtype; half of this if the model is sharded over
ranks. A module whose weights are larger, such as an embedding, is a separate bucket."""
_LOGPROB_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Mean absolute difference between the log-probabilities of engine and trainer that rounding can cause, by dtype;
tensors that are loaded under wrong names cause differences of whole nats."""
_NUM_PROBE_TOKENS = 16

logger = logging.getLogger(__name__)


@dataclass
class WeightPublisher:
    """Sender of the weights of a model to one engine; all ranks call its methods together."""

    engine: Engine
    model: PreTrainedModel
    """The trainer's model; if it is sharded, this rank has only its shards."""
    compute_trainer_logprobs: Callable[[Sequence[int]], Tensor]
    """Function that returns the trainer's log-probability of each token after the first, at temperature 1."""
    dtype: torch.dtype
    """Dtype that the engine computes in."""
    meta_copy: PreTrainedModel | None = None
    """Copy of the model on the meta device, made before the model was sharded; None: the model is not sharded."""
    probe_interval: int = 50
    """Number of weight versions between two probes, which compare log-probabilities of trainer and engine. Further
    probes follow the first weight load, the first load after a sleep, and the first load of a new engine."""
    transfer_dtype: torch.dtype | None = None
    """Dtype that weights are cast to before they are sent; None: no cast."""
    bucket_bytes: int = BUCKET_BYTES
    _probed_sleep_levels: set[int] = field(default_factory=set)
    """Sleep levels of the engine after which a weight load was already probed; 0: a load without sleep."""
    _weight_buckets: "_WeightBuckets | None" = None

    def publish(self, version: int) -> dict[str, float]:
        """Load the current weights into the engine as version `version`, and return metrics. Raise a `StageFailed` if
        the engine did not load all tensors, or its log-probabilities differ from the trainer's."""
        start_time, stays_float32 = time.perf_counter(), make_float32_predicate(self.model, self.transfer_dtype)
        num_sent_tensors = num_sent_bytes = 0

        def cast_and_count_buckets() -> Iterator[Bucket]:
            nonlocal num_sent_tensors, num_sent_bytes
            assert self._weight_buckets is not None
            for bucket in self._weight_buckets.buckets():
                cast_tensor_by_storage = {  # one entry for tied weights, so that they are cast once
                    get_storage_key(tensor): tensor.to(
                        dtype=self.transfer_dtype if tensor.is_floating_point() and not stays_float32(name) else None
                    )
                    for name, tensor in bucket
                }
                num_sent_tensors += len(bucket)
                num_sent_bytes += sum(tensor.nbytes for tensor in cast_tensor_by_storage.values())
                yield [(name, cast_tensor_by_storage[get_storage_key(tensor)]) for name, tensor in bucket]

        if self.engine.weight_format == "shared":
            self.engine.load_weights(version, ())
        else:
            if self._weight_buckets is None:
                weight_format = self.engine.weight_format
                self._weight_buckets = _WeightBuckets(self.model, self.meta_copy, weight_format, self.bucket_bytes)
            sleep_level = getattr(self.engine, "sleep_level", 0)
            self.engine.load_weights(version, cast_and_count_buckets()).verify(version, num_sent_tensors, "the engine")
            has_new_engine = isinstance(self.engine, EngineFleet) and self.engine.has_new_engine
            # The version number determines the probes, not a counter, so that a resumed run probes the same versions.
            is_probe_due = version % self.probe_interval == 0
            if sleep_level not in self._probed_sleep_levels or has_new_engine or is_probe_due:
                self._probe_engines(version)
            self._probed_sleep_levels.add(sleep_level)
        sync_seconds = time.perf_counter() - start_time
        metrics = {"sync/version": float(version), "sync/bytes": float(num_sent_bytes), "time/sync": sync_seconds}
        if isinstance(self.engine, EngineFleet) and self.engine.num_delta_bytes is not None:
            metrics["sync/sent_bytes"] = float(self.engine.num_delta_bytes)
        return metrics

    def _probe_engines(self, version: int) -> None:
        """Compare the trainer's log-probabilities with those of each engine that has weights of `version`. Raise
        `StageFailed` if they differ by more than rounding can cause."""
        token_ids = make_probe_token_ids(self.model.config.get_text_config().vocab_size)
        trainer_logprobs = self.compute_trainer_logprobs(token_ids).detach().cpu().float()
        tolerance = choose_logprob_tolerance(self.dtype, self.transfer_dtype)
        if isinstance(self.engine, EngineFleet):
            logprobs_per_engine = self.engine.logprobs_per_engine(token_ids, version)
        else:
            logprobs_per_engine = [self.engine.logprobs(token_ids)]
        for engine_logprobs in logprobs_per_engine:
            logprob_gap = (trainer_logprobs - torch.tensor(engine_logprobs)).abs().mean().item()
            if not logprob_gap <= tolerance:  # `not <=` also rejects a difference of NaN
                raise StageFailed(
                    f"weight sync: engine and trainer differ by {logprob_gap:.3g} nats per token, more than "
                    f"{tolerance} in {str(self.dtype).removeprefix('torch.')}; the engine did not take all weights"
                )
            logger.info("weights of version %d: engine and trainer differ by %.3g nats per token", version, logprob_gap)


def choose_logprob_tolerance(dtype: torch.dtype, transfer_dtype: torch.dtype | None) -> float:
    """Return the mean absolute difference between the log-probabilities of engine and trainer that rounding to these
    dtypes can cause."""
    return max(_LOGPROB_TOLERANCES[cast_dtype] for cast_dtype in (dtype, transfer_dtype) if cast_dtype is not None)


def make_probe_token_ids(vocab_size: int) -> list[int]:
    """Return a short sequence of token ids, for which the log-probabilities of trainer and engine are compared."""
    # The ids are multiples of a prime, so that they cover the whole embedding table.
    return [7919 * (i + 1) % vocab_size for i in range(_NUM_PROBE_TOKENS)]


@dataclass
class _WeightGroup:
    """Weights of sibling modules that must be in the same bucket: engines fuse some of them, such as query, key and
    value, and merging an adapter or splitting fused experts needs several tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors to gather, on the meta device if the model is sharded, by key in the state dict."""
    key_by_base_name: dict[str, str] = field(default_factory=dict)
    """State-dict key of each weight, by name in a model without adapters; tied weights have two names and one key."""
    adapted_layers: dict[str, Any] = field(default_factory=dict)
    """Layers whose adapter is merged before sending, by module name."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _WeightBuckets:
    """Weights of a model, divided into buckets, under the names that engines use."""

    def __init__(
        self, model: PreTrainedModel, meta_copy: PreTrainedModel | None, weight_format: WeightFormat, bucket_bytes: int
    ) -> None:
        self._model, self._weight_format = model, weight_format
        complete_model = meta_copy or model
        if weight_format == "adapter":  # a group for each LoRA factor, named by its key in the state dict
            state_dict = complete_model.state_dict(keep_vars=True)
            base_name_by_key = map_keys_to_base_model(complete_model)
            weight_groups = [
                _WeightGroup({k: state_dict[k]}, {k: k}) for k, name in base_name_by_key.items() if not name
            ]
        else:
            weight_groups = _collect_weight_groups(complete_model)
        # On a mesh a bucket has half the size, because one bucket is read while the next is gathered.
        bucket_capacity, remaining_bucket_bytes = bucket_bytes if meta_copy is None else bucket_bytes // 2, 0
        self._weight_groups_by_bucket: list[list[_WeightGroup]] = []
        for weight_group in weight_groups:
            if not self._weight_groups_by_bucket or weight_group.num_bytes > remaining_bucket_bytes:
                self._weight_groups_by_bucket.append([])
                remaining_bucket_bytes = bucket_capacity
            self._weight_groups_by_bucket[-1].append(weight_group)
            remaining_bucket_bytes -= weight_group.num_bytes
        self._gatherer: FullTensorGatherer | None = None
        if meta_copy is not None:
            max_bucket_bytes = max(sum(group.num_bytes for group in groups) for groups in self._weight_groups_by_bucket)
            self._gatherer = FullTensorGatherer(model.state_dict(keep_vars=True), max_bucket_bytes)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets of all weights that the engine loads; each bucket can reuse the memory of the last one."""
        state_dict = self._model.state_dict(keep_vars=True)
        if self._gatherer is not None:
            self._gatherer.tensors = state_dict
        for weight_groups in self._weight_groups_by_bucket:
            yield self._gather_bucket(weight_groups, state_dict)

    @torch.no_grad()
    def _gather_bucket(self, weight_groups: Sequence[_WeightGroup], tensor_by_key: dict[str, Tensor]) -> Bucket:
        tensors = {key: tensor for weight_group in weight_groups for key, tensor in weight_group.tensors.items()}
        gatherer = self._gatherer
        full_tensors = gatherer.full_tensors(tensors) if gatherer else {k: tensor_by_key[k].detach() for k in tensors}
        weights: dict[str, Tensor] = {}
        for weight_group in weight_groups:
            for name, adapted_layer in weight_group.adapted_layers.items():
                full_tensors |= _merge_layer(name, adapted_layer, full_tensors if gatherer else None)
            weights |= {name: full_tensors[key] for name, key in weight_group.key_by_base_name.items()}
        if self._weight_format == "checkpoint":
            weights = revert_weight_conversion(self._model, weights)
        return list(weights.items())


def _collect_weight_groups(complete_model: PreTrainedModel) -> list[_WeightGroup]:
    state_dict, adapted_layer_by_name = complete_model.state_dict(keep_vars=True), find_adapted_layers(complete_model)
    weight_group_by_module: dict[str, _WeightGroup] = {}
    first_key_by_tensor: dict[Tensor, str] = {}
    weight_group_by_key: dict[str, _WeightGroup] = {}
    base_name_by_key = map_keys_to_base_model(complete_model)
    for key in state_dict:
        name = base_name_by_key.get(key, "")
        adapted_layer_name = next((layer for layer in adapted_layer_by_name if key.startswith(f"{layer}.")), "")
        tied_key = first_key_by_tensor.setdefault(state_dict[key], key)
        if tied_key != key:
            # All names of a tied weight belong to one group, that of the first name.
            weight_group = weight_group_by_key[tied_key]
        else:
            # Group by the parent of the weight's module or adapted layer, so that q_proj and k_proj share a group.
            parent_module_name = (adapted_layer_name or (name or key).rpartition(".")[0]).rpartition(".")[0]
            weight_group = weight_group_by_module.setdefault(parent_module_name, _WeightGroup())
            weight_group.tensors[key] = state_dict[key]
        weight_group_by_key[key] = weight_group
        if adapted_layer_name:
            weight_group.adapted_layers[adapted_layer_name] = adapted_layer_by_name[adapted_layer_name]
        if name:
            weight_group.key_by_base_name[name] = tied_key
    return list(weight_group_by_module.values())


def _merge_layer(layer_name: str, layer: Any, gathered_tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the weights of a layer with its LoRA adapter merged; `gathered_tensors` replace tensors on the meta
    device."""
    if gathered_tensors is not None:
        layer = copy.deepcopy(layer)
        layer.load_state_dict({key: gathered_tensors[f"{layer_name}.{key}"] for key in layer.state_dict()}, assign=True)
    with merge_adapter(layer):
        return {f"{layer_name}.base_layer.{key}": p.data for key, p in layer.get_base_layer().named_parameters()}
