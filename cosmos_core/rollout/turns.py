"""Multi-turn rollouts: the policy calls tools, reads their results and continues until a turn has no call.

`Turns` wraps an engine, which samples the tokens. Sampled tokens are kept as they are: the next turn's prompt consists
of the token ids so far and the ids of the tool results; the chat template is not applied again. Tools of turns that the
inner engine returns together are called concurrently, and other turns wait for the results. So the batch of a turn does
not depend on the speed of a tool, and a resumed run samples the same tokens.

A sampled turn is a segment with mask 1; the text of tools is a segment with mask 0.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Literal

import torch.distributed as dist

from cosmos_core.data.chat import ToolText, open_tools, prompt_rendering
from cosmos_core.parallel import exchange
from cosmos_core.parallel.mesh import num_ranks, rank_number, send_heartbeat, wait_for_ranks
from cosmos_core.rollout.base import EngineSettings, EngineWrapper, UnfinishedGroup, stop_token_ids
from cosmos_core.tools.base import ToolCall, ToolResult, parse_calls
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment, Turn

_MAX_TOOL_TIME = timedelta(days=1)
"""Time for which the ranks of an engine wait for the tools that its first rank calls; the tools have a time limit."""


@dataclass
class _Conversation:
    """Conversation of one completion of a group, up to its newest turn."""

    group: UnfinishedGroup
    k: int
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_turns: int = 0
    """Number of turns that the policy has sampled."""
    calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of the policy's newest turn."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the ids of all tokens of the conversation after the prompt."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def num_tokens_left(self) -> int:
        """Return the number of tokens by which the completion may still grow."""
        return self.group.sampling.max_tokens - sum(len(segment.token_ids) for segment in self.segments)

    def end(self, reason: Literal["stop", "length"]) -> None:
        """End the conversation, and add its completion with the finish reason `reason` to the group."""
        text = next(turn.text for turn in reversed(self.turns) if turn.role == "assistant")
        self.group.completions[self.k] = Completion(tuple(self.segments), reason, text, tuple(self.turns))


class Turns(EngineWrapper):
    """Multi-turn `Engine`, with `step` and `abort` if the inner engine has them; conversations continue with new
    weights after each weight load, also within a turn."""

    def __init__(self, inner_engine: Any, settings: EngineSettings) -> None:
        super().__init__(inner_engine)
        config = settings.rollout.multi_turn_config
        self._tokenizer, self._max_model_len = settings.tokenizer, settings.max_model_len
        self._max_turns, self._has_tools = config.max_assistant_turns, config.enable_tools
        self._stop_ids = stop_token_ids(settings.model, settings.tokenizer)
        self._first: dict[tuple[int, int], list[Sampling]] = defaultdict(list)
        self._conversations: dict[int, _Conversation] = {}
        if hasattr(inner_engine, "step"):
            self.step: Callable[[], list[Group]] = lambda: self._continue_groups(inner_engine.step())
        if hasattr(inner_engine, "abort"):
            self.abort = self._abort
        self._engine_ranks: dist.ProcessGroup | None = None
        if (ranks_per_engine := inner_engine.ranks_per_engine) > 1:
            self._engine_ranks, _ = dist.new_subgroups(ranks_per_engine, timeout=_MAX_TOOL_TIME, backend="gloo")
        num_workers = max(1, len(os.sched_getaffinity(0)) // num_ranks())
        self._beat = settings.beat
        self._tool_runner = open_tools(config, num_workers, partial(send_heartbeat, settings.beat))
        if self._has_tools:
            chat_rendering = prompt_rendering(config, self._tool_runner.schemas())
            self._text = ToolText(settings.tokenizer, chat_rendering, self._stop_ids)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit prompts, see `Engine.submit`; the first turns of a group are requested together."""
        self._inner.submit(prompts, sampling, step)
        for prompt in prompts:
            self._first[prompt.id, step].append(sampling)

    def completed(self) -> list[Group]:
        """Return the groups whose conversations have all ended; see `Engine.completed`."""
        while groups := self._inner.completed():
            if complete_groups := self._continue_groups(groups):
                return complete_groups
        wait_for_ranks(self._beat)  # the tools of a rank may take longer than a collective of the other ranks
        return []

    def close(self) -> None:
        """End the processes of tools, and close the inner engine."""
        self._tool_runner.close()
        self._inner.close()

    def _continue_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Continue the conversations whose turns have ended; return the groups that are done."""
        updates = [update for group in groups for update in self._add_turns(group)]
        self._submit_next_turns([conversation for conversation, has_ended in updates if not has_ended])
        unfinished_groups = {id(conversation.group): conversation.group for conversation, _ in updates}
        return [each for group in unfinished_groups.values() if (each := group.complete_group()) is not None]

    def _abort(self) -> None:
        """Discard all requests in flight."""
        inner_engine: Any = self._inner
        inner_engine.abort()
        self._first.clear()
        self._conversations.clear()

    def _add_turns(self, group: Group) -> list[tuple[_Conversation, bool]]:
        """Add the turns in `group` to their conversations; return each conversation and whether it has ended."""
        conversation = self._conversations.pop(group.prompt.id, None)
        if conversation is not None:
            return [(conversation, self._add_turn(conversation, group.completions[0]))]
        pending_samplings = self._first[group.prompt.id, group.step]
        unfinished_group = UnfinishedGroup(group.prompt, pending_samplings.pop(0), group.step)
        if not pending_samplings:
            del self._first[group.prompt.id, group.step]
        conversations = [_Conversation(unfinished_group, k) for k in range(len(group.completions))]
        return [(each, self._add_turn(each, turn)) for each, turn in zip(conversations, group.completions, strict=True)]

    def _add_turn(self, conversation: _Conversation, turn: Completion) -> bool:
        """Add a turn of the policy; return whether the conversation has ended."""
        num_tokens_left, text = conversation.num_tokens_left, turn.text
        is_too_long = turn.num_sampled > num_tokens_left
        is_truncated = turn.finish_reason == "length" or is_too_long
        segments = _first_tokens(turn.segments, num_tokens_left)
        token_ids = [token for segment in segments for token in segment.token_ids]
        if is_too_long:  # all prompts of one call have the same `max_tokens`, the largest of their limits
            text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        conversation.calls = []
        if self._has_tools and not is_truncated:
            # Some tokenizers mark calls by special tokens, of which the last may also end the turn.
            marked_texts = [str(self._tokenizer.decode(ids)) for ids in (token_ids[:-1], token_ids)]
            conversation.calls = parse_calls(marked_texts[-1])
            text = next(each for each in (text, *marked_texts) if parse_calls(each) == conversation.calls)
        conversation.segments += segments
        conversation.turns.append(Turn("assistant", text))
        conversation.num_turns += 1
        if conversation.calls and conversation.num_turns < self._max_turns:
            return False
        conversation.end("length" if is_truncated or conversation.calls else "stop")
        return True

    def _submit_next_turns(self, conversations: Sequence[_Conversation]) -> None:
        """Call the tools that `conversations` request, and submit the next turns of the conversations."""
        tool_results = iter(self._call_tools([call for conversation in conversations for call in conversation.calls]))
        prompts_by_settings: dict[tuple[Sampling, int], list[tuple[Prompt, int]]] = defaultdict(list)
        for conversation in conversations:
            named_results = [(call.name or "unknown", next(tool_results)) for call in conversation.calls]
            if (prompt := self._next_prompt(conversation, named_results)) is None:
                conversation.end("length")
                continue
            self._conversations[prompt.id] = conversation
            settings = conversation.group.sampling, conversation.group.step
            prompts_by_settings[settings].append((prompt, conversation.num_tokens_left))
        for (sampling, step), prompts in prompts_by_settings.items():
            # All prompts of a submission get the largest of their token limits; longer turns are truncated afterwards.
            max_turn_tokens = max(num_tokens for _, num_tokens in prompts)
            turn_sampling = replace(sampling, num_completions=1, max_tokens=max_turn_tokens)
            self._inner.submit([prompt for prompt, _ in prompts], turn_sampling, step)

    def _call_tools(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return the results of tool calls. The ranks of one engine must continue with the same tokens, so its first
        rank calls the tools for all of them."""
        if self._engine_ranks is None or not calls:
            return self._tool_runner.results(calls)
        first_rank = dist.get_global_rank(self._engine_ranks, 0)
        results = self._tool_runner.results(calls) if rank_number() == first_rank else []
        fields = exchange.broadcast([(each.text, each.is_error) for each in results], first_rank, self._engine_ranks)
        return [ToolResult(*each) for each in fields]

    def _next_prompt(self, conversation: _Conversation, results: Sequence[tuple[str, ToolResult]]) -> Prompt | None:
        """Add tool results to a conversation, and return the prompt of its next turn; None: no tokens are left."""
        conversation.turns += [Turn("tool", result.text, result.is_error) for _, result in results]
        result_ids, group = self._text.ids(results), conversation.group
        later_ids = (*conversation.token_ids, *result_ids)
        token_ids = (*group.prompt.token_ids, *later_ids)
        if len(result_ids) >= conversation.num_tokens_left or len(token_ids) >= self._max_model_len:
            return None
        conversation.segments.append(Segment(result_ids, False, (), conversation.segments[-1].version))
        turn_key = (group.prompt.id, group.step, conversation.k, conversation.num_turns)
        request_ids = (turn_request_id(*turn_key, attempt) for attempt in count())
        request_id = next(each for each in request_ids if each not in self._conversations)
        return replace(group.prompt, id=request_id, token_ids=token_ids, later_token_ids=later_ids)


def turn_request_id(prompt_id: int, step: int, k: int, turn: int, attempt: int = 0) -> int:
    """Return the id under which the prompt of a later turn is submitted to the inner engine. Seeds are derived from it
    (`request_seed`); `attempt` distinguishes equal requests, such as a prompt submitted twice for one step."""
    digest = hashlib.sha256(f"turn/{prompt_id}/{step}/{k}/{turn}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _first_tokens(segments: Sequence[Segment], num_tokens: int) -> list[Segment]:
    """Return the first `num_tokens` tokens of sampled segments; without tokens, one empty segment with a version."""
    truncated = []
    for segment in segments:
        token_ids = segment.token_ids[: max(0, num_tokens)]
        num_tokens -= len(token_ids)
        if token_ids:
            truncated.append(Segment(token_ids, True, segment.logprobs[: len(token_ids)], segment.version))
    return truncated or [Segment((), True, (), segments[0].version)]
