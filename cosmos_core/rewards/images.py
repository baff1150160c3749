"""Conversion of images and videos to lists of frames (PIL images), for the rewards that score them."""

from typing import Any

import numpy as np
from PIL import Image

DEFAULT_FPS = 16.0
"""Frames per second of a video whose data row has no column `video_fps`."""


def to_frames(media: Any, max_frames: int = 0) -> list[Image.Image]:
    """Return an image as a list of one frame, or the frames of a video: `max_frames` evenly spaced frames, or all
    frames if `max_frames` is 0. Raise `ValueError` if `media` is neither an image nor a video."""
    if isinstance(media, Image.Image):
        return [media.convert("RGB")]
    if isinstance(media, np.ndarray) and media.ndim == 4 and media.shape[-1] == 3 and len(media):
        num_frames = min(max_frames, len(media)) if max_frames else len(media)
        frame_indices = np.linspace(0, len(media) - 1, num_frames).round().astype(int)
        return [Image.fromarray(np.ascontiguousarray(media[i], dtype=np.uint8)) for i in frame_indices]
    raise ValueError("it scores images (PIL.Image) and videos (uint8 array of frames, height, width and 3)")


def middle_image(media: Any) -> Image.Image:
    """Return an image, or the middle frame of a video."""
    frames = to_frames(media, 3)
    return frames[len(frames) // 2]
