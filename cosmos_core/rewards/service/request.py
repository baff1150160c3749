"""Parsing and validation of one request to the reward service, before any reward receives it."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosmos_core.rewards.protocol import ProtocolError, decode_request

_LIST_FIELDS: dict[str, type] = {
    "references": str, "completions": str, "video_infos": dict, "metadata": dict, "geneval_tags": str,
    "geneval_includes": object, "geneval_excludes": object, "num_tokens": object, "finish_reason": str, "turns": object,
}  # fmt: skip
"""Type of the elements of request fields that are lists with one value per item, by the name of the field."""
_BOOL_FIELDS = ("ocr_use_gpu", "geneval_only_strict")
_MAX_REQUEST_ITEMS = 65536


@dataclass
class ScoreRequest:
    """Request to a reward service: a batch of items, and the names of the rewards that score it."""

    uuid: str
    fields: dict[str, Any]
    array: np.ndarray
    media_type: str
    """Type of the items in `array`: `image`, `video` (pixels), `latent`, or `text`."""
    reward_names: tuple[str, ...]
    num_bytes: int
    input_info: dict[str, Any]
    decoding_seconds: float = 0.0
    decoded_bytes: int = 0
    """Size of the decoded video in bytes, if the request has latents."""
    remaining_rewards: set[str] = field(default_factory=set)
    """Names of the rewards whose scores are still missing."""

    @property
    def num_items(self) -> int:
        """Return the number of items to score."""
        return len(self.fields["prompts"])


def parse_request(uuid: str, body: bytes | bytearray, served_rewards: Container[str]) -> ScoreRequest:
    """Return the request in an HTTP body; raise `ProtocolError` if it is invalid, or names a reward that is not
    served."""
    fields, array = decode_request(body)
    prompts = fields.get("prompts")
    fields["prompts"] = prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise ProtocolError("prompts must be a list of strings, one for each item of the array")
    if len(prompts) > _MAX_REQUEST_ITEMS:
        raise ProtocolError(f"{len(prompts)} items; at most {_MAX_REQUEST_ITEMS} are taken in one request")
    if len(prompts) != array.shape[0]:
        raise ProtocolError(f"{len(prompts)} prompts and {array.shape[0]} items in the array; there is one for each")
    reward_names = _parse_reward_names(fields, served_rewards)
    media_type = _parse_media_type(fields, array)
    for field_name, element_type in _LIST_FIELDS.items():
        if (values := fields.get(field_name)) is None:
            fields.pop(field_name, None)
        elif not isinstance(values, list) or len(values) != len(prompts):
            raise ProtocolError(f"{field_name} must be a list with one value for each of {len(prompts)} items")
        elif not all(isinstance(value, element_type) for value in values):
            raise ProtocolError(f"{field_name} must be a list of {'objects' if element_type is dict else 'strings'}")
    for field_name in _BOOL_FIELDS:
        if not isinstance(fields.get(field_name, False), bool):
            raise ProtocolError(f"{field_name} must be true or false")
    input_info = _describe_input(media_type, array, fields)
    known_fields = {key: value for key, value in fields.items() if key in (*_LIST_FIELDS, *_BOOL_FIELDS, "prompts")}
    return ScoreRequest(
        uuid, known_fields, array, media_type, reward_names, len(body), input_info, remaining_rewards=set(reward_names)
    )


def _parse_reward_names(json_fields: Mapping[str, Any], served_rewards: Container[str]) -> tuple[str, ...]:
    weights = json_fields.get("reward_fn")
    if not isinstance(weights, dict) or not all(type(weight) in {int, float} for weight in weights.values()):
        raise ProtocolError("reward_fn must be an object of names and weights")
    reward_names = tuple(name for name, weight in weights.items() if weight > 0)
    if not reward_names:
        raise ProtocolError("reward_fn names no reward with a weight above 0")
    if unknown_names := [name for name in reward_names if name not in served_rewards]:
        raise ProtocolError(f"the reward {unknown_names[0][:64]!r} is not served here")
    return reward_names


def _parse_media_type(json_fields: Mapping[str, Any], array: np.ndarray) -> str:
    """Return the media type of a request's array: `image`, `video`, `latent` or `text`. An array that Cosmos-RL's
    clients declare as `video` is `latent` if it has other than 3 channels."""
    media_type = json_fields.get("media_type") or "video"
    if not isinstance(media_type, str) or media_type.lower() not in {"image", "video", "latent", "text"}:
        raise ProtocolError("media_type must be image, video, latent or text")
    media_type, shape = media_type.lower(), array.shape
    if media_type == "text":
        if "completions" not in json_fields or array.size:
            raise ProtocolError("a request of texts has them as completions, and an array without content")
        return media_type
    if not array.size:
        raise ProtocolError(f"the array of shape {shape} is empty")
    if media_type == "image":
        if array.ndim != 4 or (shape[-1] not in {1, 3} and shape[1] not in {1, 3}):
            raise ProtocolError(f"images are an array of batch, height, width and 3, not of shape {shape}")
        return media_type
    if array.ndim != 5:
        raise ProtocolError(f"videos are an array of batch, channels, frames, height and width, not of shape {shape}")
    if media_type == "video" and shape[1] == 3:
        return media_type
    if array.dtype == np.uint8 and shape[-1] % 2:
        raise ProtocolError(
            f"uint8 latents are the bytes of bfloat16, of which {shape[-1]} are no whole number; pixels of a video are "
            f"batch, 3, frames, height, width"
        )
    return "latent"


def _describe_input(media_type: str, array: np.ndarray, json_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of a request's array (shape, dtype, range) in the format of Cosmos-RL's service."""
    input_shape, float_values, dtype_name = list(array.shape), array, f"torch.{array.dtype.name}"
    if media_type == "text":
        return {"shape": input_shape, "dtype": dtype_name}
    if media_type == "latent":
        dtype_name = "torch.bfloat16"
        if array.dtype == np.uint8:
            input_shape[-1] //= 2
            bfloat16_bits = np.ascontiguousarray(array).view(np.uint16).astype(np.uint32)
            float_values = (bfloat16_bits << 16).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        bounds = np.array([float_values.min(), float_values.max()], np.float64)
        if media_type == "latent":  # round to the nearest bfloat16, ties to even
            float32_bits = bounds.astype(np.float32).view(np.uint32)
            rounded_bits = (float32_bits + 0x7FFF + (float32_bits >> 16 & 1)) & 0xFFFF0000
            bounds = np.where(np.isfinite(bounds), rounded_bits.view(np.float32), bounds)
    input_info = {"shape": input_shape, "dtype": dtype_name, "min": f"{bounds[0]:.3f}", "max": f"{bounds[1]:.3f}"}
    return input_info if media_type == "image" else {**input_info, "video_infos": json_fields.get("video_infos") or []}
