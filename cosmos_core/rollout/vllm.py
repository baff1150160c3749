"""Rollout engine that runs vLLM in the trainer's process or in a separate process (`replica`), on a GPU or a CPU.

In the trainer's process, weights are passed by reference. An engine in a separate process can have several ranks
(`vllm_ranks`). The code for GPUs only (sleep levels, CUDA graphs, `vllm_link`) and prompts with images are untested.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from cosmos_core.config.media import PIXEL_LIMIT_KEYS
from cosmos_core.config.schema.rollout import VLLM_TEMPERATURES
from cosmos_core.data.images import open_image
from cosmos_core.errors import ConfigError
from cosmos_core.imports import without_garbage_collection
from cosmos_core.models.hf import load_config
from cosmos_core.models.quantized_base import quantization_method
from cosmos_core.parallel.mesh import is_single_rank
from cosmos_core.rollout import vllm_process, vllm_ranks
from cosmos_core.rollout.base import (
    Bucket,
    EngineSettings,
    LoadReceipt,
    UnfinishedGroup,
    WeightFormat,
    WeightReceiver,
    check_prompts,
    completion,
    request_seed,
    stop_token_ids,
)
from cosmos_core.rollout.mxfp4 import QUANTIZATION_FORMAT, quantize_bucket
from cosmos_core.rollout.sample_tokens import use_uniform_sampling
from cosmos_core.rollout.vllm_adapter import open_adapter
from cosmos_core.rollout.vllm_link import VllmWeightLink
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM's startup warnings concern servers and kernels, not recipes
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_VLLM_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB of host memory for the KV cache
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding threads to cores would affect the trainer's threads
}
_SINGLE_GPU_RANK_ENVIRONMENT = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
"""Environment of ranks that see one GPU each: it disables vLLM features that need to see the GPUs of other ranks."""
_WEIGHTS_TAG, _KV_CACHE_TAG = "weights", "kv_cache"
_COMMON_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 256)
"""Head sizes that vLLM's CPU attention supports. For other sizes, vLLM is imported and queried, which takes seconds."""
_CPU_MAX_BATCHED_TOKENS = 4096
HUGGING_FACE_FORMAT = {"config_format": "hf", "load_format": "hf", "tokenizer_mode": "hf"}
"""Arguments with which vLLM reads what is trained, and not Mistral's files beside it (params.json, consolidated*)."""


