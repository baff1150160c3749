"""Reward from a language model that judges completions by a rubric, behind an OpenAI-compatible server."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from cosmos_core.rewards.base import error_on_one_line
from cosmos_core.run.files import read_json_object, user_cache_folder, write_text

_MAX_RETRIES = 3
_JSON_DECODER = json.JSONDecoder(strict=False)  # accept line breaks in strings, which judges may write
_PLACEHOLDER_PATTERN = re.compile(r"\{(prompt|reference|completion)\}")
_REPLY_FORMAT = '\n\nReply with JSON: {{"reason": one sentence, "score": a whole number from 0 to {highest}}}.'


async def judge(
    prompts: Sequence[Any], completions: Sequence[Any], reference: Sequence[Any], judge_config: Mapping[str, Any]
) -> list[tuple[float, dict[str, float]] | ValueError]:
    """Return for each completion the judge's score divided by `highest_score`, and as metrics the numbers of tokens
    that the judge read and wrote, 0 if its reply was in the cache. The result is a `ValueError` if the reply has no
    score, or if the judge's server refuses the request or cannot be reached after several attempts."""
    api_key = os.environ.get(judge_config["key_env"]) or "none"
    async with AsyncOpenAI(base_url=judge_config["endpoint"], api_key=api_key, max_retries=_MAX_RETRIES) as client:
        template_fields = [
            {"prompt": _turns_to_text(prompt), "completion": _turns_to_text(completion), "reference": str(answer)}
            for prompt, completion, answer in zip(prompts, completions, reference, strict=True)
        ]
        return list(await asyncio.gather(*(_request_score(client, judge_config, fields) for fields in template_fields)))


async def _request_score(
    judge_client: AsyncOpenAI, judge_config: Mapping[str, Any], template_fields: Mapping[str, str]
) -> tuple[float, dict[str, float]] | ValueError:
    request_arguments = _build_request(judge_config, template_fields)
    cache_key = json.dumps([judge_config["endpoint"], request_arguments], sort_keys=True)
    cache_file = user_cache_folder() / "judge" / f"{hashlib.sha256(cache_key.encode()).hexdigest()}.json"
    judge_reply = read_json_object(cache_file) if judge_config["cache"] else {}
    token_counts = {"prompt_tokens": 0.0, "completion_tokens": 0.0}
    if "text" not in judge_reply:
        try:
            chat_response = await judge_client.chat.completions.create(**request_arguments)
            judge_reply = {"text": chat_response.choices[0].message.content or ""}
        except (OpenAIError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Invalidate only this completion: it is too long, the server is busy, or its response has no chat message.
            score_error = ValueError(error_on_one_line(error))
            score_error.__cause__ = error  # the cause tells the caller whether a retry may help
            return score_error
        token_counts = {name: float(getattr(chat_response.usage, name, 0) or 0) for name in token_counts}
    if isinstance(judge_score := _parse_judge_score(judge_reply["text"], judge_config["highest_score"]), ValueError):
        return judge_score
    if judge_config["cache"]:
        with suppress(OSError):  # the score is valid even if the cache cannot be written
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(cache_file, json.dumps(judge_reply), fsync=False)
    return judge_score / judge_config["highest_score"], token_counts


def _build_request(judge_config: Mapping[str, Any], template_fields: Mapping[str, str]) -> dict[str, Any]:
    # Replace all placeholders in one pass, because the inserted texts may look like placeholders.
    user_message = _PLACEHOLDER_PATTERN.sub(lambda match: template_fields[match[1]], judge_config["template"])
    highest_score = judge_config["highest_score"]
    score_schema = {"type": "integer", "minimum": 0, "maximum": highest_score}
    reply_properties = {"reason": {"type": "string"}, "score": score_schema}
    reply_schema = {
        "type": "object",
        "properties": reply_properties,
        "required": [*reply_properties],
        "additionalProperties": False,
    }
    return {
        "model": judge_config["model"],
        "messages": [
            {"role": "system", "content": judge_config["rubric"] + _REPLY_FORMAT.format(highest=highest_score)},
            {"role": "user", "content": user_message},
        ],
        "temperature": judge_config["temperature"],
        "max_tokens": judge_config["max_tokens"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "judgement", "schema": reply_schema}},
    }


def _parse_judge_score(reply_text: str, highest_score: int) -> float | ValueError:
    """Return the score from 0 to `highest_score` in a judge's reply, which can have text around its JSON; return a
    `ValueError` if the reply has no valid score or several scores."""
    reply_text = reply_text.rpartition("</think>")[2]
    scores, brace_index = [], reply_text.find("{")
    while brace_index >= 0:
        json_end = brace_index + 1
        with suppress(ValueError, KeyError, RecursionError):  # skip braces that are no JSON, such as those of formulas
            json_object, json_end = _JSON_DECODER.raw_decode(reply_text, brace_index)
            scores.append(json_object["score"])
        brace_index = reply_text.find("{", json_end)
    if len(scores) != 1:
        return ValueError(f"the judge replied {reply_text[:80]!r}, which is no JSON with a score")
    [score] = scores
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= highest_score:
        return ValueError(f"the judge gave the score {score!r}; the rule is a number from 0 to {highest_score}")
    return float(score)


def _turns_to_text(text_or_turns: Any) -> str:
    """Return a string unchanged, one turn as its content, and several turns as text with their roles."""
    if isinstance(text_or_turns, str):
        return text_or_turns
    turns = [turn for turn in text_or_turns if isinstance(turn, Mapping)]
    if len(turns) == 1:
        return _content_to_text(turns[0]["content"])
    return "\n\n".join(f"{turn['role']}: {_content_to_text(turn['content'])}" for turn in turns)


def _content_to_text(turn_content: Any) -> str:
    """Return the content of a turn as text; each part that is no text is replaced by its type, such as `[image]`."""
    if not isinstance(turn_content, list):
        return str(turn_content)
    return "".join(part["text"] if "text" in part else f"[{part['type']}]" for part in turn_content)
