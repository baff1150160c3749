"""Score of an image by a vision-language judge at an endpoint, from 0.2 to 1: UnifiedReward (arXiv 2503.05236).

The endpoint is any server with the chat API of OpenAI, such as vLLM with the published model.
"""

import base64
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx

from cosmos_core.errors import RewardError
from cosmos_core.rewards.base import error_on_one_line
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns

_DEFAULT_MODEL = "UnifiedReward-7b-v1.5"
_JUDGE_QUESTION = (
    "You see an image that was generated for a caption. Judge how well it shows what the caption says (its objects, "
    "their attributes and relations), and its visual quality (clear, detailed, true in colour, pleasing). Give one "
    "score from 1 to 5 after 'Final Score:'.\nText Caption: [{prompt}]"
)
_SCORE_PATTERN = re.compile(r"Final Score:[\s*]*([1-5](?:\.\d+)?)")
_REQUEST_TIMEOUT_SECONDS = 120.0


class UnifiedRewardReward:
    """Reward model with the score `unified_reward`; `options` has `model`, `question` (a template with `{prompt}`), and
    `concurrent`, the maximum number of concurrent requests (8 by default)."""

    def __init__(self, settings: RewardModelSettings) -> None:
        if not settings.endpoint_url.startswith(("http://", "https://")):
            raise RewardError(
                "the reward 'unified_reward' needs endpoint_url: a server with OpenAI's interface that has the model, "
                "such as vllm serve CodeGoat24/UnifiedReward-7b-v1.5"
            )
        self._model = settings.options.get("model") or settings.model_path or _DEFAULT_MODEL
        self._question_template = settings.options.get("question", _JUDGE_QUESTION)
        self._max_concurrency = int(settings.options.get("concurrent", 8))
        auth_headers = {"Authorization": f"Bearer {settings.endpoint_api_key}"} if settings.endpoint_api_key else {}
        self._http_client = httpx.Client(
            base_url=settings.endpoint_url, headers=auth_headers, timeout=_REQUEST_TIMEOUT_SECONDS
        )

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the score of each image; an image for which the judge returns no number has no score."""
        with ThreadPoolExecutor(self._max_concurrency) as executor:
            scores_and_errors = list(executor.map(self._request_score, items))
        self.errors = [error for _, error in scores_and_errors]
        return {"unified_reward": [score for score, _ in scores_and_errors]}

    def _request_score(self, item: RewardInput) -> tuple[float | None, str]:
        png_buffer = BytesIO()
        middle_image(item.media).save(png_buffer, format="PNG")
        image_url = f"data:image/png;base64,{base64.b64encode(png_buffer.getvalue()).decode()}"
        message_content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": image_url}},
            {"type": "text", "text": self._question_template.replace("{prompt}", item.prompt)},
        ]
        request = {"model": self._model, "messages": [{"role": "user", "content": message_content}], "temperature": 0}
        try:
            chat_response = self._http_client.post("chat/completions", json=request).raise_for_status()
            reply_text = str(chat_response.json()["choices"][0]["message"]["content"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return None, error_on_one_line(error)
        match = _SCORE_PATTERN.search(reply_text)
        return (float(match[1]) / 5, "") if match else (None, f"the judge gives no score: {reply_text[-100:]!r}")
