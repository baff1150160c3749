"""Completions from an OpenAI-compatible server, such as `vllm serve`."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from openai import OpenAI, OpenAIError

from cosmos_core.data.tool_calls import decode_arguments, encode_arguments_in_turns, read_tools
from cosmos_core.environment import mask_secrets
from cosmos_core.errors import ConfigError, StageFailed, first_line
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.rewards.process import wait_for_futures
from cosmos_core.rollout.base import request_seed
from cosmos_core.run.stage import Stage
from cosmos_core.transient import is_transient
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment

_TIMEOUT_SECONDS = 600.0
_MAX_RETRIES = 6


class EndpointClient:
    """Client of an OpenAI-compatible server that completes prompts. The client retries requests after transient
    errors."""

    def __init__(self, stage: Stage, sampling: Sampling) -> None:
        self._sample_config, self._sampling, self._heartbeat = stage.recipe.sample, sampling, stage.progress.beat
        mask_secrets((self._sample_config.endpoint_key_env,))
        api_key = os.environ.get(self._sample_config.endpoint_key_env) or "none"
        self._openai_client = OpenAI(
            base_url=self._sample_config.endpoint, api_key=api_key, timeout=_TIMEOUT_SECONDS, max_retries=_MAX_RETRIES
        )
        self.url = str(self._openai_client.base_url).rstrip("/")
        policy_config = stage.recipe.policy
        self._tokenizer = load_tokenizer(stage.model, policy_config.model_revision, policy_config.chat_template)
        self._thread_pool = ThreadPoolExecutor(self._sample_config.endpoint_requests, "endpoint")

    def complete_prompts(self, prompts: Sequence[tuple[Prompt, Sequence[Mapping[str, Any]]]]) -> list[Group]:
        """Request completions for `prompts`, which are pairs of a prompt and its conversation turns; return one group
        of completions per prompt. Raise ConfigError if the server refuses the requests, and StageFailed if it does not
        reply, or its reply is not valid."""
        num_completions = self._sampling.num_completions
        submit_request, seed = self._thread_pool.submit, self._sampling.seed
        reply_futures = [
            submit_request(self._request_completion, prompt, turns, request_seed(seed, 0, prompt.id, completion_index))
            for prompt, turns in prompts
            for completion_index in range(num_completions)
        ]
        completions = []
        try:
            for future in reply_futures:
                wait_for_futures([future], math.inf, self._heartbeat)  # no time limit, because the HTTP client has one
                completions.append(future.result())
        except OpenAIError as error:
            for future in reply_futures:
                future.cancel()
            error_message = f"sample.endpoint = {self.url!r}: {' '.join(str(error).split())[:300]}"
            raise (StageFailed if is_transient(error) else ConfigError)(error_message) from error
        groups = [completions[start : start + num_completions] for start in range(0, len(completions), num_completions)]
        return [Group(prompt, tuple(group), 0) for (prompt, _), group in zip(prompts, groups, strict=True)]

    def close(self) -> None:
        """Close the connections to the server."""
        self._thread_pool.shutdown(cancel_futures=True)
        self._openai_client.close()

    def _request_completion(self, prompt: Prompt, turns: Sequence[Mapping[str, Any]], seed: int) -> Completion:
        sampling, messages = self._sampling, cast(Any, encode_arguments_in_turns(turns))
        # The OpenAI chat API has the description of a tool under the key `function`.
        prompt_tools = read_tools(prompt.metadata, f"prompt {prompt.id}") or ()
        tools = [each if "function" in each else {"type": "function", "function": each} for each in prompt_tools]
        # Leave out what only vLLM's API has if it has its default value: other servers may refuse it.
        extra_fields: dict[str, Any] = {"tools": tools} if tools else {}
        extra_fields |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}
        extra_fields |= {"repetition_penalty": sampling.repetition_penalty} if sampling.repetition_penalty != 1 else {}
        try:
            chat_reply = self._openai_client.chat.completions.create(
                model=self._sample_config.endpoint_model, messages=messages,
                temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens,
                seed=seed % (1 << 31), extra_body=extra_fields,
            )  # fmt: skip
        except ValueError as error:  # the Content-Type of the reply is JSON, but the reply is not
            raise StageFailed(f"sample.endpoint = {self.url!r}: the reply is no JSON: {first_line(error)}") from error
        # A reply that is not JSON is a string, without choices, and a proxy may write an error in place of a message.
        first_choice = next(iter(getattr(chat_reply, "choices", None) or ()), None)
        if (message := getattr(first_choice, "message", None)) is None:
            raise StageFailed(f"sample.endpoint = {self.url!r}: the reply has no message: {str(chat_reply)[:100]}")
        # Replace lone surrogates, which tokenizers refuse.
        is_reply_complete = getattr(first_choice, "finish_reason", None) in {"stop", "tool_calls"}
        reply_text = _make_reply_text(message, is_finished=is_reply_complete).encode(errors="replace").decode()
        token_ids = tuple(self._tokenizer(reply_text, add_special_tokens=False)["input_ids"])
        # Use placeholder log-probabilities, because servers may return none.
        completion_segment = Segment(token_ids, True, (0.0,) * len(token_ids), 0)
        return Completion((completion_segment,), "stop" if is_reply_complete else "length", reply_text)


def _make_reply_text(message: Any, *, is_finished: bool) -> str:
    """Return the text of a reply together with what servers return in separate fields: the model's thoughts, which are
    put before the text in the tags of Qwen3, and the tool calls, which follow the text in Hermes' format."""
    reasoning_text = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    called_functions = [call.function for call in message.tool_calls or ()]
    tool_calls = [{"name": each.name, "arguments": each.arguments} for each in called_functions]
    json_texts = [json.dumps(call, ensure_ascii=False) for call in decode_arguments(tool_calls)]
    tool_call_texts = [f"<tool_call>\n{json_text}\n</tool_call>" for json_text in json_texts]
    reply_text = "\n".join(filter(None, [message.content, *tool_call_texts]))
    if not reasoning_text:
        return reply_text
    # If the reply was cut off within the thoughts, leave their tag open, as the model itself would.
    return f"<think>\n{reasoning_text.strip()}" + f"\n</think>\n\n{reply_text}" * bool(reply_text or is_finished)