class VllmEngine:
    """Engine that wraps vLLM's `LLM`, with one request per completion, so that each completion has its own seed."""

    name = "vllm"

    def __init__(self, settings: EngineSettings) -> None:
        self._has_child_ranks = vllm_ranks.has_child_ranks(settings)
        self.ranks_per_engine = 1 if self._has_child_ranks else settings.rollout.parallelism.tp_size
        self._tokenizer = settings.tokenizer
        self._max_model_len = settings.max_model_len
        self._stop_token_ids = stop_token_ids(settings.model, settings.tokenizer)
        self._image_reader, self._is_separate = settings.vision, settings.is_separate
        self._send_heartbeat = settings.beat
        self._version = 0
        self._released_tags: list[str] = []
        """Names of vLLM's memory allocations that `sleep` has released and `wake` reallocates."""
        self.sleep_level: Literal[0, 1, 2] = 0
        """Level of the deepest sleep since the last weight load; 0: no sleep."""
        self._weight_receiver = WeightReceiver()
        is_mxfp4 = _is_mxfp4_checkpoint(settings)
        self._convert_bucket: Callable[[Bucket], Bucket] = quantize_bucket if is_mxfp4 else list
        self._sent_requests: dict[str, tuple[UnfinishedGroup, int]] = {}
        self._groups_finished_during_probe: list[Group] = []
        self._owns_process_group = not torch.distributed.is_initialized()
        set_environment()
        with vllm_process.restore_process_state():
            self._vllm = import_vllm()
            check_heads(settings.model.config, settings.folder, tp_size=settings.rollout.parallelism.tp_size)
            self._adapter = open_adapter(settings)
            self.weight_format: WeightFormat = "adapter" if self._adapter else "checkpoint"
            try:
                adapter_arguments = self._adapter.llm_arguments if self._adapter else {}
                with nullcontext() if is_single_rank() or self._has_child_ranks else vllm_process.unique_memory_names():
                    self._llm = self._vllm.LLM(**_make_llm_arguments(settings), **adapter_arguments)
            except ValueError as error:
                error_text = " ".join(str(error).split())[:400]
                error_prefix = f"vLLM refuses {settings.folder!r}: {error_text}"
                raise ConfigError(f"{error_prefix}; or set rollout.backend = 'hf'") from error
            if not torch.cuda.is_available():
                self._llm.collective_rpc(use_uniform_sampling)
            if self._has_child_ranks:
                self._llm.llm_engine.model_executor.register_failure_callback(lambda: os._exit(1))
                self._llm.collective_rpc(vllm_ranks.exit_with_parent, args=(os.getpid(),))
            elif not is_single_rank():
                vllm_process.unlink_shared_memory()
        uses_native_transfer = settings.rollout.weight_transfer == "native" and settings.is_separate
        self.link = VllmWeightLink(self._llm) if uses_native_transfer and not self._adapter and not is_mxfp4 else None
        """Connection through which vLLM's ranks receive weights by NCCL or CUDA IPC; None: they receive weights through
        host memory."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        check_prompts(prompts, self._max_model_len)
        ks = range(sampling.num_completions)
        requests = [(group, k) for group in (UnfinishedGroup(prompt, sampling, step) for prompt in prompts) for k in ks]
        inputs = [tokens_prompt for prompt in prompts for tokens_prompt in [self._make_tokens_prompt(prompt)] * len(ks)]
        seeds = [request_seed(sampling.seed, step, group.prompt.id, k) for group, k in requests]
        sampling_params = [self._make_sampling_params(sampling, seed) for seed in seeds]
        with vllm_process.restore_process_state():
            if not self._sent_requests:
                self._llm.reset_prefix_cache()  # with cached prefixes, rounding would depend on earlier requests
            request_ids = self._llm.enqueue(inputs, sampling_params, lora_request=self._lora_request, use_tqdm=False)
        # Use only the request's number as the key, because outputs lack the random suffix of vLLM's internal ids.
        self._sent_requests |= zip((request_id.partition("-")[0] for request_id in request_ids), requests, strict=True)

    def completed(self) -> list[Group]:
        finished_groups = self.step()
        while self._sent_requests and not finished_groups:
            finished_groups = self.step()
        return finished_groups

    def step(self) -> list[Group]:
        """Run one forward pass if a request is in flight, and return the groups that are complete."""
        finished_groups, self._groups_finished_during_probe = self._groups_finished_during_probe, []
        if self._sent_requests and not finished_groups:
            self._send_heartbeat()
            # A separate process has no trainer state to restore, and restoring costs time for every token.
            with nullcontext() if self._is_separate else vllm_process.restore_process_state():
                request_outputs = self._llm.llm_engine.step()
                finished_groups = [group for output in request_outputs for group in self._add_completion(output)]
        return finished_groups

    def abort(self) -> None:
        """Discard all requests in flight in vLLM."""
        with vllm_process.restore_process_state():
            self._llm.llm_engine.abort_request(list(self._sent_requests))
        self._sent_requests, self._groups_finished_during_probe = {}, []

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Load a version of the policy's weights; tied weights must be sent under both names. Keys and values of
        requests in flight are computed again, so that each token is sampled from the distribution of one version."""
        self._reallocate_memory(_WEIGHTS_TAG)
        with vllm_process.restore_process_state():
            if self._adapter is None:
                self._replace_weights(buckets)
            else:
                self._adapter.load_lora_factors(self._llm, chain.from_iterable(self._weight_receiver.buckets(buckets)))
        # The KV cache is reallocated after the load, because a load needs more memory than the weights alone.
        self._reallocate_memory(_KV_CACHE_TAG)
        with vllm_process.restore_process_state():
            self._llm.reset_prefix_cache(reset_running_requests=bool(self._sent_requests))
            if self._image_reader is not None:  # drop cached image embeddings of the old weights
                self._llm.llm_engine.reset_encoder_cache()
            for request_state in self._llm.llm_engine.output_processor.request_states.values():
                unfinished_group, k = self._sent_requests[request_state.external_req_id]
                num_tokens = request_state.detokenizer.num_output_tokens()
                unfinished_group.replaced_versions.setdefault(k, []).append((num_tokens, self._version))
        self._version, self.sleep_level = version, 0
        return self._weight_receiver.acknowledge(version)

    def _replace_weights(self, buckets: Iterable[Bucket]) -> None:
        """Replace all weights. If the load fails, end it, because vLLM would otherwise continue it with the tensors of
        the next load."""
        try:
            received_buckets = map(self._convert_bucket, self._weight_receiver.buckets(buckets))
            if self._has_child_ranks or self.link is not None:
                vllm_ranks.load_on_ranks(self._llm, received_buckets)
            else:
                tensors = chain.from_iterable(received_buckets)
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        except Exception:
            self._llm.collective_rpc(vllm_ranks.end_weight_load)
            raise

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of tokens, while requests in flight continue; see `Engine.logprobs`."""
        sampling_params = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt = self._vllm.TokensPrompt(prompt_token_ids=list(token_ids))
        with vllm_process.restore_process_state():
            [request_id] = self._llm.enqueue([prompt], sampling_params, lora_request=self._lora_request, use_tqdm=False)
            probe_output: Any = None
            while probe_output is None:
                for output in self._llm.llm_engine.step():
                    if output.request_id == request_id.partition("-")[0]:
                        probe_output = output
                    else:
                        self._groups_finished_during_probe += self._add_completion(output)
        tokens_and_logprobs = zip(token_ids[1:], probe_output.prompt_logprobs[1:], strict=True)
        return [logprob_by_token[token].logprob for token, logprob_by_token in tokens_and_logprobs]

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Release GPU memory; level 1 moves the weights to the host. With an adapter, level 2 is the same as level 1,
        because the base weights are not sent again. On CPU nothing is released."""
        if torch.cuda.is_available() and not self._released_tags:
            level = level if self._adapter is None else 1
            self._llm.sleep(level=level)
            self._released_tags = [_WEIGHTS_TAG, _KV_CACHE_TAG]
            self.sleep_level = max(self.sleep_level, level)

    def wake(self) -> None:
        self._reallocate_memory(_WEIGHTS_TAG)
        self._reallocate_memory(_KV_CACHE_TAG)

    def _reallocate_memory(self, memory_tag: str) -> None:
        """Reallocate vLLM's memory named `memory_tag` after freeing torch's cached memory, which vLLM cannot use."""
        if memory_tag in self._released_tags:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=[memory_tag])
            self._released_tags.remove(memory_tag)

    def close(self) -> None:
        with nullcontext() if self._owns_process_group else vllm_process.keep_process_group():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    @property
    def _lora_request(self) -> Any:
        """Return the `LoRARequest` with which requests to vLLM select the policy's adapter; None: there is no adapter,
        or none was loaded yet."""
        return self._adapter.lora_request if self._adapter else None

    def _add_completion(self, request_output: Any) -> Iterator[Group]:
        """Add the completion of a finished request to its group, and yield the group when it is complete."""
        if not request_output.finished:
            return
        group, k = self._sent_requests.pop(request_output.request_id)
        if group.prompt.images and tuple(request_output.prompt_token_ids) != group.prompt.token_ids:
            raise ConfigError(
                f"vLLM makes other tokens of the images of prompt {group.prompt.id} than the model's processor; set "
                f"rollout.backend = 'hf'"
            )
        [completion_output] = request_output.outputs
        group.completions[k] = completion(
            self._tokenizer, completion_output.token_ids, completion_output.logprobs.logprobs, version=self._version,
            ends_with_stop=completion_output.finish_reason == "stop", vision=self._image_reader,
            replaced_versions=group.replaced_versions.get(k, ()),
        )  # fmt: skip
        if (complete_group := group.to_group()) is not None:
            yield complete_group

    def _make_tokens_prompt(self, prompt: Prompt) -> Any:
        """Return a prompt in vLLM's format. Its token ids are those before image expansion, which vLLM does itself."""
        if not prompt.images:
            return self._vllm.TokensPrompt(prompt_token_ids=list(prompt.token_ids))
        # If the chat template added no BOS token, the tokenizer adds it, as it did when the rows were prepared.
        has_bos_token = bool(self._tokenizer.bos_token) and prompt.text.startswith(self._tokenizer.bos_token)
        text_token_ids = self._tokenizer(prompt.text, add_special_tokens=not has_bos_token)["input_ids"]
        token_ids, images = [*text_token_ids, *prompt.later_turn_token_ids], [*map(open_image, prompt.images)]
        return self._vllm.TokensPrompt(prompt_token_ids=token_ids, multi_modal_data={"image": images})

    def _make_sampling_params(self, sampling: Sampling, seed: int) -> Any:
        min_temperature, max_temperature = VLLM_TEMPERATURES
        if sampling.temperature != 0 and not min_temperature <= sampling.temperature <= max_temperature:
            raise ConfigError(
                f"temperature = {sampling.temperature}: vLLM samples between {min_temperature} and "
                f"{max_temperature} and takes 0 for greedy; or set rollout.backend = 'hf'"
            )
        return self._vllm.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty, max_tokens=sampling.max_tokens, seed=seed,
            stop_token_ids=self._stop_token_ids, logprobs=0, flat_logprobs=True, detokenize=False,
        )  # fmt: skip


