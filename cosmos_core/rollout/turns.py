"""Multi-turn rollouts: the policy calls tools, reads their results and continues until a turn has no call.

`MultiTurnEngine` wraps an engine, which samples the tokens. The prompt of the next turn consists of the token ids so
far and the ids of the tool results; the chat template is not applied again. Tools of turns that the wrapped engine
returns together are called concurrently, and other turns wait for the results. So the batch of a turn does not depend
on the speed of a tool, and a resumed run samples the same tokens.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Literal

import torch.distributed as dist

from cosmos_core.data.chat import ToolResultTokens, make_prompt_rendering, make_tool_runner
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.parallel import exchange
from cosmos_core.parallel.mesh import num_ranks, rank_number, send_heartbeat, wait_for_ranks
from cosmos_core.rollout.base import EngineSettings, EngineWrapper, UnfinishedGroup, stop_token_ids
from cosmos_core.tools.base import ToolCall, ToolResult, parse_tool_calls
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment, Turn

_TOOL_CALL_TIMEOUT = timedelta(days=1)
"""Time for which the ranks of an engine wait for the tools that its first rank calls; each tool has a shorter limit."""


@dataclass
class _Conversation:
    """Conversation up to its newest turn: prompt, turns of the policy, and tool results. When it ends, it becomes
    completion `k` of its group."""

    group: UnfinishedGroup
    k: int
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_policy_turns: int = 0
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tool calls of the policy's newest turn."""

    @property
    def num_tokens_left(self) -> int:
        return self.group.sampling.max_tokens - sum(len(segment.token_ids) for segment in self.segments)

    def end_conversation(self, finish_reason: Literal["stop", "length"]) -> None:
        """End the conversation, and add its completion with the finish reason `finish_reason` to the group."""
        final_text = next(turn.text for turn in reversed(self.turns) if turn.role == "assistant")
        self.group.completions[self.k] = Completion(tuple(self.segments), finish_reason, final_text, tuple(self.turns))


