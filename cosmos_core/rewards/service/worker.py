"""Program of a reward process: it loads one reward, then scores the batches that arrive on standard input.

A message is a line of JSON, then the bytes of the arrays listed in it. Replies use the same format on standard output;
output of the reward itself goes to the log. The process ends with the service: at the end of its input, or by a signal.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from cosmos_core.errors import CosmosError
from cosmos_core.job_signals import ignore_job_signals
from cosmos_core.parent import kill_with_parent
from cosmos_core.rewards.base import error_on_one_line
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, load_scorer, replace_nonfinite
from cosmos_core.rewards.wan_latents import WanVae

_INPUT_FIELD_BY_REQUEST_FIELD = {"references": "reference", "completions": "to_be_evaluated"}
_INFO_KEY_BY_REQUEST_FIELD = {
    "geneval_tags": "tag", "geneval_includes": "include", "geneval_excludes": "exclude", "num_tokens": "num_tokens",
    "finish_reason": "finish_reason", "turns": "turns",
}  # fmt: skip


def main() -> None:
    """Load the reward that the first message on standard input names, report that it is ready, and score batches until
    the end of standard input."""
    kill_with_parent(os.getppid())
    ignore_job_signals()  # after SIGTERM, the service still needs this process for the accepted requests
    input_stream, output_stream = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    start_message = read_message(input_stream)
    if start_message is None:
        return
    sys.path[:0] = start_message[0].pop("path", [])
    reward_name, entry = start_message[0]["name"], start_message[0]["entry"]
    try:
        settings = RewardModelSettings(**start_message[0]["settings"])
        if reward_name:
            scorer_or_decoder: Any = load_scorer(reward_name, entry, settings)
        else:
            scorer_or_decoder = WanVae("decode_args.model_path", settings.model_path, settings.device, settings.dtype)
    except Exception as error:  # noqa: BLE001 - any error of a model's code is reported to the service
        if not isinstance(error, CosmosError):
            traceback.print_exc()
        load_error_text = str(error) if isinstance(error, CosmosError) else error_on_one_line(error)
        write_message(output_stream, {"error": load_error_text}, [])
        return
    # The service compares the number of channels with that of the latents in a request.
    model_properties = {} if reward_name else {"latent_channels": scorer_or_decoder.num_channels}
    write_message(output_stream, {"ready": True, **model_properties}, [])
    while (batch_message := read_message(input_stream)) is not None:
        (batch_header, arrays), start_time = batch_message, time.monotonic()
        reply: dict[str, Any] = {}
        videos: list[np.ndarray] = []
        try:
            if reward_name:
                reply["results"] = _score_batch(scorer_or_decoder, batch_header["jobs"], arrays)
            else:
                videos = [scorer_or_decoder.decode(array) for array in arrays]
        except Exception as error:  # noqa: BLE001 - the client receives the error, and the next batch may succeed
            traceback.print_exc()
            if "CUDA error" in str(error):  # exit, because all CUDA calls after a CUDA error fail
                sys.exit(1)
            reply, videos = {"error": error_on_one_line(error)}, []
        reply = {"id": batch_header["id"], **reply, "seconds": time.monotonic() - start_time}
        write_message(output_stream, reply, videos)


def read_message(input_stream: BinaryIO) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Return the header and the arrays of the next message of the reward service; None at the end of the input."""
    header_line = input_stream.readline()
    if not header_line.endswith(b"\n"):
        return None
    message_header = json.loads(header_line)
    arrays = []
    for shape, dtype in message_header.pop("arrays", []):
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        array_bytes = input_stream.read(num_bytes)
        if len(array_bytes) != num_bytes:
            return None
        arrays.append(np.frombuffer(array_bytes, dtype).reshape(shape))
    return message_header, arrays


def encode_header(message_header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Return the first line of a message between service and worker process: the header as JSON, with shapes and dtypes
    of the arrays that follow it."""
    array_headers = [(list(array.shape), array.dtype.str) for array in arrays]
    return json.dumps({**message_header, "arrays": array_headers}).encode() + b"\n"


def write_message(output_stream: BinaryIO, message_header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Write a message between service and worker process: a header as a line of JSON, then the bytes of the arrays."""
    output_stream.write(encode_header(message_header, arrays))
    for array in arrays:
        output_stream.write(np.ascontiguousarray(array).data)
    output_stream.flush()


def _score_batch(scorer: Any, jobs: Sequence[Mapping[str, Any]], arrays: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    items_by_job = [make_reward_inputs(job, array) for job, array in zip(jobs, arrays, strict=True)]
    batch_items = [item for job_items in items_by_job for item in job_items]
    score_columns, item_errors = replace_nonfinite(scorer.score(batch_items), len(batch_items))
    scorer_errors = getattr(scorer, "errors", None) or item_errors
    item_errors = [error or reward_error for error, reward_error in zip(item_errors, scorer_errors, strict=True)]
    job_results, first_item_index = [], 0
    for job_items in items_by_job:
        item_slice = slice(first_item_index, first_item_index + len(job_items))
        job_results.append({"scores": _slice_columns(score_columns, item_slice), "errors": item_errors[item_slice]})
        first_item_index = item_slice.stop
    json.dumps(job_results)  # fail the batch, not the process, if a score has no JSON form
    return job_results


def _slice_columns(columns: Mapping[str, Any], item_slice: slice) -> dict[str, Any]:
    return {k: _slice_columns(v, item_slice) if isinstance(v, dict) else v[item_slice] for k, v in columns.items()}


def make_reward_inputs(job: Mapping[str, Any], media_array: np.ndarray) -> list[RewardInput]:
    """Return the inputs of a reward model for the items of a request, from the request's fields and its array."""
    items = []
    for i, prompt in enumerate(job["prompts"]):
        text_fields = {key: job[name][i] for name, key in _INPUT_FIELD_BY_REQUEST_FIELD.items() if name in job}
        info_fields: dict[str, Any] = {}
        for name in ("video_infos", "metadata"):
            info_fields |= job[name][i] if name in job else {}
        # Fields of the completion, such as `turns`, take precedence over columns of the row.
        info_fields |= {key: job[name][i] for name, key in _INFO_KEY_BY_REQUEST_FIELD.items() if name in job}
        info_fields |= {name: job[name] for name in ("geneval_only_strict", "ocr_use_gpu") if name in job}
        media = None if job["media"] == "text" else _to_media(job["media"], media_array[i])
        items.append(RewardInput(prompt=prompt, media=media, info=info_fields, **text_fields))
    return items


def _to_media(media_type: str, pixels: np.ndarray) -> Any:
    """Return the image (PIL.Image) or the video (uint8 array of frames, height, width and 3) of an item."""
    if pixels.dtype != np.uint8:
        pixels = np.clip(np.nan_to_num(pixels), 0, 255).astype(np.uint8)
    if media_type == "video":  # move the channels to the last axis, which rewards expect
        return np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    from PIL import Image

    if pixels.shape[-1] not in {1, 3}:
        pixels = np.moveaxis(pixels, 0, -1)
    pixels = np.ascontiguousarray(pixels)
    return Image.fromarray(pixels[..., 0]).convert("RGB") if pixels.shape[-1] == 1 else Image.fromarray(pixels)


if __name__ == "__main__":
    main()