def set_environment() -> None:
    """Set vLLM's environment variables before it is imported; variables that the user has set are kept."""
    vllm_environment = _VLLM_ENVIRONMENT if torch.cuda.is_available() else _VLLM_ENVIRONMENT | _VLLM_CPU_ENVIRONMENT
    for name, value in vllm_environment.items():
        os.environ.setdefault(name, value)


def import_vllm() -> Any:
    """Import vLLM and return the module; call `set_environment` before."""
    with without_garbage_collection():
        import vllm
        from vllm.platforms import current_platform

    # vLLM ignores VLLM_LOGGING_LEVEL if logging is configured already, so set the level of its logger.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if not torch.cuda.is_available():
        # Compiling vLLM's computation of token ranks, which are unused, would take 10 s and a C++ compiler.
        current_platform.simple_compile_backend = "eager"
    return vllm


def find_head_size_problem(model_config: PretrainedConfig, folder: str) -> str:
    """Return why vLLM's CPU attention does not support the head size of a model; empty if it supports it."""
    text_config = model_config.get_text_config()
    num_heads = getattr(text_config, "num_attention_heads", 0)
    head_size = getattr(text_config, "head_dim", None) or (text_config.hidden_size // num_heads if num_heads else 0)
    if torch.cuda.is_available() or not head_size or head_size in _COMMON_HEAD_SIZES:
        return ""
    set_environment()
    with vllm_process.restore_process_state():
        import_vllm()
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    if head_size in (supported_head_sizes := CPUAttentionBackend.get_supported_head_sizes()):
        return ""
    return f"vLLM on CPU has no attention for head_dim = {head_size} of {folder!r}, only for {supported_head_sizes}"


def check_heads(
    model_config: PretrainedConfig, folder: str, remedy_text: str = "set rollout.backend = 'hf'", *, tp_size: int = 1
) -> None:
    """Raise a `ConfigError` if vLLM's CPU attention does not support the head size of a model, since the first request
    would crash, or if the attention heads cannot be split over `tp_size` ranks."""
    text_config = model_config.get_text_config()
    head_counts = [getattr(text_config, name, 0) for name in ("num_attention_heads", "num_key_value_heads")]
    num_heads, num_kv_heads = (count if isinstance(count, int) else 0 for count in head_counts)
    # The number of key-value heads may also divide the number of ranks, because several ranks can hold the same head.
    if num_heads % tp_size or (num_kv_heads % tp_size and tp_size % num_kv_heads):
        raise ConfigError(
            f"rollout.parallelism.tp_size = {tp_size}: vLLM cannot split the {num_heads} attention heads and "
            f"{num_kv_heads or num_heads} key-value heads of {folder!r} over as many ranks; lower it"
        )
    if error_prefix := find_head_size_problem(model_config, folder):
        raise ConfigError(f"{error_prefix}; {remedy_text}")


def _is_mxfp4_checkpoint(engine_settings: EngineSettings) -> bool:
    revision = getattr(engine_settings.model.config, "_commit_hash", None)
    return quantization_method(load_config(engine_settings.folder, revision)) == QUANTIZATION_FORMAT


def _make_llm_arguments(settings: EngineSettings) -> dict[str, Any]:
    rollout_config, has_gpu = settings.rollout, torch.cuda.is_available()
    revision = getattr(settings.model.config, "_commit_hash", None)
    llm_arguments: dict[str, Any] = {
        "model": settings.folder,
        "revision": revision,
        "tokenizer_revision": revision,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": rollout_config.parallelism.tp_size,
        "enforce_eager": rollout_config.enforce_eager or not has_gpu,  # CUDA graphs need a GPU
        # With "external_launcher", the engines run in the trainer's ranks, but with separate process groups.
        "distributed_executor_backend": "uni" if is_single_rank() else "external_launcher",
        "logprobs_mode": "processed_logprobs",  # return log-probabilities after temperature, top-k and top-p
        # The model's own sampling defaults must not apply to settings that the recipe leaves unset.
        "generation_config": "vllm",
        # vLLM needs a tokenizer for the processor of a model that takes images, even if no prompt has any.
        "skip_tokenizer_init": not getattr(settings.model.config, "sub_configs", None),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **HUGGING_FACE_FORMAT,
    }
    if vllm_ranks.has_child_ranks(settings):
        llm_arguments["distributed_executor_backend"] = "mp"
        cpu_environment = {} if has_gpu else {"TORCHDYNAMO_DISABLE": "1"}
        for name, value in (vllm_ranks.RANK_ENVIRONMENT | cpu_environment).items():
            os.environ.setdefault(name, value)
    if settings.vision is not None:  # pass the image size limits with which prompts were tokenised
        size_limits = settings.custom.get("vision") or {}
        llm_arguments["mm_processor_kwargs"] = {key: size_limits[key] for key in PIXEL_LIMIT_KEYS if key in size_limits}
    if rollout_config.n_generation_mini_batch:
        llm_arguments["max_num_seqs"] = rollout_config.batch_size * rollout_config.n_generation_mini_batch
    if rollout_config.quantization != "none" and not has_gpu:
        log_message = "rollout.quantization = %r needs a GPU: engines compute with the trainer's weights here"
        logger.warning(log_message, rollout_config.quantization)
    elif rollout_config.quantization == QUANTIZATION_FORMAT and not _is_mxfp4_checkpoint(settings):
        raise ConfigError(
            f"rollout.quantization = {QUANTIZATION_FORMAT!r} is a format of checkpoints, which {settings.folder!r} "
            f"has not; set it to 'fp8' or 'none'"
        )
    elif rollout_config.quantization == "fp8":
        llm_arguments["quantization"] = "fp8"
    if has_gpu and llm_arguments["distributed_executor_backend"] == "external_launcher":
        llm_arguments["disable_custom_all_reduce"] = True
        for name, value in _SINGLE_GPU_RANK_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if has_gpu:
        llm_arguments |= {"gpu_memory_utilization": rollout_config.gpu_memory_utilization, "enable_sleep_mode": True}
    else:
        # Avoid chunked prefill, after which vLLM rewinds the request's generator; CPU generators do not support that.
        num_tokens = max(_CPU_MAX_BATCHED_TOKENS, settings.max_model_len)
        llm_arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": num_tokens}
    return llm_arguments