class MultiTurnEngine(EngineWrapper):
    """Multi-turn `Engine`; `step` and `abort` exist if the wrapped engine has them. After a weight load, conversations
    continue with the new weights."""

    def __init__(self, engine: Any, settings: EngineSettings) -> None:
        super().__init__(engine)
        multi_turn_config = settings.rollout.multi_turn_config
        self._tokenizer, self._max_model_len = settings.tokenizer, settings.max_model_len
        self._max_turns, self._has_tools = multi_turn_config.max_assistant_turns, multi_turn_config.enable_tools
        self._stop_token_ids = stop_token_ids(settings.model, settings.tokenizer)
        self._pending_samplings: dict[tuple[int, int], list[Sampling]] = defaultdict(list)
        self._conversation_by_id: dict[int, _Conversation] = {}
        if hasattr(engine, "step"):
            self.step: Callable[[], list[Group]] = lambda: self._continue_conversations(engine.step())
        if hasattr(engine, "abort"):
            self.abort = self._abort_conversations
        self._rank_group: dist.ProcessGroup | None = None
        if (ranks_per_engine := engine.ranks_per_engine) > 1:
            self._rank_group, _ = dist.new_subgroups(ranks_per_engine, timeout=_TOOL_CALL_TIMEOUT, backend="gloo")
        num_workers = max(1, count_usable_cores() // num_ranks())
        self._send_heartbeat = settings.beat
        self._tool_runner = make_tool_runner(multi_turn_config, num_workers, partial(send_heartbeat, settings.beat))
        if self._has_tools:
            chat_rendering = make_prompt_rendering(multi_turn_config, self._tool_runner.schemas())
            self._tool_result_tokens = ToolResultTokens(settings.tokenizer, chat_rendering, self._stop_token_ids)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit prompts to the wrapped engine; the first turns of all completions of a prompt form one group."""
        self._engine.submit(prompts, sampling, step)
        for prompt in prompts:
            self._pending_samplings[prompt.id, step].append(sampling)

    def completed(self) -> list[Group]:
        """Wait for groups whose conversations have all ended, and return them; empty if no conversation is in
        progress."""
        while groups := self._engine.completed():
            if complete_groups := self._continue_conversations(groups):
                return complete_groups
        wait_for_ranks(self._send_heartbeat)  # wait for tools, which may take longer than the timeout of a collective
        return []

    def close(self) -> None:
        """End the worker processes that call tools, and close the wrapped engine."""
        self._tool_runner.close()
        self._engine.close()

    def _continue_conversations(self, groups: Sequence[Group]) -> list[Group]:
        """Add newly sampled turns to their conversations, and continue those that have not ended. Return the groups in
        which all conversations have ended."""
        updated_conversations = [turn_update for group in groups for turn_update in self._add_turns(group)]
        self._submit_next_turns([conversation for conversation, has_ended in updated_conversations if not has_ended])
        unfinished_groups = {id(conversation.group): conversation.group for conversation, _ in updated_conversations}
        return list(filter(None, (group.to_group() for group in unfinished_groups.values())))

    def _abort_conversations(self) -> None:
        engine: Any = self._engine
        engine.abort()
        self._pending_samplings.clear()
        self._conversation_by_id.clear()

    def _add_turns(self, group: Group) -> list[tuple[_Conversation, bool]]:
        """Add each turn that `group` contains to its conversation, and return the conversations, each with whether it
        has ended."""
        conversation = self._conversation_by_id.pop(group.prompt.id, None)
        if conversation is not None:
            return [(conversation, self._add_turn(conversation, group.completions[0]))]
        pending_samplings = self._pending_samplings[group.prompt.id, group.step]
        unfinished_group = UnfinishedGroup(group.prompt, pending_samplings.pop(0), group.step)
        if not pending_samplings:
            del self._pending_samplings[group.prompt.id, group.step]
        conversations = [_Conversation(unfinished_group, k) for k in range(len(group.completions))]
        return [(c, self._add_turn(c, turn)) for c, turn in zip(conversations, group.completions, strict=True)]

    def _add_turn(self, conversation: _Conversation, turn_completion: Completion) -> bool:
        """Add a turn of the policy to a conversation, and return whether the conversation has ended."""
        num_tokens_left, turn_text = conversation.num_tokens_left, turn_completion.text
        is_turn_too_long = turn_completion.num_sampled > num_tokens_left
        is_turn_truncated = turn_completion.finish_reason == "length" or is_turn_too_long
        segments = _truncate_segments(turn_completion.segments, num_tokens_left)
        token_ids = [token for segment in segments for token in segment.token_ids]
        if is_turn_too_long:
            # Shorten the text: the turn was sampled with the limit of another turn, the largest of the submission.
            turn_text = str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        conversation.tool_calls = []
        if self._has_tools and not is_turn_truncated:
            # Keep special tokens, which may mark tool calls; decode also without the last one, which may end the turn.
            decoded_texts = [str(self._tokenizer.decode(kept_ids)) for kept_ids in (token_ids[:-1], token_ids)]
            conversation.tool_calls = parse_tool_calls(decoded_texts[-1])
            turn_text = next(t for t in (turn_text, *decoded_texts) if parse_tool_calls(t) == conversation.tool_calls)
        conversation.segments += segments
        conversation.turns.append(Turn("assistant", turn_text))
        conversation.num_policy_turns += 1
        if conversation.tool_calls and conversation.num_policy_turns < self._max_turns:
            return False
        conversation.end_conversation("length" if is_turn_truncated or conversation.tool_calls else "stop")
        return True

    def _submit_next_turns(self, conversations: Sequence[_Conversation]) -> None:
        """Call the tools that `conversations` request, and submit the next turns of the conversations."""
        tool_calls = [call for conversation in conversations for call in conversation.tool_calls]
        if self._rank_group is None or not tool_calls:
            tool_results = iter(self._tool_runner.run_tool_calls(tool_calls))
        else:  # the first rank of an engine calls the tools for all ranks of the engine
            leader_rank = dist.get_global_rank(self._rank_group, 0)
            local_tool_results = self._tool_runner.run_tool_calls(tool_calls) if rank_number() == leader_rank else []
            tool_result_fields = [(result.text, result.is_error) for result in local_tool_results]
            received_result_fields = exchange.broadcast(tool_result_fields, leader_rank, self._rank_group)
            tool_results = (ToolResult(*values) for values in received_result_fields)
        prompts_by_submission_key: dict[tuple[Sampling, int], list[tuple[Prompt, int]]] = defaultdict(list)
        for conversation in conversations:
            results_with_tool_names = [(call.name or "unknown", next(tool_results)) for call in conversation.tool_calls]
            if (prompt := self._make_next_prompt(conversation, results_with_tool_names)) is None:
                conversation.end_conversation("length")
                continue
            self._conversation_by_id[prompt.id] = conversation
            sampling_and_step = conversation.group.sampling, conversation.group.step
            prompts_by_submission_key[sampling_and_step].append((prompt, conversation.num_tokens_left))
        for (sampling, step), prompts in prompts_by_submission_key.items():
            # Use the largest token limit, because a submission has only one; longer turns are truncated later.
            max_turn_tokens = max(num_tokens for _, num_tokens in prompts)
            turn_sampling = replace(sampling, num_completions=1, max_tokens=max_turn_tokens)
            self._engine.submit([prompt for prompt, _ in prompts], turn_sampling, step)

    def _make_next_prompt(
        self, conversation: _Conversation, named_results: Sequence[tuple[str, ToolResult]]
    ) -> Prompt | None:
        """Add tool results to a conversation, and return the prompt of its next turn; None: no tokens are left."""
        conversation.turns += [Turn("tool", result.text, result.is_error) for _, result in named_results]
        tool_result_token_ids, group = self._tool_result_tokens.tokenise_results(named_results), conversation.group
        conversation_token_ids = [token for segment in conversation.segments for token in segment.token_ids]
        later_turn_token_ids = (*conversation_token_ids, *tool_result_token_ids)
        token_ids = (*group.prompt.token_ids, *later_turn_token_ids)
        if len(tool_result_token_ids) >= conversation.num_tokens_left or len(token_ids) >= self._max_model_len:
            return None
        conversation.segments.append(Segment(tool_result_token_ids, False, (), conversation.segments[-1].version))
        turn_key = (group.prompt.id, group.step, conversation.k, conversation.num_policy_turns)
        request_id_candidates = (make_turn_request_id(*turn_key, attempt_index) for attempt_index in count())
        request_id = next(id_ for id_ in request_id_candidates if id_ not in self._conversation_by_id)
        return replace(group.prompt, id=request_id, token_ids=token_ids, later_turn_token_ids=later_turn_token_ids)


def make_turn_request_id(prompt_id: int, step: int, completion_index: int, turn_index: int, attempt: int = 0) -> int:
    """Return the prompt id of a later turn of a conversation; `attempt` distinguishes requests for one prompt in one
    step."""
    id_digest = hashlib.sha256(f"turn/{prompt_id}/{step}/{completion_index}/{turn_index}/{attempt}".encode()).digest()
    return int.from_bytes(id_digest[:8], "big") >> 1


def _truncate_segments(segments: Sequence[Segment], num_tokens: int) -> list[Segment]:
    """Return the first `num_tokens` tokens of sampled segments as segments: at least one, which can be empty."""
    kept_segments = []
    for segment in segments:
        token_ids = segment.token_ids[: max(0, num_tokens)]
        num_tokens -= len(token_ids)
        if token_ids:
            kept_segments.append(Segment(token_ids, True, segment.logprobs[: len(token_ids)], segment.version))
    return kept_segments or [Segment((), True, (), segments[0].version)]
