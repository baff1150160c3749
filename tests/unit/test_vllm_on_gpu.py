"""The vLLM engine as on a GPU, by an `LLM` that records what it is told, and by the source of the installed vLLM."""

from __future__ import annotations

import ast
import importlib.util
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.parallel import mesh
from cosmos_core.rollout import vllm, vllm_logits
from cosmos_core.rollout.base import WeightReceiver
from cosmos_core.rollout.vllm import VllmEngine

SOURCE = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="vLLM is not installed")


class Recorder:
    """An `LLM` that notes its calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.llm_engine = SimpleNamespace(
            output_processor=SimpleNamespace(request_states={}),
            reset_encoder_cache=lambda: calls.append("reset images"),
        )

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        list(kwargs["weights_iterator"])
        self.calls.append(method)

    def reset_prefix_cache(self, **_: Any) -> None:
        self.calls.append("reset")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("empty"))
    return found


def engine(calls: list[str]) -> VllmEngine:
    made: Any = object.__new__(VllmEngine)
    made._llm, made._adapter, made._has_child_ranks, made._convert_bucket = Recorder(calls), None, False, list
    made._weight_receiver, made._sent_requests, made._released_tags = WeightReceiver(), {}, []
    made._version = made.sleep_level = 0
    made.link = made._image_reader = None
    return made


def test_a_load_wakes_the_weights_alone_and_the_cache_after_it_each_with_torchs_memory_given_back(
    calls: list[str],
) -> None:
    made = engine(calls)
    made.sleep(2)
    assert made.sleep_level == 2
    made.load_weights(1, [[("weight", torch.ones(2))]])
    assert calls == ["sleep 2", "empty", "wake weights", "reload_weights", "empty", "wake kv_cache", "reset"]
    assert made.sleep_level == 0
    calls.clear()
    made.sleep(1)
    made.wake()
    made.wake()
    assert calls == ["sleep 1", "empty", "wake weights", "empty", "wake kv_cache"]


def test_a_load_ends_what_vllm_knows_of_images_in_its_scheduler_and_its_workers(calls: list[str]) -> None:
    made: Any = engine(calls)
    made._image_reader = object()
    made.load_weights(1, [[("weight", torch.ones(2))]])
    assert calls == ["reload_weights", "reset", "reset images"]


@pytest.mark.parametrize("is_separate", [False, True])
def test_ranks_that_see_one_gpu_each_reduce_by_nccl_alone(
    calls: list[str], is_separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: not is_separate)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    for name in vllm._SINGLE_GPU_RANK_ENVIRONMENT:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    rollout = RolloutConfig.model_validate({"parallelism": {"tp_size": 2}})
    settings: Any = SimpleNamespace(
        rollout=rollout, model=SimpleNamespace(config=SimpleNamespace()), folder="folder", is_separate=is_separate,
        dtype=torch.bfloat16, max_model_len=64, vision=None,
    )  # fmt: skip
    found = vllm._make_llm_arguments(settings)
    # By default vLLM prefers what Mistral ships beside config.json: params.json, consolidated.safetensors, tekken.json.
    assert found["config_format"] == found["load_format"] == found["tokenizer_mode"] == "hf"
    assert found["skip_tokenizer_init"] is True
    assert mesh.is_single_rank() is is_separate
    assert found["distributed_executor_backend"] == ("mp" if is_separate else "external_launcher")
    assert found.get("disable_custom_all_reduce", False) is not is_separate
    assert {os.environ.get(name) for name in vllm._SINGLE_GPU_RANK_ENVIRONMENT} == {None if is_separate else "0"}


def test_a_model_that_takes_images_gets_the_tokenizer_without_which_vllm_makes_no_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = transformers.LlavaConfig()
    config._commit_hash = "abc"
    settings: Any = SimpleNamespace(
        rollout=RolloutConfig(), model=SimpleNamespace(config=config), folder="folder", is_separate=True,
        dtype=torch.bfloat16, max_model_len=64, vision=object(), custom={"vision": {"max_pixels": 784, "fps": 2}},
    )  # fmt: skip
    found = vllm._make_llm_arguments(settings)
    assert not found["skip_tokenizer_init"] and found["tokenizer_revision"] == "abc"
    assert found["mm_processor_kwargs"] == {"max_pixels": 784}
    assert "requires_tokenizer and info.ctx.tokenizer is None" in source("multimodal/processing/processor.py")


@pytest.mark.parametrize("num_further", [0, 1])
def test_logits_of_a_prompt_are_those_of_its_tokens_also_with_the_position_that_a_gpu_adds(
    num_further: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row, logits_TV = [5, 1, 7], torch.randn(3, 8)
    logprobs = logits_TV.log_softmax(-1)

    class Llm:
        def __init__(self, **_: Any) -> None:
            self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)

        def collective_rpc(self, method: Any, args: Any) -> None:
            method(SimpleNamespace(model_runner=SimpleNamespace(model=self.model)), *args)

        def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
            self.model.compute_logits(logits_TV[-1:])
            self.model.compute_logits(logits_TV[: 2 + num_further])
            said = [{token: SimpleNamespace(logprob=logprobs[i, token].item())} for i, token in enumerate(row[1:])]
            return [SimpleNamespace(prompt_logprobs=[None, *said])]

    fake = SimpleNamespace(LLM=Llm, SamplingParams=dict, TokensPrompt=dict)
    monkeypatch.setattr(vllm_logits, "import_vllm", lambda: fake)
    for name in ("set_environment", "load_config", "check_heads"):
        monkeypatch.setattr(vllm_logits, name, lambda *_: None)
    [found] = vllm_logits.compute_prompt_logits(tmp_path, [row])
    assert torch.equal(found, logits_TV[:2])


def parameters(module: str, function: str) -> list[str]:
    """Names of the parameters of `Class.method` in a module of vLLM, which is not imported for it."""
    scope: Any = parsed(source(module))
    for name in function.split("."):
        [scope] = [node for node in scope.body if getattr(node, "name", "") == name]
    rest = [argument for argument in (scope.args.vararg, scope.args.kwarg) if argument]
    return [argument.arg for argument in (*scope.args.args, *scope.args.kwonlyargs, *rest)]


def source(module: str) -> str:
    assert SOURCE is not None and SOURCE.origin is not None
    return (Path(SOURCE.origin).parent / module).read_text(encoding="utf-8")


parsed = cache(ast.parse)
TRANSFER = "distributed/weight_transfer"
PYNCCL = "distributed/device_communicators/pynccl.py"


@pytest.mark.parametrize(
    ("module", "function", "used"),
    [
        ("entrypoints/llm.py", "LLM.sleep", {"level"}),
        ("entrypoints/llm.py", "LLM.wake_up", {"tags"}),
        ("entrypoints/llm.py", "LLM.enqueue", {"prompts", "sampling_params", "lora_request", "use_tqdm"}),
        ("entrypoints/llm.py", "LLM.collective_rpc", {"method", "args", "kwargs"}),
        ("entrypoints/llm.py", "LLM.reset_prefix_cache", {"reset_running_requests"}),
        ("v1/engine/llm_engine.py", "LLMEngine.reset_encoder_cache", {"self"}),
        ("v1/worker/gpu_worker.py", "Worker.reload_weights", {"kwargs"}),
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner.reload_weights", {"kwargs"}),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", {"weights_iterator"}),
        ("model_executor/model_loader/reload/layerwise.py", "initialize_layerwise_reload", {"model"}),
        ("model_executor/model_loader/reload/layerwise.py", "finalize_layerwise_reload", {"args"}),
        ("model_executor/model_loader/reload/layerwise.py", "finalize_layerwise_processing", {"model", "model_config"}),
        # The engine's end of a native weight transfer; `test_rollout_vllm.py` runs it.
        (f"{TRANSFER}/factory.py", "WeightTransferEngineFactory.create_engine", {"config", "vllm_config", "device"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.set_weight_update_target", {"model", "model_config"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.parse_init_info", {"init_dict"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.update_weights", {"update_info"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.shutdown", {"self"}),
        (f"{TRANSFER}/nccl_common.py", "worker_init_process_group", {"init_info", "parallel_config"}),
        (PYNCCL, "PyNcclCommunicator.broadcast", {"tensor", "src", "stream"}),
        (PYNCCL, "PyNcclCommunicator.destroy", {"self"}),
        ("distributed/device_communicators/pynccl_wrapper.py", "NCCLLibrary.ncclGetUniqueId", {"self"}),
    ],
)
def test_vllm_has_what_we_call(module: str, function: str, used: set[str]) -> None:
    assert used <= set(parameters(module, function))


def test_vllm_keeps_what_the_link_reads_and_makes_a_communicator_of_these_in_this_order() -> None:
    expected = ["cls", "unique_id_bytes", "rank", "world_size", "device"]
    assert parameters(PYNCCL, "PyNcclCommunicator.from_unique_id_bytes")[:5] == expected
    assert "self.model_update_group" in source(f"{TRANSFER}/nccl_engine.py")
    assert "self._packed_importer = PackedBufferImporter()" in source(f"{TRANSFER}/ipc_engine.py")
    assert "self.disabled = " in source(PYNCCL)


def test_vllm_knows_the_arguments_and_variables_that_we_set() -> None:
    [arguments] = [
        node for node in ast.parse(source("engine/arg_utils.py")).body if getattr(node, "name", "") == "EngineArgs"
    ]
    fields = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert fields >= {
        "model", "revision", "dtype", "max_model_len", "tensor_parallel_size", "enforce_eager",
        "distributed_executor_backend", "logprobs_mode", "generation_config", "skip_tokenizer_init",
        "tokenizer_revision", "disable_log_stats", "use_tqdm_on_load", "max_num_seqs", "quantization",
        "gpu_memory_utilization", "enable_sleep_mode", "enable_chunked_prefill", "max_num_batched_tokens",
        "disable_custom_all_reduce", "enable_lora", "max_loras", "max_lora_rank", "mm_processor_kwargs",
        *vllm.HUGGING_FACE_FORMAT,
    }  # fmt: skip
    known = source("envs.py")
    ours = {**vllm._VLLM_ENVIRONMENT, **vllm._VLLM_CPU_ENVIRONMENT, **vllm._SINGLE_GPU_RANK_ENVIRONMENT}
    assert [name for name in ours if f'"{name}"' not in known] == []
    assert all(f'"{tag}"' in source("v1/worker/gpu_worker.py") for tag in (vllm._WEIGHTS_TAG, vllm._KV_CACHE_TAG))
