"""Visual quality, motion quality and text alignment of a video by VideoAlign (arXiv 2501.13918), as used in DanceGRPO.

The model class is in DanceGRPO's package `fastvideo`, or in VideoAlign's repository. The class reads
`./Qwen2-VL-2B-Instruct` in `download_path`, or in `work_dir` if `download_path` is empty.
"""

import contextlib
import importlib
import os
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.errors import RewardError
from cosmos_core.rewards.clip_model import select_device
from cosmos_core.rewards.images import DEFAULT_FPS, to_frames
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_INSTALL_HINT = "install av and DanceGRPO's fastvideo in their own environment and name that in venv_python"
_SCORE_KEY_BY_VIDEOALIGN_NAME = {"VQ": "vq_reward", "MQ": "mq_reward", "TA": "ta_reward", "Overall": "overall_reward"}


class DanceGrpoReward:
    """Reward model with VideoAlign's normalised scores of a video: `vq_reward` (visual quality), `mq_reward` (motion
    quality), `ta_reward` (text alignment) and `overall_reward`."""

    def __init__(self, settings: RewardModelSettings) -> None:
        require_packages("dance_grpo", _INSTALL_HINT, "torch", "av", "fastvideo")
        import torch

        if not Path(settings.model_path).is_dir():
            raise RewardError(
                f"the reward 'dance_grpo' cannot load {settings.model_path!r}: no such folder; download "
                f"KwaiVGI/VideoReward and set model_path to its folder"
            )
        videoalign_module: Any = importlib.import_module("fastvideo.models.videoalign.inference")
        model_path, dtype = os.path.abspath(settings.model_path), getattr(torch, settings.dtype)
        with contextlib.chdir(settings.download_path or "."):
            self._inferencer = videoalign_module.VideoVLMRewardInference(
                load_from_pretrained=model_path, device=select_device(settings), dtype=dtype
            )

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        score_columns: ScoreColumns = {key: [] for key in _SCORE_KEY_BY_VIDEOALIGN_NAME.values()}
        with tempfile.TemporaryDirectory() as folder:
            for i, item in enumerate(items):
                video_file = Path(folder, f"{i}.mp4")
                write_video(video_file, item.media, float(item.info.get("video_fps") or DEFAULT_FPS))
                [score_by_videoalign_name] = self._inferencer.reward([str(video_file)], [item.prompt], use_norm=True)
                for name, key in _SCORE_KEY_BY_VIDEOALIGN_NAME.items():
                    score_columns[key].append(float(score_by_videoalign_name[name]))
        return score_columns


def write_video(video_file: Path, media: Any, fps: float) -> None:
    """Write a video as H.264 with lossless luma and subsampled chroma."""
    import av

    frames = to_frames(media)
    with av.open(str(video_file), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        width, height = frames[0].size
        stream.width, stream.height, stream.pix_fmt = width - width % 2, height - height % 2, "yuv420p"
        stream.options = {"qp": "0"}
        for frame in frames:
            frame_pixels = np.asarray(frame)[: stream.height, : stream.width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_pixels), format="rgb24")))
        container.mux(stream.encode())
